import math

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memopt.errors import MemOptError
from lightning_memopt.models import LlamaModule
from lightning_memopt.models.causal_lm import lr_factor, parameter_groups

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


def test_norms_and_biases_do_not_decay():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    module[1].bias.requires_grad = False
    matrices, rest = parameter_groups(module)
    assert matrices["params"] == [module[0].weight]
    assert "weight_decay" not in matrices
    assert [id(p) for p in rest["params"]] == [id(module[0].bias), id(module[1].weight)]
    assert rest["weight_decay"] == 0.0


def test_learning_rate_follows_the_schedule_by_step():
    module = LlamaModule(**TINY, optimizer=lambda p: torch.optim.SGD(p, lr=2.0), warmup_steps=2)
    seen = []
    record = pl.callbacks.LambdaCallback(
        on_train_batch_start=lambda trainer, *_: seen.append(trainer.optimizers[0].param_groups[0]["lr"])
    )
    trainer(max_steps=6, callbacks=[record]).fit(module, batches())
    assert seen == pytest.approx([2.0 * lr_factor(step, 6, 2, 0.1) for step in range(6)])


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
