"""The fused backward: the linear layer's autograd function, and the updater that runs rules when autograd is ready."""

from lightning_memopt.backward.updater import NonFinite, Updater

__all__ = ["NonFinite", "Updater"]
