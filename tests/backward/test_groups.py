"""Process groups outlive a run, unless it broke off."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_memopt.backward.groups import kept_group, kept_mesh, renew, spoil

TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_runs_share_groups_until_one_breaks_off(alone: None) -> None:
    cpu = torch.device("cpu")
    renew(cpu)
    first = kept_group([[0]], TIMEOUT)
    hosts = kept_group([[0]], TIMEOUT, "gloo")
    renew(cpu)
    assert kept_group([[0]], TIMEOUT) is first and kept_group([[0]], TIMEOUT, "gloo") is hosts
    assert len({id(group) for group in (first, hosts, kept_group([[0]], 2 * TIMEOUT))}) == 3
    spoil()
    renew(cpu)
    again = kept_group([[0]], TIMEOUT)
    assert again is not first
    renew(cpu)
    assert kept_group([[0]], TIMEOUT) is again


def test_runs_share_meshes_until_one_breaks_off(alone: None) -> None:
    cpu = torch.device("cpu")
    renew(cpu)
    first = kept_mesh("cpu", {"a": 1, "b": 1})
    renew(cpu)
    assert kept_mesh("cpu", {"a": 1, "b": 1}) is first and first.mesh_dim_names == ("a", "b")
    assert kept_mesh("cpu", {"a": 1}) is not first
    spoil()
    renew(cpu)
    assert kept_mesh("cpu", {"a": 1, "b": 1}) is not first


def test_groups_of_another_default_group_are_forgotten(alone: None, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    renew(cpu)
    first = kept_group([[0]], TIMEOUT)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/other", rank=0, world_size=1)
    renew(cpu)
    assert kept_group([[0]], TIMEOUT) is not first
