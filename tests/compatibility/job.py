"""One rank of the small jobs that `make compatibility` runs on a torch version, and of those that miss a private name.

RANK, WORLD_SIZE and STORE in the environment, as the argument a JSON list of [name, options].  Each job prints one line
of JSON when it is over, so that one that ends the process does not take the others' answers with it.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import pacecar
from pacecar.controller.observation import Policy, Proposal

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

QUIET: dict[str, Any] = {"remember": False, "socket": "/nonexistent/pacecar.sock", "overhead_budget": 1.0}
"""Every step is measured, and nothing is asked of a daemon."""

TUNING: dict[str, Any] = {
    **QUIET, "warmup_steps": 2, "exploration_budget": 1.0, "bucket_bytes_min": 4096, "first_bucket_bytes_min": 1024,
    "windows": False, "crew": False,
}  # fmt: skip
"""Models of some ten thousand parameters have buckets of some thousand bytes."""


HELD_OBJECTS = 1_000_000
"""What makes collections of garbage worth tuning."""

STEP_SECONDS = 0.005
"""A step of real jobs takes time too, in which the ranks' messages arrive."""


class Turning(Policy):
    """A policy that turns `knobs` again and again, whenever the last values are seen in force."""

    def __init__(self, knobs: Sequence[str]) -> None:
        self.knobs = knobs
        self.turn: Any = None
        self.turns = 0
        self.offered: list[str] = []
        self.spaces: list[Any] = []

    def begin(self, facts: Any, spaces: Sequence[Any], *, turns_knobs: bool) -> None:
        self.offered = sorted(space.knob for space in spaces)
        self.spaces = [space for space in spaces if space.knob in self.knobs]

    def advance(self, observations: Sequence[Any]) -> tuple[Any, list[Any]]:
        present = observations[-1].values
        if self.spaces and (self.turn is None or all(present[k] == v for k, v in self.turn.values.items())):
            self.turns += 1
            values = {s.knob: s.domain[self.turns % len(s.domain)] for s in self.spaces}
            self.turn = Proposal(self.turns, {**present, **values}, is_trial=False)
        return self.turn, []

    def finish(self, reason: str = "") -> list[Any]:
        return []


class Numbers(Dataset[Tensor]):
    """The same numbers at the same places, for ever."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(1000 * RANK + index))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))


def wrapped_net() -> nn.Sequential:
    """Return a model of equal blocks whose activations are computed again in backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(4)]
    return nn.Sequential(*map(checkpoint_wrapper, blocks))


def hexes(losses: Sequence[Tensor]) -> list[str]:
    return [loss.item().hex() for loss in losses]


def rows(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / f"rank{RANK}.jsonl").read_text().splitlines()]


def turned(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the knobs that had two values or more."""
    values = [record["knobs"]["values"] for record in records if record["type"] == "switch"]
    return sorted({knob for a, b in itertools.pairwise(values) for knob in b if a.get(knob) != b[knob]})


def lines_of(logger: str = "pacecar") -> list[str]:
    """Return the list that every line of our log will be in."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    logging.getLogger(logger).setLevel(logging.INFO)
    return lines


# --- the jobs -----------------------------------------------------------------------------------------------------


def plain(*, steps: int, pace: bool = True, missing: Sequence[str] = (), trace: bool = False) -> dict[str, Any]:
    """One process that measures: phases, exact windows, FLOPs; `pace` False is the same without pacecar."""
    lines, folder = lines_of(), tempfile.mkdtemp()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    take_away(missing, {})
    pacer = pacecar.attach(model, optimizer, tune="off", run_dir=folder, **QUIET) if pace else None
    losses = []
    for step in range(steps):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if pacer is None:
        return {"losses": hexes(losses)}
    traced = traced_by(pacer) if trace else None
    active = pacer.is_active
    pacer.close()
    found = [row for row in rows(folder) if row["type"] == "step"]
    used = [row for row in rows(folder) if row["type"] == "vitals"]
    return {
        "losses": hexes(losses),
        "active": active,
        "inert": pacer.inert_because,
        "phases": sorted(n for n in ("forward_ns", "backward_ns", "optimizer_ns") if any(r.get(n) for r in found)),
        "windows": sum(row["source"] == "exact" for row in found),
        "flops": any(row.get("step_flops") for row in used),
        "trace": traced,
        "lines": lines,
    }


def traced_by(pacer: Any) -> str:
    """Order a trace and return what the rank answers."""
    from pacecar.records.commands import Command

    answers: list[str] = []
    try:
        pacer._run.tracing.trace(
            Command(number=1, action="trace", at_step=0, arguments={"steps": 1, "directory": tempfile.mkdtemp()}),
            lambda state, detail: answers.append(f"{state}: {detail}"),
        )
    except Exception as refused:  # noqa: BLE001  a refusal is an answer
        return f"refused: {refused}"
    pacer._run.tracing.close()
    return answers[-1]


def ddp(
    *,
    steps: int,
    knobs: Sequence[str],
    pace: bool = True,
    mode: str = "exact",
    missing: Sequence[str] = (),
    scheduled: bool = False,
    large: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Two ranks under DDP whose `knobs` are turned; all others that `mode` allows are offered and left alone.

    `large`: with checkpointed blocks, a DistributedSampler and many objects.
    """
    lines, folder = lines_of(), tempfile.mkdtemp()
    held = [[number] for number in range(HELD_OBJECTS if large else 0)]
    model = DistributedDataParallel(wrapped_net() if large else net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Numbers(steps * 8 * (WORLD if large else 1))
    loader = DataLoader(data, batch_size=8, num_workers=1, sampler=DistributedSampler(data) if large else None)
    take_away(missing, {"DDP": model, "loader": loader})
    policy = Turning(knobs)
    pacer: Any = None
    if pace:
        more = {**TUNING, "compression": ("bf16", "fp16", "topk"), **options}
        pacer = pacecar.attach(model, optimizer, tune=mode, micro_batch=8, run_dir=folder, **more)
        if RANK == 0 and pacer._tuner is not None:
            pacer._tuner._policy = policy
    losses = []
    batches: Any = loader if pacer is None else pacer.batches(pacer.data(loader))
    for batch in batches:
        if pacer is None:
            loss = (model(batch) - batch).square().mean()
            loss.backward()
        else:
            loss = pacer.train_batch(batch, lambda x: (model(x) - x).square().mean())
            time.sleep(STEP_SECONDS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if pacer is None:
        return {"losses": hexes(losses)}
    from pacecar.profiler.hangs.torch_flight_recorder import sequence

    tuner = pacer._tuner
    crew = pacer._run.rank_monitor
    answer = {
        "losses": hexes(losses),
        "inert": pacer.inert_because,
        "offered": policy.offered,
        "refused": {} if tuner is None else tuner.refused,
        "status": None if tuner is None or tuner.status is None else f"{tuner.status.state}: {tuner.status.detail}",
        "crew": None if crew is None else crew.off_because,
        "held": len(held),
        "sequence": sequence(),
        "lines": lines,
    }
    pacer.close()
    return answer | {"turned": turned(rows(folder))}


def tokens(*, steps: int) -> dict[str, Any]:
    """Two ranks whose micro-batches are cut by tokens."""
    folder = tempfile.mkdtemp()
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    policy = Turning(("micro_tokens",))
    pacer: Any = pacecar.attach(model, optimizer, tune="exact", micro_tokens=32, run_dir=folder, **TUNING)
    if RANK == 0 and pacer._tuner is not None:
        pacer._tuner._policy = policy
    lengths = torch.full((8,), 8)
    for step in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        pacer.train_batch(x, lambda part: (model(part) - part).square().mean(), tokens=lengths)
        optimizer.step()
        optimizer.zero_grad()
    answer = {"inert": pacer.inert_because, "refused": {} if pacer._tuner is None else pacer._tuner.refused}
    pacer.close()
    return answer | {"turned": turned(rows(folder))}


def fsdp2(*, steps: int, pace: bool = True, missing: Sequence[str] = ()) -> dict[str, Any]:
    """Two ranks under FSDP2 whose gathers are turned."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch before 2.6
        from torch.distributed._composable.fsdp import fully_shard

    lines, folder = lines_of(), tempfile.mkdtemp()
    model: Any = nn.Sequential(net(), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in list(model)[1:]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = Turning(("fsdp_prefetch", "fsdp_reshard"))
    pacer: Any = None
    losses = []
    for step in range(steps):
        if pacer is None and pace and step == 1:  # FSDP2 makes its state whole in the first forward
            take_away(missing, {"FSDPModule": model})
            pacer = pacecar.attach(model, optimizer, tune="exact", run_dir=folder, **TUNING)
            if RANK == 0 and pacer._tuner is not None:
                pacer._tuner._policy = policy
        loss = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + RANK))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if pacer is None:
        return {"losses": hexes(losses)}
    answer = {
        "losses": hexes(losses),
        "inert": pacer.inert_because,
        "offered": policy.offered,
        "refused": {} if pacer._tuner is None else pacer._tuner.refused,
        "lines": lines,
    }
    pacer.close()
    return answer | {"turned": turned(rows(folder))}


def internals() -> dict[str, Any]:
    """Say which of the table's private names this torch has not."""
    from pacecar import torch_internals

    model: Any = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    owners = {
        "DDP": model, "loader": DataLoader(Numbers(1)), "module": nn.Identity(), "scheduled step": optimizer.step,
        "node": (torch.ones(1, requires_grad=True) * 1).grad_fn, "operator": torch.ops.aten.mm.default,
    }  # fmt: skip
    importlib.import_module("torch._dynamo")  # the names in there are told too

    missing = []
    for row in torch_internals.INTERNALS:
        if row.owner in owners:
            if not torch_internals.own_has(owners[row.owner], row.name):
                missing.append(row.name)
        elif not row.owner and torch_internals.find(row.name) is None:
            missing.append(row.name)
    return {"missing": missing, "version": str(torch.__version__).partition("+")[0]}


# --- taking names away --------------------------------------------------------------------------------------------


def take_away(names: Sequence[str], owners: dict[str, Any]) -> None:
    """Delete `names`, or, where torch itself needs them to train, let pacecar suppose that they are not there."""
    for name in names:
        from pacecar import torch_internals

        torch_internals.forget()
        if not deleted(name, owners):
            torch_internals.suppose_missing([name])


def deleted(name: str, owners: dict[str, Any]) -> bool:
    """Delete `name` from the object, class or module that holds it, unless torch needs it to train on."""
    from pacecar.torch_internals import INTERNALS

    if name in TORCH_NEEDS:
        return False
    row = next(row for row in INTERNALS if row.name == name)
    if row.owner:
        holder = owners.get(row.owner)
        try:
            delattr(holder, row.attribute)
        except (AttributeError, TypeError):
            return False
        return True
    import pkgutil

    try:
        holder = pkgutil.resolve_name(row.name.rpartition(".")[0])
        delattr(holder, row.attribute)
    except (AttributeError, TypeError, ImportError):
        return False
    return True


TORCH_NEEDS = frozenset({
    # Read or called by torch in every step of these jobs, so that no job could train without.
    "torch._dynamo.graph_break",
    "torch.autograd.profiler.profile._prepare_trace",  # these three by torch.profiler, which takes traces
    "torch.autograd.profiler.profile._start_trace",
    "torch.autograd.profiler.profile.config",
    "torch.ops.aten._scaled_dot_product_flash_attention",  # made anew whenever it is asked for
    "torch.Tensor._backward_hooks",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.nn.Module._call_impl",
    "torch.nn.Module._compiled_call_impl",
    "torch.nn.Module._modules",
    "torch.nn.Module._parameters",
    "torch.distributed.algorithms.join.Joinable._join_config",
    "torch.distributed.distributed_c10d._world",  # by `is_initialized`, which a loader calls
    "torch.nn.parallel.DistributedDataParallel.reducer",
    "torch.nn.parallel.DistributedDataParallel.logger",
    "torch.nn.parallel.DistributedDataParallel.process_group",
    "torch.nn.parallel.DistributedDataParallel.static_graph",
    "torch.nn.parallel.DistributedDataParallel.find_unused_parameters",
    "torch.nn.parallel.DistributedDataParallel.require_backward_grad_sync",
    "torch.nn.parallel.DistributedDataParallel.require_forward_param_sync",
    "torch.utils.data.dataloader.DataLoader._iterator",
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers",
    "torch.utils.data._utils.signal_handling._remove_worker_pids",
    "torch._foreach_norm",
    "torch._foreach_add_",
    "torch._ops.OpOverload",
    "torch.distributed.ProcessGroup",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.distributed_c10d._get_default_store",
})  # fmt: skip


def run(jobs: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Run the jobs one by one; what one of them raises is its answer."""
    for name, options in jobs:
        try:
            yield JOBS[name](**options)
        except Exception as error:
            logging.getLogger("job").exception("%s", name)
            yield {"raised": f"{type(error).__name__}: {error}"}


def unwatched(*, steps: int, missing: Sequence[str] = (), several: bool = False) -> dict[str, Any]:
    """One process that knows nothing of pacecar, as `pacecar run` would have it; its loader is torch's."""
    lines = lines_of()
    take_away(missing, {})
    from pacecar.job.autoattach import optimizer_hook, stderr_lines

    stderr_lines.say = lines.append  # type: ignore[assignment]  # one line on stderr otherwise
    optimizer_hook.register(None)
    model = DistributedDataParallel(net()) if several else net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for x in DataLoader(Numbers(steps * 8), batch_size=8):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": hexes(losses), "lines": lines}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": plain, "ddp": ddp, "tokens": tokens, "fsdp2": fsdp2, "internals": internals, "unwatched": unwatched,
}  # fmt: skip


# --- many jobs from one import of torch ----------------------------------------------------------------------------


def fork_each(cases: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Run each case, {"world": 2, "jobs": [[name, options]]}, in processes of its own; yield rank 0's last answer."""
    importlib.import_module("torch._dynamo")  # the first step of any optimizer loads it
    importlib.import_module("torch.distributed.fsdp")
    gc.collect()
    gc.freeze()
    for case in cases:
        with tempfile.TemporaryDirectory() as place:
            pids = []
            for rank in range(case["world"]):
                pid = os.fork()
                if pid == 0:
                    be_rank(rank, case, place)
                pids.append(pid)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            said = (Path(place) / "out0").read_text()
            answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
            if any(codes) or len(answers) != len(case["jobs"]):
                errors = "".join((Path(place) / f"err{rank}").read_text()[-2000:] for rank in range(case["world"]))
                yield {"raised": f"exit codes {codes}: {errors}"}
            else:
                yield answers[-1]


def be_rank(rank: int, case: dict[str, Any], place: str) -> NoReturn:
    global RANK, WORLD
    RANK, WORLD = rank, case["world"]
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(WORLD), "STORE": f"{place}/store", "TMPDIR": place})
    tempfile.tempdir = place
    for stream, name in ((1, f"out{rank}"), (2, f"err{rank}")):
        os.dup2(os.open(f"{place}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), stream)
    signal.alarm(SECONDS_MAX)
    try:
        be_ranks(case["jobs"])
    finally:
        os._exit(1)  # be_ranks ends the process itself when all went well


SECONDS_MAX = 120


def main() -> None:
    asked = json.loads(sys.argv[1])
    if isinstance(asked, dict):
        for answer in fork_each(asked["cases"]):
            print(json.dumps(answer), flush=True)  # noqa: T201  this is what the caller reads
    else:
        be_ranks(asked)


def be_ranks(jobs: Sequence[tuple[str, dict[str, Any]]]) -> NoReturn:
    torch.set_num_threads(1)
    if WORLD > 1:
        dist.init_process_group(
            "gloo", init_method="file://" + os.environ["STORE"], rank=RANK, world_size=WORLD,
            timeout=timedelta(seconds=120),
        )  # fmt: skip
    for answer in run(jobs):
        print(json.dumps(answer), flush=True)  # noqa: T201  this is what the caller reads
    if WORLD > 1:
        dist.barrier()
    os._exit(0)  # torch's own end aborts now and then


if __name__ == "__main__":
    main()
