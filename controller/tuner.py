"""Runs the tuner in one rank: takes finished steps, proposes knob changes, applies what all ranks agreed on.

    step record -> agreement (paces of all ranks) -> policy on rank 0 -> proposal -> vote -> actuators -> KnobSwitch

The Tuner decides nothing itself: the policy says what to try, people's orders come first, guards say when to pause and
what to take back, the agreement says when to switch, actuators know how.  It runs on the training thread at step
boundaries and waits for other ranks only where a vote is read and at a switch.  None of its errors reaches the job: an
exception freezes the tuner on all ranks.  Votes go on until every rank knows that, so that all of them go back from
what is not proven.

Modes: "off" does nothing at all; "advise" lets the policy see the job and turns nothing; all others turn knobs.
Left out: measuring (the hook does), judging (the policy does).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch.distributed as dist

from pacecar.config import TuneConfig
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.profiler.hook.step_records import FinishedStep
from pacecar.records import Knobs, TunerStatus

from .consensus.agreement import Agreement, LocalAgreement, RendezvousError
from .consensus.channels import VoteSubject
from .consensus.knob_switch import REHEARSAL_BOUNDARIES_MAX, KnobSwitcher, SwitchRehearsal
from .consensus.protocol import CALM_PERIOD, LONG_STEP_NS, PERIOD, ProposalKind, SwitchProposal
from .consensus.rank_agreement import RankAgreement
from .consensus.step_observations import ObservationBacklog, ObservationListener
from .experiment.exploration_budget import RESERVED_SWITCHES, SwitchPrice
from .guards.node_monitor import NodeMonitor
from .knobs.actuator import Actuator
from .knobs.ddp.gradient_check import GradientCheck, concerns_gradients
from .observation import Guard, JobFacts, Observation, Policy, Proposal, Record, TunerState
from .policy.hand_orders import HandOrders
from .status_reporter import StatusReporter

__all__ = ["FIRST_WINDOW_BOUNDARIES_MAX", "OFFER_BOUNDARY", "TunedJob", "Tuner", "choose_agreement"]

logger = logging.getLogger(__name__)

OFFER_BOUNDARY = PERIOD
"""The boundary at which knobs are offered: the batch size is known, and DDP has recorded its gradients' order."""


FIRST_WINDOW_BOUNDARIES_MAX = 64
"""Trials wait this long for rank 0's first exact window, which shows where the time went before anything was tuned.
It comes after 15 steps with two ranks, and after 50 with eight."""


class TunedJob(Protocol):
    """The job as its tuner sees it.  All calls are made on the training thread.

    The defaults describe a job that never pauses and that no rank leaves.
    """

    counted_ns_min: int = LONG_STEP_NS
    """The shortest step worth observing if it was only counted, not measured."""

    def facts(self) -> JobFacts:
        """Return what a policy needs to know about the job; called once, when the knobs are settled."""
        ...

    def set_knobs(self, knobs: Knobs) -> None:
        """Record the knobs that are in force from now on."""
        ...

    def request_window(self) -> None:
        """Request a new exact window."""
        ...

    def must_leave(self) -> str | None:
        """Return why this rank must leave now, for good and without a vote; None if it can stay."""
        return None

    def was_paused(self, step: FinishedStep | CountedStep) -> bool:
        """Return whether `step` contains a checkpoint or an evaluation."""
        return False

    def begin_vote(self) -> None:
        """Prepare for a boundary that takes longer than most."""

    def spent_ns(self) -> int:
        """Return what this boundary has cost the job since `begin_vote`."""
        return 0

    def waited(self, duration_ns: int) -> None:
        """Note how much of this boundary passed until the last rank reached it."""

    def headroom_ns(self) -> int | None:
        """Return what is left of the overhead budget; negative if overspent, None if nothing limits it."""
        return None

    def earned_ns(self, wall_ns: int) -> int:
        """Return what `wall_ns` of training add to the overhead budget."""
        return 0

    def collection_ns(self, step: FinishedStep | CountedStep) -> int | None:
        """Return what long garbage collections took of `step` on this rank; None if they are not timed."""
        return None

    def leave_out(self, duration_ns: int) -> None:
        """Note how much of this boundary was the job's own work, which is not charged to pacecar."""

    def reserve(self, cost_ns: int) -> None:
        """Keep this much of the overhead budget for switches; windows must not borrow it."""

    def awaits_first_window(self) -> bool:
        """Return whether this rank's first exact window is about to come: the ledger of the untuned job."""
        return False


def choose_agreement(config: TuneConfig) -> Agreement:
    """Return how the ranks of this process' job agree: by votes on a separate group, or at once if alone."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return LocalAgreement()
    has_votes = config.mode != "advise"
    return RankAgreement(dist.get_rank(), dist.get_world_size(), votes=has_votes, meet_seconds=config.meet_seconds)


class Tuner:
    """One rank's part of the controller.

    `policy`, `orders` and `guards` are used on rank 0 only.  `agreement` is how this rank reaches the others
    (`choose_agreement`).  `gradients` compares the ranks' gradients after a switch, and `node` says what disturbs this
    rank's node; None leaves that out.
    """

    def __init__(
        self,
        job: TunedJob,
        config: TuneConfig,
        status: StatusReporter,
        *,
        policy: Policy | None,
        orders: HandOrders | None = None,
        guards: Sequence[Guard] = (),
        actuators: Sequence[Actuator],
        agreement: Agreement,
        gradients: GradientCheck | None = None,
        node: NodeMonitor | None = None,
    ) -> None:
        self._job = job
        self._listener = ObservationListener(job.counted_ns_min)
        self._node = node
        self._gradients = gradients
        self._config = config
        self._policy = policy if status.rank == 0 else None
        self._orders = orders if status.rank == 0 else None
        self._guards = tuple(guards)
        self._pause: str | None = None  # why the policy is held
        self._actuators = {a.knob: a for a in actuators}
        self._acting = [a for a in actuators if type(a).on_boundary is not Actuator.on_boundary]
        self._status = status
        self._agreement = agreement
        self._gather_gradients = partial(agreement.start_gather, VoteSubject.GRADIENTS)
        self._switcher = KnobSwitcher(self._actuators, agreement, status.clock)
        self._turns_knobs = config.mode != "advise"
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
        # The values before a switch after which gradients differ.
        self._before_difference: tuple[int, ...] | None = None
        self._decision = 0
        self._previous: tuple[int, ...] | None = None  # the values before the last switch
        self._serial = 0  # of the last switch
        self._is_keeping = False  # a proposal of kind KEEP is out
        self._windowed_trial = -1  # the last trial that a window was requested for
        self._reverted: str | None = None
        self._price = SwitchPrice()
        self._waited_ns = 0  # for the other ranks, at the last switch
        self._turned_at = 0  # boundary of the last switch or rehearsal
        self._is_restored = False
        self._has_ended = False  # every rank knows that tuning is over
        self._unproven = ""  # says what could not be taken back
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
    def state(self) -> TunerState:
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
            self._agreement.open("a mode that turns knobs" if self._turns_knobs else "mode advise")
        except RendezvousError as error:
            self._report("off", f"not tuning: {error}", level=logging.WARNING)
            return
        self._is_active = True
        self._guarded(self._publish_knobs, 0)
        self._report("warming" if self._turns_knobs else "advising", "waiting for the first steps")

    def on_boundary(self, step: FinishedStep | CountedStep | None) -> None:
        """Take part in one step boundary; `step` is the one that just ended, None if it was not observed.

        Must be called at every boundary on every rank, also when nothing can be measured: votes go by boundaries.
        """
        if not self._is_active:
            return
        self._boundary += 1
        self._take_part(step)
        if self._acting:
            self._guarded(self._act_at_boundary)

    def _take_part(self, step: FinishedStep | CountedStep | None) -> None:
        self._step = step.step if step is not None else self._step + 1
        must_leave = self._job.must_leave()
        if must_leave is not None:
            self._leave(must_leave)
            return
        self._guarded(self._note_step, step)
        is_checking = self._gradients is not None and self._gradients.is_armed
        if is_checking or self._agreement.has_vote or self._reverted is not None:
            self._job.begin_vote()
        if self._reverted is not None:
            self._guarded(self._undo_with_knob)
        if is_checking:
            self._guarded(self._check_gradients)
        if self._boundary == OFFER_BOUNDARY:
            self._guarded(self._make_offer)
        if self._agreement.has_vote:
            self._vote()
        elif not is_checking:
            return
        self._guarded(self._learn_price, is_checking)

    def _act_at_boundary(self) -> None:
        """Let the knobs do what is due at every boundary; last, so that no vote is charged with it."""
        if not self._is_active:  # this rank left at this boundary
            return
        for actuator in self._acting:
            try:
                own_ns = actuator.on_boundary()
            except Exception:
                actuator.close()
                raise
            if own_ns:
                self._job.leave_out(own_ns)

    def _vote(self) -> None:
        """Take part in a boundary at which a vote is launched or read."""
        self._guarded(self._exchange_node_state)
        self._guarded(self._receive)
        if self._agreement.frozen is None:
            self._guarded(self._run_policy)
            self._guarded(self._report_calm)
        self._guarded(self._take_vote)
        if self._agreement.has_retired and not self._is_restored:
            self._is_restored = True
            self._guarded(self._restore_proven)
        if self._agreement.frozen is not None and not self._has_ended:
            self._has_ended = True
            if self.state != "off":
                self._report("frozen", self._agreement.frozen + self._unproven, level=logging.WARNING)
            self._finish_policy()

    def freeze(self, reason: str) -> None:
        """Freeze on all ranks, because this one can no longer measure; keep calling `on_boundary`."""
        if self._is_active:
            self._agreement.freeze(reason)

    def reverted(self, reason: str) -> None:
        """Note that a knob went back by itself, for `reason`, on all ranks in the step under way."""
        if self._is_active:
            self._reverted = reason

    def close(self, *, is_exit: bool = False) -> None:
        """End.  If all ranks close after the same step, they take back what is not proven.

        With `is_exit` the process ends, so nothing is trained with the knobs that stay.  Harmless when repeated.
        """
        if not self._is_active:
            return
        self._is_active = False
        self._finish_policy()
        if not is_exit and self._turns_knobs and self._agreement.spaces:
            was_said = bool(self._unproven)
            self._guarded(lambda: self._restore_proven(closes=True))
            if self._unproven and not was_said:
                self._report(
                    "frozen", f"closed, not after the same step on all ranks{self._unproven}", level=logging.WARNING
                )
        self._close_actuators()
        self._guarded(self._agreement.close)

    def _close_actuators(self) -> None:
        for actuator in self._actuators.values():
            self._guarded(actuator.close)

    def _leave(self, reason: str) -> None:
        self._is_active = False
        self._agreement.freeze(reason)
        if self._previous is not None:  # something was turned
            resting = self._switcher.resting_values(self._before_difference or self._proven)
            self._unproven = self._switcher.describe_unrestored(resting)
        self._report("frozen", reason + self._unproven, level=logging.WARNING)
        self._finish_policy()
        self._close_actuators()
        self._guarded(self._agreement.leave)

    def _guarded(self, act: Callable[..., None], *arguments: object) -> None:
        """Call `act`; an exception freezes the tuner and does not reach the job."""
        try:
            act(*arguments)
        except Exception as error:
            # Log it once: a lost process group fails at every vote.
            level = logging.DEBUG if self._has_failed else logging.ERROR
            self._has_failed = True
            logger.log(level, "pacecar: the tuner freezes; training goes on", exc_info=True)
            self._agreement.freeze(f"{type(error).__name__}: {error}")

    def _note_step(self, step: FinishedStep | CountedStep | None) -> None:
        if step is None:
            self._agreement.record_step(self._step, None, profiled=False)
            return
        collection_ns = (self._job.collection_ns(step) if self._acting else None) or 0
        are_all_calm = self._agreement.are_all_calm
        pace_ns = self._listener.pace_ns(step, are_all_calm=are_all_calm, collection_ns=collection_ns)
        if pace_ns is None:
            self._agreement.record_step(step.step, None, profiled=False)
            return
        self._step_ns = step.wall_ns
        is_disturbed = step.disturbed or self._job.was_paused(step)
        self._agreement.record_step(step.step, pace_ns, profiled=is_disturbed, collection_ns=collection_ns)
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
        """Publish the value of every knob that has one, including knobs that are not tuned."""
        self._knobs = Knobs(epoch, self._switcher.current_values())
        self._job.set_knobs(self._knobs)

    def _exchange_node_state(self) -> None:
        """Report what disturbs this rank's node and what it can pay for; take what others reported about theirs."""
        earned_ns = self._job.earned_ns(self._step_ns)
        self._agreement.report_affordable(self._price.affordable(self._job.headroom_ns(), earned_ns))
        is_trying = self._proven is not None
        self._job.reserve(RESERVED_SWITCHES * self._price.price_ns(earned_ns) if is_trying else 0)
        objections = (actuator.objection() for actuator in self._actuators.values())
        self._agreement.report_objection(next((int(one) for one in objections if one is not None), None))
        works = (self._actuators[space.knob].work() for space in self._switcher.live())
        self._agreement.report_work(next((one for one in works if one is not None), None))
        if self._node is not None:
            self._agreement.report_disturbance(self._node.update())
            self._node.others = self._agreement.disturbed

    def _receive(self) -> None:
        update = self._agreement.receive_updates()
        if update.refused is not None:
            self._settle_knobs(update.refused)
        self._backlog.pair(update.paces, self._switcher.live(), is_calm=self._is_calm())

    # --- policy, on rank 0 ------------------------------------------------------------------------

    def _settle_knobs(self, refused: dict[str, str]) -> None:
        self.refused = dict(refused)
        for knob, reason in refused.items():
            logger.info("pacecar: %s is not tuned: %s", knob, reason)
        spaces = self._agreement.spaces
        self._acting = [actuator for actuator in self._acting if any(s.knob == actuator.knob for s in spaces)]
        if not spaces:
            reasons = "; ".join(f"{knob}: {reason}" for knob, reason in refused.items())
            self._report("off", f"nothing to tune: {reasons or 'no knobs'}")
            self._agreement.freeze("nothing to tune")
        elif self._policy is not None and self._turns_knobs:
            self._rehearsal.plan()
            self._rehearse()
        elif self._policy is not None:
            self._begin(self._policy)

    def _rehearse(self) -> None:
        """Ask all ranks to apply the values in force; begin when every knob was rehearsed."""
        if self._policy is not None and not self._rehearsal.propose_next(self._boundary, self._switcher.values()):
            self._begin(self._policy)

    def _begin(self, policy: Policy) -> None:
        live = self._switcher.live()
        if not live:
            self._agreement.freeze("every knob failed when its present value was applied")
            return
        facts = self._job.facts()
        for guard in self._guards:
            guard.begin(facts, live, turns_knobs=self._turns_knobs)
        if self._orders is None:
            policy.begin(facts, live, turns_knobs=self._turns_knobs)
        else:
            self._orders.begin(policy, facts, live, turns_knobs=self._turns_knobs)
        self._is_begun = True
        self._backlog.begin(live)

    def _report_calm(self) -> None:
        self._agreement.report_calm(is_calm=self._is_calm(), step_ns=self._step_ns)

    def _is_calm(self) -> bool:
        """Return whether nothing is under way here; ranks without a policy are calm once knobs are settled.

        A rank is not calm in a trial or just after a switch.  Then gradients are compared, a larger micro-batch may go
        back, and the policy, perhaps on another rank, has to see all of that soon.
        """
        if self._proven is not None or self._boundary - self._switched_at < CALM_PERIOD:
            return False
        if self._policy is None:
            return bool(self._agreement.spaces)
        if self._is_begun and self._agreement.affordable == 0:
            return True  # no trial can begin, so more votes would only cost time
        is_watching = self._is_begun and self.state in ("watching", "advising")
        has_order = self._orders is not None and not self._orders.is_calm()
        return is_watching and not has_order and self._policy.is_calm() and all(g.is_calm() for g in self._guards)

    def _run_policy(self) -> None:
        policy = self._policy
        if policy is None:
            return
        if not self._is_begun:
            if self._rehearsal.is_late(self._boundary):
                self._agreement.freeze(f"the ranks did not agree within {REHEARSAL_BOUNDARIES_MAX} steps")
            return
        observations = self._backlog.drain()
        must_act = [guard.must_act() for guard in self._guards]
        if not observations and not any(must_act):
            return
        proposal: Proposal | None = None
        records: list[Record] = []
        if observations:
            self._hold(policy, observations[-1].step)
            proposal, records = self._advance(policy, self._judgeable(observations))
        for guard in self._guards:
            proposal, records = guard.take_back(proposal, records)
        for record in records:
            self._status.emit(record)
        if (self._orders is None or self._orders.is_calm()) and policy.wants_window():
            self._job.request_window()
        if proposal is not None and self._turns_knobs:
            self._propose(proposal)

    def _advance(self, policy: Policy, steps: Sequence[Observation]) -> tuple[Proposal | None, list[Record]]:
        """Ask the policy what to try, unless a person's order is to be carried out first."""
        orders = self._orders
        if orders is None:
            return policy.advance(steps)
        proposal = orders.pursue(steps)
        if proposal is None:
            proposal = orders.review(*policy.advance(steps))
        return proposal, orders.drain()

    def _hold(self, policy: Policy, step: int) -> None:
        """Hold the policy while any guard gives a reason to."""
        reasons = [guard.pause_reason(step) for guard in self._guards]
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason != self._pause:
            self._pause = reason
            (self._orders or policy).hold(reason)

    def _judgeable(self, observations: Sequence[Observation]) -> list[Observation]:
        """Return the steps for the policy, with the node's state and the number of switches that can be paid for."""
        switches = self._agreement.affordable
        if self._boundary <= FIRST_WINDOW_BOUNDARIES_MAX and self._job.awaits_first_window():
            switches = 0
        node = None if self._node is None else self._node.view
        works = self._agreement.works
        steps = [replace(step, node=node, switches=switches, works=works) for step in observations]
        for guard in self._guards:
            steps = [guard.judgeable(step) for step in steps]
        return steps

    def _propose(self, proposal: Proposal) -> None:
        present, values = self._switcher.agreed(), self._switcher.values_for(proposal.values)
        if values == present and (proposal.is_trial or self._proven is None):
            self._agreement.withdraw()
            self._is_keeping = False
        elif not (proposal.is_trial and self._is_keeping):  # keep first: a freeze in the trial would undo it
            self._is_keeping = not proposal.is_trial
            self._agreement.propose(
                proposal.decision, values, kind=ProposalKind.TRIAL if proposal.is_trial else ProposalKind.KEEP
            )

    def _finish_policy(self) -> None:
        policy, self._policy = self._policy, None
        if policy is not None and self._is_begun:
            frozen = self._agreement.frozen
            reason = "the job ended" if frozen is None else f"tuning froze ({frozen})"
            self._guarded(self._finish, policy, reason)

    def _finish(self, policy: Policy, reason: str) -> None:
        if self._orders is None:
            records = policy.finish(reason)
        else:
            self._orders.finish(reason)
            records = self._orders.drain()
        for guard in self._guards:
            _, records = guard.take_back(None, records)
        for record in records:
            self._status.emit(record)

    # --- switches, on all ranks ---------------------------------------------------------------------

    def _take_vote(self) -> None:
        proposal = self._agreement.decide(self._can_apply)
        if self._gradients is not None:  # all ranks have what was sent before the vote that was just read
            self._freeze_if_different(self._gradients.compare())
        if proposal is not None:
            self._switch(proposal)

    def _can_apply(self, proposal: SwitchProposal) -> bool:
        """Return this rank's vote.  With a disturbed node it votes against trials, so that no rank begins one."""
        is_disturbed = self._node is not None and self._node.disturbance is not None
        return self._switcher.can_apply(proposal) and not (is_disturbed and proposal.kind is ProposalKind.TRIAL)

    def _switch(self, proposal: SwitchProposal, *, closes: bool = False) -> bool:
        """Carry out what all ranks voted for, and remember what to come back to until it is proven.

        Return whether it was done.  With `closes` there was no vote, but all ranks may be closing after this step.
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
            self._gradients.prepare(self._gather_gradients)
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
            self._previous = before
            # Serial 0 ends tuning, and then there is nothing to go back to.
            if self._gradients is not None and proposal.serial > 0 and concerns_gradients(switch.turned):
                self._gradients.arm()
            elif self._gradients is not None and proposal.serial == 0:
                self._gradients.arm(is_on=False)
            self._switched(proposal, switch.duration_ns)
        elif proposal.kind is ProposalKind.KEEP:
            self._job.request_window()  # already in force; windows of it choose the next candidate
        return True

    def _undo_with_knob(self) -> None:
        """Undo the rest of the switch whose knob went back by itself, in this step on all ranks."""
        reason, self._reverted = self._reverted, None
        self._report(self.state, str(reason), level=logging.WARNING)
        self._switcher.adopt_current()
        if self._previous is not None and self._previous != self._switcher.agreed():
            self._switch(SwitchProposal(self._serial, self._decision, self._previous))
        else:
            self._proven = None
            self._switched(SwitchProposal(self._serial, self._decision, self._switcher.agreed()), 0)

    def _restore_proven(self, *, closes: bool = False) -> None:
        """Go back from what is not proven: at this boundary all ranks see that tuning froze, or close after it.

        Loss, gradients and loop are no longer watched, so nothing lossy or shared stays in force.  If one rank closes
        while others train on, no boundary lets all of them go back together, and everything stays.
        """
        home = self._before_difference or self._proven
        rest = self._switcher.resting_values(home, closes=closes)
        is_needed = rest != self._switcher.agreed() or (home is not None and not closes)
        proposal = SwitchProposal(serial=0, decision=self._decision, values=rest)
        if is_needed and not self._switch(proposal, closes=closes):
            self._unproven = self._switcher.describe_unrestored(rest)
        self._proven = None

    def _check_gradients(self) -> None:
        """Send and compare gradients; a rank that finds a difference votes to freeze, and with that vote all go back.

        They do not go back at this boundary: if answers are late, ranks find the same difference at different steps.
        """
        if self._gradients is not None:
            self._freeze_if_different(self._gradients.check(self._gather_gradients))

    def _freeze_if_different(self, difference: str | None) -> None:
        if difference is not None and self._previous is not None:
            self._agreement.freeze(f"after a switch {difference}: the ranks' models may differ since step {self._step}")
            logger.error("pacecar: %s", self._agreement.frozen)
            self._before_difference = self._previous

    def _learn_price(self, is_checking: bool) -> None:
        """Record what this boundary cost, to price later switches."""
        cost_ns = self._job.spent_ns()
        if self._turned_at == self._boundary:
            self._price.switched(cost_ns + self._waited_ns // 2)  # about half of it lengthens the step
        elif is_checking:
            self._price.compared(cost_ns)
        else:
            self._price.voted(cost_ns)

    def _rehearsed(self, proposal: SwitchProposal, *, is_done: bool) -> None:
        if self._policy is None:
            return
        self._rehearsal.record_outcome(proposal, is_done=is_done)
        self._rehearse()

    def _switched(self, proposal: SwitchProposal, duration_ns: int) -> None:
        self._switched_at = self._boundary
        self._listener.switched()
        self._publish_knobs(self._knobs.epoch + 1)
        self._status.switched(proposal.decision, self._step, self._knobs, duration_ns)
        # Only once in a trial: a profiled step cannot be judged, and the setting to return to is already known.
        if proposal.kind is not ProposalKind.TRIAL or proposal.decision != self._windowed_trial:
            self._windowed_trial = proposal.decision if proposal.kind is ProposalKind.TRIAL else -1
            self._job.request_window()

    # --- status ---------------------------------------------------------------------------------------

    def _report(self, state: TunerState, detail: str, *, level: int = logging.DEBUG) -> None:
        """Record and log a change of state that is not the policy's; every rank reports its own."""
        self._status.report(state, detail, step=self._step, level=level)
