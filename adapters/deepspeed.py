"""Measures and tunes a DeepSpeed engine: `attach` takes the engine that `deepspeed.initialize` returned.

    engine, _, loader, _ = deepspeed.initialize(model=net, model_parameters=..., config=config)
    with attach(engine, tune="exact") as pacer:
        for batch in pacer.data(loader):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

A step must not end where torch's optimizer inside ends one: ZeRO calls it once for each group of parameters, and
gathers the new parameters afterwards.  So a step ends at the `engine.step()` that closes an update, and the optimizer's
time is that of the whole call.  To see it, `step` of this engine is wrapped while pacecar is attached; for an unknown
class of engine it is `_take_model_step`, which all of them call once an update.

`controller/knobs/deepspeed_zero` knows which of the engine's settings can change while it runs; the rest is advice, in
`pacer.advice`.  The micro-batch stays: the engine counts its micro-batches, and the loop brings them.

Engines with a loop of their own (pipelines) and subclasses are only measured; one line says so.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from .guarded_imports import MethodReplacement, attach_for, checked, replace_method, say

try:
    from deepspeed.runtime.engine import DeepSpeedEngine
except ImportError as error:
    raise ImportError("pacecar.adapters.deepspeed needs deepspeed: pip install 'deepspeed>=0.19'") from error

if TYPE_CHECKING:
    from pacecar.job.handle import Pacer

__all__ = ["DeepSpeedPacer", "attach"]


class _EngineOptimizer(Optimizer):
    """An optimizer that updates nothing: its step hooks run around the engine's call that ends a step."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401  DeepSpeed has no types
        parameters = [p for p in engine.module.parameters() if p.requires_grad]
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401  torch's signature
        """Raise: the engine steps."""
        raise RuntimeError("the engine's step() is the one to call")

    def around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the engine's
        """Run `call` between this optimizer's own hooks; torch's global ones see the optimizers inside."""
        for hook in list(self._optimizer_step_pre_hooks.values()):
            hook(self, (), {})
        result = call(*args, **kwargs)
        for post_hook in list(self._optimizer_step_post_hooks.values()):
            post_hook(self, (), {})
        return result


class _StepWrapper:
    """Wraps the method of one engine that ends an update."""

    def __init__(self, engine: Any, stepper: _EngineOptimizer, *, is_known: bool) -> None:  # noqa: ANN401  DeepSpeed has no types
        self._engine = engine
        self._stepper = stepper
        self._is_known = is_known
        self._name = "step" if is_known else "_take_model_step"
        self._theirs: Callable[..., Any] | None = getattr(engine, self._name, None)
        self._replacement: MethodReplacement | None = None

    def install(self) -> bool:
        """Wrap the method; return whether there was one."""
        if self._theirs is not None:
            self._replacement = replace_method(self._engine, self._name, self.step)
        return self._replacement is not None

    def remove(self) -> None:
        if self._replacement is not None:
            self._replacement.remove()

    def step(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the engine's
        """Step as the engine does; where that closes an update, a step of the job ends."""
        assert self._theirs is not None, "installed only where there is one"
        if self._is_known and not self._engine.is_gradient_accumulation_boundary():
            return self._theirs(*args, **kwargs)
        return self._stepper.around(self._theirs, *args, **kwargs)


class DeepSpeedPacer:
    """What `attach` returns: everything of `pacecar.Pacer` except its micro-batches."""

    def __init__(self, pacer: Pacer, stepping: _StepWrapper) -> None:
        self.pacer = pacer
        self._stepping = stepping

    def __reduce__(self) -> tuple[Any, ...]:
        return self.pacer.__reduce__()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever Pacer has
        return getattr(self.pacer, name)

    def close(self, reason: str = "closed") -> None:
        """Detach, and restore the engine's method.  May be called again."""
        self._stepping.remove()
        self.pacer.close(reason)

    def __enter__(self) -> DeepSpeedPacer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stepping.remove()
        self.pacer.__exit__(kind, error, trace)


def attach(engine: Any, *, tune: str | None = None, **options: Any) -> DeepSpeedPacer:  # noqa: ANN401
    """Measure, and unless `tune` is "off" tune, the job that `engine` trains.

    Call it on every rank after `deepspeed.initialize` and before the first step.  `options` are those of
    `pacecar.attach`; one log line names what cannot be tuned.

    Raises:
        TypeError: `engine` is not a DeepSpeedEngine, or an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"attach(engine=...): what deepspeed.initialize returned first, not {type(engine).__name__}")
    is_known = type(engine) is DeepSpeedEngine
    reason = None if is_known else f"the engine is a {type(engine).__name__}"
    stepper = _EngineOptimizer(engine)
    checked(tune, options)
    pacer = attach_for("deepspeed", engine, stepper, tune=tune, options=options, untuned_because=reason)
    if pacer.has_batcher:
        pacer.batcher.refused = "DeepSpeed's engine counts its micro-batches itself"
    stepping = _StepWrapper(engine, stepper, is_known=is_known)
    if pacer.is_active and not stepping.install():
        say("this training is not measured: its engine has no _take_model_step, or the script has replaced its step")
        pacer.close("nothing to measure")
    return DeepSpeedPacer(pacer, stepping)
