"""Decides which recording is due next, and who owns it: the node, a person who asked, or the jobs of one user.

Whatever a job reports can be made up: hangs, stalls, and the Xids that a program causes itself.  If all triggers shared
one file and one interval, made-up ones would fill the list of those that are named, and the file would count as theirs
and be thrown away with theirs.  So each owner has a list, and a file is of one owner.  A file of the node also names
what users' jobs reported meanwhile, and stands for their files too.

A file is written AFTER_SECONDS after its first trigger, so that it has what followed, and at most one each
INTERVAL_SECONDS for the node, and one for all users together, who take turns.  Somebody who asks gets one at once.

Pure: triggers and the time in, what is due out.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.records.recording import Trigger
from pacecar.records.xids import XIDS_OF_PROGRAMS

__all__ = ["AFTER_SECONDS", "INTERVAL_SECONDS", "TRIGGERS_MAX", "Due", "Owner", "PendingTriggers", "owner_of"]

AFTER_SECONDS = 10
INTERVAL_SECONDS = 60

TRIGGERS_MAX = 64
"""Triggers named in one file; the others are counted."""

OWNERS_MAX = 512
"""Users whose recordings are due at one time: as many as may be connected."""

Owner = Literal["node", "request", "programs"] | int | None
"""An int is a uid whose jobs reported something; None: his uid is not known.  "programs": Xids caused by programs."""


class Due(NamedTuple):
    """A recording to be written: what goes into its header, and how its file is called."""

    triggers: tuple[Trigger, ...]
    left_out: int
    label: str


class _Waiting:
    def __init__(self, since_ns: int) -> None:
        self.since_ns = since_ns
        self.triggers: list[Trigger] = []
        self.left_out = 0

    def add(self, triggers: list[Trigger], left_out: int = 0) -> None:
        room = max(0, TRIGGERS_MAX - len(self.triggers))
        self.triggers += triggers[:room]
        self.left_out += left_out + len(triggers[room:])


def owner_of(trigger: Trigger) -> Owner:
    """Return whose recording `trigger` asks for."""
    if trigger.kind == "request":
        return "request"
    if trigger.kind == "xid" and trigger.xid in XIDS_OF_PROGRAMS:
        return "programs"
    return "node" if trigger.kind in ("xid", "gpu_lost") else trigger.uid


class PendingTriggers:
    """Triggers whose recording is not written yet."""

    def __init__(self) -> None:
        self._waiting: dict[Owner, _Waiting] = {}
        self._node_ns: int | None = None
        self._users_ns: int | None = None
        self._turns: dict[Owner, int] = {}

    def add(self, trigger: Trigger, now_ns: int) -> bool:
        """Take a trigger; return whether it is the first of its recording."""
        owner = owner_of(trigger)
        is_first = owner not in self._waiting
        if is_first and len(self._waiting) >= OWNERS_MAX and owner not in ("node", "request"):
            return False
        self._waiting.setdefault(owner, _Waiting(now_ns)).add([trigger])
        return is_first

    def due(self, now_ns: int) -> Due | None:
        """Return the recording that is to be written now, and forget its triggers."""
        if "request" in self._waiting:
            return self._take("request", now_ns)
        ripe = [owner for owner, one in self._waiting.items() if now_ns - one.since_ns >= AFTER_SECONDS * NS_PER_SECOND]
        if "node" in ripe and _has_rested(self._node_ns, now_ns):
            return self._take("node", now_ns)
        users = [owner for owner in ripe if owner != "node"]
        if users and _has_rested(self._users_ns, now_ns):
            return self._take(min(users, key=lambda owner: self._turns.get(owner, 0)), now_ns)
        return None

    def last(self, now_ns: int) -> Due | None:
        """Return the most important recording that is not written yet, at the daemon's end."""
        return self._take("node" if "node" in self._waiting else next(iter(self._waiting)), now_ns) if self else None

    def __len__(self) -> int:
        return len(self._waiting)

    def _take(self, owner: Owner, now_ns: int) -> Due:
        one = self._waiting.pop(owner)
        if owner == "node":
            self._node_ns = now_ns
            for user in [user for user in self._waiting if user != "request"]:
                other = self._waiting.pop(user)
                one.add(other.triggers, other.left_out)
        elif owner != "request":
            self._users_ns = now_ns
            self._turns.pop(owner, None)
            self._turns[owner] = max(self._turns.values(), default=0) + 1
            while len(self._turns) > OWNERS_MAX:
                del self._turns[next(iter(self._turns))]
        return Due(tuple(one.triggers), one.left_out, _label(owner, one.triggers[0]))


def _has_rested(then_ns: int | None, now_ns: int) -> bool:
    return then_ns is None or now_ns - then_ns >= INTERVAL_SECONDS * NS_PER_SECOND


def _label(owner: Owner, first: Trigger) -> str:
    if owner == "programs":
        return "xid_of_program"
    return f"{first.kind}-uid{owner}" if isinstance(owner, int) else first.kind
