"""pacecar: performance monitoring and live tuning of distributed PyTorch training.

In a training script:

    with pacecar.attach(model, optimizer) as pacer:
        for batch in pacer.data(loader):
            ...

Importing this package costs next to nothing and does not import torch; `attach` does.  Where what `attach` needs cannot
be imported, it returns a pacer that does nothing and says why: the script trains as without pacecar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pacecar.job.attach import attach
    from pacecar.job.handle import Pacer

__all__ = ["Pacer", "__version__", "attach"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module's attributes are of any type
    if name == "Pacer":
        try:
            from pacecar.job.handle import Pacer
        except Exception:  # noqa: BLE001  a broken install: the script names this class, and goes on
            return UnloadedPacer
        return Pacer
    if name == "attach":
        try:
            from pacecar.job.attach import attach
        except Exception as error:  # noqa: BLE001  a torch that is not understood, a broken install: the job goes on
            return inert_attach(error)
        return attach
    raise AttributeError(f"module 'pacecar' has no attribute {name!r}")


def inert_attach(error: Exception) -> Any:  # noqa: ANN401  a function that takes what `attach` takes
    """Return an `attach` that returns inert pacers, because what the real one needs raised `error` when imported."""
    try:
        from pacecar.job.handle import inert_attach
    except Exception:  # noqa: BLE001  not even the standard library's part of pacecar is there
        return lambda model, optimizer, *, scaler=None, **options: UnloadedPacer(error, scaler)
    return inert_attach(error)


class UnloadedPacer:
    """The inert pacer of a script for which nothing else of pacecar can be imported, `pacecar.job.handle` included.

    It uses built-in names alone, trains the script to the same numbers, and says once, on stderr, why it is inert.
    """

    is_active = has_batcher = False
    advice: tuple[str, ...] = ()

    class knobs:  # noqa: N801  as an attribute of the pacer
        """No knob is turned."""

        epoch = 0
        values: dict[str, Any] = {}  # noqa: RUF012  as `pacecar.records.Knobs`

    def __init__(self, error: Exception, scaler: Any = None) -> None:  # noqa: ANN401  a GradScaler
        self.inert_because = f"could not be loaded: {type(error).__name__}: {error}"
        self._scaler = scaler
        __import__("sys").stderr.write(f"pacecar does not measure this job: {self.inert_because}\n")

    def data(self, loader: Any, *, tune: bool | None = None) -> Any:  # noqa: ANN401
        """Return `loader`."""
        return loader

    def batches(self, loader: Any) -> Any:  # noqa: ANN401
        """Yield the batches of `loader`."""
        return iter(loader)

    def microbatches(self, batch: Any, **options: Any) -> Any:  # noqa: ANN401
        """Yield `batch` whole."""
        return iter((batch,))

    def backward(self, loss: Any, *, weight: float | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        """Backpropagate `loss`, weighted and scaled."""
        weighted = loss if weight is None or weight == 1.0 else loss * weight
        (weighted if self._scaler is None else self._scaler.scale(weighted)).backward(**kwargs)

    def train_batch(self, batch: Any, loss_fn: Any, **options: Any) -> Any:  # noqa: ANN401
        """Run forward and backward of `batch`; return its loss, detached."""
        loss = loss_fn(batch)
        self.backward(loss)
        return loss.detach()

    def loss(self, value: Any) -> None:  # noqa: ANN401
        """Do nothing."""

    def count(self, *, samples: int | None = None, tokens: int | None = None) -> None:
        """Do nothing."""

    def close(self, reason: str = "closed") -> None:
        """Do nothing."""

    def checkpoint(self) -> Any:  # noqa: ANN401  a context
        """Return a context that does nothing."""
        return self

    def waiting(self) -> Any:  # noqa: ANN401  a context
        """Return a context that does nothing."""
        return self

    def __enter__(self) -> Any:  # noqa: ANN401  itself
        return self

    def __exit__(self, *_: object) -> None:
        return None
