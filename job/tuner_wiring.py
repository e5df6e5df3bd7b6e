"""Builds the parts of a tuner: the job as it sees it, the knobs that may be turned, the guards over its policy.

`wiring` decides when it is built, started and closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn
from torch.optim import Optimizer

from pacecar.clock import SystemClock
from pacecar.config import TuneConfig
from pacecar.controller.consensus.agreement import Agreement
from pacecar.controller.consensus.channels import VoteSubject
from pacecar.controller.consensus.step_boundaries import RankDeparture
from pacecar.controller.guards.collection_cost import CollectionCost
from pacecar.controller.guards.compression_rollback import CompressionRollback
from pacecar.controller.guards.loss_monitor import LossMonitor
from pacecar.controller.guards.node_monitor import NodeMonitor
from pacecar.controller.guards.objection_rollback import ObjectionRollback
from pacecar.controller.guards.tuning_pause import TuningPause
from pacecar.controller.knobs.activation_checkpointing.knob import (
    CheckpointedBlocksActuator,
    open_checkpointed_blocks,
)
from pacecar.controller.knobs.actuator import Actuator, ActuatorError
from pacecar.controller.knobs.batch.global_batch import open_global_batch
from pacecar.controller.knobs.batch.gradient_noise_scale import StatisticalPace
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
from pacecar.controller.knobs.batch.micro_batch_knobs import MicroBatchActuator, MicroTokensActuator
from pacecar.controller.knobs.batch.oom_safe_trial import OomSafeTrial, TrialPeers, unused_bytes
from pacecar.controller.knobs.batch.work_share import WorkShareActuator
from pacecar.controller.knobs.dataloader.knobs import LoaderKnobs
from pacecar.controller.knobs.ddp.buckets import DdpKnobs
from pacecar.controller.knobs.ddp.reducer import DdpReducer
from pacecar.controller.knobs.deepspeed_zero import zero_knobs
from pacecar.controller.knobs.fsdp2 import ReshardActuator, fsdp_knobs
from pacecar.controller.knobs.garbage_collection import gc_knobs
from pacecar.controller.observation import Guard, JobFacts, ShardedBytes
from pacecar.controller.tuner import TunedJob, Tuner
from pacecar.knobs import KnobName, allows
from pacecar.profiler.hook.hook import Hook
from pacecar.profiler.hook.identity import model_device
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.profiler.hook.step_records import FinishedStep
from pacecar.profiler.ranks.data_parallel import find_ddp
from pacecar.profiler.timing.step_timer import TimedStep
from pacecar.records import JobHello, Knobs, StepRecord

__all__ = ["HookedJob", "JobKnobs", "TunedPeers", "make_guards", "make_node"]

_TAKEN_BACK: tuple[KnobName, ...] = ("work_share", "checkpointed_blocks", "fsdp_reshard")
"""Knobs that go back where a rank objects, beside "gc_interval", whose guard does more."""

DECIDE_NS = 150_000
"""What the tuner takes to receive a step and to decide, rounded up; 1 % of a step of 15 ms pays for it."""


def make_node(model: nn.Module, hello: JobHello) -> NodeMonitor:
    """Return the monitor of this rank's node."""
    ddp, device = find_ddp(model), model_device(model)
    sizes = [p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad] if ddp is not None else []
    is_cuda = device.type == "cuda"
    return NodeMonitor(
        hello,
        SystemClock(),
        gradient_bytes=sum(sizes) or None,
        spare_bytes=(lambda: unused_bytes(device)) if is_cuda else int,
    )


class HookedJob(TunedJob):
    """A job as its tuner sees it: the hook measures it, DDP's reducer and the micro-batcher know its sizes.

    `sharded` returns those of FSDP2's modules.
    `at_forward`: boundaries are at a forward, so the hook's own boundary is not charged with them.
    """

    def __init__(
        self,
        model: nn.Module,
        hook: Hook,
        reducer: DdpReducer,
        batcher: MicroBatcher,
        hello: JobHello,
        blocks: CheckpointedBlocksActuator | None,
        *,
        sharded: Callable[[], ShardedBytes | None],
        at_forward: bool,
    ) -> None:
        self._hook = hook
        self._reducer = reducer
        self._batcher = batcher
        self._hello = hello
        self._blocks = blocks
        self._sharded = sharded
        self._at_forward = at_forward
        self._departure = RankDeparture(model)
        self._vote_begun_ns = self._spared_ns = 0
        self.counted_ns_min = round(DECIDE_NS / hook.budget.ratio_max) if hook.budget.ratio_max > 0 else 0

    def facts(self) -> JobFacts:
        """Return the sizes of gradients, buckets, batch and sharded modules."""
        reducer = self._reducer
        return JobFacts(
            job=self._hello.job,
            world_size=self._hello.world_size,
            gradient_bytes=reducer.gradient_bytes(),
            batch_samples=self._batcher.batch_samples,
            bucket_bytes=None if reducer.ddp is None else reducer.plan.bucket_bytes,
            first_bucket_bytes=None if reducer.ddp is None else reducer.first_bytes,
            blocks=None if self._blocks is None else self._blocks.costs(),
            sharded=self._sharded(),
        )

    def set_knobs(self, knobs: Knobs) -> None:
        """Put these knobs into the records of the steps that follow."""
        self._hook.knobs = knobs

    def request_window(self) -> None:
        """Request a window from the hook, whose overhead budget decides."""
        self._hook.request_window()

    def must_leave(self) -> str | None:
        """Return the reason that `RankDeparture` finds in the model's process groups."""
        return self._departure.reason()

    def was_paused(self, step: FinishedStep | CountedStep) -> bool:
        """Return whether the hook saw a pause in it."""
        return self._hook.loop.was_paused(step.start_ns if isinstance(step, CountedStep) else step.raw.start_ns)

    def begin_vote(self) -> None:
        """Start timing; the hook leaves out what the kernel gives to other programs meanwhile."""
        self._vote_begun_ns = time.monotonic_ns()
        if not self._at_forward:
            self._hook.preemption.begin()
        self._spared_ns = self._hook.preemption.so_far()

    def spent_ns(self) -> int:
        """Return the wall time since `begin_vote` less what the kernel gave to other programs meanwhile."""
        spared_ns = self._hook.preemption.so_far() - self._spared_ns
        return max(0, time.monotonic_ns() - self._vote_begun_ns - spared_ns)

    def collection_ns(self, step: FinishedStep | CountedStep) -> int | None:
        """Return what the hook's timer of garbage collections saw within the step."""
        if isinstance(step, CountedStep):
            return self._hook.collections.within(step.start_ns, step.start_ns + step.wall_ns)
        return self._hook.collections.within(step.raw.start_ns, step.raw.end_ns)

    def leave_out(self, duration_ns: int) -> None:
        """Have the hook not charge it."""
        preemption = self._hook.preemption
        if not preemption.is_begun:
            preemption.begin()
        preemption.leave_out(duration_ns)

    def waited(self, duration_ns: int) -> None:
        """Have the hook charge as much of it as the step turns out to be longer."""
        self._hook.waited(duration_ns)

    def headroom_ns(self) -> int | None:
        """Return what the hook's overhead budget leaves."""
        return self._hook.headroom_ns()

    def earned_ns(self, wall_ns: int) -> int:
        """Return the hook's overhead budget for `wall_ns`."""
        return round(self._hook.budget.ratio_max * wall_ns)

    def awaits_first_window(self) -> bool:
        """Ask the hook."""
        return self._hook.awaits_first_window()

    def reserve(self, cost_ns: int) -> None:
        """Keep this much of the budget from windows."""
        self._hook.budget.reserved_ns = cost_ns


class JobKnobs:
    """The knobs of one job that its mode, its model and its loop allow to be turned."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        trials: OomSafeTrial,
        hello: JobHello,
        config: TuneConfig,
        agreement: Agreement,
        charge: Callable[[int], None],
    ) -> None:
        batcher = trials.batcher
        self._config = config
        self.ddp = DdpKnobs(model, config, has_scaler=batcher.has_scaler)
        self.micro = [knob(model, batcher, config, trials) for knob in (MicroBatchActuator, MicroTokensActuator)]
        self.loaders = LoaderKnobs(config)
        self._collections = gc_knobs(config, model_device(model))
        self.agreement = agreement
        self.global_batch = open_global_batch(
            optimizer,
            batcher,
            config,
            hello.world_size,
            partial(agreement.start_gather, VoteSubject.NOISE),
        )
        self.work_share = self._open_work_share(model, batcher, hello, agreement)
        sizes = [one for one in self.micro if one.knob in config.knobs]
        self.blocks = open_checkpointed_blocks(model, config, hello.world_size, sizes=sizes, charge=charge)
        if self.blocks is not None:
            batcher.samples.checkpointed = batcher.tokens.checkpointed = self.blocks.value
        self._engines = [*fsdp_knobs(model, config), *zero_knobs(model, config)]
        self.loss_monitor = self._make_loss_monitor(model, is_first=hello.rank == 0)
        """On rank 0, which decides, if compression may be tried; else None."""

    def _open_work_share(
        self, model: nn.Module, batcher: MicroBatcher, hello: JobHello, agreement: Agreement
    ) -> WorkShareActuator | None:
        config = self._config
        if not ("work_share" in config.knobs and allows(config.mode, "work_share")) or hello.world_size < 2:
            return None
        share = WorkShareActuator(
            model,
            batcher,
            hello.rank,
            hello.world_size,
            start_gather=partial(agreement.start_gather, VoteSubject.SHARE),
            loader=self.loaders.known,
            has_global_batch=self.global_batch is not None,
            may_redraw=config.loader_redraw,
        )
        self.loaders.share, batcher.share_factor = share, share.factor
        return share

    def note(self, timed: TimedStep, record: StepRecord) -> None:
        """Take a measured step, on any thread: how much of it this rank worked, without waiting for others."""
        share, phases = self.work_share, timed.phases
        if share is None or record.disturbed or "stopped" in phases or record.samples is None:
            return
        fixed_ns = phases.get("optimizer", 0)
        passed = None if timed.device is None else timed.device.phases
        if passed is None:
            beside = ("backward_tail", "overhead", "checkpoint")
            scaling_ns = timed.wall_ns - fixed_ns - sum(phases.get(name, 0) for name in beside)
        else:
            scaling_ns = passed.get("forward", 0) + passed.get("backward", 0)
        share.note(record.samples, scaling_ns, fixed_ns)

    def _make_loss_monitor(self, model: nn.Module, *, is_first: bool) -> LossMonitor | None:
        is_wanted = self._config.mode in ("lossy", "adaptive") and "compression" in self._config.knobs and is_first
        return LossMonitor(model, self.ddp.choice) if is_wanted and find_ddp(model) is not None else None

    def sharded(self) -> ShardedBytes | None:
        """Return the bytes of FSDP2's modules; None if there are none, or "fsdp_reshard" cannot be turned."""
        found = next((engine for engine in self._engines if isinstance(engine, ReshardActuator)), None)
        try:
            return None if found is None or found.refusal() is not None else found.gathers()
        except ActuatorError:
            return None

    def actuators(self) -> list[Actuator]:
        """Return those that the mode and the user allow."""
        found: list[Actuator] = [] if self.blocks is None else [self.blocks]  # before what needs the room
        found += [*self.micro, *self.ddp.actuators, *self.loaders.actuators, *self._collections, *self._engines]
        found += [] if self.work_share is None else [self.work_share]
        found += [] if self.global_batch is None else [self.global_batch]
        return [one for one in found if one.knob in self._config.knobs and allows(self._config.mode, one.knob)]


def make_guards(knobs: JobKnobs, pause: TuningPause) -> list[Guard]:
    """Return the guards over the policy: `pause`, and those that `knobs` need."""
    guards: list[Guard] = [pause]

    def objections() -> Mapping[int, int]:
        return knobs.agreement.objections

    present = {actuator.knob for actuator in knobs.actuators()}
    if "gc_interval" in present:
        guards.append(CollectionCost(objections))
    guards += [ObjectionRollback(knob, objections) for knob in _TAKEN_BACK if knob in present]
    if knobs.global_batch is not None:
        guards.append(StatisticalPace(knobs.global_batch.noise_scale))
    if knobs.loss_monitor is not None:
        guards.append(CompressionRollback(knobs.loss_monitor.arrived))
    return guards


class TunedPeers(TrialPeers):
    """The other ranks, this rank's tuner and its node, during a trial of a larger micro-batch."""

    def __init__(self, agreement: Agreement, tuner: Tuner, node: NodeMonitor) -> None:
        self._agreement = agreement
        self._tuner = tuner
        self._node = node

    def any_rank(self, is_so: bool) -> bool:
        """Ask all ranks.  True if an answer was too late for any rank; if ranks have left, this rank's answer."""
        answers = self._agreement.start_gather(VoteSubject.MEMORY, [float(is_so)])()
        if answers is None:
            return is_so or not self._agreement.has_left
        return any(answer[0] for answer in answers)

    def reverted(self, reason: str) -> None:
        """Report it to the tuner."""
        self._tuner.reverted(reason)

    def room_bytes(self) -> int | None:
        """Return what the daemon reports for this rank's node."""
        return self._node.room_bytes()
