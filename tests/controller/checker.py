"""Is there any order of events in which ranks part?  Every one is tried, within bounds, on the real protocol.

Random orders find what is likely.  What hangs a job of a thousand ranks once a month is not, so here nothing is drawn:
the agreements of all ranks (`RankAgreement`, with `ProtocolMember` in it) stand on channels of paper, and from every
state every event that can come next is tried.  States that were seen are not looked into again.

    a rank comes to its next boundary    not before all ranks are done with the `lag`th before it; 1 in training
    a gather that all ranks posted       is seen by each rank now or later, at most `delay` looks later
    rank 0 wishes, or takes it back      where it looks at the side road, as often as there are `wishes`
    a fault, `faults` of them            a rank freezes, loses its side road, will not or cannot carry out, or is lost;
                                         its hook is off, it closes pacecar and trains on, it leaves out a boundary
                                         (its step raised), or it waits no longer for the others
    a rank closes as others may ("finish")   it asks all that do so to go back to value 0, waits, or waits no longer

A frame is read when all ranks have sent it and not before; a rank that waits no longer looks for it again at each later
boundary.  That a rank waits for one that never comes is a violation, unless a rank was lost (then the training has
ended too), left out a boundary or was late: then the one that waits gives up, and if that does not set it free, it is
one.  In every step that two ranks make, as their
common collectives count them, both must have the same values in force.  Boundaries at which an agreement has nothing to
do are passed in one go: no other rank can tell.

Left out: what the Tuner makes of it; the roads themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pacecar.controller.consensus.capabilities import KnobOffer, Offer
from pacecar.controller.consensus.channels import LateError, LeftError, VoteSubject
from pacecar.controller.consensus.protocol import PERIOD, ProtocolMember, SwitchProposal
from pacecar.controller.consensus.rank_agreement import RankAgreement

__all__ = ["Bounds", "Census", "ViolationError", "check"]

OFFER = Offer((KnobOffer("bucket_bytes", 0, tuple(range(8)), None, ""),))

Settle = Callable[..., bool]


class ViolationError(AssertionError):
    """An order of events in which the ranks part or hang; the message tells it."""


class BlockedError(BaseException):
    """This rank waits for a frame of another one."""


@dataclass(frozen=True)
class Bounds:
    """How far to look; `kinds` are the faults that there are."""

    ranks: int = 2
    boundaries: int = 5 * PERIOD
    lag: int = 1
    delay: int = 2
    wishes: int = 2
    withdrawals: int = 0
    faults: int = 0
    times_wishes: bool = False
    step_ns: int = 0
    kinds: tuple[str, ...] = ("freeze", "side", "refuse", "fail", "lose")
    """Besides these there are "off", "close", "skip", "late" and "finish"."""


@dataclass
class Census:
    """What was seen: `longest_wish` counts rank 0's boundaries from a wish to its end."""

    states: int = 0
    events: int = 0
    switches: int = 0
    failures: int = 0
    retired: int = 0
    left_out: int = 0
    left: int = 0
    taken_back: int = 0
    longest_wish: int = 0


class Side:
    """One rank's end of the side road."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.taken, self.is_busy, self.is_seen, self.looks = world, rank, 0, False, False, 0

    def post(self, words: Sequence[int]) -> None:
        gather = self.world.gathers.setdefault(self.taken, [None] * len(self.world.ranks))
        gather[self.rank] = tuple(words)
        self.is_busy, self.looks = True, 0

    @property
    def is_complete(self) -> bool:
        return self.is_busy and None not in self.world.gathers[self.taken]

    def receive(self) -> list[Any] | None:
        if not self.is_complete:
            return None
        if not self.is_seen:
            self.looks += 1
            return None
        self.is_busy, self.taken = False, self.taken + 1
        return list(self.world.gathers[self.taken - 1])


class Main:
    """One rank's end of the main road."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.sent = world, rank, 0
        self.has_said_farewell = self.gives_up = False
        self.waits_for: int | None = None
        """The frame that this rank sent and could not read: whatever sends it again means this one."""

    def post(self, subject: VoteSubject, words: Sequence[int]) -> int:
        if self.waits_for is not None:
            frame, self.waits_for = self.waits_for, None
            return frame
        assert not self.has_said_farewell, "nothing follows a farewell"
        frame = self.sent
        self.sent += 1
        rows = self.world.frames.setdefault(frame, [None] * len(self.world.ranks))
        rows[self.rank] = (subject, *words)
        self.has_said_farewell = subject in (VoteSubject.LEAVE, VoteSubject.CLOSE)
        return frame

    def age_seconds(self, frame: int) -> float:
        return 0.0

    def receive(self, frame: int, seconds: float) -> list[list[int]]:
        rows = self.world.frames[frame]
        if self.gives_up:
            self.gives_up = False
            raise LateError("planted")
        if None in rows and any(_has_farewell(self.world.frames[n]) for n in self.world.frames if n < frame):
            raise LeftError("a rank takes no further part")  # it joined a frame that this rank gave up waiting for
        if None in rows and seconds == 0:
            raise LateError("not waited for")
        if None in rows:
            raise BlockedError
        if _has_farewell(rows):
            raise LeftError("a rank takes no further part")
        if len({row[0] for row in rows}) > 1:
            raise LeftError("different points")
        return [list(row[1:]) for row in rows]

    def verdict(self, frame: int, *, is_complete: bool) -> bool:
        return self.world.verdicts.setdefault(frame, is_complete)

    def leave(self) -> None:
        if not self.has_said_farewell:
            self.post(VoteSubject.LEAVE, [])


def _has_farewell(rows: Sequence[Any]) -> bool:
    """Return whether all ranks sent this frame and one of them takes no further part."""
    subjects = {None if row is None else row[0] for row in rows}
    return None not in subjects and (
        VoteSubject.LEAVE in subjects or (VoteSubject.CLOSE in subjects and len(subjects) > 1)
    )


APART = frozenset((
    "world", "_member", "_side", "_main", "_meet_seconds", "spaces", "_collectives", "_confirm", "_switch_began",
))  # fmt: skip
"""Attributes that are no part of a state, or that are looked at by themselves."""

CHANGED_IN_PLACE = (list, deque)


class Rank:
    """One rank: its agreement, what is in force, and how far it is within a boundary."""

    def __init__(
        self, world: World, rank: int, member: type[ProtocolMember], settle: Settle, agreement: type[RankAgreement]
    ) -> None:
        self.agreement = agreement(rank, len(world.ranks), votes=True)
        self.agreement._member = member(rank, len(world.ranks))
        self.agreement._side = Side(world, rank)  # type: ignore[assignment]
        self.agreement._main = Main(world, rank)  # type: ignore[assignment]
        self.agreement._collectives = lambda: 0
        self.settle = settle
        self.value, self.at, self.next, self.phase = 0, 0, 1, "step"
        self.skipped, self.steps = 0, 0
        self.is_lost = self.is_off = self.is_closed = self.is_closing = self.was_frozen = self.was_late = False
        self.proposal: SwitchProposal | None = None
        self.is_done = True

    def clone(self, world: World) -> Rank:
        twin = copied(self)
        twin.agreement = copied(self.agreement)
        twin.agreement._member = copied(self.agreement._member)
        for road in ("_side", "_main"):
            mine = copied(getattr(self.agreement, road))
            mine.world = world
            setattr(twin.agreement, road, mine)
        twin.agreement._collectives = lambda: twin.at + twin.skipped
        return twin

    def reach(self, boundaries: int) -> float:
        """Return the step of the job, as its collectives count them, that this rank is done with whatever others do.

        Who closed, or is done with all `boundaries` that are looked at, trains on.
        """
        if self.is_closed or (self.phase == "step" and self.next > boundaries):
            return float("inf")
        return self.skipped + (self.next - 1 if self.phase == "step" else self.at - 1)

    def rest(self) -> None:
        """This boundary is done: find the next one at which there is something to do."""
        agreement, self.phase = self.agreement, "step"
        agreement._boundary += 1
        while not agreement.has_vote:
            agreement._boundary += 1
        self.next, agreement._boundary = agreement._boundary, self.at

    def key(self) -> tuple[Any, ...]:
        parts: list[Any] = [self.value, self.at, self.phase, self.skipped, self.steps, self.is_off, self.is_closed]
        parts += [self.is_lost, self.is_closing, self.was_frozen, self.was_late, self.proposal, self.is_done]
        for thing in (self.agreement, self.agreement._member, self.agreement._side, self.agreement._main):
            for name, value in vars(thing).items():
                if name not in APART:
                    parts.append(frozen(value))
        return tuple(parts)


def copied(thing: Any) -> Any:
    """Return a copy whose lists and queues are its own; all else is never changed in place."""
    twin = object.__new__(type(thing))
    state = twin.__dict__
    state.update(thing.__dict__)
    for name, value in thing.__dict__.items():
        if value.__class__ in CHANGED_IN_PLACE:
            state[name] = value.copy()
    return twin


def frozen(value: Any) -> Any:
    if value.__class__ in CHANGED_IN_PLACE:
        return tuple(value)
    return repr(value) if value.__class__ is Offer else value


class World:
    """A state of the whole job.  `wishes` and so on are what may still happen."""

    def __init__(
        self, bounds: Bounds, member: type[ProtocolMember], settle: Settle, agreement: type[RankAgreement]
    ) -> None:
        self.ranks: list[Rank] = [None] * bounds.ranks  # type: ignore[list-item]
        self.gathers: dict[int, list[Any]] = {}
        self.frames: dict[int, list[Any]] = {}
        self.verdicts: dict[int, bool] = {}
        self.outcomes: dict[int, SwitchProposal | None] = {}
        self.in_force: dict[int, tuple[int, int]] = {}
        self.wishes, self.withdrawals, self.faults = bounds.wishes, bounds.withdrawals, bounds.faults
        self.wished_at: int | None = None
        self.step_ns = bounds.step_ns
        self.story: tuple[Any, ...] = ()
        self.ranks = [Rank(self, rank, member, settle, agreement) for rank in range(bounds.ranks)]
        for rank in self.ranks:
            rank.rest()

    def clone(self, *event: object) -> World:
        twin = copied(self)
        twin.gathers = {n: list(g) for n, g in self.gathers.items()}
        twin.frames = {n: list(v) for n, v in self.frames.items()}
        twin.verdicts = dict(self.verdicts)
        twin.outcomes, twin.in_force = dict(self.outcomes), dict(self.in_force)
        twin.ranks = [rank.clone(twin) for rank in self.ranks]
        twin.story = (self.story, event)
        return twin

    def forget(self) -> None:
        """Drop what no rank will look at any more."""
        taken = min(rank.agreement._side.taken for rank in self.ranks)  # type: ignore[attr-defined]
        here = [rank for rank in self.ranks if not rank.agreement.has_left]
        read = min((_unread(rank) for rank in here), default=1 << 30)
        at = min((rank.steps for rank in self.ranks if not rank.is_closed), default=0)
        self.gathers = {n: g for n, g in self.gathers.items() if n >= taken}
        self.frames = {n: v for n, v in self.frames.items() if n >= read or (here and _has_farewell(v))}
        self.verdicts = {n: v for n, v in self.verdicts.items() if n >= read}
        self.outcomes = {n: o for n, o in self.outcomes.items() if n >= read}
        self.in_force = {b: k for b, k in self.in_force.items() if b > at}

    def key(self) -> tuple[Any, ...]:
        """Return what the future depends on."""
        return (
            tuple(rank.key() for rank in self.ranks),
            tuple((n, tuple(g)) for n, g in sorted(self.gathers.items())),
            tuple((n, tuple(v)) for n, v in sorted(self.frames.items())),
            tuple(sorted(self.verdicts.items())),
            tuple(sorted(self.in_force.items())),
            tuple(sorted(self.outcomes.items())),
            (self.wishes, self.withdrawals, self.faults, self.wished_at),
        )

    def violate(self, what: str) -> ViolationError:
        events, story = [], self.story
        while story:
            story, event = story
            events.append(" ".join(str(word) for word in event))
        return ViolationError(what + "; it came so:\n  " + "\n  ".join(reversed(events)))


def _unread(rank: Rank) -> int:
    """Return the first frame that `rank` has still to read, or to send."""
    main: Main = rank.agreement._main  # type: ignore[assignment]
    frames = [frame for frame in (rank.agreement._vote, main.waits_for) if frame is not None]
    return min([main.sent, *frames])  # type: ignore[list-item,type-var]


def check(
    bounds: Bounds,
    *,
    member: type[ProtocolMember] = ProtocolMember,
    settle: Settle = RankAgreement.settle,
    agreement: type[RankAgreement] = RankAgreement,
) -> Census:
    """Look into every order of events; return what was seen.

    Raises:
        ViolationError: ranks part, hang, apply what none wants, or a frozen one applies.
    """
    census = Census()
    first = World(bounds, member, settle, agreement)
    seen = {first.key()}
    waiting = deque([first])
    while waiting:
        world = waiting.popleft()
        census.states += 1
        followers = 0
        for follower in _followers(world, bounds, census):
            followers += 1
            census.events += 1
            follower.forget()
            key = follower.key()
            if key not in seen:
                seen.add(key)
                waiting.append(follower)
        has_lost = any(rank.is_lost for rank in world.ranks)
        if (
            not followers
            and not has_lost
            and any((r.next <= bounds.boundaries or r.phase != "step") and not r.is_closed for r in world.ranks)
        ):
            raise world.violate(f"all ranks wait, at {[(rank.at, rank.phase) for rank in world.ranks]}")
        if not followers:
            census.retired += all(rank.agreement.has_retired for rank in world.ranks)
            census.left += all(rank.agreement.has_left for rank in world.ranks)
    return census


def _followers(world: World, bounds: Bounds, census: Census) -> Iterator[World]:
    """Yield what can come next; if nothing can, and a rank left out a boundary or was late, one that waits gives up."""
    found = list(_events(world, bounds, census))
    if found or not any(rank.skipped or rank.was_late for rank in world.ranks):
        yield from found
    else:
        yield from _give_up(world, bounds, census)


def _give_up(world: World, bounds: Bounds, census: Census) -> Iterator[World]:
    for i, rank in enumerate(world.ranks):
        if rank.phase in ("decide", "gather") and not rank.is_lost:
            late = world.clone(f"rank {i} waits no longer")
            late.ranks[i].agreement._main.gives_up = True  # type: ignore[attr-defined]
            yield from (_decide if rank.phase == "decide" else _gather)(late, i, bounds, census)


def _events(world: World, bounds: Bounds, census: Census) -> Iterator[World]:
    """Yield what can come next while nobody gives up.

    What a rank does with a frame touches no gather, so no other rank's next step comes out differently for it: where
    one is able to, that alone is tried now, and what others do meanwhile comes after it.
    """
    if all(rank.phase == "settle" for rank in world.ranks):
        yield _settle(world, census)
        return
    for i, rank in enumerate(world.ranks):
        if rank.is_closing and rank.agreement._main.waits_for is not None:  # type: ignore[attr-defined]
            yield from _waits_no_longer(world, i)
    for i, rank in enumerate(world.ranks):
        if rank.phase in _WITHIN and not rank.is_lost:
            found = list(_WITHIN[rank.phase](world, i, bounds, census))
            if found:
                yield from found
                yield from _lose(world, i, bounds)
                if world.faults and "late" in bounds.kinds and rank.phase != "apply":
                    spent = world.clone()
                    spent.faults -= 1
                    yield from _give_up(spent, bounds, census)
                return
    for i, rank in enumerate(world.ranks):
        if rank.is_lost or rank.is_closed:
            continue
        yield from _lose(world, i, bounds)
        if rank.phase != "step":
            continue
        yield from _mischief(world, i, bounds)
        reach = min(other.reach(bounds.boundaries) for other in world.ranks)
        is_free = rank.next + rank.skipped - reach <= bounds.lag
        if rank.next <= bounds.boundaries and is_free:
            yield from _boundary(world, i, bounds, census)


def _mischief(world: World, i: int, bounds: Bounds) -> Iterator[World]:
    """Rank `i` does, between two boundaries, what no other rank does."""
    if not world.faults:
        return
    if "finish" in bounds.kinds:
        yield from _finish(world, i, bounds)
    for kind in ("off", "close", "skip"):
        if kind not in bounds.kinds or (kind == "off" and world.ranks[i].is_off):
            continue
        done = world.clone(f"rank {i}:", kind)
        done.faults -= 1
        rank = done.ranks[i]
        if kind == "off":
            rank.is_off = True
        elif kind == "skip":
            rank.skipped += 1
        else:
            _close(done, i)
        yield done


def _close(world: World, i: int) -> None:
    """Rank `i` closes and trains on with what is in force on it."""
    rank = world.ranks[i]
    rank.is_closed, rank.is_closing, rank.phase, rank.proposal = True, False, "step", None
    rank.agreement._stop("closed", is_known=rank.agreement.has_left)
    for step, known in world.in_force.items():
        if step > rank.steps and known[1] != rank.value:
            raise world.violate(f"in step {step} one rank has {known[1]}, rank {i}, which closed, {rank.value}")
    for j, other in enumerate(world.ranks):
        if other.is_closed and other.value != rank.value:
            raise world.violate(f"rank {i} closed with {rank.value}, rank {j} with {other.value}")


def _finish(world: World, i: int, bounds: Bounds) -> Iterator[World]:
    """Rank `i` closes after one of the boundaries that it may have come to by now, and asks to go back to value 0."""
    others = [other for j, other in enumerate(world.ranks) if j != i]
    first = max(other.at + other.skipped for other in others) - bounds.lag - world.ranks[i].skipped
    for at in range(max(world.ranks[i].at, first), world.ranks[i].next):
        done = world.clone(f"rank {i} closes after", at)
        done.faults -= 1
        rank = done.ranks[i]
        while rank.at < at:
            rank.at += 1
            rank.agreement.record_step(rank.at, None if rank.is_off else 1, profiled=False)
        _make_steps(done, i)
        if rank.value == 0:
            _close(done, i)
        else:
            rank.is_closing, rank.phase, rank.proposal = True, "gather", SwitchProposal(0, 0, (0,))
        yield done


def _waits_no_longer(world: World, i: int) -> Iterator[World]:
    late = world.clone(f"rank {i} closes and waits no longer")
    rank = late.ranks[i]
    rank.agreement._main.gives_up = True  # type: ignore[attr-defined]
    assert rank.proposal is not None
    if rank.agreement.gather_for(rank.proposal, closes=True):
        rank.phase = "apply"
    else:
        _close(late, i)
    yield late


def _lose(world: World, i: int, bounds: Bounds) -> Iterator[World]:
    if world.faults and "lose" in bounds.kinds:
        lost = world.clone(f"rank {i} is lost")
        lost.faults, lost.ranks[i].is_lost = world.faults - 1, True
        yield lost


def _boundary(world: World, i: int, bounds: Bounds, census: Census) -> Iterator[World]:
    """Rank `i` ends a step: it counts the boundary and listens; rank 0 may wish."""
    faults = [""] + ([k for k in ("freeze", "side") if k in bounds.kinds] if world.faults else [])
    side: Side = world.ranks[i].agreement._side  # type: ignore[assignment]
    looks = [True] if side.is_complete and side.looks >= bounds.delay else [False, True]
    for fault in faults:
        for sees in looks if side.is_complete else [False]:
            heard = world.clone(f"rank {i} at", world.ranks[i].at + 1, fault, "hears" if sees else "")
            _listen(heard, i, sees=sees, fault=fault)
            _watch_wish(heard, census)
            yield heard
            if i == 0 and heard.ranks[0].agreement.spaces and heard.ranks[0].agreement.frozen is None:
                yield from _wishes(heard, bounds)


def _listen(world: World, i: int, *, sees: bool, fault: str) -> None:
    rank = world.ranks[i]
    agreement = rank.agreement
    world.faults -= bool(fault)
    target = rank.at + 1 if fault else rank.next
    pace = None if rank.is_off else 1
    while rank.at < target - 1:
        rank.at += 1
        agreement.record_step(rank.at, pace, profiled=False)
    rank.at += 1
    _make_steps(world, i)
    agreement.record_step(rank.at, pace, profiled=False)
    if rank.at == PERIOD:
        agreement.offer(OFFER)
    if fault == "freeze":
        agreement.freeze("planted")
    elif fault == "side":
        agreement._side_failed(RuntimeError("planted"))
    side: Side = agreement._side  # type: ignore[assignment]
    side.is_seen = sees and not agreement._member._side_is_done
    agreement.receive_updates()
    rank.phase = "decide"
    agreement.report_calm(is_calm=bool(agreement.spaces), step_ns=world.step_ns)


def _make_steps(world: World, i: int) -> None:
    """Rank `i` has made the steps up to this boundary, with what is in force on it."""
    rank = world.ranks[i]
    mine = (rank.agreement._member.epoch, rank.value)
    for step in range(rank.steps + 1, rank.at + rank.skipped + 1):
        known = world.in_force.setdefault(step, mine)
        if known != mine:
            raise world.violate(f"in step {step} one rank has (epoch, value) {known}, rank {i} {mine}")
        for other in world.ranks:
            if other.is_closed and step > other.steps and other.value != rank.value:
                raise world.violate(f"in step {step} rank {i} has {rank.value}, one that closed {other.value}")
    rank.steps = max(rank.steps, rank.at + rank.skipped)


def _wishes(world: World, bounds: Bounds) -> Iterator[World]:
    agreement = world.ranks[0].agreement
    if world.wishes:
        wish = world.clone("rank 0 wishes", world.wishes)
        wish.wishes -= 1
        wish.wished_at = wish.ranks[0].at if bounds.times_wishes else None
        wish.ranks[0].agreement.propose(wish.wishes, [wish.wishes + 1])
        yield wish
    if world.withdrawals and agreement._member.wanted is not None:
        back = world.clone("rank 0 takes its wish back")
        back.withdrawals -= 1
        back.wished_at = None
        back.ranks[0].agreement.withdraw()
        yield back


def _watch_wish(world: World, census: Census) -> None:
    if world.wished_at is None:
        return
    wanted = world.ranks[0].agreement._member.wanted
    census.longest_wish = max(census.longest_wish, world.ranks[0].at - world.wished_at)
    if wanted is None or world.ranks[0].agreement.frozen is not None:
        world.wished_at = None


def _decide(world: World, i: int, bounds: Bounds, census: Census) -> Iterator[World]:
    """Rank `i` votes, or reads a vote if all ranks have launched it."""
    votes = world.ranks[i].agreement._member.held is not None and world.ranks[i].agreement._vote is None
    refusals = [False, True] if world.faults and votes and "refuse" in bounds.kinds else [False]
    for refuses in refusals:
        decided = world.clone(f"rank {i} decides", "and refuses" if refuses else "")
        rank = decided.ranks[i]
        agreement = rank.agreement
        number: Any = agreement._vote
        try:
            proposal = agreement.decide(lambda held, no=refuses: not no)
        except BlockedError:
            continue
        decided.faults -= refuses
        rank.was_late = rank.was_late or (number is not None and agreement._vote == number)
        rank.rest()
        if number is not None and agreement._vote != number and not agreement.has_left:
            _compare(decided, i, number, proposal)
        if agreement._vote is not None and agreement._vote != number:
            rank.was_frozen = agreement.frozen is not None
        if proposal is not None:
            rank.proposal, rank.phase = proposal, "gather"
        yield decided


def _compare(world: World, i: int, number: int, proposal: SwitchProposal | None) -> None:
    rank = world.ranks[i]
    if world.outcomes.setdefault(number, proposal) != proposal:
        raise world.violate(f"vote {number} says {world.outcomes[number]} to one rank and {proposal} to rank {i}")
    if proposal is not None and rank.was_frozen:
        raise world.violate(f"rank {i} was frozen when it voted and applies {proposal}")


def _gather(world: World, i: int, bounds: Bounds, census: Census) -> Iterator[World]:
    """Rank `i` says that it is about to switch, and goes on when all ranks have, or when it gives up."""
    gathered = world.clone(f"rank {i} is about to switch")
    rank = gathered.ranks[i]
    main: Main = rank.agreement._main  # type: ignore[assignment]
    was_waiting = main.waits_for
    assert rank.proposal is not None
    try:
        is_on = rank.agreement.gather_for(rank.proposal, closes=rank.is_closing)
    except BlockedError:
        if was_waiting is None:
            main.waits_for = main.sent - 1
            yield gathered
        return
    if is_on:
        rank.phase = "apply"
    elif rank.is_closing:
        _close(gathered, i)
    else:
        census.left_out += 1
        rank.proposal, rank.phase = None, "step"
    yield gathered


def _apply(world: World, i: int, bounds: Bounds, census: Census) -> Iterator[World]:
    for fails in [False, True] if world.faults and "fail" in bounds.kinds else [False]:
        applied = world.clone(f"rank {i} applies", "and fails" if fails else "")
        applied.faults -= fails
        applied.ranks[i].is_done = not fails
        applied.ranks[i].phase = "settle"
        yield applied


_WITHIN = {"decide": _decide, "gather": _gather, "apply": _apply}


def _settle(world: World, census: Census) -> World:
    """All ranks have applied, or tried to: they tell each other."""
    settled = world.clone("all ranks settle")
    done = [rank.is_done for rank in settled.ranks]
    census.switches += all(done)
    census.failures += not all(done)
    for i, rank in enumerate(settled.ranks):
        proposal, old = rank.proposal, rank.value
        rank.value = proposal.values[0] if rank.is_done else old
        answers = [all(done), True]

        def confirm(*, is_done: bool, answers: list[bool] = answers) -> bool:
            return answers.pop(0)

        rank.agreement._confirm = confirm  # type: ignore[method-assign]

        def undo(rank: Rank = rank, old: int = old) -> bool:
            rank.value = old
            return True

        rank.settle(rank.agreement, proposal, is_done=done[i], undo=undo)
        rank.proposal, rank.is_done = None, True
        rank.rest()
    for i, rank in enumerate(settled.ranks):
        if rank.is_closing:
            census.taken_back += rank.value == 0
            _close(settled, i)
    return settled
