"""Imports what the adapters share.  Without a part of pacecar, the stand-ins here attach an inert pacer instead.

A broken install must not end a job, so adapters import these names from this module only.  None of the others is used
with an inert pacer that has no `batcher`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pacecar.job.handle import inert_attach

__all__ = [
    "MethodReplacement",
    "Regrouper",
    "attach_for",
    "checked",
    "differs",
    "find_ddp",
    "replace_method",
    "say",
]

try:
    from pacecar.profiler.ranks.data_parallel import find_ddp

    from .loss_additivity import differs
    from .method_descriptors import MethodReplacement, replace_method
    from .regroup import Regrouper
    from .shared_attach import attach_for, checked, say
except Exception as error:  # noqa: BLE001  whatever is missing, the script trains on
    _attach = inert_attach(error)
    if not TYPE_CHECKING:
        MethodReplacement = Regrouper = differs = replace_method = None

        def attach_for(library: str, model: object, optimizer: object, *, options: dict[str, Any], **_: object) -> Any:  # noqa: ANN401
            """Return an inert pacer; log why, once."""
            return _attach(model, optimizer, **options)

        def checked(tune: str | None, options: dict[str, Any]) -> dict[str, Any]:
            """Return `options`: only what is missing could check them."""
            return options

        def find_ddp(model: object) -> object:
            """Return `model`: whether it is under DDP cannot be told."""
            return model

        def say(text: str) -> None:
            """Do nothing: `attach_for` logs why nothing is measured."""
