"""What users do with what they train: save, copy, script, export it, send it to another process; and what comes of it.

Every operation returns something that can be compared between a job with pacecar and one without.  For the scripts
beside it, which import it as their own: it is there where tests and pacecar are not on the path.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import json
import multiprocessing
import pickle
import re
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

__all__ = [
    "alone", "exported", "file_of", "files_in", "free_of_us", "loader_kept", "model_kept", "optimizer_kept", "outcomes",
    "scheduler_kept", "stable", "state_kept",
]  # fmt: skip

Operations = dict[str, Callable[[], Any]]


class Without:
    """Makes a process one that has no pacecar."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "pacecar":
            raise ModuleNotFoundError("there is no pacecar in this process", name=name)


if multiprocessing.parent_process() is not None:  # imported with the script, before what is sent to it is unpickled
    for name in [name for name in sys.modules if name.partition(".")[0] == "pacecar"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Without())  # type: ignore[arg-type]


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Around(nn.Module):
    """A module that a script traces, with the model in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


class Stable(pickle.Pickler):
    """Pickle with tensors as numbers: torch writes the addresses of storages."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            return tuple, ((type(thing).__name__, local.detach().tolist()),)
        return NotImplemented


def digest(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def stable(thing: Any) -> str:
    stream = io.BytesIO()
    Stable(stream, 4).dump(thing)
    return digest(stream.getvalue())


OURS: re.Pattern[bytes] = runpy.run_path(str(Path(__file__).parents[2] / "kit/ours.py"))["OURS"]  # also without a path


def free_of_us(data: bytes) -> bytes:
    assert not OURS.search(data), "pacecar is in there"
    return data


def saved(thing: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(thing, stream)
    return free_of_us(stream.getvalue())


def file_of(thing: Any) -> str:
    """Return a digest of what `torch.save` writes."""
    return digest(saved(thing))


def globals_of(thing: Any) -> list[str]:
    """Return what `torch.load` must be allowed to load from it."""
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(saved(thing))))


def loaded(thing: Any) -> str:
    stream = io.BytesIO(saved(thing))
    return stable(torch.load(stream, weights_only=False))


def by_default(thing: Any) -> str:
    return stable(torch.load(io.BytesIO(saved(thing))))


def checkpointed(model: nn.Module) -> list[str]:
    """Return the files that distributed checkpoint writes."""
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    state = model.state_dict()
    dcp.save({"model": state}, checkpoint_id=folder[0])
    found = [f"{path.name} {len(free_of_us(path.read_bytes()))}" for path in sorted(Path(str(folder[0])).iterdir())]
    dcp.load({"model": state}, checkpoint_id=folder[0])
    return [line for line in found if not line.startswith(".metadata")] + [stable(model.state_dict())]


def parametrized(model: nn.Module) -> list[str]:
    """Return what a parametrization of the model itself is seen as; it goes again."""
    parametrize.register_parametrization(model, "scale", Twice())
    try:
        seen = [type(model).__name__, stable(model.scale), stable(copy.deepcopy(model).state_dict())]
    finally:
        parametrize.remove_parametrizations(model, "scale", leave_parametrized=False)
    return [*seen, type(model).__name__]


def seen_of(model: nn.Module) -> str:
    """Return what is on the modules: attributes and hooks."""
    lines = []
    for name, module in model.named_modules():
        sizes = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        call = f"{type(module).__call__.__qualname__} {module.__call__.__name__} {inspect.signature(module.forward)}"
        lines.append(f"{name} {type(module).__qualname__} {sorted(vars(module))} {sizes} {call}")
    return "\n".join(lines)


def graphs(compile_it: Callable[[Callable[..., Any]], Callable[..., Any]], x: torch.Tensor) -> list[str]:
    """Return the graphs that dynamo makes of what `compile_it` compiles, how many frames, and the breaks."""
    found: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(graph.code)
        return graph.forward

    torch._dynamo.utils.counters.clear()
    compiled = compile_it(backend)
    first, second = compiled(x), compiled(x)
    counters = torch._dynamo.utils.counters
    breaks = sum(counters["graph_break"].values())
    return [*found, f"{breaks} breaks", str(counters["stats"].get("unique_graphs")), stable(first), stable(second)]


def explained(model: nn.Module, x: torch.Tensor) -> str:
    told = torch._dynamo.explain(model)(x)
    return f"{told.graph_count} {told.graph_break_count} {told.op_count}"


def shared(model: nn.Module) -> bool:
    return all(p.is_shared() for p in copy.deepcopy(model).share_memory().parameters())


def copies_of(loader: Any) -> list[Any]:
    return [copy.copy(loader), pickle.loads(free_of_us(pickle.dumps(loader)))]


def alone(trainer: Any) -> list[str]:
    """Return what is seen of a Trainer without its callbacks, which may be pacecar's, and of its class."""
    own = copy.copy(trainer)
    own.callback_handler = own.accelerator = own.model_wrapped = own.optimizer = own.scheduler = None
    length = len(free_of_us(pickle.dumps(own)))
    bound = [getattr(trainer, name).__qualname__ for name in ("train", "compute_loss")]
    return [*sorted(vars(trainer)), *sorted(vars(copy.deepcopy(own))), *bound, str(length)]


ANSWER_SECONDS_MAX = 120
"""Against a process that never answers."""


def answered(job: Callable[..., Any], *given: Any) -> list[Any]:
    """Return what `job(*given)` returns in a process that multiprocessing's spawn starts, and how that one ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(theirs, job, *given))
    process.start()
    theirs.close()
    try:
        said = ours.recv() if ours.poll(ANSWER_SECONDS_MAX) else "silence"
    except EOFError:
        said = "no answer"
    process.join(ANSWER_SECONDS_MAX)
    code = process.exitcode
    process.kill()
    return [said, code]


def answer(pipe: Any, job: Callable[..., Any], *given: Any) -> None:
    pipe.send(job(*given))
    pipe.close()


def trained(model: nn.Module, x: torch.Tensor) -> list[str]:
    """Train one step in a process that was given the model; return what came of it, and what is on the model."""
    torch.set_num_threads(1)
    loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return [seen_of(model), stable(loss), *(stable(gradient) for gradient in gradients)]


def loaded_elsewhere(loader: Any) -> list[str]:
    """Return the batches that a loader makes of `loader`'s parts, in a worker that multiprocessing's spawn starts."""
    other = DataLoader(
        loader.dataset, batch_size=4, num_workers=1, multiprocessing_context="spawn", collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn, generator=loader.generator,
    )  # fmt: skip
    return [stable(batch) for batch in other]


def model_kept(model: nn.Module, x: torch.Tensor, cloudpickle: Any = pickle) -> Operations:
    """Return what is done to a model in a moment; `x` is what it can be called with."""
    return {
        "vars": lambda: seen_of(model),
        "torch.save": lambda: file_of(model),
        "torch.save of weights": lambda: file_of(model.state_dict()),
        "torch.load": lambda: loaded(model),
        "torch.load by default": lambda: by_default(model),
        "globals in the file": lambda: globals_of(model),
        "pickle": lambda: (len(free_of_us(pickle.dumps(model))), stable(model)),
        "cloudpickle": lambda: bool(free_of_us(cloudpickle.dumps(model))),
        "deepcopy": lambda: (stable(copy.deepcopy(model)), stable(copy.deepcopy(model)(x))),
        "copy": lambda: sorted(vars(copy.copy(model))),
        "ema": lambda: stable(AveragedModel(model).state_dict()),
        "spawn": lambda: bool(free_of_us(bytes(ForkingPickler.dumps(model)))),
        "output": lambda: file_of(model(x)),
    }


def state_kept(model: nn.Module) -> Operations:
    """Return what torch's own tools do to a model in a moment."""
    return {
        "parametrize": lambda: parametrized(model),
        "dcp": lambda: checkpointed(model),
        "share_memory": lambda: shared(model),
    }


def optimizer_kept(optimizer: Any) -> Operations:
    return {
        "optimizer saved": lambda: file_of(optimizer),
        "optimizer deepcopy": lambda: stable(copy.deepcopy(optimizer).state_dict()),
    }


def scheduler_kept(scheduler: Any) -> Operations:
    return {"scheduler": lambda: (stable(scheduler), stable(copy.deepcopy(scheduler).state_dict()))}


def loader_kept(loader: Any, wrapped: Any) -> Operations:
    """Return the results for the user's loader, and for what is iterated in its place."""
    return {
        "loader": lambda: (stable(loader.sampler), stable(copy.deepcopy(loader).batch_sampler)),
        "wrapped loader": lambda: [stable(vars(one)) for one in (*copies_of(wrapped), copy.deepcopy(wrapped))],
    }


def exported(model: nn.Module, x: torch.Tensor, wrapped: Any) -> Operations:
    """Return the slow ones: exports, and other processes that get the model and the loader's data."""
    return {
        "jit.script": lambda: torch.jit.script(model).code,
        "jit.trace": lambda: str(torch.jit.trace(model, x).graph),
        "jit.trace around": lambda: str(torch.jit.trace(Around(model), x).inlined_graph),
        "fx": lambda: torch.fx.symbolic_trace(model).code,
        "fx around": lambda: torch.fx.symbolic_trace(Around(model)).code,
        "export": lambda: str(torch.export.export(model, (x,)).graph),
        "export strict": lambda: str(torch.export.export(model, (x,), strict=True).graph),
        "export around": lambda: str(torch.export.export(Around(model), (x,)).graph),
        "compile": lambda: graphs(lambda b: torch.compile(model, backend=b), x),
        "compile in one graph": lambda: graphs(lambda b: torch.compile(model, backend=b, fullgraph=True), x),
        "compile around": lambda: graphs(lambda b: torch.compile(Around(model), backend=b), x),
        "explain": lambda: explained(model, x),
        "quantize": lambda: stable(torch.ao.quantization.quantize_dynamic(model, {nn.Linear})(x)),
        "process": lambda: answered(trained, model, x),
        "process with the inner model": lambda: answered(trained, getattr(model, "module", model), x),
        "process with the loader": lambda: answered(loaded_batches, wrapped),
        "workers": lambda: loaded_elsewhere(wrapped),
    }


def loaded_batches(loader: Any) -> list[str]:
    """Return the batches of a loader that was sent to this process."""
    return [stable(batch) for batch in loader]


def files_in(folder: Path, *, varying: Sequence[str] = ()) -> dict[str, str]:
    """Return the contents of all files under `folder`; for names ending as `varying`, only that they exist."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        data = free_of_us(path.read_bytes())
        found[name] = "" if name.endswith(tuple(varying)) else digest(data)
    return found


def outcomes(operations: Operations) -> dict[str, Any]:
    """Run all operations; return each outcome as JSON has it."""
    return {name: outcome(operation) for name, operation in operations.items()}


def outcome(operation: Callable[[], Any]) -> Any:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = operation()
        except Exception as error:  # noqa: BLE001  what is raised is what is compared
            result = f"{type(error).__name__}: {error}"
    return json.loads(json.dumps([neutral(result), sorted({neutral(str(each.message)) for each in warned})]))


def neutral(result: Any) -> Any:
    """Leave out addresses, and what torch says of where in a process it is."""
    return re.sub(r"0x[0-9a-f]+|/tmp/\S+", "N", result) if isinstance(result, str) else result
