"""The lengths of a loader's batches are what its sampler named; what goes wrong in noting them is not the script's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pacecar.profiler.hook.loading import BatchLengths

SAMPLES = 10


def loader(**options: object) -> DataLoader[torch.Tensor]:
    return DataLoader([torch.zeros(2)] * SAMPLES, **options)  # type: ignore[arg-type]  # a list is a data set


class Torn(list[torch.Tensor]):
    """A data set whose first sample cannot be read."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(2)] * SAMPLES)

    def __getitem__(self, index: Any) -> Any:
        if index == 0:
            raise OSError("torn")
        return super().__getitem__(index)


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


def test_one_index_of_which_the_script_makes_a_batch_itself_says_nothing(lengths: BatchLengths) -> None:
    whole = iter(loader(batch_size=1, collate_fn=lambda samples: samples[0].expand(8, 2)))
    assert [lengths.take(whole) for _ in whole] == [None] * SAMPLES
    several = iter(loader(batch_size=5, collate_fn=torch.stack))
    assert [lengths.take(several) for _ in several] == [5, 5]
    single = iter(loader(batch_size=1))
    assert [lengths.take(single) for _ in single] == [1] * SAMPLES


def test_an_epoch_left_early_leaves_no_lengths_to_the_next_one_of_the_same_workers(lengths: BatchLengths) -> None:
    epochs = loader(batch_size=4, num_workers=1, persistent_workers=True)
    batches = iter(epochs)
    next(batches)
    assert lengths.take(batches) == 4
    assert iter(epochs) is batches
    assert [lengths.take(batches) for _ in batches] == [4, 4, 2]


def test_a_batch_that_could_not_be_made_leaves_no_length(lengths: BatchLengths) -> None:
    batches = iter(DataLoader(Torn(), batch_size=4))
    with pytest.raises(OSError, match="torn"):
        next(batches)
    assert [lengths.take(batches) for _ in batches] == [4, 2]


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
