"""Loads the demo's training text: the sources of the Python standard library, which every machine has.

A download would need a network, and random bytes cannot be learned.  Files are read in the order of a hash of their
names, so that the size limit leaves a fair sample instead of `asyncio` alone.  A file belongs entirely to the training
or to the validation part.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["TextWindows", "TrainingText", "load_corpus", "source_files"]

CORPUS_BYTES_MAX = 16 * 1024 * 1024
"""Far more than a demo reads in a few minutes; bounds its memory."""

VALIDATION_EVERY = 16
"""One file in this many is held out, by a hash of its name."""

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3"})
"""Not the library itself (packages), or broken on purpose (tests of the parser)."""


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Two flat uint8 tensors, from this number of source files."""

    train: Tensor
    validation: Tensor
    files: int


def source_files(root: Path) -> list[Path]:
    """Return the library's `.py` files below `root`, in an order that depends only on their names."""
    found = [
        path
        for path in root.rglob("*.py")
        if not _LEFT_OUT.intersection(path.relative_to(root).parts) and path.is_file()
    ]
    return sorted(found, key=lambda path: (_hash(path, root), str(path.relative_to(root))))


def load_corpus(root: Path | None = None, *, bytes_max: int = CORPUS_BYTES_MAX) -> TrainingText:
    """Read the sources below `root` (None: this Python's standard library), at most `bytes_max` bytes.

    Raises:
        ValueError: there is too little text for training and validation.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    train, validation = bytearray(), bytearray()
    files = 0
    for path in source_files(root):
        try:
            text = path.read_bytes()
        except OSError:
            continue  # not readable for this user
        if len(train) + len(validation) + len(text) > bytes_max:
            break
        part = validation if _hash(path, root) % VALIDATION_EVERY == 0 else train
        part += text
        files += 1
    if not train or not validation:
        raise ValueError(f"{root} holds {files} readable Python sources: too few for training and validation")
    return TrainingText(_as_tensor(train), _as_tensor(validation), files)


class TextWindows(Dataset[Tensor]):
    """Disjoint windows of `context` + 1 bytes: the inputs, and shifted by one the targets."""

    def __init__(self, text: Tensor, context: int) -> None:
        self._text = text
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        return self._text[start : start + self._context + 1]

    def batch(self, indices: Iterable[int]) -> Tensor:
        """Return the windows at `indices` as one (len, context + 1) tensor."""
        return torch.stack([self[index] for index in indices])


def _hash(path: Path, root: Path) -> int:
    return zlib.crc32(str(path.relative_to(root)).encode())


def _as_tensor(text: bytearray) -> Tensor:
    return torch.frombuffer(text, dtype=torch.uint8)
