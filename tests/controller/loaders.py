"""Datasets and samplers for the loader's tests; importable, so that spawned workers find them."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler


class Numbers(Dataset[torch.Tensor]):
    """Sample i is i; `seconds` to load each."""

    def __init__(self, length: int = 64, seconds: float = 0.0, fail_at: int | None = None) -> None:
        self.length, self.seconds, self.fail_at = length, seconds, fail_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        if index == self.fail_at:
            raise LookupError(f"sample {index} is bad")
        return torch.tensor(index)


class Augmented(Numbers):
    """Draws a random number for each sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + (random.random() < 2.0)


class OnlyAtHome(Numbers):
    """Loads only in the process that created it, as a dataset on a GPU would."""

    def __init__(self, length: int = 64, *, dies: bool = False) -> None:
        super().__init__(length)
        self.pid, self.dies = os.getpid(), dies

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.getpid() != self.pid:
            if self.dies:
                os._exit(9)
            raise RuntimeError("cannot re-initialize in a forked subprocess")
        return super().__getitem__(index)


class OnFile(Numbers):
    """Reads from one open file."""

    def __init__(self, length: int = 64) -> None:
        super().__init__(length)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  it stays open, that is the point

    def __del__(self) -> None:
        self.file.close()


class PositionedSampler(DistributedSampler):  # type: ignore[type-arg]
    """Saves its position, as samplers for resumable training do."""

    yielded = 0

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            self.yielded += 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}


class EagerBatches(Sampler[list[int]]):
    """A batch sampler that counts its iterations, and shuffles from the global generator each time."""

    def __init__(self, length: int = 64, size: int = 4) -> None:
        self.length, self.size, self.asked = length, size, 0

    def __len__(self) -> int:
        return self.length // self.size

    def __iter__(self) -> Iterator[list[int]]:
        self.asked += 1
        order = torch.randperm(self.length).tolist()
        return iter([order[i : i + self.size] for i in range(0, self.length, self.size)])


class MoodySampler(Sampler[int]):
    """Draws from the global generator for every sample."""

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        for _ in range(64):
            yield int(random.random() * 64)
