"""Finds moves of several knobs at once, where the best value of one knob depends on another's.

One knob at a time does not reach some settings: each of the two moves loses alone, or the second pays only after the
first.  So these are tried as one change, with one forecast, one trial and one verdict:

    compression, bucket_bytes    fewer bytes leave a smaller tail, and the cost of a bucket counts for more
    micro_batch, bucket_bytes    fewer, longer backwards hide more, and gradients become ready later
    what a knob declares         a value that only costs alone (`KnobSpace.companions`)

For each value of the first knob the model names the bucket size that suits it.  A pair is a candidate only if the model
expects more of it than of any single move, by more than the dead band, and as much of the buckets: a trial cannot tell
which of the two helped, so neither goes along for free.

Pure.  Left out: more than two knobs, and pairs whose forecast is unknown, unless they are declared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..forecast.gain_model import GainModel
from ..observation import KnobSpace
from .geometric_search import PRIOR_GAIN, Candidate, Changes

__all__ = ["SUITED", "JointMoves"]

BUCKETS = "bucket_bytes"
SUITED = frozenset({"compression", "micro_batch"})
"""Knobs whose value decides which `bucket_bytes` is best."""


class JointMoves:
    """Remembers which pairs were tried, and returns what is left of them; `barred` ones were ruled out before."""

    def __init__(self, spaces: Sequence[KnobSpace], barred: Iterable[Changes] = ()) -> None:
        self._domains = {space.knob: space.domain for space in spaces}
        pairs = [
            ((space.knob, value), (other, to_value))
            for space in spaces
            for value, other, to_value in space.companions
            if value in space.domain and to_value in self._domains.get(other, ())
        ]
        self._declared = list({frozenset(pair): pair for pair in pairs}.values())
        self._closed: set[Changes] = set()
        self._open: set[Changes] = set()
        self.barred: set[Changes] = set(barred)

    def close(self, changes: Changes, *, is_undecided: bool = False) -> None:
        """Note that the pair was not better; what is undecided may be tried once more."""
        self._closed.add(changes)
        if is_undecided:
            self._open.add(changes)

    def bar(self, changes: Changes) -> None:
        """Rule the pair out for the rest of the job."""
        self.barred.add(changes)

    def retry_undecided(self) -> bool:
        """Allow undecided pairs one more trial; return whether there were any."""
        found = bool(self._open)
        self._closed -= self._open
        self._open.clear()
        return found

    def forget(self) -> None:
        """Allow all but barred pairs again."""
        self._closed.clear()
        self._open.clear()

    def candidates(
        self, kept: Mapping[str, int], firsts: Mapping[str, Iterable[int]], model: GainModel, *, best: float,
        dead_band: float,
    ) -> list[Candidate]:  # fmt: skip
        """Return pairs from which the model expects more than from single moves, and declared ones without a forecast.

        `firsts` holds the values of the knobs in SUITED that may be tried now, and `best` is the gain of the best
        single move.
        """
        declared = [pair for pair in self._declared if all(kept[knob] != value for knob, value in pair)]
        found: list[Candidate] = []
        for pair in (*declared, *self._suited(kept, firsts, model)):
            if pair in self._closed or pair in self.barred:
                continue
            joint = model.expect_jointly(kept, pair)
            if joint is not None:
                forecast, shares = joint
                alone = [] if pair in declared else [model.expect(knob, kept, value) for knob, value in pair]
                most = max([best, *(one.gain_ratio for one in alone if one is not None)])
                if forecast.gain_ratio > most + dead_band and (pair in declared or shares[-1] > dead_band):
                    found.append(Candidate(pair, forecast, forecast.gain_ratio, shares))
            elif pair in declared:
                prior = max(PRIOR_GAIN.get((knob, 1 if value > kept[knob] else -1), 0.0) for knob, value in pair)
                found.append(Candidate(pair, None, prior))
        return found

    def _suited(
        self, kept: Mapping[str, int], firsts: Mapping[str, Iterable[int]], model: GainModel
    ) -> Iterator[Changes]:
        """For each value of `firsts` yield the pair with the bucket size that suits it best."""
        sizes = self._domains.get(BUCKETS, ())
        for knob, values in firsts.items() if sizes else ():
            for value in values:
                size = model.best_bucket_bytes(kept, knob, value, sizes)
                if size is not None and size != kept[BUCKETS]:
                    yield (knob, value), (BUCKETS, size)
