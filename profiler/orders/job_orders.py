"""Carries out orders to a whole job on one rank, and has the other ranks do so for a person whose daemon asks this one.

    queue's thread      receive(command): a thread is started, or the command refused
    thread of an order  passes it on, asks again until it is done, answers through the daemon
    accounts' thread    answer(question): what another rank passes on
    training thread     carries out what only it may, at a boundary, as for commands of this node's daemon

Whoever the daemon lets command this rank commands the job: the token that the ranks exchanged when they met shows that
an order comes from a rank of it.  A rank that runs as another user refuses, except root's orders.

An order has an id.  A rank begins it once and says how far it is when it is asked again, so the asking rank repeats the
order as a question, and a person may repeat it after a failure.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from msgspec import structs

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Answer, Command, JobHello, Knobs, KnobValue
from pacecar.records.hangs import HangEvidence
from pacecar.records.job_orders import REPLIES_MAX, JobAnswer, JobNews, JobOrder, RankReply
from pacecar.records.ranges import TEXT_CHARACTERS_MAX

from ..hangs.account_road import Later, Question, RankReplies
from ..hangs.hang_evidence import write_evidence
from ..hangs.rank_account import TrainingProgress
from ..ranks.exchange.subgroups import Subgroup
from .job_news import LatestNews
from .passing_on import OrderPassing, Peers
from .two_looks import for_a_frame, summary_of

__all__ = ["ORDER_NUMBERS", "JobOrders", "JobPeers"]

ORDER_NUMBERS = 2**52
"""Commands from here on are of orders to the job; a daemon counts its own from 1."""

UNDER_WAY_MAX = 4
"""Orders that one rank passes on at a time."""

PART_BYTES_MAX = 32 * 1024
"""Replies in one frame to the daemon.  A rank's own, with all its news, may have as much again."""

KEPT_MAX = 1024
"""Orders that a rank remembers; one that is repeated after so many others would be a new one."""

POLL_SECONDS = 0.3
"""How often the ranks are asked how far they are."""

TUNE_SECONDS = 60

AHEAD_SECONDS = 3.0
AHEAD_STEPS = 4
"""How far ahead the first step of a trace is: an order goes round in 1.3 s."""

TRACE_SILENT_POLLS_MAX = 30
"""A rank that has begun a trace is given up when it has not answered so often in a row."""

TRACE_POLL_SECONDS = 1.0
SAY_SECONDS = 10.0
"""How often the ranks are asked how far their traces are, and a person is told, who gives up after a silent minute."""

TRACE_SECONDS = 60.0
TRACE_UNKNOWN_SECONDS = 300.0
TRACED_SLOWER = 5.0
"""How long writing and compressing may take; steps of an unknown pace; how much slower a traced step may be."""

APART_SECONDS = 1.0
"""Between two looks at all ranks."""

SILENT_POLLS_MAX = 3
"""Rank 0 is given up when it has not answered so often in a row."""

_log = logging.getLogger("pacecar")


class JobPeers(Peers, Protocol):
    """The other ranks, as orders need them."""

    def look(self) -> HangEvidence | None:
        """Return what all ranks are doing."""
        ...


@dataclass(frozen=True, slots=True)
class RankState:
    """Reads this rank, from any thread."""

    step: Callable[[], int]
    pace_ns: Callable[[], int | None]
    knobs: Callable[[], Knobs]
    has_daemon: Callable[[], bool]


class JobOrders:
    """One rank's part.  `accept` queues a command for the training thread, `reply` sends an answer to the daemon.

    Neither waits.  `charge` takes the processor time of an order's threads.  Dumps are written into `run_dir`.
    """

    def __init__(
        self,
        hello: JobHello,
        state: RankState,
        clock: Clock,
        *,
        accept: Callable[[Command], Answer | None],
        reply: Callable[[Answer | JobAnswer], None],
        charge: Callable[[int], None],
        run_dir: str | None = None,
    ) -> None:
        self.news = LatestNews(hello, clock)
        """Takes this rank's records."""
        self._hello = hello
        self._state = state
        self._clock = clock
        self._accept = accept
        self._reply = reply
        self._charge = charge
        self._run_dir = run_dir
        self._peers: JobPeers | None = None
        self._passing: OrderPassing | None = None
        self._progress: Callable[[], TrainingProgress] | None = None
        self._kept: OrderedDict[str, RankReply] = OrderedDict()
        self._begun = 0
        self._keys: dict[int, str] = {}
        self._lock = threading.Lock()
        self._under_way = 0
        self._closing = threading.Event()

    def open(self, peers: JobPeers, subgroup: Subgroup, progress: Callable[[], TrainingProgress]) -> None:
        """Pass orders on to `peers` from now on."""
        hello = self._hello
        self._peers, self._progress = peers, progress
        self._passing = OrderPassing(
            peers, hello.rank, hello.world_size, subgroup, self._carry_out_here, self._clock.monotonic_ns
        )

    def close(self) -> None:
        """End the orders under way."""
        self._closing.set()

    # --- on this rank: the accounts' thread, or that of an order ------------------------------------------

    def answer(self, question: Question) -> RankReplies | Later:
        """Answer another rank that passes an order on."""
        order, passing = question.order, self._passing
        if order is None or passing is None:
            return RankReplies(())
        if question.what == "order":
            return RankReplies((self._carry_out_here(order),))
        return lambda: self._charged(lambda: RankReplies(tuple(passing.to_subgroup(order))))

    def _carry_out_here(self, order: JobOrder) -> RankReply:
        uid = os.geteuid()
        if order.uid != 0 and order.rank_uid != uid:
            return self._own("refused", f"it runs as uid {uid}, and the order came to a rank of uid {order.rank_uid}")
        if order.action == "show":
            return self._standing()
        with self._lock:
            key = f"{order.id}@{order.at_step}"  # of a trace: which rank asks, decides from which step
            known = self._kept.get(key)
            if known is not None:
                return known
            number = ORDER_NUMBERS + self._begun
            self._begun += 1
            self._keep(key, self._own("accepted", "at its next step"))
            self._keys[number] = key
            while len(self._keys) > KEPT_MAX:
                del self._keys[next(iter(self._keys))]
        command = Command(
            number=number, action=order.action, at_step=order.at_step, arguments=order.arguments, uid=order.uid
        )
        refusal = self._accept(command)
        if refusal is not None:
            self.take(refusal)
        with self._lock:
            return self._kept[key]

    def take(self, answer: Answer) -> bool:
        """Keep this rank's answer to the command of an order; return False for one of the daemon's.  On any thread."""
        if answer.number < ORDER_NUMBERS:
            return False
        with self._lock:
            key = self._keys.get(answer.number)
            if key is not None:
                reply = self._own(answer.state, answer.detail)
                self._keep(key, structs.replace(reply, report=answer.report))
        return True

    def _keep(self, key: str, reply: RankReply) -> None:
        self._kept[key] = reply
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def _own(self, state: Literal["accepted", "done", "refused"], detail: str) -> RankReply:
        """Return this rank's reply; a store's error may be a page long, and a path any bytes."""
        detail = detail.encode("utf-8", "replace").decode()[:TEXT_CHARACTERS_MAX]
        return RankReply(rank=self._hello.rank, state=state, detail=detail, host=self._hello.host)

    def _standing(self) -> RankReply:
        progress = None if self._progress is None else self._progress()
        return RankReply(
            rank=self._hello.rank,
            host=self._hello.host,
            step=self._state.step(),
            phase=None if progress is None else progress.phase,
            silent_ns=None if progress is None else progress.silent_ns,
            pace_ns=self._state.pace_ns(),
            knobs=self._state.knobs(),
            has_daemon=self._state.has_daemon(),
            news=self.news.news(),
        )

    # --- for a person: the queue's thread, then one of the order's own ------------------------------------

    def receive(self, command: Command) -> Answer | None:
        """Start to pass on the order in `command`, or return the answer that refuses it."""
        order = self._order_of(command)
        if isinstance(order, str):
            return self._final(command, "refused", order)
        with self._lock:
            if self._under_way >= UNDER_WAY_MAX:
                return self._final(command, "refused", f"this rank passes on {UNDER_WAY_MAX} orders already")
            self._under_way += 1
        self._say(command, "accepted", "")  # a sign of life
        threading.Thread(target=self._pass_on, args=(command, *order), name="pacecar-job-orders", daemon=True).start()
        return None

    def _order_of(self, command: Command) -> tuple[str, JobOrder] | str:
        """Return what is ordered and the order for the ranks, or why it cannot be."""
        arguments: dict[str, KnobValue] = dict(command.arguments)
        what, key = arguments.pop("job_order", None), arguments.pop("id", None)
        arguments.pop("attempt", None)
        if not isinstance(key, str) or not 1 <= len(key) <= 64:
            return "an order to a job needs an id"
        if self._passing is None and self._hello.world_size > 1:
            return "its ranks do not listen to each other: they have not met yet, or [hook] crew is off, or see its log"
        actions: dict[object, Literal["show", "tune", "trace"]] = {"tune": "tune", "trace": "trace"}
        if what not in ("show", "tune", "trace", "hang", "dump"):
            return f"a job takes show, tune, trace, hang and dump, not {str(what)[:40]!r}"
        return str(what), JobOrder(
            id=key, action=actions.get(what, "show"), arguments=arguments, uid=command.uid, rank_uid=os.geteuid()
        )

    def _pass_on(self, command: Command, what: str, order: JobOrder) -> None:
        try:
            self._charged(lambda: self._carry_out(command, what, order))
        except Exception as error:  # noqa: BLE001  a thread's own outer boundary: the job goes on
            _log.debug("an order to the job failed", exc_info=True)
            self._say(command, "refused", f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._under_way -= 1

    def _carry_out(self, command: Command, what: str, order: JobOrder) -> None:
        match what:
            case "show":
                replies = self._to_all(order)
                self._send(command, replies)
                answering = sum(reply.state != "silent" for reply in replies)
                self._say(command, "done", f"{answering} of {len(replies)} ranks answer")
            case "tune":
                self._tune(command, order)
            case "trace":
                self._trace(command, order)
            case "hang":
                self._look_at_all(command, order, None)
            case _:
                directory = order.arguments.get("directory") or self._run_dir
                if directory is None:
                    self._say(command, "refused", "this job has no run folder: name a directory")
                else:
                    self._look_at_all(command, order, Path(str(directory)))

    def _look_at_all(self, command: Command, order: JobOrder, folder: Path | None) -> None:
        """Say what all ranks are doing and whether the job hangs, and write their accounts into `folder` if given."""
        before = None if self._peers is None else self._peers.look()
        begun_ns = self._clock.monotonic_ns()
        replies = self._to_all(order)
        self._closing.wait(max(0.0, APART_SECONDS - (self._clock.monotonic_ns() - begun_ns) / NS_PER_SECOND))
        after = None if self._peers is None else self._peers.look()
        if before is None or after is None:
            self._say(command, "refused", "it has no other ranks that could be asked")
            return
        judged = next((one.news.hang for one in replies if one.news is not None and one.news.hang is not None), None)
        verdict = judged or after.verdict
        news = JobNews(hang=for_a_frame(verdict))
        own = self._hello.rank
        self._send(command, [structs.replace(one, news=news if one.rank == own else None) for one in replies])
        if folder is None:
            self._say(command, "done", summary_of(before, after) if judged is None else judged.summary)
            return
        step = max((account.step for account in after.accounts if account.step is not None), default=None)
        path = folder / ("dump" if step is None else f"dump-step{step}") / "hang.json"
        try:
            write_evidence(path, verdict, after.accounts)
        except OSError as error:
            self._say(command, "refused", f"{path}: {error.strerror or error}")
        else:
            self._say(command, "done", str(path.parent))

    def _tune(self, command: Command, order: JobOrder) -> None:
        """Have rank 0 carry out `order`; say what it says."""
        end_ns = self._clock.monotonic_ns() + TUNE_SECONDS * NS_PER_SECOND
        said, said_ns, silent = "", 0, 0
        while True:
            reply = self._to_one(0, order)
            now_ns = self._clock.monotonic_ns()
            silent = silent + 1 if reply.state == "silent" else 0
            if reply.state in ("done", "refused"):
                self._say(command, reply.state, reply.detail, report=reply.report)
                return
            words = reply.detail
            if silent:
                ago = (
                    "" if reply.silent_ns is None else f", last heard from {reply.silent_ns / NS_PER_SECOND:.0f} s ago"
                )
                words = f"rank 0, which tunes, does not answer{ago}: {reply.detail}"
            if silent >= SILENT_POLLS_MAX or now_ns > end_ns:
                self._say(command, "refused", f"{words}; it may still carry the order out")
                return
            if not silent and (words != said or now_ns - said_ns > SAY_SECONDS * NS_PER_SECOND):
                said, said_ns = words, now_ns
                self._say(command, "accepted", f"rank 0: {words}")
            if self._closing.wait(POLL_SECONDS):
                self._say(command, "refused", "the job ended first")
                return

    def _trace(self, command: Command, order: JobOrder) -> None:
        """Have all ranks trace the same steps; say where the files are."""
        standings = self._to_all(structs.replace(order, action="show"))
        steps = [one.step for one in standings if one.step is not None]
        paces = [one.pace_ns for one in standings if one.pace_ns]
        if not steps:
            self._say(command, "refused", "no rank says at which step it is")
            return
        first, patience_seconds = _first_step(max(steps), max(paces, default=None), order.arguments.get("steps"))
        order = structs.replace(order, at_step=first)
        end_ns = self._clock.monotonic_ns() + round(patience_seconds * NS_PER_SECOND)
        said_ns = None
        latest: dict[int, RankReply] = {}
        silent: Counter[int] = Counter()
        while True:
            for one in self._to_all(order):
                silent[one.rank] = silent[one.rank] + 1 if one.state == "silent" else 0
                known = latest.get(one.rank)
                if known is not None and (known.state == "done" or 0 < silent[one.rank] < TRACE_SILENT_POLLS_MAX):
                    continue  # it may have left, or is writing its file, which may hold Python's lock
                latest[one.rank] = one
            replies = [latest[rank] for rank in sorted(latest)]
            written = sum(one.state == "done" for one in replies)
            left = sum(one.state == "accepted" for one in replies)
            now_ns = self._clock.monotonic_ns()
            if not left or now_ns > end_ns or self._closing.is_set():
                self._send(command, replies)
                state: Literal["done", "refused"] = "done" if written else "refused"
                self._say(command, state, f"{written} of {len(replies)} ranks have written a trace from step {first}")
                return
            if said_ns is None or now_ns - said_ns > SAY_SECONDS * NS_PER_SECOND:
                said_ns = now_ns
                self._say(command, "accepted", f"from step {first}: {written} of {len(replies)} ranks are done")
            self._closing.wait(TRACE_POLL_SECONDS)

    def _to_all(self, order: JobOrder) -> list[RankReply]:
        return [self._carry_out_here(order)] if self._passing is None else self._passing.to_all(order)

    def _to_one(self, rank: int, order: JobOrder) -> RankReply:
        return self._carry_out_here(order) if self._passing is None else self._passing.to_one(rank, order)

    def _send(self, command: Command, replies: list[RankReply]) -> None:
        hello = self._hello
        for part in _parts(replies):
            self._reply(
                JobAnswer(
                    job=hello.job, rank=hello.rank, number=command.number, world_size=hello.world_size, replies=part
                )
            )

    def _final(self, command: Command, state: Literal["accepted", "done", "refused"], detail: str) -> Answer:
        return Answer(job=self._hello.job, rank=self._hello.rank, number=command.number, state=state, detail=detail)

    def _say(self, command: Command, state: Literal["accepted", "done", "refused"], detail: str, **more: Any) -> None:  # noqa: ANN401
        self._reply(structs.replace(self._final(command, state, detail), **more))

    def _charged(self, act: Callable[[], Any]) -> Any:  # noqa: ANN401  whatever `act` returns
        begun_ns = time.thread_time_ns()
        try:
            return act()
        finally:
            self._charge(time.thread_time_ns() - begun_ns)


def _parts(replies: Sequence[RankReply]) -> Iterator[tuple[RankReply, ...]]:
    """Yield the replies in parts that fit into frames."""
    part: list[RankReply] = []
    left_bytes = PART_BYTES_MAX
    for reply in replies:
        size = len(msgspec.msgpack.encode(reply))
        if part and (size > left_bytes or len(part) == REPLIES_MAX):
            yield tuple(part)
            part, left_bytes = [], PART_BYTES_MAX
        part.append(reply)
        left_bytes -= size
    if part:
        yield tuple(part)


def _first_step(latest: int, pace_ns: int | None, steps: KnobValue | None) -> tuple[int, float]:
    """Return the first step that all ranks can trace, and the seconds until all should have written their files."""
    if pace_ns is None:
        return latest + AHEAD_STEPS, TRACE_SECONDS + TRACE_UNKNOWN_SECONDS
    ahead = max(AHEAD_STEPS, math.ceil(AHEAD_SECONDS * NS_PER_SECOND / pace_ns))
    traced = TRACED_SLOWER * (steps if isinstance(steps, int) else 5)
    return latest + ahead, TRACE_SECONDS + (ahead + traced) * pace_ns / NS_PER_SECOND
