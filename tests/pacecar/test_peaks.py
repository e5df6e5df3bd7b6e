"""A name finds the peaks of exactly its board; unknown ones are absent."""

import pytest
import torch

from pacecar.device_peaks import (
    MEMORY_BANDWIDTHS,
    PEAKS,
    TF32,
    has_tf32,
    peak_bytes_per_second,
    peak_flops_per_second,
)
from pacecar.profiler.utilization.flop_counter import Arithmetic, runs_in_tf32

TERA = 10**12

NAMES = {
    "NVIDIA H100 80GB HBM3": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.5,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "A100-SXM4-40GB": 312.0,
    "NVIDIA A10": 125.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.05,
    "NVIDIA L40S": 362.05,
    "NVIDIA B300 SXM6 AC": 2250.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI250X": 191.5,
    "AMD Instinct MI250X / MI250": 191.5,
}


@pytest.mark.parametrize("name", NAMES)
def test_each_board_has_its_own_peak(name):
    assert peak_flops_per_second(name, "bfloat16") == round(NAMES[name] * TERA)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G", "NVIDIA A100-SXM-64GB", "NVIDIA H800", "NVIDIA H20", "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "AMD Instinct MI300A", "NVIDIA Graphics Device", "",
    ],
)  # fmt: skip
def test_a_board_that_is_not_in_the_table_has_none(name):
    assert peak_flops_per_second(name, "bfloat16") is None


def test_an_arithmetic_that_the_maker_gives_no_figure_for_has_none():
    assert peak_flops_per_second("Tesla V100-SXM2-32GB", "float16") == 125 * TERA
    assert peak_flops_per_second("Tesla V100-SXM2-32GB", "bfloat16") is None
    assert peak_flops_per_second("Tesla T4", TF32) is None
    assert peak_flops_per_second("NVIDIA H200", "float64") is None


def test_a_board_from_before_tf32_computes_fp32_as_fp32_whatever_torch_permits():
    assert not has_tf32("Tesla V100-SXM2-32GB")
    assert not has_tf32("AMD Instinct MI210")
    assert has_tf32("NVIDIA H200")
    assert has_tf32("NVIDIA B200"), "it has; only the figure is not in the table"


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("NVIDIA H100 80GB HBM3", 3350), ("NVIDIA A100-SXM4-40GB", 1555), ("NVIDIA A100-SXM4-80GB", 2039),
        ("AMD Instinct MI250X", 1638.4), ("NVIDIA GeForce RTX 4090 D", None), ("Tesla T4", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("", None),
    ],
)  # fmt: skip
def test_memories_have_the_bandwidth_of_their_own_board(name, gigabytes):
    assert peak_bytes_per_second(name) == (None if gigabytes is None else round(gigabytes * 10**9))


def test_every_board_with_a_bandwidth_has_a_row_of_peaks():
    for name in MEMORY_BANDWIDTHS:
        assert any(name.startswith(board) for board in PEAKS), name


def test_fewer_bits_are_never_slower():
    order = ("float32", TF32, "float16")
    for name, row in PEAKS.items():
        figures = [row[kind] for kind in order if kind in row]
        assert figures == sorted(figures), name
        assert row.get("bfloat16", row.get("float16")) == row.get("float16"), name


def test_fp32_work_runs_in_tf32_only_if_torch_says_so():
    product, convolution = Arithmetic(torch.float32), Arithmetic(torch.float32, is_convolution=True)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert not runs_in_tf32(product)
        torch.set_float32_matmul_precision("high")
        assert runs_in_tf32(product)
    finally:
        torch.set_float32_matmul_precision(before)
    assert runs_in_tf32(convolution), "torch's own default for convolutions"
    assert not runs_in_tf32(Arithmetic(torch.bfloat16))
