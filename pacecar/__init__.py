"""pacecar: performance monitoring and live tuning of distributed PyTorch training.

In a training script:

    with pacecar.attach(model, optimizer) as pacer:
        for batch in pacer.data(loader):
            ...

Importing this package costs next to nothing and does not import torch; `attach` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pacecar.pacer import Pacer, attach

__all__ = ["Pacer", "__version__", "attach"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module's attributes are of any type
    if name in {"attach", "Pacer"}:
        from pacecar import pacer

        return getattr(pacer, name)
    raise AttributeError(f"module 'pacecar' has no attribute {name!r}")
