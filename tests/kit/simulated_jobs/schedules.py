"""Orders the forward and backward passes of one pipeline rank: GPipe, 1F1B, interleaved 1F1B.

Pure: numbers in, a list of passes out.  The interleaved order is that of Megatron (Narayanan et al. 2021): the
microbatches go through the chunks of a rank in groups as large as the pipeline.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Pass", "passes"]


class Pass(NamedTuple):
    """One pass of one microbatch through one chunk of layers."""

    is_forward: bool
    microbatch: int
    chunk: int


def passes(schedule: str, stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Pass]:
    """Return the passes in the order in which the rank at `stage` runs them.

    Raises ValueError for a schedule that is not known, and for an interleaved one whose microbatches do not come in
    groups as large as the pipeline.
    """
    total = microbatches * chunks
    if schedule == "gpipe":
        warm = total
    elif schedule == "1f1b":
        warm = min(stages - stage - 1, total)
    elif schedule == "interleaved":
        if microbatches % stages:
            raise ValueError(f"{microbatches} microbatches are no multiple of {stages} stages")
        warm = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    else:
        raise ValueError(f"no schedule {schedule!r}")
    order = [_pass(True, k, stages, chunks) for k in range(warm)]
    for k in range(total - warm):
        order += [_pass(True, warm + k, stages, chunks), _pass(False, k, stages, chunks)]
    return order + [_pass(False, k, stages, chunks) for k in range(total - warm, total)]


def _pass(is_forward: bool, k: int, stages: int, chunks: int) -> Pass:
    """Return the k-th forward or backward pass of a rank."""
    group, inside = divmod(k, stages * chunks)
    chunk = inside // stages
    return Pass(is_forward, group * stages + inside % stages, chunk if is_forward else chunks - 1 - chunk)
