"""Looks up a device's peak FLOP/s, by its name and arithmetic, and its memory bandwidth.

MFU divides by the peak, so a wrong peak is worse than none: an unknown name, or a dtype without a published figure, has
no peak and no MFU.  All figures are *dense* (data sheets often print those with 2:4 sparsity, twice as high), with
accumulation in 32 bits, as torch does, and at the boost clock.  A card with a lower power limit never reaches them, and
MFU shows that.

Names are those of `torch.cuda.get_device_name`.  The longest entry that is a prefix of the name wins, so that
"NVIDIA H100 80GB HBM3" is the SXM board and "NVIDIA H100 PCIe" is not.

Needs only the standard library, because `pacecar analyze` runs without torch.

Left out: boards without a public data sheet (H800, A800, H20); MIG slices, whose peak is a share of the board's; and
fp8, whose operands are hidden in custom operators and tensor subclasses.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MEMORY_BANDWIDTHS", "PEAKS", "TF32", "has_tf32", "peak_bytes_per_second", "peak_flops_per_second"]

GIGA, TERA = 10**9, 10**12
TF32 = "tf32"

_Row = dict[str, float]


def _row(
    *, float32: float | None = None, tf32: float | None = None, half: float | None = None, bfloat16: float | None = None
) -> _Row:
    """Return one board's figures in TFLOP/s; `half` is fp16."""
    figures = {"float32": float32, TF32: tf32, "float16": half, "bfloat16": bfloat16}
    return {name: figure for name, figure in figures.items() if figure is not None}


def _ampere(float32: float, tf32: float, half: float) -> _Row:
    """Return the row of a board whose bfloat16 is as fast as its fp16, as on all since Ampere."""
    return _row(float32=float32, tf32=tf32, half=half, bfloat16=half)


_A100 = _ampere(19.5, 156.0, 312.0)  # "NVIDIA A100 Tensor Core GPU" data sheet: 40 and 80 GB, SXM and PCIe alike
_H100_SXM = _ampere(67.0, 494.5, 989.5)  # "NVIDIA H100 Tensor Core GPU" data sheet, H100 SXM, less sparsity
_H100_NVL = _ampere(60.0, 417.5, 835.5)  # the same data sheet, H100 NVL, one of the pair
_V100_SXM = _row(float32=15.7, half=125.0)  # "NVIDIA V100" data sheet, SXM2
_V100_PCIE = _row(float32=14.0, half=112.0)  # the same, PCIe

PEAKS: dict[str, _Row] = {
    "Tesla V100-SXM2": _V100_SXM,
    "Tesla V100-PCIE": _V100_PCIE,
    "Tesla V100S-PCIE": _row(float32=16.4, half=130.0),  # the same, V100S
    "Tesla T4": _row(float32=8.1, half=65.0),  # "NVIDIA T4" data sheet
    "NVIDIA A10": _ampere(31.2, 62.5, 125.0),  # "NVIDIA A10" data sheet
    "NVIDIA A30": _ampere(10.3, 82.0, 165.0),  # "NVIDIA A30" data sheet
    "NVIDIA A40": _ampere(37.4, 74.8, 149.7),  # "NVIDIA A40" data sheet
    "NVIDIA A100-SXM4": _A100,
    "NVIDIA A100-SXM-64GB": {},  # a custom chip with more SMs, no NVIDIA data sheet
    "NVIDIA A100-PCIE": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "A100-SXM4": _A100,  # drivers before 470 leave the maker's name out
    "A100-PCIE": _A100,
    "NVIDIA RTX A6000": _ampere(38.7, 77.4, 154.8),  # "NVIDIA Ampere GA102 GPU Architecture", table of RTX A6000
    "NVIDIA GeForce RTX 3090": _ampere(35.6, 35.6, 71.0),  # the same, appendix A, with fp32 accumulation
    "NVIDIA GeForce RTX 3090 Ti": {},  # another clock; not in that table
    "NVIDIA L4": _ampere(30.3, 60.0, 121.0),  # "NVIDIA L4" data sheet, less sparsity
    "NVIDIA L40": _ampere(90.5, 90.5, 181.05),  # "NVIDIA L40" data sheet
    "NVIDIA L40S": _ampere(91.6, 183.0, 362.05),  # "NVIDIA L40S" data sheet
    "NVIDIA RTX 6000 Ada Generation": _ampere(91.1, 182.1, 364.2),  # "NVIDIA Ada GPU Architecture", RTX 6000
    "NVIDIA GeForce RTX 4090": _ampere(82.6, 82.6, 165.2),  # the same, RTX 4090, with fp32 accumulation
    "NVIDIA GeForce RTX 4090 D": {},  # fewer SMs; not in that table
    "NVIDIA GeForce RTX 4090 Laptop": {},  # another chip
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 SXM": _H100_SXM,
    "NVIDIA H100 PCIe": _ampere(51.0, 378.0, 756.5),  # "NVIDIA H100 Tensor Core GPU" data sheet, PCIe, less sparsity
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _H100_SXM,  # "NVIDIA H200 Tensor Core GPU" data sheet: the figures of H100 SXM
    "NVIDIA H200 NVL": _H100_NVL,  # the same data sheet, H200 NVL: the figures of H100 NVL
    "NVIDIA GH200 480GB": _H100_SXM,  # "NVIDIA GH200 Grace Hopper Superchip" data sheet: the figures of H100 SXM
    "NVIDIA GH200 144G HBM3e": _H100_SXM,
    # Sources differ about fp32 (75 or 80) and TF32 of B200 (1.1 or 1.125 P), so these rows have 16 bits only.
    "NVIDIA B200": _row(half=2250.0, bfloat16=2250.0),  # "NVIDIA Blackwell" data sheet, HGX B200, less sparsity
    "NVIDIA B300": _row(half=2250.0, bfloat16=2250.0),  # "NVIDIA HGX" platform page, HGX B300: 36 P sparse of eight
    "NVIDIA GB200": _row(half=2500.0, bfloat16=2500.0),  # "NVIDIA GB200 NVL72" data sheet: 360 P sparse of 72
    "AMD Instinct MI210": _row(float32=45.3, half=181.0, bfloat16=181.0),  # "AMD Instinct MI210" data sheet, matrix
    # torch sees each of a board's two chips as a device: half of the data sheet's figure.
    "AMD Instinct MI250X": _row(float32=47.85, half=191.5, bfloat16=191.5),  # "AMD Instinct MI200 Series" data sheet
    "AMD Instinct MI250": _row(float32=45.25, half=181.05, bfloat16=181.05),  # the same
    # "AMD Instinct MI300X" and "MI325X" data sheets, matrix.
    "AMD Instinct MI300X": _ampere(163.4, 653.7, 1307.4),
    "AMD Instinct MI325X": _ampere(163.4, 653.7, 1307.4),
}
"""Prefix of the device's name -> arithmetic -> dense TFLOP/s.

An empty row is a different board whose name begins like a listed one.
"""


MEMORY_BANDWIDTHS: dict[str, float | None] = {
    "Tesla V100-SXM2": 900, "Tesla V100-PCIE": 900, "Tesla V100S-PCIE": 1134,
    "NVIDIA A10": 600, "NVIDIA A30": 933, "NVIDIA A40": 696,
    "NVIDIA A100-SXM4-40GB": 1555, "NVIDIA A100-PCIE-40GB": 1555, "A100-SXM4-40GB": 1555, "A100-PCIE-40GB": 1555,
    "NVIDIA A100-SXM4-80GB": 2039, "NVIDIA A100 80GB PCIe": 1935,
    "NVIDIA RTX A6000": 768, "NVIDIA GeForce RTX 3090": 936, "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA L4": 300, "NVIDIA L40": 864, "NVIDIA L40S": 864,
    "NVIDIA RTX 6000 Ada Generation": 960,
    "NVIDIA GeForce RTX 4090": 1008, "NVIDIA GeForce RTX 4090 D": None, "NVIDIA GeForce RTX 4090 Laptop": None,
    "NVIDIA H100 80GB HBM3": 3350, "NVIDIA H100 SXM": 3350, "NVIDIA H100 PCIe": 2000, "NVIDIA H100 NVL": 3900,
    "NVIDIA H200": 4800, "NVIDIA H200 NVL": 4800,
    "NVIDIA GH200 480GB": 4000, "NVIDIA GH200 144G HBM3e": 4900,
    "NVIDIA B200": 8000, "NVIDIA B300": 8000, "NVIDIA GB200": 8000,
    "AMD Instinct MI210": 1638.4, "AMD Instinct MI250X": 1638.4, "AMD Instinct MI250": 1638.4,
    "AMD Instinct MI300X": 5300, "AMD Instinct MI325X": 6000,
}  # fmt: skip
"""Prefix of the device's name -> memory bandwidth in GB/s, from the data sheets named in `PEAKS`.

MI250 and MI250X have half of the board's, as above.  None is a different board whose name begins like a listed one.  T4
is missing because NVIDIA's data sheet says 300 GB/s and its white paper 320.
"""


def peak_bytes_per_second(device_name: str) -> int | None:
    """Return the memory bandwidth of `device_name` by its data sheet; None if unknown."""
    name = _entry_of(device_name, MEMORY_BANDWIDTHS)
    gigabytes = None if name is None else MEMORY_BANDWIDTHS[name]
    return None if gigabytes is None else round(gigabytes * GIGA)


def peak_flops_per_second(device_name: str, arithmetic: str) -> int | None:
    """Return the dense peak of `device_name` in `arithmetic`, a torch dtype's name or `TF32`; None if unknown."""
    peak = _row_of(device_name).get(arithmetic)
    return None if peak is None else round(peak * TERA)


def has_tf32(device_name: str) -> bool:
    """Return whether the board has TF32; without it, torch's `allow_tf32` has no effect."""
    row = _row_of(device_name)
    return TF32 in row or "float32" not in row


def _row_of(device_name: str) -> _Row:
    name = _entry_of(device_name, PEAKS)
    return {} if name is None else PEAKS[name]


def _entry_of(device_name: str, entries: Iterable[str]) -> str | None:
    """Return the longest of `entries` that is a prefix of the name; None if there is none, or for a MIG slice."""
    if " MIG " in device_name:
        return None
    return max((name for name in entries if _is_of(device_name, name)), key=len, default=None)


def _is_of(device_name: str, entry: str) -> bool:
    """Return whether the name begins with the entry as a whole word: L4 is not L40."""
    rest = device_name[len(entry) :]
    return device_name.startswith(entry) and not rest[:1].isalnum()
