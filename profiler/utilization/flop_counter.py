"""Counts the model FLOPs of one forward, and derives those of the backward that follows it.

torch's FlopCounterMode suits a script that wraps a step in `with`.  It does not suit a running job: it also tracks
modules with global hooks and hooks in the autograd graph, which has broken jobs (pytorch#134242, #131753), raises on
unknown higher-order operators, and makes a function compiled under it permanently slow (pytorch#123800).  So this is a
separate dispatch mode that only observes one forward, with torch's own formulas
(`torch.utils.flop_counter.flop_registry`).

Backward is *derived* by the same formulas and not observed.  It cannot be observed from here: around every node,
autograd restores the thread-local state that `backward()` was called with, modes included.  So a mode that is entered
in a gradient hook is gone after that one node (tried on torch 2.13; the thread of a device restores the same state, at
`ThreadLocalStateGuard` in autograd/engine.cpp).  A mode would have to be on before the user's loss, and stay on when
that raises.  But which inputs require a gradient is known at each operator, and the formulas give what observing gives,
to the FLOP (`tests/profiler/test_flops.py` compares the two on real models).

These are therefore *model* FLOPs in the sense of PaLM (Chowdhery et al. 2022, appendix B): the matrix work of forward
and backward that the mathematics needs.  Recomputation, by activation checkpointing or inside a fused attention's
backward, is not part of it ("hardware FLOPs" would contain it; torch's counter contains the latter).  As in torch's
counter one multiply-add counts as two FLOPs, and causal attention counts as full attention.

In case of doubt there is no figure: matrix operators without a formula, custom operators, autograd functions with their
own backward, tensor subclasses and compiled functions set `doubt`.

Not counted: a loss computed outside the module; double backward; kernels that bypass the dispatcher (a raw Triton or
CUDA launch).  Outputs whose gradient is never used count as if it were.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from pacecar.device_peaks import TF32
from pacecar.torch_internals import find, lacking, need

__all__ = ["Arithmetic", "ForwardCount", "ForwardCounter", "leave", "modes_on", "runs_in_tf32", "uncountable"]

FRAMES_MAX = 1000
"""Python's own recursion limit: no stack that is searched is deeper."""

_aten = torch.ops.aten

TRANSPARENT = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "symm_mem"})
"""Namespaces of torch itself: an operator without a formula there does no matrix work, unless MATRIX_WORK has it."""

MATRIX_WORK = frozenset({
    "_addmm_activation", "_cudnn_rnn", "_grouped_mm", "_int_mm", "_linalg_solve_ex", "_mixed_dtypes_linear",
    "_native_multi_head_attention", "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_grouped_mm", "_scaled_grouped_mm_v2",
    "_scaled_mm_v2", "_sparse_mm", "_sparse_semi_structured_addmm", "_sparse_semi_structured_mm",
    "_transformer_encoder_layer_fwd", "_trilinear", "_weight_int4pack_mm", "_weight_int8pack_mm", "addbmm", "addmv",
    "addr", "cholesky", "linear", "miopen_rnn", "mkldnn_linear", "mkldnn_rnn_layer", "mv", "sparse_sampled_addmm",
})  # fmt: skip
"""Operators of torch 2.13 that multiply matrices and that its counter has no formula for."""

_SHAPE_QUESTIONS = frozenset({
    "dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "layout", "numel", "size",
    "storage_offset", "stride", "sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride",
})  # fmt: skip
"""Operators that a subclass with its own sizes (nested tensors) must handle itself, as under torch's own counter."""

_MATRICES = {_aten.mm: (0, 1), _aten.bmm: (0, 1), _aten.addmm: (1, 2), _aten.baddbmm: (1, 2)}
"""Positions of the two factors: the gradient of each is one product with as many FLOPs as the forward."""

_ATTENTION = tuple(
    f"torch.ops.aten._scaled_dot_product_{kind}_attention{where}"
    for kind, where in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The kind of arithmetic in which most of the FLOPs are done; it selects the peak to compare with."""

    dtype: torch.dtype
    is_convolution: bool = False


@dataclass(frozen=True, slots=True)
class ForwardCount:
    """The model FLOPs of one forward and of its backward."""

    forward: int
    backward: int
    arithmetic: Arithmetic

    @property
    def total(self) -> int:
        """Forward and backward together."""
        return self.forward + self.backward


class ForwardCounter:
    """Observes one forward on this thread: enter the counter, run the forward, and call `leave`.

    Each instance is also a TorchDispatchMode, a class that is looked up when the first instance is made.

    Raises:
        InternalMissingError: this torch has no such modes; see `uncountable`.
    """

    supports_higher_order_operators = True

    def __new__(cls) -> ForwardCounter:
        """Make an instance that is also a dispatch mode."""
        return object.__new__(_mode())

    def __init__(self) -> None:
        super().__init__()
        self.doubt: str | None = None
        """Why there is no count."""
        self._forward = 0
        self._backward = 0
        self._by_arithmetic: Counter[Arithmetic] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile to ignore this mode, so that a first call is not compiled for it."""
        return True

    def count(self) -> ForwardCount | None:
        """Return what was counted; None with a `doubt`."""
        if self.doubt is None and not self._forward:
            self.doubt = "no operator with a formula ran in the module's forward"
        if self.doubt is not None:
            return None
        arithmetic, _ = self._by_arithmetic.most_common(1)[0]
        return ForwardCount(self._forward, self._backward, arithmetic)

    def __enter__(self) -> ForwardCounter:
        enter: Callable[[], ForwardCounter] = super().__enter__  # type: ignore[misc]  # the mode's
        return enter()

    def __exit__(self, *error: object) -> None:
        leave_mode: Callable[..., None] = super().__exit__  # type: ignore[misc]  # the mode's
        leave_mode(*error)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  an operator of any kind
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  whatever the operator returns
        if any(kind is not torch.Tensor for kind in types) and func.__name__.split(".")[0] in _SHAPE_QUESTIONS:
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.doubt is None:
            try:
                self._see(func, args, kwargs, out)
            except Exception as error:  # noqa: BLE001  the operator has run; only our count is lost
                self.doubt = f"{func}: {type(error).__name__}: {error}"
        return out

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> None:  # noqa: ANN401
        if not isinstance(func, need("torch._ops.OpOverload")):
            self.doubt = f"the higher-order operator {func} has no formula here"
            return
        packet: Any = func._overloadpacket
        formula = _formula(packet)
        if formula is None:
            name = packet.__name__
            if func.namespace not in TRANSPARENT or name in MATRIX_WORK:
                self.doubt = f"the operator {func.namespace}::{name} has no formula"
            return
        is_subclass: Callable[[object], bool] = need("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
        if any(is_subclass(part) for part in args):
            self.doubt = f"{packet} ran on a tensor subclass, whose work on this rank its shape does not tell"
            return
        flops = formula(*args, **kwargs, out_val=out)
        backward = self._backward_of(packet, args, out, flops)
        self._forward += flops
        self._backward += backward
        first = next(part for part in args if isinstance(part, torch.Tensor))
        self._by_arithmetic[Arithmetic(first.dtype, is_convolution=packet is _aten.convolution)] += flops + backward

    def _backward_of(self, packet: Any, args: tuple[Any, ...], out: Any, flops: int) -> int:  # noqa: ANN401
        if not torch.is_grad_enabled():
            if _is_inside_function():
                self.doubt = (
                    f"{packet} ran inside a torch.autograd.Function, whose backward is its own (checkpointing with"
                    " use_reentrant=True is one)"
                )
            return 0
        if packet in _MATRICES:
            return flops * sum(bool(args[place].requires_grad) for place in _MATRICES[packet])
        if packet in _attention():
            # The gradients of q, k, v and of the scores: four products of the forward's two sizes.  torch counts a
            # fifth: the scores, which the fused kernel recomputes to save memory.  That is not model work.
            return 2 * flops if any(part.requires_grad for part in args[:3]) else 0
        wanted = [isinstance(part, torch.Tensor) and part.requires_grad for part in args]
        if not any(wanted):
            return 0
        if packet is _aten.convolution:
            shapes = tuple(part if is_wanted else None for part, is_wanted in zip(args[:2], wanted, strict=False))
            mask = [*wanted[:2], False]
            formula: Callable[..., int] = need("torch.utils.flop_counter.flop_registry")[_aten.convolution_backward]
            return formula(out, *args[:2], None, *args[3:9], mask, out_val=(*shapes, None))
        self.doubt = f"the backward of {packet} has no formula here"
        return 0


def runs_in_tf32(arithmetic: Arithmetic) -> bool:
    """Return whether torch lets this fp32 work run in TF32 on a CUDA device that has it."""
    if arithmetic.dtype is not torch.float32:
        return False
    backend = torch.backends.cudnn if arithmetic.is_convolution else torch.backends.cuda.matmul
    place = getattr(backend, "conv", None) if arithmetic.is_convolution else backend
    precision = getattr(place, "fp32_precision", None)  # since torch 2.9; reading the old switch may raise there
    return precision == TF32 if precision is not None else bool(backend.allow_tf32)


def modes_on() -> int:
    """Return how many dispatch modes are active in this thread."""
    return int(need("torch._C._len_torch_dispatch_stack")())


def uncountable() -> str | None:
    """Return what counting needs and this torch lacks, or None."""
    operator = _aten.mm.default
    return lacking("flops", {"operator": operator})


@functools.cache
def _mode() -> type[ForwardCounter]:
    """Return ForwardCounter as a TorchDispatchMode; torch inspects a class's methods when the class is made."""
    mode: type = need("torch.utils._python_dispatch.TorchDispatchMode")
    own = {"__torch_dispatch__": ForwardCounter.__torch_dispatch__, "__module__": __name__}
    return type("ForwardCounter", (ForwardCounter, mode), own)


def leave(counter: ForwardCounter) -> None:
    """Remove `counter`, and nothing else, from this thread's stack of modes, at whatever depth forward left it."""
    stack: Callable[[], list[Any]] = need("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
    above = []
    while counter in stack():
        if stack()[-1] is counter:
            counter.__exit__(None, None, None)
        else:
            above.append(need("torch.utils._python_dispatch._pop_mode")())
    for mode in reversed(above):
        need("torch.utils._python_dispatch._push_mode")(mode)


def _formula(packet: Any) -> Callable[..., int] | None:  # noqa: ANN401  an OpOverloadPacket
    if packet in _attention():  # the CPU's attention is the same mathematics, but not in torch's registry
        packet = need(_ATTENTION[0])
    formula: Callable[..., int] | None = need("torch.utils.flop_counter.flop_registry").get(packet)
    return formula


@functools.cache
def _attention() -> frozenset[Any]:
    """Return torch's fused attentions."""
    return frozenset(found for found in map(find, _ATTENTION) if found is not None)


def _is_inside_function() -> bool:
    """Return whether a torch.autograd.Function's own forward is running in this thread.

    Its caller `apply` is not a python function since torch 2.14, so the stack is searched for the forwards themselves.
    """
    forwards = _forwards_of_functions(len(torch.autograd.Function.__subclasses__()))
    frame = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        if frame.f_code in forwards:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return True


@functools.lru_cache(maxsize=1)
def _forwards_of_functions(direct: int) -> frozenset[CodeType]:
    """Return the code of every torch.autograd.Function's forward; `direct`, their number, only keys the cache."""
    waiting: list[Any] = [torch.autograd.Function]
    codes = set()
    while waiting:
        function = waiting.pop()
        waiting += function.__subclasses__()
        forward = inspect.unwrap(function.forward) if callable(function.forward) else None
        code = getattr(forward, "__code__", None)
        if code is not None:
            codes.add(code)
    return frozenset(codes)
