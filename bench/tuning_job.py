"""One rank of a training job on a shaped link, for bench_tuning: real DDP over gloo, and a model of stated size.

The layers' arithmetic is a wait that lets go of the GIL, as if a device computed: then both cores belong to the
network, and steps repeat within a percent.  Their gradients are real and of full size, so buckets, copies and
all-reduces are.  The model `gpt` computes for real.

A job runs `steps` steps under one arm (never tuned, a fixed bucket, or a policy of pacecar's), or sweeps over settings
in rounds, for the oracle.  It says one JSON line at its end: this rank's wall time of every step and, on rank 0, what
the hypervisor gave to others in each and what the tuner did; and on the way `{"reached": step}` where the driver wants
to know.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds its own folder only
from bench.tuning_figures import STOLEN_MAX

MIB = 2**20
PAUSE_SECONDS = 5.0
"""What a sweep waits where others took the processors."""


class Shape(NamedTuple):
    """A model with a layer of each of these numbers of parameters, and how long its arithmetic takes in all.

    Its batch comes in `micro_batches` parts, and gradients are reduced after the last.
    """

    parameters: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    micro_batches: int = 1


SHAPES = {
    "stack10": Shape((262_144,) * 40, 0.1, 0.2),
    "deep": Shape((66_667,) * 300, 0.15, 0.3),
    "wide": Shape((5_250_000,) * 8, 0.25, 0.5),
    "embedding": Shape((12_582_913, *(131_072,) * 20), 0.1, 0.2),
    "vgg": Shape((*(16_384,) * 4, *(262_144,) * 6, *(1_048_576,) * 3, 8_388_608, 2_097_152, 409_600), 0.1, 0.2),
    "alternating": Shape((1_000, 700_000) * 15, 0.1, 0.2),
    "accumulation": Shape((262_144,) * 40, 0.1, 0.2, 4),
    "stack1": Shape((52_429,) * 20, 0.01, 0.02),
}
"""stack10 is TUNING's case of 10.5 M parameters; embedding's first layer is ready last, and no bucket size divides it;
the large layers of vgg are its last, so ready first; stack1 is for trying things out."""


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        time.sleep(forward_seconds)
        ctx.backward_seconds = backward_seconds
        ctx.save_for_backward(weight)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        (weight,) = ctx.saved_tensors
        return gradient, weight * 1e-3 + gradient.mean(), None, None


class Layer(nn.Module):
    """Waits as long as its arithmetic would take; its gradient decays its weights."""

    def __init__(self, shape: Shape, parameters: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((parameters,), 0.01))
        times = len(shape.parameters) * shape.micro_batches
        self.seconds = shape.forward_seconds / times, shape.backward_seconds / times

    def forward(self, x: Tensor) -> Tensor:
        """Add the first weight."""
        return _Work.apply(x, self.weight, *self.seconds)


def say(line: str) -> None:
    """Tell the driver."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def make_model(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model, a batch for it and what it shall learn.

    The layers' aim is zero.  That of `gpt` must not be: its last layer normalizes, so the mean square of its output is
    a constant, its gradients are rounding noise, and compressing those looks like a training that goes astray.
    """
    torch.manual_seed(0)
    if name == "gpt":
        width, layers = 512, 12
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, layers), torch.randn(1, 64, width), torch.randn(1, 64, width)
    shape = SHAPES[name]
    layers = (Layer(shape, parameters) for parameters in shape.parameters)
    return nn.Sequential(*layers), torch.randn(4, 8), torch.zeros(4, 8)


def processor_seconds() -> tuple[float, float]:
    """Return the time that the hypervisor gave to others, and all time, of all processors since the start."""
    times = psutil.cpu_times()
    return times.steal, sum(times)


class Job:
    """The loop of one rank."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.rank = int(os.environ["RANK"])
        network, self.batch, self.aim = make_model(given["model"])
        self.micro_batches = SHAPES[given["model"]].micro_batches if given["model"] in SHAPES else 1
        buckets: dict[str, Any] = {}
        if given.get("bucket_bytes"):
            buckets["bucket_cap_mb"] = given["bucket_bytes"] / MIB
        self.model = DistributedDataParallel(network, **buckets)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.walls: list[float] = []
        self.stolen: list[float] = []
        """What the hypervisor gave to others of each step, a share; on rank 0 only, the ranks share a machine."""
        self._processors = processor_seconds()
        self._ended = time.perf_counter()

    def step(self) -> None:
        """Train one step and note its wall time, from optimizer step to optimizer step."""
        for left in reversed(range(self.micro_batches)):
            self.model.require_backward_grad_sync = left == 0
            ((self.model(self.batch) - self.aim).square().mean() / self.micro_batches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        now = time.perf_counter()
        self.walls.append(now - self._ended)
        self._ended = now
        if self.rank == 0:
            before, self._processors = self._processors, processor_seconds()
            stolen, passed = (after - was for after, was in zip(self._processors, before, strict=True))
            self.stolen.append(round(stolen / passed, 3) if passed else 0.0)
        if len(self.walls) in self.given.get("say", ()) and self.rank == 0:
            say(json.dumps({"reached": len(self.walls)}))


def run(given: dict[str, Any]) -> dict[str, Any]:
    """Run `steps` steps under the arm and return what is known of them."""
    job = Job(given)
    options = given.get("attach")
    if options is None:
        for _ in range(given["steps"]):
            job.step()
        return {"walls": job.walls, "stolen": job.stolen}
    import pacecar

    options = dict(options)
    baseline = options.pop("baseline", None)
    if baseline is not None:
        from bench.baselines import tune_by

        tune_by(baseline)
    with tempfile.TemporaryDirectory() as folder:
        pacer = pacecar.attach(
            job.model, job.optimizer, run_dir=folder, socket=f"{folder}/none.sock", remember=False, **options
        )
        if not pacer.is_active:
            raise RuntimeError(f"pacecar is inert: {pacer.inert_because}")
        for _ in range(given["steps"]):
            job.step()
        pacer.close()
        lines = (Path(folder) / f"rank{job.rank}.jsonl").read_bytes().splitlines()
    records = [json.loads(line) for line in lines]
    kept = [record for record in records if record["type"] in ("decision", "verdict", "tuner", "switch")]
    values = {record["step"]: record["knobs"]["values"] for record in records if record["type"] == "step"}
    said = {"records": kept, "values": values[max(values)] if values else {}}
    return {"walls": job.walls, "stolen": job.stolen, **said}


def sweep(given: dict[str, Any]) -> dict[str, Any]:
    """Try settings [bucket bytes, first bucket's or None] in rounds, on all ranks alike; bucket bytes 0 is the default.

    Where others took the processors a stretch is run again after a pause, at most `again` times in all, and the least
    disturbed one counts.  Returns for each setting, in the order given, the walls of its judged steps, a list a round.
    """
    from pacecar.controller.knobs.ddp.reducer import DdpReducer

    job = Job(given)
    for _ in range(3):
        job.step()
    reducer = DdpReducer(job.model)
    reason = reducer.refusal() or reducer.prepare()
    if reason is not None:
        raise RuntimeError(reason)
    default = reducer.plan.bucket_bytes
    settings = list(enumerate(given["sweep"]))
    taken: list[list[list[float]]] = [[] for _ in settings]
    repeated = 0
    for number in range(given["rounds"]):
        for place, (size, first) in settings if number % 2 == 0 else settings[::-1]:
            reducer.request(bucket_bytes=size or default, first_bytes=first)
            tries: list[tuple[float, list[float]]] = []
            while True:
                for _ in range(2 + given["steps"]):
                    job.step()
                tries.append((_stolen_from_all(job.stolen[-given["steps"] :]), job.walls[-given["steps"] :]))
                if tries[-1][0] <= STOLEN_MAX or repeated == given["again"]:
                    break
                repeated += 1
            taken[place].append(min(tries, key=lambda one: one[0])[1])
    return {"sweep": taken, "repeated": repeated}


def _stolen_from_all(stolen: list[float]) -> float:
    """Return what rank 0 saw of the steps, on every rank; rank 0 pauses before it tells the others that it was much."""
    share = torch.tensor([fmean(stolen) if stolen else 0.0], dtype=torch.float64)
    if share.item() > STOLEN_MAX:
        time.sleep(PAUSE_SECONDS)
    dist.broadcast(share, 0)
    return share.item()


def main() -> None:
    """Join the ranks, run, say what came of it."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    answer = sweep(given) if "sweep" in given else run(given)
    say(json.dumps(answer))
    dist.barrier()
    os._exit(0)  # torch aborts at exit now and then (pytorch#190489)


if __name__ == "__main__":
    main()
