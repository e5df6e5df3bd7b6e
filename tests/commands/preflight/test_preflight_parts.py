"""`pacecar preflight`, without ranks: who meets whom, and who is named, in simulated clusters with known faults."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pacecar.commands.preflight import node_checks, run_preflight
from pacecar.commands.preflight.document import LinkMeeting, NodeChecks
from pacecar.commands.preflight.node_checks import check_node
from pacecar.commands.preflight.pairing import ROUNDS_BEYOND, Pair, again, first_rounds, rounds_left
from pacecar.commands.preflight.run_preflight import FIT, FOUND, PreflightOptions, run_alone
from pacecar.commands.preflight.text import leave_out
from pacecar.commands.preflight.verdict import judge_links, judge_nodes, nodes_to_exclude
from tests.kit.selection import reduced
from tests.kit.waiting import until

TOLERANCE = 0.25
USUAL = 10e9


def nodes(ranks: int, per_node: int = 1, flops: dict[int, float] | None = None) -> list[NodeChecks]:
    return [
        NodeChecks(
            rank=rank, node=str(rank // per_node), host=f"n{rank // per_node}", device="cpu",
            flops_per_second=(flops or {}).get(rank, 1e12),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def apart(ranks: int) -> list[str]:
    return [one.node for one in nodes(ranks)]


def examine(ranks: int, per_node: int, rate: Callable[[Pair], float]) -> tuple[list[tuple[tuple[int, ...], bool]], int]:
    """Play all rounds; return who is named (and whether as a link between two), and the number of rounds."""
    everyone, meetings, rounds = nodes(ranks, per_node), list[LinkMeeting](), 0
    places = [one.node for one in everyone]

    def play(pairs: list[Pair]) -> None:
        nonlocal rounds
        rounds += 1
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy)), "nobody meets two at a time"
        for pair in pairs:
            found = rate(pair)
            meetings.append(
                LinkMeeting(round=rounds, ranks=pair, forth_bytes_per_second=found, back_bytes_per_second=USUAL)
            )

    first = first_rounds(places)
    for pairs in first:
        play(pairs)
    for _ in range(rounds_left(ranks, len(first))):
        verdict = judge_links(everyone, meetings, TOLERANCE)
        pairs = again(places, verdict.slow, verdict.doubted, Counter(meeting.ranks for meeting in meetings))
        if not pairs:
            break
        play(pairs)
    verdict = judge_links(everyone, meetings, TOLERANCE)
    return [(fault.ranks, fault.is_between) for fault in verdict.faults], rounds


def noisy(draw: random.Random) -> float:
    return USUAL * draw.uniform(0.93, 1.0)


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8, 13, 64, 100])
def test_every_rank_meets_others_and_no_pair_meets_twice(ranks: int) -> None:
    rounds = first_rounds(apart(ranks))
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs))
    met = {rank: sum(rank in pair for pair in pairs) for rank in range(ranks)}
    assert min(met.values()) >= min(2, ranks - 1)
    assert len(rounds) <= math.ceil(math.log2(ranks)) + (ranks & (ranks - 1) != 0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("slow", ["node", "pair", "two nodes", "nobody"])
def test_a_slow_node_is_told_from_a_slow_link(ranks: int, slow: str) -> None:
    for seed in range(reduced(50)):
        draw = random.Random(seed)
        chosen = draw.sample(range(ranks), 2)
        bad = {"node": {chosen[0]}, "two nodes": set(chosen)}.get(slow, set())
        pairs = [pair for pairs in first_rounds(apart(ranks)) for pair in pairs]
        cut = draw.choice(pairs) if slow == "pair" else None

        def rate(pair: Pair) -> float:
            return noisy(draw) * (0.5 if bad.intersection(pair) or pair == cut else 1.0)  # noqa: B023  called at once

        named, rounds = examine(ranks, 1, rate)
        expected = [((rank,), False) for rank in bad] or ([] if cut is None else [(cut, True)])
        assert sorted(named) == sorted(expected), seed
        assert rounds <= math.log2(ranks) + ROUNDS_BEYOND


def test_a_node_with_eight_ranks_is_named_whole_and_one_slow_port_by_its_rank() -> None:
    draw = random.Random(3)

    def is_between(pair: Pair) -> bool:
        return pair[0] // 8 != pair[1] // 8

    def slow_node(pair: Pair) -> float:
        return noisy(draw) * (0.4 if is_between(pair) and 5 in (pair[0] // 8, pair[1] // 8) else 1.0)

    named, _ = examine(64, 8, slow_node)
    assert named == [(tuple(range(40, 48)), False)]

    def slow_port(pair: Pair) -> float:
        return noisy(draw) * (0.4 if is_between(pair) and 21 in pair else 1.0)

    named, _ = examine(64, 8, slow_port)
    assert named == [((21,), False)]


@pytest.mark.parametrize(("ranks", "per_node"), [(16, 8), (24, 8), (40, 8), (12, 4), (4, 2), (6, 2), (18, 6)])
@pytest.mark.parametrize("what", ["port", "device", "node"])
def test_a_slow_end_is_named_however_many_ranks_a_node_has(ranks: int, per_node: int, what: str) -> None:
    """A rank needs two links to other nodes, and a node links to two others, or its end cannot be told."""
    if what == "node" and ranks == 2 * per_node:
        pytest.skip("of two nodes it cannot be told")
    for bad in range(ranks):
        draw = random.Random(bad)

        def rate(pair: Pair) -> float:
            node = bad // per_node  # noqa: B023  called at once
            is_between = pair[0] // per_node != pair[1] // per_node
            touches = node in (pair[0] // per_node, pair[1] // per_node) if what == "node" else bad in pair  # noqa: B023
            return noisy(draw) * (0.4 if touches and (is_between or what == "device") else 1.0)  # noqa: B023

        named, rounds = examine(ranks, per_node, rate)
        assert named, bad
        assert not any(is_between for _, is_between in named), (bad, named)
        assert {rank // per_node for its, _ in named for rank in its} == {bad // per_node}, (bad, named)
        assert rounds <= math.ceil(math.log2(ranks)) + ROUNDS_BEYOND


def test_of_two_nodes_it_is_said_that_a_slow_one_would_not_show() -> None:
    meetings = [
        LinkMeeting(round=1, ranks=pair, forth_bytes_per_second=1e9, back_bytes_per_second=1e9)
        for pair in first_rounds(["0", "0", "1", "1"])[1]
    ]
    assert "would not show" in judge_links(nodes(4, 2), meetings, TOLERANCE).untold[0]


def test_with_one_link_there_is_nothing_to_compare() -> None:
    meeting = LinkMeeting(round=1, ranks=(0, 1), forth_bytes_per_second=1e9, back_bytes_per_second=1e9)
    verdict = judge_links(nodes(2), [meeting], TOLERANCE)
    assert verdict.faults == []
    assert "nothing to compare" in verdict.untold[0]


def test_a_link_that_failed_counts_as_slow_and_its_end_is_found() -> None:
    named, _ = examine(8, 1, lambda pair: 0.0 if 3 in pair else USUAL)
    assert named == [((3,), False)]


def test_a_slow_rank_is_named_by_comparison_with_its_peers() -> None:
    faults, untold = judge_nodes(nodes(8, flops={6: 0.7e12}), TOLERANCE)
    assert [(fault.check, fault.ranks, fault.hosts) for fault in faults] == [("compute", (6,), ("n6",))]
    assert faults[0].ratio == pytest.approx(0.7)
    assert untold == []
    assert nodes_to_exclude(faults) == ("n6",)
    assert judge_nodes(nodes(8, flops={6: 0.8e12}), TOLERANCE)[0] == []


def test_alone_a_rank_is_compared_with_an_earlier_run_or_not_at_all() -> None:
    alone = nodes(1, flops={0: 0.5e12})
    assert judge_nodes(alone, TOLERANCE) == ([], ["compute of cpu: no peer to compare with"])
    faults, untold = judge_nodes(alone, TOLERANCE, nodes(4))
    assert ([fault.check for fault in faults], untold) == (["compute"], [])


def test_a_device_that_cannot_compute_makes_its_node_unfit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: torch.device) -> float:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(node_checks, "_flops_per_second", broken)
    monkeypatch.setattr(node_checks, "_disk_bytes_per_second", lambda folder: 1e9)
    monkeypatch.setattr(node_checks, "_check_hardware", lambda: ([], []))
    assert run_alone(PreflightOptions(), environ={"NODE_NAME": "n1"}) == FOUND
    out = capsys.readouterr().out
    assert "rank 0 on n1: hardware: the device cannot compute: CUDA error: uncorrectable ECC error encountered\n" in out
    assert "leave out: n1" in out


def test_a_disk_that_cannot_be_written_is_a_fault_if_it_is_one_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`tempfile` would go on in another folder if `/tmp` is full or may not be written."""
    monkeypatch.setattr(node_checks, "_check_hardware", lambda: ([], []))
    monkeypatch.setattr(node_checks, "_flops_per_second", lambda device: 1e12)
    monkeypatch.setattr(node_checks, "_copied_bytes_per_second", lambda device: 1e9)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file"))
    lame = check_node(0, "0", "n0", torch.device("cpu"), is_first_here=True, folder=None)
    well = [msgspec.structs.replace(one, disk_bytes_per_second=1e9) for one in nodes(3)]
    faults, untold = judge_nodes([lame, *well[1:]], TOLERANCE)
    assert [(fault.check, fault.hosts) for fault in faults] == [("disk", ("n0",))]
    assert "Not a directory" in faults[0].detail
    assert not any("disk" in words for words in untold)
    assert [fault.check for fault in judge_nodes([lame], TOLERANCE, well)[0]] == ["disk"]
    faults, untold = judge_nodes([lame, msgspec.structs.replace(lame, rank=1, node="1", host="n1")], TOLERANCE)
    assert faults == []
    assert sum("disk" in words for words in untold) == 2


@pytest.mark.slow
def test_a_device_that_does_not_answer_is_named_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prolog that waits for it would hold the node for as long as Slurm lets it."""
    is_over = threading.Event()

    def stuck(device: torch.device) -> float:
        is_over.wait()
        return 0.0

    monkeypatch.setattr(node_checks, "_flops_per_second", stuck)
    monkeypatch.setattr(node_checks, "_copied_bytes_per_second", stuck)
    monkeypatch.setattr(node_checks, "_disk_bytes_per_second", lambda folder: 1e9)
    monkeypatch.setattr(node_checks, "_check_hardware", lambda: ([], []))
    try:
        assert run_alone(PreflightOptions(seconds=0.2), environ={"NODE_NAME": "n1"}) == FOUND
    finally:
        is_over.set()
        until(lambda: "pacecar-preflight" not in {thread.name for thread in threading.enumerate()})
    out = capsys.readouterr().out
    assert "rank 0 on n1: silent: its checks did not end within 0.2 s\n" in out
    assert "leave out: n1" in out


@pytest.mark.slow
def test_each_of_many_devices_has_the_whole_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To bring eight GPUs up may take long; a prolog that fails drains the node."""

    def check(index: int, node: str, host: str, device: torch.device, **_: object) -> NodeChecks:
        time.sleep(0.3)
        return NodeChecks(rank=index, node=node, host=host, device="H100", flops_per_second=1e15)

    monkeypatch.setattr(run_preflight, "check_node", check)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert run_alone(PreflightOptions(seconds=0.8), environ={"NODE_NAME": "n1"}) == FIT
    assert "nothing is slow or broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SLURM_JOB_ID": "7"}, "sbatch --exclude=a,b"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "a"}, "kubectl cordon a b"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "the nodes of the pods a b"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "host file: a b"),
        ({}, "leave out: a b"),
    ],
)
def test_nodes_are_left_out_in_the_launchers_words(environ: dict[str, str], words: str) -> None:
    assert words in leave_out(("a", "b"), environ)
