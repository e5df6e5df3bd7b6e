"""A training loop on a simulated device: real losses and gradients on the CPU, and what it launches on the device.

It notes by itself when the host entered which phase, so that what the device did in each can be told from the kernels,
without any event.
"""

from __future__ import annotations

import itertools
import random

import torch
from torch import nn

from tests.profiler.cuda_standin import DeviceParameter, Stream

__all__ = ["MS", "US", "DeviceJob"]

US = 1_000
MS = 1_000_000


class Launching(torch.autograd.Function):
    """Launches the kernels of a backward."""

    @staticmethod
    def forward(ctx, tensor, job):
        ctx.job = job
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        ctx.job.work("backward")
        return gradient, None


class Net(nn.Module):
    """Two layers, each with a kernel or more on the device."""

    def __init__(self, job):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        for layer in (self.first, self.second):
            layer.weight, layer.bias = DeviceParameter(layer.weight.data), DeviceParameter(layer.bias.data)
        self.job = job

    def forward(self, x):
        self.job.work("forward")
        return Launching.apply(self.second(torch.relu(self.first(x))), self.job)


class Descent(torch.optim.Optimizer):
    """Gradient descent, which launches a kernel or more."""

    def __init__(self, job, parameters):
        super().__init__(parameters, {})
        self.job = job

    @torch.no_grad()
    def step(self, closure=None):
        self.job.work("optimizer")
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.05)


class DeviceJob:
    """`work_us` and `launch_us` are what each kernel takes, and the host before each, about; `wait_us` is the loader's.

    `copies_us` is what a copy on a stream of its own takes; the kernels wait for it, unless it is prefetched for a
    later step.  `at` is called with a step and a place in it.
    """

    def __init__(
        self, cuda, *, work_us=200, launch_us=20, wait_us=30, kernels=3, micro_batches=1, copies_us=None,
        is_prefetching=False, asks_every=None, seed=0,
    ):  # fmt: skip
        torch.manual_seed(seed)
        self.cuda = cuda
        self.model = Net(self)
        self.optimizer = Descent(self, self.model.parameters())
        self.random = random.Random(seed)
        self.work_us, self.launch_us, self.wait_us, self.kernels = work_us, launch_us, wait_us, kernels
        self.micro_batches, self.copies_us, self.asks_every = micro_batches, copies_us, asks_every
        self.is_prefetching = is_prefetching
        self.copying = Stream(cuda, 0)
        self.at = None
        self.step = 0
        self.marks = [[]]
        """By step the instants at which the host entered a phase, each with its stream."""
        draw = torch.Generator().manual_seed(seed + 1)
        self.batches = [(torch.randn(8, 8, generator=draw), torch.randn(8, 4, generator=draw)) for _ in range(8)]

    def run(self, steps, hook=None):
        """Train; return losses and final parameters as bytes."""
        losses = []
        for batches in self._steps(steps, hook):
            self.optimizer.zero_grad()
            for x, y in batches:
                loss = (self.model(x) - y).square().mean()
                loss.backward()
                self.mark("rest")
            self.optimizer.step()
            self.mark("rest")
            self.step += 1
            self.marks.append([])
            self.mark("rest")
            losses.append(loss.detach())
            if self.asks_every and self.step % self.asks_every == 0:
                self.cuda.wait()
        parameters = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        return torch.stack(losses).numpy().tobytes(), parameters

    def _steps(self, steps, hook):
        source = self._batches()
        source = source if hook is None else iter(hook.loop.data(source))
        for _ in range(steps):
            yield [next(source) for _ in range(self.micro_batches)]

    def _batches(self):
        number = 0
        while True:
            self.mark("data_wait")
            self.cuda.host(self._about(self.wait_us))
            if self.copies_us is not None:
                with self.cuda.stream(self.copying):
                    self.cuda.launch(self._about(self.copies_us), "Memcpy HtoD")
                if not self.is_prefetching:
                    self.cuda.current_stream().wait_stream(self.copying)
            self.mark("rest")
            yield self.batches[number % len(self.batches)]
            number += 1

    def work(self, phase):
        """Launch the kernels of a phase."""
        self.mark(phase)
        if self.at is not None:
            self.at(self.step, phase)
        for _ in range(self.kernels):
            self.cuda.host(self._about(self.launch_us))
            self.cuda.launch(self._about(self.work_us))
        if phase == "forward":
            self.mark("rest")

    def mark(self, phase):
        self.marks[-1].append((phase, self.cuda.now_ns, self.cuda.current_stream(0)))

    def _about(self, duration_us):
        return round(duration_us * US * self.random.uniform(0.5, 1.5))

    def on_device(self, step):
        """Return how long the device took for each phase of `step`, by its kernels."""
        phases = {}
        marks = [*self.marks[step], self.marks[step + 1][0]]
        passed = self.cuda.passed(*marks[0][1:])
        for (phase, *_), (_, instant, stream) in itertools.pairwise(marks):
            until = max(passed, self.cuda.passed(instant, stream))
            phases[phase] = phases.get(phase, 0) + until - passed
            passed = until
        return {phase: duration for phase, duration in phases.items() if duration}
