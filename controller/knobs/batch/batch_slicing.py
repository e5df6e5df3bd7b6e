"""Cuts a batch into micro-batches by samples or padded tokens, and computes each piece's share of the loss.

The obvious way, every n samples and weights by samples, is wrong for text.  Two samples of 2048 tokens take the memory
of 64 samples of 64 tokens, padding included; and if the loss is a mean over *tokens*, a piece's share of the samples is
not its share of the loss.  So cuts may be bounded by padded tokens, and pieces weighted by the loss terms that the
script counts:

    lengths 5 2 2 6, at most 6 padded tokens, trimmed      [5....] [2. 2.] [6.....]     samples stay in their order
    loss terms 4 1 0 5                                       0.4     0.1     0.5        weights sum to one

Samples are never sorted or moved: a batch is cut between neighbours only, so a loss that depends on the order sees the
same one.  A piece without loss terms is left out (its mean would be 0/0); the others contain all of the loss.

Not here: which size is best (a knob), packing several samples into one row (the collate function's job), ragged
tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = [
    "BatchSlices",
    "Given",
    "Lengths",
    "cut",
    "leaves",
    "map_tensors",
    "measure",
    "plan",
    "samples_in",
    "terms_of",
    "width_of",
]

NEST_DEPTH_MAX = 32
"""No batch nests deeper; a list that contains itself would."""

Given = Tensor | Sequence[int]
"""One whole number for each sample, or (samples, positions) where everything but 0 counts."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The number of tokens of each sample up to its last one, and the width that all are padded to."""

    each: tuple[int, ...]
    width: int

    def padded(self, low: int, high: int, *, trim: bool) -> int:
        """Return the tokens of samples `low` to `high` in one piece, padding included."""
        return (high - low) * (self.longest(low, high) if trim else self.width)

    def longest(self, low: int, high: int) -> int:
        """Return how many positions the longest of these samples needs, at least 1."""
        return max(1, *self.each[low:high]) if high > low else self.width


@dataclass(frozen=True, slots=True)
class BatchSlices:
    """Samples `low` to `high`, their share of the loss, and the padded width to keep (None: all)."""

    low: int
    high: int
    weight: float
    keep: int | None = None


def measure(tokens: Given, samples: int, width: int | None = None) -> Lengths:
    """Return the samples' lengths from a mask (samples, positions) or from the lengths themselves.

    A mask is as wide as the padding; lengths are padded to `width`, by default to the longest.  In a mask a sample
    reaches to its last position that is not 0.  Padding on the left thus counts as tokens; trimming it would move what
    follows.

    Raises:
        ValueError: not one entry for each sample, or one longer than `width`.
    """
    if not isinstance(tokens, Tensor) or tokens.dim() == 1:
        each = _numbers(tokens, samples, "tokens")
        longest = max(each, default=0)
        if width is not None and longest > width:
            raise ValueError(f"tokens says {longest} for a sample, the batch is {width} wide in dim 1")
        return Lengths(each, longest if width is None else width)
    if tokens.dim() != 2 or tokens.shape[0] != samples:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}: a mask of {samples} samples by positions is needed")
    width = tokens.shape[1]
    reach = (tokens != 0).int().flip(1).argmax(1) if width else tokens.new_zeros(samples)
    empty = (tokens != 0).sum(1) == 0
    reached: list[int] = (width - reach).masked_fill(empty, 0).tolist()
    return Lengths(tuple(reached), width)


def terms_of(count: Given, samples: int) -> tuple[int, ...]:
    """Return each sample's number of loss terms from a mask (samples, ...) or from the numbers themselves.

    Raises:
        ValueError: not one entry for each sample, or a negative one.
    """
    if isinstance(count, Tensor) and count.dim() > 1:
        if count.shape[0] != samples:
            raise ValueError(f"count has shape {tuple(count.shape)}: the batch has {samples} samples")
        count = (count != 0).flatten(1).sum(1)
    return _numbers(count, samples, "count")


def _numbers(given: Given, samples: int, name: str) -> tuple[int, ...]:
    numbers = given.reshape(-1).tolist() if isinstance(given, Tensor) else list(given)
    if len(numbers) != samples:
        raise ValueError(f"{name} has {len(numbers)} entries for {samples} samples")
    found = tuple(int(n) for n in numbers)
    if min(found, default=0) < 0:
        raise ValueError(f"{name} has a negative entry: {min(found)}")
    return found


def plan(
    samples: int,
    *,
    samples_max: int | None = None,
    tokens_max: int | None = None,
    lengths: Lengths | None = None,
    terms: Sequence[int] | None = None,
    trim: bool = False,
) -> list[BatchSlices]:
    """Cut `samples` into as few pieces of neighbours as the bounds allow, filled from the front.

    A sample that exceeds `tokens_max` alone is a piece of its own.  Pieces without loss terms are left out, unless
    there are no others.
    """
    edges = [0]
    for at in range(1, samples):
        is_full = samples_max is not None and at - edges[-1] >= samples_max
        if tokens_max is not None and lengths is not None:
            is_full = is_full or lengths.padded(edges[-1], at + 1, trim=trim) > tokens_max
        if is_full:
            edges.append(at)
    whole = samples if terms is None else sum(terms)
    cuts = []
    for low, high in zip(edges, [*edges[1:], samples], strict=True):
        share = high - low if terms is None else sum(terms[low:high])
        if share or not whole:
            weight = 1.0 if share == whole else share / whole
            cuts.append(
                BatchSlices(low, high, weight, lengths.longest(low, high) if trim and lengths is not None else None)
            )
    return cuts


def cut(batch: Any, piece: BatchSlices, width: int | None = None) -> Any:  # noqa: ANN401  the same nest out
    """Return the piece of every tensor in `batch`; tensors `width` wide in dim 1 lose columns of padding.

    Tensors without dimensions and everything that is not a tensor pass through whole.
    """
    keep = piece.keep if width is not None and piece.keep is not None and piece.keep < width else None

    def slice_(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        rows = tensor[piece.low : piece.high]
        return rows[:, :keep] if keep is not None and rows.dim() > 1 and rows.shape[1] == width else rows

    return map_tensors([batch], lambda same: slice_(same[0]))


def map_tensors(nests: Sequence[Any], change: Callable[[Sequence[Tensor]], Tensor]) -> Any:  # noqa: ANN401
    """Return a nest like the first of `nests`, with `change` of all tensors at the place of each tensor."""
    first = nests[0]
    if isinstance(first, Tensor):
        return change(nests)
    if isinstance(first, Mapping):
        items = {key: map_tensors([nest[key] for nest in nests], change) for key in first}
        return items if type(first) is dict else _like(first, items)
    if isinstance(first, (list, tuple)):
        parts = [map_tensors(column, change) for column in zip(*nests, strict=True)]
        if isinstance(first, list):
            return parts
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return first


def _like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:  # noqa: ANN401  the same mapping out
    try:
        return type(mapping)(items)  # type: ignore[call-arg]
    except TypeError:  # a defaultdict takes its factory first
        changed: Any = copy.copy(mapping)
        changed.update(items)
        return changed


def samples_in(batch: object) -> int:
    """Return the samples in `batch`: dim 0 of every tensor in it.

    Raises:
        ValueError: there is no tensor to split, or two tensors differ in dim 0; names the leaf.
    """
    first: tuple[str, int] | None = None
    for path, tensor in leaves(batch):
        if first is None:
            first = (path, tensor.shape[0])
        elif tensor.shape[0] != first[1]:
            raise ValueError(
                f"{path} has {tensor.shape[0]} samples in dim 0, {first[0]} has {first[1]}: "
                "micro-batches need the same number in every tensor"
            )
    if first is None:
        raise ValueError(f"batch ({type(batch).__name__}) has no tensor to split along dim 0")
    return first[1]


def width_of(batch: object) -> int | None:
    """Return dim 1 of the first tensor in `batch` that has one; None without one."""
    return next((tensor.shape[1] for _, tensor in leaves(batch) if tensor.dim() > 1), None)


def leaves(value: object, path: str = "batch", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a nest that has dimensions, with its place.

    Raises:
        ValueError: it is nested deeper than NEST_DEPTH_MAX.
    """
    if depth > NEST_DEPTH_MAX:
        raise ValueError(f"{path}: nested deeper than {NEST_DEPTH_MAX}")
    if isinstance(value, Tensor):
        if value.dim() > 0:
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{names[index]}" if names else f"{path}[{index}]", depth + 1)
