import sys

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from lightning_memopt.callbacks import KeepMetrics, LossPlot
from lightning_memopt.callbacks.metrics_csv import curve, read_rows


class Logging(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().validation_step(batch, batch_idx)["x"])


def fit(folder, callbacks, max_steps=6, ckpt=None, logger=True):
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        val_check_interval=2,
        limit_val_batches=1,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="run", version="") if logger else False,
        callbacks=callbacks,
        enable_checkpointing=any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Logging(), ckpt_path=ckpt)
    return trainer


def test_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    fit(tmp_path, [LossPlot()])
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_curves_are_what_was_logged(tmp_path):
    trainer = fit(tmp_path, [])
    rows = read_rows(trainer.logger)
    assert [step for step, _ in curve(rows, "train_loss")] == list(range(6))
    assert [step for step, _ in curve(rows, "val_loss")] == [1, 3, 5]
    assert curve(rows, "train_loss")[-1][1] == pytest.approx(trainer.callback_metrics["train_loss"].item())
    assert curve(rows, "absent") == []


@pytest.mark.parametrize(
    ("plot", "logger", "words"),
    [(LossPlot(metrics=("absent",)), True, "absent"), (LossPlot(), False, "CSVLogger")],
)
def test_says_why_there_is_no_picture(tmp_path, plot, logger, words):
    with pytest.warns(UserWarning, match=words):
        fit(tmp_path, [plot], logger=logger)
    assert not list(tmp_path.rglob("*.png"))


def test_says_once_that_matplotlib_is_missing(tmp_path, monkeypatch, recwarn):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot = LossPlot()
    fit(tmp_path, [plot])
    fit(tmp_path, [plot])
    assert sum("lightning-memopt[plot]" in str(warning.message) for warning in recwarn) == 1


@pytest.mark.parametrize("keep", [True, False])
def test_metrics_of_the_first_part_survive_a_resume(tmp_path, keep):
    callbacks = [KeepMetrics()] if keep else []
    save = pl.callbacks.ModelCheckpoint(tmp_path, filename="half", enable_version_counter=False)
    before = read_rows(fit(tmp_path, [*callbacks, save], max_steps=4).logger)
    resumed = fit(tmp_path, callbacks, max_steps=6, ckpt=tmp_path / "half.ckpt")
    rows = read_rows(resumed.logger)
    assert [step for step, _ in curve(rows, "train_loss")] == (list(range(6)) if keep else [4, 5])
    if keep:
        assert rows[: len(before)] == before
