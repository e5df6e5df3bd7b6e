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
import json
import logging
import os
import sys
import time
from typing import Any

import exports
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
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


class Scored(Net):
    """As trainers want a model: with labels it returns its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        out = super().forward(x)
        return out if labels is None else {"loss": (out - labels).square().mean()}


def operations(job: Job, *, is_whole: bool) -> exports.Operations:
    """Return what is done, by name."""
    quick = exports.model_kept(job.model, job.x, job.cloudpickle) | exports.optimizer_kept(job.optimizer)
    quick |= {"own optimizer": lambda: (exports.file_of(job.own), sorted(vars(copy.deepcopy(job.own))))}
    quick |= (
        exports.scheduler_kept(job.scheduler)
        | exports.state_kept(job.model)
        | exports.loader_kept(job.loader, job.batches)
    )
    quick |= {"scaler": lambda: (exports.stable(job.scaler), exports.stable(copy.deepcopy(job.scaler).state_dict()))}
    if job.trainer is not None:
        quick["trainer"] = lambda: exports.alone(job.trainer)
    return quick | exports.exported(job.model, job.x, job.batches) if is_whole else quick


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
        found = exports.outcomes(operations(self, is_whole=is_whole))
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
    assert not ours or (ours[0].pacer is not None and ours[0].pacer.inert_because is None)
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
