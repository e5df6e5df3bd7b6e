"""Implements the knob "checkpointed_blocks": how many of a model's blocks compute their activations again in backward.

Checkpointing trades a second forward of a block for the memory of its activations.  Scripts fix it for all blocks by
the batch that barely fits, or leave it out.  Here it follows free memory, in quarters of the blocks:

    fewer than the script has    saves the second forward of the blocks that keep their activations
    more than the script has     is slower alone; it frees memory, so it is tried together with a larger micro-batch

The blocks that keep theirs are the last ones in forward: backward needs them first.  When it begins, they and the
inputs of all others are held; when the first checkpointed block runs again, they are gone.  So the first one that keeps
costs nothing at the peak.  Blocks are assumed to run in the order in which they are registered; in another order it is
as exact, and each costs its bytes.

Losses and gradients are equal to the last bit (`blocks` and `block_probe` say what is refused because of that), and no
collective moves, unless a block has its own.  All ranks switch at one boundary, and only if their blocks are alike.

Memory is measured in one step before the knob is offered, and scaled with the largest input since.  What is kept in
addition must fit on every rank: when the knob is offered and at each vote, in which a rank without room votes no
(`is_barred`).  If memory gets short later, the rank objects, and all go back (`guards.objection_rollback`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import cast

import torch
from torch import nn

from pacecar.config import TuneConfig
from pacecar.controller.observation import BlockCosts
from pacecar.knobs import KnobName
from pacecar.profiler.hook.module_calls import CallObserver, observe_calls
from pacecar.profiler.timing.torch_compile import keep_out

from ..actuator import NOTHING_BESIDE, Actuator, ActuatorError, Objection, quarters
from ..memory_limit import beyond_memory, computing_device, is_short
from .block_probe import BlockProbe, BlockReading, elements_in
from .blocks import find_blocks, refusal_of, whole_of

__all__ = ["CheckpointedBlocksActuator", "open_checkpointed_blocks"]

PROBE_BOUNDARY = 2
"""The step after this boundary is measured: the first ones allocate and compile, and the knob is offered soon after."""

CHECK_BOUNDARIES = 4
"""Boundaries between two looks at memory, which take some 50 us."""

SIZES_MAX = 6
"""Larger micro-batches that are tried with more checkpointed blocks, the smallest ones."""

logger = logging.getLogger(__name__)


def open_checkpointed_blocks(
    model: nn.Module,
    config: TuneConfig,
    world_size: int,
    *,
    sizes: Sequence[Actuator],
    charge: Callable[[int], None],
) -> CheckpointedBlocksActuator | None:
    """Return the knob; None if the user left it out or the model has no blocks.

    `sizes` are the knobs that take the memory that checkpointing frees: the micro-batch's.  `charge` takes the ns that
    measuring cost.
    """
    if "checkpointed_blocks" not in config.knobs:
        return None
    knob = CheckpointedBlocksActuator(model, world_size, sizes=sizes, charge=charge)
    return knob if knob.blocks else None


class CheckpointedBlocksActuator(Actuator):
    """The knob "checkpointed_blocks": the first so many blocks are checkpointed."""

    knob = "checkpointed_blocks"

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        *,
        sizes: Sequence[Actuator],
        charge: Callable[[int], None],
    ) -> None:
        self._model = model
        self._whole = whole_of(model)
        self._world_size = world_size
        self._sizes = sizes
        self._charge = charge
        self._device = computing_device(self._whole) or torch.device("cpu")
        self.blocks = find_blocks(self._whole)
        self._is_wrapped = bool(self.blocks) and self.blocks[0].is_checkpointed_at_home
        self._home = self._value = len(self.blocks) if self._is_wrapped else 0
        self._boundary = 0
        self._probe: BlockProbe | None = None
        self._readings: list[BlockReading] = []
        self._again_ratio: Callable[[], float | None] = lambda: None
        self._refusal: str | None = "the blocks were not measured yet"
        self._size_observer: CallObserver | None = None
        self._elements_max = 0
        self._was_short = False
        self._objection: Objection | None = None
        keep_out(self._note_size)

    # --- measuring ---

    def on_boundary(self) -> int:
        """Measure the blocks in one step; later, look whether memory gets short."""
        self._boundary += 1
        if self._boundary == PROBE_BOUNDARY:
            self._begin_probe()
        elif self._boundary == PROBE_BOUNDARY + 1:
            self._end_probe()
        elif self._value < self._home and self._boundary % CHECK_BOUNDARIES == 0 and is_short(self._device):
            if self._objection is None:
                logger.warning("pacecar: checkpointed_blocks goes back to %d: memory gets short", self._home)
            self._objection = Objection.BLOCKS
        return 0

    def _begin_probe(self) -> None:
        self._refusal = refusal_of(self._model, self.blocks, self._world_size)
        if self._refusal is None and not self._is_wrapped and not self._larger_sizes():
            self._refusal = "no block is checkpointed, and no larger micro-batch could use the memory that it frees"
        if self._refusal is None:
            self._probe = BlockProbe(self._whole, self.blocks, self._device)
            self._probe.open()

    def _end_probe(self) -> None:
        probe, self._probe = self._probe, None
        if probe is None:
            return
        probe.close()
        self._charge(probe.spent_ns)
        self._readings, self._again_ratio = probe.readings, probe.again_ratio
        self._refusal = next((one.refusal for one in probe.readings if one.refusal is not None), None)
        self._elements_max = probe.readings[0].elements
        if self._refusal is None:
            self._size_observer = observe_calls(self.blocks[0].module, self._note_size)

    def _note_size(self, _: nn.Module, args: object, kwargs: object) -> None:
        self._elements_max = max(self._elements_max, elements_in((args, kwargs)))

    def costs(self) -> BlockCosts | None:
        """Return what the blocks cost in time and memory; None if they were not measured."""
        if self._refusal is not None or not self._readings:
            return None
        per_sample = [reading.kept_bytes / reading.samples for reading in self._readings if reading.samples]
        return BlockCosts(
            count=len(self._readings),
            home=self._home,
            again_ratio=self._again_ratio(),
            sample_bytes=round(fmean(per_sample)) if per_sample else None,
        )

    def kept_bytes(self, value: int) -> int:
        """Return what the blocks hold from forward to backward, beside their inputs, if `value` are checkpointed."""
        measured = self._readings[0].elements
        growth = max(1.0, self._elements_max / measured) if measured else 1.0
        return round(growth * sum(reading.kept_bytes for reading in self._readings[value:]))

    def _beyond(self, value: int) -> str | None:
        """Return why memory does not allow to keep what `value` keeps beyond what is kept now, or None."""
        more = self.kept_bytes(value) - self.kept_bytes(self._value)
        return beyond_memory(self._device, more, "activations that are kept") if more > 0 else None

    # --- the knob ---

    def value(self) -> int:
        """Return the number in force."""
        return self._value

    def domain(self) -> tuple[int, ...]:
        """Return the numbers in quarters of all, as far as memory allows it, and the present one."""
        return tuple(n for n in quarters(len(self.blocks)) if n == self._value or self._beyond(n) is None)

    def refusal(self) -> str | None:
        """Return why it must stay as it is, or None."""
        if self._refusal is None and len(self.domain()) == 1:
            return self._beyond(quarters(len(self.blocks))[-2])
        return self._refusal

    def companions(self, value: int) -> tuple[tuple[KnobName, int], ...]:
        """Return the larger micro-batches, with each of which more checkpointed blocks than the script has may pay."""
        return self._larger_sizes() if value > self._home else ()

    def _larger_sizes(self) -> tuple[tuple[KnobName, int], ...]:
        live = [knob for knob in self._sizes if knob.refusal() is None]
        larger = [(cast(KnobName, knob.knob), size) for knob in live for size in knob.domain() if size > knob.value()]
        return tuple(larger[:SIZES_MAX])

    def layout(self) -> str:
        """Return a hash of the blocks' names, classes and sizes."""
        alike = [(b.name, type(b.inner).__name__, sum(p.numel() for p in b.inner.parameters())) for b in self.blocks]
        return hashlib.blake2b(repr(alike).encode(), digest_size=8).hexdigest()

    def is_barred(self, value: int, beside: Mapping[str, int] = NOTHING_BESIDE) -> bool:
        """Return whether this rank lacks the memory for `value` now: it votes no, and all ranks stay as they are.

        So it does where the micro-batch that will be in force then did not fit beside so few checkpointed blocks.
        """
        reason = self._beyond(value)
        if reason is not None and not self._was_short:
            logger.warning("pacecar: checkpointed_blocks stays at %d: at %d %s", self._value, value, reason)
        self._was_short = reason is not None
        takes_room = any(knob.is_barred(beside[knob.knob], beside) for knob in self._sizes if knob.knob in beside)
        return reason is not None or takes_room or (value < self._home and self._objection is not None)

    def apply(self, value: int) -> None:
        """Checkpoint the first `value` blocks, from the next forward on.

        Raises:
            ActuatorError: it could not be done; the old value is in force again.
        """
        if not 0 <= value <= len(self.blocks):
            raise ActuatorError(f"checkpointed_blocks {value} is not 0 to {len(self.blocks)}")
        try:
            self._set(value)
        except Exception as error:
            self._set(self._value)
            raise ActuatorError(f"the blocks could not be switched ({type(error).__name__}: {error})") from error
        self._value = value

    def _set(self, value: int) -> None:
        for at, block in enumerate(self.blocks):
            block.switch(is_checkpointed=at < value)

    def objection(self) -> Objection | None:
        """Return that memory got short while blocks keep what the script has them compute again; else None."""
        return self._objection if self._value < self._home else None

    def close(self) -> None:
        """Stop measuring; the blocks stay as all ranks agreed, because the micro-batch may need the memory."""
        self._end_probe()
        if self._size_observer is not None:
            self._size_observer.remove()
            self._size_observer = None
