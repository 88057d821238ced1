import warnings

import harness
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

import lightning_memopt as memopt
from lightning_memopt.callbacks import MemoryMonitor, memory_monitor
from lightning_memopt.callbacks.metrics_csv import read_rows

GIB = 2**30


def logged(tmp_path, strategy="auto", **options):
    logger = CSVLogger(tmp_path, version="")
    options = {"logger": logger, "log_every_n_steps": 1, "max_steps": 3} | options
    run = harness.fit(harness.Module(), strategy, callbacks=[MemoryMonitor()], **options)
    return run, read_rows(logger)


def test_bytes_by_kind_are_those_of_the_tensors(tmp_path):
    run, rows = logged(tmp_path)
    weights = sum(p.nbytes for p in run.module.parameters())  # the tied weight comes once
    last = rows[-1]
    assert last["memory/weights"] * GIB == pytest.approx(weights)
    assert last["memory/gradients"] * GIB == pytest.approx(weights)
    steps = 4 * len(list(run.module.parameters()))
    assert last["memory/optimizer_state"] * GIB == pytest.approx(2 * weights + steps)
    assert last["memory/peak"] > last["memory/current"] > 0
    assert "memory/activations" not in last  # a CPU cannot tell


def test_no_gradient_is_held_under_forge(tmp_path):
    assert logged(tmp_path, "forge")[1][-1]["memory/gradients"] == 0


def test_waiting_factors_count_as_gradients(tmp_path):
    strategy = memopt.ForgeStrategy()
    assert logged(tmp_path, strategy, gradient_clip_val=1.0)[1][-1]["memory/gradients"] > 0


def test_it_looks_every_so_many_steps(monkeypatch):
    looks = []
    monkeypatch.setattr(memory_monitor, "on_device", lambda device: looks.append(device))
    harness.fit(harness.Module(), callbacks=[MemoryMonitor(every_n_steps=3)], max_steps=6)
    assert len(looks) == 2


@pytest.mark.parametrize("free", [0.04, 0.06])
def test_a_full_gpu_is_told_once_with_kind_and_remedy(tmp_path, monkeypatch, free):
    full = memory_monitor.Device(allocated=50 * GIB, peak=int((1 - free) * 100 * GIB), available=100 * GIB)
    monkeypatch.setattr(memory_monitor, "on_device", lambda device: full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, rows = logged(tmp_path)
    told = [str(w.message) for w in caught if "were free at the peak" in str(w.message)]
    assert len(told) == (1 if free < 0.05 else 0)
    if told:
        assert told[0].startswith("Only 4.00 of 100.0 GiB")
        assert "activations" in told[0] and "checkpoint" in told[0]
    assert rows[-1]["memory/activations"] == pytest.approx((1 - free) * 100, rel=1e-3)
    assert rows[-1]["memory/current"] == 50


def test_views_and_shared_storages_count_once():
    x = torch.zeros(10)
    assert memory_monitor.size([x, x[2:], x.view(2, 5), None, 3]) == 40
