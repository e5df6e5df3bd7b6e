"""Counts the samples and tokens of each step, and sums ledgers and counts over all steps.

Four sources may know a step's samples: the user's report, the wrapped loader that drew the batches, a torch loader that
the loop was seen to draw from, and the first input of forward.  Each step uses the best source, in that order; sources
are never added up.  None means unknown, and zero is zero.

The first dimension of a tensor is a guess: in a recurrent network it may be time, in a transformer's loader tokens, and
a GAN calls its model several times with one batch.  A batch sampler's length is not a guess (`hook.loading`).
"""

from __future__ import annotations

from msgspec import structs

from pacecar.records import Ledger

__all__ = ["SeenBatches", "StepCounts", "Totals", "plus"]


class StepCounts:
    """The samples and tokens of the current step, as reported by the user and as drawn from the loader."""

    def __init__(self) -> None:
        self._said_samples: int | None = None
        self._said_tokens: int | None = None
        self._drawn_samples: int | None = None
        self._drawn_tokens: int | None = None
        self._is_drawn_guess = False
        self.has_news = False
        """Whether anything was reported or drawn in this step."""

    def add(self, samples: int | None, tokens: int | None) -> None:
        """Add what the user reported."""
        self.has_news = True
        self._said_samples = plus(self._said_samples, samples)
        self._said_tokens = plus(self._said_tokens, tokens)

    def draw(self, samples: int | None, tokens: int | None, *, is_guess: bool = False) -> None:
        """Add a batch that the loader gave; `is_guess`: `samples` is the first dimension of a tensor in it."""
        self.has_news = True
        self._is_drawn_guess |= is_guess and samples is not None
        self._drawn_samples = plus(self._drawn_samples, samples)
        self._drawn_tokens = plus(self._drawn_tokens, tokens)

    def drain(self, other_samples: int | None, is_other_guess: bool) -> tuple[int | None, int | None, bool]:
        """Return the step's samples and tokens, and whether the samples are a guess; begin the next step.

        `other_samples` are the last resort; `is_other_guess` says whether they are a guess.
        """
        samples, is_guess = self._said_samples, False
        if samples is None:
            samples, is_guess = self._drawn_samples, self._is_drawn_guess
        if samples is None:
            samples, is_guess = other_samples, is_other_guess
        tokens = self._said_tokens if self._said_tokens is not None else self._drawn_tokens
        self._said_samples = self._said_tokens = self._drawn_samples = self._drawn_tokens = None
        self.has_news = self._is_drawn_guess = False
        return samples, tokens, is_guess


class SeenBatches:
    """The samples of batches that the loop itself draws from observed loaders, until a step trains on them.

    A batch counts if a training forward follows it, not if an evaluation forward does.  A step that draws no batch may
    train on the rest of an earlier one that is split over several steps.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}
        """The samples waiting for a forward, by loader; always the same dict."""
        self._last = 0
        self.rest = 0
        """Samples of batches drawn for training that no step has been seen to train on."""

    def draw(self, loader: int, samples: int) -> None:
        """Record a batch; `loader` identifies its loader."""
        self._last = loader
        self.waiting[loader] = self.waiting.get(loader, 0) + samples

    def train(self) -> int:
        """Return the samples drawn since the last forward, which this one trains on."""
        samples = sum(self.waiting.values())
        self.waiting.clear()
        return samples

    def evaluate(self) -> None:
        """Forget what was last drawn: this forward evaluates on it."""
        self.waiting.pop(self._last, None)

    def end(self, loader: int) -> None:
        """Forget the waiting samples of an exhausted loader: they were iterated over, not trained on."""
        self.waiting.pop(loader, None)

    def spend(self, drawn: int | None, seen: int | None) -> int | None:
        """Return the samples of a step that drew `drawn` and whose forwards saw `seen`; None if no loader knows."""
        if drawn is None and not self.rest:
            return None
        if drawn is None:
            now, before, there = self.rest, 0, self.rest
        else:
            # A rest larger than a batch, or one left while forwards see exactly what was drawn, comes from batches
            # drawn for something else: a script inspected one, as with next(iter(loader)).
            is_of_batch = self.rest <= drawn and seen != drawn
            now, before, there = drawn, self.rest if is_of_batch else 0, drawn
        now = now if seen is None else min(now, seen)
        self.rest = there - now
        return before + now

    def forget(self) -> None:
        """Forget all waiting samples: steps that were not measured may have trained on them."""
        self.waiting.clear()
        self.rest = 0


class Totals:
    """The sums over all steps since attach; a count is None until it is first known."""

    def __init__(self) -> None:
        self.ledger = Ledger(wall_ns=0, data_wait_ns=None)
        self.sees_data = False
        """Whether a wait for data was ever observed; until then zero is not a measurement."""
        self.steps = 0
        self.samples: int | None = None
        self.tokens: int | None = None

    def add(self, ledger: Ledger, samples: int | None, tokens: int | None, *, steps: int = 1) -> None:
        """Add one step, or `steps` together."""
        self.ledger = self.ledger + self.known(ledger)
        self.steps += steps
        self.samples = plus(self.samples, samples)
        self.tokens = plus(self.tokens, tokens)

    def known(self, ledger: Ledger) -> Ledger:
        """Return `ledger`, without a zero wait for data if waits could not be observed."""
        return ledger if self.sees_data or ledger.data_wait_ns != 0 else structs.replace(ledger, data_wait_ns=None)


def plus(total: int | None, part: int | None) -> int | None:
    """Return `total` with `part` added; an unknown part (None) changes nothing."""
    return total if part is None else (total or 0) + part
