"""Does any fault, anywhere, leave ranks that disagree?  Real ranks, a fault at a random point, and the ranks' own logs.

    python faults.py --points 500 --seed 1

A session is two or three processes in one gloo group that train one small model after the other, each a *point*: its
own tuner, which turns every knob of DDP or FSDP2 all the time, and one fault in one rank at a place drawn at random.
The last point of some sessions kills its rank, or stops it. Every rank writes what was in force in each step into a
file of its own, so that a killed one has told all it did. Then, for each point:

    same       in every step that two ranks both began, they had the same epoch and the same values
    unharmed   where the job went on, its losses over all ranks are those of the same job without a tuner, and all ranks
               end equal
    no later   where a rank was killed the others end by an error of the training's own, within KILLED_SECONDS_MAX
    no hang    nothing runs longer than SESSION_SECONDS_MAX

torch is loaded once: sessions are forked from this process, which has no threads of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

STEPS = 64
BATCH = 8
EPOCH_BATCHES = 40
CALM_STEPS = 16
"""The most steps between two votes."""
POINTS_MAX = 8  # in a session
SESSION_SECONDS_MAX = 120.0
KILLED_SECONDS_MAX = 15.0
SLOW_SECONDS = 0.01
RELATIVE = 1e-5

OURS = ("apply before", "apply after", "value", "policy", "emit", "side", "side posts", "vote", "read", "confirm")
PLACES = ("boundary", "timer", *OURS)
LETHAL_PLACES = ("boundary", "timer", "apply before", "apply after", "value", "vote", "read", "confirm")
DEEDS = ("raise", "delay", "stop")
TIMES = {"boundary": STEPS, "timer": 1, "value": 40, "vote": 15, "read": 15, "side": STEPS, "store": STEPS}
"""How often a place is come to in a job, or a little less; 5 times where nothing is said."""


@dataclass(frozen=True)
class Point:
    """One fault: `deed` on `rank` at the `nth` time that it comes to `place`, in a job of `seed`."""

    seed: int
    rank: int
    place: str
    deed: str
    nth: int
    seconds: float
    is_trial: bool
    is_sharded: bool  # FSDP2, and DDP otherwise
    mode: str = "tuned"  # "killed": that alone, "alone": without a tuner, "broken": with one that takes nothing back


def draw_session(dice: random.Random, points: int, mode: str) -> tuple[int, list[Point]]:
    """Return a world size and its points; a lethal one comes last."""
    world = dice.choice((2, 2, 2, 3))
    drawn = []
    for index in range(points):
        is_last = index == points - 1
        is_lethal = is_last and dice.random() < 0.8
        place = dice.choice(LETHAL_PLACES if is_lethal else PLACES)
        if is_last and not is_lethal:
            place = "store"  # no group can be made after that
        deed = "kill" if is_lethal else _deed(dice, place)
        if mode == "broken":
            place, deed = "apply before", "raise"
        elif mode in ("alone", "killed"):
            place, deed = dice.choice(("boundary", "timer")), "kill"
        rank = 0 if place == "policy" else dice.randrange(world)
        drawn.append(
            Point(
                dice.randrange(10**6), rank, place, deed, dice.randint(1, TIMES.get(place, 5)),
                dice.uniform(0.01, 0.3), dice.random() < 0.5, dice.random() < 0.25, mode,
            )
        )  # fmt: skip
    return world, drawn


def _deed(dice: random.Random, place: str) -> str:
    if place in ("side", "side posts", "store", "policy", "emit", "value"):
        return "raise"
    if place in ("boundary", "timer", "vote", "read", "confirm"):  # what raises there is the job's own, or gloo's
        return "stop" if place == "timer" else dice.choice(("delay", "stop", "slow"))
    return dice.choice(DEEDS)


# --- one session: fork, watch, wake what stopped -------------------------------------------------------------


def run_session(world: int, points: list[Point], folder: Path, dice: random.Random) -> dict[str, Any]:
    """Return how the ranks ended, with seconds from a kill to the others' ends; logs are in `folder`."""
    folder.mkdir(parents=True)
    begun = time.monotonic()
    pids = {}
    for rank in range(world):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _rank(rank, world, points, folder)  # never returns
        pids[pid] = rank
    ends: dict[int, tuple[int, float]] = {}
    wakes: dict[int, float] = {}
    while len(ends) < world:
        now = time.monotonic()
        if now - begun > SESSION_SECONDS_MAX:
            for pid in pids:
                if pids[pid] not in ends:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            return {"hung": [rank for rank in pids.values() if rank not in ends], "ends": ends}
        for pid, rank in pids.items():
            if rank in ends:
                continue
            if pid in wakes and now >= wakes[pid]:
                del wakes[pid]
                os.kill(pid, signal.SIGCONT)
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found == 0:
                continue
            if os.WIFSTOPPED(status):
                wakes[pid] = now + dice.uniform(0.01, 0.4)
            else:
                ends[rank] = (os.waitstatus_to_exitcode(status), now - begun)
        time.sleep(0.005)
    return {"hung": [], "ends": ends}


# --- one rank ------------------------------------------------------------------------------------------------


def _rank(rank: int, world: int, points: list[Point], folder: Path) -> None:
    code = 1
    errors = os.open(folder / f"errors{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    try:
        code = _run_points(rank, world, points, folder)
    except BaseException as error:  # noqa: BLE001  however it ends, it says so
        _write(folder / f"end{rank}", {"error": type(error).__name__, "message": str(error)[:300], "at": time.time()})
        sys.stderr.write(repr(error))
    os._exit(code)


def _run_points(rank: int, world: int, points: list[Point], folder: Path) -> int:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "STORE": str(folder / "store")}
    import torch
    import torch.distributed as dist

    gc.unfreeze()  # what a fork server froze: the knob of collections is refused where somebody froze objects
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    for index, point in enumerate(points):
        end = _train(rank, world, point, folder / f"point{index}-rank{rank}", folder)
        _write(folder / f"point{index}-end{rank}", end)
        dist.barrier()
    return 0


class Fault:
    """Does the point's deed when its rank has come to the place often enough."""

    def __init__(self, point: Point, rank: int) -> None:
        self.point, self.is_here, self.times, self.fell = point, point.rank == rank, 0, False

    def __call__(self, place: str) -> None:
        if not self.is_here or place != self.point.place:
            return
        if self.fell and self.point.deed == "slow":
            time.sleep(SLOW_SECONDS)
        self.times += 1
        if self.times != self.point.nth:
            return
        self.fell = True
        self.strike()

    def strike(self) -> None:
        deed = self.point.deed
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)  # the session's watcher wakes it
        elif deed == "slow":
            time.sleep(SLOW_SECONDS)
        elif deed == "delay":
            time.sleep(self.point.seconds)
        else:
            raise RuntimeError("planted")


def make_data(seed: int) -> Any:
    """Return the samples of a point's job."""
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.randn(3 * BATCH * EPOCH_BATCHES, 32, generator=torch.Generator().manual_seed(seed)))


def make_net(seed: int) -> Any:
    """Return a point's model, with the same weights on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])


def _train(rank: int, world: int, point: Point, log: Path, folder: Path) -> dict[str, Any]:
    import threading

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from pacecar.controller.knobs.batch.micro_batch import MicroBatcher

    net = make_net(point.seed)
    if point.is_sharded:
        mesh = init_device_mesh("cpu", (world,))
        for block in net:
            fully_shard(block, mesh=mesh)
        model = fully_shard(net, mesh=mesh)
    else:
        model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    batcher = MicroBatcher(model, BATCH)
    data = make_data(point.seed)
    sampler: Any = DistributedSampler(data, world, rank, seed=point.seed)
    loader: Any = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    fault = Fault(point, rank)
    tuner = None
    if point.mode != "alone":
        tuner, loader = _tuner(rank, world, point, fault, model, batcher, loader)
    losses: list[tuple[float, int]] = []
    timer = None
    if fault.is_here and point.place == "timer":
        timer = threading.Timer(point.seconds, fault.strike)
        timer.start()
    with open(log, "wb", buffering=0) as out:
        last = time.perf_counter_ns()
        for step, (batch,) in enumerate(_batches(loader, sampler), 1):
            epoch, values = (0, []) if tuner is None else (tuner.agreement._member.epoch, tuner.in_force())
            out.write(json.dumps([step, epoch, values]).encode() + b"\n")
            optimizer.zero_grad()
            total = 0.0
            for micro in batcher.split(batch):
                loss = model(micro).square().mean()
                total += float(loss.detach()) * len(micro)
                batcher.backward(loss)
            optimizer.step()
            losses.append((total, len(batch)))
            now = time.perf_counter_ns()
            _spoil(fault, tuner, folder)
            if tuner is not None:
                tuner.boundary(step, now - last, len(batch))
            last = now
    if timer is not None:
        timer.join()
    frozen = None
    if tuner is not None:
        frozen = tuner.agreement.frozen
        tuner.close()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    weights = torch.cat([p.detach().flatten() for p in whole]).double()
    return {"losses": losses, "frozen": frozen, "fell": fault.fell, "weights": weights.sum().item().hex()}


def _batches(loader: Any, sampler: Any) -> Iterator[Any]:
    """Yield the batches of STEPS steps, in epochs."""
    for epoch in range(-(-STEPS // EPOCH_BATCHES)):
        sampler.set_epoch(epoch)
        yield from islice(loader, min(EPOCH_BATCHES, STEPS - epoch * EPOCH_BATCHES))


def _spoil(fault: Fault, tuner: Any, folder: Path) -> None:
    """The faults of the surroundings, at the end of a step."""
    fault("boundary")
    for place in ("side", "store"):
        try:
            fault(place)
        except RuntimeError:
            if place == "store":
                (folder / "store").unlink(missing_ok=True)
            elif tuner is not None:
                tuner.agreement._side._group = None


def _tuner(rank: int, world: int, point: Point, fault: Fault, model: Any, batcher: Any, loader: Any) -> tuple[Any, Any]:
    """Return a started tuner with faults built in, and the loader through which it shares work."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]
    import torch
    from job_tuner import Finished, Script, SmallJob, job_hello, step_record

    from pacecar.clock import SystemClock
    from pacecar.config import TuneConfig
    from pacecar.controller.consensus.channels import VoteChannel, VoteSubject
    from pacecar.controller.consensus.rank_agreement import RankAgreement
    from pacecar.controller.knobs.activation_checkpointing.knob import open_checkpointed_blocks
    from pacecar.controller.knobs.batch.micro_batch_knobs import MicroBatchActuator
    from pacecar.controller.knobs.batch.work_share import WorkShareActuator
    from pacecar.controller.knobs.dataloader.switchable_loader import SwitchableLoader
    from pacecar.controller.knobs.ddp.buckets import BucketActuator
    from pacecar.controller.knobs.ddp.reducer import DdpReducer
    from pacecar.controller.knobs.fsdp2 import fsdp_knobs
    from pacecar.controller.knobs.garbage_collection import GcIntervalActuator, HostAndDeviceMemory
    from pacecar.controller.status_reporter import StatusReporter
    from pacecar.controller.tuner import Tuner
    from pacecar.profiler.transport.side_group import SideGroup
    from pacecar.records import Knobs
    from tests.kit.larger_size import LargerSize

    class Collections(GcIntervalActuator):
        def refusal(self) -> str | None:
            return self._script_decides()  # however few objects there are

        def value(self) -> int:
            fault("value")
            return super().value()

        def apply(self, value: int) -> None:
            fault("apply before")
            super().apply(value)
            fault("apply after")

    class Policy(Script):
        def advance(self, observations: Any) -> Any:
            fault("policy")
            return super().advance(observations)

    class Votes(VoteChannel):
        def post(self, subject: VoteSubject, words: Any) -> Any:
            fault({VoteSubject.VOTE: "vote", VoteSubject.DONE: "confirm"}.get(subject, "elsewhere"))
            return super().post(subject, words)

        def receive(self, frame: Any, seconds: float) -> list[list[int]]:
            if frame.subject is VoteSubject.VOTE:
                fault("read")
            return super().receive(frame, seconds)

    class Side(SideGroup):
        def post(self, words: Any) -> None:
            fault("side posts")
            super().post(words)

    config = TuneConfig(bucket_bytes_min=4096)
    agreement = RankAgreement(rank, world, votes=True)
    agreement._side, agreement._main = Side(rank, world), Votes(rank, world)
    buckets: Any = None
    share: Any = None
    actuators: list[Any]
    if point.is_sharded:
        actuators = [*fsdp_knobs(model, config)]
    else:
        share = WorkShareActuator(
            model, batcher, rank, world, start_gather=partial(agreement.start_gather, VoteSubject.SHARE),
            loader=lambda: loader, has_global_batch=False, may_redraw=False,
        )  # fmt: skip
        loader, batcher.share_factor = SwitchableLoader(loader, share), share.factor
        buckets = BucketActuator(config, DdpReducer(model))
        blocks = open_checkpointed_blocks(model, config, world, sizes=[LargerSize()], charge=lambda cost_ns: None)
        actuators = [buckets, MicroBatchActuator(model, batcher, config), share, blocks]
    actuators.append(Collections(HostAndDeviceMemory(torch.device("cpu"))))
    in_force = [Knobs()]
    tuner: Any = Tuner(
        SmallJob(world, buckets, batcher, in_force), config,
        StatusReporter(job_hello(rank, world), lambda record: fault("emit"), SystemClock()),
        policy=Policy(is_trial=point.is_trial) if rank == 0 else None, actuators=actuators, agreement=agreement,
    )  # fmt: skip
    if point.mode == "broken":
        agreement.settle = _keeps_what_it_has.__get__(agreement)  # type: ignore[method-assign]

    def boundary(step: int, ns: int, samples: int) -> None:
        if share is not None:
            share.note(samples, samples * (1 + rank) * 10_000, 5_000)  # rank 0 is the fastest
        tuner.on_boundary(Finished(step_record(rank, step, ns, knobs=in_force[-1])))

    *others, collections = actuators
    tuner.in_force = lambda: [*(one.value() for one in others), GcIntervalActuator.value(collections)]  # never fails
    tuner.boundary = boundary
    tuner.start()
    return tuner, loader


def _keeps_what_it_has(agreement: Any, proposal: Any, *, is_done: bool, undo: Any) -> bool:
    """Settle as it must not be done, to see that this harness finds it: what others failed at is not taken back."""
    agreement._confirm(is_done=is_done)
    (agreement._member.applied if is_done else agreement._member.failed)(proposal)
    return is_done


def _write(path: Path, what: Any) -> None:
    path.write_text(json.dumps(what))


# --- what the logs say -----------------------------------------------------------------------------------------


def judge(world: int, points: list[Point], folder: Path, ended: dict[str, Any], tally: Counter[str]) -> list[str]:
    """Return what is wrong, in sentences."""
    wrong = [f"ranks {ended['hung']} hung in {folder}"] if ended["hung"] else []
    for index, point in enumerate(points):
        logs = [_log(folder / f"point{index}-rank{rank}") for rank in range(world)]
        tally["points"] += 1
        if not any(logs):
            continue  # a point before it ended the session, and that is told there
        for step in range(1, STEPS + 1):
            there = {json.dumps(log[step]) for log in logs if step in log}
            if len(there) > 1:
                wrong.append(f"{point}: ranks disagree in step {step}: {sorted(there)}")
                break
        tally["switches"] += max((epoch for log in logs for epoch, _ in log.values()), default=0)
        ends = [_read(folder / f"point{index}-end{rank}") for rank in range(world)]
        if point.deed == "kill" and None in ends:
            tally["killed"] += 1
            wrong += _judge_killed(world, point, folder, ended, tally)
        elif None in ends:
            wrong.append(f"{point}: the job did not go on: {[_read(folder / f'end{rank}') for rank in range(world)]}")
        else:
            wrong += _judge_end(point, ends, tally)
    return wrong


def _judge_killed(world: int, point: Point, folder: Path, ended: dict[str, Any], tally: Counter[str]) -> list[str]:
    others = [rank for rank in range(world) if rank != point.rank]
    said = [_read(folder / f"end{rank}") for rank in others]
    wrong = [f"{point}: rank {rank} said nothing at its end" for rank, end in zip(others, said, strict=True) if not end]
    for end in filter(None, said):
        tally[f"ended by {end['error']}"] += 1
    late = [ended["ends"][rank][1] - ended["ends"][point.rank][1] for rank in others if rank in ended["ends"]]
    tally["killed: last end ms"] = max([tally["killed: last end ms"], *(round(1000 * s) for s in late)])
    if late and max(late) > KILLED_SECONDS_MAX:
        wrong.append(f"{point}: the others ended {max(late):.1f} s after the kill")
    return wrong


def _judge_end(point: Point, ends: list[Any], tally: Counter[str]) -> list[str]:
    wrong = []
    if len({end["weights"] for end in ends}) > 1:
        wrong.append(f"{point}: the ranks' models differ at the end")
    alone = reference(point.seed, len(ends))
    steps = zip(*(end["losses"] for end in ends), strict=True)
    means = [sum(total for total, _ in ranks) / sum(samples for _, samples in ranks) for ranks in steps]
    off = max(abs(a - b) / b for a, b in zip(means, alone, strict=True))
    if off > RELATIVE:
        wrong.append(f"{point}: losses are {off:.2g} off those without a tuner")
    if any(samples != BATCH for _, samples in ends[0]["losses"]):
        tally["shared work"] += 1
    if any(end["fell"] for end in ends) or point.place == "timer":
        tally["fell"] += 1
    frozen = [end["frozen"] for end in ends]
    if any(frozen):
        tally["frozen"] += 1
        is_told = point.place != "side" or point.nth <= STEPS - 2 * CALM_STEPS  # else the others meet it too late
        if is_told and not all(frozen):
            wrong.append(f"{point}: only some ranks froze: {frozen}")
    return wrong


def reference(seed: int, world: int) -> list[float]:
    """Return the losses over all ranks without any tuner, of ranks taken one after the other in this process."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    net, data = make_net(seed), make_data(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    samplers: list[Any] = [DistributedSampler(data, world, rank, seed=seed) for rank in range(world)]
    ranks = [_batches(DataLoader(data, BATCH, sampler=sampler, drop_last=True), sampler) for sampler in samplers]
    losses: list[float] = []
    for batches in zip(*ranks, strict=True):
        optimizer.zero_grad()
        loss = sum(net(batch).square().mean() for (batch,) in batches) / world
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    return losses


def _log(path: Path) -> dict[int, tuple[int, list[int]]]:
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return {step: (epoch, values) for step, epoch, values in map(json.loads, lines)}


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def main(report: Callable[[str], None]) -> int:
    """Run `--points` points; print what was wrong and the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=("tuned", "killed", "alone", "broken"), default="tuned")
    parser.add_argument("--keep", type=Path, help="a folder for the logs; they are removed otherwise")
    args = parser.parse_args()
    import torch
    import torch.distributed

    torch.set_num_threads(1)  # so that there is nothing that a fork would lose
    dice, tally, wrong, begun = random.Random(args.seed), Counter[str](), list[str](), time.monotonic()
    deeds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        base = args.keep or Path(scratch)
        number = 0
        while tally["points"] < args.points:
            world, points = draw_session(
                dice,
                1 if args.mode in ("alone", "killed") else min(POINTS_MAX, args.points - tally["points"]),
                args.mode,
            )
            folder = base / f"session{number}"
            ended = run_session(world, points, folder, dice)
            found = judge(world, points, folder, ended, tally)
            deeds.update(f"{p.deed} at {p.place}" for p in points)
            wrong += [f"session {number}: {sentence}" for sentence in found]
            number += 1
            tally["sessions"] += 1
    figures = {"wrong": wrong, "seconds": round(time.monotonic() - begun, 1), "deeds": dict(deeds), **tally}
    report(json.dumps(figures))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(print))
