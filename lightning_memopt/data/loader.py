"""A data loader that resumes at the very batch where a checkpoint was saved."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler


class ResumableSampler(DistributedSampler):
    """Shuffles by seed and epoch, the same on every run, and can leave out the start of one epoch.

    Lightning calls ``set_epoch``; with one replica it serves a single device.
    """

    skip = 0

    def __iter__(self) -> Iterator[int]:
        """Indices of this epoch, without the first ``skip``; the epochs after it are whole again."""
        skip, self.skip = self.skip, 0
        return islice(super().__iter__(), skip, None)


class ResumableLoader(DataLoader):
    """A ``DataLoader`` with ``state_dict`` and ``load_state_dict``, which Lightning saves and restores.

    The state counts the batches handed out in an epoch, in the main process, so workers that have read ahead
    do not matter. Where Lightning puts in a sampler of its own (``overfit_batches``), a resumed epoch starts
    over.
    """

    def __init__(self, dataset: Dataset, sampler: Sampler, **kwargs: Any) -> None:
        super().__init__(dataset, sampler=sampler, **kwargs)
        self._batches_done = 0
        self._resume: dict[str, int] = {}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Batches of the epoch; in the epoch of a resumed checkpoint, without those already trained on."""
        # Lightning creates the iterator before it tells the sampler the epoch. As a generator, this runs
        # after.
        state, self._resume = self._resume, {}
        self._batches_done = 0
        if isinstance(self.sampler, ResumableSampler) and state.get("epoch") == self.sampler.epoch:
            self._batches_done = state["batches_done"]
            size = self.batch_size or 1
            before = state.get("batch_size", size)
            self.sampler.skip = self._batches_done * before
            if before != size:
                rank_zero_warn(
                    f"the checkpoint is of the middle of an epoch in batches of {before}, and goes on in batches of "
                    f"{size}: no sample comes twice, but the epoch ends after as many batches as a whole "
                    "one has, so some may be left out. Resume at the end of an epoch, or keep the batch size."
                )
        for batch in super().__iter__():
            self._batches_done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch, the batches handed out in it, and their size."""
        epoch, size = getattr(self.sampler, "epoch", -1), self.batch_size or 1
        return {"epoch": epoch, "batches_done": self._batches_done, "batch_size": size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next pass over that epoch start after its batches already handed out."""
        self._resume = dict(state)
