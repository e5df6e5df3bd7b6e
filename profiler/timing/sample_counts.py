"""Counts the samples and tokens of each step, and adds up ledgers and counts over all steps.

Three sources may know the samples of a step: the user who reports them, the wrapped loader that drew the batches, and
the first input of forward.  The best source of each step wins, in that order; they are never added to each other.  None
means unknown, and zero is zero.
"""

from __future__ import annotations

from pacecar.records import Ledger

__all__ = ["StepCounts", "Totals", "plus"]


class StepCounts:
    """The samples and tokens of the step under way, as reported by the user and as drawn from the loader."""

    def __init__(self) -> None:
        self._said_samples: int | None = None
        self._said_tokens: int | None = None
        self._drawn_samples: int | None = None
        self._drawn_tokens: int | None = None
        self.has_news = False
        """Whether anything was reported or drawn in this step."""

    def add(self, samples: int | None, tokens: int | None) -> None:
        """Add what the user reported."""
        self.has_news = True
        self._said_samples = plus(self._said_samples, samples)
        self._said_tokens = plus(self._said_tokens, tokens)

    def draw(self, samples: int | None, tokens: int | None) -> None:
        """Add a batch that the loader gave."""
        self.has_news = True
        self._drawn_samples = plus(self._drawn_samples, samples)
        self._drawn_tokens = plus(self._drawn_tokens, tokens)

    def drain(self, forward_samples: int | None) -> tuple[int | None, int | None]:
        """Return the step's samples and tokens, `forward_samples` as the last resort; begin the next step."""
        samples = self._said_samples
        if samples is None:
            samples = self._drawn_samples if self._drawn_samples is not None else forward_samples
        tokens = self._said_tokens if self._said_tokens is not None else self._drawn_tokens
        self._said_samples = self._said_tokens = self._drawn_samples = self._drawn_tokens = None
        self.has_news = False
        return samples, tokens


class Totals:
    """The sums over all steps since attach; counts are None until one was known."""

    def __init__(self) -> None:
        self.ledger = Ledger(wall_ns=0)
        self.steps = 0
        self.samples: int | None = None
        self.tokens: int | None = None

    def add(self, ledger: Ledger, samples: int | None, tokens: int | None, *, steps: int = 1) -> None:
        """Add one step, or `steps` together."""
        self.ledger = self.ledger + ledger
        self.steps += steps
        self.samples = plus(self.samples, samples)
        self.tokens = plus(self.tokens, tokens)


def plus(total: int | None, part: int | None) -> int | None:
    """Return `total` with `part` added; an unknown part (None) changes nothing."""
    return total if part is None else (total or 0) + part
