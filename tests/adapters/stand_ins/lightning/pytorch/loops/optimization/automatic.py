"""Forward, zero_grad, backward and the optimizer's step of one batch, as Lightning 2.6 orders them in a closure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass
class ClosureResult:
    closure_loss: Tensor | None
    loss: Tensor | None = field(init=False, default=None)
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loss = None if self.closure_loss is None else self.closure_loss.detach().clone()


class Closure:
    def __init__(self, step_fn: Any, backward_fn: Any = None, zero_grad_fn: Any = None) -> None:
        self._step_fn, self._backward_fn, self._zero_grad_fn = step_fn, backward_fn, zero_grad_fn
        self._result: ClosureResult | None = None

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        output: ClosureResult = self._step_fn()
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        self._backward_fn(output.closure_loss)
        return output

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self._result = self.closure(*args, **kwargs)
        return self._result.loss

    def consume_result(self) -> ClosureResult:
        result, self._result = self._result, None
        assert result is not None
        return result


class AutomaticOptimization:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def run(self, optimizer: torch.optim.Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        closure = self._make_closure(kwargs, optimizer, batch_idx)
        if self.trainer.fit_loop._should_accumulate():
            with self.trainer.strategy.model.no_sync():
                closure()
        else:
            optimizer.step(closure)  # type: ignore[arg-type]
            self.trainer.global_step += 1
            for scheduler in self.trainer.schedulers:
                scheduler.step()
        result = closure.consume_result()
        return {"loss": result.loss, **result.extra}

    def _make_closure(self, kwargs: Any, optimizer: torch.optim.Optimizer, batch_idx: int) -> Closure:
        is_first = batch_idx % self.trainer.accumulate_grad_batches == 0
        zero_grad: Callable[[], None] | None = optimizer.zero_grad if is_first else None
        return Closure(partial(self._training_step, kwargs), lambda loss: loss.backward(), zero_grad)

    def _training_step(self, kwargs: Any) -> ClosureResult:
        loss = self.trainer.strategy.training_step(*kwargs.values())
        return ClosureResult(loss / self.trainer.accumulate_grad_batches)
