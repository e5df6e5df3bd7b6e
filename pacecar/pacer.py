"""How does a training script use pacecar?  One call and one object.

`attach` ties the rooms together inside the training process: the hook that measures, the sinks that carry records
away, and the tuner that turns knobs.  What the caller typed wrongly is an error at once, where he sees it.  What is
wrong with the world (a bad configuration file, a missing daemon, a second hook, a torch that is not understood) never
is: it is logged once, and the pacer that comes back is *inert* - `data`, `microbatches` and `backward` still do their
arithmetic, so the same script trains to the same numbers.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import torch
from msgspec import structs
from torch import nn
from torch.optim import Optimizer

from pacecar.clock import SystemClock
from pacecar.config import Config, ConfigError, HookConfig, load_config
from pacecar.controller.boundaries import ForwardBoundaries
from pacecar.controller.cuts import Given
from pacecar.controller.ddp_knobs import find_ddp
from pacecar.controller.desk import Desk, open_desk, tune_is_off
from pacecar.controller.global_batch import GlobalBatchActuator, open_global_batch
from pacecar.controller.holds import Holds
from pacecar.controller.loader_knobs import LoaderKnobs
from pacecar.controller.microbatch import MicroBatcher
from pacecar.controller.rescue import Rescue
from pacecar.controller.tuner import Tuner
from pacecar.controller.vigil import Vigil
from pacecar.options import check_arguments, with_options
from pacecar.profiler.books import FinishedStep
from pacecar.profiler.courier import Courier
from pacecar.profiler.crew.crew import Crew, sees_waits_in_forward
from pacecar.profiler.hook import AlreadyAttachedError, Hook
from pacecar.profiler.identity import make_hello, model_device
from pacecar.profiler.orders import Orders
from pacecar.profiler.outbox import News, Outbox
from pacecar.profiler.runlog import RunLog
from pacecar.profiler.sink import RecordSink
from pacecar.profiler.throttling import ThrottleNews
from pacecar.profiler.tracing import Tracing
from pacecar.profiler.whatif import RankLadder
from pacecar.records import Command, JobHello, JobRecord, Knobs, Throttling
from pacecar.signals import HostSignals
from pacecar.tuning import make_node, make_tuner, make_vigil

__all__ = ["Pacer", "attach"]

logger = logging.getLogger("pacecar")

CLOSE_SECONDS_MAX = 2.0
"""How long closing may wait for queued records: the end of a job is on nobody's step path, but it is waited for."""

T = TypeVar("T")


class Pacer:
    """What `attach` returns: the script's handle on the hook and the tuner.  Also a context manager.

    Not thread-safe: call it from the thread that trains.
    """

    def __init__(
        self,
        rescue: Rescue,
        *,
        hook: Hook | None = None,
        tuner: Tuner | None = None,
        sinks: Sequence[RecordSink] = (),
        orders: Orders | None = None,
        tracing: Tracing | None = None,
        crew: Crew | None = None,
        vigil: Vigil | None = None,
        desk: Desk | None = None,
        inert_because: str | None = None,
    ) -> None:
        self._desk = desk
        self._boundaries: ForwardBoundaries | None = None
        self._loaders: LoaderKnobs | None = None
        self._global_batch: GlobalBatchActuator | None = None
        self._batcher = rescue.batcher
        self._rescue = rescue
        self._crew = crew
        self._vigil = vigil
        self._orders = orders
        self._tracing = tracing
        self._sinks = tuple(sinks)
        self._hook = hook
        self._tuner = tuner
        self.inert_because = inert_because
        self._pid = os.getpid()

    @property
    def is_active(self) -> bool:
        """Whether the hook measures; False for an inert pacer, after `close` and after the hook gave up."""
        return self._hook is not None and self._hook.is_alive

    @property
    def batcher(self) -> MicroBatcher:
        """What holds the micro-batch in force; for adapters, whose library runs forward and backward itself."""
        return self._batcher

    @property
    def knobs(self) -> Knobs:
        """The knobs in force and their epoch; empty values when nothing is tuned."""
        return self._tuner.knobs if self._tuner is not None else Knobs()

    @property
    def advice(self) -> tuple[str, ...]:
        """What would be turned if it might be, and what only a restart can change; on rank 0, empty elsewhere."""
        return self._desk.advice() if self._desk is not None else ()

    def data(self, loader: Iterable[T], *, tune: bool | None = None) -> Iterable[T]:
        """Wrap what the training loop iterates over, so that waiting for data is measured and samples are counted.

        The wrapper iterates like `loader`, as often as wanted, and has its length.  Samples are the first dimension of
        the first tensor in a batch unless `count` says otherwise.

        The workers of the first loader are tuned, if it is torch's; `tune=True` names another, False rules one out.
        """
        if self._loaders is not None:
            loader = self._loaders.take(loader, tune)
        return self._hook.data(loader) if self._hook is not None else loader

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield what makes one optimizer update: a batch of `loader`, or several put together along dimension 0.

        Only mode "adaptive" with the knob `batch_samples` puts any together.  Use it around `data` where both are
        wanted, `pacer.batches(pacer.data(loader))`, and cut what it yields by `microbatches` or `train_batch`.

        Raises:
            ValueError: batches that are to be put together differ in more than dimension 0.
        """
        return iter(loader) if self._global_batch is None else self._global_batch.grouper.batches(loader)

    def microbatches(
        self, batch: T, *, tokens: Given | None = None, count: Given | None = None, trim: bool = False
    ) -> Iterator[T]:
        """Yield `batch` in slices along dimension 0, as large as the micro-batch knob says.

        Under DistributedDataParallel the gradients are synchronized with the last slice only.  Use `backward` on each
        slice's loss: it weighs the slice by its share of the samples, so that the accumulated gradient of a
        mean-reduced loss equals that of the whole batch but for the order of summation.

        Args:
            batch: tensors in any nest of tuples, lists and mappings.
            tokens: a mask (samples, positions), or each sample's length; with `attach(micro_tokens=...)` a slice takes
                at most so many tokens, padding included.
            count: for a loss that is a mean over tokens: a mask of what it is a mean over, such as
                `labels != -100`, or each sample's number; slices without any are left out.
            trim: drop the columns that a whole slice pads, from tensors whose dimension 1 is as wide as the mask.

        Raises:
            ValueError: tensors in the batch disagree about dimension 0, or `tokens` or `count` do not belong to it.
        """
        return self._batcher.split(batch, tokens=tokens, count=count, trim=trim)

    def backward(self, loss: torch.Tensor, *, weight: float | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        """Backpropagate the mean-reduced `loss` of the current micro-batch with its weight, or with `weight`.

        A loss that is a sum has the weight 1.  Other keywords go to torch unchanged.
        """
        if self._vigil is not None:
            self._vigil.loss(loss, weight=self._batcher.weight if weight is None else weight)
        self._batcher.backward(loss, weight=weight, **kwargs)

    def train_batch(
        self,
        batch: T,
        loss_fn: Callable[[T], torch.Tensor],
        *,
        tokens: Given | None = None,
        count: Given | None = None,
        trim: bool = False,
    ) -> torch.Tensor:
        """Run forward and backward of `batch` in micro-batches; return the loss of the whole batch, detached.

        In place of the loop over `microbatches`: `loss_fn(slice)` returns the slice's mean loss, everything else is
        as there.  A micro-batch that does not fit into memory then costs no step: a larger one runs first
        where it can do no harm, and is barred on all ranks if it fails on one.

        Every rank calls it equally often between two optimizer steps, and `loss_fn` has no collectives of its own.
        """
        loss = self._rescue.train_batch(batch, loss_fn, tokens=tokens, count=count, trim=trim)
        if self._vigil is not None:
            self._vigil.loss(loss)
        return loss

    def loss(self, value: torch.Tensor | float) -> None:
        """Say a loss of the current step, where `backward` is not used; several in one step add up.

        Mode "lossy" watches it: compression of gradients is taken back when the loss leaves its band.  A tensor is read
        some steps later and never waited for.
        """
        if self._vigil is not None:
            self._vigil.loss(value)

    def count(self, *, samples: int | None = None, tokens: int | None = None) -> None:
        """Say how many samples or tokens this rank trains on in the current step; adds up until the step ends."""
        if self._hook is not None:
            self._hook.count(samples=samples, tokens=tokens)

    def checkpoint(self) -> AbstractContextManager[None]:
        """Return a context whose time is charged to `checkpoint`: put the saving of a checkpoint into it.

        It may stand anywhere in the loop, before the first step and after the last.  Of an asynchronous save it
        holds what the loop waits for.
        """
        return self._hook.checkpoint() if self._hook is not None else nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context whose time is charged to `data_wait`, for loops whose loader cannot go through `data`."""
        return self._hook.waiting() if self._hook is not None else nullcontext()

    def close(self, reason: str = "closed") -> None:
        """Detach: remove every hook, deliver what is queued (for at most two seconds).  Harmless when repeated."""
        if os.getpid() != self._pid:  # a forked child: whatever there is belongs to the parent
            return
        if self._boundaries is not None:
            self._boundaries.close()
        if self._tuner is not None:
            self._tuner.close()
        if self._global_batch is not None:
            self._global_batch.close()
        if self._loaders is not None:
            self._loaders.close(CLOSE_SECONDS_MAX)
        if self._desk is not None:
            self._desk.close()
        if self._crew is not None:
            self._crew.close()
        if self._tracing is not None:
            self._tracing.close()
        if self._orders is not None:
            self._orders.close()
        if self._hook is not None:
            self._hook.close(reason)
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        # Their threads must not live into the interpreter's own end.  The file comes first: it needs no deadline, while
        # an absent daemon uses up all of it.
        for sink in reversed(self._sinks):
            sink.close(max(0.0, deadline - time.monotonic()))
        atexit.unregister(self.close)

    def __enter__(self) -> Pacer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("finished" if kind is None else f"failed: {kind.__name__}")


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    tune: str | None = None,
    micro_batch: int | None = None,
    micro_tokens: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    job: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    config: Config | None = None,
    loggers: Sequence[RecordSink] = (),
    **options: Any,  # noqa: ANN401  checked against HookConfig and TuneConfig, key by key
) -> Pacer:
    """Measure, and unless `tune` is "off" tune, the job that trains `model` with `optimizer`.

    Call it on every rank, after the process group and DistributedDataParallel are made and before the first step.

    Args:
        model: what the loop calls; DistributedDataParallel or not.
        optimizer: its `step` ends a step.
        tune: "off", "advise", "exact", "lossy" or "adaptive"; default as configured ([tune] mode, "exact").
        micro_batch: samples per forward and backward to begin with.  Giving it lets the controller tune it, and the
            loop must use `pacer.microbatches` and `pacer.backward`, or `pacer.train_batch`.
        micro_tokens: the same in padded tokens, for loops that say `tokens`; it is tuned in place of `micro_batch`.
        scaler: a GradScaler that `pacer.backward` shall use.
        job: name of the job; default from the launcher's environment.
        run_dir: folder for `rank<r>.jsonl`; default none.
        config: all settings; default from file and environment (see `pacecar.config.load_config`).
        loggers: where records go besides, see `pacecar.adapters.loggers`; `close` closes them.
        options: any key of [hook] or [tune], for example `exploration_budget=0.02`.

    Returns:
        A Pacer.  It is inert, with the reason in `inert_because` and in the log, when this process already has one,
        when [hook] enabled is false, or when pacecar could not start.

    Raises:
        TypeError: model, optimizer, micro_batch or micro_tokens is of a wrong type, or an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    check_arguments(model, optimizer, {"micro_batch": micro_batch, "micro_tokens": micro_tokens}, options)
    batcher = MicroBatcher(find_ddp(model), micro_batch, micro_tokens=micro_tokens, scaler=scaler)
    rescue = Rescue(model, batcher)
    try:
        base = config if config is not None else load_config()
    except ConfigError as error:
        return _inert(rescue, f"configuration: {error}")
    settings = with_options(
        base, {**options, "mode": tune, "job": job, "run_dir": None if run_dir is None else os.fspath(run_dir)}
    )
    if not settings.hook.enabled:
        return _inert(rescue, "[hook] enabled is false", level=logging.INFO)
    try:
        return _start(model, optimizer, rescue, settings, loggers)
    except AlreadyAttachedError as error:
        return _inert(rescue, f"{error}; close that one first if this one shall measure")
    except Exception as error:  # the job comes first: nothing of ours may end it
        logger.debug("attach failed", exc_info=True)
        return _inert(rescue, f"could not start: {type(error).__name__}: {error}")


def _inert(rescue: Rescue, reason: str, *, level: int = logging.WARNING) -> Pacer:
    logger.log(level, "pacecar does not measure this job: %s", reason)
    return Pacer(rescue, inert_because=reason)


def _start(
    model: nn.Module, optimizer: Optimizer, rescue: Rescue, settings: Config, loggers: Sequence[RecordSink]
) -> Pacer:
    clock = SystemClock()
    hello = make_hello(model, job=settings.hook.job)
    hello = structs.replace(hello, hears_signals=settings.tune.mode != "off")
    throttling, node = ThrottleNews(hello), make_node(model, hello)
    orders = Orders(hello.job, hello.rank, reply=lambda answer: outbox.put(answer))

    def obey(command: Command) -> None:
        orders.obey(command)
        hook.wake()

    def heed(news: News | None) -> None:
        if not isinstance(news, HostSignals):
            throttling.heed(news)
        if not isinstance(news, Throttling):
            node.heed(news)

    outbox = Outbox(settings.hook.socket, hello, obey=obey, heed=heed)
    couriers: list[Courier] = [outbox]
    if settings.hook.run_dir is not None:
        couriers.append(RunLog(settings.hook.run_dir, hello))

    def emit(record: JobRecord) -> None:
        for courier in couriers:
            courier.put(record)

    sinks: list[RecordSink] = [*couriers, *loggers, RankLadder(emit, is_job=hello.world_size == 1)]
    tuner: Tuner | None = None
    desk: Desk | None = None
    loaders: LoaderKnobs | None = None
    global_batch: GlobalBatchActuator | None = None
    boundaries: ForwardBoundaries | None = None
    vigil = make_vigil(model, hello, settings.tune)

    def on_boundary(step: FinishedStep | None) -> None:
        if vigil is not None:
            vigil.boundary(None if step is None else step.step)
        if boundaries is not None:
            boundaries.step_ended(step)
        elif tuner is not None:
            tuner.on_boundary(step)
        if tracing.is_tracing:
            tracing.boundary()
        if orders.waiting:
            if hook.is_alive:
                orders.boundary(hook.step)
            else:  # it counts no steps any more, so theirs would never come
                orders.close("pacecar's hook has turned itself off in this rank; its log says why")

    def mark(is_traced: bool) -> None:
        hook.is_traced = is_traced

    hook = Hook(
        model,
        optimizer,
        hello=hello,
        config=settings.hook,
        sinks=sinks,
        on_boundary=on_boundary,
        clock=clock,
    )
    tracing = Tracing(
        hello.job,
        hello.rank,
        on_device=model_device(model).type == "cuda",
        directory=settings.hook.run_dir,
        step=lambda: hook.step,
        mark=mark,
        windows=hook.windows,
    )
    # At a plain boundary a call costs microseconds, also one that finds nothing to do.
    hook.wants_boundary = lambda: tuner is not None or vigil is not None or tracing.is_tracing or bool(orders.waiting)
    hook.windows.is_held = lambda: bool(orders.waiting)
    orders.register("trace", tracing.trace)
    for courier in couriers:
        courier.before_look = hook.look
    for courier in [*couriers, *(logger for logger in loggers if isinstance(logger, Courier))]:
        courier.charge = hook.charge_records
    hook.start()
    holds = Holds(node)
    try:
        if settings.tune.mode != "off":
            if hello.rank == 0:
                desk = open_desk(model, hello, settings.tune, reply=outbox.put, emit=_emitter(sinks))
            loaders = LoaderKnobs(settings.tune)
            global_batch = open_global_batch(optimizer, rescue.batcher, settings.tune, hello.world_size)
            tuner = make_tuner(
                model, hook, rescue, loaders, global_batch, hello, settings.tune, _emitter(sinks), vigil, desk, holds
            )
            tuner.start()
            if settings.tune.at_forward and find_ddp(model) is not None:
                boundaries = ForwardBoundaries(model, tuner.on_boundary, now_ns=clock.monotonic_ns, charge=hook.charge)
                boundaries.open()
        crew = _start_crew(hook, hello, settings.hook, [*sinks, holds], throttling) if settings.hook.crew else None
    except BaseException:
        if desk is not None:
            desk.close()
        hook.close("could not start")
        raise
    orders.register("tune", tune_is_off if desk is None else desk.act)
    pacer = Pacer(
        rescue, hook=hook, tuner=tuner, sinks=sinks, crew=crew, orders=orders, tracing=tracing, vigil=vigil, desk=desk
    )
    pacer._loaders, pacer._global_batch, pacer._boundaries = loaders, global_batch, boundaries
    atexit.register(pacer.close)
    return pacer


def _emitter(sinks: list[RecordSink]) -> Callable[[JobRecord], None]:
    def emit(record: JobRecord) -> None:
        for sink in sinks:
            sink.put(record)

    return emit


def _start_crew(
    hook: Hook, hello: JobHello, config: HookConfig, sinks: list[RecordSink], throttling: ThrottleNews
) -> Crew:
    def waits_in_forward() -> bool:
        return sees_waits_in_forward(hook.calibrations.find(hook.knobs))

    crew = Crew(
        hello,
        config,
        hook,
        emit=_emitter(sinks),
        throttled=throttling.is_throttled,
        charge=hook.charge,
        waits_in_forward=waits_in_forward,
    )
    hook.on_timed = crew.note
    crew.start()
    return crew
