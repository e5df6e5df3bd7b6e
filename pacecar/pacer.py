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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from pacecar.clock import SystemClock
from pacecar.config import Config, ConfigError, HookConfig, TuneConfig, load_config
from pacecar.controller.ddp_buckets import BucketActuator, find_ddp
from pacecar.controller.microbatch import MicroBatchActuator, MicroBatcher
from pacecar.controller.observation import Facts
from pacecar.controller.policy import PacecarPolicy
from pacecar.controller.tuner import Tuner
from pacecar.profiler.books import FinishedStep
from pacecar.profiler.courier import Courier
from pacecar.profiler.crew.crew import Crew, sees_waits_in_forward
from pacecar.profiler.hook import AlreadyAttachedError, Hook
from pacecar.profiler.identity import make_hello, model_device
from pacecar.profiler.orders import Orders
from pacecar.profiler.outbox import Outbox
from pacecar.profiler.runlog import RunLog
from pacecar.profiler.sink import RecordSink
from pacecar.profiler.throttling import ThrottleNews
from pacecar.profiler.tracing import Tracing
from pacecar.profiler.whatif import RankLadder
from pacecar.records import Command, JobHello, JobRecord, Knobs

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
        batcher: MicroBatcher,
        *,
        hook: Hook | None = None,
        tuner: Tuner | None = None,
        sinks: Sequence[RecordSink] = (),
        orders: Orders | None = None,
        tracing: Tracing | None = None,
        crew: Crew | None = None,
        inert_because: str | None = None,
    ) -> None:
        self._batcher = batcher
        self._crew = crew
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
    def knobs(self) -> Knobs:
        """The knobs in force and their epoch; empty values when nothing is tuned."""
        return self._tuner.knobs if self._tuner is not None else Knobs()

    def data(self, loader: Iterable[T]) -> Iterable[T]:
        """Wrap what the training loop iterates over, so that waiting for data is measured and samples are counted.

        The wrapper iterates like `loader`, as often as wanted, and has its length.  Samples are the first dimension of
        the first tensor in a batch unless `count` says otherwise.
        """
        return self._hook.data(loader) if self._hook is not None else loader

    def microbatches(self, batch: T) -> Iterator[T]:
        """Yield `batch` in slices along dimension 0, as large as the micro-batch knob says.

        Under DistributedDataParallel the gradients are synchronized with the last slice only.  Use `backward` on each
        slice's loss: it weighs the slice by its share of the samples, so that the accumulated gradient of a
        mean-reduced loss equals that of the whole batch but for the order of summation.

        Raises:
            ValueError: tensors in the batch disagree about dimension 0.
        """
        return self._batcher.split(batch)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:  # noqa: ANN401  passed on to torch unchanged
        """Backpropagate the mean-reduced `loss` of the current micro-batch with its weight."""
        self._batcher.backward(loss, **kwargs)

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

    def close(self, reason: str = "closed") -> None:
        """Detach: remove every hook, deliver what is queued (for at most two seconds).  Harmless when repeated."""
        if os.getpid() != self._pid:  # a forked child: whatever there is belongs to the parent
            return
        if self._tuner is not None:
            self._tuner.close()
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
    scaler: torch.amp.GradScaler | None = None,
    job: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    config: Config | None = None,
    **options: Any,  # noqa: ANN401  checked against HookConfig and TuneConfig, key by key
) -> Pacer:
    """Measure, and unless `tune` is "off" tune, the job that trains `model` with `optimizer`.

    Call it on every rank, after the process group and DistributedDataParallel are made and before the first step.

    Args:
        model: what the loop calls; DistributedDataParallel or not.
        optimizer: its `step` ends a step.
        tune: "off", "advise" or "exact"; default as configured ([tune] mode, "exact").
        micro_batch: samples per forward and backward to begin with.  Giving it lets the controller tune it, and the
            loop must use `pacer.microbatches` and `pacer.backward`.
        scaler: a GradScaler that `pacer.backward` shall use.
        job: name of the job; default from the launcher's environment.
        run_dir: folder for `rank<r>.jsonl`; default none.
        config: all settings; default from file and environment (see `pacecar.config.load_config`).
        options: any key of [hook] or [tune], for example `exploration_budget=0.02`.

    Returns:
        A Pacer.  It is inert, with the reason in `inert_because` and in the log, when this process already has one,
        when [hook] enabled is false, or when pacecar could not start.

    Raises:
        TypeError: model, optimizer or micro_batch is of a wrong type, or an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    _check_arguments(model, optimizer, micro_batch, options)
    batcher = MicroBatcher(find_ddp(model), micro_batch, scaler=scaler)
    try:
        base = config if config is not None else load_config()
    except ConfigError as error:
        return _inert(batcher, f"configuration: {error}")
    settings = _with_options(
        base, {**options, "mode": tune, "job": job, "run_dir": None if run_dir is None else os.fspath(run_dir)}
    )
    if not settings.hook.enabled:
        return _inert(batcher, "[hook] enabled is false", level=logging.INFO)
    try:
        return _start(model, optimizer, batcher, settings)
    except AlreadyAttachedError as error:
        return _inert(batcher, f"{error}; close that one first if this one shall measure")
    except Exception as error:  # the job comes first: nothing of ours may end it
        logger.debug("attach failed", exc_info=True)
        return _inert(batcher, f"could not start: {type(error).__name__}: {error}")


def _check_arguments(model: object, optimizer: object, micro_batch: object, options: dict[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach(model=...): a torch.nn.Module is needed, not {type(model).__name__}")
    if not callable(getattr(optimizer, "register_step_post_hook", None)):
        raise TypeError(
            f"attach(optimizer=...): a torch.optim.Optimizer is needed, not {type(optimizer).__name__};"
            " for a wrapper pass the optimizer inside it"
        )
    if micro_batch is not None and (not isinstance(micro_batch, int) or isinstance(micro_batch, bool)):
        raise TypeError(f"attach(micro_batch=...): a whole number is needed, not {micro_batch!r}")
    if micro_batch is not None and micro_batch < 1:
        raise ConfigError(f"attach(micro_batch={micro_batch}): at least 1 is needed")
    known = {*HookConfig.__struct_fields__, *TuneConfig.__struct_fields__}
    for key in options:
        if key not in known:
            raise TypeError(f"attach() has no option {key!r}; it has {', '.join(sorted(known))}")


def _with_options(base: Config, options: dict[str, Any]) -> Config:
    given = {key: value for key, value in options.items() if value is not None}
    hook = {key: value for key, value in given.items() if key in HookConfig.__struct_fields__}
    tune = {key: value for key, value in given.items() if key in TuneConfig.__struct_fields__}
    try:
        return msgspec.convert(
            {
                "daemon": msgspec.structs.asdict(base.daemon),
                "hook": msgspec.structs.asdict(base.hook) | hook,
                "tune": msgspec.structs.asdict(base.tune) | tune,
            },
            Config,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"attach({', '.join(f'{k}={v!r}' for k, v in given.items())}): {error}") from error


def _inert(batcher: MicroBatcher, reason: str, *, level: int = logging.WARNING) -> Pacer:
    logger.log(level, "pacecar does not measure this job: %s", reason)
    return Pacer(batcher, inert_because=reason)


def _start(model: nn.Module, optimizer: Optimizer, batcher: MicroBatcher, settings: Config) -> Pacer:
    clock = SystemClock()
    hello = make_hello(model, job=settings.hook.job)
    throttling = ThrottleNews(hello)
    orders = Orders(hello.job, hello.rank, reply=lambda answer: outbox.put(answer))

    def obey(command: Command) -> None:
        orders.obey(command)
        hook.wake()

    outbox = Outbox(settings.hook.socket, hello, obey=obey, heed=throttling.heed)
    couriers: list[Courier] = [outbox]
    if settings.hook.run_dir is not None:
        couriers.append(RunLog(settings.hook.run_dir, hello))

    def emit(record: JobRecord) -> None:
        for courier in couriers:
            courier.put(record)

    sinks: list[RecordSink] = [*couriers, RankLadder(emit, is_job=hello.world_size == 1)]
    tuner: Tuner | None = None

    def on_boundary(step: FinishedStep | None) -> None:
        if tuner is not None:
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
    hook.wants_boundary = lambda: tuner is not None or tracing.is_tracing or bool(orders.waiting)
    hook.windows.is_held = lambda: bool(orders.waiting)
    orders.register("trace", tracing.trace)
    for courier in couriers:
        courier.before_look, courier.charge = hook.look, hook.charge_records
    hook.start()
    try:
        if settings.tune.mode != "off":
            tuner = _make_tuner(model, hook, batcher, hello, settings.tune, sinks)
            tuner.start()
        crew = _start_crew(hook, hello, settings.hook, sinks, throttling) if settings.hook.crew else None
    except BaseException:
        hook.close("could not start")
        raise
    pacer = Pacer(batcher, hook=hook, tuner=tuner, sinks=sinks, crew=crew, orders=orders, tracing=tracing)
    atexit.register(pacer.close)
    return pacer


def _start_crew(
    hook: Hook, hello: JobHello, config: HookConfig, sinks: list[RecordSink], throttling: ThrottleNews
) -> Crew:
    def emit(record: JobRecord) -> None:
        for sink in sinks:
            sink.put(record)

    def waits_in_forward() -> bool:
        return sees_waits_in_forward(hook.calibrations.find(hook.knobs))

    crew = Crew(
        hello,
        config,
        hook,
        emit=emit,
        throttled=throttling.is_throttled,
        charge=hook.charge,
        waits_in_forward=waits_in_forward,
    )
    hook.on_timed = crew.note
    crew.start()
    return crew


def _make_tuner(
    model: nn.Module,
    hook: Hook,
    batcher: MicroBatcher,
    hello: JobHello,
    config: TuneConfig,
    sinks: list[RecordSink],
) -> Tuner:
    buckets = BucketActuator(model, config)
    microbatch = MicroBatchActuator(model, batcher, config)

    def facts() -> Facts:
        return Facts(
            job=hello.job,
            world_size=hello.world_size,
            gradient_bytes=buckets.gradient_bytes(),
            batch_samples=batcher.batch_samples,
        )

    def emit(record: JobRecord) -> None:
        for sink in sinks:
            sink.put(record)

    def set_knobs(knobs: Knobs) -> None:
        hook.knobs = knobs

    return Tuner(
        hello=hello,
        config=config,
        policy=PacecarPolicy(config) if hello.rank == 0 else None,
        actuators=[actuator for actuator in (microbatch, buckets) if actuator.knob in config.knobs],
        facts=facts,
        emit=emit,
        set_knobs=set_knobs,
        request_window=hook.request_window,
        clock=SystemClock(),
    )
