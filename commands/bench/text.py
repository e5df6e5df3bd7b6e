"""Formats the result in the layout of nccl-tests: its columns, in its order and units, with a summary below.

    time is in microseconds, algbw and busbw in 10^9 bytes per second; all lines except rows begin with #

The quartiles, which nccl-tests does not have, follow its columns, so that programs that read nccl-tests can read these
tables too.

Pure: values in, lines out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pacecar.formatting.quantities import percent, size_text

from .document import AlgorithmsBench, BenchPlace, LineFit, MeasuredOperation, NetBench, Rated, Row

__all__ = ["closing_lines", "heading_lines", "operation_lines", "row_line", "summary_lines", "winner_lines"]

HEAD = (
    "#       size         count      type   redop    root       time     algbw     busbw  #wrong       25%       75%",
    "#        (B)    (elements)                               (us)    (GB/s)    (GB/s)              (us)      (us)",
)

PLACES_SHOWN = 16
"""The first few of a thousand ranks show their layout."""


def heading_lines(
    places: Sequence[BenchPlace], rated: Rated, backend: str, warmup: int, iterations: int
) -> Iterator[str]:
    """Yield the facts known before the first row."""
    counts = f"{warmup} warm-up, up to {iterations} iterations"
    yield f"# pacecar bench net: {len(places)} ranks, {backend}, float32; {counts}"
    for place in places[:PLACES_SHOWN]:
        via = "" if place.interface is None else f", via {place.interface}"
        yield f"#  Rank {place.rank:>3} Pid {place.pid:>7} on {place.host}, {place.device}{via}"
    if len(places) > PLACES_SHOWN:
        yield f"#  ... and {len(places) - PLACES_SHOWN} more"
    yield f"#  Rated {_rated_text(rated)}"


def operation_lines(operation: str) -> Iterator[str]:
    """Yield the head of one table."""
    yield "#"
    yield f"# {operation}"
    yield from HEAD


def row_line(row: Row, operation: str) -> str:
    """Return one row of the table of `operation`."""
    time, low, high = (f"{_figure(ns / 1e3):>10}" for ns in (row.time_ns, row.low_ns, row.high_ns))
    how = f"{'none' if operation == 'all_gather' else 'sum':>8}{-1:>8}"
    widths = "".join(
        f"{_figure(speed / 1e9):>10}" for speed in (row.algorithm_bytes_per_second, row.bus_bytes_per_second)
    )
    return f"{row.bytes:>12}{row.count:>14}     float{how}{time:>11}{widths}{row.wrong:>8}{low}{high}"


def summary_lines(operation: MeasuredOperation, rated: Rated) -> Iterator[str]:
    """Yield the summary of a table."""
    if operation.rows:
        yield f"# Out of bounds values : {_verdict(operation.rows)}"
        average = sum(row.bus_bytes_per_second for row in operation.rows) / len(operation.rows)
        yield f"# Avg bus bandwidth    : {_figure(average / 1e9)} GB/s"
        best = max(operation.rows, key=lambda row: row.bus_bytes_per_second)
        share = ""
        if rated.bytes_per_second is not None:
            share = f", {percent(best.bus_bytes_per_second / rated.bytes_per_second)} of rated"
        fastest = f"{_figure(best.bus_bytes_per_second / 1e9)} GB/s at {size_text(best.bytes)}"
        yield f"# Best bus bandwidth   : {fastest}{share}"
    if operation.fit is not None:
        yield from _fit_lines(operation.fit)
    if operation.missing is not None:
        yield f"# Not measured         : {operation.missing}"


def closing_lines(result: NetBench) -> Iterator[str]:
    """Yield the reason if the run ended early."""
    if result.failure is not None:
        yield f"# Ended early: {result.failure}"


def winner_lines(result: AlgorithmsBench) -> Iterator[str]:
    """Yield where a setting beats NCCL's own choice, and which settings were not measured."""
    for one in result.settings:
        if one.failure is not None:
            yield f"# {one.setting} not measured: {one.failure}"
    yield "# operation           bytes  setting                    us   NCCL's us   less time (quartiles)"
    for winner in result.winners:
        less, least, most = map(percent, (winner.gain_ratio, winner.gain_low, winner.gain_high))
        times = "".join(f"{_figure(ns / 1e3):>12}" for ns in (winner.time_ns, winner.default_ns))
        yield f"  {winner.operation:<14}{winner.bytes:>10}  {winner.setting:<18}{times}   {less} ({least} .. {most})"
    if not result.winners:
        yield "# nothing measured beats NCCL's own choice for certain"


def _fit_lines(fit: LineFit) -> Iterator[str]:
    alpha, beta = fit.alpha_ns / 1e3, fit.beta_ns_per_byte
    yield f"# Fit                  : time = {_figure(alpha)} us + bytes x {_figure(beta)} ns"
    if fit.bus_bytes_per_second is not None and fit.half_bandwidth_bytes is not None:
        speed, half = fit.bus_bytes_per_second / 1e9, size_text(round(fit.half_bandwidth_bytes))
        yield f"#   large sizes reach busbw {_figure(speed)} GB/s; half of it at {half}, below that latency dominates"
    where = f"{size_text(fit.worst_bytes)} is furthest off, {percent(fit.worst_residual_ratio, signed=True)}"
    yield f"#   residual {percent(fit.residual_ratio)} (root mean square of relative errors); {where}"
    yield f"#   {fit.method}"


def _verdict(rows: Sequence[Row]) -> str:
    wrong = sum(row.wrong for row in rows)
    return "0 OK" if wrong == 0 else f"{wrong} FAILED"


def _rated_text(rated: Rated) -> str:
    if rated.bytes_per_second is None:
        return f"unknown: {rated.basis}"
    gigabytes = rated.bytes_per_second / 1e9
    return f"{8 * gigabytes:.4g} Gbit/s = {_figure(gigabytes)} GB/s one way: {rated.basis}"


def _figure(value: float) -> str:
    """Return four significant digits without an exponent: 0.1187, 12.35, 104900."""
    if value == 0:
        return "0"
    for digits, bound in ((0, 1000.0), (1, 100.0), (2, 10.0), (3, 1.0), (4, 0.1), (5, 0.01)):
        if abs(value) >= bound:
            return f"{value:.{digits}f}"
    return f"{value:.6f}"
