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
    from pacecar.handle import Pacer
    from pacecar.pacer import attach

__all__ = ["Pacer", "__version__", "attach"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module's attributes are of any type
    if name == "Pacer":
        from pacecar.handle import Pacer

        return Pacer
    if name == "attach":
        try:
            from pacecar.pacer import attach
        except Exception as error:  # noqa: BLE001  a torch that is not understood, a broken install: the job goes on
            from pacecar.handle import inert_attach

            return inert_attach(error)
        return attach
    raise AttributeError(f"module 'pacecar' has no attribute {name!r}")
