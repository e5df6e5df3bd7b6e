"""Time and energy of a step under each power limit that was in force: measured points, and nothing between them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from pacecar.commands.report.document import PowerPoint
from pacecar.commands.report.figures import Interval
from pacecar.commands.report.output.utilization_tables import power_table
from pacecar.commands.report.reading.step_sums import Bin, TimeLine
from pacecar.commands.report.sections.power_limits import PowerLimits
from pacecar.commands.report.sections.recorded_utilization import Hosts
from pacecar.records.recording import Tick

SECOND = 10**9


def points(
    limits: Sequence[int], *, watts: dict[int, float], step_ms: dict[int, float], gpus: int = 2, odd: int = -1
) -> Any:
    """Return the points of a run with one limit in each ten seconds; GPU 0 has none in the piece `odd`."""
    draw = random.Random(1)
    line = TimeLine()
    line.start_ns, line.width_ns = 0, 5 * SECOND
    hosts = Hosts({"before": (0, 10 * SECOND * len(limits))})
    for place in range(2 * len(limits)):
        step_ns = step_ms[limits[place // 2]] * 1e6 * draw.gauss(1, 0.01)
        line.bins[place] = Bin(steps=round(5e9 / step_ns), pace_ns=round(round(5e9 / step_ns) * step_ns))
    power = PowerLimits(hosts, (0, 10 * SECOND * len(limits)), line)
    used = dict.fromkeys(range(gpus), 0.0)
    capped = 0
    for second in range(10 * len(limits)):
        piece = second // 10
        limit = limits[piece]
        capped += SECOND // 4
        values: dict[Any, Any] = {}
        for gpu in range(gpus):
            used[gpu] += 1000 * watts[limit]
            values["pacecar_gpu_energy_joules_total", (str(gpu),)] = used[gpu]
            values["pacecar_gpu_clock_event_seconds_total", (str(gpu), "sw_power_cap", "driver")] = capped
            if gpu or piece != odd:
                values["pacecar_gpu_power_limit_watts", (str(gpu),)] = 1000 * limit
        power.add("node-a", Tick(second * SECOND + 1, second, 0, values, {}, {}))
    return power.points()


def test_a_lower_limit_is_compared_with_the_highest_by_pieces_of_the_run() -> None:
    found = points([700, 500] * 20, watts={700: 650.0, 500: 490.0}, step_ms={700: 100, 500: 104})
    high, low = found
    assert (high.limit_watts, low.limit_watts, low.gpus) == (700, 500, ("0", "1"))
    assert high.joules_per_step == pytest.approx(2 * 650 * 0.1, rel=0.01)
    assert high.step_change is high.energy_change is None
    assert low.capped_ratio == pytest.approx(0.25)
    for change, truth in ((low.step_change, 0.04), (low.energy_change, 490 * 104 / (650 * 100) - 1)):
        assert change.low < truth < change.high
        assert change.high - change.low < 0.05
    note = str(power_table(report_with(found)))
    assert "500 W saves" in note
    assert "sudo nvidia-smi -i 0,1 -pl 500" in note


def report_with(found: tuple[PowerPoint, ...]) -> Any:
    class Report:
        power = found

    return Report()


def test_one_limit_tells_nothing_of_another() -> None:
    found = points([700] * 8, watts={700: 650.0}, step_ms={700: 100})
    assert len(found) == 1
    assert "what another one would gain or save cannot be told" in str(power_table(report_with(found)))
    assert power_table(report_with(())) is None


def test_pieces_with_two_limits_or_without_one_do_not_count() -> None:
    whole = points([700] * 8, watts={700: 650.0}, step_ms={700: 100})
    part = points([700] * 8, watts={700: 650.0}, step_ms={700: 100}, odd=3)
    assert whole[0].steps - part[0].steps == pytest.approx(100, abs=55), "two or three pieces of five seconds"
    mixed = points([700, 500], watts={700: 650.0, 500: 490.0}, step_ms={700: 100, 500: 100})
    assert [one.steps for one in mixed] == pytest.approx([100, 50], abs=3), "the tick after the change has both"


@pytest.mark.parametrize(
    ("step", "energy", "says"),
    [
        (Interval(0.04, 0.03, 0.05), Interval(-0.2, -0.3, -0.1), "saves 20.0 % of a step's energy, with +4.0 % time"),
        (Interval(0.04, -0.1, 0.2), Interval(-0.2, -0.3, -0.1), "with no certain change of its time"),
        (Interval(0.4, 0.3, 0.5), Interval(0.1, -0.1, 0.3), "500 W saves no energy for certain"),
        (Interval(0.04, None, None), Interval(-0.2, None, None), "too briefly to be told from 700 W"),
    ],
)
def test_a_trade_is_named_only_where_it_is_certain(step: Interval, energy: Interval, says: str) -> None:
    high, low = points([700, 500], watts={700: 650.0, 500: 490.0}, step_ms={700: 100, 500: 100})
    low = structs.replace(low, step_change=step, energy_change=energy)
    text = str(power_table(report_with((high, low))))
    assert says in text
    assert ("nvidia-smi" in text) == ("saves 20.0 %" in text)
