"""What may torch.compile see of our hooks?  Nothing.

Dynamo takes the hooks of a module or an optimizer that it compiles for a part of it.  A clock that is read there breaks
the graph, `fullgraph=True` raises in the user's own call, and what the hook calls at a boundary is compiled too: 10 s
of it on torch 2.13.  Dynamo has two ways to a hook, and each is closed:

    inlined into the graph      `is_tracing()` is a constant to it; the hook returns at once and leaves no trace
    a frame of its own          `keep_out` marks the code: it and what it calls run as they are

Of a model dynamo sees nothing of ours at all (`module_calls`).  What it compiles together with what calls the model is
not seen by us: the phases are absent, and it is said once.

    pacecar.attach(torch.compile(model))      observed around the compiled code, every phase is seen
    torch.compile(model) after attach(model)  observed around its forward, or not where dynamo inlines the module

The end of a step is too much to lose.  Where graphs may break, that of a compiled optimizer does behind its update
(torch's own optimizers always break theirs anyway); where they may not, no step is seen.

Nothing here imports torch._dynamo, which takes a second: who traces has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch

from pacecar import torch_internals

__all__ = ["compiled_frames", "is_captured", "is_tracing", "keep_out", "skip_frame", "step_out_of_graph", "tell"]

_log = logging.getLogger(__name__)

is_tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether dynamo looks at the calling code; 30 ns to everybody else."""

_jit: Any = torch.jit  # which torch does not type

_told: set[str] = set()


def tell(what: str) -> bool:
    """Log `what`, once; dynamo calls this and takes the result for a constant, so it is not in the compiled code."""
    if what not in _told:
        _told.add(what)
        _log.warning("pacecar: %s", what)
    return True


def _may_break_while_tracing() -> bool:
    try:
        torch_internals.need("torch._dynamo.graph_break")
        tracer: Any = torch_internals.need("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx")()
        return not (tracer.one_graph or tracer.error_on_graph_break)
    except Exception:  # noqa: BLE001  private ground, in the user's compilation: what cannot be told is no
        return False


# What torch.compiler.assume_constant_result does after it imported torch._dynamo.
_constants: tuple[Any, ...] = (tell, _may_break_while_tracing)
for _function in _constants:
    _function._dynamo_marked_constant = True


def step_out_of_graph() -> None:
    """Break the graph that dynamo traces, so that the caller is run as it is; where that may not be, say so."""
    if _may_break_while_tracing():
        torch._dynamo.graph_break()  # by its own name, which is what dynamo knows it by while it traces this line
    else:
        tell("the optimizer is compiled with fullgraph=True, so steps are not seen and not measured")


def keep_out(*functions: Callable[..., object]) -> None:
    """Let dynamo never compile `functions`, or what they call, as frames of their own.

    As torch.compiler.disable does, at no cost per call; a torch without these inner parts compiles them.
    """
    _set_strategy(functions, calls="SKIP")


def skip_frame(*functions: Callable[..., object]) -> None:
    """Let dynamo not compile the frames of `functions`; what they call is compiled as if they were not there."""
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
    """Return how many frames and graphs torch.compile has made in this process, without importing it."""
    # With fullgraph=True torch 2.13 counts no frames, but graphs.
    counters: Mapping[str, Mapping[str, int]] | None = torch_internals.find("torch._dynamo.utils.counters")
    if counters is None:
        return 0
    return sum(counters["frames"].values()) + counters["stats"].get("unique_graphs", 0)


def is_captured(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a module that is called with these computes nothing: torch writes down what it would compute.

    That is `torch.jit.trace`, fx and `torch.export`; dynamo asks `is_tracing`.
    """
    if _jit.is_tracing():
        return True
    first = args[0] if args else next(iter(kwargs.values()), None)
    if type(first) is torch.Tensor:  # what torch.export and fx give is another class
        return False
    return torch.compiler.is_compiling() or isinstance(first, torch.fx.Proxy)
