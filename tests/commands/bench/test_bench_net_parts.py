"""The parts of `pacecar bench net` that need no second process: sizes, the line, the rated speed, the words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.commands.bench.alpha_beta_fit import fit_line
from pacecar.commands.bench.document import LineFit, MeasuredOperation, Rated, Row
from pacecar.commands.bench.rated_bandwidth import RatedLinks, interface_speed, rate, rated_links
from pacecar.commands.bench.sizes import SIZES_MAX, SizeError, parse_size, steps
from pacecar.commands.bench.text import operation_lines, row_line, summary_lines
from tests.kit.machines import machine

SIZES = [4**n for n in range(5, 14)]


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("1K", 1024), ("1.5m", 1_572_864), ("2 GiB", 2 << 30), ("64KB", 65536)]
)
def test_sizes_are_read_as_powers_of_two(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "0", "1T", "K", "1e3", "nan", "17G"])
def test_text_that_is_not_a_size_is_quoted(text):
    with pytest.raises(SizeError, match=repr(text) if text else "''"):
        parse_size(text)


@pytest.mark.slow
@given(st.integers(1, 1 << 30), st.integers(1, 1 << 30), st.floats(1.5, 64))
def test_steps_begin_with_the_smallest_rise_and_stay_within(low, high, factor):
    if low > high:
        return
    sizes = steps(low, high, factor)
    assert sizes[0] == low
    assert sizes == sorted(set(sizes))
    assert sizes[-1] <= high < sizes[-1] * factor + 1
    assert len(sizes) <= SIZES_MAX


@pytest.mark.slow
@given(st.floats(1e3, 1e8), st.floats(0.01, 1000))
def test_a_line_is_found_again_whatever_its_alpha_and_beta(alpha, beta):
    fit = fit_line(SIZES, [alpha + size * beta for size in SIZES])
    assert fit.residual_ratio < 1e-6
    # What alpha or beta weighs nothing in no size's time cannot be told from zero.
    if alpha > 1e-3 * SIZES[0] * beta:
        assert fit.alpha_ns == pytest.approx(alpha, rel=1e-3)
    if SIZES[-1] * beta > 1e-3 * alpha:
        assert fit.ns_per_byte == pytest.approx(beta, rel=1e-3)


@pytest.mark.parametrize("odd", range(len(SIZES)))
def test_one_size_that_met_a_busy_moment_does_not_move_the_line(odd):
    times = [50_000 + 8.0 * size for size in SIZES]
    times[odd] *= 5
    fit = fit_line(SIZES, times)
    assert fit.alpha_ns == pytest.approx(50_000, rel=0.1)
    assert fit.ns_per_byte == pytest.approx(8.0, rel=0.1)
    assert fit.worst_bytes == SIZES[odd], "and it is named"
    assert fit.worst_residual_ratio == pytest.approx(0.8, abs=0.02)


@pytest.mark.slow
@given(st.lists(st.floats(1e3, 1e10), min_size=3, max_size=9))
def test_no_table_makes_a_negative_latency_or_rate(times):
    fit = fit_line(SIZES[: len(times)], times)
    if fit is None:  # one size weighs so much that it alone decides
        return
    assert fit.alpha_ns >= 0
    assert fit.ns_per_byte >= 0
    assert math.isfinite(fit.residual_ratio)
    assert fit.ns_per_byte > 0 or fit.bytes_per_second is None


def test_two_sizes_are_no_fit():
    assert fit_line([1024, 4096], [1.0, 2.0]) is None
    assert fit_line([1024, 1024, 1024], [1.0, 2.0, 3.0]) is None


def site(network: str, **known: int) -> RatedLinks:
    nothing: dict[str, int | None] = {"interface_speed": None, "rdma_speed": None, "nvlink_speed": None}
    return RatedLinks(network=network, host=network, address="10.0.0.1", interface="eth0", **{**nothing, **known})


@pytest.mark.parametrize(
    ("backend", "sites", "speed", "words"),
    [
        ("gloo", [site("a", interface_speed=9), site("a", interface_speed=9)], None, "memory of one machine"),
        ("gloo", [site("a", interface_speed=9), site("b", interface_speed=5)], 5, "interface eth0"),
        ("gloo", [site("a", interface_speed=9), site("b")], None, "does not report its speed"),
        ("nccl", [site("a", nvlink_speed=7), site("a", nvlink_speed=4)], 4, "NVLink"),
        ("nccl", [site("a", nvlink_speed=7), site("a")], None, "NVML reports no NVLink"),
        ("nccl", [site("a", rdma_speed=8, interface_speed=1), site("b", rdma_speed=6, interface_speed=1)], 6, "RDMA"),
        ("nccl", [site("a", rdma_speed=8, interface_speed=2), site("b", interface_speed=1)], 1, "interface eth0"),
    ],
)
def test_the_rated_speed_is_that_of_the_slowest_end_of_the_road_in_use(backend, sites, speed, words):
    found = rate(backend, sites)
    assert found.bytes_per_second == speed
    assert words in found.basis


def test_a_real_interface_says_its_speed_and_a_virtual_one_is_not_believed(tmp_path):
    system = machine("training_host", tmp_path) / "sys"
    speed = interface_speed("eth0", system)
    assert speed == int((system / "class/net/eth0/speed").read_text()) * 1_000_000 // 8
    assert (system / "class/net/veth1/speed").exists()
    assert interface_speed("veth1", system) is None
    assert interface_speed("none", system) is None


def test_a_rank_looks_where_its_packets_leave():
    here = rated_links("gloo", "127.0.0.1", environ={})
    assert (here.address, here.interface, here.interface_speed) == ("127.0.0.1", "lo", None)
    nowhere = rated_links("gloo", "no-such-host.invalid", environ={})
    assert (nowhere.address, nowhere.interface) == (None, None)
    named = {"GLOO_SOCKET_IFNAME": "lo"}
    assert rated_links("gloo", "no-such-host.invalid", environ=named).interface == "lo"
    excluding = {"GLOO_SOCKET_IFNAME": "^docker,lo"}
    assert rated_links("gloo", "127.0.0.1", environ=excluding).interface == "lo", "the route's"


def row(size: int, wrong: int = 0) -> Row:
    return Row(bytes=size, count=size // 4, iterations=20, time_ns=1_234_567, low_ns=1_200_000, high_ns=1_300_000,
               algorithm_bytes_per_second=1.25e9, bus_bytes_per_second=2.5e9, wrong=wrong)  # fmt: skip


def test_a_row_has_nccl_tests_units():
    """Size, count, type, redop, root, time, algbw, busbw and #wrong as nccl-tests prints them, then our quartiles."""
    columns = ["4096", "1024", "float", "sum", "-1", "1235", "1.250", "2.500", "0", "1200", "1300"]
    assert row_line(row(4096), "all_reduce").split() == columns
    assert row_line(row(4096), "all_gather").split()[3] == "none"
    head = [line.removeprefix("#").split() for line in operation_lines("all_reduce")]
    assert head[2] == ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "25%", "75%"]


def test_what_is_unknown_is_said_and_compared_with_nothing():
    operation = MeasuredOperation(operation="all_reduce", bus_factor=1.0, rows=(row(4096), row(8192, 3)))
    text = "\n".join(summary_lines(operation, Rated(bytes_per_second=None, basis="unknown")))
    assert "of rated" not in text
    assert "3 FAILED" in text
    assert "Fit" not in text
    flat = LineFit(alpha_ns=1e3, beta_ns_per_byte=0.0, half_bandwidth_bytes=None, bus_bytes_per_second=None,
                   residual_ratio=0.1, worst_residual_ratio=-0.2, worst_bytes=4096, method="m")  # fmt: skip
    fitted = MeasuredOperation(operation="all_reduce", bus_factor=1.0, rows=(row(4096),), fit=flat)
    lines = list(summary_lines(fitted, Rated(bytes_per_second=5_000_000_000, basis="x")))
    assert any("50.0 % of rated" in line for line in lines)
    assert not any("large sizes" in line for line in lines)
