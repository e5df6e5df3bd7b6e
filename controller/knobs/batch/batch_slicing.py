"""Cuts a batch into micro-batches by samples or padded tokens, and computes each piece's share of the loss.

The obvious answer, "every n samples, and each piece counts by its samples", is wrong for text: two samples of 2048
tokens take the memory of 64 of 64 tokens, padding included, and where the loss is a mean over *tokens*, a piece's share
of the samples is not its share of the loss.  So a cut may be bounded by padded tokens too, and a piece is weighed by
the loss terms that the script counts:

    lengths 5 2 2 6, at most 6 padded tokens, trimmed      [5....] [2. 2.] [6.....]     samples stay in their order
    loss terms 4 1 0 5                                       0.4     0.1     0.5        weights sum to one

Samples are never sorted or moved: a batch is cut between neighbours only, so that a loss which looks at the order sees
the same one.  A piece without a single loss term is left out, its mean would be 0/0; the others hold all of the loss.

Left out: which size is best (a knob), packing several samples into one row (the collate function's), ragged tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["BatchSlices", "Given", "Lengths", "cut", "measure", "plan", "samples_in", "terms_of", "width_of"]

NEST_DEPTH_MAX = 32
"""Deepest nest that is accepted: no batch nests deeper, and a list that contains itself would."""

Given = Tensor | Sequence[int]
"""One whole number a sample, or (samples, positions) where everything but 0 counts."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each sample up to its last one, and the width that all of them are padded to."""

    each: tuple[int, ...]
    width: int

    def padded(self, low: int, high: int, *, trim: bool) -> int:
        """Return the tokens that samples `low` to `high` take in one piece, padding included."""
        return (high - low) * (self.longest(low, high) if trim else self.width)

    def longest(self, low: int, high: int) -> int:
        """Return how many positions the longest of these samples needs, at least 1."""
        return max(1, *self.each[low:high]) if high > low else self.width


@dataclass(frozen=True, slots=True)
class BatchSlices:
    """Samples `low` to `high`, their share of the loss, and the width kept of what is padded (None: all)."""

    low: int
    high: int
    weight: float
    keep: int | None = None


def measure(tokens: Given, samples: int, width: int | None = None) -> Lengths:
    """Return the samples' lengths from a mask (samples, positions) or from the lengths themselves.

    A mask is as wide as what is padded; with lengths `width` says it, None: they are padded to the longest.

    In a mask a sample reaches to its last position that is not 0, so padding on the left is counted as tokens: it
    cannot be trimmed without moving what follows.

    Raises:
        ValueError: not one entry a sample, or one that is longer than `width`.
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
        ValueError: not one entry a sample, or a negative one.
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

    A sample that alone is over `tokens_max` is a piece of its own.  Pieces without loss terms are left out, unless none
    has any.
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
    """Return the piece of every tensor in `batch`; those `width` wide in dim 1 lose columns of padding.

    Tensors without dimensions and everything that is no tensor pass through whole.
    """
    keep = piece.keep if width is not None and piece.keep is not None and piece.keep < width else None

    def slice_(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        rows = tensor[piece.low : piece.high]
        return rows[:, :keep] if keep is not None and rows.dim() > 1 and rows.shape[1] == width else rows

    return _mapped(batch, slice_)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401  any nest in, the same nest out
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: _mapped(item, change) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple):
        parts = [_mapped(item, change) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value


def samples_in(batch: object) -> int:
    """Return the samples in `batch`: dim 0 of every tensor in it.

    Raises:
        ValueError: there is no tensor to split, or two tensors differ in dim 0; names the leaf.
    """
    first: tuple[str, int] | None = None
    for path, tensor in _leaves(batch, "batch"):
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
    """Return dim 1 of the first tensor in `batch` that has one; None where none has."""
    return next((tensor.shape[1] for _, tensor in _leaves(batch, "batch") if tensor.dim() > 1), None)


def _leaves(value: object, path: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if depth > NEST_DEPTH_MAX:
        raise ValueError(f"{path}: nested deeper than {NEST_DEPTH_MAX}")
    if isinstance(value, Tensor):
        if value.dim() > 0:
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{names[index]}" if names else f"{path}[{index}]", depth + 1)
