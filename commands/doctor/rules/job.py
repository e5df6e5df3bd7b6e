"""Rules for the job's records: losses by the ledger's headings, memory, checkpoints, arithmetic and advice.

The thresholds are the tuner's (`pacecar.controller.restart_advice`), so that the doctor and the running job agree.  A
gain is bounded by the what-if record, or by the heading's whole share if that has no bound for it.
"""

from __future__ import annotations

from functools import partial

from pacecar.controller.memory_advice import SPLIT_RATIO_MIN, allocator_remedy
from pacecar.controller.restart_advice import (
    CHECKPOINT_RATIO_MIN,
    COPY_RATIO_MIN,
    DATA_WAIT_RATIO_MIN,
    EXPOSED_RATIO_MIN,
    HOST_BOUND_RATIO_MIN,
    OPTIMIZER_RATIO_MIN,
)
from pacecar.formatting.ledger_headings import CAUSE_WORDS
from pacecar.knobs import setting

from ..facts.evidence import FindingEvidence, Gain
from ..facts.model import NodeFacts
from ..findings import FindingSource, Hit, Rule, Severity, hit
from ..sources import TORCH
from ..transport_paths import is_local_run, loader_workers
from .contention import is_crowded

__all__ = ["AMPERE", "RULES"]

AMPERE = (8, 0)
"""The first compute capability with TF32 and bfloat16 (CUDA C++ Programming Guide, Compute Capabilities)."""

CHECKPOINT_COSTLY_RATIO_MIN = 0.05
"""From this share of the time on, checkpoints are a substantial loss.  Background checkpoints cost one or two percent,
which is CHECKPOINT_RATIO_MIN."""

RECOMPILED_RATIO_MIN = 0.02
"""From this share of the last steps on, compiling is a loss.  One compilation takes as long as dozens of steps."""


def _knob(facts: NodeFacts, name: str) -> list[FindingEvidence]:
    if facts.run is None or name not in facts.run.knobs:
        return []
    value = facts.run.knobs[name]
    return [FindingEvidence(name, setting(name, value), facts.run.where)]


def _over(facts: NodeFacts, heading: str, least: float) -> bool:
    share = None if facts.run is None else facts.run.share(heading)
    return share is not None and share >= least


_TUNE = 'pacecar.attach(model, optimizer, tune="exact")    # or: pacecar run --tune exact -- torchrun ...'
_COMPRESS = 'pacecar.attach(model, optimizer, tune="lossy")    # the sizes are tuned already; or a faster link'


def _exposed(facts: NodeFacts) -> Hit | None:
    run = facts.run
    if run is None or not _over(facts, "exposed_communication", EXPOSED_RATIO_MIN):
        return None
    evidence = [
        run.share_evidence("exposed_communication"),
        *_knob(facts, "bucket_bytes"),
        *_knob(facts, "compression"),
    ]
    if run.is_tuned:
        evidence.append(FindingEvidence("tuner", str(run.tuner), run.where))
    return Hit(evidence, _COMPRESS if run.is_tuned else _TUNE, run.gain("communication_hidden"))


def _data_wait(facts: NodeFacts) -> Hit | None:
    run = facts.run
    if run is None or not _over(facts, "data_wait", DATA_WAIT_RATIO_MIN):
        return None
    evidence = (run.share_evidence("data_wait"), *_knob(facts, "loader_workers"), *_knob(facts, "loader_prefetch"))
    now, possible = run.knobs.get("loader_workers"), loader_workers(facts)
    if isinstance(now, int) and now >= possible:
        remedy = "make samples cheaper: cache them, decode or augment less    # no processors are left for more workers"
    else:
        remedy = f"DataLoader(..., num_workers={possible}, persistent_workers=True)    # or pacer.data(loader) finds it"
    return Hit(evidence, remedy, run.gain("data_free"))


def _host_bound(facts: NodeFacts) -> Hit | None:
    run = facts.run
    if run is None or not _over(facts, "host_bound", HOST_BOUND_RATIO_MIN) or is_crowded(facts):
        return None  # an overloaded machine slows any host down, and compiled code also waits for a processor
    evidence = [run.share_evidence("host_bound")]
    remedy = "model = torch.compile(model)"
    compiled = (
        [] if facts.script is None else [call for call in facts.script.of("compile") if call.name.startswith("torch")]
    )
    if compiled:
        evidence.append(compiled[0].as_evidence("compiled already"))
        remedy = 'torch.compile(model, mode="reduce-overhead")    # CUDA graphs'
    return Hit(evidence, remedy, run.gain("launch_gaps_gone"))


def _recompiles(facts: NodeFacts) -> Hit | None:
    run = facts.run
    found = (
        {} if run is None else {r: share for r, share in run.compile_shares.items() if share >= RECOMPILED_RATIO_MIN}
    )
    if run is None or not found:
        return None
    evidence = [
        FindingEvidence(f"rank {rank} compiles", f"{share:.1%} of its last steps", f"{run.where}/rank{rank}.jsonl")
        for rank, share in sorted(found.items())
    ]
    remedy = "TORCH_LOGS=recompiles    # says what changes; if shapes: dynamic=True, or pad batches to a few lengths"
    return Hit(evidence, remedy, Gain(min(1.0, max(found.values())), "all compilations after the first steps"))


def _copies(facts: NodeFacts) -> Hit | None:
    run = facts.run
    if run is None or not _over(facts, "exposed_copy", COPY_RATIO_MIN):
        return None
    return Hit(
        (run.share_evidence("exposed_copy"),),
        "DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True)",
        run.gain_of("exposed_copy"),
    )


def _optimizer(facts: NodeFacts) -> Hit | None:
    run = facts.run
    if run is None or not _over(facts, "optimizer_host", OPTIMIZER_RATIO_MIN):
        return None
    return Hit(
        (run.share_evidence("optimizer_host"),), "torch.optim.AdamW(..., fused=True)", run.gain_of("optimizer_host")
    )


def _checkpoint_cost(facts: NodeFacts) -> tuple[float, FindingEvidence, Gain] | None:
    """Return the share of the time that checkpoints take, since attach or, if that is small, in the last steps."""
    run = facts.run
    if run is None:
        return None
    worst: tuple[float, FindingEvidence] | None = None
    for rank, vitals in sorted(run.vitals.items()):
        wall = run.total_wall_ns.get(rank)
        if not wall or vitals.total_checkpoints == 0:
            continue
        share = vitals.total_checkpoint_ns / wall
        took = f"{vitals.total_checkpoints} took {vitals.total_checkpoint_ns / 1e9:.1f} s"
        text = f"{took}, {share:.1%} of {wall / 1e9:.0f} s of steps"
        if worst is None or share > worst[0]:
            worst = share, FindingEvidence(f"checkpoints of rank {rank}", text, f"{run.where}/rank{rank}.jsonl")
    if worst is not None and worst[0] >= CHECKPOINT_RATIO_MIN:
        return *worst, Gain(min(worst[0], 1.0), "the time of all checkpoints since attach")
    share_now = run.share("checkpoint")
    if share_now is None or share_now < CHECKPOINT_RATIO_MIN:
        return None
    return share_now, run.share_evidence("checkpoint"), run.gain_of("checkpoint") or Gain(0.0, "the ledger")


def _checkpoint(facts: NodeFacts, *, is_costly: bool) -> Hit | None:
    cost = _checkpoint_cost(facts)
    if cost is None or (cost[0] >= CHECKPOINT_COSTLY_RATIO_MIN) is not is_costly:
        return None
    _, evidence, gain = cost
    saving = [] if facts.script is None else facts.script.of("async_save")
    if saving:
        remedy = "save less often    # async_save still copies the state to the host while the step waits"
        return Hit((evidence, saving[0].as_evidence("saved in the background already")), remedy, gain)
    return Hit(
        (evidence,), "torch.distributed.checkpoint.async_save(state, checkpoint_id=path)    # or save less often", gain
    )


def _fragmentation(facts: NodeFacts) -> Hit | None:
    if facts.run is None:
        return None
    evidence: list[FindingEvidence] = []
    for rank, vitals in sorted(facts.run.vitals.items()):
        memory = vitals.memory
        if memory is None:
            continue
        retries, failures = memory.total_allocation_retries or 0, memory.total_out_of_memory or 0
        split = (
            None
            if memory.inactive_split_bytes is None or not memory.reserved_bytes
            else memory.inactive_split_bytes / memory.reserved_bytes
        )
        if retries or failures or (split is not None and split >= SPLIT_RATIO_MIN):
            unused = (
                ""
                if split is None
                else f", {split:.0%} of {memory.reserved_bytes / 2**30:.1f} GiB reserved lies in unused pieces"
            )
            evidence.append(
                FindingEvidence(
                    f"allocator of rank {rank}",
                    f"{retries} retries, {failures} out of memory{unused}",
                    f"{facts.run.where}/rank{rank}.jsonl",
                )
            )
    set_already = facts.settings.get("PYTORCH_CUDA_ALLOC_CONF") or facts.settings.get("PYTORCH_ALLOC_CONF")
    remedy = allocator_remedy("" if set_already is None else set_already.value)
    if set_already is not None and evidence:
        evidence.append(set_already.as_evidence("allocator's setting"))
    return hit(
        evidence, remedy or "smaller batches, checkpointed activations or more sharding    # pieces can grow already"
    )


def _straggler(facts: NodeFacts) -> Hit | None:
    run = facts.run
    if run is None or not run.stragglers:
        return None
    evidence = [
        FindingEvidence(
            "late since step " + str(said.since_step),
            f"{'the link' if said.late_rank is None else f'rank {said.late_rank}'}: {CAUSE_WORDS[said.cause]},"
            f" {said.excess_ns / 1e6:.1f} ms a step; {said.evidence}",
            run.where,
        )
        for said in run.stragglers
    ]
    return Hit(evidence, "pacecar top    # the late rank's device, node and phase", run.gain("straggler_median"))


def _gloo(facts: NodeFacts) -> Hit | None:
    run = facts.run
    if run is None:
        return None
    evidence = [
        FindingEvidence(f"rank {hello.rank}", f"gloo, on {hello.device}", f"{run.where}/rank{hello.rank}.jsonl")
        for hello in run.hellos
        if hello.backend == "gloo" and hello.device.startswith("cuda") and hello.world_size > 1
    ]
    return hit(evidence, 'torch.distributed.init_process_group("nccl")', run.gain("communication_hidden"))


def _arithmetic(facts: NodeFacts, which: str) -> Hit | None:
    """Find ranks that compute in `which` on GPUs of this machine that support a faster arithmetic."""
    run = facts.run
    if run is None or not is_local_run(facts):
        return None
    able = [gpu for gpu in facts.gpus.working if gpu.capability is not None and gpu.capability >= AMPERE]
    on_gpu = {hello.rank for hello in run.hellos if hello.device.startswith("cuda")}
    found = [rank for rank, vitals in sorted(run.vitals.items()) if vitals.arithmetic == which and rank in on_gpu]
    if not able or not found or len(able) != len(facts.gpus.working):
        return None
    assert able[0].capability is not None, "those without were left out"
    major, minor = able[0].capability
    evidence = (
        *(FindingEvidence(f"most FLOPs of rank {rank}", which, f"{run.where}/rank{rank}.jsonl") for rank in found),
        FindingEvidence(able[0].name, f"compute capability {major}.{minor}", f"NVML, GPU {able[0].index}"),
    )
    remedy = (
        'torch.set_float32_matmul_precision("high")'
        if which == "float32"
        else 'with torch.autocast("cuda", dtype=torch.bfloat16):'
    )
    return Hit(evidence, remedy, run.gain_of("compute"))


def _advice(facts: NodeFacts) -> Hit | None:
    run = facts.run
    if run is None or not run.advice:
        return None
    evidence = [FindingEvidence(said.knob, said.reason, f"{run.where} (step {said.step})") for said in run.advice]
    gains = [said.expected_gain_ratio for said in run.advice if said.expected_gain_ratio is not None]
    gain = Gain(max(gains), "the tuner's model, the best of them") if gains and max(gains) > 0 else None
    return Hit(evidence, "pacecar run --tune exact -- torchrun ...", gain)


RULES = (
    Rule("job-exposed-communication", Severity.WARNING, "The job waits for exposed communication",
         "collectives run while no kernel computes", "--run",
         TORCH.at("Distributed Data Parallel (notes), Internal Design"), _exposed),
    Rule("job-data-wait", Severity.WARNING, "The job waits for data",
         "the device has no work until the next batch arrives", "--run",
         TORCH.at("torch.utils.data, Multi-process data loading"), _data_wait),
    Rule("job-host-bound", Severity.WARNING, "The device waits for the host to launch work",
         "kernels take less time than Python needs to launch the next one", "--run",
         TORCH.at("torch.compile; CUDA semantics, CUDA Graphs"), _host_bound),
    Rule("job-recompiles", Severity.WARNING, "torch.compile compiles again and again",
         "a shape, a flag or a module that changes needs other code, and all ranks wait for it", "--run",
         TORCH.at("torch.compile, Dealing with Recompilations"), _recompiles),
    Rule("job-copies", Severity.WARNING, "The step waits for copies",
         "copies from pageable memory block, and nothing else runs", "--run",
         TORCH.at("CUDA semantics, Use pinned memory buffers"), _copies),
    Rule("job-optimizer", Severity.WARNING, "The optimizer keeps the host busy",
         "one kernel for each parameter, launched from Python", "--run",
         TORCH.at("torch.optim, fused and foreach implementations"), _optimizer),
    Rule("job-checkpoint", Severity.WARNING, "Checkpoints take a large part of the time",
         "all ranks wait while the state is written", "--run",
         TORCH.at("torch.distributed.checkpoint, async_save"), partial(_checkpoint, is_costly=True)),
    Rule("job-checkpoint-notable", Severity.INFO, "Checkpoints take a notable part of the time",
         "2 to 5 %; in the background they cost little more than the copy to the host", "--run",
         TORCH.at("torch.distributed.checkpoint, async_save"), partial(_checkpoint, is_costly=False)),
    Rule("job-fragmentation", Severity.WARNING, "The allocator's memory is fragmented",
         "a retry returns all cached memory and waits for the device; the next step takes it from the driver again",
         "--run", TORCH.at("CUDA semantics, Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF"), _fragmentation),
    Rule("job-straggler", Severity.WARNING, "A rank holds the others up",
         "collectives wait for the last rank, so its excess delays all ranks", "--run",
         FindingSource("pacecar", "docs/ledger.md and docs/efficiency.md"), _straggler),
    Rule("job-gloo-on-gpu", Severity.WARNING, "GPUs' gradients go through gloo",
         "gloo copies them to the host and sends them over TCP", "--run",
         TORCH.at("Distributed communication package, Which backend to use?"), _gloo),
    Rule("job-fp32", Severity.WARNING, "Matrices are multiplied in full fp32",
         "fp32 does not use these GPUs' tensor cores, which are several times faster with TF32", "--run",
         TORCH.at("CUDA semantics, TensorFloat-32 (TF32) on Ampere (and later) devices"),
         partial(_arithmetic, which="float32")),
    Rule("job-tf32", Severity.INFO, "Matrices are multiplied in TF32",
         "bfloat16 is twice as fast on these GPUs, with half the memory traffic; check the loss", "--run",
         TORCH.at("Automatic Mixed Precision package (torch.amp)"), partial(_arithmetic, which="tf32")),
    Rule("job-advice", Severity.INFO, "The tuner recommends other settings",
         "it ran in advise mode, in which it turns nothing", "--run",
         FindingSource("pacecar", "docs/tuning.md, Modes"), _advice),
)  # fmt: skip
