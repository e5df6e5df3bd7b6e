"""pacecar: performance monitoring and live tuning of distributed PyTorch training.

In a training script:

    with pacecar.attach(model, optimizer) as pacer:
        for batch in pacer.data(loader):
            ...

Importing this package needs the standard library only; `attach` imports torch.  If something that `attach` needs cannot
be imported, it returns a pacer that does nothing and says why, and the script trains as it would without pacecar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Imported now and not when a script asks for it: an upgrade may remove pacecar's files while the job runs.
from pacecar.job.handle import Pacer, inert_attach

if TYPE_CHECKING:
    from pacecar.job.attach import attach

__all__ = ["Pacer", "__version__", "attach"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module's attributes are of any type
    if name != "attach":
        raise AttributeError(f"module 'pacecar' has no attribute {name!r}")
    try:
        from pacecar.job.attach import attach
    except Exception as error:  # noqa: BLE001  an unknown torch, a broken install: the job goes on
        return inert_attach(error)
    return attach
