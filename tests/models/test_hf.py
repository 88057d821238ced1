import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch.utils.data import DataLoader

from lightning_memopt.cli import main
from lightning_memopt.data import load_tokenizer
from lightning_memopt.errors import MemOptError
from lightning_memopt.models import HFCausalLM, load_module
from lightning_memopt.models.hf import MissingExtraError

transformers = pytest.importorskip("transformers")
CONFIG = Path(__file__).parents[2] / "configs" / "hf_finetune.yaml"
TEXT = "".join(f"{i} squared is {i * i}.\n" for i in range(80))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A saved model and tokenizer, as one would download them, but with 300 tokens and random weights."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>"]
    training = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], training)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def fit(module, rows, **kwargs):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=1, enable_checkpointing=False, **quiet, **kwargs)
    trainer.fit(module, DataLoader(rows, batch_size=len(rows)))


def test_weights_come_from_the_folder_in_float32(model_folder):
    module = HFCausalLM(str(model_folder))
    saved = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for name, value in saved.state_dict().items():
        assert module.net.state_dict()[name].dtype == torch.float32
        assert torch.equal(module.net.state_dict()[name], value)


def test_from_config_starts_from_random_weights(model_folder):
    pretrained, fresh = HFCausalLM(str(model_folder)), HFCausalLM(str(model_folder), from_config=True)
    assert fresh.vocab_size == pretrained.vocab_size == 300
    assert fresh.net.dtype == torch.float32
    assert not torch.equal(fresh.net.lm_head.weight, pretrained.net.lm_head.weight)


def test_gradient_checkpointing_reaches_the_model(model_folder):
    assert HFCausalLM(str(model_folder), gradient_checkpointing=True).net.is_gradient_checkpointing


@pytest.mark.parametrize("from_config", [True, False])
def test_saved_weights_train_as_fresh_ones_do(model_folder, from_config):
    """In training mode: with gradient checkpointing a layer runs once more in the backward pass."""
    module = HFCausalLM(str(model_folder), from_config, gradient_checkpointing=True, schedule="constant")
    calls = []
    module.net.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(module.net.training))
    fit(module, [{"input_ids": torch.arange(4), "targets": torch.arange(4)}])
    assert calls == [True, True]


def padded_rows(side):
    """Two rows as a Hugging Face tokenizer and collator make them, the second padded."""
    ids, mask = torch.arange(1, 17).reshape(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, slice(0, 3) if side == "left" else slice(5, 8)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return [{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask, labels, strict=True)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("strategy", ["auto", "forge"])
def test_a_padded_batch_has_the_loss_of_transformers(model_folder, side, fast, strategy):
    module = HFCausalLM(str(model_folder), chunked_loss=fast, fused_layers=fast, schedule="constant")
    batch = torch.utils.data.default_collate(padded_rows(side))
    expected = module.net.eval()(**batch).loss.item()
    module.train()
    module.log = lambda name, value, **_: losses.append(value.item())
    losses = []
    fit(module, padded_rows(side), strategy=strategy)
    assert losses == pytest.approx([expected], rel=1e-5)


def test_a_mask_without_zeros_is_not_passed_on(model_folder):
    """So that torch's own causal attention is taken."""
    module, seen = HFCausalLM(str(model_folder), schedule="constant"), []
    module.net.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    rows = [{**row, "attention_mask": torch.ones(8, dtype=torch.long)} for row in padded_rows("left")]
    fit(module, rows)
    assert [kwargs.get("attention_mask") for kwargs in seen] == [None]


def test_a_router_loss_that_is_left_out_is_told():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    experts = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    rows = [{"input_ids": torch.arange(4), "targets": torch.arange(4)}]
    for asked in (True, False):
        module = HFCausalLM(
            architecture={"model_type": "mixtral", **sizes, **experts, "output_router_logits": asked},
            schedule="constant",
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(module, rows)
        assert sum("router" in str(warning.message) for warning in caught) == asked


def test_finetune_generate_and_export(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    Path("texts", "squares.txt").write_text(TEXT)
    source = tmp_path / "base"
    source.symlink_to(model_folder)
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["init_args"] |= {"name_or_path": str(source), "warmup_steps": 0}
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 0.01
    config["data"]["init_args"] |= {"tokenizer": str(model_folder), "seq_len": 16, "val_fraction": 0.2}
    config["trainer"] |= {
        "accelerator": "cpu",
        "max_steps": 4,
        "val_check_interval": 2,
        "limit_val_batches": 1,
    }
    Path("config.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "config.yaml"])

    source.unlink()  # the checkpoint alone must do
    ckpt = "runs/hf_finetune/last.ckpt"
    module, data = load_module(ckpt)
    assert data["tokenizer"] == str(model_folder)
    before = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    assert not torch.equal(module.net.lm_head.weight, before.lm_head.weight)

    capsys.readouterr()
    main(["generate", "--ckpt", ckpt, "--prompt", "7 squared", "--max-new-tokens=8", "--temperature=0"])
    assert capsys.readouterr().out.startswith("7 squared")

    main(["export", "--ckpt", ckpt, "--out", "exported"])
    exported = transformers.AutoModelForCausalLM.from_pretrained("exported")
    ids = load_tokenizer("exported").encode("3 squared is").long()[None]
    torch.testing.assert_close(exported(ids).logits, module(ids))

    said = []
    for source in (ckpt, "exported"):
        main(["generate", "--ckpt", source, "--prompt", "7 squared", "--max-new-tokens=8", "--temperature=0"])
        said.append(capsys.readouterr().out)
    assert said[0].endswith(said[1])  # after what export printed

    # Resuming reads architecture and weights from the checkpoint too.
    main(["fit", "--config", "config.yaml", "--trainer.max_steps=5", f"--ckpt_path={ckpt}"])
    assert torch.load(ckpt, weights_only=True)["global_step"] == 5


def test_sampling_is_reproducible_and_bounded(model_folder):
    module = HFCausalLM(str(model_folder)).eval()
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(module.generate(torch.tensor([5, 6]), 12, temperature=2.0).tolist())
    assert len(texts[0]) == 12
    assert texts[0] == texts[1] != texts[2]


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(MemOptError, match=str(tmp_path)):
        HFCausalLM(str(tmp_path))


def test_missing_transformers_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"lightning-memopt\[hf\]"):
        HFCausalLM("anything")
    with pytest.raises(MissingExtraError, match=r"lightning-memopt\[hf\]"):
        load_tokenizer("anything")
