"""Activation checkpointing by block in real jobs of two ranks: time, memory, losses, and what the memory is for."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.controller.job_checkpointed_blocks import BLOCKS, CAPPED_SAMPLES, SMALL

PAIRS = 12

T_95 = 2.2
"""Student's t for 12 pairs, two-sided."""

MEMORY_TOLERANCE = 0.05
"""Resident memory comes in pages, and the allocator keeps some: so far the estimate may be off."""

ROOM_MIB = 96
"""Between what 8192 samples take with all blocks checkpointed and with none."""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.alone
def test_keeping_activations_saves_the_second_forward_and_takes_the_memory_that_was_measured(run_ranks: Any) -> None:
    (ranks,) = run_ranks("job_checkpointed_blocks.py", 2, [{"pairs": PAIRS}])
    for rank in ranks:
        assert rank["refused"] is None
        held = dict(rank["held"])
        for value in (BLOCKS // 2, 0):
            more, estimate = (held[value][i] - held[BLOCKS][i] for i in (0, 1))
            print(f"{BLOCKS - value} blocks keep {more / 2**20:.2f} MiB, estimated {estimate / 2**20:.2f} MiB")  # noqa: T201
            assert more == pytest.approx(estimate, rel=MEMORY_TOLERANCE)
    gains = [1 - b / a for a, b in zip(ranks[0]["seconds"]["A"], ranks[0]["seconds"]["B"], strict=True)]
    error = T_95 * stdev(gains) / math.sqrt(len(gains))
    with_it, without = (fmean(ranks[0]["seconds"][arm]) for arm in "AB")
    expected = ranks[0]["expected"]
    print(  # noqa: T201
        f"{with_it * 1e3:.1f} -> {without * 1e3:.1f} ms a step, gain {fmean(gains):.1%} (+-{error:.1%}), "
        f"expected {expected:.1%}; measuring cost {ranks[0]['charged_ns'] / 1e6:.1f} ms"
    )
    assert fmean(gains) - error > 0.05
    assert expected == pytest.approx(fmean(gains), abs=0.1)


@pytest.mark.alone  # beside other programs nothing can be proven in so few steps
@pytest.mark.slow
@pytest.mark.distributed
def test_the_tuner_finds_it_and_the_losses_are_equal_to_the_bit(run_ranks: Any) -> None:
    found, plain = run_ranks("job_checkpointed_blocks.py", 2, [{"steps": 250}, {"steps": 250, "mode": "off"}])
    for rank, other in zip(found, plain, strict=True):
        assert rank["refused"] == {}
        assert rank["losses"] == other["losses"]
        assert rank["is_named_alike"]
        assert rank["do_agree"]
    assert found[0]["values"] == found[1]["values"], "all ranks switch at the same steps"
    kept = [verdict for verdict in found[0]["verdicts"] if verdict[0] == "kept"]
    assert kept, found[0]["verdicts"] or found[0]["status"]
    print(kept)  # noqa: T201
    assert found[0]["values"][-1] < BLOCKS
    assert sum(a != b for a, b in pairwise(found[0]["values"])) >= 3, "it went to and fro"


@pytest.mark.slow
@pytest.mark.distributed
def test_losses_and_gradients_under_fsdp2_and_a_static_graph_of_ddp_are_equal_to_the_bit(run_ranks: Any) -> None:
    kinds = ("fsdp2", "wrapped", "plain")
    jobs = [{"kind": kind, "is_turned": is_turned} for kind in kinds for is_turned in (True, False)]
    ran = run_ranks("job_checkpointed_blocks.py", 2, jobs)
    for turned, untouched in zip(ran[::2], ran[1::2], strict=True):
        for rank, other in zip(turned, untouched, strict=True):
            assert rank["refused"] is None
            assert len(rank["seen"][0]) == 1 + 4 * BLOCKS
            assert rank["seen"] == other["seen"]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.distributed
def test_under_a_limit_of_memory_checkpointing_makes_a_larger_micro_batch_fit(run_ranks: Any) -> None:
    without, with_it = run_ranks(
        "job_checkpointed_blocks.py", 2,
        [{"blocks": 0, "room_mib": ROOM_MIB}, {"blocks": BLOCKS, "room_mib": ROOM_MIB}],
    )  # fmt: skip
    for rank in without:
        assert rank["micro_batch"] == SMALL
        assert f"micro_batch {CAPPED_SAMPLES} is barred" in rank["reasons"][0]
    for rank in with_it:
        assert rank["refused"] is None
        assert rank["micro_batch"] == CAPPED_SAMPLES
        assert rank["reasons"] == []
    for ranks in (without, with_it):
        assert all(rank["do_agree"] for rank in ranks)
    for rank, other in zip(without, with_it, strict=True):
        assert rank["losses"][:5] == pytest.approx(other["losses"][:5], rel=1e-5)
    # the estimate that such a move needs: what all blocks keep of the batch does not fit, what one keeps does
    sample_bytes = with_it[0]["sample_bytes"]
    assert BLOCKS * sample_bytes * CAPPED_SAMPLES > ROOM_MIB * 2**20 > sample_bytes * CAPPED_SAMPLES


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.distributed
def test_a_larger_micro_batch_that_does_not_fit_is_tried_with_more_checkpointed_blocks(run_ranks: Any) -> None:
    (ranks,) = run_ranks("job_checkpointed_blocks.py", 2, [{"steps": 125, "room_mib": 50, "seconds": 0.16}])
    for rank in ranks:
        assert rank["refused"] == {}
        assert rank["do_agree"]
    assert ranks[0]["values"] == ranks[1]["values"], "all ranks switch at the same steps"
    verdicts = ranks[0]["verdicts"]
    print(verdicts, ranks[0]["status"])  # noqa: T201
    barred = next(at for at, (micro, blocks) in enumerate(ranks[0]["values"]) if micro > 32 and blocks == 0)
    after = ranks[0]["values"][barred + 2 :]
    assert any(micro > 32 and blocks > 0 for micro, blocks in after)
    assert not any(micro > 32 and blocks == 0 for micro, blocks in after), "alone it did not fit"
    assert {"checkpointed_blocks", "micro_batch"} == {knob for knob, outcome, *_ in verdicts if outcome == "kept"}
