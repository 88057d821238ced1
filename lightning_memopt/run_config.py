"""Reading a run's YAML file without starting the run: its parts, checked by the parser of ``memopt fit``.

Besides the sections of ``memopt fit`` the file may have one of its own, ``bench``, which only the commands ``plan`` and
``bench`` know.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import yaml

from lightning_memopt.errors import MemOptError

if TYPE_CHECKING:
    from lightning_memopt.cli import ConfigCLI

# dtype of the weights under each of the Trainer's precisions; in all others they are float32.
WEIGHT_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64, "64": torch.float64}
# What `fit` takes beside the sections: in a config that a run has saved, or that ``--print_config`` has written.
FIT_ONLY = ("ckpt_path", "weights_only")


@dataclass
class RunConfig:
    """A checked file.

    Attributes:
        path: The file.
        bench: Its section ``bench``.
        cli: Everything else.
    """

    path: Path
    bench: dict[str, Any]
    cli: ConfigCLI

    @classmethod
    def read(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
        """Parse and check the file.

        Args:
            path: A YAML file as for ``memopt fit``; what only a start of the run takes is left aside.
            overrides: Values by dotted name, which replace those of the file.

        Raises:
            MemOptError: The file is missing or no mapping. Other mistakes end as they do in ``memopt fit``.
        """
        from lightning_memopt.cli import ConfigCLI  # which imports the commands that read configs

        path = Path(path)
        if not path.is_file():
            raise MemOptError(f"There is no config file {path} (--config).")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise MemOptError(f"{path} is no YAML mapping with the sections model, data and trainer.")
        bench = content.pop("bench", None) or {}
        for key in FIT_ONLY:
            content.pop(key, None)
        args = [f"--{name}={value}" for name, value in (overrides or {}).items()]
        with tempfile.TemporaryDirectory() as folder:  # the parser takes files only
            copy = Path(folder, path.name)
            copy.write_text(yaml.safe_dump(content), encoding="utf-8")
            with warnings.catch_warnings():
                # Lightning's advice against arguments that do not come from the command line.
                warnings.filterwarnings("ignore", message=".*args parameter is intended.*")
                return cls(path, bench, ConfigCLI(["--config", str(copy), *args]))

    @property
    def trainer(self) -> Any:
        """The Trainer's arguments as parsed; after `build`, with strategy and callbacks built."""
        config = self.cli.config_init if hasattr(self.cli, "config_init") else self.cli.config
        return config.trainer

    @property
    def precision(self) -> str:
        """The Trainer's precision, "32-true" where none is set."""
        value = self.trainer.precision
        return "32-true" if value is None else str(value)

    @property
    def weight_dtype(self) -> torch.dtype:
        """What the Trainer keeps weights in."""
        return WEIGHT_DTYPES.get(self.precision, torch.float32)

    def build(self, device: str | torch.device) -> tuple[pl.LightningModule, pl.LightningDataModule | None]:
        """Build module and data module, the weights at once on `device` in the dtype they train in.

        ``memopt fit`` starts from float32 weights in host memory; for a large model that takes minutes.
        """
        with torch.device(device), default_dtype(self.weight_dtype):
            self.cli.build()
        return self.cli.model, self.cli.datamodule


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floating point tensors of `dtype` unless told otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
