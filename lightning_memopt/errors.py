"""The package's exceptions: a user's mistake, told in a sentence that names the way out."""

from __future__ import annotations


class MemOptError(Exception):
    """Base of every error raised on purpose by this package."""


class UnsupportedError(MemOptError, ValueError):
    """A combination that cannot be done exactly, refused at set-up.

    The message says what was asked for, where, and what works instead.
    """


class UpdateError(MemOptError, RuntimeError):
    """A training step that cannot be carried out exactly, for example a second update of one weight."""


class NonFiniteError(MemOptError, FloatingPointError):
    """A gradient held NaN or infinity under ``nonfinite="raise"``; names the parameter and the step."""
