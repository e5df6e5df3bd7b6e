"""Stands in for a CUDA device as far as the hook uses one, on simulated time.

`install` puts it where the product looks the real one up: the functions of `torch.cuda`, and for windows the calls of
torch's profiler.  Each stream does one thing after another, and none before the host asked for it:

    host     launch launch . . . . . launch
    stream   . [  kernel  ][  kernel  ] . .[ kernel ]     kernels say when they ran: the truth to compare with

The host's time moves only when a test moves it.  The device's clock has a rate, an offset and a resolution of its own.
What CUDA forbids is kept in `violations`: the hook catches whatever is raised at it, so an assertion would tell nobody.

Sources: the CUDA runtime's manual, cudaStreamBeginCapture and cudaThreadExchangeStreamCaptureMode (what is prohibited
while a stream captures), cudaEventElapsedTime (a float of milliseconds, cudaErrorNotReady), and ATen/cuda/CUDAEvent.h.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from pacecar import torch_internals
from tests.kit.fake_clock import FakeClock
from tests.profiler.test_trace_spans import Row

NEVER = 10**18
"""A kernel that takes so long is never done."""
CAPTURING = "CUDA error: operation not permitted when stream is capturing"
NOT_READY = "CUDA error: device not ready"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"
RESET = "CUDA error: context is destroyed"


class Kernel(NamedTuple):
    name: str
    stream: int
    launched_ns: int
    start_ns: int
    end_ns: int


class Stream:
    """Does what it is given in order; while it captures, launches go into a graph and do not run."""

    def __init__(self, cuda, device_index):
        self.cuda = cuda
        self.device_index = device_index
        self.cuda_stream = next(cuda.numbers)
        self.free_ns = 0
        self.capture = None
        self.kernels = []

    def wait_stream(self, stream):
        """Do nothing more before `stream` has done what it has now."""
        self.free_ns = max(self.cuda.now_ns, self.free_ns, stream.free_ns)
        self.kernels.append(Kernel("wait", self.cuda_stream, self.cuda.now_ns, self.free_ns, self.free_ns))
        self.cuda.host(self.cuda.launch_ns)

    def synchronize(self):
        self.cuda.synchronize()


class Capture:
    """A capture under way: of this thread's, or of another's (`is_elsewhere`)."""

    def __init__(self, mode, *, is_elsewhere):
        self.mode = mode
        self.is_elsewhere = is_elsewhere
        self.is_invalid = False
        self.kernels = []

    @property
    def forbids_unsafe_calls(self):
        return self.mode == "global" or (self.mode == "thread_local" and not self.is_elsewhere)


class Event:
    """torch.cuda.Event(enable_timing=True)."""

    def __init__(self, cuda):
        cuda.called("make")
        cuda.made += 1
        self.cuda = cuda
        self.passed_ns = None
        self.device_index = None
        self.context = cuda.contexts

    def record(self, stream=None):
        self.cuda.called("record")
        stream = stream or self.cuda.current_stream()
        if self.device_index not in (None, stream.device_index):
            raise RuntimeError("Event device does not match recording stream's device")
        self.device_index = stream.device_index
        if stream.capture is not None:
            self.cuda.violate("an event was recorded into a capture")
        self.passed_ns = max(self.cuda.now_ns, stream.free_ns)

    def query(self):
        self.cuda.called("query")
        self._is_usable()
        return self.passed_ns is None or self.passed_ns + self.cuda.late_ns <= self.cuda.now_ns

    def elapsed_time(self, end):
        self.cuda.called("elapsed_time")
        self._is_usable()
        if not (self.query() and end.query()):
            raise RuntimeError(NOT_READY)
        return float(np.float32((self.cuda.reading(end.passed_ns) - self.cuda.reading(self.passed_ns)) / 1e6))

    def synchronize(self):
        self.cuda.synchronize()

    def _is_usable(self):
        if self.context != self.cuda.contexts:
            raise RuntimeError(RESET)
        if any(capture.forbids_unsafe_calls for capture in self.cuda.captures):
            self.cuda.violate("an event was queried while a stream captured")
            for capture in self.cuda.captures:
                capture.is_invalid = True
            raise RuntimeError(CAPTURING)


class CudaStandIn:
    """One or more devices; the loop under test calls `host`, `launch`, `stream` and `capture`, the hook torch.cuda."""

    def __init__(self, clock=None, *, rate=1.0, offset_ns=0, resolution_ns=1, queue_max=None):
        self.clock = clock or FakeClock()
        self.rate = rate
        self.offset_ns = offset_ns
        self.resolution_ns = resolution_ns
        self.queue_max = queue_max
        """Launches that may be out; a host with more of them waits, as a driver's queue is bounded."""
        self.launch_ns = 1
        self.late_ns = 0
        """How much later than it was passed an event says so."""
        self.jumps = []
        """When the device's clock jumped, and by how much."""
        self.numbers = itertools.count(7)
        self.current_device = 0
        self.current = {}
        self.kernels = []
        self.captures = []
        self.contexts = 0
        self.made = 0
        self.synchronizations = 0
        self.calls = Counter()
        self.violations = []
        self.faults = {}
        self._session_ns = None

    # --- the loop -------------------------------------------------------------------------------

    @property
    def now_ns(self):
        return self.clock.monotonic_ns()

    @property
    def free_ns(self):
        return self.current_stream().free_ns

    def host(self, duration_ns):
        """Have the host do something of its own."""
        self.clock.advance(duration_ns)

    def launch(self, duration_ns, name="gemm"):
        """Launch a kernel, or a copy ("Memcpy HtoD"), on the current stream."""
        stream, launched = self.current_stream(), self.now_ns
        self.host(self.launch_ns)
        if stream.capture is not None:
            stream.capture.kernels.append((duration_ns, name))
            return
        start = max(launched, stream.free_ns)
        stream.free_ns = start + duration_ns
        kernel = Kernel(name, stream.cuda_stream, launched, start, stream.free_ns)
        self.kernels.append(kernel)
        stream.kernels.append(kernel)
        if self.queue_max is not None and len(self.kernels) > self.queue_max:
            self.host(max(0, self.kernels[-1 - self.queue_max].end_ns - self.now_ns))

    def replay(self, capture):
        for duration_ns, name in capture.kernels:
            self.launch(duration_ns, name)

    def wait(self):
        """Wait for the current stream, as the loop's own `loss.item()` does."""
        self.host(max(0, self.free_ns - self.now_ns))

    @contextlib.contextmanager
    def stream(self, stream):
        before = self.current_stream(stream.device_index)
        self.current[stream.device_index] = stream
        try:
            yield stream
        finally:
            self.current[stream.device_index] = before

    @contextlib.contextmanager
    def capture(self, mode="global", *, is_elsewhere=False):
        """Capture a graph on a stream of its own: this thread's current one, or another thread's."""
        stream, capture = Stream(self, self.current_device), Capture(mode, is_elsewhere=is_elsewhere)
        stream.capture = capture
        self.captures.append(capture)
        try:
            with contextlib.nullcontext() if is_elsewhere else self.stream(stream):
                yield capture
        finally:
            stream.capture = None
            self.captures.remove(capture)
        if capture.is_invalid:
            raise RuntimeError(INVALIDATED)

    def reset(self):
        """Destroy the context, and with it all events."""
        self.contexts += 1

    def fail(self, call, error, *, after=0):
        """Raise `error` at each `call` ("make", "record", "query", ..., "*" for any) but the first `after`."""
        self.faults[call] = [after, error]

    # --- the truth ------------------------------------------------------------------------------

    def passed(self, instant_ns, stream=None):
        """Return when the device had done all that the host launched on a stream before `instant_ns`, from kernels."""
        kernels = (stream or self.current_stream(0)).kernels
        at = bisect.bisect_left(kernels, instant_ns, key=lambda kernel: kernel.launched_ns)
        return max(instant_ns, kernels[at - 1].end_ns) if at else instant_ns

    def busy(self, start_ns, end_ns, names=None):
        """Return for how long between two instants any kernel of these names ran."""
        edge = busy = 0
        ran = [kernel for kernel in self.kernels if names in (None, kernel.name)]
        spans = sorted((max(kernel.start_ns, start_ns), min(kernel.end_ns, end_ns)) for kernel in ran)
        for start, end in spans:
            busy += max(0, end - max(start, edge))
            edge = max(edge, end)
        return busy

    # --- the runtime ----------------------------------------------------------------------------

    def reading(self, instant_ns):
        """Return the device's clock at an instant of the host's."""
        jumped = sum(by_ns for at_ns, by_ns in self.jumps if instant_ns >= at_ns)
        exact = self.offset_ns + instant_ns * self.rate + jumped
        return exact // self.resolution_ns * self.resolution_ns if self.resolution_ns > 1 else round(exact)

    def called(self, call):
        self.calls[call] += 1
        for name in (call, "*"):
            fault = self.faults.get(name)
            if fault is not None:
                fault[0] -= 1
                if fault[0] < 0:
                    raise fault[1]

    def violate(self, what):
        self.violations.append(what)

    def synchronize(self, device=None):
        self.synchronizations += 1

    def current_stream(self, device=None):
        index = self.current_device if device is None else getattr(device, "index", device)
        if index not in self.current:
            self.current[index] = Stream(self, index)
        return self.current[index]

    def install(self, monkeypatch):
        """Put it where the product looks CUDA up, until `monkeypatch` is undone."""

        def put(name, function):
            def called(*args, **kwargs):
                self.called(name)
                return function(*args, **kwargs)

            monkeypatch.setattr(f"torch.cuda.{name}", called)

        def exchange(index):
            before, self.current_device = self.current_device, index
            return before

        put("Event", lambda enable_timing=False: Event(self))
        put("current_stream", self.current_stream)
        put("current_device", lambda: self.current_device)
        put("_exchange_device", exchange)
        put("_maybe_exchange_device", exchange)
        put("is_current_stream_capturing", lambda: self.current_stream().capture is not None)
        put("synchronize", self.synchronize)
        put("get_device_name", lambda device=None: "NVIDIA H200")
        put("get_device_properties", lambda device=None: SimpleNamespace(uuid="0f", total_memory=1 << 37))
        put("memory_stats_as_nested_dict", lambda device=None: {})
        autograd = "torch._C._autograd"
        for looked_up in ("_found", "_lacking"):
            monkeypatch.setattr(torch_internals, looked_up, {})
        monkeypatch.setattr(f"{autograd}._prepare_profiler", lambda *args: None)
        monkeypatch.setattr(f"{autograd}._enable_profiler", self._begin_session)
        monkeypatch.setattr(f"{autograd}._disable_profiler", self._end_session)
        monkeypatch.setattr(f"{autograd}._profiler_enabled", lambda: self._session_ns is not None)
        return self

    def _begin_session(self, *_):
        if self.captures:
            self.violate("a session began while a stream captured")
        self._session_ns = self.now_ns

    def _end_session(self):
        """Return Kineto's rows: of what was launched in the session and is done."""
        begun, self._session_ns = self._session_ns, None
        wall = self.clock.wall_ns() - self.now_ns
        rows = []
        for name, stream, launched, start, end in self.kernels:
            if launched < begun:
                continue
            at = wall + launched
            rows.append(Row("cuda_runtime", "cudaLaunchKernel", at, at + self.launch_ns))
            if end <= self.now_ns:
                kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
                rows.append(Row(kind, name, wall + start, wall + end, stream, Row("cpu_op", "aten::mm", at, at + 1)))
        return SimpleNamespace(trace_activities=lambda: rows)


class DeviceParameter(nn.Parameter):
    """A parameter in the host's memory that says it is on a device: the one place where a CPU job differs from CUDA's.

    Torch itself computes on the CPU, so losses are real; the hook asks a model's first parameter where the job runs.
    """

    @property
    def device(self):
        return torch.device("cuda", 0)
