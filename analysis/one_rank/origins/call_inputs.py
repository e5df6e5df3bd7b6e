"""Reads the inputs of a call from a trace's JSON: shapes and types of tensors, and the values of other inputs.

    "Input Dims"        [[16, 64], [128, 64], []]
    "Input type"        ["float", "float", "Scalar"]
    "Concrete Inputs"   ["", "", "1"]

Pure.  Left out: what the inputs mean (`formulas`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import msgspec

from pacecar.analysis.trace.collectives import ELEMENT_BYTES, element_type
from pacecar.analysis.trace.details.detail_columns import Signature

__all__ = ["CallInputs", "Tensor", "inputs_of"]

INPUTS_MAX = 64
"""The most inputs of a call that are read; fused optimizers have thousands, too many to show."""

LISTED_MAX = 4
"""The most tensors of one list whose shapes are shown."""

SIZE_MAX = 1 << 48
"""The largest plausible size of a dimension."""

DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16",
    "Char": "int8", "Byte": "uint8", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
"""torch's names of the types in c10/core/ScalarType.h, if they differ from the lower-case name."""

_BROKEN = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor that a call was given; `element_bytes` is None for a type without whole bytes."""

    shape: tuple[int, ...]
    dtype: str
    element_bytes: int | None

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class CallInputs:
    """The inputs of a call by place; None in `tensors` for other values, "" in `values` for tensors."""

    tensors: tuple[Tensor | None, ...]
    values: tuple[str, ...]
    lists: tuple[str, ...] = ()
    """Shapes of lists of tensors, as text, shown after those of tensors."""

    def tensor(self, place: int) -> Tensor | None:
        """Return the tensor at `place`, or None."""
        return self.tensors[place] if place < len(self.tensors) else None

    def integers(self, place: int) -> tuple[int, ...] | None:
        """Return the integers of a value like "[1, 1]" or "2"; None if unknown."""
        value = _decoded((self.values[place] if place < len(self.values) else "").encode())
        listed = value if isinstance(value, list) else [value]
        return tuple(listed) if listed and all(type(each) is int for each in listed) else None

    def flags(self, place: int) -> tuple[bool, ...] | None:
        """Return the booleans of a value like "False" or "[True, True, False]"; None if unknown."""
        words = (self.values[place] if place < len(self.values) else "").strip("[] ").split(",")
        known = [word.strip() for word in words]
        return tuple(word == "True" for word in known) if set(known) <= {"True", "False"} else None

    @cached_property
    def shapes_text(self) -> str | None:
        """The tensors' shapes, "[16, 64] [128, 64]", with lists of tensors in brackets; None without a tensor."""
        shapes = [str(list(each.shape)) for each in self.tensors if each is not None]
        return " ".join([*shapes, *self.lists]) or None

    @cached_property
    def types_text(self) -> str | None:
        """The tensors' types; one word if they are all equal."""
        types = [each.dtype for each in self.tensors if each is not None]
        return (types[0] if len(set(types)) == 1 else " ".join(types)) if types else None


def inputs_of(signature: Signature) -> CallInputs:
    """Return the inputs in `signature`; unreadable ones are missing."""
    shapes, types, values = (_decoded(text) for text in signature)
    shapes = shapes[:INPUTS_MAX] if isinstance(shapes, list) else []
    types = types[:INPUTS_MAX] if isinstance(types, list) else []
    values = values[:INPUTS_MAX] if isinstance(values, list) else []
    types += [""] * (len(shapes) - len(types))
    return CallInputs(
        tuple(_tensor(shape, word) for shape, word in zip(shapes, types, strict=False)),
        tuple(value if isinstance(value, str) else "" for value in values),
        tuple(text for shape in shapes if (text := _list_text(shape))),
    )


def _list_text(shape: object) -> str:
    """Return the shapes of the first tensors of a list as text; "" for anything else."""
    if not isinstance(shape, list) or not shape or not all(_is_shape(each) for each in shape[:LISTED_MAX]):
        return ""
    return f"({', '.join(map(str, shape[:LISTED_MAX]))}{f', {len(shape)} in all' if len(shape) > LISTED_MAX else ''})"


def _is_shape(shape: object) -> TypeGuard[list[int]]:
    return isinstance(shape, list) and all(type(size) is int and 0 <= size < SIZE_MAX for size in shape)


def _decoded(text: bytes) -> Any:  # noqa: ANN401  whatever the file has
    try:
        return msgspec.json.decode(text) if text else None
    except _BROKEN:
        return None


def _tensor(shape: object, word: object) -> Tensor | None:
    if not _is_shape(shape) or not isinstance(word, str):
        return None
    if not word.startswith("c10::") and not word[:1].islower():
        return None  # Scalar, ScalarList, TensorList; before 1.13 Int, Bool, GenericList: tensors have C++ types
    kind = element_type(word)
    if kind not in ELEMENT_BYTES and not kind.startswith("Float4"):
        return None
    return Tensor(tuple(shape), DTYPES.get(kind, kind.lower()), ELEMENT_BYTES.get(kind))
