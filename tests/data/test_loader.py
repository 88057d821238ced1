"""A resumed run must see exactly the batches that the interrupted one had not yet seen."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_memopt.data import TextDataModule
from lightning_memopt.data.loader import ResumableLoader, ResumableSampler


class Recorder(pl.LightningModule):
    """Keeps the first token of every training batch."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].flatten().tolist())
        return self.layer(torch.zeros(1, 1)).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(33 + i % 90) for i in range(200)))
    return str(path)


def run(text, folder, max_steps, ckpt=None, num_workers=0, batch_size=4, **kwargs):
    """Batches seen by a run, and its last checkpoint."""
    module = Recorder()
    save = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, filename="last", enable_version_counter=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        logger=False,
        callbacks=[save],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **kwargs,
    )
    data = TextDataModule([text], seq_len=4, batch_size=batch_size, num_workers=num_workers, val_fraction=0.1)
    trainer.fit(module, data, ckpt_path=ckpt)
    return module.seen, save.last_model_path or save.best_model_path


# An epoch has 11 batches: cut within the first, at its end, within the second, and with epochs cut short.
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("stop", "kwargs"),
    [
        (4, {}),
        (11, {}),
        (15, {}),
        (6, {"limit_train_batches": 6}),
        (8, {"limit_train_batches": 6}),
        (6, {"val_check_interval": 3}),
        (11, {"val_check_interval": 11}),
        (4, {"accumulate_grad_batches": 2}),
    ],
)
def test_resume_sees_the_rest(text, tmp_path, stop, kwargs, workers):
    whole, _ = run(text, tmp_path / "whole", 26, num_workers=workers, **kwargs)
    first, ckpt = run(text, tmp_path / "first", stop, num_workers=workers, **kwargs)
    rest, _ = run(text, tmp_path / "rest", 26, ckpt=ckpt, num_workers=workers, **kwargs)
    assert first + rest == whole


def test_another_batch_size_repeats_nothing(text, tmp_path):
    """In the middle of an epoch; what may be left out is said."""
    first, ckpt = run(text, tmp_path / "first", 4)
    with pytest.warns(UserWarning, match="epoch in batches of 4, and goes on in batches of 2: no sample comes twice"):
        rest, _ = run(text, tmp_path / "rest", 20, ckpt=ckpt, batch_size=2, max_epochs=1)
    rows = [tuple(batch[i : i + 4]) for batch in first + rest for i in range(0, len(batch), 4)]
    assert len(rest[0]) == 8 and len(rows) == len(set(rows))


def test_every_window_once_per_epoch(text, tmp_path):
    seen, _ = run(text, tmp_path, 11)
    rows = [tuple(batch[i : i + 4]) for batch in seen for i in range(0, 16, 4)]
    assert len(rows) == 44


def test_overfitting_repeats_its_batches(text, tmp_path):
    seen, _ = run(text, tmp_path, 6, overfit_batches=2)
    assert seen[:2] == seen[2:4] == seen[4:6]
    assert seen[0] != seen[1]


def test_replicas_share_an_epoch():
    data = torch.arange(12)
    parts = []
    for rank in range(2):
        sampler = ResumableSampler(data, num_replicas=2, rank=rank, seed=3)
        parts.append(torch.cat(list(ResumableLoader(data, sampler=sampler, batch_size=2))).tolist())
    assert sorted(parts[0] + parts[1]) == data.tolist()
