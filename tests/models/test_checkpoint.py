import lightning.pytorch as pl
import pytest
import torch

from lightning_memopt.errors import MemOptError
from lightning_memopt.models import LlamaModule, load_module


def save(module, path):
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rebuilds_a_module_made_in_python(tmp_path, dtype):
    module = LlamaModule(hidden_size=16, num_layers=1, num_heads=2, optimizer=lambda p: None).to(dtype)
    save(module, tmp_path / "model.ckpt")
    loaded, data = load_module(tmp_path / "model.ckpt")
    assert not loaded.training
    assert data == {}
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
        assert loaded.state_dict()[name].dtype == dtype


def test_an_exported_folder_is_a_model_too(tmp_path):
    pytest.importorskip("transformers")
    module = LlamaModule(hidden_size=16, num_layers=1, num_heads=2)
    module.export(tmp_path)
    loaded, data = load_module(tmp_path)
    ids = torch.arange(5)[None]
    assert not loaded.training
    assert data == {}
    torch.testing.assert_close(loaded(ids), module(ids))


def test_another_class_is_named(tmp_path):
    save(pl.LightningModule(), tmp_path / "other.ckpt")
    with pytest.raises(MemOptError, match="LlamaModule and HFCausalLM"):
        load_module(tmp_path / "other.ckpt")


def test_weights_that_do_not_fit(tmp_path):
    save(LlamaModule(hidden_size=16, num_layers=1, num_heads=2), tmp_path / "model.ckpt")
    checkpoint = torch.load(tmp_path / "model.ckpt", weights_only=True)
    checkpoint["hyper_parameters"]["hidden_size"] = 32
    torch.save(checkpoint, tmp_path / "model.ckpt")
    with pytest.raises(MemOptError, match="do not fit"):
        load_module(tmp_path / "model.ckpt")


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_a_sharded_checkpoint_is_told_by_its_files(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(MemOptError, match="consolidate_checkpoint"):
        load_module(tmp_path)


def test_a_folder_and_a_plain_torch_file_are_refused(tmp_path):
    with pytest.raises(MemOptError, match="folder without a checkpoint"):
        load_module(tmp_path)
    torch.save({"weights": 1}, tmp_path / "file.pt")
    with pytest.raises(MemOptError, match="state_dict"):
        load_module(tmp_path / "file.pt")
