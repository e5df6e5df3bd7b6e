"""Trains a small model with pacecar attached, whose forward runs work of known length; prints what each step did.

    python -m tests.gpu.ledger_job overlap --steps 60 --run-dir FOLDER

On a GPU the work is spin kernels (`torch.cuda._sleep`, which counts the device's clock) of a quarter of a millisecond
and copies from and to pinned memory, and events say when a run of them ran.  On a CPU it is a loop of matrix products,
whose time is taken.  Times are those of the wall clock: each step begins with an event on a device that has nothing to
do, so that the device passes it as the host records it.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pacecar

MS = 1e-3
PIECE_SECONDS = 0.25 * MS
COPY_BYTES = 256 << 20
COPIES = 8


class Device:
    """Runs work of known length, and knows when each piece ran since the step began."""

    def __init__(self) -> None:
        self.is_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        self._pieces: list[tuple[str, Any, Any]] = []
        self._numbers = torch.randn(128, 128)
        if not self.is_gpu:
            return
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.pinned = [torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
        self.there = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self.cycles_a_second = self._calibrate()
        self.graph: torch.cuda.CUDAGraph | None = None

    def _calibrate(self) -> float:
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # clocks rise
        begin, end = self._event(), self._event()
        begin.record()
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        return 50_000_000 / (begin.elapsed_time(end) * MS)

    @staticmethod
    def _event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Begin a step."""
        self._pieces = []
        if self.is_gpu:
            self._zero = self._event()
            torch.cuda.synchronize()
            self._zero.record()
        self._zero_seconds = time.time()

    def spans(self) -> list[tuple[str, float, float]]:
        """Return kind, begin and end, in seconds since 1970, of what ran; waits for it."""
        if not self.is_gpu:
            return [(kind, begin, end) for kind, begin, end in self._pieces]
        torch.cuda.synchronize()

        def at(event: Any) -> float:
            return self._zero_seconds + float(self._zero.elapsed_time(event)) * MS

        return [(kind, at(begin), at(end)) for kind, begin, end in self._pieces]

    def _timed(self, kind: str, act: Callable[[], object], stream: Any = None) -> None:
        if not self.is_gpu:
            begun = time.time()
            act()
            self._pieces.append((kind, begun, time.time()))
            return
        begin, end = self._event(), self._event()
        with torch.cuda.stream(stream if stream is not None else torch.cuda.current_stream()):
            begin.record()
            act()
            end.record()
        self._pieces.append((kind, begin, end))

    def spin(self, seconds: float, stream: Any = None) -> None:
        """Compute for so long on `stream`."""
        if self.is_gpu:
            cycles = int(PIECE_SECONDS * self.cycles_a_second)
            count = round(seconds / PIECE_SECONDS)
            self._timed("compute", lambda: [torch.cuda._sleep(cycles) for _ in range(count)], stream)  # type: ignore[no-untyped-call]
            return

        def multiply() -> None:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                self._numbers.mm(self._numbers)

        self._timed("compute", multiply)

    def copy(self, which: int, stream: Any, *, to_device: bool) -> None:
        """Copy COPY_BYTES between host and device."""
        if not self.is_gpu:
            return
        ends = (self.there[which], self.pinned[which]) if to_device else (self.pinned[which], self.there[which])
        parts = list(zip(*(end.chunk(COPIES) for end in ends), strict=True))
        self._timed("copy", lambda: [to.copy_(what, non_blocking=True) for to, what in parts], stream)

    def fork(self) -> None:
        """Let the side streams wait for the main one."""
        if self.is_gpu:
            for stream in self.streams:
                stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Let the main stream wait for the side streams."""
        if self.is_gpu:
            for stream in self.streams:
                torch.cuda.current_stream().wait_stream(stream)

    def sync(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def replay(self) -> None:
        """Replay a graph of forty spins."""
        if not self.is_gpu:
            self.spin(10 * MS)
            return
        if self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                for _ in range(40):
                    torch.cuda._sleep(int(PIECE_SECONDS * self.cycles_a_second))  # type: ignore[no-untyped-call]
        self._timed("compute", self.graph.replay)


def one_stream(work: Device) -> None:
    """Spin for 10 ms, wait for it, and let the host sleep for 5 ms."""
    work.spin(10 * MS)
    work.sync()
    time.sleep(5 * MS)


def two_streams(work: Device) -> None:
    """Spin for 10 ms on each of two streams, the second of which begins while the first runs."""
    if not work.is_gpu:
        work.spin(10 * MS)
        return
    work.fork()
    work.spin(10 * MS, work.streams[0])
    with torch.cuda.stream(work.streams[1]):
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    work.spin(12 * MS, work.streams[1])
    work.join()


def hidden_copy(work: Device) -> None:
    """Copy to the device while a longer kernel runs."""
    work.fork()
    work.spin(20 * MS)
    work.copy(0, work.streams[0] if work.is_gpu else None, to_device=True)
    work.join()


def exposed_copy(work: Device) -> None:
    """Copy to the device after a kernel."""
    work.spin(5 * MS)
    if work.is_gpu:
        work.copy(0, torch.cuda.current_stream(), to_device=True)


def both_engines(work: Device) -> None:
    """Copy to the device and from it at once, while nothing else runs."""
    work.fork()
    work.spin(2 * MS)
    work.fork()
    work.copy(0, work.streams[0] if work.is_gpu else None, to_device=True)
    work.copy(1, work.streams[1] if work.is_gpu else None, to_device=False)
    work.join()


def graph(work: Device) -> None:
    """Replay a CUDA graph."""
    work.replay()


SCENES = {act.__name__: act for act in (one_stream, two_streams, hidden_copy, exposed_copy, both_engines, graph)}


class Scene(nn.Module):
    """A linear layer, before which a scene runs."""

    def __init__(self, work: Device, act: Callable[[Device], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self._work = work
        self._act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._act(self._work)
        y: torch.Tensor = self.linear(x)
        return y


def main() -> None:
    """Train, and print the spans of all that ran."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scene", choices=sorted(SCENES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run-dir", required=True, type=Path)
    options = parser.parse_args()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pacecar").addHandler(handler)
    logging.getLogger("pacecar").setLevel(logging.INFO)
    work = Device()
    model = Scene(work, SCENES[options.scene]).to(work.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8, 64, device=work.device)
    spans: list[tuple[str, float, float]] = []
    with pacecar.attach(
        model, optimizer, tune="off", run_dir=options.run_dir, overhead_budget=1.0, window_interval_steps=8,
    ) as pacer:  # fmt: skip
        for _ in range(options.steps):
            for batch in pacer.data([x]):
                work.begin()
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                spans += work.spans()
    print(json.dumps({"spans": spans, "log": said}))


if __name__ == "__main__":
    main()
