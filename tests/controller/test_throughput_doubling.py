"""The doubling and halving rule does what articles say of it."""

from __future__ import annotations

from pacecar.controller.observation import KnobSpace
from pacecar.controller.policy.throughput_doubling import DoublingSampler
from tests.controller.obedient_job import BUCKET, COMPRESSION, MIB


def _told(sampler: DoublingSampler, *paces: float) -> list[int]:
    values = []
    for pace in paces:
        proposed = sampler.propose()
        assert proposed is not None
        values.append(next(iter(proposed.values())))
        sampler.tell(proposed, pace)
    return values


def test_doubling_keeps_a_worse_bucket_that_costs_less_than_ten_percent() -> None:
    sampler = DoublingSampler()
    sampler.begin([BUCKET])
    assert _told(sampler, 100, 108, 108, 108) == [25 * MIB, 64 * MIB, 64 * MIB, 64 * MIB]
    assert sampler.best == {"bucket_bytes": 64 * MIB}


def test_doubling_goes_back_and_forth_where_neighbours_differ_by_more() -> None:
    sampler = DoublingSampler()
    sampler.begin([BUCKET])
    assert [v // MIB for v in _told(sampler, 100, 140, 100, 140, 100)] == [25, 64, 32, 64, 32]


def test_doubling_keeps_the_batch_between_256_and_8192() -> None:
    sampler = DoublingSampler()
    sampler.begin([KnobSpace("batch_samples", 4096, tuple(2**k for k in range(6, 16)))])
    # The pace does not change, so every doubling doubles throughput.
    assert _told(sampler, 100, 100, 100, 100) == [4096, 8192, 8192, 8192]


def test_doubling_leaves_choices_alone() -> None:
    sampler = DoublingSampler()
    sampler.begin([COMPRESSION])
    assert sampler.propose() is None
