"""How a weight gradient is cut into slabs."""

import torch

from lightning_memopt.kernels.slabs import slab_rows


def test_slabs_are_few_on_a_gpu_and_small_on_a_cpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert slab_rows(4096, cpu) * 4096 == 1 << 18
    # A slab of 64 rows would cost a layer of this height 224 launches of each kernel.
    assert -(-14336 // slab_rows(4096, gpu)) == 7
    assert slab_rows(1 << 30, gpu) == slab_rows(1 << 30, cpu) == 1
