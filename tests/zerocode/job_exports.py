"""Trains, and at several moments does to model, optimizer and loader what users do: save, copy, script, export them.

    job_exports.py KIND WAY SCOPE      KIND plain, own, ddp, fsdp2, compiled or trainer; WAY bare, attach or run;
                                       SCOPE quick or whole: without or with what scripts, traces and exports

Prints {moment: {operation: outcome}} as JSON on rank 0: a digest of what came out or what was raised, and the warnings.
"own": trained by an optimizer that pickles itself in its own way; "trainer": by transformers' Trainer, and "attach" is
its callback.  The script itself never says "pacecar" but where WAY
is attach.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import io
import json
import logging
import os
import pickle
import re
import runpy
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

STEPS = 7
"""Under `pacecar run` the model is probed in the second, attached to in the third, and its FLOPs are counted later."""

KIND, WAY, SCOPE = sys.argv[1:]


class Net(nn.Module):
    """The user's own class, in `__main__`; with a parameter of its own, and a moment inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) * self.scale


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Scored(Net):
    """As trainers want a model: with labels it returns its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        out = super().forward(x)
        return out if labels is None else {"loss": (out - labels).square().mean()}


class Around(nn.Module):
    """A module that somebody traces, with the model in it."""

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


OURS: re.Pattern[bytes] = runpy.run_path(str(Path(__file__).parents[1] / "kit/ours.py"))["OURS"]  # also without a path


def free_of_us(data: bytes) -> bytes:
    assert not OURS.search(data), "pacecar is in there"
    return data


def saved(thing: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(thing, stream)
    return free_of_us(stream.getvalue())


def globals_of(thing: Any) -> list[str]:
    """Return what `torch.load` must be allowed to load of it."""
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


def operations(job: Job, *, is_whole: bool) -> dict[str, Callable[[], Any]]:
    """Return what is done, by name; every one returns something that can be compared."""
    model, x = job.model, job.x
    quick: dict[str, Callable[[], Any]] = {
        "vars": lambda: seen_of(model),
        "torch.save": lambda: digest(saved(model)),
        "torch.save of weights": lambda: digest(saved(model.state_dict())),
        "torch.load": lambda: loaded(model),
        "torch.load by default": lambda: by_default(model),
        "globals in the file": lambda: globals_of(model),
        "pickle": lambda: (len(free_of_us(pickle.dumps(model))), stable(model)),
        "cloudpickle": lambda: bool(free_of_us(job.cloudpickle.dumps(model))),
        "deepcopy": lambda: (stable(copy.deepcopy(model)), stable(copy.deepcopy(model)(x))),
        "copy": lambda: sorted(vars(copy.copy(model))),
        "ema": lambda: stable(AveragedModel(model).state_dict()),
        "spawn": lambda: bool(free_of_us(bytes(ForkingPickler.dumps(model)))),
        "optimizer saved": lambda: digest(saved(job.optimizer)),
        "optimizer deepcopy": lambda: stable(copy.deepcopy(job.optimizer).state_dict()),
        "own optimizer": lambda: (digest(saved(job.own)), sorted(vars(copy.deepcopy(job.own)))),
        "scheduler": lambda: (stable(job.scheduler), stable(copy.deepcopy(job.scheduler).state_dict())),
        "scaler": lambda: (stable(job.scaler), stable(copy.deepcopy(job.scaler).state_dict())),
        "loader": lambda: (stable(job.loader.sampler), stable(copy.deepcopy(job.loader).batch_sampler)),
        "wrapped loader": lambda: [stable(vars(one)) for one in (*copies_of(job.batches), copy.deepcopy(job.batches))],
        "output": lambda: digest(saved(model(x))),
        "parametrize": lambda: parametrized(model),
        "dcp": lambda: checkpointed(model),
        "share_memory": lambda: shared(model),
    }
    if job.trainer is not None:
        quick["trainer"] = lambda: alone(job.trainer)
    if not is_whole:
        return quick
    return quick | {
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
    }


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


class Own(torch.optim.Optimizer):
    """An optimizer whose pickle is all that it has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-group["lr"])

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


class Job:
    def __init__(self) -> None:
        import cloudpickle

        self.cloudpickle = cloudpickle
        torch.manual_seed(0)
        model: nn.Module = Net()
        if KIND == "ddp":
            model = DistributedDataParallel(model)
        elif KIND == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        elif KIND == "compiled":
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        self.model = model
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.own = Own(model.parameters())
        self.scheduler = StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu")
        data = TensorDataset(torch.arange(STEPS * 32.0).view(-1, 8) / 100)
        self.loader: Any = DataLoader(data, batch_size=4, sampler=torch.utils.data.SequentialSampler(data))
        self.batches: Any = self.loader
        self.x = torch.ones(4, 8)
        self.said: dict[str, dict[str, Any]] = {}
        self.trainer: Any = None

    def look(self, moment: str, *, is_whole: bool = False) -> None:
        where, training = torch.get_rng_state(), self.model.training
        found = {name: outcome(operation) for name, operation in operations(self, is_whole=is_whole).items()}
        self.said[moment] = found
        self.model.train(training)
        torch.set_rng_state(where)
        for parameter in self.model.parameters():
            parameter.grad = None

    def train(self) -> None:
        optimizer = self.own if KIND == "own" else self.optimizer
        for step, (x,) in enumerate(self.batches):
            loss = self.model(x).square().mean()
            loss.backward()
            optimizer.step()
            self.scheduler.step()
            optimizer.zero_grad()
            self.said.setdefault("losses", {})[str(step)] = float(loss.detach()).hex()
            if step < STEPS - 1:
                self.look(f"step {step}")
        self.look("last step", is_whole=SCOPE == "whole")


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.arange(8.0) + index
        return {"x": x / 100, "labels": x / 50}


def train_by_trainer(job: Job) -> None:
    """Let a Trainer train, with a callback that looks at each step's end, and after it at the end."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            job.model, job.optimizer = job.trainer.model_wrapped, job.trainer.optimizer.optimizer
            job.scheduler = job.trainer.scheduler
            is_last = state.global_step == STEPS
            job.look("last step" if is_last else f"step {state.global_step - 1}", is_whole=SCOPE == "whole" and is_last)

    ours = []
    if WAY == "attach":
        from pacecar.adapters.transformers import PacecarCallback

        ours = [PacecarCallback(tune="exact", overhead_budget=1.0, socket="/nowhere")]
    arguments = TrainingArguments(
        output_dir=".", max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.01, save_strategy="no",
    )  # fmt: skip
    torch.manual_seed(0)
    job.trainer = Trainer(model=Scored(), args=arguments, train_dataset=Rows(), callbacks=[*ours, Look()])
    result = job.trainer.train()
    assert not ours or (ours[0].pacer is not None and ours[0].pacer._hook is not None)
    job.said["losses"] = {"all": result.training_loss.hex()}
    job.look("closed", is_whole=SCOPE == "whole")


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    rank = int(os.environ.get("RANK", "0"))
    if KIND in ("ddp", "fsdp2"):
        dist.init_process_group("gloo")
    job, pacer = Job(), None
    if KIND == "trainer":
        train_by_trainer(job)
        if rank == 0:
            sys.stdout.write(json.dumps(job.said))
        dist.destroy_process_group()
        return
    if WAY == "attach":
        import pacecar

        optimizer = job.own if KIND == "own" else job.optimizer
        pacer = pacecar.attach(
            job.model, optimizer, scaler=job.scaler, tune="exact", overhead_budget=1.0, socket="/nowhere"
        )
        assert pacer.is_active
        job.batches = pacer.data(job.loader)
    job.train()
    if pacer is not None:
        assert pacer.is_active, "it must have been there all the time"
        pacer.close()
    job.look("closed", is_whole=SCOPE == "whole")
    # Gloo's thread frees the last gather, for which it needs python's lock, and a group that is destroyed just then
    # waits for that thread and holds the lock: torch 2.13, without pacecar, too.
    time.sleep(0.1)
    if rank == 0:
        sys.stdout.write(json.dumps(job.said))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
