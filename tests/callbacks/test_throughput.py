from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from lightning_memopt.callbacks import Throughput, throughput
from lightning_memopt.callbacks.throughput import peak_memory

STEP_SECONDS = 0.05
VAL_SECONDS = 0.5


class Slow(pl.LightningModule):
    """Its steps move the clock's hands."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.now = 0.0

    def training_step(self, batch, batch_idx):
        self.now += STEP_SECONDS
        return self.layer(torch.zeros(1, 1)).sum()

    def validation_step(self, batch, batch_idx):
        self.now += VAL_SECONDS

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def dataloader(self):
        rows = [{"input_ids": torch.zeros(100, dtype=torch.long)}] * 8
        return torch.utils.data.DataLoader(rows, batch_size=2)

    train_dataloader = val_dataloader = dataloader


def test_tokens_per_second_without_validation(monkeypatch):
    module = Slow()
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: module.now))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=4,
        val_check_interval=2,
        limit_val_batches=1,
        logger=False,
        callbacks=[Throughput()],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module)
    assert module.now == pytest.approx(4 * STEP_SECONDS + 3 * VAL_SECONDS)  # the first is Lightning's sanity check
    assert trainer.callback_metrics["tokens_per_second"].item() == pytest.approx(200 / STEP_SECONDS)
    assert 0.01 < trainer.callback_metrics["memory_gib"].item() < 1000


def test_peak_memory_grows_with_the_process():
    device = torch.device("cpu")
    before = peak_memory(device)
    block = torch.ones(before // 4)  # as much again as the peak so far
    assert peak_memory(device) >= before + block.numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_of_a_gpu_counts_what_is_allocated():
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory(device)
    torch.empty(2**20, device=device)
    assert peak_memory(device) - before == 2**22
