"""From a config to exported weights and masks, through the real program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_memopt.cli import main
from lightning_memopt.models import load_llama

CONFIG = Path(__file__).parents[2] / "configs" / "smet.yaml"
TINY = [
    "--model.init_args.hidden_size=32", "--model.init_args.num_layers=1", "--model.init_args.num_heads=2",
    "--model.init_args.num_kv_heads=1", "--model.init_args.warmup_steps=2", "--data.init_args.paths=[text.txt]",
    "--data.init_args.seq_len=16", "--data.init_args.batch_size=4", "--data.init_args.val_fraction=0.2",
    "--trainer.accelerator=cpu", "--trainer.max_steps=8", "--trainer.val_check_interval=4",
    "--trainer.limit_val_batches=2",
]  # fmt: skip


def test_export_with_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights are dense files with zeros where the masks say; a dense run has no masks to export."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(60)))
    main(["fit", "--config", str(CONFIG), *TINY])
    main(["export", "--ckpt", "runs/smet/last.ckpt", "--out", "model", "--masks=true"])
    weights, masks = load_file("model/model.safetensors"), load_file("model/masks.safetensors")
    assert len(masks) == 7 and masks.keys() <= weights.keys()
    for name, mask in masks.items():
        assert mask.dtype == torch.bool and int(mask.sum()) == round(0.25 * mask.numel())
        assert not weights[name][~mask].any() and weights[name][mask].any()
    name = next(iter(masks))
    assert torch.equal(dict(load_llama("model").named_parameters())[name], weights[name])

    main(["fit", "--config", str(CONFIG.with_name("quickstart.yaml")), *TINY])
    with pytest.raises(SystemExit):
        main(["export", "--ckpt", "runs/quickstart/last.ckpt", "--out", "dense", "--masks=true"])
    assert "has no masks" in capsys.readouterr().err and not Path("dense").exists()
