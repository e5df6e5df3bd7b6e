"""The lengths of a loader's batches are what its sampler named; what goes wrong in noting them is not the script's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from pacecar.profiler.hook.batch_lengths import BatchLengths

SAMPLES = 10


def loader(**options: object) -> DataLoader[torch.Tensor]:
    return DataLoader([torch.zeros(2)] * SAMPLES, **options)  # type: ignore[arg-type]  # a list is a data set


@pytest.fixture
def lengths() -> Iterator[BatchLengths]:
    lengths = BatchLengths()
    lengths.install()
    yield lengths
    lengths.remove()


def test_each_batch_has_the_length_that_its_sampler_named(lengths: BatchLengths) -> None:
    batches = iter(loader(batch_size=4))
    assert [lengths.take(batches) for _ in batches] == [4, 4, 2]
    assert lengths.take(batches) is None


def test_without_a_batch_sampler_nothing_is_known(lengths: BatchLengths) -> None:
    batches = iter(loader(batch_size=None))
    next(batches)
    assert lengths.take(batches) is None


def test_a_note_that_fails_costs_the_script_no_batch(lengths: BatchLengths, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BatchLengths()
    monkeypatch.setattr(broken, "_note", lambda *_: 1 / 0)
    lengths.remove()
    broken.install()
    try:
        assert len(list(loader(batch_size=4))) == 3
    finally:
        broken.remove()


def test_torchs_method_is_put_back_unless_another_was_put_there_since() -> None:
    kind = type(iter(loader())).__mro__[1]
    before = kind._next_index  # type: ignore[attr-defined]
    one, other = BatchLengths(), BatchLengths()
    one.install()
    other.install()
    one.remove()
    assert kind._next_index is not before  # type: ignore[attr-defined]  # the other observes through it
    other.remove()
    kind._next_index = before  # type: ignore[attr-defined]
