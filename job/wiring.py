"""Builds the parts of an active pacer in one training process, connects them and starts them.

The parts call each other in a circle: the hook tells the tuner of steps, the tuner sets the hook's knobs, and the
daemon's messages come through the socket that carries the hook's records.  So one object, `_Listener`, stands between
them and gets each part when it is made.

Left out: what the script calls (`handle`), and which knobs there are (`tuner_wiring`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs
from torch import nn
from torch.optim import Optimizer

from pacecar.clock import SystemClock
from pacecar.config import Config, HookConfig, TuneConfig
from pacecar.controller.command_handler import CommandHandler, make_command_handler, tune_is_off
from pacecar.controller.consensus.step_boundaries import ForwardBoundaries
from pacecar.controller.guards.loss_monitor import LossMonitor
from pacecar.controller.guards.node_monitor import NodeMonitor
from pacecar.controller.guards.tuning_pause import TuningPause
from pacecar.controller.knobs.dataloader.knobs import LoaderKnobs
from pacecar.controller.knobs.ddp.buckets import find_ddp
from pacecar.controller.knobs.global_batch import GlobalBatchActuator, open_global_batch
from pacecar.controller.knobs.oom_safe_trial import OomSafeTrial
from pacecar.controller.tuner import Tuner
from pacecar.profiler.hook.daemon_messages import DaemonMessages, ThrottleNews
from pacecar.profiler.hook.hook import Hook
from pacecar.profiler.hook.job_identity import make_hello, model_device
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.profiler.hook.step_records import FinishedStep
from pacecar.profiler.hook.trace_request import TraceRequests
from pacecar.profiler.ranks.rank_monitor import RankMonitor, sees_waits_in_forward
from pacecar.profiler.ranks.what_if import RankWhatIf
from pacecar.profiler.transport.daemon_socket import DaemonSocket, News
from pacecar.profiler.transport.record_queue import RecordQueue, RecordSink
from pacecar.profiler.transport.run_log import RunLog
from pacecar.records import Command, JobHello, JobRecord, Throttling
from pacecar.records.commands import Answer
from pacecar.records.host_signals import HostSignals

from .tuner_wiring import make_loss_monitor, make_node, make_tuner

__all__ = ["JobParts", "assemble"]


@dataclass
class JobParts:
    """What an active pacer is made of; an inert one has none of it.

    `desk` handles people's commands to the tuner, `vigil` monitors the loss, `crew` monitors the ranks, `orders` holds
    the daemon's messages, `tracing` takes traces on request.
    """

    hook: Hook | None = None
    sinks: tuple[RecordSink, ...] = ()
    tuner: Tuner | None = None
    desk: CommandHandler | None = None
    boundaries: ForwardBoundaries | None = None
    loaders: LoaderKnobs | None = None
    global_batch: GlobalBatchActuator | None = None
    vigil: LossMonitor | None = None
    crew: RankMonitor | None = None
    orders: DaemonMessages | None = None
    tracing: TraceRequests | None = None


def assemble(
    model: nn.Module, optimizer: Optimizer, rescue: OomSafeTrial, settings: Config, loggers: Sequence[RecordSink]
) -> JobParts:
    """Start the hook, and unless the mode is "off" the tuner; what cannot start is an error, and the hook is closed."""
    hello = make_hello(model, job=settings.hook.job, overhead_budget=settings.hook.overhead_budget)
    hello = structs.replace(hello, hears_signals=settings.tune.mode != "off")
    throttling, node = ThrottleNews(hello), make_node(model, hello)
    listener = _Listener(hello, throttling, node, make_loss_monitor(model, hello, settings.tune))
    outbox = DaemonSocket(settings.hook.socket, hello, obey=listener.obey, heed=listener.heed)
    listener.reply = outbox.put
    couriers: list[RecordQueue] = [outbox]
    if settings.hook.run_dir is not None:
        couriers.append(RunLog(settings.hook.run_dir, hello))
    sinks: list[RecordSink] = [*couriers, *loggers, RankWhatIf(_emitter(couriers), is_job=hello.world_size == 1)]
    hook = Hook(
        model,
        optimizer,
        hello=hello,
        config=settings.hook,
        sinks=sinks,
        on_boundary=listener.on_boundary,
        clock=SystemClock(),
    )
    listener.hear(hook, model, directory=settings.hook.run_dir)
    for courier in couriers:
        courier.before_look = hook.look
    for courier in [*couriers, *(logger for logger in loggers if isinstance(logger, RecordQueue))]:
        courier.charge = hook.charge_records
    parts = JobParts(hook, tuple(sinks), vigil=listener.vigil, orders=listener.orders, tracing=listener.tracing)
    hook.start()
    holds = TuningPause(node)
    try:
        if settings.tune.mode != "off":
            _start_tuner(parts, hook, model, optimizer, rescue, hello, settings.tune, outbox, listener, holds)
        if settings.hook.crew:
            parts.crew = _start_crew(hook, hello, settings.hook, [*sinks, holds], throttling, parts)
    except BaseException:
        if parts.desk is not None:
            parts.desk.close()
        hook.close("could not start")
        raise
    listener.orders.register("tune", tune_is_off if parts.desk is None else parts.desk.act)
    return parts


HOOK_IS_OFF = "pacecar's hook has turned itself off in this rank; its log says why"


class _Listener:
    """Receives the ends of steps, and messages of people and of the daemon; passes them on to the parts there are."""

    def __init__(self, hello: JobHello, throttling: ThrottleNews, node: NodeMonitor, vigil: LossMonitor | None) -> None:
        self._hello = hello
        self._throttling = throttling
        self._node = node
        self.vigil = vigil
        self.reply: Callable[[Answer], None] = _drop
        self.orders = DaemonMessages(hello.job, hello.rank, reply=lambda answer: self.reply(answer))
        self.tuner: Tuner | None = None
        self.boundaries: ForwardBoundaries | None = None
        self.hook: Hook
        self.tracing: TraceRequests

    def hear(self, hook: Hook, model: nn.Module, *, directory: str | None) -> None:
        """Connect to `hook`: make the trace requests, and have boundaries reported only where a part wants them."""
        self.hook = hook
        self.tracing = TraceRequests(
            self._hello.job,
            self._hello.rank,
            on_device=model_device(model).type == "cuda",
            directory=directory,
            step=lambda: hook.step,
            mark=self._mark,
            windows=hook.windows,
        )
        # At a plain boundary a call costs microseconds, also one that finds nothing to do.
        hook.wants_boundary = self.wants_boundary
        hook.windows.is_held = lambda: bool(self.orders.waiting)
        self.orders.register("trace", self.tracing.trace)

    def wants_boundary(self) -> bool:
        """Whether any part wants the next step boundary."""
        return self.tuner is not None or self.vigil is not None or self.tracing.is_tracing or bool(self.orders.waiting)

    def on_boundary(self, step: FinishedStep | CountedStep | None) -> None:
        """A step ended."""
        if not self.hook.is_alive and self.tuner is not None:  # the others would wait for its paces for ever
            self.tuner.freeze(HOOK_IS_OFF)
        if self.vigil is not None:
            self.vigil.boundary(None if step is None else step.step)
        if self.boundaries is not None:
            self.boundaries.step_ended(step)
        elif self.tuner is not None:
            self.tuner.on_boundary(step)
        if self.tracing.is_tracing:
            self.tracing.boundary()
        if self.orders.waiting:
            if self.hook.is_alive:
                self.orders.boundary(self.hook.step)
            else:  # it counts no steps any more, so theirs would never come
                self.orders.close(HOOK_IS_OFF)

    def obey(self, command: Command) -> None:
        """Queue a command of the daemon; called from another thread."""
        self.orders.obey(command)
        self.hook.wake()

    def heed(self, news: News | None) -> None:
        """Record what the daemon says of device and node; called from another thread."""
        if not isinstance(news, HostSignals):
            self._throttling.heed(news)
        if not isinstance(news, Throttling):
            self._node.heed(news)

    def _mark(self, is_traced: bool) -> None:
        self.hook.is_traced = is_traced


def _start_tuner(
    parts: JobParts,
    hook: Hook,
    model: nn.Module,
    optimizer: Optimizer,
    rescue: OomSafeTrial,
    hello: JobHello,
    config: TuneConfig,
    outbox: DaemonSocket,
    listener: _Listener,
    holds: TuningPause,
) -> None:
    emit = _emitter(parts.sinks)
    if hello.rank == 0:
        parts.desk = make_command_handler(model, hello, config, reply=outbox.put, emit=emit)
    parts.loaders = LoaderKnobs(config)
    parts.global_batch = open_global_batch(optimizer, rescue.batcher, config, hello.world_size)
    tuner = make_tuner(
        model, hook, rescue, parts.loaders, parts.global_batch, hello, config, emit, parts.vigil, parts.desk, holds
    )
    parts.tuner = listener.tuner = tuner
    tuner.start()
    if config.at_forward and find_ddp(model) is not None:
        parts.boundaries = listener.boundaries = ForwardBoundaries(
            model, tuner.on_boundary, now_ns=SystemClock().monotonic_ns, charge=hook.charge
        )
        parts.boundaries.open()


def _start_crew(
    hook: Hook, hello: JobHello, config: HookConfig, sinks: list[RecordSink], throttling: ThrottleNews, parts: JobParts
) -> RankMonitor:
    crew = RankMonitor(
        hello,
        config,
        hook,
        emit=_emitter(sinks),
        throttled=throttling.is_throttled,
        charge=hook.charge,
        waits_in_forward=lambda: sees_waits_in_forward(hook.calibrations.find(hook.knobs)),
        is_told=lambda: parts.tuner is not None and parts.tuner.agreement.has_left,
    )
    hook.on_timed = crew.note
    crew.start()
    return crew


def _emitter(sinks: Sequence[RecordSink]) -> Callable[[JobRecord], None]:
    def emit(record: JobRecord) -> None:
        for sink in sinks:
            sink.put(record)

    return emit


def _drop(answer: Answer) -> None:
    """Drop the answer: the socket to the daemon is not made yet, so nobody can have asked."""
