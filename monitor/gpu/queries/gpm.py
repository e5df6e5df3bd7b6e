"""Reads the GPU performance monitor of Hopper and later: how busy each part was between two readings.

`utilization` is the share of time in which any kernel ran: one thread on one SM makes it 100 %.  The GPU performance
monitor says how many SMs worked, how full they were and which pipes were used.  It returns means between two readings,
so the pair rolls: each tick reads into the older buffer, and one call returns all metrics between the two.

Older GPUs have no such monitor, and then no samples (rather than zero).  By nvml.h shares are in percent, rates in
MiB/s, and readings less than 100 ms apart are unreliable.

Left out: the rates of single links, which the NVLink counters give without loss; NVDEC, NVJPG and OFA.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from pacecar.metrics.catalog import WINDOW_NAMES
from pacecar.records import Sample

from ..driver import GpmSample, Handle, Nvml, NvmlError, UnsupportedError
from .refusals import Attempts, RefusedNumbers

__all__ = ["GPM_CALLS", "GPM_METRICS", "INSTANCE_PARTS", "Gpm", "GpmMetric"]

GPM_NS_MIN = 100_000_000
"""Least time between two readings (nvml.h, nvmlGpmMetricsGet)."""

GPM_CALLS = 2
"""Driver calls of one `ask`: a reading, and the call for the metrics."""

_PERCENT, _MIB = 0.01, 1024.0 * 1024.0


class GpmMetric(NamedTuple):
    """A GPM metric id, its series and the factor to the inside unit."""

    number: int
    metric: str
    labels: tuple[str, ...]
    factor: float


GPM_METRICS = (
    GpmMetric(1, "pacecar_gpu_graphics_active_ratio", (), _PERCENT),
    GpmMetric(2, "pacecar_gpu_sm_active_ratio", (), _PERCENT),
    GpmMetric(3, "pacecar_gpu_sm_occupancy_ratio", (), _PERCENT),
    GpmMetric(5, "pacecar_gpu_tensor_active_ratio", (), _PERCENT),
    GpmMetric(7, "pacecar_gpu_pipe_active_ratio", ("tensor_hmma",), _PERCENT),
    GpmMetric(8, "pacecar_gpu_pipe_active_ratio", ("tensor_dmma",), _PERCENT),
    GpmMetric(9, "pacecar_gpu_pipe_active_ratio", ("tensor_imma",), _PERCENT),
    GpmMetric(4, "pacecar_gpu_pipe_active_ratio", ("integer",), _PERCENT),
    GpmMetric(11, "pacecar_gpu_pipe_active_ratio", ("fp64",), _PERCENT),
    GpmMetric(12, "pacecar_gpu_pipe_active_ratio", ("fp32",), _PERCENT),
    GpmMetric(13, "pacecar_gpu_pipe_active_ratio", ("fp16",), _PERCENT),
    GpmMetric(10, "pacecar_gpu_dram_bandwidth_ratio", (), _PERCENT),
    GpmMetric(20, "pacecar_gpu_pcie_transmit_bytes_per_second", (), _MIB),
    GpmMetric(21, "pacecar_gpu_pcie_receive_bytes_per_second", (), _MIB),
    GpmMetric(60, "pacecar_gpu_nvlink_receive_bytes_per_second", (), _MIB),
    GpmMetric(61, "pacecar_gpu_nvlink_transmit_bytes_per_second", (), _MIB),
)

INSTANCE_PARTS = tuple(
    GpmMetric(number, "pacecar_gpu_instance_active_ratio", (part,), _PERCENT)
    for number, part in (
        (1, "graphics"),
        (2, "sm"),
        (3, "sm_occupancy"),
        (5, "tensor"),
        (10, "dram_bandwidth"),
        (11, "fp64"),
        (12, "fp32"),
        (13, "fp16"),
    )
)
"""Metrics of a MIG instance; links and PCIe belong to the whole GPU."""


class Gpm:
    """The rolling pair of readings of one GPU, or of one GPU instance in MIG mode."""

    def __init__(
        self, nvml: Nvml, metrics: tuple[GpmMetric, ...], labels: tuple[str, ...], gpu_instance: int | None = None
    ) -> None:
        self._nvml = nvml
        self._windowed = tuple(metric for metric in metrics if metric.metric in WINDOW_NAMES)
        self._metrics = self._windowed + tuple(metric for metric in metrics if metric.metric not in WINDOW_NAMES)
        self._attempts = {metric.number: Attempts() for metric in metrics}
        self._due_ns = dict.fromkeys(self._attempts, 0)
        self._labels = {metric.number: (*labels, *metric.labels) for metric in metrics}
        self._gpu_instance = gpu_instance
        self._pair: list[GpmSample] = []
        self._read_ns: int | None = None
        self._samples: list[Sample | NvmlError] = []

    def ask(self, handle: Handle, now_ns: int, *, with_details: bool = True) -> list[Sample | NvmlError]:
        """Return the means since the previous reading: none at the first, the last ones again within 100 ms.

        A metric that failed is in the list as its error, unless it fails so often that it is asked for less often.
        Without details only the windowed metrics are computed, and the others are served again.

        Raises:
            NvmlError: the pair is dropped, because the reading in it may be incomplete.
        """
        if self._read_ns is not None and now_ns - self._read_ns < GPM_NS_MIN:
            return self._samples
        before, self._read_ns, stand, self._samples = self._read_ns, None, self._samples, []
        if not self._pair:
            self._pair = [self._nvml.gpm_sample(), self._nvml.gpm_sample()]
        older, newer = self._pair
        self._nvml.gpm_read(handle, older, self._gpu_instance)
        self._pair = [newer, older]
        if before is not None:
            wanted = self._metrics if with_details else self._windowed
            asked = [metric for metric in wanted if now_ns >= self._due_ns[metric.number]]
            if asked:  # if all are refused, the pair rolls on until one is due
                answers = self._nvml.gpm_metrics(newer, older, [metric.number for metric in asked])
                self._samples = self._convert(asked, answers, now_ns)
            if not with_details:
                self._samples += [one for one in stand if isinstance(one, Sample) and one.metric not in WINDOW_NAMES]
        self._read_ns = now_ns
        return self._samples

    def close(self) -> None:
        """Free the pair; only in the driver session that it came from."""
        pair, self._pair, self._read_ns = self._pair, [], None
        for sample in pair:
            self._nvml.gpm_free(sample)

    def refused(self) -> RefusedNumbers:
        """Return how many metrics are refused."""
        before = [one.was_answered for one in self._attempts.values() if one.is_backed_off]
        return RefusedNumbers(before.count(False), before.count(True))

    def _convert(
        self, asked: list[GpmMetric], answers: list[float | NvmlError], now_ns: int
    ) -> list[Sample | NvmlError]:
        samples: list[Sample | NvmlError] = []
        for metric, answer in zip(asked, answers, strict=True):
            attempts = self._attempts[metric.number]
            if isinstance(answer, UnsupportedError):
                self._due_ns[metric.number] = now_ns + attempts.refused()
            elif isinstance(answer, NvmlError):
                self._due_ns[metric.number] = now_ns + attempts.failed()
            if isinstance(answer, NvmlError):
                if not attempts.is_backed_off:
                    samples.append(type(answer)(f"metric {metric.number} ({metric.metric}): {answer}", answer.code))
                continue
            attempts.answered()
            # A pair across a reset gives NaN; the next pair works again.
            if math.isfinite(answer) and answer >= 0:
                samples.append(Sample(metric.metric, self._labels[metric.number], answer * metric.factor))
        return samples
