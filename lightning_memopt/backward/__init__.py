"""The fused backward: the linear layer's autograd function, and the updater that runs rules when autograd is ready."""

from lightning_memopt.backward.clipping import Clip
from lightning_memopt.backward.nonfinite import NonFinite
from lightning_memopt.backward.updater import Updater

__all__ = ["Clip", "NonFinite", "Updater"]
