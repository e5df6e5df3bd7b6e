"""A micro-batch that does not fit costs no step: found out beforehand, or redone, and the gradient is the batch's."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import TuneConfig
from pacecar.controller.knobs.actuator import ActuatorError
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.controller.knobs.batch.micro_batch_knobs import MicroBatchActuator, MicroTokensActuator
from pacecar.controller.knobs.batch.oom_safe_trial import (
    MemoryForecast,
    OomSafeTrial,
    TrialPeers,
    is_out_of_memory,
    predict,
)
from tests.kit.forking_python import forking_python
from tests.kit.lone_rank import lone_rank

BATCH = 12
GIB = 2**30


class Counting(nn.Module):
    """Has a buffer that every forward changes, and draws a random number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(3)
        out: Tensor = self.layers(x)
        return out


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("planted in backward")


class Reasons(TrialPeers):
    """Keeps why sizes were barred."""

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons

    def reverted(self, reason: str) -> None:
        self.reasons.append(reason)


class Job:
    """A model, its batch, and a loss that runs out of memory above `cap` samples."""

    def __init__(self, micro_batch: int | None = 2, *, where: str = "forward", cap: int | None = None, **how: Any):
        self.net: Any = how.get("net") or Counting()
        self.batcher = MicroBatcher(how.get("ddp"), micro_batch, scaler=how.get("scaler"))
        self.trials = OomSafeTrial(self.net, self.batcher)
        self.reasons: list[str] = []
        self.trials.join(Reasons(self.reasons))
        self.knob = MicroBatchActuator(self.net, self.batcher, TuneConfig(), self.trials)
        self.cap, self.where = cap, where
        self.sizes: list[int] = []
        self.sync: list[bool] = []
        self.error: Callable[[], Exception] = lambda: torch.OutOfMemoryError("planted in forward")
        self.x = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(1), dtype=torch.double)

    def loss(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if self.batcher.ddp is not None:
            self.sync.append(self.batcher.ddp.require_backward_grad_sync)
        is_over = self.cap is not None and len(x) > self.cap
        if is_over and self.where == "forward":
            raise self.error()
        out = (self.batcher.ddp or self.net)(x)
        if is_over:
            out = torch.cat([Breaking.apply(out[:1]), out[1:]])  # some gradients arrive, some do not
        return out.square().mean()

    def step(self) -> float:
        return self.trials.train_batch(self.x, self.loss).item()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.net.parameters() if p.grad is not None]


def whole() -> tuple[float, list[Tensor]]:
    job = Job(None)
    return job.step(), job.gradients()


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(
        torch.allclose(a, b, rtol=1e-12) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_size_that_does_not_fit_is_barred_and_the_step_is_done_at_the_old_one(where: str) -> None:
    job = Job(2, where=where, cap=3)
    job.step()
    job.net.zero_grad()
    job.knob.apply(4)
    job.sizes.clear()
    loss = job.step()
    assert job.sizes == [4, 2, 2, 2, 2, 2, 2], "one scratch pass, then the step"
    assert loss == pytest.approx(whole()[0])
    assert same(job.gradients(), whole()[1])
    assert job.knob.value() == 2
    assert len(job.reasons) == 1
    assert job.reasons[0].startswith(
        f"micro_batch 4 is barred and 2 in force again: OutOfMemoryError: planted in {where}"
    )
    assert [job.knob.is_barred(size) for size in (3, 4, 8)] == [False, True, True]
    with pytest.raises(ActuatorError, match="did not fit"):
        job.knob.apply(8)


def test_a_size_is_tried_once_and_smaller_ones_never() -> None:
    job = Job(2)
    passes = []
    for size in (4, 4, 1, 4, 12, 6):
        job.knob.apply(size)
        job.sizes.clear()
        job.step()
        passes.append(len(job.sizes))
    assert passes == [3 + 1, 3, 12, 3, 1 + 1, 2]
    assert job.reasons == []


@pytest.mark.parametrize("where", ["nothing", "forward", "backward"])
def test_trying_leaves_no_trace(where: str) -> None:
    """Gradients that were there, buffers and random numbers: the step after it is the step without it."""

    def run(tries: bool) -> tuple[list[Tensor], float, list[float]]:
        job = Job(2, where=where, cap=None if where == "nothing" else 2)
        job.step()  # leaves gradients to accumulate onto
        if tries:
            job.knob.apply(6)
            kept = [id(p.grad) for p in job.net.parameters()]
            with torch.random.fork_rng():
                job.trials._scratch(lambda: job.x[:6], job.loss, 0)
            assert [id(p.grad) for p in job.net.parameters()] == kept
            job.batcher.samples.value = 2
        torch.manual_seed(7)
        job.step()
        return job.gradients(), float(job.net.calls), torch.rand(2).tolist()

    (tried, calls, drawn), (plain, plain_calls, plain_drawn) = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(tried, plain, strict=True))
    assert (calls, drawn) == (plain_calls, plain_drawn)


@pytest.fixture
def ddp(tmp_path: Path) -> Iterator[DistributedDataParallel]:
    with lone_rank(tmp_path):
        yield DistributedDataParallel(Counting())


@pytest.mark.slow
def test_under_ddp_a_size_is_tried_without_synchronization(ddp: DistributedDataParallel) -> None:
    job = Job(4, ddp=ddp, net=ddp, cap=6)
    job.step()
    ddp.zero_grad()
    job.sync.clear()
    job.knob.apply(12)
    job.step()
    assert job.sync == [False, False, False, True]
    assert (ddp.require_backward_grad_sync, ddp.require_forward_param_sync) == (True, True)
    assert same(job.gradients(), whole()[1])


def test_under_ddp_what_fails_while_others_wait_is_the_script_s_error(ddp: DistributedDataParallel) -> None:
    job = Job(None, ddp=ddp, net=ddp, cap=6, where="backward")
    with pytest.raises(torch.OutOfMemoryError):
        job.step()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_under_ddp_a_micro_batch_before_the_last_is_redone(ddp: DistributedDataParallel, where: str) -> None:
    job = Job(5, ddp=ddp, net=ddp, cap=4, where=where)
    assert job.step() == pytest.approx(whole()[0])
    assert job.sizes == [5, 2, 2, 2, 2, 2, 2]
    assert same(job.gradients(), whole()[1])


@pytest.mark.slow
def test_under_ddp_the_last_micro_batch_is_redone_before_its_backward(ddp: DistributedDataParallel) -> None:
    job = Job(None, ddp=ddp, net=ddp, cap=6)
    for _ in range(2):
        ddp.zero_grad()
        assert job.step() == pytest.approx(whole()[0])
        assert same(job.gradients(), whole()[1])
    assert job.sizes == [12, 6, 6, 6, 6]
    assert (ddp.require_backward_grad_sync, ddp.require_forward_param_sync) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_runs_out_of_memory_is_redone_at_half_the_size(where: str) -> None:
    job = Job(None, where=where, cap=3)
    assert job.step() == pytest.approx(whole()[0])
    assert job.sizes == [12, 6, 3, 3, 3, 3]
    assert same(job.gradients(), whole()[1])
    job.sizes.clear()
    job.net.zero_grad()
    job.step()
    assert job.sizes == [3, 3, 3, 3], "it does not run into it again"
    job.cap = None
    job.knob.apply(12)
    job.sizes.clear()
    job.step()
    assert job.sizes == [12], "until the size is turned: the script's own is not tried first"


def test_what_cannot_be_redone_is_raised() -> None:
    dropping = Counting()
    dropping.drop = nn.Dropout(0.5)
    with pytest.raises(torch.OutOfMemoryError):  # other pieces would draw other numbers
        Job(None, net=dropping, cap=3).step()
    job = Job(None)
    job.step()
    job.cap = 3
    with pytest.raises(torch.OutOfMemoryError):  # gradients of an earlier batch would be lost
        job.step()
    job = Job(1, cap=0)
    with pytest.raises(torch.OutOfMemoryError):  # one sample cannot be split
        job.step()
    job = Job(None, cap=3)
    job.error = lambda: ValueError("the script's own mistake")
    with pytest.raises(ValueError, match="own mistake"):
        job.step()


@pytest.mark.slow
def test_a_mistake_of_the_script_s_in_a_scratch_pass_bars_the_size_and_comes_again() -> None:
    job = Job(2, cap=0)
    job.error = lambda: ValueError("the script's own mistake")
    job.knob.apply(4)
    with pytest.raises(ValueError, match="own mistake"):
        job.step()
    assert job.reasons == ["micro_batch 4 is barred and 2 in force again: ValueError: the script's own mistake"]


@pytest.mark.slow
def test_a_scaler_keeps_its_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    job = Job(2, scaler=scaler, cap=3)
    job.knob.apply(4)
    job.step()
    assert scaler.get_scale() == 64.0
    assert same([g / 64 for g in job.gradients()], whole()[1])


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) is is_memory


# --- tokens -------------------------------------------------------------------------------------------


def test_the_budget_of_tokens_is_offered_from_the_longest_sample_to_the_whole_batch() -> None:
    batcher = MicroBatcher(None, micro_tokens=16)
    net = nn.Linear(2, 2)
    knob = MicroTokensActuator(net, batcher, TuneConfig())
    assert "lengths are not known" in str(knob.refusal())
    for _ in batcher.split(torch.ones(6, 20), tokens=[5, 20, 3, 3, 3, 3], trim=True):
        pass
    assert knob.refusal() is None
    assert knob.domain() == (16, 32, 64, 128)
    assert "cut by tokens" in str(MicroBatchActuator(net, batcher, TuneConfig()).refusal())
    assert "attach(micro_tokens=...)" in str(MicroTokensActuator(net, MicroBatcher(None), TuneConfig()).refusal())
    knob.apply(64)
    assert [len(p) for p in batcher.split(torch.ones(6, 20), tokens=[5, 20, 3, 3, 3, 3], trim=True)] == [3, 3]


def test_the_longest_piece_is_tried_not_the_first() -> None:
    batcher = MicroBatcher(None, micro_tokens=4)
    net = nn.Linear(1, 1).double()
    trials = OomSafeTrial(net, batcher)
    MicroTokensActuator(net, batcher, TuneConfig(), trials).apply(8)
    shapes: list[tuple[int, ...]] = []

    def loss(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return net(x[:, :, None]).mean()

    trials.train_batch(torch.ones(6, 8, dtype=torch.double), loss, tokens=[1, 1, 1, 7, 2, 2], trim=True)
    assert shapes == [(1, 7), (3, 1), (1, 7), (2, 2)]


# --- what the peaks say --------------------------------------------------------------------------------


def test_two_sizes_give_the_line_and_one_nothing() -> None:
    assert predict({4: 10 * GIB}, 8) is None
    assert predict({4: 10 * GIB, 8: 12 * GIB}, 16) == 16 * GIB
    assert predict({2: 1, 4: 10 * GIB, 8: 12 * GIB}, 32) == 24 * GIB


def test_a_size_that_is_predicted_not_to_fit_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    peak, retries = {"now": 10 * GIB}, {"now": 0}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak["now"])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": retries["now"]})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16 * GIB))
    headroom = MemoryForecast(torch.device("cuda"))
    assert headroom.refuse(4, 8) is None
    peak["now"] = 12 * GIB
    assert not headroom.is_strained(8)
    assert "it would take 16.0 GiB of the device's 16.0" in str(headroom.refuse(8, 16))
    assert headroom.refuse(8, 12) is None
    retries["now"] = 1
    assert headroom.is_strained(12)
    assert MemoryForecast(torch.device("cpu")).refuse(1, 2**40) is None


@pytest.mark.slow
def test_a_size_that_fits_with_nothing_to_spare_is_barred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statm = tmp_path / "statm"
    statm.write_text("9000 1900 5 1 0 7 0\n")
    on_host, on_device = (MemoryForecast(torch.device(name), statm=statm) for name in ("cpu", "cuda"))
    assert on_host.spare_bytes() == 100 * resource.getpagesize()
    assert on_device.spare_bytes() == 0
    job = Job(2)
    monkeypatch.setattr(MemoryForecast, "spare_bytes", lambda self: 2**60)
    job.knob.apply(6)
    job.step()
    assert job.sizes == [2] * 6
    assert "allocate" in job.reasons[0]


CAPPED = """
import json, resource, sys
import torch
from torch import nn
from pacecar.config import TuneConfig
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.controller.knobs.batch.micro_batch_knobs import MicroBatchActuator
from pacecar.controller.knobs.batch.oom_safe_trial import OomSafeTrial, TrialPeers

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 16_384), nn.GELU(), nn.Linear(16_384, 1))
batcher = MicroBatcher(None, 16)
trials = OomSafeTrial(net, batcher)
knob = MicroBatchActuator(net, batcher, TuneConfig(), trials)
reasons, losses = [], []
class Reasons(TrialPeers):
    def reverted(self, reason):
        reasons.append(reason)
trials.join(Reasons())
batch = torch.randn(4096, 64)

def step(size):
    knob.apply(size)
    net.zero_grad()
    losses.append(trials.train_batch(batch, lambda x: net(x).square().mean()).item())
    return knob.value()

step(16)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20, resource.RLIM_INFINITY))
values = [step(size) for size in (64, 4096)]
print(json.dumps({"values": values, "losses": losses, "reasons": reasons}))
"""


@pytest.mark.slow
def test_a_real_memory_cap_is_survived_and_the_size_is_named() -> None:
    """The kernel refuses the allocator: 4096 samples take 268 MB in the first layer alone, 200 MB are left."""
    run = subprocess.run([forking_python(), "-c", CAPPED], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    said = json.loads(run.stdout)
    assert said["values"] == [64, 64]
    assert said["losses"] == pytest.approx([said["losses"][0]] * 3, rel=1e-5)
    assert len(said["reasons"]) == 1
    assert said["reasons"][0].startswith("micro_batch 4096 is barred and 64 in force again: RuntimeError")
    assert "allocate memory" in said["reasons"][0]
