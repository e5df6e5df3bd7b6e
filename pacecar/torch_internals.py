"""Lists every private name of torch that pacecar uses, and looks each one up when it is used.

The next torch release may lack a name with a leading underscore or without documentation.  Using one at import could
then end the user's job for a feature that is not even on.  So all of them are rows of one table.  A feature calls
`lacking` before it starts; a missing name disables exactly the features of its row and is named in the reason.  `need`
returns the object.

Results are cached for the process.  Nothing here imports torch before it is asked to.
Left out: names that exist but behave differently; those are probed where that shows, as in
`controller.knobs.ddp.torch_internals` and `profiler.hook.phase_hooks`.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

__all__ = [
    "FEATURES",
    "INTERNALS",
    "Feature",
    "Internal",
    "InternalMissingError",
    "find",
    "forget",
    "lacking",
    "need",
    "own_has",
    "suppose_missing",
]

logger = logging.getLogger("pacecar")

Feature = Literal[
    "module_calls",
    "backward",
    "windows",
    "traces",
    "flops",
    "compile",
    "ranks",
    "last_collective",
    "agreement",
    "ddp_buckets",
    "compression",
    "micro_batch",
    "loader",
    "fsdp_prefetch",
    "fsdp_reshard",
    "checkpointed_blocks",
    "batch_samples",
    "run_fsdp",
    "run_gathering",
    "run_models",
    "run_waits",
]

FEATURES: dict[Feature, str] = {
    "module_calls": "forward and backward cannot be distinguished, and `pacecar run` measures nothing",
    "backward": "the times of backward and its tail are not measured",
    "windows": "no exact windows are taken, so ledgers are not exact",
    "traces": "no traces are taken on request",
    "flops": "model FLOPs are not counted, so there is no MFU",
    "compile": "torch.compile is not kept out of pacecar's hooks and may compile them",
    "ranks": "ranks are not compared, so there are no stragglers and no hang suspicions",
    "last_collective": "a hang suspicion does not name the last collective",
    "agreement": "ranks cannot agree on switches, so nothing is tuned on several ranks",
    "ddp_buckets": "DDP's bucket sizes and compression are not tuned",
    "compression": "DDP's gradients are not compressed",
    "micro_batch": "the micro-batch is not tuned under DDP",
    "loader": "the data loader's workers and prefetching are not tuned",
    "fsdp_prefetch": "FSDP2's prefetching is not tuned",
    "fsdp_reshard": "FSDP2's resharding is not tuned",
    "checkpointed_blocks": "activation checkpointing is not tuned",
    "batch_samples": "the global batch is not tuned",
    "run_fsdp": "`pacecar run` does not tune FSDP2",
    "run_gathering": "`pacecar run` tunes nothing",
    "run_models": "`pacecar run` does not find the model and measures nothing",
    "run_waits": "`pacecar run` does not measure the wait for data",
}
"""What does not work without the feature's names, as shown to users."""


@dataclass(frozen=True, slots=True)
class Internal:
    """One private name of torch.

    `features` are off without it; if there are none, `instead` says what happens without it.  `owner` is the kind of
    object that holds it if no module or class does, and that is checked instead; a "mark" is on objects only while what
    it marks is in use, so it is not checked beforehand.  `seen` are the first and the last torch version that had it,
    of those that `make compatibility` ran.
    """

    name: str
    features: tuple[Feature, ...]
    seen: tuple[str, str]
    instead: str = ""
    owner: str = ""

    @property
    def attribute(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


class InternalMissingError(RuntimeError):
    """This torch lacks a private name that is needed; the message names it."""


EVER = ("2.4", "2.15")
_DDP = "torch.nn.parallel.DistributedDataParallel."
_FSDP = "torch.distributed.fsdp."
_CHECKPOINT = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper."
_LOADER = "torch.utils.data.dataloader."
_DISPATCH = "torch.utils._python_dispatch."
_PROFILE = "torch.autograd.profiler.profile."
_FRAMES = "torch._C._dynamo.eval_frame."

_GLOO_OPTIONS = ("_Options", "_Options._devices", "_Options._threads", "_Options._timeout")

_ATTENTION = "torch.ops.aten._scaled_dot_product_"

_OTHER_RECORDER = "the other flight recorder, where there is one"

INTERNALS: tuple[Internal, ...] = (
    # --- what the hook measures ---------------------------------------------------------------------------------
    Internal("torch.nn.Module._compiled_call_impl", ("module_calls",), EVER, owner="module"),
    Internal("torch.nn.Module._call_impl", ("module_calls",), EVER),
    Internal("torch.autograd.Variable._execution_engine.queue_callback", ("backward",), EVER),
    Internal(
        "torch.Tensor._backward_hooks",
        (),
        EVER,
        "Tensor.register_hook watches the outputs, at 2 us more each, and hooks on parameters are not noticed",
    ),
    Internal(
        "torch.autograd.graph.Node._register_hook_dict",
        (),
        EVER,
        "Tensor.register_hook watches the outputs, at 2 us more each",
        owner="node",
    ),
    Internal("torch._C._autograd._prepare_profiler", ("windows",), EVER),
    Internal("torch._C._autograd._enable_profiler", ("windows",), EVER),
    Internal("torch._C._autograd._disable_profiler", ("windows",), EVER),
    Internal("torch._C._autograd._profiler_enabled", ("windows", "traces"), EVER),
    Internal("torch._C._autograd._enable_record_function", ("windows",), EVER),
    Internal("torch._C._autograd.DeviceType", ("windows",), EVER),
    Internal("torch._C._profiler._ExperimentalConfig", ("windows",), EVER),
    Internal("torch._C._profiler.RecordScope", (), EVER, "no slice of a step says what an exact window will cost"),
    Internal(
        "torch._C._current_graph_task_id",
        (),
        EVER,
        "the first exact window is not priced by slices of a step, so an expensive one waits until it is earned",
    ),
    Internal(
        "torch._C._autograd._get_sequence_nr",
        (),
        EVER,
        "a step with many times the operators of the last window is noticed only when its window is taken",
    ),
    Internal(_PROFILE + "_prepare_trace", ("windows",), EVER),
    Internal(_PROFILE + "_start_trace", ("windows",), EVER),
    Internal(_PROFILE + "config", ("windows",), EVER),
    Internal(_DISPATCH + "TorchDispatchMode", ("flops",), EVER),
    Internal(_DISPATCH + "_get_current_dispatch_mode_stack", ("flops",), EVER),
    Internal(_DISPATCH + "_pop_mode", ("flops",), EVER),
    Internal(_DISPATCH + "_push_mode", ("flops",), EVER),
    Internal(_DISPATCH + "is_traceable_wrapper_subclass", ("flops",), EVER),
    Internal("torch.utils.flop_counter.flop_registry", ("flops",), EVER),
    Internal(_ATTENTION + "flash_attention", ("flops",), EVER),
    Internal(_ATTENTION + "efficient_attention", (), EVER, "there is no such attention to count"),
    Internal(_ATTENTION + "cudnn_attention", (), EVER, "there is no such attention to count"),
    Internal(_ATTENTION + "flash_attention_for_cpu", (), EVER, "there is no such attention to count"),
    Internal("torch._C._len_torch_dispatch_stack", ("flops",), EVER),
    Internal("torch._ops.OpOverload", ("flops",), EVER),
    Internal("torch._ops.OpOverload._overloadpacket", ("flops",), EVER, owner="operator"),
    # --- torch.compile ------------------------------------------------------------------------------------------
    Internal(_FRAMES + "_FrameAction.SKIP", ("compile",), ("2.9", "2.15")),
    Internal(_FRAMES + "_FrameExecStrategy", ("compile",), ("2.9", "2.15")),
    Internal(_FRAMES + "set_code_exec_strategy", ("compile",), ("2.9", "2.15")),
    Internal(
        "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx",
        (),
        EVER,
        "the end of a step is not seen in an optimizer that is compiled after attach",
    ),
    Internal(
        "torch._dynamo.graph_break",
        (),
        EVER,
        "the end of a step is not seen in an optimizer that is compiled after attach",
    ),
    Internal("torch._dynamo.utils.counters", ("flops",), EVER),
    Internal("torch._dynamo.callback.callback_handler", (), EVER, "compilations are not timed"),
    # Marks: torch sets or reads them only while the feature is in use, so their absence means nothing.
    Internal("torch.compiler.<function>._dynamo_marked_constant", (), EVER, "breaks of a graph", owner="mark"),
    Internal("torch._dynamo.<wrapper>._torchdynamo_orig_callable", (), EVER, "the other marks tell", owner="mark"),
    Internal("torch._dynamo.OptimizedModule._orig_mod", (), EVER, "only the wrapped model is seen", owner="mark"),
    # --- among ranks --------------------------------------------------------------------------------------------
    Internal(
        "torch.distributed.distributed_c10d._get_default_store", ("ranks", "agreement", "run_gathering"), EVER
    ),
    Internal("torch.distributed.ProcessGroup._allgather_base", ("ranks", "agreement"), EVER),
    Internal("torch.distributed.ProcessGroupGloo", ("ranks", "agreement"), EVER),
    *(
        Internal(
            f"torch.distributed.ProcessGroupGloo.{name}",
            (),
            EVER,
            "torch chooses the ranks' addresses, and each rank connects with all others at once",
        )
        for name in (*_GLOO_OPTIONS, "create_device")
    ),
    Internal(
        "torch.distributed.ProcessGroupGloo._set_default_timeout",
        (),
        EVER,
        "a gather that another rank joins a minute late fails, and tuning freezes",
    ),
    Internal("torch.distributed.distributed_c10d._get_default_group", ("last_collective",), EVER),
    Internal("torch.distributed.ProcessGroup._get_sequence_number_for_group", ("last_collective",), EVER),
    Internal("torch._C._distributed_c10d._dump_nccl_trace_json", (), ("2.6", "2.15"), _OTHER_RECORDER),
    Internal("torch._C._distributed_c10d._dump_fr_trace_json", (), ("2.9", "2.15"), _OTHER_RECORDER),
    Internal("torch.distributed.distributed_c10d._world", (), EVER, "recorders of NCCL and gloo only"),
    Internal("torch.distributed.ProcessGroup._device_types", (), EVER, "torch.distributed.get_backend"),
    Internal("torch.distributed.ProcessGroup._get_backend", (), EVER, "torch.distributed.get_backend"),
    Internal(
        "torch.distributed.algorithms.join.Joinable._join_config", ("agreement",), EVER, owner="DDP"
    ),
    # --- DDP ----------------------------------------------------------------------------------------------------
    Internal(_DDP + "reducer", ("ddp_buckets",), EVER, owner="DDP"),
    Internal(_DDP + "logger", ("ddp_buckets",), EVER, owner="DDP"),
    Internal(_DDP + "process_group", ("ddp_buckets",), EVER, owner="DDP"),
    Internal(_DDP + "static_graph", ("ddp_buckets", "micro_batch"), EVER, owner="DDP"),
    Internal(_DDP + "require_backward_grad_sync", ("micro_batch",), EVER, owner="DDP"),
    Internal(_DDP + "require_forward_param_sync", ("micro_batch",), EVER, owner="DDP"),
    Internal(_DDP + "find_unused_parameters", ("ddp_buckets",), EVER, owner="DDP"),
    Internal(_DDP + "gradient_as_bucket_view", ("ddp_buckets",), EVER, owner="DDP"),
    Internal(_DDP + "bucket_bytes_cap", ("ddp_buckets",), EVER, owner="DDP"),
    Internal(_DDP + "_comm_hooks", ("ddp_buckets",), EVER, owner="DDP"),
    Internal(_DDP + "_has_rebuilt_buckets", ("ddp_buckets",), EVER, owner="DDP"),
    Internal(_DDP + "_ddp_init_helper", ("ddp_buckets",), EVER),
    Internal(_DDP + "_build_params_for_reducer", ("ddp_buckets",), EVER),
    Internal(_DDP + "_build_debug_param_to_name_mapping", ("ddp_buckets",), EVER),
    Internal(_DDP + "_get_ddp_logging_data", ("ddp_buckets",), EVER),
    Internal("torch.distributed.Reducer._remove_autograd_hooks", ("ddp_buckets",), EVER),
    Internal("torch.distributed.Reducer._set_static_graph", ("ddp_buckets",), EVER),
    Internal("torch.distributed.Logger._set_static_graph", ("ddp_buckets",), EVER),
    Internal("torch.distributed.Reducer", ("ddp_buckets",), EVER),
    Internal("torch.distributed.Logger", ("ddp_buckets",), EVER),
    Internal("torch.distributed._compute_bucket_assignment_by_size", ("ddp_buckets",), EVER),
    Internal(_DDP + "_passing_sync_batchnorm_handle", ("ddp_buckets",), EVER),
    Internal("torch.distributed._register_comm_hook", ("compression",), EVER),
    Internal("torch.distributed.Logger._set_comm_hook_name", ("compression",), EVER),
    # Where DDP keeps its sizes: `_bucket_config` since torch 2.12, and the default of the first bucket before.
    Internal(_DDP + "_bucket_config", (), ("2.12", "2.15"), "bucket_bytes_cap_default", owner="mark"),
    Internal("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", (), EVER, "1 MiB, as ever"),
    Internal(_DDP + "_static_graph_delay_allreduce_enqueued", (), EVER, "torch makes it", owner="mark"),
    Internal(_DDP + "_use_python_reducer", (), EVER, "the python reducer is not noticed", owner="mark"),
    Internal(_DDP + "_delay_all_reduce_params", (), EVER, "delayed all-reduces are not noticed", owner="mark"),
    Internal("torch.Tensor._post_accumulate_grad_hooks", (), EVER, "such hooks of the script's are not noticed"),
    Internal("torch.nn.Parameter._in_backward_optimizers", (), EVER, "not noticed", owner="mark"),
    Internal("torch._foreach_norm", (), EVER, "torch.linalg.vector_norm of each gradient"),
    Internal("torch._foreach_add_", (), EVER, "one addition for each gradient"),
    # --- the data loader ----------------------------------------------------------------------------------------
    Internal(_LOADER + "DataLoader._iterator", ("loader",), EVER, owner="loader"),
    Internal(_LOADER + "_MultiProcessingDataLoaderIter._shutdown_workers", ("loader",), EVER),
    Internal("torch.utils.data._utils.signal_handling._remove_worker_pids", ("loader",), EVER),
    Internal(_LOADER + "_MultiProcessingDataLoaderIter._workers", (), EVER, "workers' memory is unknown", owner="mark"),
    Internal(_LOADER + "_MultiProcessingDataLoaderIter._worker_pids_set", (), EVER, "torch watches them", owner="mark"),
    Internal(_LOADER + "_BaseDataLoaderIter", ("run_waits",), EVER),
    Internal(_LOADER + "_BaseDataLoaderIter.__next__", ("run_waits",), EVER),
    Internal(
        _LOADER + "_BaseDataLoaderIter._next_index", (), EVER, "samples are guessed from the first dimension of tensors"
    ),
    *(
        Internal(
            f"{_LOADER}_MultiProcessingDataLoaderIter.{name}",
            (),
            EVER,
            "the short last batch of the epoch in which pacecar attaches is counted some batches early",
            owner="mark",
        )
        for name in ("_send_idx", "_rcvd_idx")
    ),
    Internal(
        _LOADER + "_BaseDataLoaderIter._collate_fn", (), EVER,
        "a data set that gives whole batches counts as one sample each", owner="mark",
    ),
    # --- FSDP2 --------------------------------------------------------------------------------------------------
    Internal(_FSDP + "FSDPModule._get_fsdp_state", ("fsdp_prefetch", "fsdp_reshard"), EVER, owner="FSDPModule"),
    Internal(_FSDP + "FSDPState._states_to_forward_prefetch", ("fsdp_prefetch",), EVER, owner="FSDPState"),
    Internal(_FSDP + "FSDPState._states_to_backward_prefetch", ("fsdp_prefetch",), EVER, owner="FSDPState"),
    Internal(_FSDP + "FSDPState._fsdp_param_groups", (), ("2.13", "2.15"), "_fsdp_param_group", owner="mark"),
    Internal(_FSDP + "FSDPState._fsdp_param_group", (), EVER, "_fsdp_param_groups", owner="mark"),
    Internal(_FSDP + "FSDPParamGroup._reshard_after_forward", ("fsdp_reshard",), EVER, owner="FSDPParamGroup"),
    Internal(_FSDP + "FSDPParamGroup.post_forward_mesh_info", ("fsdp_reshard",), EVER, owner="FSDPParamGroup"),
    Internal(_FSDP + "FSDPParamGroup.mesh_info", ("fsdp_reshard",), EVER, owner="FSDPParamGroup"),
    Internal(_FSDP + "FSDPParamGroup.is_unsharded", ("fsdp_reshard",), EVER, owner="FSDPParamGroup"),
    Internal(_FSDP + "FSDPParamGroup.reduce_grads", ("run_fsdp",), EVER, owner="FSDPParamGroup"),
    # --- activation checkpointing -------------------------------------------------------------------------------
    *(
        Internal(_CHECKPOINT + name, ("checkpointed_blocks",), EVER, owner="CheckpointWrapper")
        for name in ("checkpoint_fn", "_checkpoint_wrapped_module")
    ),
    *(
        Internal(f"torch.nn.Module.{name}", ("checkpointed_blocks",), EVER, owner="module")
        for name in ("_forward_hooks", "_forward_pre_hooks")
    ),
    Internal("torch.Tensor._version", ("checkpointed_blocks",), EVER),
    Internal("torch._C._autograd._saved_tensors_hooks_is_enabled", ("checkpointed_blocks",), EVER),
    Internal("torch._C._autograd._top_saved_tensors_default_hooks", ("checkpointed_blocks",), ("2.9", "2.15")),
    # --- others -------------------------------------------------------------------------------------------------
    Internal("torch.optim.Optimizer.step._wrapped_by_lr_sched", ("batch_samples",), EVER, owner="scheduled step"),
    Internal("torch.nn.Module._modules", ("run_models",), EVER, owner="module"),
    Internal("torch.nn.Module._parameters", ("run_models",), EVER, owner="module"),
)  # fmt: skip
"""Every private name of torch in pacecar; `tests/pacecar/test_torch_internals.py` removes each one."""

_BY_NAME = {internal.name: internal for internal in INTERNALS}
assert len(_BY_NAME) == len(INTERNALS), "a name has one row"

_LAZY = ("torch._dynamo",)
"""Modules that take a second to import; jobs that trace have loaded them, and others do not need them."""

_ABSENT = object()
_found: dict[str, Any] = {}
_lacking: dict[Feature, str | None] = {}
_told: set[str] = set()


def find(name: str) -> Any:  # noqa: ANN401  whatever torch keeps there
    """Return the object called `name`, a name of the table; None if torch lacks it or has not loaded it yet."""
    found = _found.get(name)
    if found is None:
        assert name in _BY_NAME, f"{name} is not in the table of torch's private names"
        if name.startswith(_LAZY) and "torch._dynamo" not in sys.modules:
            return None
        found = _found[name] = _look_up(name)
    return None if found is _ABSENT else found


def need(name: str) -> Any:  # noqa: ANN401  as above
    """Return the object called `name`.

    Raises:
        InternalMissingError: torch lacks it.
    """
    found = find(name)
    if found is None:
        raise InternalMissingError(_reason([_BY_NAME[name]], _BY_NAME[name].features))
    return found


def own_has(thing: object, name: str) -> bool:
    """Return whether `thing` has the attribute that the table calls `name`."""
    return _found.get(name) is not _ABSENT and hasattr(thing, _BY_NAME[name].attribute)


def lacking(feature: Feature, owners: dict[str, object] | None = None) -> str | None:
    """Return why `feature` is off in this torch, or None if torch has everything it needs; log the reason once.

    `owners` are the objects, by kind, that hold attributes that no module or class has.
    """
    reason = _lacking.get(feature)
    if feature not in _lacking:
        static = [i for i in INTERNALS if feature in i.features and not i.owner]
        reason = _missing(feature, static, {})
        if not any(_waits(i.name) for i in static):
            _lacking[feature] = reason
    if reason is None and owners:
        reason = _missing(feature, [i for i in INTERNALS if i.owner in owners], owners)
    if reason is not None and reason not in _told:
        _told.add(reason)
        # Few jobs compile, so it is not a warning.
        logger.log(logging.INFO if feature == "compile" else logging.WARNING, "pacecar: %s", reason)
    return reason


def forget() -> None:
    """Forget all results and logged reasons; for tests, which remove names."""
    _found.clear()
    _lacking.clear()
    _told.clear()


def suppose_missing(names: Iterable[str]) -> None:
    """Act as if torch lacked these names; for tests of names that torch itself needs."""
    for name in names:
        assert name in _BY_NAME, f"{name} is not in the table of torch's private names"
        _found[name] = _ABSENT
    _lacking.clear()


def _missing(feature: Feature, internals: Iterable[Internal], owners: dict[str, object]) -> str | None:
    of_feature = [i for i in internals if feature in i.features]
    gone = [
        i
        for i in of_feature
        if not (own_has(owners[i.owner], i.name) if i.owner else find(i.name) is not None or _waits(i.name))
    ]
    return _reason(gone, (feature,)) if gone else None


def _waits(name: str) -> bool:
    """Return whether `name` is in a module that is not loaded yet, so that it cannot be checked."""
    return name.startswith(_LAZY) and "torch._dynamo" not in sys.modules and _found.get(name) is not _ABSENT


def _reason(gone: list[Internal], features: Iterable[Feature]) -> str:
    import torch

    version = str(torch.__version__).partition("+")[0]
    names = ", ".join(i.name for i in gone)
    first = max((i.seen[0] for i in gone), key=_order)
    last = min((i.seen[1] for i in gone), key=_order)
    off = "; ".join(FEATURES[feature] for feature in features) or gone[0].instead
    return f"torch {version} has no {names}: {off} (use torch {first} to {last}, or a newer pacecar)"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _look_up(name: str) -> Any:  # noqa: ANN401
    """Return the object called `name`, importing modules on the way; `_ABSENT` if there is none."""
    parts = name.split(".")
    try:
        place: Any = importlib.import_module(parts[0])
        for index, part in enumerate(parts[1:], start=2):
            if isinstance(place, ModuleType) and not hasattr(place, part):
                importlib.import_module(".".join(parts[:index]))
            place = getattr(place, part)
    except (ImportError, AttributeError):
        return _ABSENT
    return place
