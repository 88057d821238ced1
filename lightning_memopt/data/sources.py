"""Find text: the files, and the documents in them."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_memopt.errors import MemOptError

FOLDER_SUFFIXES = (".txt", ".jsonl")
# Installed packages lie inside the standard library's folder; tests are long lists of literals.
STDLIB_SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DataError(MemOptError, ValueError):
    """Text that is missing, empty, too short or not what the arguments say."""


class Document(NamedTuple):
    """One text, and a key that stays the same on every machine that has the same files."""

    key: str
    text: str


def stdlib_files() -> list[Path]:
    """The Python sources of the standard library, without its tests, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - STDLIB_SKIP)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found


def find_files(paths: list[str]) -> list[Path]:
    """Expand files, glob patterns and folders, sorted and without repeats.

    A folder stands for every ``.txt`` and ``.jsonl`` file below it; files and patterns may have any ending.

    Raises:
        DataError: An entry names nothing, or a folder without such files.
    """
    found: set[Path] = set()
    for entry in paths:
        entry = os.path.expanduser(entry)
        if os.path.isdir(entry):
            matches = [path for path in Path(entry).rglob("*") if path.suffix in FOLDER_SUFFIXES and path.is_file()]
            problem = f"the folder {entry} holds no .txt or .jsonl file"
        else:
            # A file whose name has brackets in it is a file, not a pattern.
            names = [entry] if os.path.isfile(entry) else glob.glob(entry, recursive=True)
            matches = [Path(name) for name in names if os.path.isfile(name)]
            problem = f"{entry} matches no file"
        if not matches:
            raise DataError(f"data.paths: {problem}.")
        found.update(matches)
    return sorted(found)


def read_documents(files: list[Path], field: str = "text") -> Iterator[Document]:
    """Read every document of the files, in order; empty ones are left out.

    A ``.jsonl`` file has a document in the field ``field`` of each line; any other file is one document of
    UTF-8 text, undecodable bytes replaced.

    Raises:
        DataError: A line of a ``.jsonl`` file is no JSON object or lacks the field.
    """
    root = os.path.commonpath([path.parent for path in files]) if files else ""
    for path in files:
        # Relative and with forward slashes, so that the split is the same wherever the files lie.
        key = Path(os.path.relpath(path, root)).as_posix()
        if path.suffix == ".jsonl":
            documents = _read_jsonl(path, key, field)
        else:
            documents = iter([Document(key, path.read_text(encoding="utf-8", errors="replace"))])
        yield from (document for document in documents if document.text)


def in_validation(key: str, fraction: float) -> bool:
    """Whether a fixed hash puts the document of this key into the validation part."""
    digest = hashlib.blake2b(key.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _read_jsonl(path: Path, key: str, field: str) -> Iterator[Document]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}, line {number}, is not valid JSON: {error}.") from error
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                has = ", ".join(map(repr, record)) if isinstance(record, dict) else "no fields"
                raise DataError(
                    f"{path}, line {number}, has no text in the field {field!r} (it has {has}): "
                    "name the right one with data.field."
                )
            yield Document(f"{key}#{number}", record[field])
