"""`memopt export`: leave Lightning's checkpoint behind and keep a plain model folder."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from lightning_memopt.data import HFTokenizer, load_tokenizer
from lightning_memopt.errors import MemOptError
from lightning_memopt.models import load_module
from lightning_memopt.models.checkpoint import read_checkpoint
from lightning_memopt.sparsity.checkpoint import masks_of


def export(ckpt: str, out: str, masks: bool = False) -> None:
    """Write a trained model as config and safetensors.

    The folder of a Hugging Face model has its tokenizer too and loads with
    ``AutoModelForCausalLM.from_pretrained``; that of the small Llama loads there as well, and with
    ``lightning_memopt.models.load_llama``. Sparse weights are written dense, with zeros.

    Args:
        ckpt: Checkpoint file of a run.
        out: Folder to create.
        masks: Also write the masks of a run with SMET to masks.safetensors, bool, under the names of the weights.

    Raises:
        MemOptError: The checkpoint cannot be read or has no masks, or the folder holds something already.
    """
    module, data = load_module(ckpt)
    folder = Path(out)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise MemOptError(f"--out {out} exists and is no empty folder: name another one or clear it first.")
    # Before anything is written: a tokenizer that cannot be found must not leave half a folder.
    tokenizer = load_tokenizer(data.get("tokenizer", "bytes"))
    kept = masks_of(read_checkpoint(ckpt)) if masks else {}
    folder.mkdir(parents=True, exist_ok=True)
    module.export(folder)
    if masks:
        # The names in model.safetensors are those of the network within the module.
        save_file({name.removeprefix("net."): mask for name, mask in kept.items()}, folder / "masks.safetensors")
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.inner.save_pretrained(folder)
    print(f"Wrote {', '.join(sorted(path.name for path in folder.iterdir()))} to {folder}.")
