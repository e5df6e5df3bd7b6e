"""Decides which recording is due next, and who owns it: the node, a person who asked, or the jobs of one user.

A job can fake its reports: hangs, stalls, and the Xids that programs cause themselves.  If all triggers shared one file
and one interval, fake ones would crowd real ones out of the list of triggers, and the file would be deleted as a job's.
So each owner has its own list, and a file has one owner.  A file of the node also lists what users' jobs reported
meanwhile, and replaces their files.

A file is written AFTER_SECONDS after its first trigger, so that it includes what followed.  In INTERVAL_SECONDS there
is at most one for the node, and one for all users together, who take turns.  A person who asks gets one at once.

Pure: triggers and the time in, the due recording out.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.gpu_health import XIDS_OF_PROGRAMS
from pacecar.records.recording import Trigger

__all__ = ["AFTER_SECONDS", "INTERVAL_SECONDS", "TRIGGERS_MAX", "Due", "Owner", "PendingTriggers", "owner_of"]

AFTER_SECONDS = 10
INTERVAL_SECONDS = 60

TRIGGERS_MAX = 64
"""Triggers listed in one file; the others are counted."""

OWNERS_MAX = 512
"""Users whose recordings are pending: as many as may be connected."""

Owner = Literal["node", "request", "programs"] | int | None
"""An int is the uid whose jobs reported something (None: unknown); "programs" owns Xids that programs cause."""


class Due(NamedTuple):
    """A recording to be written: its triggers, and the label of its file."""

    triggers: tuple[Trigger, ...]
    left_out: int
    label: str


class _Pending:
    def __init__(self, since_ns: int) -> None:
        self.since_ns = since_ns
        self.triggers: list[Trigger] = []
        self.left_out = 0

    def add(self, triggers: list[Trigger], left_out: int = 0) -> None:
        room = max(0, TRIGGERS_MAX - len(self.triggers))
        self.triggers += triggers[:room]
        self.left_out += left_out + len(triggers[room:])


def owner_of(trigger: Trigger) -> Owner:
    """Return the owner of the recording that `trigger` asks for."""
    if trigger.kind == "request":
        return "request"
    if trigger.kind == "xid" and trigger.xid in XIDS_OF_PROGRAMS:
        return "programs"
    return "node" if trigger.kind in ("xid", "gpu_lost") else trigger.uid


class PendingTriggers:
    """Triggers whose recording is not written yet."""

    def __init__(self) -> None:
        self._pending: dict[Owner, _Pending] = {}
        self._node_ns: int | None = None
        self._users_ns: int | None = None
        self._turns: dict[Owner, int] = {}

    def add(self, trigger: Trigger, now_ns: int) -> bool:
        """Add a trigger; return whether it is the first of its recording."""
        owner = owner_of(trigger)
        is_first = owner not in self._pending
        if is_first and len(self._pending) >= OWNERS_MAX and owner not in ("node", "request"):
            return False
        self._pending.setdefault(owner, _Pending(now_ns)).add([trigger])
        return is_first

    def due(self, now_ns: int) -> Due | None:
        """Return the recording to write now, if there is one, and forget its triggers."""
        if "request" in self._pending:
            return self._pop("request", now_ns)
        due = [owner for owner, one in self._pending.items() if now_ns - one.since_ns >= AFTER_SECONDS * NS_PER_SECOND]
        if "node" in due and _is_interval_over(self._node_ns, now_ns):
            return self._pop("node", now_ns)
        users = [owner for owner in due if owner != "node"]
        if users and _is_interval_over(self._users_ns, now_ns):
            return self._pop(min(users, key=lambda owner: self._turns.get(owner, 0)), now_ns)
        return None

    def last(self, now_ns: int) -> Due | None:
        """Return the most important pending recording, at the daemon's end."""
        return self._pop("node" if "node" in self._pending else next(iter(self._pending)), now_ns) if self else None

    def __len__(self) -> int:
        return len(self._pending)

    def _pop(self, owner: Owner, now_ns: int) -> Due:
        one = self._pending.pop(owner)
        if owner == "node":
            self._node_ns = now_ns
            for user in [user for user in self._pending if user != "request"]:
                other = self._pending.pop(user)
                one.add(other.triggers, other.left_out)
        elif owner != "request":
            self._users_ns = now_ns
            self._turns.pop(owner, None)
            self._turns[owner] = max(self._turns.values(), default=0) + 1
            while len(self._turns) > OWNERS_MAX:
                del self._turns[next(iter(self._turns))]
        return Due(tuple(one.triggers), one.left_out, _label(owner, one.triggers[0]))


def _is_interval_over(then_ns: int | None, now_ns: int) -> bool:
    return then_ns is None or now_ns - then_ns >= INTERVAL_SECONDS * NS_PER_SECOND


def _label(owner: Owner, first: Trigger) -> str:
    if owner == "programs":
        return "xid_of_program"
    return f"{first.kind}-uid{owner}" if isinstance(owner, int) else first.kind
