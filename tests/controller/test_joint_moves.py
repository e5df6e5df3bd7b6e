"""Knobs that depend on each other are tried as one change, so that what no single move reaches is found."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import pytest

from pacecar.clock import SystemClock
from pacecar.config import TuneConfig
from pacecar.controller.consensus.agreement import LocalAgreement
from pacecar.controller.consensus.capabilities import (
    COMPANIONS_MAX,
    KnobOffer,
    Offer,
    decode_offer,
    encode_offer,
    live_knobs,
)
from pacecar.controller.consensus.knob_switch import KnobSwitcher
from pacecar.controller.forecast.bucket_model import pack_buckets, play
from pacecar.controller.forecast.gain_model import GainModel
from pacecar.controller.knobs.actuator import Actuator
from pacecar.controller.observation import JobFacts, KnobSpace, NodeView, Observation
from pacecar.controller.policy.candidate_selection import CandidateSelection
from pacecar.records import BackwardWindow, Ledger
from tests.controller.curves import Curve, Point
from tests.controller.plant import Plant, gaussian
from tests.controller.replay import Case, noise, run
from tests.kit.selection import decisive, reduced

MIB = 2**20
MS = 1_000_000
GRADIENTS = (*(8 * MIB,) * 2, *(MIB,) * 24)
SIZES = tuple(MIB << k for k in range(6))
BATCH = 32
ALPHA_NS, NS_PER_BYTE = 3.5 * MS, MS / MIB
START = {"bucket_bytes": 2 * MIB, "micro_batch": 16}
COMPUTE_MS = {16: 400, 8: 365, 4: 355}
"""Smaller micro-batches stay in the cache, but fewer buckets pass under their shorter backward."""


def timeline(values: dict[str, int], bytes_ratio: float = 1.0) -> tuple[int, Ledger, BackwardWindow]:
    """Step time, ledger and window of a job that is as the model assumes."""
    size = values.get("micro_batch", 16)
    compute, passes = COMPUTE_MS[size] * MS, ceil(BATCH / size)
    backward = compute * 2 / 3 / passes
    played = play(pack_buckets(GRADIENTS, values["bucket_bytes"]), backward, ALPHA_NS, NS_PER_BYTE * bytes_ratio)
    exposed, communication = round(played.exposed_ns), round(played.communication_ns)
    ledger = Ledger(
        wall_ns=compute + exposed, compute_ns=compute, exposed_communication_ns=exposed, communication_ns=communication,
        overlapped_communication_ns=communication - exposed,
    )  # fmt: skip
    reduces = tuple((round(begin), round(end)) for begin, end in played.spans)
    return compute + exposed, ledger, BackwardWindow(work_ns=round(backward), reduces=reduces)


def suited_curve() -> Curve:
    points = {}
    for size in SIZES:
        for samples in COMPUTE_MS:
            values = {"bucket_bytes": size, "micro_batch": samples}
            step_ns, ledger, window = timeline(values)
            exposed, communication = ledger.exposed_communication_ns, ledger.communication_ns
            point = Point(step_ns, exposed, communication, round(ALPHA_NS), NS_PER_BYTE, window.work_ns)
            points[tuple(sorted(values.items()))] = point
    return Curve("suited", START, points, GRADIENTS, BATCH)


def steps_of(curve: Curve, changes: dict[str, int]) -> float:
    return 1 - curve.at({**START, **changes}).step_ns / curve.at(START).step_ns


def test_the_best_setting_of_the_replayed_job_is_out_of_reach_for_single_moves() -> None:
    curve = suited_curve()
    alone = [
        steps_of(curve, {knob: value})
        for knob, domain in curve.domains.items()
        for value in domain
        if value != START[knob]
    ]
    assert max(alone) < 0.01
    assert 1 - curve.oracle_ns / curve.at(START).step_ns > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("level", decisive([0.02, 0.05], 0.05))
def test_the_joint_optimum_is_found_in_a_replay(level: float) -> None:
    case = Case("suited", (suited_curve(),))
    runs = [run(case, "pacecar", noise(level, 3000, seed), seed=seed) for seed in range(reduced(6))]
    assert sum(one.end_ratio < 1.02 for one in runs) >= 0.8 * len(runs), [one.detail for one in runs]
    assert sum(one.saved_ratio for one in runs) / len(runs) < -0.02


def learned(values: dict[str, int], paces: Sequence[dict[str, int]] = (), bytes_ratio: float = 1.0) -> GainModel:
    model = GainModel(JobFacts(job="job", world_size=2, gradient_bytes=GRADIENTS, batch_samples=BATCH))
    step_ns, ledger, window = timeline(values, bytes_ratio)
    model.learn(Observation(1, 1, values, step_ns, True, ledger, True, backward=window, micro_batches=BATCH // 16))
    for other in (values, *paces):
        model.history.note_pace(other, timeline(other, bytes_ratio)[0])
    return model


def test_buckets_are_forecast_for_the_shorter_backward_of_smaller_micro_batches() -> None:
    smaller = {**START, "micro_batch": 8}
    model = learned(START, [smaller])
    best = model.best_bucket_bytes(START, "micro_batch", 8, SIZES)
    assert best is not None
    joint = model.expect_jointly(START, (("micro_batch", 8), ("bucket_bytes", best)))
    assert joint is not None
    forecast, shares = joint
    truth = 1 - timeline({"bucket_bytes": best, "micro_batch": 8})[0] / timeline(START)[0]
    assert best > START["bucket_bytes"]
    assert forecast.gain_ratio == pytest.approx(truth, abs=0.02)
    assert forecast.gain_ratio == pytest.approx(sum(shares))
    assert shares[1] > 0.03 > shares[0]


def test_buckets_are_forecast_for_half_the_bytes() -> None:
    values = {"bucket_bytes": 32 * MIB, "compression": 0}
    model = learned(values, bytes_ratio=1.5)
    best = model.best_bucket_bytes(values, "compression", 1, SIZES)
    assert best == 4 * MIB, "8 MiB suit all of the bytes"
    joint = model.expect_jointly(values, (("compression", 1), ("bucket_bytes", best)))
    assert joint is not None
    forecast, shares = joint
    truth = 1 - timeline({"bucket_bytes": best}, 0.75)[0] / timeline(values, 1.5)[0]
    assert forecast.gain_ratio == pytest.approx(truth, abs=0.02)
    assert min(shares) > 0
    assert model.expect_jointly(values, (("compression", 4), ("bucket_bytes", best))) is None, "depends on shapes"


@pytest.mark.parametrize("headroom_ratio", [None, 0.5, 0.01])
def test_no_pair_takes_a_larger_micro_batch_while_memory_is_short(headroom_ratio: float | None) -> None:
    kept = {"bucket_bytes": 32 * MIB, "micro_batch": 4}
    spaces = [KnobSpace(knob, kept[knob], domain) for knob, domain in suited_curve().domains.items()]
    selection = CandidateSelection(TuneConfig(), JobFacts("job", 2, GRADIENTS, BATCH), spaces)
    selection.model = learned(kept, [{**kept, "micro_batch": 8}])
    selection.beaten("micro_batch", 8)  # so it fitted
    selection.note_node(NodeView(headroom_ratio=headroom_ratio))
    found, _ = selection.candidates(kept)
    joint = [dict(one.changes) for one in found if len(one.changes) > 1]
    assert joint == ([] if headroom_ratio == 0.01 else [{"micro_batch": 8, "bucket_bytes": 8 * MIB}])


# --- values that a knob declares to be worth a trial only together with another -------------------------


class Blocks(Actuator):
    """Blocks that checkpoint: slower alone, but with two of them a micro-batch of 8 fits."""

    knob = "fsdp_prefetch"  # a knob that there is

    def value(self) -> int:
        return 0

    def domain(self) -> tuple[int, ...]:
        return (0, 2, 4)

    def companions(self, value: int) -> tuple[tuple[str, int], ...]:  # type: ignore[override]
        return {0: (), 2: (("micro_batch", 8),), 4: (("micro_batch", 8), ("micro_batch", 16))}[value]

    def refusal(self) -> str | None:
        return None

    def apply(self, value: int) -> None:
        raise NotImplementedError


class Samples(Blocks):
    knob = "micro_batch"

    def value(self) -> int:
        return 4

    def domain(self) -> tuple[int, ...]:
        return (4, 8)

    def companions(self, value: int) -> tuple[tuple[str, int], ...]:  # type: ignore[override]
        return ()


def offered() -> Offer:
    actuators = {one.knob: one for one in (Blocks(), Samples())}
    return KnobSwitcher(actuators, LocalAgreement(), SystemClock()).offer()


def checkpointed(values: dict[str, int], step: int) -> float:
    """A micro-batch of 8 thrashes without room; each block that checkpoints costs 2 %."""
    pace = {4: 0.2, 8: 0.15 if values["fsdp_prefetch"] >= 2 else 0.4}[values["micro_batch"]]
    return pace * (1 + 0.02 * values["fsdp_prefetch"])


@pytest.mark.slow
def test_declared_pairs_are_tried_kept_and_taken_back_as_one() -> None:
    spaces, refused = live_knobs([offered()])
    assert not refused
    plants = [Plant(checkpointed, gaussian(0.03), list(spaces), seed).run(700) for seed in range(6)]
    for plant in plants:
        assert plant.values == {"fsdp_prefetch": 2, "micro_batch": 8}
        verdicts = [v for v in plant.verdicts if v.outcome == "kept"]
        assert [v.knob for v in verdicts] == ["fsdp_prefetch", "micro_batch"]
        assert len({(v.measured_gain_ratio, v.gain_low, v.step) for v in verdicts}) == 1, "one gain, that of both"
        assert [v.exploration_ns != 0 for v in verdicts] == [True, False], "charged once"


@pytest.mark.slow
def test_a_declared_value_is_never_tried_alone_and_goes_back_with_its_companion() -> None:
    spaces, _ = live_knobs([offered()])
    plant = Plant(lambda values, step: 0.05 * values["micro_batch"], gaussian(0.03), list(spaces), 1).run(1500)
    tried = {(values["fsdp_prefetch"], values["micro_batch"]) for values in plant.history}
    assert tried == {(0, 4), (0, 8), (2, 8), (4, 8)}


def test_ranks_try_only_pairs_that_all_declare() -> None:
    first = KnobOffer("a", 0, (0, 2, 4, 6), None, "", ((2, "b", 8), (4, "b", 8), (4, "b", 16)))
    second = KnobOffer("a", 0, (0, 2, 4, 6), None, "", ((4, "b", 16), (4, "b", 32)))
    (space,), _ = live_knobs([Offer((first,)), Offer((second,))])
    assert space.companions == ((4, "b", 16),)
    assert space.domain == (0, 4, 6), "2 is not worth a trial alone, and no pair with it is common"


def test_values_whose_companions_do_not_fit_into_an_offer_are_not_offered() -> None:
    many = tuple((value, "micro_batch", 8) for value in range(1, COMPANIONS_MAX + 9))
    offer = Offer((KnobOffer("fsdp_prefetch", 0, tuple(range(COMPANIONS_MAX + 9)), None, "", many),))
    (knob,) = decode_offer(encode_offer(offer)).knobs
    assert knob.companions == many[:COMPANIONS_MAX]
    assert knob.domain == tuple(range(COMPANIONS_MAX + 1))


@pytest.mark.slow
def test_each_knob_of_a_joint_trial_is_recorded_with_its_share() -> None:
    spaces = [KnobSpace(knob, value, suited_curve().domains[knob]) for knob, value in START.items()]
    facts = JobFacts(job="plant", world_size=2, gradient_bytes=GRADIENTS, batch_samples=BATCH)
    plant = Plant(lambda values, step: timeline(values)[0] / 1e9, gaussian(0.02), spaces, 1, facts=facts)
    plant.ledger = lambda step, pace: None if step % 20 else timeline(plant.values)[1]
    plant.backward = lambda step, values: None if step % 20 else timeline(values)[2]
    plant.run(1000)
    joint = [one for one in plant.decisions if one.expected_share_ratio is not None]
    assert joint
    for left, right in zip(joint[::2], joint[1::2], strict=True):
        assert {left.knob, right.knob} == START.keys()
        assert left.expected_gain_ratio == right.expected_gain_ratio
        assert left.expected_share_ratio is not None
        assert right.expected_share_ratio is not None
        assert left.expected_share_ratio + right.expected_share_ratio == pytest.approx(left.expected_gain_ratio)
    kept = {v.decision: v for v in plant.verdicts if v.outcome == "kept"}
    assert all("by the model" in kept[one.decision].reason for one in joint if one.decision in kept)
    alone = [one for one in plant.decisions if one.expected_share_ratio is None]
    assert alone, "single moves are tried, too"
