"""Rules for the script and its environment: settings of torch that cost time (DDP, loader, precision, debugging).

Only literals are judged.  Settings that are harmless according to the run's records are not reported: a loader without
workers is fine if the job does not wait for data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pacecar.controller.restart_advice import DATA_WAIT_RATIO_MIN

from ..facts.evidence import FindingEvidence
from ..facts.job import Call
from ..facts.model import NodeFacts
from ..findings import FindingSource, Hit, Rule, Severity, hit
from ..sources import CUDA_GUIDE, TORCH
from ..transport_paths import loader_workers
from .job import AMPERE

__all__ = ["RULES"]

BUCKET_MB_MIN, BUCKET_MB_MAX = 2, 500
"""DDP's default is 25.  Under 2 MiB, each all-reduce is mostly latency; over 500, one bucket holds most models, so
nothing overlaps."""

HARMLESS_RATIO = 0.01
"""A heading with a smaller share of the step does not justify a change of the script."""

_LOWER_PRECISION = ("autocast", "bfloat16", "bf16", "float16", "fp16", "half", "mixed_precision", "GradScaler")
_WRAPPERS = ("transformers", "accelerate", "lightning", "deepspeed", "pytorch_lightning", "fabric")


def _calls(facts: NodeFacts, *names: str) -> Sequence[Call]:
    return () if facts.script is None else facts.script.of(*names)


def _hit(calls: Sequence[Call], what: str, remedy: str) -> Hit | None:
    return hit((call.as_evidence(what) for call in calls), remedy)


def _ddp(facts: NodeFacts, is_meant: Callable[[Call], bool]) -> list[Call]:
    return [call for call in _calls(facts, "DistributedDataParallel") if is_meant(call)]


def _is_harmless(facts: NodeFacts, heading: str) -> bool:
    share = None if facts.run is None else facts.run.share(heading)
    return share is not None and share < HARMLESS_RATIO


def _has_gpu(facts: NodeFacts) -> bool:
    """Return whether this machine or the given run has a GPU; without one, nothing is copied to a device."""
    return bool(facts.gpus.working) or (
        facts.run is not None and any(hello.device.startswith("cuda") for hello in facts.run.hellos)
    )


def _find_unused(facts: NodeFacts) -> Hit | None:
    found = _ddp(facts, lambda call: call.keywords.get("find_unused_parameters") is True)
    return _hit(found, "DDP", "find_unused_parameters=False    # if every parameter gets a gradient in every step")


def _bucket_view(facts: NodeFacts) -> Hit | None:
    found = _ddp(
        facts,
        lambda call: call.lacks("gradient_as_bucket_view") or call.keywords.get("gradient_as_bucket_view") is False,
    )
    return _hit(found, "DDP", "DistributedDataParallel(..., gradient_as_bucket_view=True)")


def _static_graph(facts: NodeFacts) -> Hit | None:
    checkpoints = [
        call for call in _calls(facts, "checkpoint", "checkpoint_sequential") if "utils.checkpoint" in call.name
    ]
    found = _ddp(
        facts,
        lambda call: (
            call.lacks("static_graph") and (bool(checkpoints) or call.keywords.get("find_unused_parameters") is True)
        ),
    )
    if not found:
        return None
    evidence = (
        *(call.as_evidence("DDP") for call in found),
        *(call.as_evidence("activation checkpointing") for call in checkpoints[:1]),
    )
    return Hit(evidence, "DistributedDataParallel(..., static_graph=True)    # if each step uses the same parameters")


def _bucket_size(facts: NodeFacts) -> Hit | None:
    def is_odd(call: Call) -> bool:
        size = call.keywords.get("bucket_cap_mb")
        return isinstance(size, (int, float)) and not BUCKET_MB_MIN <= size <= BUCKET_MB_MAX

    return _hit(
        _ddp(facts, is_odd),
        "DDP",
        'pacer = pacecar.attach(model, optimizer, tune="exact")    # finds the size; the default is 25 MiB',
    )


def _loader_workers(facts: NodeFacts) -> Hit | None:
    if _is_harmless(facts, "data_wait"):
        return None
    found = [
        call for call in _calls(facts, "DataLoader")
        if (call.lacks("num_workers") and len(call.positional) < 6) or call.keywords.get("num_workers") == 0
    ]  # fmt: skip
    hit = _hit(
        found,
        "loads in the training process",
        f"DataLoader(..., num_workers={loader_workers(facts)}, persistent_workers=True)",
    )
    gain = None if facts.run is None else facts.run.gain("data_free")
    return None if hit is None else Hit(hit.evidence, hit.remedy, gain)


def _loader_settings(facts: NodeFacts) -> Hit | None:
    run = facts.run
    share = None if run is None else run.share("data_wait")
    if run is None or share is None or share < DATA_WAIT_RATIO_MIN:
        return None  # the settings are fine if the job does not wait
    wanted = {"persistent_workers": "True", "prefetch_factor": "4"}
    evidence: list[FindingEvidence] = []
    missing: dict[str, str] = {}
    for call in _calls(facts, "DataLoader"):
        workers = call.keywords.get("num_workers")
        lacks = {name: value for name, value in wanted.items() if call.lacks(name)}
        if isinstance(workers, int) and workers > 0 and lacks:
            evidence.append(call.as_evidence(f"workers without {' and '.join(lacks)}"))
            missing |= lacks
    if not evidence:
        return None
    settings = ", ".join(f"{name}={value}" for name, value in missing.items())
    return Hit((*evidence, run.share_evidence("data_wait")), f"DataLoader(..., {settings})", run.gain("data_free"))


def _pin_memory(facts: NodeFacts) -> Hit | None:
    if facts.script is None or not facts.script.uses_cuda or not _has_gpu(facts) or _is_harmless(facts, "exposed_copy"):
        return None
    found = [
        call for call in _calls(facts, "DataLoader")
        if call.lacks("pin_memory") or call.keywords.get("pin_memory") is False
    ]  # fmt: skip
    return _hit(found, "pageable memory", "DataLoader(..., pin_memory=True) and batch.to(device, non_blocking=True)")


def _precision(facts: NodeFacts) -> Hit | None:
    script = facts.script
    able = [gpu for gpu in facts.gpus.working if gpu.capability is not None and gpu.capability >= AMPERE]
    if (
        script is None
        or not script.uses_cuda
        or not able
        or not any(call.name.endswith(".backward") for call in script.calls)
    ):
        return None
    words = {part for name in script.names for part in name.split(".")}
    measured = facts.run is not None and any(vitals.arithmetic is not None for vitals in facts.run.vitals.values())
    if measured or words & {
        *_LOWER_PRECISION,
        *_WRAPPERS,
        "set_float32_matmul_precision",
        "allow_tf32",
        "fp32_precision",
    }:
        return None
    backward = next(call for call in script.calls if call.name.endswith(".backward"))
    assert able[0].capability is not None, "those without were left out"
    evidence = (
        backward.as_evidence("no autocast, no lower precision anywhere"),
        FindingEvidence(
            able[0].name, "compute capability {}.{}".format(*able[0].capability), f"NVML, GPU {able[0].index}"
        ),
    )
    return Hit(
        evidence,
        'torch.set_float32_matmul_precision("high")    # or: with torch.autocast("cuda", dtype=torch.bfloat16):',
    )


def _anomaly(facts: NodeFacts) -> Hit | None:
    found = [
        call for call in _calls(facts, "set_detect_anomaly", "detect_anomaly")
        if call.positional[:1] != (False,) and False not in (call.keywords.get("mode"), call.keywords.get("check_nan"))
    ]  # fmt: skip
    return _hit(found, "anomaly detection", "torch.autograd.set_detect_anomaly(False)")


def _data_parallel(facts: NodeFacts) -> Hit | None:
    found = [call for call in _calls(facts, "DataParallel") if call.name.startswith("torch")]
    return _hit(
        found,
        "DataParallel",
        "torchrun --nproc-per-node gpu ...    # and torch.nn.parallel.DistributedDataParallel(model)",
    )


def _gloo(facts: NodeFacts) -> Hit | None:
    if not facts.gpus.working or facts.script is None or not facts.script.uses_cuda:
        return None
    found = [
        call for call in _calls(facts, "init_process_group")
        if "gloo" in (*call.positional[:1], call.keywords.get("backend"))
    ]  # fmt: skip
    return _hit(found, "backend", 'torch.distributed.init_process_group("nccl")')


def _empty_cache(facts: NodeFacts) -> Hit | None:
    found = [call for call in _calls(facts, "empty_cache") if "cuda" in call.name]
    return _hit(
        found,
        "returns cached memory",
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True    # and remove the call from the loop",
    )


def _blocking(facts: NodeFacts) -> Hit | None:
    evidence = []
    seen = facts.settings.is_on("CUDA_LAUNCH_BLOCKING")
    if seen is not None:
        evidence.append(seen.as_evidence("CUDA_LAUNCH_BLOCKING"))
    if facts.script is not None:
        evidence += [
            call.as_evidence("CUDA_LAUNCH_BLOCKING") for call in facts.script.assigned
            if call.name == "os.environ.CUDA_LAUNCH_BLOCKING" and call.keywords.get("value") == "1"
        ]  # fmt: skip
    gain = None if facts.run is None else facts.run.gain("launch_gaps_gone")
    return hit(evidence, "unset CUDA_LAUNCH_BLOCKING", gain)


def _variable(name: str, *, values: tuple[str, ...] = ()) -> Callable[[NodeFacts], Hit | None]:
    """Return a check for a variable that is on, or has one of `values`."""

    def check(facts: NodeFacts) -> Hit | None:
        seen = facts.settings.get(name) if values else facts.settings.is_on(name)
        if seen is None or (values and seen.value.strip().upper() not in values):
            return None
        return Hit((seen.as_evidence(name),), f"unset {name}")

    return check


def _tf32_off(facts: NodeFacts) -> Hit | None:
    seen = facts.settings.get("NVIDIA_TF32_OVERRIDE")
    able = [gpu for gpu in facts.gpus.working if gpu.capability is not None and gpu.capability >= AMPERE]
    if seen is None or seen.value.strip() != "0" or not able:
        return None
    return Hit((seen.as_evidence("NVIDIA_TF32_OVERRIDE"),), "unset NVIDIA_TF32_OVERRIDE")


RULES = (
    Rule("env-launch-blocking", Severity.CRITICAL, "Each kernel launch waits for its kernel",
         "host and device take turns, and nothing overlaps; it is meant for finding a failing kernel", "machine",
         CUDA_GUIDE.at("Asynchronous Concurrent Execution, Concurrent Execution between Host and Device"), _blocking),
    Rule("env-no-memory-cache", Severity.CRITICAL, "torch's memory cache is turned off",
         "the driver allocates and frees each tensor, and freeing waits for the device", "machine",
         TORCH.at("CUDA semantics, Memory management"), _variable("PYTORCH_NO_CUDA_MEMORY_CACHING")),
    Rule("env-debug-detail", Severity.WARNING, "torch.distributed checks each collective",
         "with DETAIL, ranks compare shapes before each collective, which is another exchange", "machine",
         TORCH.at("Distributed communication package, TORCH_DISTRIBUTED_DEBUG"),
         _variable("TORCH_DISTRIBUTED_DEBUG", values=("DETAIL",))),
    Rule("env-blocking-wait", Severity.WARNING, "Waiting for a collective blocks the training thread",
         "the host cannot launch ahead while a collective runs", "machine",
         TORCH.at("Distributed communication package, TORCH_NCCL_BLOCKING_WAIT"),
         _variable("TORCH_NCCL_BLOCKING_WAIT")),
    Rule("env-tf32-off", Severity.WARNING, "TF32 is disabled for the whole process",
         "fp32 matrices do not use tensor cores, whatever the script sets", "machine",
         FindingSource("NVIDIA, cuBLAS Library", "NVIDIA_TF32_OVERRIDE"), _tf32_off),
    Rule("script-find-unused", Severity.INFO, "DDP looks for unused parameters in each step",
         "DDP traverses the graph once more after each forward", "--script",
         TORCH.at("DistributedDataParallel, find_unused_parameters"), _find_unused),
    Rule("script-bucket-view", Severity.INFO, "DDP keeps gradients twice",
         "without gradient_as_bucket_view, gradients are copied to the buckets and back and use twice the memory",
         "--script", TORCH.at("DistributedDataParallel, gradient_as_bucket_view"), _bucket_view),
    Rule("script-static-graph", Severity.INFO, "DDP does not know whether the graph is static",
         "with a static graph it does not search for unused parameters, and overlaps with activation checkpointing",
         "--script",
         TORCH.at("DistributedDataParallel, static_graph"), _static_graph),
    Rule("script-bucket-size", Severity.WARNING, "DDP's bucket size is extreme",
         "tiny buckets are all latency; one huge bucket overlaps with nothing", "--script",
         TORCH.at("DistributedDataParallel, bucket_cap_mb"), _bucket_size),
    Rule("script-loader-workers", Severity.INFO, "The training process itself loads the data",
         "without workers, the device waits while each batch is prepared", "--script",
         TORCH.at("torch.utils.data, Single- and Multi-process Data Loading"), _loader_workers),
    Rule("script-loader-settings", Severity.INFO, "Loader workers restart each epoch, or prefetch little",
         "the first batches of an epoch wait for workers that import everything again; two batches per worker, the"
         " default, do not cover slow samples", "--script",
         TORCH.at("torch.utils.data.DataLoader, persistent_workers and prefetch_factor"), _loader_settings),
    Rule("script-pin-memory", Severity.INFO, "Batches are copied from pageable memory",
         "such a copy goes through a buffer of the driver and cannot run beside kernels", "--script",
         TORCH.at("torch.utils.data, Memory Pinning"), _pin_memory),
    Rule("script-full-precision", Severity.INFO, "The script uses only full precision",
         "torch multiplies fp32 matrices without tensor cores unless TF32 or bfloat16 is enabled", "--script",
         TORCH.at("CUDA semantics, TF32; Automatic Mixed Precision package"), _precision),
    Rule("script-anomaly", Severity.WARNING, "Anomaly detection is on",
         "autograd records the forward's stack of each backward and checks for NaN; it is meant for debugging",
         "--script",
         TORCH.at("Automatic differentiation package, Anomaly detection"), _anomaly),
    Rule("script-data-parallel", Severity.WARNING, "DataParallel instead of DistributedDataParallel",
         "one process drives all GPUs, copies the model to each in every step and is limited by the GIL",
         "--script", TORCH.at("torch.nn.DataParallel, the warning"), _data_parallel),
    Rule("script-gloo", Severity.WARNING, "The script asks for gloo on a machine with GPUs",
         "gloo copies gradients to the host and sends them over TCP", "--script",
         TORCH.at("Distributed communication package, Which backend to use?"), _gloo),
    Rule("script-empty-cache", Severity.INFO, "The script empties torch's memory cache",
         "it frees no memory for torch, waits for the device, and makes the next allocations go to the driver",
         "--script",
         TORCH.at("CUDA semantics, Memory management"), _empty_cache),
)  # fmt: skip
