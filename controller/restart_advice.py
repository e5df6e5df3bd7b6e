"""Lists, in sentences, what the tuner would turn if it were allowed to, and what only a restart can change.

Larger gains often lie outside what the tuner may turn: half of a step may go to launching kernels, and no bucket size
changes that.  So each heading of the last exact ledger that is over its threshold gets one sentence, with its figure
and what usually helps, and so does memory (`memory_advice`).  A gain is named only if the policy's model gave one.

On a machine where tasks wait for processors, the host is slow whatever the script does, and compiled code waits too.
There the advice is to make room, as the doctor's is.

Pure.  Left out: what needs a look at the machine (drivers, sysctls, NCCL's choice of links).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pacecar.knobs import KNOBS, allows
from pacecar.records import Decision, Ledger

from .memory_advice import TrainingMemory, memory_advice

__all__ = ["advise", "engine_advice"]

EXPOSED_RATIO_MIN = 0.10
"""From this share of exposed communication another mode or link may pay; under 3 % there is no gain (TUNING)."""

HOST_BOUND_RATIO_MIN = 0.15
DATA_WAIT_RATIO_MIN = 0.05
COPY_RATIO_MIN = 0.05
OPTIMIZER_RATIO_MIN = 0.10
CHECKPOINT_RATIO_MIN = 0.02
"""From these shares of the step on, a change of the script or its configuration is worth the work."""

ADVICE_MAX = 12
"""Most sentences returned: a longer list is not read."""

_HELP = (
    (
        "host_bound",
        HOST_BOUND_RATIO_MIN,
        "nothing is computed while Python decides what is next",
        "torch.compile, and on a GPU CUDA graphs, launch less often (needs a restart)",
    ),
    (
        "data_wait",
        DATA_WAIT_RATIO_MIN,
        "the loop waits for data",
        "more loader workers or a larger prefetch_factor: tuned where the loop iterates over pacer.data(loader)",
    ),
    (
        "exposed_copy",
        COPY_RATIO_MIN,
        "only copies run",
        "pin_memory=True in the DataLoader and .to(device, non_blocking=True) (a change of the script)",
    ),
    (
        "optimizer_host",
        OPTIMIZER_RATIO_MIN,
        "the optimizer works on the host",
        "fused=True or foreach=True in the optimizer (a change of the script)",
    ),
    (
        "checkpoint",
        CHECKPOINT_RATIO_MIN,
        "the loop waits for checkpoints",
        "torch.distributed.checkpoint.async_save, or a longer interval (a change of the script)",
    ),
)

_HELP_CROWDED = {
    "host_bound": (
        "more wants to run here than there are processors: end or move what is not the job, or start fewer ranks,"
        " threads or loader workers; `pacecar doctor` says what it is"
    ),
}
"""What helps on a crowded machine instead, by heading."""

ENGINE_ADVICE = {
    # runtime/zero/stage_1_and_2.py and stage3.py: overlap_comm chooses streams when the engine is made, reduce_scatter
    # the collective; sizes are read in each step (deepspeed_zero).
    "DeepSpeedEngine": (
        "DeepSpeed owns its buckets: zero_bucket_bytes turns ZeRO's; try overlap_comm and reduce_scatter in its"
        " configuration (needs a restart)"
    ),
}
"""Advice for engines that manage our knobs themselves, by the model's class name."""


def engine_advice(model_class: str) -> str | None:
    """Return what only the engine's own configuration can change; None for a model without such an engine."""
    return ENGINE_ADVICE.get(model_class)


def advise(
    *,
    mode: str,
    ledger: Ledger | None,
    decisions: Sequence[Decision],
    refused: Mapping[str, str],
    backend: str | None,
    device: str,
    is_crowded: bool,
    memory: TrainingMemory | None = None,
) -> tuple[str, ...]:
    """Return what would help, most certain first.

    `decisions` of kind "advise" count, the last one of each knob.  `refused` is knob -> why it is not tuned.  `ledger`
    comes from the last exact window, None before the first.  `is_crowded`: more wants to run on this machine than it
    has processors (`pacecar.kernel_files.processors`).  `memory` is what this rank holds, None if unknown.
    """
    sentences = [
        f"would turn {decision.reason}" for decision in {d.knob: d for d in decisions if d.kind == "advise"}.values()
    ]
    if ledger is not None and ledger.wall_ns > 0:
        sentences += _ledger_advice(ledger, mode, backend, device, is_crowded=is_crowded)
    if memory is not None:
        exposed = None if ledger is None or not ledger.wall_ns else ledger.exposed_communication_ns / ledger.wall_ns
        sentences += memory_advice(memory, exposed if exposed and exposed >= EXPOSED_RATIO_MIN else None)
    sentences += [f"{knob} is not tuned: {reason}" for knob, reason in sorted(refused.items())]
    return tuple(sentences[:ADVICE_MAX])


def _ledger_advice(ledger: Ledger, mode: str, backend: str | None, device: str, *, is_crowded: bool) -> list[str]:
    shares = {heading: ns / ledger.wall_ns for heading, ns in ledger.parts().items()}
    sentences: list[str] = []
    exposed = shares["exposed_communication"]
    if exposed >= EXPOSED_RATIO_MIN:
        ways = []
        if backend == "gloo" and device.startswith("cuda"):
            ways.append('backend "nccl", which sends from the device')
        if mode != "advise" and not allows(mode, "compression"):
            lossy = ", ".join(knob.name for knob in KNOBS if knob.knob_class == "lossy")
            ways.append(f'tune="lossy", which may also turn {lossy}')
        ways.append("a faster link, or fewer ranks for a model of this size")
        sentences.append(f"exposed communication is {exposed:.0%} of the step: {'; or '.join(ways)} (needs a restart)")
    sentences += [
        f"{what} for {shares[key]:.0%} of the step: {_HELP_CROWDED.get(key, help_) if is_crowded else help_}"
        for key, least, what, help_ in _HELP
        if shares.get(key, 0.0) >= least
    ]
    return sentences
