"""Runs the tuner in one rank: takes finished steps, proposes knob changes, applies what all ranks agreed on.

    step record -> agreement (paces of all ranks) -> policy on rank 0 -> proposal -> vote -> actuators -> KnobSwitch

The Tuner decides nothing: the policy says what to try, the agreement says when, actuators know how.  It runs on the
training thread at step boundaries.  It waits for other ranks only where a vote is read and at a switch.  Nothing that
it raises reaches the job: an exception freezes the tuner, on all ranks.
The votes go on until every rank knows, so that all go back from what is not proven.

Modes: "off" does nothing at all; "advise" lets the policy see the job and turns nothing; all others turn knobs.
Left out: measuring (the hook does), judging (the policy does).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch.distributed as dist

from pacecar.config import TuneConfig
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.records import Knobs, TunerStatus

from .consensus.agreement import Agreement, LocalAgreement, RendezvousError
from .consensus.channels import VoteSubject
from .consensus.knob_switch import REHEARSAL_BOUNDARIES_MAX, KnobSwitcher, SwitchRehearsal
from .consensus.protocol import CALM_PERIOD, LONG_STEP_NS, PERIOD, Proposal, ProposalKind
from .consensus.rank_agreement import RankAgreement
from .consensus.step_observations import MeasuredSteps, ObservationBacklog, ObservationListener
from .experiment.switch_price import RESERVED_SWITCHES, SwitchPrice
from .guards.node_monitor import NodeMonitor
from .knobs.actuator import Actuator
from .knobs.ddp.gradient_check import GradientCheck, concerns_gradients
from .observation import JobFacts, Policy, TuningTurn
from .status_reporter import State, StatusReporter

__all__ = ["FIRST_WINDOW_BOUNDARIES_MAX", "OFFER_BOUNDARY", "TunedJob", "Tuner", "choose_agreement"]

logger = logging.getLogger(__name__)

OFFER_BOUNDARY = PERIOD
"""The boundary at which knobs are offered: the batch size is known, and DDP has recorded its gradients' order."""


FIRST_WINDOW_BOUNDARIES_MAX = 64
"""So long trials wait for rank 0's first exact window, which shows where the time went before anything was tuned.  Its
price is known after a turn or two, and it takes another: 15 steps with two ranks, 50 with eight."""


class TunedJob(Protocol):
    """What a tuner asks of the job that it tunes, and tells it.  All calls are made on the training thread.

    A class that derives from this one has the answers of a job that never pauses and that no rank leaves.
    """

    counted_ns_min: int = LONG_STEP_NS
    """The shortest step that is worth observing where it was only counted."""

    def facts(self) -> JobFacts:
        """Return what a policy needs to know of the job; called once, when the knobs are settled."""
        ...

    def set_knobs(self, knobs: Knobs) -> None:
        """Take what is in force from now on."""
        ...

    def request_window(self) -> None:
        """Request a new exact window."""
        ...

    def must_leave(self) -> str | None:
        """Return why this rank must leave now, for good and without a vote; None: it need not."""
        return None

    def was_paused(self, step: MeasuredSteps | CountedStep) -> bool:
        """Return whether `step` contains a checkpoint or an evaluation."""
        return False

    def begin_vote(self) -> None:
        """Prepare for a boundary that takes longer than most."""

    def spent_ns(self) -> int:
        """Return what this boundary has cost the job since `begin_vote`."""
        return 0

    def waited(self, duration_ns: int) -> None:
        """Note that so much of this boundary passed until the last rank came to it."""

    def headroom_ns(self) -> int | None:
        """Return what may still be spent within the overhead budget; negative: overspent, None: nothing limits it."""
        return None

    def earned_ns(self, wall_ns: int) -> int:
        """Return what `wall_ns` of training add to the overhead budget."""
        return 0

    def reserve(self, cost_ns: int) -> None:
        """Keep so much of the overhead budget for switches, out of what is lent to windows."""

    def awaits_first_window(self) -> bool:
        """Return whether this rank's first exact window is about to come, whose ledger is that of the job untuned."""
        return False


def choose_agreement(config: TuneConfig) -> Agreement:
    """Return how the ranks of this process' job agree: by votes on a group of their own, or alone at once."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return LocalAgreement()
    has_votes = config.mode != "advise"
    return RankAgreement(dist.get_rank(), dist.get_world_size(), votes=has_votes, meet_seconds=config.meet_seconds)


class Tuner:
    """One rank's part of the controller.

    `policy` is used on rank 0 only.  `agreement` is how this rank reaches the others (`choose_agreement`).  `gradients`
    compares the ranks' gradients after a switch, `node` says what disturbs this rank's node; None: nobody does.
    """

    def __init__(
        self,
        job: TunedJob,
        config: TuneConfig,
        status: StatusReporter,
        *,
        policy: Policy | None,
        actuators: Sequence[Actuator],
        agreement: Agreement,
        gradients: GradientCheck | None = None,
        node: NodeMonitor | None = None,
    ) -> None:
        self._job = job
        self._hearing = ObservationListener(job.counted_ns_min)
        self._node = node
        self._gradients = gradients
        self._config = config
        self._policy = policy if status.rank == 0 else None
        self._actuators = {a.knob: a for a in actuators}
        self._status = status
        self._agreement = agreement
        self._switcher = KnobSwitcher(self._actuators, agreement, status.clock)
        self._mode: Literal["advise", "exact"] = "advise" if config.mode == "advise" else "exact"
        self._is_active = False
        self._has_failed = False
        self._boundary = 0
        self._switched_at = -CALM_PERIOD
        self._step = 0
        self._step_ns = 0
        self._knobs = Knobs()
        self._backlog = ObservationBacklog()
        self._is_begun = False
        self._rehearsal = SwitchRehearsal(self._agreement)
        self._proven: tuple[int, ...] | None = None  # the values to come back to while a trial's are in force
        self._sound: tuple[int, ...] | None = None  # the values before a switch after which gradients differ
        self._decision = 0
        self._before: tuple[int, ...] | None = None  # the values before the last switch
        self._serial = 0  # of the last switch
        self._is_keeping = False  # a proposal of kind KEEP is out
        self._windowed = -1  # the last trial that a window was requested for
        self._reverted: str | None = None
        self._price = SwitchPrice()
        self._waited_ns = 0  # for the other ranks, at the last switch
        self._turned_at = 0  # the boundary of the last switch or rehearsal
        self._is_at_rest = False
        self._has_ended = False  # all heard that nothing is turned any more
        self._stays = ""  # what could not be taken back, for people
        self.refused: dict[str, str] = {}  # knob -> why it is not tuned

    @property
    def knobs(self) -> Knobs:
        """The knobs in force on this rank."""
        return self._knobs

    @property
    def agreement(self) -> Agreement:
        """How this rank reaches the others."""
        return self._agreement

    @property
    def state(self) -> State:
        """What the tuner is doing, as reported last; "off" before `start`."""
        return self._status.state

    @property
    def status(self) -> TunerStatus | None:
        """The status reported last, with its reason; None before `start`."""
        return self._status.status

    # --- start, step boundaries, end ----------------------------------------------------------------

    def start(self) -> None:
        """Meet the other ranks through the job's store.  Called on all ranks, before the first step.

        Does nothing in mode "off".
        """
        if self._config.mode == "off":
            return
        try:
            self._agreement.open(f"mode {self._mode}")
        except RendezvousError as error:
            self._say("off", f"not tuning: {error}", level=logging.WARNING)
            return
        self._is_active = True
        self._guarded(self._publish_knobs, 0)
        self._say("advising" if self._mode == "advise" else "warming", "waiting for the first steps")

    def on_boundary(self, step: MeasuredSteps | CountedStep | None) -> None:
        """Take part in one step boundary; `step` is the one that just ended, None if nothing is known of it.

        Must be called at every boundary on every rank, also when nothing can be measured: votes go by boundaries.
        """
        if not self._is_active:
            return
        self._boundary += 1
        self._step = step.step if step is not None else self._step + 1
        must_leave = self._job.must_leave()
        if must_leave is not None:
            self._leave(must_leave)
            return
        self._guarded(self._note, step)
        is_checking = self._gradients is not None and self._gradients.is_armed
        if is_checking or self._agreement.has_vote or self._reverted is not None:
            self._job.begin_vote()
        if self._reverted is not None:
            self._guarded(self._take_back)
        if is_checking:
            self._guarded(self._check_gradients)
        if self._boundary == OFFER_BOUNDARY:
            self._guarded(self._make_offer)
        if self._agreement.has_vote:  # not at most boundaries: nothing can have come in, nothing is to be voted for
            self._vote()
        elif not is_checking:
            return
        self._guarded(self._learn_price, is_checking)

    def _vote(self) -> None:
        """Take part in a boundary at which a vote is launched or read."""
        self._guarded(self._look)
        self._guarded(self._listen)
        if self._agreement.frozen is None:
            self._guarded(self._think)
            self._guarded(self._rest)
        self._guarded(self._decide)
        if self._agreement.has_retired and not self._is_at_rest:
            self._is_at_rest = True
            self._guarded(self._come_to_rest)
        if self._agreement.frozen is not None and not self._has_ended:
            self._has_ended = True
            if self.state != "off":  # a person may have frozen it before, which is no end
                self._say("frozen", self._agreement.frozen + self._stays, level=logging.WARNING)
            self._finish_policy()

    def freeze(self, reason: str) -> None:
        """Freeze on all ranks, because this one cannot measure any more; boundaries must still be passed on."""
        if self._is_active:
            self._agreement.freeze(reason)

    def reverted(self, reason: str) -> None:
        """A knob went back by itself, for `reason`, on all ranks in the step under way."""
        if self._is_active:
            self._reverted = reason

    def close(self, *, is_exit: bool = False) -> None:
        """End.  Where all ranks do so after the same step, what is not proven is taken back and what is out waited for.

        `is_exit`: the process ends, so that nothing is trained with what stays.  Harmless when repeated.
        """
        if not self._is_active:
            return
        self._is_active = False
        self._finish_policy()
        if not is_exit and self._mode == "exact" and self._agreement.spaces:
            was_said = bool(self._stays)
            self._guarded(lambda: self._come_to_rest(closes=True))
            if self._stays and not was_said:
                self._say("frozen", f"closed, not after the same step on all ranks{self._stays}", level=logging.WARNING)
        self._guarded(self._agreement.close)

    def _leave(self, reason: str) -> None:
        self._is_active = False
        self._agreement.freeze(reason)
        if self._before is not None:  # something was turned
            self._stays = self._switcher.staying(self._switcher.rest(self._sound or self._proven))
        self._say("frozen", reason + self._stays, level=logging.WARNING)
        self._finish_policy()
        self._guarded(self._agreement.leave)

    def _guarded(self, act: Callable[..., None], *arguments: object) -> None:
        """Call `act`: whatever it raises freezes the tuner and does not reach the job."""
        try:
            act(*arguments)
        except Exception as error:
            # Once: a group that is gone fails at each attempt to vote.
            level = logging.DEBUG if self._has_failed else logging.ERROR
            self._has_failed = True
            logger.log(level, "pacecar: the tuner freezes; training goes on", exc_info=True)
            self._agreement.freeze(f"{type(error).__name__}: {error}")

    def _note(self, step: MeasuredSteps | CountedStep | None) -> None:
        pace_ns = None if step is None else self._hearing.pace_ns(step, are_all_calm=self._agreement.are_all_calm)
        if step is None or pace_ns is None:
            self._agreement.note(self._step, None, profiled=False)
            return
        self._step_ns = step.wall_ns
        self._agreement.note(step.step, pace_ns, profiled=step.disturbed or self._job.was_paused(step))
        if self._node is not None:
            self._node.note(step.wall_ns)
        if self._policy is not None:
            self._backlog.remember(step)

    # --- what this rank knows -----------------------------------------------------------------------

    def _make_offer(self) -> None:
        offer = self._switcher.offer()
        self._publish_knobs(self._knobs.epoch)
        self._agreement.offer(offer)

    def _publish_knobs(self, epoch: int) -> None:
        """Say what is in force: the value of every knob that has one, also of those that are not tuned."""
        self._knobs = Knobs(epoch, self._switcher.published())
        self._job.set_knobs(self._knobs)

    def _look(self) -> None:
        """Report what disturbs this rank's node and what it can pay for; take what others reported of their nodes."""
        earned_ns = self._job.earned_ns(self._step_ns)
        self._agreement.afford(self._price.affordable(self._job.headroom_ns(), earned_ns))
        is_trying = self._proven is not None
        self._job.reserve(RESERVED_SWITCHES * self._price.price_ns(earned_ns) if is_trying else 0)
        if self._node is not None:
            self._agreement.disturb(self._node.look())
            self._node.others = self._agreement.disturbed

    def _listen(self) -> None:
        heard = self._agreement.listen()
        if heard.refused is not None:
            self._settle_knobs(heard.refused)
        self._backlog.pair(heard.paces, self._switcher.live(), is_calm=self._is_calm())

    # --- policy, on rank 0 ------------------------------------------------------------------------

    def _settle_knobs(self, refused: dict[str, str]) -> None:
        self.refused = dict(refused)
        for knob, reason in refused.items():
            logger.info("pacecar: %s is not tuned: %s", knob, reason)
        spaces = self._agreement.spaces
        if not spaces:
            reasons = "; ".join(f"{knob}: {reason}" for knob, reason in refused.items())
            self._say("off", f"nothing to tune: {reasons or 'no knobs'}")
            self._agreement.freeze("nothing to tune")
        elif self._policy is not None and self._mode == "exact":
            self._rehearsal.plan()
            self._rehearse()
        elif self._policy is not None:
            self._begin(self._policy)

    def _rehearse(self) -> None:
        """Ask all ranks to apply the values in force; begin when every knob was rehearsed."""
        if self._policy is not None and not self._rehearsal.ask(self._boundary, self._switcher.values()):
            self._begin(self._policy)

    def _begin(self, policy: Policy) -> None:
        live = self._switcher.live()
        if not live:
            self._agreement.freeze("every knob failed when its present value was applied")
            return
        policy.begin(self._job.facts(), live, mode=self._mode)
        self._is_begun = True
        self._backlog.begin(live)

    def _rest(self) -> None:
        self._agreement.rest(is_calm=self._is_calm(), step_ns=self._step_ns)

    def _is_calm(self) -> bool:
        """Return whether nothing is under way here; ranks without a policy are calm from the offers on.

        Not for some steps after a switch, nor in a trial.  Gradients are compared then, a larger micro-batch is proven,
        what does not fit goes back, and the policy, on another rank perhaps, has to see all of that soon.
        """
        if self._proven is not None or self._boundary - self._switched_at < CALM_PERIOD:
            return False
        if self._policy is None:
            return bool(self._agreement.spaces)
        if self._is_begun and self._agreement.affordable == 0:
            return True  # no trial can begin, and more votes would only cost more
        return self._is_begun and self.state in ("watching", "advising") and self._policy.is_calm()

    def _think(self) -> None:
        policy = self._policy
        if policy is None:
            return
        if not self._is_begun:
            if self._rehearsal.is_late(self._boundary):
                self._agreement.freeze(f"the ranks did not agree within {REHEARSAL_BOUNDARIES_MAX} steps")
            return
        observations = self._backlog.drain()
        if not observations and not policy.is_urgent():
            return
        affordable = self._agreement.affordable
        if self._boundary <= FIRST_WINDOW_BOUNDARIES_MAX and self._job.awaits_first_window():
            affordable = 0
        if affordable is not None:
            observations = [replace(step, switches=affordable) for step in observations]
        turn, records = policy.advance(observations)
        self._status.pass_on(records)
        if policy.wants_window():
            self._job.request_window()
        if turn is not None and self._mode == "exact":
            self._wish(turn)

    def _wish(self, turn: TuningTurn) -> None:
        present, values = self._switcher.agreed(), self._switcher.wished(turn.values)
        if values == present and (turn.is_trial or self._proven is None):
            self._agreement.withdraw()
            self._is_keeping = False
        elif not (turn.is_trial and self._is_keeping):  # first what is proven: a freeze in the trial would undo it
            self._is_keeping = not turn.is_trial
            self._agreement.propose(
                turn.decision, values, kind=ProposalKind.TRIAL if turn.is_trial else ProposalKind.KEEP
            )

    def _finish_policy(self) -> None:
        policy, self._policy = self._policy, None
        if policy is not None and self._is_begun:
            frozen = self._agreement.frozen
            reason = "the job ended" if frozen is None else f"tuning froze ({frozen})"
            self._guarded(lambda: self._status.pass_on(policy.finish(reason)))

    # --- switches, on all ranks ---------------------------------------------------------------------

    def _decide(self) -> None:
        proposal = self._agreement.decide(self._can_apply)
        if self._gradients is not None:  # what was sent before the vote that was read is there on all ranks
            self._differ(self._gradients.compare())
        if proposal is not None:
            self._switch(proposal)

    def _can_apply(self, proposal: Proposal) -> bool:
        """Return this rank's vote; where its node is disturbed it votes against trials, so that no rank begins one."""
        is_disturbed = self._node is not None and self._node.disturbance is not None
        return self._switcher.can_apply(proposal) and not (is_disturbed and proposal.kind is ProposalKind.TRIAL)

    def _switch(self, proposal: Proposal, *, closes: bool = False) -> bool:
        """Carry out what all ranks voted for, and remember what to come back to while it is not proven.

        Return whether it was done.  `closes`: nobody voted, but all ranks may be closing after this step.
        """
        if proposal.kind is ProposalKind.KEEP:
            self._is_keeping = False
        begun_ns = self._job.spent_ns()
        is_on = self._agreement.gather_for(proposal, closes=closes)
        self._waited_ns = self._job.spent_ns() - begun_ns
        self._job.waited(self._waited_ns)
        if not is_on:  # not all ranks are here, so none of them begins
            if proposal.kind is ProposalKind.REHEARSAL:
                self._rehearse()
            return False
        if self._gradients is not None and proposal.kind is ProposalKind.REHEARSAL:
            self._gradients.prepare(self._tell_gradients)
        switch = self._switcher.carry_out(proposal)
        self._turned_at = self._boundary
        if proposal.kind is ProposalKind.REHEARSAL:
            self._rehearsed(proposal, is_done=switch.is_done)
            return switch.is_done
        if not switch.is_done:
            return False
        self._decision, self._serial = proposal.decision, proposal.serial
        pairs = zip(self._agreement.spaces, proposal.values, strict=True)
        before = tuple(switch.turned.get(space.knob, (new, new))[0] for space, new in pairs)
        if proposal.kind is ProposalKind.KEEP:
            self._proven = None
        elif self._proven is None:
            self._proven = before
        if switch.turned:
            self._before = before
            # Not where tuning ends: there is nothing to go back to.
            if self._gradients is not None and proposal.serial > 0 and concerns_gradients(switch.turned):
                self._gradients.arm()
            elif self._gradients is not None and proposal.serial == 0:
                self._gradients.arm(is_on=False)
            self._switched(proposal, switch.duration_ns)
        elif proposal.kind is ProposalKind.KEEP:
            self._job.request_window()  # it was in force already; windows of it choose the next candidate
        return True

    def _take_back(self) -> None:
        """Go back from what was turned together with a knob that went back by itself, in this step on all ranks."""
        reason, self._reverted = self._reverted, None
        self._say(self.state, str(reason), level=logging.WARNING)
        self._switcher.adopt()
        if self._before is not None and self._before != self._switcher.agreed():
            self._switch(Proposal(self._serial, self._decision, self._before))
        else:
            self._proven = None
            self._switched(Proposal(self._serial, self._decision, self._switcher.agreed()), 0)

    def _come_to_rest(self, *, closes: bool = False) -> None:
        """Go back from what is not proven: all ranks see at this very boundary that tuning froze, or close after it.

        Loss and gradients are not watched any more either, so nothing lossy stays in force.  Where a rank closes and
        others train on, there is no boundary at which all could go back together, and everything stays.
        """
        home = self._sound or self._proven
        rest = self._switcher.rest(home, closes=closes)
        is_needed = rest != self._switcher.agreed() or (home is not None and not closes)
        if is_needed and not self._switch(Proposal(serial=0, decision=self._decision, values=rest), closes=closes):
            self._stays = self._switcher.staying(rest)
        self._proven = None

    def _check_gradients(self) -> None:
        """Send and compare gradients; ranks that find a difference vote to freeze, and with that vote all go back.

        Not at this boundary: where answers come late, ranks find the same difference after different steps.
        """
        if self._gradients is not None:
            self._differ(self._gradients.look(self._tell_gradients))

    def _differ(self, difference: str | None) -> None:
        if difference is not None and self._before is not None:
            self._agreement.freeze(f"after a switch {difference}: the ranks' models may differ since step {self._step}")
            logger.error("pacecar: %s", self._agreement.frozen)
            self._sound = self._before

    def _learn_price(self, is_checking: bool) -> None:
        """Note what this boundary cost, to price the switches to come."""
        cost_ns = self._job.spent_ns()
        if self._turned_at == self._boundary:
            self._price.switched(cost_ns + self._waited_ns // 2)  # about half of it lengthens the step
        elif is_checking:
            self._price.compared(cost_ns)
        else:
            self._price.voted(cost_ns)

    def _tell_gradients(self, numbers: Sequence[float]) -> Callable[[], list[list[float]] | None]:
        return self._agreement.tell(VoteSubject.GRADIENTS, numbers)

    def _rehearsed(self, proposal: Proposal, *, is_done: bool) -> None:
        if self._policy is None:
            return
        self._rehearsal.played(proposal, is_done=is_done)
        self._rehearse()

    def _switched(self, proposal: Proposal, duration_ns: int) -> None:
        self._switched_at = self._boundary
        self._hearing.switched()
        self._publish_knobs(self._knobs.epoch + 1)
        self._status.switched(proposal.decision, self._step, self._knobs, duration_ns)
        # Once in a trial: a profiled step cannot be judged, and the setting that is switched back to is known.
        if proposal.kind is not ProposalKind.TRIAL or proposal.decision != self._windowed:
            self._windowed = proposal.decision if proposal.kind is ProposalKind.TRIAL else -1
            self._job.request_window()

    # --- status ---------------------------------------------------------------------------------------

    def _say(self, state: State, detail: str, *, level: int = logging.DEBUG) -> None:
        """Record and log a change of state that is not the policy's; every rank reports its own."""
        self._status.report(state, detail, step=self._step, level=level)
