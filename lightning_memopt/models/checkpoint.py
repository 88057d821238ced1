"""Read a module back from nothing but its checkpoint, or from the folder it was exported to."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from lightning_memopt.errors import MemOptError
from lightning_memopt.models.causal_lm import CausalLM
from lightning_memopt.models.hf import HFCausalLM
from lightning_memopt.models.llama_module import LlamaModule
from lightning_memopt.strategies.sharded_checkpoint import is_checkpoint

# Only these are built from a checkpoint: importing whatever class a file names would run its author's code.
MODULES: dict[str, type[CausalLM]] = {"LlamaModule": LlamaModule, "HFCausalLM": HFCausalLM}


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The checkpoint's dictionary, with its tensors on the CPU.

    Raises:
        MemOptError: There is no such file, or it is not a checkpoint.
    """
    path = Path(path)
    if is_checkpoint(path):
        raise MemOptError(
            f"{path} is the folder of a sharded checkpoint; first make one file of it: "
            f"python -m lightning.fabric.utilities.consolidate_checkpoint {path}"
        )
    if path.is_dir():
        raise MemOptError(f"{path} is a folder without a checkpoint in it that could be read: name a checkpoint file.")
    if not path.is_file():
        raise MemOptError(f"There is no checkpoint {path}.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen unrelated types for a broken file
        raise MemOptError(f"{path} is not a checkpoint that torch can read.") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise MemOptError(f"{path} holds no Lightning checkpoint: there is no 'state_dict' in it.")
    return checkpoint


def load_module(path: str | Path) -> tuple[CausalLM, dict[str, Any]]:
    """Rebuild the module that a checkpoint was saved from, in evaluation mode on the CPU.

    Args:
        path: A checkpoint file of a run that trained :class:`LlamaModule` or :class:`HFCausalLM`, or the folder of a
            saved Hugging Face model, which ``memopt export`` writes too.

    Returns:
        The module, its weights in the checkpoint's dtype (of a folder, in float32), and the hyperparameters of the
        run's data module (empty where there was none; of a folder, its tokenizer).

    Raises:
        MemOptError: The file is missing or broken, or was saved by another module.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        own_tokenizer = (folder / "tokenizer_config.json").is_file()
        return HFCausalLM(str(folder)).eval(), {"tokenizer": str(folder)} if own_tokenizer else {}
    checkpoint = read_checkpoint(path)
    name = checkpoint.get("module_class")
    module_class = MODULES.get(name) if isinstance(name, str) else None
    if module_class is None:
        raise MemOptError(
            f"{path} was saved by {name or 'a module of another package'}; "
            f"only checkpoints of {' and '.join(MODULES)} can be rebuilt from the file alone."
        )
    accepted = inspect.signature(module_class).parameters
    hparams = {key: value for key, value in checkpoint["hyper_parameters"].items() if key in accepted}
    module = module_class(**hparams)
    weights = checkpoint["state_dict"]
    dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), torch.float32)
    try:
        module.to(dtype).load_state_dict(weights)
    except RuntimeError as error:
        raise MemOptError(f"The weights in {path} do not fit the model its hyperparameters describe.") from error
    return module.eval(), dict(checkpoint.get("datamodule_hyper_parameters", {}))
