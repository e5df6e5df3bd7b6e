"""Implements the knob "work_share": at a constant global batch, samples move from slow ranks to fast ones.

The batch of a step is what all ranks' DistributedSamplers give for it.  Every rank can compute all of these lists, so
each takes its share of them, and a step trains on the same samples as before:

    rank 0, fast   [0 2 4 6]   ->   [0 2 4 6 7]      loss times 5/4
    rank 1, slow   [1 3 5 7]   ->   [1 3 5]          loss times 3/4

DDP averages over ranks, so a rank's mean loss is weighted by its samples over the even share; the gradient is that of
the global mean, except for the order of summation.  The shorter last batch of an epoch stays even.

Value 0 is the even share.  Each other value stands for shares that are computed once, from what all ranks measured by
the time that it is first applied; so a trial may go back and forth between two values, and a later change of the ranks'
speeds takes the next value.  Shares begin with the first batch that no rank has drawn yet (workers draw ahead).

Exact for a loss that is a mean over samples.  Refused for everything whose value or order this module cannot know.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DistributedSampler

from pacecar.knobs import by_name
from pacecar.profiler.ranks.data_parallel import find_ddp

from ..actuator import NOTHING_BESIDE, Actuator, ActuatorError, Objection, StartGather
from .micro_batch import MicroBatcher
from .micro_batch_eligibility import inexact
from .share_plan import RankWork, plan_shares, shares_text

__all__ = ["EpochShare", "WorkShareActuator"]

logger = logging.getLogger(__name__)

MEASURED_MIN, MEASURED_MAX = 12, 32
"""Measured steps before a rank's speed counts, and those that its median is taken over: a brief slowness is no reason
to move work."""

IN_FLIGHT_MAX = 8
"""Batches that the loader's workers may hold: shares begin only after them, and a trial must settle that long."""

DATASET_MAX = 10_000_000
"""Longer orders take a second to compute, in the middle of an epoch."""

USE_DISTRIBUTED = "use DataLoader(dataset, batch_size, sampler=torch.utils.data.DistributedSampler(dataset))"


class EpochShare:
    """One epoch of the loader: how far it is, and this rank's part of each batch."""

    def __init__(self, owner: WorkShareActuator, number: int, sampler: Any) -> None:  # noqa: ANN401  the user's
        self.number = number
        self.drawn = 0
        self._owner = owner
        self._sampler = sampler
        self.sampler_epoch: int | None = getattr(sampler, "epoch", None)
        self._order: list[int] | None = None
        self._out: deque[tuple[int, int]] = deque()  # (samples, even share) of each batch that is loading
        self._last: tuple[int, list[int]] | None = None

    def cut(self, own: Any) -> Any:  # noqa: ANN401  whatever the sampler yields
        """Return what this rank loads instead of `own`, the list that its sampler drew next."""
        place, self.drawn = self.drawn, self.drawn + 1
        if type(own) is not list:
            return own
        if self._last is None or len(own) >= len(self._last[1]):  # not an epoch's short last batch
            self._last = (place, own)
        mine = self._owner.part(self, place, own)
        self._out.append((len(mine), len(own)))
        return mine

    def delivered(self) -> None:
        """Note that the oldest batch reached the loop."""
        if self._out:
            self._owner.arrived(*self._out.popleft())

    def lists(self, place: int, even: int, world_size: int) -> list[list[int]]:
        """Return the even lists of all ranks for batch `place`."""
        if self._order is None:
            whole = copy.copy(self._sampler)
            whole.num_replicas, whole.rank, whole.num_samples = 1, 0, whole.total_size
            whole.epoch = self.sampler_epoch
            self._order = list(whole)
        first = place * even * world_size
        batch = self._order[first : first + even * world_size]
        return [batch[rank::world_size] for rank in range(world_size)]

    def is_order_known(self, even: int, rank: int, world_size: int) -> bool:
        """Return whether the computed order is the sampler's, by the last full list that it drew."""
        if self._last is None or len(self._last[1]) != even:
            return False
        place, own = self._last
        return self.lists(place, even, world_size)[rank] == own


class WorkShareActuator(Actuator):
    """The knob "work_share"; `loader` returns the training loader, or raises ActuatorError if there is none.

    `may_redraw`: samples may get other random numbers (augmentation), as those that another rank loads do.
    """

    knob = "work_share"

    def __init__(
        self,
        model: nn.Module,
        batcher: MicroBatcher,
        rank: int,
        world_size: int,
        *,
        start_gather: StartGather,
        loader: Callable[[], Any],
        has_global_batch: bool,
        may_redraw: bool,
    ) -> None:
        self._model = model
        self._batcher = batcher
        self._rank = rank
        self._world_size = world_size
        self._start_gather = start_gather
        self._loader = loader
        self._has_global_batch = has_global_batch
        self._may_redraw = may_redraw
        self._value = 0
        self._shares: dict[int, tuple[int, ...] | None] = {0: None}
        self._begins: list[tuple[tuple[int, int], int]] = [((0, 0), 0)]  # (epoch, batch) from which a value is in force
        self._epoch: EpochShare | None = None
        self._epochs = 0
        self._even: int | None = None
        self._present: tuple[int, int] | None = None  # (samples, even share) of the batch in the loop
        self._unread = 0  # batches that arrived since the loop split one
        self._odd: str | None = None
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=MEASURED_MAX)  # samples, scaling ns, fixed ns

    # --- what the loader and the loop do -------------------------------------------------------------

    def begin_epoch(self, sampler: object) -> EpochShare:
        """Return the share of a new epoch of the loader."""
        self._epochs += 1
        self._unread = 0
        self._epoch = EpochShare(self, self._epochs, sampler)
        return self._epoch

    def part(self, epoch: EpochShare, place: int, own: list[int]) -> list[int]:
        """Return this rank's part of batch `place`, of which `own` is the even one."""
        value = next(value for begin, value in reversed(self._begins) if begin <= (epoch.number, place))
        shares = self._shares[value]
        if shares is None or len(own) * self._world_size != sum(shares):
            return own
        lists = epoch.lists(place, len(own), self._world_size)
        if lists[self._rank] != own:
            self._object("the sampler's order changed within an epoch")  # this rank does its even share meanwhile
            return own
        even, mine = len(own), shares[self._rank]
        if mine <= even:
            return own[:mine]
        spare = [index for share, some in zip(shares, lists, strict=True) for index in some[share:]]
        before = sum(max(0, share - even) for share in shares[: self._rank])
        return own + spare[before : before + mine - even]

    def arrived(self, samples: int, even: int) -> None:
        """Note the batch that the loop gets now."""
        self._present = (samples, even)
        self._even = max(even, self._even or even)
        self._unread += 1

    def factor(self, samples: int) -> float:
        """Return what the mean loss of the present batch of `samples` is multiplied by."""
        if self._unread > 1:
            self._object("the loop reads batches ahead of the one that it trains on")
        self._unread = 0
        if self._present is None:
            return 1.0
        if self._present[0] != samples:
            self._object(f"the loop trains on {samples} samples of a batch of {self._present[0]}")
            return 1.0
        return samples / self._present[1]

    def _object(self, reason: str) -> None:
        if self._odd is None and self._value:
            logger.warning("pacecar: work_share goes back to equal shares: %s", reason)
        self._odd = reason

    def note(self, samples: int, scaling_ns: int, fixed_ns: int) -> None:
        """Take a measured step of this rank; on any thread."""
        self._steps.append((samples, scaling_ns, fixed_ns))

    def work(self) -> RankWork | None:
        """Return what a batch costs this rank at its present share; None until that is measured."""
        shares = self._shares[self._value]
        mine = self._even if shares is None else shares[self._rank]
        if not mine:
            return None
        steps = [(n // mine, scaling, fixed) for n, scaling, fixed in list(self._steps) if n and n % mine == 0]
        if len(steps) < MEASURED_MIN:
            return None
        scaling = median(scaling / (batches * mine) for batches, scaling, _ in steps)
        fixed = median(fixed / batches for batches, _, fixed in steps)
        return RankWork(round(fixed), max(1, round(scaling)), mine)

    # --- the knob -------------------------------------------------------------------------------------

    def value(self) -> int:
        """Return the number of the shares in force; 0 for even ones."""
        return self._value

    def domain(self) -> tuple[int, ...]:
        """Return all numbers."""
        return tuple(range(len(by_name[self.knob].choices)))

    def layout(self) -> str:
        """Return what decides the order of samples: it must be the same on all ranks."""
        sampler = self._loader().user_loader.sampler
        fields = ("total_size", "shuffle", "seed", "drop_last", "num_replicas")
        return str([self._even, self._epochs, *(getattr(sampler, name) for name in fields)])

    def is_barred(self, value: int, beside: Mapping[str, int] = NOTHING_BESIDE) -> bool:
        """Return whether the shares of `value` cannot be computed yet."""
        return value != 0 and (self._odd is not None or (value not in self._shares and self.work() is None))

    def objection(self) -> Objection | None:
        """Return why all ranks must go back to even shares, or None: losses may have wrong weights."""
        is_odd = self._odd is not None or self._batcher.counts_terms or self._batcher.has_own_weights
        return Objection.LOOP if is_odd and self._value else None

    def refusal(self) -> str | None:
        """Return why samples cannot be moved exactly here, or None."""
        return self._refused_loop() or self._refused_sampler() or inexact(self._model) or self._batcher.draws

    def _refused_loop(self) -> str | None:
        batcher, ddp = self._batcher, find_ddp(self._model)
        if ddp is None or self._world_size < 2:
            return "it needs DistributedDataParallel on at least two ranks"
        if dist.get_world_size(ddp.process_group) != self._world_size:
            return "the model is replicated on some of the ranks only"
        if self._has_global_batch:
            return "the global batch is tuned (batch_samples), whose noise scale needs even shares"
        if batcher.refused is not None:
            return batcher.refused
        if batcher.batch_samples is None or not batcher.has_weighted:
            return "losses cannot be weighted: use pacer.microbatches(batch) with pacer.backward(loss), or train_batch"
        if batcher.counts_terms:
            return "the loss is a mean over counted terms (count=...): a rank's mean would change with its samples"
        if batcher.has_own_weights:
            return "the loop gives weights of its own to backward: what its loss is a mean of is not known"
        return self._odd

    def _refused_sampler(self) -> str | None:
        loader = self._loader()  # raises with the reason if there is none
        user = loader.user_loader
        sampler = user.sampler
        if type(user.batch_sampler) is not BatchSampler:
            return f"batches are made by a {type(user.batch_sampler).__name__}; {USE_DISTRIBUTED}"
        if type(sampler) is not DistributedSampler:
            return f"a rank cannot know what others draw from a {type(sampler).__name__}; {USE_DISTRIBUTED}"
        if (sampler.num_replicas, sampler.rank) != (self._world_size, self._rank):
            return f"the DistributedSampler is for rank {sampler.rank} of {sampler.num_replicas}, not for this job's"
        if sampler.total_size > DATASET_MAX:
            return f"the dataset has over {DATASET_MAX} samples: their order takes too long to compute"
        if loader.home.in_flight > IN_FLIGHT_MAX or loader.keeps_position:
            return f"over {IN_FLIGHT_MAX} batches are loaded ahead, or the sampler can save its position"
        if not self._may_redraw and loader.draws.were_seen:
            return "loading a batch draws random numbers (augmentation), and another rank would draw others"
        if self._even is None or self._even < 2:
            return "the batch of a rank has less than two samples: a share would be zero"
        return None

    def apply(self, value: int) -> None:
        """Use the shares of `value` from the first batch on that no rank has drawn yet.

        Raises:
            ActuatorError: on all ranks alike: they are not at the same batch, a speed is not known, or a rank would get
                no sample.
        """
        if value == self._value:
            return
        epoch, work = self._epoch, self.work()
        even = self._even or 0
        is_known = epoch is not None and epoch.is_order_known(even, self._rank, self._world_size)
        numbers = (0, 0, 0) if work is None else (work.fixed_ns, work.sample_ns, work.samples)
        place = (self._epochs, -1 if epoch is None or epoch.sampler_epoch is None else epoch.sampler_epoch)
        drawn = 0 if epoch is None else epoch.drawn
        answers = self._start_gather([float(n) for n in (*numbers, *place, is_known, drawn)])()
        if answers is None:
            raise ActuatorError("the other ranks did not answer")
        if len({tuple(answer[3:5]) for answer in answers}) > 1:
            raise ActuatorError("the ranks are in different epochs")
        if value not in self._shares:
            if not all(answer[5] for answer in answers):
                raise ActuatorError("the order of the sampler is not what it says")
            if not all(answer[2] for answer in answers):
                raise ActuatorError("the speed of a rank is not measured yet")
            try:
                shares = plan_shares([RankWork(*(int(n) for n in answer[:3])) for answer in answers])
            except ValueError as error:
                raise ActuatorError(str(error)) from error
            self._shares[value] = shares
            if self._rank == 0:
                logger.info("pacecar: work_share %s: %s", by_name[self.knob].choices[value], shares_text(shares))
        self._begins.append(((self._epochs, max(int(answer[6]) for answer in answers)), value))
        self._value = value
        self._steps.clear()
