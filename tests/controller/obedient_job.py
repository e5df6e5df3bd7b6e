"""A job that does at once what a policy proposes, and whose pace depends only on its settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pacecar.controller.observation import JobFacts, KnobSpace, Observation, Policy

__all__ = ["BUCKET", "COMPRESSION", "MIB", "curve", "drive"]

MIB = 2**20
SIZES = (4 * MIB, 8 * MIB, 16 * MIB, 25 * MIB, 32 * MIB, 64 * MIB)
BUCKET = KnobSpace("bucket_bytes", 25 * MIB, SIZES)
COMPRESSION = KnobSpace("compression", 0, (0, 1, 2))


def drive(
    policy: Policy,
    steps: int,
    pace_ns: Callable[[dict[str, int], int], float],
    *spaces: KnobSpace,
    holds: dict[int, tuple[str | None, bool]] | None = None,
) -> tuple[list[Any], list[dict[str, int]]]:
    """Obey a policy for so many steps; return its records and the values in force at each step."""
    spaces = spaces or (BUCKET,)
    policy.begin(JobFacts(job="job", world_size=2), spaces, turns_knobs=True)
    values = {space.knob: space.value for space in spaces}
    records: list[Any] = []
    history = []
    for step in range(1, steps + 1):
        if holds and step in holds:
            reason, is_brief = holds[step]
            policy.hold(reason, is_brief=is_brief)
        history.append(dict(values))
        turn, said = policy.advance([Observation(step, step, dict(values), int(pace_ns(values, step)))])
        records += said
        if turn is not None:
            values = dict(turn.values)
    return records + policy.finish(), history


def curve(values: dict[str, int], _: int) -> float:
    """Best at 8 MiB, and half as long with compression."""
    octaves = abs(math.log2(values["bucket_bytes"] / (8 * MIB)))
    return 1e8 * (1 + 0.08 * octaves) * (0.5 if values.get("compression") else 1.0)
