"""Takes the norm of each of many tensors, or adds to each, in one call if torch has one for it.

Torch's own optimizers use these calls; it has no public ones.  One by one, it is a kernel for each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pacecar.torch_internals import find

__all__ = ["add_each", "norms_of"]


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each of `tensors`."""
    together = find("torch._foreach_norm")
    if together is None:
        return [torch.linalg.vector_norm(tensor) for tensor in tensors]
    return list(together(list(tensors)))


def add_each(tensors: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    """Add each of `more` to the tensor at the same index."""
    together = find("torch._foreach_add_")
    if together is not None:
        together(list(tensors), list(more))
        return
    for tensor, other in zip(tensors, more, strict=True):
        tensor.add_(other)
