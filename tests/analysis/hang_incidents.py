"""Made-up incidents: jobs whose ranks run programs of collectives, one of which goes wrong, until nothing moves.

A small simulator of its own, which knows nothing of how hangs are judged.  Each rank has a *host*, which runs its
program and may run ahead, and a *device* with a queue for each group (or one for all).  A collective ends when all
members have it at the head of their queues, with equal signatures.  What is left when nothing moves is written as dumps
of torch's flight recorder and read as those of real jobs are.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pacecar.analysis.hang.dumps.flight_recorder import DumpError, read_dump
from pacecar.records.hangs import HangKind, HangVerdict, ProcessState, RankAccount, ThreadStack

__all__ = ["Incident", "draw_incident", "score"]

SECOND_NS = 10**9
START_NS = 1_790_000_000 * SECOND_NS
MOVES_MAX = 20_000


@dataclass(frozen=True)
class Op:
    """One instruction of a program: coll, send, recv, wait (for all calls so far) or work."""

    what: str
    group: str = ""
    operation: str = ""
    size: int = 0
    peer: int = -1


@dataclass(eq=False)
class Call:
    op: Op
    number: int
    made: int
    is_done: bool = False
    is_reported: bool = False


@dataclass(frozen=True)
class Fault:
    kind: HangKind
    rank: int
    step: int
    place: int
    other: int = -1


@dataclass
class Machine:
    """One rank."""

    program: list[Op]
    at: int = 0
    calls: list[Call] = field(default_factory=list)
    by_number: dict[tuple[str, int], Call] = field(default_factory=dict)
    pending: list[Call] = field(default_factory=list)
    messages: dict[tuple[str, int], list[Call]] = field(default_factory=lambda: defaultdict(list))
    joined: Counter[tuple[str, bool]] = field(default_factory=Counter)
    is_stuck: bool = False
    device_left: int | None = None
    is_mute: bool = False
    """Its device ends calls, and it does not hear of it."""

    @property
    def has_open_calls(self) -> bool:
        return self.is_mute or any(not call.is_done for call in self.pending)

    def make(self, call: Call) -> None:
        self.calls.append(call)
        self.pending.append(call)
        if call.op.what == "coll":
            self.by_number[call.op.group, call.number] = call
        else:
            self.messages[call.op.what, call.op.peer].append(call)


@dataclass
class Incident:
    seed: int
    layout: str
    backend: str
    world_size: int
    faults: list[Fault]
    accounts: list[RankAccount]
    missing: set[int]
    stalled: frozenset[int]
    """The ranks that a dead link keeps from finishing."""

    @property
    def culprits(self) -> set[int]:
        return {fault.rank for fault in self.faults if fault.kind is not HangKind.NOBODY}


class Job:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.backend = rng.choice(["nccl", "nccl", "gloo"])
        self.layout = rng.choice(["ddp", "tp_dp", "pp_dp", "fsdp", "tp_pp_dp", "hsdp"])
        self.groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.by_kind: dict[str, dict[int, str]] = defaultdict(dict)
        self.has_one_queue = rng.random() < 0.5
        self.is_uniform = rng.random() < 0.2  # all collectives have one size, so that a shift does not show
        self.steps = rng.choice([4, 4, 12, 20])
        self.evaluates_every = rng.choice([0, 0, 1, 3, 9])
        self.logs_every = rng.choice([0, 0, 2, 5])
        self.dead: tuple[str, int, frozenset[int]] | None = None
        self._lay_out()
        self.machines = [Machine(self._program(rank)) for rank in range(self.world_size)]

    def _lay_out(self) -> None:
        sizes = {"ddp": (1, 1), "fsdp": (1, 1), "tp_dp": (2, 1), "pp_dp": (1, 2), "tp_pp_dp": (2, 2), "hsdp": (2, 1)}
        tp, pp = sizes[self.layout]
        tp *= self.rng.choice([1, 2]) if tp > 1 else 1
        pp *= self.rng.choice([1, 2]) if pp > 1 else 1
        dp = self.rng.choice([1, 2, 3, 4, 8]) if tp * pp > 1 else self.rng.choice([2, 3, 4, 8, 16, 32, 64])
        self.tp, self.pp, self.dp = tp, pp, dp
        self.world_size = tp * pp * dp
        self._add("default_pg", tuple(range(self.world_size)))
        ranks = {(t, d, p): t + tp * (d + dp * p) for t in range(tp) for d in range(dp) for p in range(pp)}
        for kind, axis, size in (("tp", 0, tp), ("dp", 1, dp), ("pp", 2, pp)):
            if size == 1:
                continue
            lines: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for place, rank in sorted(ranks.items(), key=lambda one: one[1]):
                lines[place[:axis] + place[axis + 1 :]].append(rank)
            for line in lines.values():
                self._add(kind, tuple(line))

    def _add(self, kind: str, ranks: tuple[int, ...]) -> None:
        name = str(len(self.groups))
        self.groups[name] = kind, ranks
        self.by_kind[kind].update(dict.fromkeys(ranks, name))

    def _program(self, rank: int) -> list[Op]:
        return [op for step in range(self.steps) for op in (*self._between(rank, step), *self._step_ops(rank, step))]

    def _step_ops(self, rank: int, step: int) -> list[Op]:
        return [Op("forward"), Op("work"), *self._step(rank), *self._now_and_then(rank, step), Op("step", size=step)]

    def _between(self, rank: int, step: int) -> list[Op]:
        """Return an evaluation, which ends with a reduction."""
        if self.world_size == 1 or not self.evaluates_every or step % self.evaluates_every or not step:
            return []
        return [Op("evaluate"), self._coll(self.by_kind["default_pg"][rank], "all_reduce", 50), Op("wait")]

    def _now_and_then(self, rank: int, step: int) -> list[Op]:
        """Return a reduction within some steps, as of a gradient norm that is logged."""
        if self.world_size == 1 or not self.logs_every or step % self.logs_every:
            return []
        return [self._coll(self.by_kind["default_pg"][rank], "all_reduce", 1), Op("wait")]

    def _step(self, rank: int) -> list[Op]:
        """Return one step; gloo waits for each call, NCCL only where the host needs a result."""
        ops: list[Op] = []
        dp, tp, whole = self.by_kind["dp"].get(rank), self.by_kind["tp"].get(rank), self.by_kind["default_pg"][rank]
        stages = self.groups[self.by_kind["pp"][rank]][1] if self.pp > 1 else (rank,)
        place = stages.index(rank)
        for _ in range(2):  # microbatches
            ops += self._message("recv", rank, stages, place - 1)
            ops += [self._coll(tp, "all_reduce", 100 + layer) for layer in range(2)] if tp else []
            ops += self._message("send", rank, stages, place + 1)
        for _ in range(2):
            ops += self._message("recv", rank, stages, place + 1)
            ops += [self._coll(tp, "all_reduce", 110 + layer) for layer in range(2)] if tp else []
            ops += self._message("send", rank, stages, place - 1)
        if dp and self.layout in ("fsdp", "hsdp"):
            for layer in range(3):
                ops += [self._coll(dp, "_all_gather_base", 200 + layer), Op("work")]
            ops += [self._coll(dp, "_reduce_scatter_base", 200 + layer) for layer in range(3)]
        elif dp:
            ops += [self._coll(dp, "all_reduce", 300 + bucket) for bucket in range(3)]
        ops += [Op("wait")]
        ops += [self._coll(whole, "all_reduce", 1), Op("wait")] if self.world_size > 1 else []
        ops += [self._coll(whole, "broadcast", 7)] if self.layout == "ddp" else []
        return ops if self.backend == "nccl" else [one for op in ops for one in self._waited(op)]

    def _waited(self, op: Op) -> list[Op]:
        is_asynchronous = op.what == "send" or (op.what == "coll" and op.size in (300, 301))
        return [op] if op.what in ("wait", "work") or is_asynchronous else [op, Op("wait")]

    def _coll(self, group: str, operation: str, size: int) -> Op:
        return Op("coll", group, "all_reduce" if self.is_uniform else operation, 5 if self.is_uniform else size)

    def _message(self, what: str, rank: int, stages: tuple[int, ...], other: int) -> list[Op]:
        if not 0 <= other < len(stages):
            return []
        message = Op(what, self.by_kind["pp"][rank], what, 400, stages[other])
        return [message, Op("wait")] if what == "recv" and self.rng.random() < 0.5 else [message]

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(MOVES_MAX):
            order = list(range(self.world_size))
            self.rng.shuffle(order)
            moved = [self._host(rank) for rank in order]
            if not self._devices() and not any(moved):
                return
        raise AssertionError("it comes to rest")

    def _host(self, rank: int) -> bool:
        machine, moved = self.machines[rank], False
        for _ in range(self.rng.choice([1, 2, 4])):
            if machine.is_stuck or machine.at >= len(machine.program):
                break
            op = machine.program[machine.at]
            if op.what == "stick":
                machine.is_stuck = True
            elif op.what == "halt":
                machine.is_stuck, machine.device_left = True, 0
            elif op.what == "mute":
                machine.is_mute, machine.device_left = True, op.size
            elif op.what == "wait" and machine.has_open_calls:
                break
            elif op.what in ("coll", "send", "recv"):
                key = op.group, op.what != "coll"
                machine.joined[key] += 1
                machine.make(Call(op, machine.joined[key], len(machine.calls)))
            machine.at += 1
            moved = True
        return moved

    def _devices(self) -> bool:
        moved = False
        heads = [self._heads(machine) for machine in self.machines]
        for rank, own in enumerate(heads):
            for call in own:
                if not call.is_done and self._ends(rank, call, heads):
                    self._end(rank, call)
                    moved = True
        return moved

    def _heads(self, machine: Machine) -> list[Call]:
        if machine.device_left == 0:
            return []
        first: dict[object, Call] = {}
        machine.pending = [call for call in machine.pending if not call.is_done]
        for call in machine.pending:
            if not call.is_done:
                lane = (call.op.what, call.op.peer) if call.op.what != "coll" else self.has_one_queue or call.op.group
                first.setdefault(lane, call)
        return list(first.values())

    def _ends(self, rank: int, call: Call, heads: list[list[Call]]) -> bool:
        op = call.op
        if op.what != "coll":
            return self._meets(rank, call)
        members = self.groups[op.group][1]
        if self.dead is not None and (op.group, call.number) == self.dead[:2] and rank in self.dead[2]:
            return False
        for member in [members[0]] if op.operation == "broadcast" else members:
            its = self.machines[member].by_number.get((op.group, call.number))
            if its is None or (its.op.operation, its.op.size) != (op.operation, op.size):
                return False
            if not its.is_done and its not in heads[member]:
                return False
        return True

    def _meets(self, rank: int, call: Call) -> bool:
        """Return whether the other side has called its half: the n-th receive belongs to the n-th send."""
        other = self.machines[call.op.peer]
        mine = self.machines[rank].messages[call.op.what, call.op.peer]
        theirs = other.messages["recv" if call.op.what == "send" else "send", rank]
        return mine.index(call) < len(theirs) and (other.device_left != 0 or theirs[mine.index(call)].is_done)

    def _end(self, rank: int, call: Call) -> None:
        machine = self.machines[rank]
        call.is_done = True
        call.is_reported = not machine.is_mute
        if machine.device_left:
            machine.device_left -= 1

    # --- going wrong --------------------------------------------------------------------------------------------------

    def break_at(self, fault: Fault) -> None:
        ranks = range(self.world_size) if fault.kind is HangKind.NOBODY else [fault.rank]
        for rank in ranks:
            program = self.machines[rank].program
            start = [0, *[i + 1 for i, op in enumerate(program) if op.what == "step"]][fault.step]
            end = next(index for index in range(start, len(program)) if program[index].what == "step")
            calls = [index for index in range(start, end) if program[index].what == "coll"]
            index = start + (0 if fault.kind is HangKind.NOBODY else fault.place % (end - start))
            call = calls[fault.place % len(calls)] if calls else index
            program[:] = self._broken(program, fault, index, call)

    def _broken(self, program: list[Op], fault: Fault, index: int, call: int) -> list[Op]:
        op = program[call]
        match fault.kind:
            case HangKind.NOT_JOINED | HangKind.NOBODY:
                return [*program[:index], Op("stick"), *program[index:]]
            case HangKind.NO_ANSWER:
                return [*program[:index], Op(self.rng.choice(["stick", "halt"])), *program[index:]]
            case HangKind.STOPPED | HangKind.GONE:
                return [*program[:index], Op("halt"), *program[index:]]
            case HangKind.NOT_FINISHED:
                return [*program[:index], Op("mute", size=self.rng.randrange(6)), *program[index:]]
            case HangKind.SKIPPED:
                return [*program[:call], *program[call + 1 :]]
            case HangKind.EXTRA:
                new = op if self.rng.random() < 0.3 else Op("coll", op.group, "all_reduce", 99)
                return [*program[:call], new, Op("wait"), *program[call:]]
            case HangKind.MISMATCHED:
                new = Op("coll", op.group, op.operation, op.size + 1000)
                other = "all_reduce" if op.operation != "all_reduce" else "_all_gather_base"
                new = new if self.rng.random() < 0.6 else Op("coll", op.group, other, op.size)
                return [*program[:call], new, *program[call + 1 :]]
            case HangKind.LINK:
                before = sum(one.what == "coll" and one.group == op.group for one in program[:call])
                members = self.groups[op.group][1]
                side = {members[fault.other % len(members)]} if self.rng.random() < 0.3 else members
                if op.what == "coll":
                    self.dead = op.group, before + 1, frozenset(side)
        return program

    # --- telling ------------------------------------------------------------------------------------------------------

    def dump(self, rank: int, offset_ns: int, form: str) -> bytes:
        machine, rng = self.machines[rank], self.rng
        mine = {name: one for name, one in self.groups.items() if rank in one[1]}
        ids = {name: str(index) for index, name in enumerate(mine)}
        entries: list[dict[str, Any]] = []
        for index, call in enumerate(machine.calls):
            kind, members = self.groups[call.op.group]
            is_p2p = call.op.what != "coll"
            if is_p2p and self.backend == "gloo":
                continue
            name = call.op.operation
            if is_p2p:
                arrow = "->" if call.op.what == "send" else "<-"
                name = f"{call.op.what} {members.index(rank)}{arrow}{members.index(call.op.peer)}"
            entries.append(
                {
                    "record_id": index,
                    "pg_id": int(ids[call.op.group]),
                    "process_group": [call.op.group, kind],
                    "collective_seq_id": call.number if not is_p2p else machine.joined[call.op.group, False],
                    "p2p_seq_id": call.number if is_p2p else 0,
                    "profiling_name": f"{self.backend}:{name}",
                    "time_created_ns": START_NS + offset_ns + call.made * SECOND_NS // 10,
                    "input_sizes": [[call.op.size]],
                    "input_dtypes": ["Float"],
                    "state": "scheduled" if self.backend == "gloo" or not call.is_reported else "completed",
                    "retired": call.is_reported,
                    "is_p2p": is_p2p,
                }
            )
        if form == "active":
            entries = [entry for entry in entries if not entry["retired"]]
        status = {ids[name]: self._status(machine, name) for name in mine}
        config = {name: {"name": name, "desc": kind, "ranks": str(list(ranks))} for name, (kind, ranks) in mine.items()}
        if self.backend == "gloo":
            config = {"": {"name": "", "desc": "", "ranks": "[]"}}
        document = {"version": "2.10", "pg_config": config, "pg_status": status, "entries": entries}
        rng.shuffle(entries)
        return json.dumps(document).encode() if rng.random() < 0.5 else pickle.dumps(document, protocol=2)

    def _status(self, machine: Machine, name: str) -> dict[str, Any]:
        calls = [call for call in machine.calls if call.op.group == name]
        if self.backend == "gloo":
            calls = [call for call in calls if call.op.what == "coll"]
        done = [call.number for call in calls if call.is_reported]
        late = int(self.backend == "gloo" and len(done) > 1 and self.rng.random() < 0.2)  # two threads write it
        numbers = (calls[-1].number if calls else -1, -1, done[-1 - late] if done else -1)
        keys = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
        return {key: str(n) if self.backend == "gloo" else n for key, n in zip(keys, numbers, strict=True)}

    def step_of(self, rank: int) -> int:
        machine = self.machines[rank]
        return sum(op.what == "step" for op in machine.program[: machine.at])

    def is_in_step(self, rank: int) -> bool:
        machine = self.machines[rank]
        marks = [op.what for op in machine.program[: machine.at] if op.what in ("forward", "evaluate", "step")]
        return marks[-1:] == ["forward"]


KINDS = (
    HangKind.NOT_JOINED, HangKind.NOT_JOINED, HangKind.STOPPED, HangKind.GONE, HangKind.NO_ANSWER,
    HangKind.NOT_FINISHED, HangKind.SKIPPED, HangKind.EXTRA, HangKind.MISMATCHED, HangKind.LINK, HangKind.NOBODY,
)  # fmt: skip


def draw_incident(seed: int) -> Incident:
    """Return a hang with its accounts; the same for the same seed."""
    for attempt in range(100):
        rng = random.Random(f"{seed}.{attempt}")
        job = Job(rng)
        if job.world_size < 2:
            continue
        kinds = [rng.choice(KINDS)]
        if rng.random() < 0.12:
            kinds = [rng.choice([HangKind.NOT_JOINED, HangKind.STOPPED, HangKind.MISMATCHED]) for _ in range(2)]
        ranks = rng.sample(range(job.world_size), len(kinds))
        faults = [
            Fault(kind, rank, rng.randrange(1, job.steps - 1), rng.randrange(50), rng.randrange(64))
            for kind, rank in zip(kinds, ranks, strict=True)
        ]
        for fault in faults:
            job.break_at(fault)
        left_over = _left_over(job, rng, f"{seed}.{attempt}") if rng.random() < 0.06 else {}
        job.run()
        if all(
            machine.at >= len(machine.program) and all(c.is_reported for c in machine.calls) for machine in job.machines
        ):
            continue  # it did not hang: the fault never came, or changed nothing
        return _told(seed, job, faults, left_over, rng)
    raise AssertionError("some attempt hangs")


def _left_over(job: Job, rng: random.Random, seed: str) -> dict[int, bytes]:
    """Return the dump of one rank from an earlier hang of the same job, which nobody has removed."""
    before = Job(random.Random(seed))
    before.break_at(Fault(HangKind.NOT_JOINED, rng.randrange(job.world_size), rng.randrange(4), rng.randrange(50)))
    before.run()
    rank = rng.randrange(job.world_size)
    return {rank: before.dump(rank, -86_400 * SECOND_NS, "all")}


def _told(seed: int, job: Job, faults: list[Fault], left_over: dict[int, bytes], rng: random.Random) -> Incident:
    form = rng.choice(["all", "all", "active"])
    knows_processes, knows_stacks = rng.random() < 0.6, rng.random() < 0.5
    missing: set[int] = set()
    accounts = []
    loses = rng.random() < 0.25
    apart_seconds = rng.choice([1, 1, 60, 3600])
    for rank in range(job.world_size):
        fault = next((one for one in faults if one.rank == rank), None)
        data = left_over.get(rank) or job.dump(rank, rng.randint(-apart_seconds, apart_seconds) * SECOND_NS, form)
        if loses and rng.random() < rng.choice([0.1, 0.5]):
            data = data[: rng.randrange(len(data))]
        is_silent = fault is not None and fault.kind in (HangKind.GONE, HangKind.NO_ANSWER)
        try:
            account = read_dump(data, rank)
        except DumpError:
            missing.add(rank)
            if not (is_silent and knows_processes):
                continue
        if is_silent:
            if not knows_processes:
                missing.add(rank)
                continue
            account = RankAccount(rank=rank, world_size=job.world_size, answered=False)
        account = msgspec.structs.replace(
            account, world_size=job.world_size, step=job.step_of(rank), is_in_step=job.is_in_step(rank)
        )
        if knows_processes:
            account = msgspec.structs.replace(account, process=_process(rank, fault))
        if knows_stacks and not is_silent:
            account = msgspec.structs.replace(account, stacks=(_stack(job, rank, fault, faults, rng),))
        accounts.append(account)
    rng.shuffle(accounts)
    return Incident(
        seed,
        job.layout,
        job.backend,
        job.world_size,
        faults,
        accounts,
        missing,
        frozenset() if job.dead is None else job.dead[2],
    )


def _process(rank: int, fault: Fault | None) -> ProcessState | None:
    kind = None if fault is None else fault.kind
    if kind is HangKind.NO_ANSWER:
        return None
    return ProcessState(
        pid=1000 + rank,
        exists=kind is not HangKind.GONE,
        state={HangKind.GONE: None, HangKind.STOPPED: "T"}.get(kind, "S") if kind else "S",
    )


def _stack(job: Job, rank: int, fault: Fault | None, faults: list[Fault], rng: random.Random) -> ThreadStack:
    if any(one.kind is HangKind.NOBODY for one in faults):
        frames: tuple[str, ...] = ("storage.py:77 save", "train.py:12 main")
    elif job.machines[rank].is_stuck:
        frames = ("loader.py:40 __next__", "train.py:10 main")
    else:
        frames = rng.choice([("distributed_c10d.py:2400 all_reduce", "train.py:30 main"), ("train.py:31 main",)])
    return ThreadStack(name="MainThread", frames=frames, is_training=True)


def score(incident: Incident, verdict: HangVerdict) -> str:
    """Return right, part (some of several culprits), pair (two that cannot be told apart), unknown or wrong."""
    truth, named = incident.culprits, set(verdict.culprits)
    kinds = {fault.kind for fault in incident.faults}
    if verdict.kind is HangKind.UNKNOWN:
        return "unknown"
    if verdict.kind is HangKind.NOBODY:
        return "right" if kinds == {HangKind.NOBODY} else "wrong"
    if verdict.kind is HangKind.LINK:
        if kinds == {HangKind.LINK}:
            return "right"
        # All have joined, and the transfer does not end: true, though the reason is a rank of which nothing is known.
        halted = {HangKind.STOPPED, HangKind.GONE, HangKind.NO_ANSWER, HangKind.NOT_FINISHED}
        return "unknown" if kinds & halted and not named else "wrong"
    if kinds == {HangKind.LINK}:
        return "right" if verdict.kind is HangKind.NOT_FINISHED and named == incident.stalled else "wrong"
    if named == truth:
        return "right"
    if (
        len(named) == 2
        and verdict.kind is HangKind.MISMATCHED
        and "cannot be told" in verdict.summary
        and named & truth
    ):
        return "pair"
    return "part" if named < truth else "wrong"


def main(first: int, last: int) -> None:
    """Print how often each fault was judged right, in part, as one of a pair, not at all, and wrongly."""
    from pacecar.analysis.hang.judgement import judge

    scores: dict[str, Counter[str]] = defaultdict(Counter)
    for seed in range(first, last):
        incident = draw_incident(seed)
        result = score(incident, judge(incident.accounts, incident.world_size))
        scores[" and ".join(sorted(fault.kind for fault in incident.faults))][result] += 1
        scores["all"][result] += 1
    for name, counts in sorted(scores.items()):
        sys.stdout.write(f"{name}: {', '.join(f'{count} {result}' for result, count in counts.most_common())}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
