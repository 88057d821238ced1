"""The `memopt` program: LightningCLI's commands, and ours."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

import lightning_memopt  # noqa: F401  # registers the strategies before any Trainer exists

# Imported for their short names in YAML: `class_path: LlamaModule` resolves only once the class is known.
from lightning_memopt import callbacks, data, models  # noqa: F401
from lightning_memopt.callbacks.metrics_csv import csv_logger
from lightning_memopt.commands import COMMANDS
from lightning_memopt.errors import MemOptError

# Of a config; what an option that changes one of its values begins with.
SECTIONS = ("model", "data", "trainer")
CKPT_KEYWORDS = ("best", "last", "hpc", "registry")


class ShortErrorParser(ArgumentParser):
    """Says what is wrong without first printing pages of usage."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Print the message and leave with code 2."""
        if not self.exit_on_error:
            return super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog.replace(" [options]", "")
        self.exit(2, f"{prog}: error: {message}\n(`{prog} --help` lists all options.)\n")


class MemOptParser(ShortErrorParser, LightningArgumentParser):
    """Lightning's parser with short errors."""


class SaveConfig(SaveConfigCallback):
    """Saves the resolved config beside the logs when training starts; without a logger nowhere.

    Lightning would then write it into the working folder, over the very file that the user passed. It also saves at
    set-up, when the CSV logger has already removed the metrics of the run before: both would be lost to a run that is
    refused.
    """

    _metrics: tuple[Path, bytes] | None = None

    def remember(self, trainer: Trainer) -> None:
        """Keep the metrics of the run before until this one trains."""
        logger = csv_logger(trainer)
        path = Path(logger.log_dir, "metrics.csv") if logger is not None and trainer.is_global_zero else None
        if path is not None and path.is_file():
            self._metrics = path, path.read_bytes()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save nothing yet."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, and let go of the run before."""
        if trainer.loggers:
            super().setup(trainer, pl_module, "fit")
        self._metrics = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put back the metrics of the run before, if this one never trained."""
        if self._metrics is not None:
            path, content = self._metrics
            path.write_bytes(content)


class MemOptCLI(LightningCLI):
    """LightningCLI for any LightningModule and data module, with the package's strategies known by name.

    Only ``fit`` writes into the run's folder: the CSV logger and the saved config of another command would
    replace those of the training.
    """

    def __init__(self, args: list[str] | None = None, **kwargs: Any) -> None:
        commands = ", ".join(COMMANDS)
        kwargs.setdefault("seed_everything_default", 0)
        kwargs.setdefault(
            "parser_kwargs",
            {
                "prog": "memopt",
                "description": f"Train models in less memory. There are also the commands {commands}.",
            },
        )
        super().__init__(
            args=args,
            parser_class=MemOptParser,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )

    def instantiate_classes(self) -> None:
        """Build module, data and trainer; a value that one of them refuses is the config's mistake."""
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as error:
            raise _own_error(error) or MemOptError(str(error)) from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer, outside ``fit`` without what would overwrite the run's files."""
        if self.subcommand not in (None, "fit"):
            self.save_config_callback = None
            trainer = self._get(self.config_init, "trainer")
            loggers = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
            kept = [logger for logger in loggers if not isinstance(logger, CSVLogger | bool | None)]
            kwargs.setdefault("logger", kept or False)
        return super().instantiate_trainer(**kwargs)

    def before_fit(self) -> None:
        """Look at the run's folder before the logger does."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, SaveConfig):
                callback.remember(self.trainer)

    def _parse_ckpt_path(self) -> None:
        """Check the checkpoint before its hyperparameters are read from it."""
        path = self.config[self.config.subcommand].get("ckpt_path") if self.config.get("subcommand") else None
        if path and path not in CKPT_KEYWORDS and "://" not in str(path) and not Path(path).exists():
            raise MemOptError(f"There is no checkpoint {path} (--ckpt_path).")
        asked, model = self._model_options(), self._class_of_model()
        try:
            super()._parse_ckpt_path()
        except Exception as error:  # torch raises half a dozen unrelated types for a broken file
            raise MemOptError(f"{path} is not a checkpoint that torch can read (--ckpt_path).") from error
        if self._class_of_model() != model:
            raise MemOptError(
                f"{path} is a checkpoint of {self._class_of_model()}, and the config's model is {model} (--ckpt_path)."
            )
        kept = self._model_options()
        # None is what an option has that nobody gave.
        given = [k for k in asked if k in kept and asked[k] is not None and kept[k] != asked[k]]
        changed = [f"{k}={_short(kept[k])}, not {_short(asked[k])}" for k in given]
        if changed:
            rank_zero_warn(f"{path} keeps the model options it was trained with: {'; '.join(changed)}.")

    def _class_of_model(self) -> str | None:
        """The model's class as the config has it now."""
        return getattr(self._model_config(), "class_path", None)

    def _model_options(self) -> dict[str, Any]:
        """The model's arguments as the config has them now."""
        options = getattr(self._model_config(), "init_args", None)
        return options.as_dict() if options is not None else {}

    def _model_config(self) -> Any:
        config = self.config[self.config.subcommand] if self.config.get("subcommand") else self.config
        return config.get("model")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class ConfigCLI(MemOptCLI):
    """Checks a config as ``memopt fit`` would, and builds its parts on demand instead of running anything."""

    def __init__(self, args: list[str]) -> None:
        super().__init__(args=args, run=False, seed_everything_default=False)

    def instantiate_classes(self) -> None:
        """Build nothing yet."""

    def build(self) -> None:
        """Set ``model``, ``datamodule`` and ``config_init``, whose ``trainer`` holds strategy and callbacks."""
        try:
            self.config_init = self.parser.instantiate_classes(self.config)
        except (ValueError, MisconfigurationException) as error:
            raise _own_error(error) or MemOptError(str(error)) from error
        self.datamodule = self._get(self.config_init, "data")
        self.model = self._get(self.config_init, "model")
        self._add_configure_optimizers_method_to_model(self.subcommand)


def main(args: list[str] | None = None) -> None:
    """Run `memopt` with the given arguments, by default those of the process.

    A mistake of the user ends with one message on stderr and exit code 2; with ``MEMOPT_TRACEBACK=1`` in the
    environment the traceback comes too.
    """
    words = sys.argv[1:] if args is None else args
    try:
        if words and words[0] in COMMANDS:
            run_command(words[0], words[1:])
        elif words and not words[0].startswith("-") and words[0] not in MemOptCLI.subcommands():
            known = ", ".join([*MemOptCLI.subcommands(), *COMMANDS])
            raise MemOptError(f"There is no command {words[0]!r}. There are {known}.")
        else:
            MemOptCLI(args if words else ["--help"])
    except (MemOptError, MisconfigurationException, RuntimeError, KeyError) as error:
        if not isinstance(error, (MemOptError, MisconfigurationException)):
            error = _other_checkpoint(error)
        if os.environ.get("MEMOPT_TRACEBACK", "0") not in ("", "0"):
            raise
        print(f"memopt: error: {error}", file=sys.stderr)
        sys.exit(2)


def run_command(name: str, args: list[str]) -> None:
    """Run one of our own commands: the options are the function's parameters, with dashes or underscores."""
    command = COMMANDS[name]
    switches = {f"--{p.name}" for p in inspect.signature(command).parameters.values() if isinstance(p.default, bool)}
    args, overrides = _split(args) if "overrides" in inspect.signature(command).parameters else (args, {})
    flags = [_with_underscores(arg) if arg.startswith("--") else arg for arg in args]
    for i, flag in enumerate(flags):
        if flag in switches and (i + 1 == len(flags) or flags[i + 1].startswith("--")):
            flags[i] = f"{flag}=true"
    summary = (command.__doc__ or "").split("\n\n    Args:")[0]
    parser = ShortErrorParser(prog=f"memopt {name}", description=" ".join(summary.split()))
    parser.add_function_arguments(command, as_group=False, skip={"overrides"})
    options = parser.parse_args(flags).as_dict()
    command(**options, overrides=overrides) if overrides else command(**options)


def _split(args: list[str]) -> tuple[list[str], dict[str, str]]:
    """A command's own arguments, and those that change a value of the config it reads, by dotted name."""
    own, overrides, rest = [], {}, list(args)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if option[:2] != "--" or option[2:].partition(".")[0] not in SECTIONS:
            own.append(option + equals + value)
        elif equals or not rest:
            overrides[option[2:]] = value
        else:
            overrides[option[2:]] = rest.pop(0)
    return own, overrides


def _other_checkpoint(error: RuntimeError | KeyError) -> MemOptError:
    """In one sentence, what Lightning and torch say of a checkpoint that is not the module's; else the error itself."""
    if "Error(s) in loading state_dict" in str(error):
        return MemOptError(
            "The checkpoint's weights are not those of this model (--ckpt_path): names or shapes differ."
        )
    if "pytorch-lightning_version" in str(error):
        return MemOptError("The checkpoint was not saved by Lightning, so it cannot be resumed (--ckpt_path).")
    raise error


def _own_error(error: BaseException | None) -> MemOptError | None:
    """Our own error at the root of a chain, which jsonargparse wraps in its own words."""
    found = None
    while error is not None:
        found = error if isinstance(error, MemOptError) else found
        error = error.__cause__ or error.__context__
    return found


def _with_underscores(flag: str) -> str:
    option, equals, value = flag.partition("=")
    return "--" + option[2:].replace("-", "_") + equals + value


if __name__ == "__main__":
    main()
