"""Does any fault, anywhere, leave ranks that disagree?  Real ranks, a fault at a random point, and the ranks' own logs.

    python faults.py --points 500 --seed 1

A session is two or three processes in one gloo group that train one small model after the other, each a *point*: its
own tuner, which turns knobs all the time, and one fault in one rank at a place drawn at random. The last point of some
sessions kills its rank, or stops it. Every rank writes what was in force in each step into a file of its own, so that
a killed one has told all it did. Then, for each point:

    same       in every step that two ranks both began, they had the same epoch and the same values
    unharmed   where the job went on, its losses are those of the same job without a tuner, and all ranks end equal
    no later   where a rank was killed the others end by an error of the training's own, within KILLED_SECONDS_MAX
    no hang    nothing runs longer than SESSION_SECONDS_MAX

torch is loaded once: sessions are forked from this process, which has no threads of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 64
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
                dice.uniform(0.01, 0.3), dice.random() < 0.5, mode,
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


def _train(rank: int, world: int, point: Point, log: Path, folder: Path) -> dict[str, Any]:
    import threading

    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from pacecar.controller.knobs.batch.micro_batch import MicroBatcher

    torch.manual_seed(point.seed)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    batcher = MicroBatcher(ddp, 8)
    fault = Fault(point, rank)
    tuner, buckets = _tuner(rank, world, point, fault, ddp, batcher) if point.mode != "alone" else (None, None)
    draw = torch.Generator().manual_seed(point.seed + rank)
    losses: list[float] = []
    timer = None
    if fault.is_here and point.place == "timer":
        timer = threading.Timer(point.seconds, fault.strike)
        timer.start()
    with open(log, "wb", buffering=0) as out:
        last = time.perf_counter_ns()
        for step in range(1, STEPS + 1):
            epoch, values = 0, []
            if tuner is not None and buckets is not None:
                epoch, values = tuner.agreement._member.epoch, [buckets.value(), batcher.micro_batch]
            out.write(json.dumps([step, epoch, values]).encode() + b"\n")
            batch = torch.randn(8, 32, generator=draw)
            optimizer.zero_grad()
            total = 0.0
            for micro in batcher.split(batch):
                loss = ddp(micro).square().mean()
                total += float(loss.detach()) * len(micro) / len(batch)
                batcher.backward(loss)
            optimizer.step()
            losses.append(total)
            now = time.perf_counter_ns()
            _spoil(fault, tuner, folder)
            if tuner is not None:
                tuner.boundary(step, now - last)
            last = now
    if timer is not None:
        timer.join()
    frozen = None
    if tuner is not None:
        frozen = tuner.agreement.frozen
        tuner.close()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
    return {"losses": losses, "frozen": frozen, "fell": fault.fell, "weights": weights.sum().item().hex()}


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


def _tuner(rank: int, world: int, point: Point, fault: Fault, ddp: Any, batcher: Any) -> tuple[Any, Any]:
    """Return a started tuner with faults built in, and the actuator of the bucket size."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]
    from job_tuner import Finished, Script, SmallJob, job_hello, step_record

    from pacecar.clock import SystemClock
    from pacecar.config import TuneConfig
    from pacecar.controller.consensus.channels import VoteChannel, VoteSubject
    from pacecar.controller.consensus.rank_agreement import RankAgreement
    from pacecar.controller.knobs.batch.micro_batch_knobs import MicroBatchActuator
    from pacecar.controller.knobs.ddp.buckets import BucketActuator
    from pacecar.controller.knobs.ddp.reducer import DdpReducer
    from pacecar.controller.status_reporter import StatusReporter
    from pacecar.controller.tuner import Tuner
    from pacecar.profiler.transport.side_group import SideGroup
    from pacecar.records import Knobs

    class Buckets(BucketActuator):
        def apply(self, value: int) -> None:
            fault("apply before")
            super().apply(value)
            fault("apply after")

    class MicroBatches(MicroBatchActuator):
        def value(self) -> int:
            fault("value")
            return super().value()

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
    buckets = Buckets(config, DdpReducer(ddp))
    in_force = [Knobs()]
    tuner: Any = Tuner(
        SmallJob(world, buckets, batcher, in_force), config,
        StatusReporter(job_hello(rank, world), lambda record: fault("emit"), SystemClock()),
        policy=Policy(is_trial=point.is_trial) if rank == 0 else None,
        actuators=[buckets, MicroBatches(ddp, batcher, config)], agreement=agreement,
    )  # fmt: skip
    if point.mode == "broken":
        agreement.settle = _keeps_what_it_has.__get__(agreement)  # type: ignore[method-assign]
    tuner.boundary = lambda step, ns: tuner.on_boundary(Finished(step_record(rank, step, ns, knobs=in_force[-1])))
    tuner.start()
    return tuner, buckets


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
    for rank, end in enumerate(ends):
        off = max(abs(a - b) / b for a, b in zip(end["losses"], alone[rank], strict=True))
        if off > RELATIVE:
            wrong.append(f"{point}: losses of rank {rank} are {off:.2g} off those without a tuner")
    if any(end["fell"] for end in ends) or point.place == "timer":
        tally["fell"] += 1
    frozen = [end["frozen"] for end in ends]
    if any(frozen):
        tally["frozen"] += 1
        if not all(frozen):
            wrong.append(f"{point}: only some ranks froze: {frozen}")
    return wrong


def reference(seed: int, world: int) -> list[list[float]]:
    """Return each rank's losses without any tuner, from ranks that are taken one after the other in this process."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    draws = [torch.Generator().manual_seed(seed + rank) for rank in range(world)]
    losses: list[list[float]] = [[] for _ in range(world)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for rank, draw in enumerate(draws):
            loss = net(torch.randn(8, 32, generator=draw)).square().mean()
            losses[rank].append(float(loss.detach()))
            (loss / world).backward()
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
