"""Each fault of a GPU gives its verdict; normal and unread values give none."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.gpu_health import (
    FABRIC_JOIN_SECONDS,
    REASONS,
    GpuReadings,
    HealthReason,
    HealthVerdict,
    judge,
)

SECOND = 10**9
ROOT = Path(__file__).resolve().parents[2]
LINKS = frozenset(range(18))

WELL = GpuReadings(
    name="NVIDIA H100 80GB HBM3", is_up=True, row_remap_failed=False, row_remap_pending=False,
    retired_pages_pending=False, sram_threshold_exceeded=False, uncorrected_errors=0, xids=frozenset(), pcie_width=16,
    pcie_width_max=16, chip_links=0, has_mig=False, links_up=LINKS, links_wired=LINKS, has_switch=True,
    fabric_state="completed", fabric_status=0, fabric_health="healthy", fabric_problem="none",
    fabric_conditions={"degraded_bandwidth": False, "incorrect_configuration": False},
)  # fmt: skip


def with_(**changes: object) -> GpuReadings:
    return dataclasses.replace(WELL, **changes)  # type: ignore[arg-type]


FAULTS = {
    "lost": (with_(is_up=False, down_reason="lost"), HealthReason.DOWN, "lost"),
    "row remap failed": (with_(row_remap_failed=True), HealthReason.ROW_REMAP_FAILED, "no spare row"),
    "SRAM": (with_(sram_threshold_exceeded=True), HealthReason.SRAM_ECC_THRESHOLD, "than NVIDIA allows"),
    "uncorrected ECC": (with_(uncorrected_errors=2), HealthReason.ECC_UNCORRECTED, "2 since the last reset"),
    "Xid 79": (with_(xids=frozenset({31, 79})), HealthReason.XID, "79 in the last minutes"),
    "fabric error": (with_(fabric_status=21), HealthReason.FABRIC_FAILED, "completed with error 21"),
    "fabric manager does not run": (
        with_(fabric_state="in_progress", fabric_waits_ns=FABRIC_JOIN_SECONDS * SECOND),
        HealthReason.FABRIC_NOT_JOINED,
        "in progress for 5 minutes",
    ),
    "misconfigured": (
        with_(
            fabric_conditions={"incorrect_configuration": True, "degraded_bandwidth": False},
            fabric_problem="no_partition",
        ),
        HealthReason.FABRIC_MISCONFIGURED,
        "incorrect configuration (no partition)",
    ),
    "a link of a switched board": (
        with_(links_up=LINKS - {3, 7}, links_down=frozenset({3, 7})),
        HealthReason.NVLINK_DOWN,
        "16 links up; down: 3,7",
    ),
    "degraded": (
        with_(fabric_conditions={"degraded_bandwidth": True, "route_unhealthy": False}),
        HealthReason.FABRIC_DEGRADED,
        "degraded bandwidth",
    ),
    "the driver calls the fabric unhealthy": (
        with_(fabric_health="limited_capacity"),
        HealthReason.FABRIC_DEGRADED,
        "limited capacity",
    ),
    "row remap pending": (
        with_(row_remap_pending=True),
        HealthReason.MEMORY_REPAIR_PENDING,
        "a row remapping waits for a reset",
    ),
    "x4 of x16": (with_(pcie_width=4), HealthReason.PCIE_WIDTH, "4 of 16 lanes"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_the_only_reason_of_a_gpu_that_has_it(name: str) -> None:
    faulty, reason, figure = FAULTS[name]
    well, health = judge([WELL, faulty])
    assert (well.verdict, well.findings) == (HealthVerdict.OK, ())
    assert [finding.reason for finding in health.findings] == [reason]
    assert figure in health.findings[0].figure
    assert health.verdict is REASONS[reason].verdict
    assert health.findings[0].words.endswith(health.findings[0].figure)
    assert health.findings[0].remedy


def test_every_reason_has_a_fault_here_a_meaning_and_a_row_in_the_documentation() -> None:
    assert {reason for _, reason, _ in FAULTS.values()} == set(HealthReason) == set(REASONS)
    rows = re.findall(r"^\| `(\w+)` \| (failed|degraded) \|", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert rows == [(reason.value, REASONS[reason].verdict.value) for reason in HealthReason]


NORMAL = {
    "a program's own Xid": with_(xids=frozenset({13, 31, 43, 45})),
    "a note about repairs": with_(xids=frozenset({63, 92, 160})),
    "a fabric that is being joined": with_(fabric_state="in_progress", fabric_status=0, fabric_waits_ns=60 * SECOND),
    "a fabric that has not begun, right after the boot": with_(fabric_state="not_started", fabric_waits_ns=0),
    "a fabric of which nobody knows how long it has waited": with_(fabric_state="in_progress", fabric_waits_ns=None),
    "links that MIG mode switched off": with_(has_mig=True, links_up=frozenset(), links_down=LINKS),
    "a narrow PCIe link beside NVLink-C2C (Grace)": with_(pcie_width=1, chip_links=10),
    "a board without a fabric": with_(fabric_state=None, fabric_status=None, fabric_conditions={}),
}


@pytest.mark.parametrize("name", NORMAL)
def test_what_is_normal_is_ok(name: str) -> None:
    assert judge([NORMAL[name]])[0].findings == ()


BRIDGED = GpuReadings(name="NVIDIA A100 80GB PCIe", is_up=True, links_down=frozenset(range(12)))


def bridged(*up: int, wired: tuple[int, ...] = ()) -> GpuReadings:
    return dataclasses.replace(
        BRIDGED, links_up=frozenset(up), links_down=BRIDGED.links_down - set(up), links_wired=frozenset(wired)
    )


@pytest.mark.parametrize(
    ("node", "down"),
    [
        ([BRIDGED, BRIDGED], [None, None]),
        ([bridged(0, 1), bridged(0, 1), BRIDGED, BRIDGED], [None] * 4),  # one bridge for two of four cards
        ([bridged(0, 1), bridged(0)], [None, "1,2,3,4,5,6,7,8,9,10,11"]),
        ([bridged(0, wired=(0, 1)), bridged(0, wired=(0,))], ["1", None]),  # it was up before
        ([bridged(wired=(0, 1))], ["0,1"]),
    ],
    ids=["no bridge", "two of four are bridged", "a sibling has more", "one was up before", "all were up before"],
)
def test_a_link_that_leads_nowhere_is_not_down(node: list[GpuReadings], down: list[str | None]) -> None:
    found = [health.findings[0].figure.rpartition(": ")[2] if health.findings else None for health in judge(node)]
    assert found == down


def test_a_gpu_of_which_nothing_was_read_is_unknown_and_one_that_only_answers_is_ok() -> None:
    unknown, ok = judge([GpuReadings(), GpuReadings(is_up=True)])
    assert (unknown.verdict, unknown.judged) == (HealthVerdict.UNKNOWN, frozenset())
    assert (ok.verdict, ok.judged) == (HealthVerdict.OK, {HealthReason.DOWN})


def test_zero_is_a_measurement_and_missing_is_missing() -> None:
    read, missing = judge([GpuReadings(is_up=True, uncorrected_errors=0), GpuReadings(is_up=True)])
    assert HealthReason.ECC_UNCORRECTED in read.judged
    assert HealthReason.ECC_UNCORRECTED not in missing.judged


FIELDS = [field for field in dataclasses.fields(GpuReadings) if field.name != "name"]
BLANK = {field.name: getattr(GpuReadings(), field.name) for field in FIELDS}


@pytest.mark.slow
@given(st.sampled_from(sorted(FAULTS)), st.sets(st.sampled_from([field.name for field in FIELDS])))
def test_what_is_not_read_never_adds_a_reason(name: str, missing: set[str]) -> None:
    faulty = FAULTS[name][0]
    less = dataclasses.replace(faulty, **{field: BLANK[field] for field in missing})
    before, after = judge([WELL, faulty])[1], judge([WELL, less])[1]
    assert {finding.reason for finding in after.findings} <= {finding.reason for finding in before.findings}
    assert after.judged <= before.judged


@pytest.mark.slow
@given(st.lists(st.sampled_from(sorted(FAULTS)), min_size=1, max_size=8), st.randoms())
def test_the_verdict_is_the_worst_reason_and_the_order_of_gpus_changes_nothing(names: list[str], chance) -> None:  # type: ignore[no-untyped-def]
    node = [FAULTS[name][0] for name in names]
    verdicts = judge(node)
    for health in verdicts:
        assert health.verdict is (
            HealthVerdict.FAILED
            if any(REASONS[finding.reason].verdict is HealthVerdict.FAILED for finding in health.findings)
            else HealthVerdict.DEGRADED
        )
    order = list(range(len(node)))
    chance.shuffle(order)
    assert judge([node[place] for place in order]) == [verdicts[place] for place in order]
