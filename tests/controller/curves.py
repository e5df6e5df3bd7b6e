"""What do step times look like over bucket size and compression, on which link?  Curves to replay policies on.

Simulated, and said so in the file: a curve here is the timeline of DDP that
`pacecar.controller.forecast.gain_model` plays (alpha + bytes x beta a bucket, against gradients that become ready
through backward), with constants fitted to the percentages of measured runs (shared/TUNING: best bucket, one bucket for
all, bf16) to within about 3 points of the step for the best settings and 17 for the worst. They are the model's own
kind, so forecasts look better on them than they are: the model is told neither constants nor what overlap costs, only
what a window shows: each all-reduce with noise. `make bench-tuning` measures real ones, and `measured_curves` makes a
file like this of its sweeps.

    {"source": "simulated", "curves": [{"name", "start", "batch_samples", "gradient_bytes",
      "first_bucket_bytes", "backward_ns",
      "points": [{"values", "step_ns", "exposed_ns", "communication_ns", "alpha_ns", "ns_per_byte"}]}]}

`python -m tests.controller.curves` writes curves.json anew; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from pacecar.controller.forecast.bucket_model import pack_buckets, play
from pacecar.controller.forecast.gradient_readiness import EVEN, ReadinessCurve

MIB = 2**20
FILE = Path(__file__).with_name("curves.json")
MEASURED = Path(__file__).parents[2] / "docs" / "measurements" / "tuning-curves.json"
"""The sweeps of `make bench-tuning` in the same form (`measured_curves`)."""

POINTS_MAX = 10_000
NONE, BF16, FP16 = 0, 1, 2
DEFAULT = 25 * MIB
BUCKETS = tuple(sorted({*(MIB * 2**k // 4 for k in range(11)), DEFAULT}))

Setting = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Point:
    """One setting's step, and what of it is communication; None where it was not measured."""

    step_ns: int
    exposed_ns: int | None = None
    communication_ns: int | None = None
    alpha_ns: int | None = None
    ns_per_byte: float | None = None
    backward_ns: int | None = None
    """The last micro-batch's; None: the curve's."""


@dataclass(frozen=True)
class Curve:
    """Step time by setting."""

    name: str
    start: dict[str, int]
    points: dict[Setting, Point]
    gradient_bytes: tuple[int, ...] = ()
    batch_samples: int | None = None
    first_bucket_bytes: int | None = None
    backward_ns: int | None = None
    readiness: ReadinessCurve = EVEN

    def at(self, values: dict[str, int]) -> Point:
        return self.points[tuple(sorted(values.items()))]

    @property
    def domains(self) -> dict[str, tuple[int, ...]]:
        return {knob: tuple(sorted({dict(setting)[knob] for setting in self.points})) for knob in self.start}

    @property
    def oracle_ns(self) -> int:
        return min(point.step_ns for point in self.points.values())

    def buckets(self, values: dict[str, int]) -> list[int]:
        """The buckets as DDP makes them: the first one of its own size with the setting of the start only."""
        size = values["bucket_bytes"]
        first = self.first_bucket_bytes if size == self.start["bucket_bytes"] else None
        return pack_buckets(self.gradient_bytes, size, first)

    def only(self, knob: str, value: int) -> Curve:
        """The curve with one knob left alone."""
        kept = {
            tuple(pair for pair in setting if pair[0] != knob): point
            for setting, point in self.points.items()
            if dict(setting)[knob] == value
        }
        start = {name: at for name, at in self.start.items() if name != knob}
        return replace(self, start=start, points=kept)


@dataclass(frozen=True)
class Link:
    """Constants of a simulated job on a link; `convert` is the nanoseconds a byte that compression costs."""

    name: str
    gradients: Sequence[int]
    fixed_ms: float
    backward_ms: float
    alpha_ms: float
    ns_per_byte: float
    overlap_worth: float
    convert: float
    work: Sequence[float] | None = None
    """How long backward computes for each gradient, in any unit; None: as long as its bytes."""

    @property
    def readiness(self) -> ReadinessCurve:
        if self.work is None:
            return EVEN
        done, ready = (list(accumulate(of)) for of in (self.gradients, self.work))
        points = zip(done, ready, strict=True)
        return ((0.0, 0.0), *((round(x / done[-1], 9), round(y / ready[-1], 9)) for x, y in points))


def _gpt() -> list[int]:
    """8 blocks of width 512 and a tied embedding, ready last: 39 M parameters."""
    block = [2048 * 512, 2048, 2048 * 512, 512, 512 * 512, 1536 * 512, 1536, 512, 512]
    return [4 * n for n in [*block * 8, 14_000_000]]


_DEEP = [4 * n for n in (1024 * 1024, 1024) * 40]
_SMALL = [4 * n for n in (256 * 256, 256) * 300]
_TEN = [4 * n for n in (512 * 512, 512) * 40]
_WIDE = [4 * n for n in (4096 * 2048, 4096) * 5]
_EMBEDDING = [4 * n for n in (*(1024 * 1024, 1024) * 20, 12_000_000)]
"""20 layers and an embedding of 48 MB that comes last and costs no arithmetic."""
_VGG = [4 * n for n in (4096 * 1000, 1000, 4096 * 4096, 4096, 25088 * 1024, 1024, *(512 * 512 * 9, 512) * 6,
                        *(256 * 256 * 9, 256) * 3, 128 * 128 * 9, 128, 64 * 64 * 9, 64)]  # fmt: skip
"""Large layers, whose gradients are ready first, and convolutions that compute for longer the earlier they come."""
_VGG_WORK = [4.1, 0, 16.8, 0, 25.7, 0, *(460, 0, 460, 0, 460, 0, 925, 0, 925, 0, 925, 0), *(1850, 0) * 3, 1850, 0,
             1850, 0]  # fmt: skip
_UNEVEN = [4 * n for n in (2_000_000, *(1024,) * 20) * 6]
"""Tiny gradients between large ones."""

LINKS = (
    Link("1 Gbit/s, GPT 39 M", _gpt(), 10, 540, 0.3, 8.56, 0.95, 1.04),
    Link("1 Gbit/s, 40 layers 42 M", _DEEP, 6, 815, 1.06, 9.0, 0.98, 2.25),
    Link("1 Gbit/s 1 ms, 40 layers 42 M", _DEEP, 8, 1092, 0.37, 9.99, 0.95, 1.99),
    Link("1 Gbit/s 5 ms, 40 layers 42 M", _DEEP, 22, 1782, 25.0, 13.0, 1.0, 0.79),
    Link("1 Gbit/s 5 ms, 300 layers 20 M", _SMALL, 4, 586, 7.65, 7.71, 0.96, 0.22),
    Link("1 Gbit/s, 40 layers 10.5 M", _TEN, 124, 257, 0.33, 8.53, 1.0, 0.14),
    Link("1 Gbit/s, 5 wide layers 42 M", _WIDE, 20, 900, 0.5, 8.6, 0.97, 1.5),
    Link("5 Gbit/s, 40 layers 42 M", _DEEP, 54, 358, 0.25, 2.07, 0.83, 0.5),
    Link("unlimited, 40 layers 42 M", _DEEP, 78, 415, 3.2, 1.3, 1.0, 1.1),
    Link("2.5 Gbit/s, embedding of 48 MB last", _EMBEDDING, 30, 300, 0.4, 3.4, 0.95, 0.5, (*(1, 0) * 20, 0.2)),
    Link("5 Gbit/s, VGG", _VGG, 60, 900, 0.4, 1.9, 0.95, 1.0, _VGG_WORK),
    Link("2.5 Gbit/s, large and tiny gradients", _UNEVEN, 30, 200, 1.0, 3.4, 0.95, 0.5, (20, *(1,) * 20) * 6),
)


def simulate(link: Link) -> Curve:
    """Play every bucket size with and without compression."""
    points = {}
    for size in BUCKETS:
        for compression, bytes_ratio, price in ((NONE, 1.0, 0.0), (BF16, 0.5, 1.0), (FP16, 0.5, 1.02)):
            cost = link.ns_per_byte * bytes_ratio + link.convert * price
            backward = link.backward_ms * 1e6
            first = MIB if size == DEFAULT else None
            buckets = pack_buckets(link.gradients, size, first)
            timeline = play(buckets, backward, link.alpha_ms * 1e6, cost, 1, link.readiness)
            hidden = (1 - link.overlap_worth) * timeline.overlapped_ns
            step = link.fixed_ms * 1e6 + backward + timeline.exposed_ns + hidden
            setting = (("bucket_bytes", size), ("compression", compression))
            exposed, communication = round(timeline.exposed_ns), round(timeline.communication_ns)
            points[setting] = Point(round(step), exposed, communication, round(link.alpha_ms * 1e6), round(cost, 6))
    return Curve(
        link.name,
        {"bucket_bytes": DEFAULT, "compression": NONE},
        points,
        tuple(link.gradients),
        first_bucket_bytes=MIB,
        backward_ns=round(link.backward_ms * 1e6),
        readiness=link.readiness,
    )


def simulate_micro_batch(name: str, start: int, pass_ms: float, spill: float, fits: int) -> Curve:
    """32 samples a step, 6 ms a sample, `spill` more for every doubling beyond `fits`, where the cache ends."""
    points = {}
    for size in (1, 2, 4, 8, 16, 32):
        slower = 1.0 + spill * max(0, size.bit_length() - fits.bit_length())
        points[(("micro_batch", size),)] = Point(round((pass_ms * 32 / size + 6 * 32 * slower) * 1e6))
    return Curve(name, {"micro_batch": start}, points, batch_samples=32)


def simulate_all() -> list[Curve]:
    micro_batches = (
        simulate_micro_batch("micro-batch of 2, batch of 32", 2, 12, 0.04, 8),
        simulate_micro_batch("micro-batch of 4, larger ones leave the cache", 4, 1, 0.25, 4),
        simulate_micro_batch("micro-batch of 8, all alike", 8, 0.2, 0.0, 8),
        simulate_micro_batch("micro-batch of 32, smaller ones fit the cache", 32, 2, 0.1, 4),
    )
    return [*map(simulate, LINKS), *micro_batches]


def dump(curves: Iterable[Curve], *, source: str = "simulated") -> str:
    """Write curves down, a point a line."""
    said: list[str] = []
    for curve in curves:
        points = ",\n   ".join(
            json.dumps(
                {
                    "values": dict(setting),
                    "step_ns": point.step_ns,
                    "exposed_ns": point.exposed_ns,
                    "communication_ns": point.communication_ns,
                    "alpha_ns": point.alpha_ns,
                    "ns_per_byte": point.ns_per_byte,
                }
            )
            for setting, point in curve.points.items()
        )
        head = {
            "name": curve.name,
            "start": curve.start,
            "batch_samples": curve.batch_samples,
            "gradient_bytes": curve.gradient_bytes,
            "first_bucket_bytes": curve.first_bucket_bytes,
            "backward_ns": curve.backward_ns,
            **({} if curve.readiness == EVEN else {"readiness": curve.readiness}),
        }
        said.append(f' {json.dumps(head)[:-1]}, "points": [\n   {points}]}}')
    return f'{{"source": "{source}", "curves": [\n' + ",\n".join(said) + "]}\n"


def load(path: Path = FILE) -> tuple[str, list[Curve]]:
    """Read curves, simulated or measured; return what they come from and the curves.

    Raises:
        ValueError: not such a file, or one whose settings do not make up a full grid with the start in it.
    """
    try:
        said: dict[str, Any] = json.loads(path.read_text())
        curves = [_curve(one) for one in said["curves"]]
        source = str(said["source"])
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no curves: {type(error).__name__} {error}") from error
    for curve in curves:
        wanted = 1
        for domain in curve.domains.values():
            wanted *= len(domain)
        if tuple(sorted(curve.start.items())) not in curve.points or len(curve.points) != wanted:
            raise ValueError(f"{path}: {curve.name}: {len(curve.points)} points, a full grid has {wanted}")
    return source, curves


def _curve(one: dict[str, Any]) -> Curve:
    if len(one["points"]) > POINTS_MAX:
        raise ValueError(f"more than {POINTS_MAX} points")
    points = {
        tuple(sorted(point["values"].items())): Point(
            int(point["step_ns"]),
            *(point.get(name) for name in ("exposed_ns", "communication_ns", "alpha_ns", "ns_per_byte")),
        )
        for point in one["points"]
    }
    if any(point.step_ns <= 0 for point in points.values()):
        raise ValueError(f"{one['name']}: a step takes time")
    gradients = tuple(one.get("gradient_bytes") or ())
    return Curve(
        one["name"],
        dict(one["start"]),
        points,
        gradients,
        *(one.get(name) for name in ("batch_samples", "first_bucket_bytes", "backward_ns")),
        readiness=tuple((x, y) for x, y in one.get("readiness", EVEN)),
    )


if __name__ == "__main__":
    FILE.write_text(dump(simulate_all()))
