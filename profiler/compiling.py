"""What may torch.compile see of our hooks?  Nothing.

Dynamo takes the hooks of a module or an optimizer that it compiles for a part of it.  A clock that is read there breaks
the graph, `fullgraph=True` raises in the user's own call, and what the hook calls at a boundary is compiled too: 10 s
of it on torch 2.13.  Dynamo has two ways to a hook, and each is closed:

    inlined into the graph      `is_tracing()` is a constant to it; the hook returns at once and leaves no trace
    a frame of its own          `keep_out` marks the code: it and what it calls run as they are

What was inlined is not seen: the phases are absent, and it is said once.

    pacecar.attach(torch.compile(model))      hooks around the compiled code, every phase is seen
    torch.compile(model) after attach(model)  hooks around its forward or, where dynamo inlines the module, inside it

The end of a step is too much to lose.  Where graphs may break, that of a compiled optimizer does behind its update
(torch's own optimizers always break theirs anyway); where they may not, no step is seen.

Nothing here imports torch._dynamo, which takes a second: who traces has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from pacecar import torch_internals

__all__ = ["is_tracing", "keep_out", "step_out_of_graph", "tell_while_tracing"]

_log = logging.getLogger(__name__)

is_tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether dynamo looks at the calling code; 30 ns to everybody else."""

_told: set[str] = set()


def tell_while_tracing(what: str) -> bool:
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
_constants: tuple[Any, ...] = (tell_while_tracing, _may_break_while_tracing)
for _function in _constants:
    _function._dynamo_marked_constant = True


def step_out_of_graph() -> None:
    """Break the graph that dynamo traces, so that the caller is run as it is; where that may not be, say so."""
    if _may_break_while_tracing():
        torch._dynamo.graph_break()  # by its own name, which is what dynamo knows it by while it traces this line
    else:
        tell_while_tracing("the optimizer is compiled with fullgraph=True, so steps are not seen and not measured")


def keep_out(*functions: Callable[..., object]) -> None:
    """Let dynamo never compile `functions`, or what they call, as frames of their own.

    As torch.compiler.disable does, at no cost per call; a torch without these inner parts compiles them.
    """
    if torch_internals.lacking("compile") is not None:
        return
    try:
        skip: Any = torch_internals.need("torch._C._dynamo.eval_frame._FrameAction.SKIP")
        strategy: Any = torch_internals.need("torch._C._dynamo.eval_frame._FrameExecStrategy")
        set_strategy: Any = torch_internals.need("torch._C._dynamo.eval_frame.set_code_exec_strategy")
        for function in functions:
            code: CodeType = function.__code__
            set_strategy(code, strategy(skip, skip))
    except (AttributeError, TypeError):
        _log.debug("torch %s cannot keep torch.compile out of hooks", torch.__version__, exc_info=True)
