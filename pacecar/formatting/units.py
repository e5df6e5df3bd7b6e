"""Formats knobs and their values for people, so that the demo's display and its closing table say the same thing."""

from __future__ import annotations

from collections.abc import Mapping

from pacecar.records import KnobValue

__all__ = ["knob_text", "knobs_text"]


def knob_text(knob: str, value: KnobValue) -> str:
    """Return a knob's value; bytes as MiB or KiB."""
    if knob.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**20:.4g} MiB" if value >= 2**20 else f"{value / 2**10:.4g} KiB"
    return str(value)


def knobs_text(values: Mapping[str, KnobValue]) -> str:
    """Return all knobs on one line."""
    return "   ".join(f"{knob} {knob_text(knob, value)}" for knob, value in sorted(values.items())) or "-"
