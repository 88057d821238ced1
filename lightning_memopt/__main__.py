"""``python -m lightning_memopt`` is ``memopt``."""

from lightning_memopt.cli import main

main()
