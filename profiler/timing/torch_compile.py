"""Keeps pacecar's hooks out of torch.compile, and times its compilations.

Dynamo treats the hooks of a module or optimizer as part of what it compiles.  Reading a clock there breaks the graph,
`fullgraph=True` raises in the user's own call, and the code that a hook calls at a boundary is compiled too, which took
10 s on torch 2.13.  Dynamo can reach a hook in two ways, and both are closed:

    inlined into the graph      `is_tracing()` is a constant to dynamo; the hook returns at once and leaves no trace
    a frame of its own          `keep_out` marks the code: it and what it calls run uncompiled

In a model dynamo sees none of our code (`module_calls`).  If dynamo compiles the model together with its caller, the
hook does not see the calls: the phases are absent, which is logged once.

    pacecar.attach(torch.compile(model))      observed around the compiled code, every phase is seen
    torch.compile(model) after attach(model)  observed around its forward, or not if dynamo inlines the module

The end of a step is too important to lose.  If graphs may break, the graph of a compiled optimizer is broken after its
update (torch's own optimizers break theirs anyway); if they may not, no step is seen.

Nothing here imports torch._dynamo, which takes a second: a process that traces has already imported it.

A compilation takes seconds, and a shape or a flag that changes brings another one in the middle of training.  Dynamo
calls back around each (`Compilations`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch

from pacecar import torch_internals

__all__ = [
    "Compilations",
    "break_graph",
    "compiled_frames",
    "constant",
    "is_captured",
    "is_tracing",
    "keep_out",
    "may_break_while_tracing",
    "skip_frame",
    "step_out_of_graph",
    "tell",
]

_log = logging.getLogger(__name__)

is_tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether dynamo traces the calling code; the call costs 30 ns otherwise."""

_jit: Any = torch.jit  # torch has no types for it

_told: set[str] = set()

P = ParamSpec("P")
T = TypeVar("T")


def constant(function: Callable[P, T]) -> Callable[P, T]:
    """Make dynamo call `function` while tracing and treat the result as a constant.

    Like torch.compiler.assume_constant_result, but without its import of torch._dynamo.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


@constant
def tell(what: str) -> bool:
    """Log `what` once; dynamo calls this and treats the result as a constant, so it leaves nothing in the graph."""
    if what not in _told:
        _told.add(what)
        _log.warning("pacecar: %s", what)
    return True


@constant
def may_break_while_tracing() -> bool:
    """Return whether the graph that dynamo is tracing may be broken."""
    try:
        torch_internals.need("torch._dynamo.graph_break")
        tracer: Any = torch_internals.need("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx")()
        return not (tracer.one_graph or tracer.error_on_graph_break)
    except Exception:  # noqa: BLE001  private API inside the user's compilation: when in doubt, no
        return False


def break_graph() -> None:
    """Break the graph that dynamo traces, if `may_break_while_tracing`, so that the caller runs uncompiled."""
    torch._dynamo.graph_break()  # spelled out, because dynamo recognizes it by this name while tracing the line


def step_out_of_graph() -> None:
    """Break the graph that dynamo traces, so that the caller runs uncompiled; log it if that is not allowed."""
    if may_break_while_tracing():
        break_graph()
    else:
        tell("the optimizer is compiled with fullgraph=True, so steps are not seen and not measured")


def keep_out(*functions: Callable[..., object]) -> None:
    """Keep dynamo from compiling `functions`, or what they call, as frames of their own.

    Like torch.compiler.disable, but without a cost per call; a torch without these private parts compiles them.
    """
    _set_strategy(functions, calls="SKIP")


def skip_frame(*functions: Callable[..., object]) -> None:
    """Keep dynamo from compiling the frames of `functions`; what they call is compiled as usual."""
    _set_strategy(functions, calls="DEFAULT")


def _set_strategy(functions: tuple[Callable[..., object], ...], *, calls: str) -> None:
    if torch_internals.lacking("compile") is not None:
        return
    try:
        skip: Any = torch_internals.need("torch._C._dynamo.eval_frame._FrameAction.SKIP")
        inside: Any = getattr(type(skip), calls)
        strategy: Any = torch_internals.need("torch._C._dynamo.eval_frame._FrameExecStrategy")
        set_strategy: Any = torch_internals.need("torch._C._dynamo.eval_frame.set_code_exec_strategy")
        for function in functions:
            code: CodeType = function.__code__
            set_strategy(code, strategy(skip, inside))
    except (AttributeError, TypeError):
        _log.debug("torch %s cannot keep torch.compile out of hooks", torch.__version__, exc_info=True)


def compiled_frames() -> int:
    """Return the number of frames and graphs that torch.compile has made in this process, without importing it."""
    # With fullgraph=True torch 2.13 counts no frames, but graphs.
    counters: Mapping[str, Mapping[str, int]] | None = torch_internals.find("torch._dynamo.utils.counters")
    if counters is None:
        return 0
    return sum(counters["frames"].values()) + counters["stats"].get("unique_graphs", 0)


class Compilations:
    """Times what torch.compile compiles in this process, in whichever step and thread."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._callbacks: Any = None
        self._under_way = 0
        self._begun_ns = 0
        self._total_ns = 0

    @property
    def total_ns(self) -> int | None:
        """How long compilations took since `watch` found dynamo, which may be after the first ones; None: unknown."""
        is_blind = "torch._dynamo" in sys.modules and self._callbacks is None
        return None if is_blind else self._total_ns

    def watch(self) -> None:
        """Time compilations from now on; to be called again, as dynamo may be imported and is sometimes reset."""
        callbacks = torch_internals.find("torch._dynamo.callback.callback_handler")
        if callbacks is not None and self._begins not in callbacks.start_callbacks:
            self._under_way = 0
            callbacks.register_start_callback(self._begins)
            callbacks.register_end_callback(self._ends)
            self._callbacks = callbacks

    def close(self) -> None:
        """Time no more, also in a forked child.  May be called repeatedly."""
        if self._callbacks is not None and self._begins in self._callbacks.start_callbacks:
            self._callbacks.remove_start_callback(self._begins)
            self._callbacks.remove_end_callback(self._ends)

    def _begins(self, *_: object) -> None:  # older torch passes no arguments
        if self._under_way == 0:
            self._begun_ns = self._now_ns()
        self._under_way += 1

    def _ends(self, *_: object) -> None:
        if self._under_way:
            self._under_way -= 1
            if self._under_way == 0:
                self._total_ns += self._now_ns() - self._begun_ns


def is_captured(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a module called with these arguments is only traced and computes nothing.

    Covers `torch.jit.trace`, fx and `torch.export`; for dynamo see `is_tracing`.
    """
    if _jit.is_tracing():
        return True
    first = args[0] if args else next(iter(kwargs.values()), None)
    if type(first) is torch.Tensor:  # torch.export and fx pass another class
        return False
    return torch.compiler.is_compiling() or isinstance(first, torch.fx.Proxy)
