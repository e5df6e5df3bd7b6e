"""Computes the FLOPs and the least bytes of a matmul, attention or convolution from the inputs of its call.

The counts are those of `torch.utils.flop_counter`, a multiply-add as two, with one difference: for causal attention
torch counts the whole square of scores, but kernels skip the masked ones.  That could exceed the device's peak, so only
unmasked pairs count here.  A backward counts all that its kernel does, including scores that it recomputes.

Bytes are the minimum: each input read once, each output written once.

Pure: inputs in, numbers out; None if the inputs are incomplete (strides and padding are in "Concrete Inputs", which
torch writes since 1.13).  Left out: operators that call others for this work, because those are counted, and attention
over packed sequences, because no trace has their lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..origins.call_inputs import CallInputs, Tensor

__all__ = ["OPERATIONS", "Operation", "OperationWork"]

DIMENSIONS_MIN = 3
"""A convolution's input has at least a batch, channels and one spatial dimension."""

HEADED = 4
"""Dimensions of queries, keys and values: batch, heads, sequence and head size."""


class OperationWork(NamedTuple):
    """The work of one call: `flops` and `bytes`, each None if unknown, and the name of the formula."""

    flops: int | None
    bytes: int | None
    formula: str


class Operation(NamedTuple):
    """An operator with a formula: its `kind`, the place of the tensor whose type is the arithmetic, the formula."""

    kind: str
    typed: int
    work: Callable[[CallInputs], OperationWork | None]


def _size(*shapes_of: tuple[tuple[int, ...], Tensor | None]) -> int | None:
    """Return the bytes of tensors with these shapes and the element sizes of those beside them."""
    sizes = [
        None if like is None or like.element_bytes is None else math.prod(shape) * like.element_bytes
        for shape, like in shapes_of
    ]
    return None if any(size is None for size in sizes) else sum(size for size in sizes if size is not None)


def _matmul(inputs: CallInputs, *, left: int, right: int, added: int | None = None) -> OperationWork | None:
    a, b = inputs.tensor(left), inputs.tensor(right)
    if a is None or b is None or len(a.shape) != len(b.shape) or len(a.shape) not in (2, 3):
        return None
    *batch, m, k = a.shape
    if list(b.shape[:-2]) != batch or b.shape[-2] != k:
        return None
    out = (*batch, m, b.shape[-1])
    plus = inputs.tensor(added) if added is not None else None
    extra = [(plus.shape, plus)] if plus is not None else []
    flops = 2 * math.prod(batch) * m * k * b.shape[-1]
    return OperationWork(flops, _size((a.shape, a), (b.shape, b), (out, a), *extra), "2 m n k")


def _pairs(queries: int, keys: int, *, is_causal: bool, at_end: bool) -> int:
    """Return how many scores are not masked; for unequal lengths, `at_end` aligns the last query with the last key."""
    if not is_causal:
        return queries * keys
    shift = keys - queries if at_end else 0
    first, last = 1 + shift, queries + shift  # how many keys the first and the last query see, at most
    low, high = max(first, 0), min(last, keys)
    rising = (low + high) * (high - low + 1) // 2 if high >= low else 0
    return rising + max(last - max(keys, first - 1), 0) * keys


def _attention(
    inputs: CallInputs, *, first: int, causal: int, is_backward: bool = False, is_flash: bool = False
) -> OperationWork | None:
    """Return the work of attention whose queries, keys and values begin at `first`.

    `is_flash` says that sequences come before heads and that causal masks are aligned at the end, as in flash-attn.
    """
    q, k, v = (inputs.tensor(first + place) for place in range(3))
    if q is None or k is None or v is None or not len(q.shape) == len(k.shape) == len(v.shape) == HEADED:
        return None
    heads, length = (2, 1) if is_flash else (1, 2)
    flags = inputs.flags(causal)
    moved = [(q.shape, q), (k.shape, k), (v.shape, v)]
    out = (*q.shape[:3], v.shape[3])
    size = _size(*moved, (out, q)) if not is_backward else _size(*moved, *moved, (out, q), (out, q))
    name = "attention backward: 2 pairs (3 d + 2 d_v)" if is_backward else "attention: 2 pairs (d + d_v)"
    if flags is None:
        return OperationWork(None, size, name)
    pairs = _pairs(q.shape[length], k.shape[length], is_causal=flags[0], at_end=is_flash)
    each = 3 * q.shape[3] + 2 * v.shape[3] if is_backward else q.shape[3] + v.shape[3]
    flops = 2 * q.shape[0] * q.shape[heads] * pairs * each
    return OperationWork(flops, size, f"{name}{', causal' if flags[0] else ''}")


def _convolution(inputs: CallInputs) -> OperationWork | None:
    x, weight = inputs.tensor(0), inputs.tensor(1)
    name = "convolution: 2 n c_out h w (c_in / groups) k"
    if x is None or weight is None or len(x.shape) != len(weight.shape) or len(x.shape) < DIMENSIONS_MIN:
        return None
    space, kernel = x.shape[2:], weight.shape[2:]
    stride, padding, dilation, more = (_spread(inputs.integers(place), len(space)) for place in (3, 4, 5, 7))
    transposed, groups = inputs.flags(6), inputs.integers(8)
    if stride is None or padding is None or dilation is None or transposed is None or groups is None:
        return OperationWork(None, None, name)
    bounds = zip(space, kernel, stride, padding, dilation, more or (0,) * len(space), strict=True)
    if transposed[0]:
        after = tuple((n - 1) * s - 2 * p + d * (k - 1) + extra + 1 for n, k, s, p, d, extra in bounds)
        out, places = (x.shape[0], weight.shape[1] * groups[0], *after), space
    else:
        after = tuple((n + 2 * p - d * (k - 1) - 1) // max(s, 1) + 1 for n, k, s, p, d, _ in bounds)
        out, places = (x.shape[0], weight.shape[0], *after), after
    flops = 2 * x.shape[0] * math.prod(places) * weight.elements
    return OperationWork(flops, _size((x.shape, x), (weight.shape, weight), (out, x)), name)


def _convolution_backward(inputs: CallInputs) -> OperationWork | None:
    gradient, x, weight = (inputs.tensor(place) for place in range(3))
    wanted, transposed = inputs.flags(10), inputs.flags(7)
    name = "convolution backward: that of the forward for each gradient"
    if gradient is None or x is None or weight is None or len(x.shape) < DIMENSIONS_MIN:
        return None
    if wanted is None or transposed is None or len(wanted) < 2:
        return OperationWork(None, None, name)
    places = x.shape[2:] if transposed[0] else gradient.shape[2:]
    forward = 2 * x.shape[0] * math.prod(places) * weight.elements
    moved = [(gradient.shape, gradient)]
    for is_wanted, read, written in ((wanted[0], weight, x), (wanted[1], x, weight)):
        if is_wanted:
            moved += [(read.shape, read), (written.shape, written)]
    return OperationWork(forward * sum(wanted[:2]), _size(*moved), name)


def _spread(values: tuple[int, ...] | None, count: int) -> tuple[int, ...] | None:
    """Return one value for each spatial dimension; a single one holds for all."""
    if values is None or len(values) not in (1, count):
        return None
    return values * count if len(values) == 1 else values


def _of_attention(
    first: int, causal: int, *, is_backward: bool = False, is_flash: bool = False
) -> tuple[int, Callable[[CallInputs], OperationWork | None]]:
    return first, partial(_attention, first=first, causal=causal, is_backward=is_backward, is_flash=is_flash)


_SDPA = "aten::_scaled_dot_product_"

OPERATIONS: dict[str, Operation] = {
    **{
        name: Operation("matmul", left, partial(_matmul, left=left, right=left + 1, added=added))
        for name, left, added in (
            ("aten::mm", 0, None), ("aten::bmm", 0, None), ("aten::_scaled_mm", 0, None), ("aten::_int_mm", 0, None),
            ("aten::addmm", 1, 0), ("aten::baddbmm", 1, 0), ("aten::_addmm_activation", 1, 0),
        )
    },
    **{
        name: Operation("attention", *of)
        for name, of in {
            f"{_SDPA}flash_attention": _of_attention(0, 4),
            f"{_SDPA}efficient_attention": _of_attention(0, 6),
            f"{_SDPA}cudnn_attention": _of_attention(0, 6),
            f"{_SDPA}flash_attention_for_cpu": _of_attention(0, 4),
            f"{_SDPA}fused_attention_overrideable": _of_attention(0, 5),
            f"{_SDPA}flash_attention_backward": _of_attention(1, 11, is_backward=True),
            f"{_SDPA}efficient_attention_backward": _of_attention(1, 11, is_backward=True),
            f"{_SDPA}cudnn_attention_backward": _of_attention(1, 14, is_backward=True),
            f"{_SDPA}flash_attention_for_cpu_backward": _of_attention(1, 7, is_backward=True),
            f"{_SDPA}fused_attention_overrideable_backward": _of_attention(1, 13, is_backward=True),
            "aten::_flash_attention_forward": _of_attention(0, 8, is_flash=True),
            "flash_attn::_flash_attn_forward": _of_attention(0, 5, is_flash=True),
            "flash_attn::_flash_attn_backward": _of_attention(1, 11, is_flash=True, is_backward=True),
        }.items()
    },
    "aten::convolution": Operation("convolution", 0, _convolution),
    "aten::convolution_backward": Operation("convolution", 0, _convolution_backward),
}  # fmt: skip
"""Operators that do this work themselves or by a kernel, by name; argument places are those of torch's schemas.

The outermost one around a kernel counts: `aten::_scaled_dot_product_flash_attention` calls
`aten::_flash_attention_forward`.
"""
