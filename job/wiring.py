"""Builds the parts of an active pacer in one training process, starts them, calls them at each step, and closes them.

    script -> hook -> records -> queues -> daemon, run folder, loggers
               |                    ^
               |  boundary          | records
               v                    |
              JobRun -> tuner, loss monitor, trace requests, commands of the daemon; rank monitor on its own thread

A part gets what it needs when it is made.  Two dependencies run against the order of construction and are passed when
the parts start: the hook gets its listener, and a queue the hook that it asks for late records.

`handle` has what the script calls, `tuner_wiring` the knobs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import structs
from torch import nn
from torch.optim import Optimizer

from pacecar.clock import SystemClock
from pacecar.config import Config, HookConfig, TuneConfig, default_socket
from pacecar.controller.command_handler import CommandHandler, make_policy_and_orders, tune_is_off
from pacecar.controller.consensus.step_boundaries import ForwardBoundaries
from pacecar.controller.guards.tuning_pause import TuningPause
from pacecar.controller.knobs.batch.oom_safe_trial import OomSafeTrial
from pacecar.controller.memory.store_thread import StoreThread
from pacecar.controller.status_reporter import StatusReporter
from pacecar.controller.training_memory import read_training_memory
from pacecar.controller.tuner import Tuner, choose_agreement
from pacecar.profiler.hook.commands.daemon_messages import DaemonMessages, Reply, ThrottleNews
from pacecar.profiler.hook.commands.trace_request import TraceRequests
from pacecar.profiler.hook.hook import Hook, StepListener
from pacecar.profiler.hook.identity import make_hello, model_device
from pacecar.profiler.hook.step_boundary import CountedStep
from pacecar.profiler.hook.step_records import FinishedStep
from pacecar.profiler.orders.job_orders import JobOrders, RankState
from pacecar.profiler.ranks.cross_rank.cross_rank_window import WindowRank
from pacecar.profiler.ranks.data_parallel import find_ddp, find_fsdp, uncompiled
from pacecar.profiler.ranks.rank_monitor import RankMonitor
from pacecar.profiler.ranks.what_if import RankWhatIf
from pacecar.profiler.timing.step_timer import TimedStep
from pacecar.profiler.transport.daemon_socket import DaemonInbox, DaemonSocket, News
from pacecar.profiler.transport.record_queue import RecordQueue, RecordSink, put_into_all
from pacecar.profiler.transport.run_log import RunLog
from pacecar.records import Answer, Command, StepRecord, Throttling
from pacecar.records.host_signals import HostSignals
from pacecar.records.job_orders import ALL_RANKS

from .tuner_wiring import HookedJob, JobKnobs, TunedPeers, make_guards, make_node

__all__ = ["JobRun"]

logger = logging.getLogger("pacecar")

CLOSE_SECONDS_MAX = 2.0
"""How long closing may wait for queued records: the end of a job delays no step, but the user waits for it."""

HOOK_IS_OFF = "pacecar's hook has turned itself off in this rank; its log says why"


class JobRun(StepListener, DaemonInbox):
    """The parts of an active pacer.  A part that is None does not exist in this job or on this rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        trials: OomSafeTrial,
        settings: Config,
        loggers: Sequence[RecordSink],
    ) -> None:
        """Make and start all parts.

        Raises:
            AlreadyAttachedError: another hook is active in this process.
            Exception: whatever keeps a part from starting; the parts before it are closed then, `loggers` are not.
        """
        config = settings.hook
        hello = make_hello(model, job=config.job, overhead_budget=config.overhead_budget)
        self._hello = hello = structs.replace(hello, hears_signals=settings.tune.mode != "off")
        self._throttling = ThrottleNews(hello)
        self._node = make_node(model, hello)
        self.messages = DaemonMessages(hello.job, hello.rank)
        """The daemon's commands to this rank."""
        # Without a configured socket, a node may well have no daemon.
        self._outbox = DaemonSocket(config.socket, hello, inbox=self, is_optional=config.socket == default_socket())
        self._queues: list[RecordQueue] = [self._outbox]
        if config.run_dir is not None:
            self._queues.append(RunLog(config.run_dir, hello))
        self._what_if = RankWhatIf(hello.job, hello.rank, put_into_all(self._queues), is_job=hello.world_size == 1)
        self.orders = JobOrders(
            hello,
            RankState(
                step=lambda: self.hook.step,
                pace_ns=lambda: self.hook.budget.usual_ns,
                knobs=lambda: self.hook.knobs,
                has_daemon=lambda: self._outbox.is_connected,
            ),
            SystemClock(),
            accept=self._accept,
            reply=self._outbox.put,
            charge=lambda spent_ns: self.hook.budget.charge(spent_ns),
            run_dir=config.run_dir,
        )
        """Orders to all ranks of the job."""
        self.sinks: tuple[RecordSink, ...] = (*self._queues, *loggers, self._what_if, self.orders.news)
        self._emit = put_into_all(self.sinks)
        self._pause = TuningPause(self._node)
        self.hook = Hook(model, optimizer, hello=hello, config=config, sinks=self.sinks, clock=SystemClock())
        on_device = model_device(model).type == "cuda"
        self.tracing = TraceRequests(
            hello.job, hello.rank, hook=self.hook, on_device=on_device, directory=config.run_dir
        )
        self.knobs: JobKnobs | None = None
        self.tuner: Tuner | None = None
        self.commands: CommandHandler | None = None
        """Executes users' commands to the tuner."""
        self.rank_monitor: RankMonitor | None = None
        self._window: WindowRank | None = None
        if config.cross_rank_windows and config.windows and config.crew and hello.world_size > 1:
            self._window = WindowRank(hello, self.hook, SystemClock(), on_device=on_device)
        self._forward_boundaries: ForwardBoundaries | None = None
        self._store: StoreThread | None = None

        self.hook.start(self)
        try:
            for sink in self.sinks:
                if isinstance(sink, RecordQueue):
                    sink.serve(self.hook, has_late_records=sink in self._queues)
            if settings.tune.mode != "off":
                self._start_tuner(model, optimizer, trials, settings.tune)
            if config.crew:
                self._start_rank_monitor(config)
        except BaseException:
            self._close_parts("could not start", is_exit=False)
            self._close_sinks(self._queues)
            raise
        self.messages.register("trace", self.tracing.trace)
        self.messages.register("tune", self._tune)

    def _start_tuner(self, model: nn.Module, optimizer: Optimizer, trials: OomSafeTrial, config: TuneConfig) -> None:
        hello, clock = self._hello, SystemClock()
        agreement = choose_agreement(config)
        self.knobs = knobs = JobKnobs(model, optimizer, trials, hello, config, agreement, self.hook.budget.charge)
        reporter = StatusReporter(hello, self._emit, clock)
        policy = orders = None
        if hello.rank == 0:
            policy, orders, self._store = make_policy_and_orders(model, hello, config)
        self.tuner = tuner = Tuner(
            HookedJob(
                model,
                self.hook,
                knobs.ddp.reducer,
                trials.batcher,
                hello,
                knobs.blocks,
                sharded=knobs.sharded,
                at_forward=config.at_forward,
            ),
            config,
            reporter,
            policy=policy,
            orders=orders,
            guards=make_guards(knobs, self._pause),
            actuators=knobs.actuators(),
            agreement=agreement,
            gradients=knobs.ddp.gradient_check(),
            node=self._node,
        )
        trials.join(TunedPeers(agreement, tuner, self._node))
        if orders is not None:
            self.commands = CommandHandler(
                hello,
                config,
                orders,
                tuner,
                reporter,
                reply=self._answer,
                node=self._node,
                memory=partial(read_training_memory, model, optimizer, model_device(model)),
            )
        tuner.start()
        if config.at_forward and (find_ddp(model) or find_fsdp(uncompiled(model))) is not None:
            self._forward_boundaries = ForwardBoundaries(
                model,
                tuner.on_boundary,
                now_ns=clock.monotonic_ns,
                charge=self.hook.budget.charge,
                preemption=self.hook.preemption,
            )
            self._forward_boundaries.open()

    def _start_rank_monitor(self, config: HookConfig) -> None:
        self.rank_monitor = RankMonitor(
            self._hello,
            config,
            self.hook,
            emit=put_into_all([*self.sinks, self._pause]),
            throttled=self._throttling.is_throttled,
            is_told=lambda: self.tuner is not None and self.tuner.agreement.has_left,
            is_pipeline=lambda: self._what_if.is_pipeline,
            window=self._window,
            orders=self.orders,
        )
        self.rank_monitor.start()

    def _tune(self, command: Command, reply: Reply) -> None:
        (tune_is_off if self.commands is None else self.commands.act)(command, reply)

    # --- each step ------------------------------------------------------------------------------

    def on_boundary(self, step: FinishedStep | CountedStep | None) -> None:
        """Call the parts in order: a step is over."""
        if not self.hook.is_alive and self.tuner is not None:  # or the others would wait for its paces forever
            self.tuner.freeze(HOOK_IS_OFF)
        if self.knobs is not None and self.knobs.loss_monitor is not None:
            self.knobs.loss_monitor.boundary(None if step is None else step.step)
        if self._forward_boundaries is not None:
            self._forward_boundaries.step_ended(step)
        elif self.tuner is not None:
            self.tuner.on_boundary(step)
        if self.tracing.is_tracing:
            self.tracing.boundary()
        if self._is_recorded:
            self._record_step(step)
        if self.messages.waiting:
            if self.hook.is_alive:
                self.messages.boundary(self.hook.step, self._answer)
            else:  # no more steps are counted, so the requested one would never come
                self.messages.close(self._answer, HOOK_IS_OFF)

    def on_optimizer(self, optimizer: Optimizer) -> None:
        """Have the learning rate of the knobs follow the script to its next optimizer."""
        if self.knobs is not None and self.knobs.global_batch is not None:
            self.knobs.global_batch.follow(optimizer)

    def wants_boundary(self) -> bool:
        """Return whether any part wants the next boundary: each call costs microseconds, even with nothing to do."""
        is_asked = self.tracing.is_tracing or bool(self.messages.waiting) or self._is_recorded
        return self.tuner is not None or is_asked

    @property
    def _is_recorded(self) -> bool:
        """Whether steps are, or are to be, recorded together with other ranks."""
        return self._window is not None and self._window.recorder.is_pending

    def _record_step(self, step: FinishedStep | CountedStep | None) -> None:
        assert self._window is not None, "only with windows"
        if self.hook.is_alive:
            self._window.recorder.boundary(step.raw.events if isinstance(step, FinishedStep) else ())
        else:
            self._window.recorder.close()

    def holds_windows(self) -> bool:
        """Return whether a command waits, which may ask for a trace, or a window of all ranks is saved for."""
        return bool(self.messages.waiting) or (self._window is not None and self._window.is_saving)

    def on_timed(self, timed: TimedStep, record: StepRecord) -> None:
        """Pass a measured step to the rank monitor and the knobs."""
        if self.knobs is not None:
            self.knobs.note(timed, record)
        if self.rank_monitor is not None:
            self.rank_monitor.note(timed, record)

    # --- the daemon's frames, on another thread ------------------------------------------------------

    def receive_command(self, command: Command) -> Answer | None:
        """Keep a command of the daemon for the next boundary, or pass it on to all ranks."""
        return self.orders.receive(command) if command.action == ALL_RANKS else self.messages.receive(command)

    def _accept(self, command: Command) -> Answer | None:
        """Keep a command that another rank passed on for the next boundary; on any thread."""
        refusal = self.messages.receive(command)
        self.hook.wake()
        return refusal

    def _answer(self, answer: Answer) -> None:
        """Send `answer` to who gave the command: the daemon, or another rank."""
        if not self.orders.take(answer):
            self._outbox.put(answer)

    def receive_news(self, news: News | None) -> None:
        """Record what the daemon reports about device and node."""
        if not isinstance(news, HostSignals):
            self._throttling.record(news)
        if not isinstance(news, Throttling):
            self._node.record(news)

    # --- the end ----------------------------------------------------------------------------------

    def close(self, reason: str, *, is_exit: bool) -> None:
        """End every part, then deliver what is queued; never raises.  May be called again.

        `is_exit`: the process ends, so nothing is trained with the settings that stay.
        """
        self._close_parts(reason, is_exit=is_exit)
        self._close_sinks(self.sinks)

    def _close_sinks(self, sinks: Sequence[RecordSink]) -> None:
        """Deliver what is queued: the queues' threads must end before the interpreter does."""
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        for sink in reversed(sinks):  # the file needs no deadline, but an absent daemon uses up all of it
            _guard(sink, partial(sink.close, max(0.0, deadline - time.monotonic())))

    def _close_parts(self, reason: str, *, is_exit: bool) -> None:
        if (boundaries := self._forward_boundaries) is not None:
            _guard(boundaries, boundaries.close)
        if (tuner := self.tuner) is not None:
            _guard(tuner, lambda: tuner.close(is_exit=is_exit))
        if (knobs := self.knobs) is not None:
            if (batch := knobs.global_batch) is not None:
                _guard(batch, batch.close)
            _guard(knobs.loaders, lambda: knobs.loaders.close(CLOSE_SECONDS_MAX))
        if (store := self._store) is not None:
            _guard(store, store.close)
        if (commands := self.commands) is not None:
            _guard(commands, commands.close)
        if (monitor := self.rank_monitor) is not None:
            _guard(monitor, monitor.close)
        if (window := self._window) is not None:
            _guard(window, window.recorder.close)
        _guard(self.tracing, self.tracing.close)
        _guard(self.messages, lambda: self.messages.close(self._answer))
        _guard(self.orders, self.orders.close)
        _guard(self.hook, lambda: self.hook.close(reason))


def _guard(part: object, close: Callable[[], None]) -> None:
    """Close a part or a user's logger; never raises: training is over, and its end must be the script's own."""
    try:
        close()
    except Exception as error:  # noqa: BLE001  as above
        logger.warning("pacecar could not close %s: %s: %s", type(part).__name__, type(error).__name__, error)
