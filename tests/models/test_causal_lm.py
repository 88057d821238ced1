import math

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memopt.errors import MemOptError
from lightning_memopt.models import LlamaModule, causal_lm
from lightning_memopt.models.causal_lm import lr_factor, targets_of

TINY = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}


def batches(count=4):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(256, (2 * count, 9), generator=generator)
    return DataLoader([{"input_ids": row[:-1], "targets": row[1:]} for row in rows], batch_size=2)


def trainer(**kwargs):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", enable_checkpointing=False, **quiet, **kwargs)


def test_warmup_and_cosine():
    factors = [lr_factor(step, total_steps=10, warmup_steps=2, min_ratio=0.1) for step in range(12)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[6] == pytest.approx(0.55)  # half way
    assert factors[10] == factors[11] == pytest.approx(0.1)
    assert factors[2:] == sorted(factors[2:], reverse=True)


def test_constant_after_warmup():
    assert [lr_factor(step, None, 2, 0.1) for step in (0, 1, 2, 1000)] == [0.5, 1.0, 1.0, 1.0]


def test_learning_rate_follows_the_schedule_by_step():
    module = LlamaModule(**TINY, optimizer=lambda p: torch.optim.SGD(p, lr=2.0), warmup_steps=2)
    seen = []
    record = pl.callbacks.LambdaCallback(
        on_train_batch_start=lambda trainer, *_: seen.append(trainer.optimizers[0].param_groups[0]["lr"])
    )
    trainer(max_steps=6, callbacks=[record]).fit(module, batches())
    assert seen == pytest.approx([2.0 * lr_factor(step, 6, 2, 0.1) for step in range(6)])


def test_a_resumed_cosine_that_ends_elsewhere_is_told(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(causal_lm, "rank_zero_info", said.append)
    first, path = trainer(max_steps=2), tmp_path / "first.ckpt"
    first.fit(LlamaModule(**TINY), batches())
    first.save_checkpoint(path)
    trainer(max_steps=2).fit(LlamaModule(**TINY), batches(), ckpt_path=path)
    assert not said
    trainer(max_steps=4).fit(LlamaModule(**TINY), batches(), ckpt_path=path)
    assert said == [
        "The cosine of the resumed run was to end at step 2, and now ends at step 4: at step 2 the learning rate goes "
        "from 0.1 to 0.55 times the optimizer's own."
    ]


def test_cosine_without_an_end_is_refused():
    with pytest.raises(MemOptError, match=r"max_steps"):
        trainer(max_steps=-1, max_epochs=-1).fit(LlamaModule(**TINY), batches())


def test_validation_loss_is_the_mean_over_tokens():
    module = LlamaModule(**TINY)
    (result,) = trainer().validate(module, batches(), verbose=False)
    rows = torch.stack([row["input_ids"] for row in batches().dataset])
    targets = torch.stack([row["targets"] for row in batches().dataset])
    expected = torch.nn.functional.cross_entropy(module(rows).flatten(0, 1), targets.flatten()).item()
    assert result["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert result["val_ppl"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert trainer().test(module, batches(), verbose=False)[0]["test_loss"] == pytest.approx(expected, rel=1e-5)


def test_labels_are_targets_not_yet_moved_on():
    module = LlamaModule(**TINY)
    ids = torch.arange(10).reshape(2, 5)
    labels = ids.clone()
    labels[0, 2:] = -100
    moved = torch.tensor([[1, -100, -100, -100, -100], [6, 7, 8, 9, -100]])
    assert torch.equal(targets_of({"input_ids": ids, "labels": labels}), moved)
    # Only tokens that count have a part in the mean over batches of different length.
    rows = [{"input_ids": i, "labels": row} for i, row in zip(ids, labels, strict=True)]
    (result,) = trainer().validate(module, DataLoader(rows, batch_size=1), verbose=False)
    expected = torch.nn.functional.cross_entropy(module(ids).flatten(0, 1), moved.flatten()).item()
    assert result["val_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("batch", "words"),
    [({"input_ids": torch.ones(1, 3)}, r"labels.*not \{input_ids\}"), ([torch.ones(1, 3)], r"labels.*not a list")],
)
def test_another_batch_is_told_the_format(batch, words):
    with pytest.raises(MemOptError, match=words):
        LlamaModule(**TINY).training_step(batch, 0)


def test_the_small_llama_refuses_padding_by_a_mask():
    ids, mask = torch.ones(1, 3, dtype=torch.long), torch.tensor([[0, 1, 1]])
    rows = [{"input_ids": ids[0], "labels": ids[0], "attention_mask": mask[0]}]
    with pytest.raises(MemOptError, match=r"pad on the right.*-100"):
        trainer(max_steps=1).fit(LlamaModule(**TINY), DataLoader(rows))
    trainer(max_steps=1).fit(LlamaModule(**TINY), DataLoader([{**rows[0], "attention_mask": mask[0] | 1}]))


@pytest.mark.parametrize("run", ["validate", "test"])
def test_validation_loss_is_exact_in_bf16(run):
    module, losses = LlamaModule(**TINY), []
    token_loss = module._token_loss
    module._token_loss = lambda batch: losses.append(token_loss(batch)) or losses[-1]
    (result,) = getattr(trainer(precision="bf16-true"), run)(module, batches(600), verbose=False)
    expected = torch.stack(losses).double().mean().item()
    assert next(module.parameters()).dtype == torch.bfloat16
    assert len(losses) == 600
    prefix = "val" if run == "validate" else run
    assert result[f"{prefix}_loss"] == pytest.approx(expected, rel=1e-6)
    assert result[f"{prefix}_ppl"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_default_optimizer_is_adamw():
    module = LlamaModule(**TINY, schedule="constant")
    assert type(module.configure_optimizers()) is torch.optim.AdamW
