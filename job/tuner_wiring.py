"""Builds the tuner of one rank: its knobs, its policy with the guards around it, and its connections to other parts.

Left out: when it is built, started and closed (`wiring`, `handle`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pacecar.clock import SystemClock
from pacecar.config import TuneConfig
from pacecar.controller.command_handler import CommandHandler
from pacecar.controller.consensus.agreement import Agreement
from pacecar.controller.consensus.channels import VoteSubject
from pacecar.controller.consensus.step_boundaries import RankDeparture
from pacecar.controller.consensus.step_observations import MeasuredSteps
from pacecar.controller.guards.compression_rollback import CompressionRollback
from pacecar.controller.guards.loss_monitor import LossMonitor
from pacecar.controller.guards.node_monitor import NodeMonitor
from pacecar.controller.guards.tuning_pause import PausedPolicy, TuningPause
from pacecar.controller.knobs.dataloader.knobs import LoaderKnobs
from pacecar.controller.knobs.ddp.buckets import DdpKnobs, find_ddp
from pacecar.controller.knobs.ddp.reducer import DdpReducer
from pacecar.controller.knobs.deepspeed_zero import zero_knobs
from pacecar.controller.knobs.fsdp2 import fsdp_knobs
from pacecar.controller.knobs.global_batch import GlobalBatchActuator
from pacecar.controller.knobs.memory_forecast import unused_bytes
from pacecar.controller.knobs.micro_batch import MicroBatcher
from pacecar.controller.knobs.micro_batch_knobs import MicroBatchActuator, MicroTokensActuator
from pacecar.controller.knobs.oom_safe_trial import OomSafeTrial
from pacecar.controller.knobs.statistical_pace import StatisticalPace
from pacecar.controller.observation import JobFacts, Policy
from pacecar.controller.status_reporter import StatusReporter
from pacecar.controller.tuner import TunedJob, Tuner, choose_agreement
from pacecar.knobs import allows
from pacecar.profiler.hook.hook import Hook
from pacecar.profiler.hook.job_identity import model_device
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.profiler.hook.step_records import FinishedStep
from pacecar.records import JobHello, JobRecord, Knobs

__all__ = ["make_loss_monitor", "make_node", "make_tuner"]

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


def make_loss_monitor(model: nn.Module, hello: JobHello, config: TuneConfig) -> LossMonitor | None:
    """Return the monitor of loss and gradients: on rank 0, which decides, and where compression may be tried."""
    is_wanted = config.mode in ("lossy", "adaptive") and "compression" in config.knobs and hello.rank == 0
    return LossMonitor(model) if is_wanted and find_ddp(model) is not None else None


class HookedJob(TunedJob):
    """A job to its tuner: the hook measures it, DDP's reducer and the micro-batcher know its sizes.

    `at_forward`: boundaries are at a forward, where it is not the hook's boundary that is charged with them.
    """

    def __init__(
        self,
        model: nn.Module,
        hook: Hook,
        reducer: DdpReducer,
        batcher: MicroBatcher,
        hello: JobHello,
        *,
        at_forward: bool,
    ) -> None:
        self._hook = hook
        self._reducer = reducer
        self._batcher = batcher
        self._hello = hello
        self._at_forward = at_forward
        self._departure = RankDeparture(model)
        self.counted_ns_min = round(DECIDE_NS / hook.overhead_budget) if hook.overhead_budget > 0 else 0

    def facts(self) -> JobFacts:
        """Return the sizes of gradients, buckets and batch."""
        reducer = self._reducer
        return JobFacts(
            job=self._hello.job,
            world_size=self._hello.world_size,
            gradient_bytes=reducer.gradient_bytes(),
            batch_samples=self._batcher.batch_samples,
            bucket_bytes=None if reducer.ddp is None else reducer.plan.bucket_bytes,
            first_bucket_bytes=None if reducer.ddp is None else reducer.first_bytes,
        )

    def set_knobs(self, knobs: Knobs) -> None:
        """Have the records of the steps that follow carry these."""
        self._hook.knobs = knobs

    def request_window(self) -> None:
        """Request one of the hook, whose overhead budget decides."""
        self._hook.request_window()

    def must_leave(self) -> str | None:
        """Return what `RankDeparture` says of the model's process groups."""
        return self._departure.reason()

    def was_paused(self, step: MeasuredSteps | CountedStep) -> bool:
        """Return what the hook saw in it."""
        if isinstance(step, CountedStep):
            return self._hook.was_paused(step.start_ns)
        return isinstance(step, FinishedStep) and self._hook.was_paused(step.raw.start_ns)

    def begin_vote(self) -> None:
        """Have the hook leave out what the kernel gives to other programs meanwhile."""
        if not self._at_forward:
            self._hook.preemption.begin()


def make_tuner(
    model: nn.Module,
    hook: Hook,
    rescue: OomSafeTrial,
    loaders: LoaderKnobs,
    global_batch: GlobalBatchActuator | None,
    hello: JobHello,
    config: TuneConfig,
    emit: Callable[[JobRecord], None],
    vigil: LossMonitor | None,
    desk: CommandHandler | None,
    holds: TuningPause,
) -> Tuner:
    """Return the tuner of this rank with every knob that the mode allows.

    `desk`, the handler of people's commands, is on rank 0 only; `vigil` is the loss monitor, `holds` pauses tuning.
    """
    batcher = rescue.batcher
    ddp = DdpKnobs(model, config, has_scaler=batcher.has_scaler)
    if vigil is not None:
        vigil.choice = ddp.choice
    micro = [knob(model, batcher, config, rescue) for knob in (MicroBatchActuator, MicroTokensActuator)]

    beside = [*loaders.actuators, *fsdp_knobs(model, config), *zero_knobs(model, config)]
    beside += [] if global_batch is None else [global_batch]

    policy: Policy | None = None if desk is None else PausedPolicy(desk.overseer, holds)
    if policy is not None and global_batch is not None:
        policy = StatisticalPace(policy, global_batch.noise_scale)
    if policy is not None and vigil is not None:
        policy = CompressionRollback(policy, vigil.take)
    tuner = Tuner(
        HookedJob(model, hook, ddp.reducer, batcher, hello, at_forward=config.at_forward),
        config,
        StatusReporter(hello, emit if desk is None else desk.emit, SystemClock()),
        policy=policy,
        actuators=[
            a for a in (*micro, *ddp.actuators, *beside) if a.knob in config.knobs and allows(config.mode, a.knob)
        ],
        agreement=choose_agreement(config),
        gradients=ddp.gradient_check(),
        node=holds.node,
    )
    if holds.node is not None:
        rescue.room = holds.node.room_bytes
    rescue.reverted = tuner.reverted
    rescue.any_rank = lambda is_so: _any_rank(tuner.agreement, is_so)
    if global_batch is not None:
        global_batch.tell = lambda numbers: tuner.agreement.tell(VoteSubject.NOISE, numbers)
    if desk is not None:
        desk.knobs, desk.refused = lambda: tuner.knobs, lambda: tuner.refused
        desk.node = tuple if holds.node is None else holds.node.describe
    return tuner


def _any_rank(agreement: Agreement, is_so: bool) -> bool:
    """Return whether `is_so` on any rank, which all ranks ask at the same point; without an answer, on this rank."""
    answers = agreement.ask(VoteSubject.MEMORY, [float(is_so)])
    return is_so if answers is None else any(answer[0] for answer in answers)
