"""Stands in for Accelerate where it is not installed: what a loop under it calls, and how it counts batches.

After accelerate 1.15: `accumulate` decides whether this batch ends an update (every n-th, and the last of the loader),
`backward` divides by the number of accumulation steps, and prepared optimizers and schedulers act at the end only.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__version__ = "stand-in"


def _set_seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


utils = SimpleNamespace(set_seed=_set_seed)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Looks like torch's optimizer and has none of its hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: Any = None) -> None:
        self.optimizer, self._gradients = optimizer, state or SimpleNamespace(sync_gradients=True)

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> None:
        if self._gradients.sync_gradients:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._gradients.sync_gradients:
            self.optimizer.zero_grad(set_to_none)


class _Scheduler:
    def __init__(self, scheduler: Any, state: Any) -> None:
        self.scheduler, self._gradients = scheduler, state

    def step(self) -> None:
        if self._gradients.sync_gradients:
            self.scheduler.step()

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()  # type: ignore[no-any-return]


class _Loader:
    """This rank's batches; knows one ahead which is the last."""

    def __init__(self, loader: torch.utils.data.DataLoader[Any], state: Any) -> None:
        self.data, self.size, self._gradients, self._epoch = loader.dataset, loader.batch_size, state, 0
        self._collate = loader.collate_fn

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self._epoch)).tolist()
        self._epoch += 1
        batches = [order[at : at + self.size] for at in range(0, len(order), self.size)]
        mine = batches[dist.get_rank() :: dist.get_world_size()]
        for number, indices in enumerate(mine, start=1):
            self._gradients.end_of_dataloader = number == len(mine)
            yield self._collate([self.data[index] for index in indices])


class Accelerator:
    def __init__(self, *, cpu: bool, gradient_accumulation_steps: int = 1) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.device, self.num_processes = torch.device("cpu"), dist.get_world_size()
        self.distributed_type, self.parallelism_config = SimpleNamespace(value="MULTI_CPU"), None
        self.gradient_accumulation_steps, self.step = gradient_accumulation_steps, 0
        self.gradient_state = SimpleNamespace(plugin_kwargs={}, sync_gradients=True, end_of_dataloader=False)
        self._made: list[Any] = []

    @property
    def sync_gradients(self) -> bool:
        return bool(self.gradient_state.sync_gradients)

    def prepare(self, *things: Any) -> tuple[Any, ...]:
        self._made = [self._prepared(thing) for thing in things]
        return tuple(self._made)

    def _prepared(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            return DistributedDataParallel(thing)
        if isinstance(thing, torch.optim.Optimizer):
            return AcceleratedOptimizer(thing, self.gradient_state)
        if isinstance(thing, torch.utils.data.DataLoader):
            return _Loader(thing, self.gradient_state)
        return _Scheduler(thing, self.gradient_state)

    @contextlib.contextmanager
    def accumulate(self, model: DistributedDataParallel) -> Iterator[None]:
        state = self.gradient_state
        self.step = 0 if state.end_of_dataloader else self.step + 1
        state.sync_gradients = state.end_of_dataloader or self.step % self.gradient_accumulation_steps == 0
        with contextlib.nullcontext() if state.sync_gradients else model.no_sync():
            yield

    def backward(self, loss: Tensor) -> None:
        (loss / self.gradient_accumulation_steps).backward()

    def gather(self, value: Tensor) -> Tensor:
        gathered = [torch.empty_like(value) for _ in range(self.num_processes)]
        dist.all_gather(gathered, value)
        return torch.stack(gathered)

    def print(self, text: str) -> None:
        if dist.get_rank() == 0:
            sys.stdout.write(f"{text}\n")

    def end_training(self) -> None:
        dist.destroy_process_group()

    def wait_for_everyone(self) -> None:
        dist.barrier()

    def save_state(self, folder: str) -> None:
        model, optimizer, *_ = self._made
        torch.save([model.state_dict(), optimizer.optimizer.state_dict()], Path(folder) / f"{dist.get_rank()}.pt")

    def load_state(self, folder: str) -> None:
        model, optimizer, *_ = self._made
        weights, moments = torch.load(Path(folder) / f"{dist.get_rank()}.pt")
        model.load_state_dict(weights)
        optimizer.optimizer.load_state_dict(moments)
