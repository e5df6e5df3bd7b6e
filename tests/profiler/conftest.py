"""What tests of the hook share: a small job, and a guarantee that no test leaves a hook behind."""

import pytest
import torch
from torch import nn

from pacecar.config import HookConfig
from pacecar.profiler.hook import single_instance
from pacecar.profiler.hook.hook import Hook, make_hello
from pacecar.records import StepRecord
from tests.kit.listeners import HeardSteps


class Sink:
    """Keeps what it is given; who looks sees all steps that are over."""

    def __init__(self):
        self.hooks = []
        self.dropped = 0
        self._records = []

    @property
    def records(self):
        for hook in self.hooks:
            hook.records.flush()
        return self._records

    @property
    def steps(self):
        return [record for record in self.records if isinstance(record, StepRecord)]

    def put(self, record):
        self._records.append(record)

    def close(self, timeout_seconds):
        pass


class Job:
    """A plain training loop of an MLP, with or without a hook."""

    def __init__(self, width=48, layers=3, seed=0):
        torch.manual_seed(seed)
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*parts, nn.Linear(width, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(seed + 1)
        self.batches = [
            (torch.randn(16, width, generator=generator), torch.randn(16, 4, generator=generator)) for _ in range(8)
        ]

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = (self.model(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self, steps, data=None):
        losses = []
        while len(losses) < steps:
            for x, y in self.batches if data is None else data:
                losses.append(self.step(x, y))
                if len(losses) == steps:
                    break
        return losses


@pytest.fixture
def job():
    torch.set_num_threads(1)
    return Job()


@pytest.fixture
def sink():
    return Sink()


GENEROUS = HookConfig(overhead_budget=1.0, window_interval_steps=5)
"""Windows as often as asked for, whatever they cost on a small job."""


@pytest.fixture
def attach(sink):
    """Return a function that starts a hook on a job; whatever it started is closed at the end."""
    started = []

    def start(job, *, config=GENEROUS, on_boundary=None, on_timed=None, listener=None, **arguments):
        hook = Hook(
            job.model, job.optimizer, hello=make_hello(job.model, environ={}), config=config, sinks=[sink], **arguments
        )
        started.append(hook)
        sink.hooks.append(hook)
        hook.start(HeardSteps(on_boundary, on_timed) if on_boundary or on_timed else listener)
        return hook

    yield start
    for hook in started:
        hook.close()
    assert not single_instance.attached
