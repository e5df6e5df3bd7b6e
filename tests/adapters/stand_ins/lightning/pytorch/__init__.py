"""Trainer, module and callbacks, after Lightning 2.6: what job_lightning uses, optimized by the loop or by hand.

A batch is one closure, which the loop calls while it accumulates and else hands to the optimizer's step.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import AutomaticOptimization

__all__ = ["Callback", "LightningModule", "Trainer", "seed_everything"]


def seed_everything(seed: int, *, verbose: bool) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


class LightningModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True
        self.trainer: Any = None

    def forward(self, *args: Any) -> Any:
        """Run what the strategy has the wrapper run: `training_step`, so that DDP sees it."""
        output = self.training_step(*args)  # type: ignore[operator]
        if not self.automatic_optimization:
            self.trainer.strategy.model.require_backward_grad_sync = False  # manual_backward prepared it
        return output

    def log(self, name: str, value: Tensor, *, on_step: bool, on_epoch: bool) -> None:
        self.trainer._results.log(name, value.detach())

    def optimizers(self) -> Any:
        made = [Counted(one, self.trainer) for one in self.trainer.optimizers]
        return made[0] if len(made) == 1 else made

    def manual_backward(self, loss: Tensor) -> None:
        reducer = self.trainer.strategy.model.reducer
        reducer._rebuild_buckets()
        reducer.prepare_for_backward([])
        loss.backward()


class Counted:
    """LightningOptimizer: in manual optimization its steps are what the Trainer counts."""

    def __init__(self, optimizer: torch.optim.Optimizer, trainer: Trainer) -> None:
        self._optimizer, self._trainer = optimizer, trainer

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        self._optimizer.step()
        self._trainer.global_step += 1


class Results:
    """What was logged in this epoch, each value with the samples of its batch as weight."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.batch_size: int | None = None
        self.sums: dict[str, tuple[float, int]] = {}

    def log(self, name: str, value: Tensor) -> None:
        if self.batch_size is None:
            self.batch_size = len(self.batch[0])
        total, weight = self.sums.get(name, (0.0, 0))
        self.sums[name] = (total + float(value) * self.batch_size, weight + self.batch_size)


class EpochLoop:
    def __init__(self, trainer: Trainer) -> None:
        self.automatic_optimization = AutomaticOptimization(trainer)

    def _on_before_fetch(self) -> None:
        pass

    def _on_after_fetch(self) -> None:
        pass


class FitLoop:
    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.epoch_loop = trainer, EpochLoop(trainer)
        self.is_last_of_epoch = False

    def _should_accumulate(self) -> bool:
        done = (self.trainer.batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
        return not (done or self.is_last_of_epoch)


class Trainer:
    def __init__(
        self, *, strategy: Any, max_steps: int, accumulate_grad_batches: int, callbacks: list[Callback], **_: Any
    ) -> None:
        self.strategy, self.max_steps, self.callbacks = strategy, max_steps, callbacks
        self.accumulate_grad_batches = accumulate_grad_batches
        self.fit_loop = FitLoop(self)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.global_step = self.batch_idx = self.epoch = 0
        self.callback_metrics: dict[str, float] = {}
        self._results = Results()

    def call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, self.module, *args)

    @property
    def is_global_zero(self) -> bool:
        return dist.get_rank() == 0

    def fit(
        self, module: LightningModule, loader: torch.utils.data.DataLoader[Any], ckpt_path: str | None = None
    ) -> None:
        self.module, module.trainer = module, self
        self.strategy.setup(module)
        configured = module.configure_optimizers()  # type: ignore[operator]
        if isinstance(configured, dict):
            self.optimizers, self.schedulers = [configured["optimizer"]], [configured["lr_scheduler"]["scheduler"]]
        else:
            self.optimizers = configured if isinstance(configured, list) else [configured]
        skip = self._restore(ckpt_path)
        self.call("on_train_start")
        try:
            while self.global_step < self.max_steps:
                self._run_epoch(loader, skip)
                self.epoch, skip = self.epoch + 1, 0
        except BaseException as error:
            self.call("on_exception", error)
            raise
        self.call("on_train_end")

    def _restore(self, path: str | None) -> int:
        """Load a checkpoint; returns how many batches of its epoch were done."""
        if path is None:
            return 0
        saved = torch.load(path)
        self.module.load_state_dict(saved["module"])
        self.optimizers[0].load_state_dict(saved["optimizer"])
        self.schedulers[0].load_state_dict(saved["scheduler"])
        self.global_step, self.epoch = saved["step"], saved["epoch"]
        return int(saved["batches"])

    def _run_epoch(self, loader: torch.utils.data.DataLoader[Any], skip: int) -> None:
        data = loader.dataset
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        mine = order[dist.get_rank() :: dist.get_world_size()]
        batches = [mine[at : at + loader.batch_size] for at in range(0, len(mine), loader.batch_size)]
        loop = self.fit_loop.epoch_loop
        for self.batch_idx in range(skip, len(batches)):
            loop._on_before_fetch()
            batch = loader.collate_fn([data[index] for index in batches[self.batch_idx]])
            loop._on_after_fetch()
            self.fit_loop.is_last_of_epoch = self.batch_idx == len(batches) - 1
            self._results.batch, self._results.batch_size = batch, None
            self.call("on_train_batch_start", batch, self.batch_idx)
            outputs: Any = {}
            if self.module.automatic_optimization:
                kwargs = OrderedDict(batch=batch, batch_idx=self.batch_idx)
                outputs = loop.automatic_optimization.run(self.optimizers[0], self.batch_idx, kwargs)
            else:
                self.strategy.training_step(batch, self.batch_idx)
            self.call("on_train_batch_end", outputs, batch, self.batch_idx)
            if self.global_step == self.max_steps:
                break
        self.callback_metrics = {name: total / weight for name, (total, weight) in self._results.sums.items()}
        self._results = Results()
        self.call("on_train_epoch_end")

    def save_checkpoint(self, path: Path) -> None:
        if dist.get_rank() == 0:
            done = self.batch_idx + 1
            saved = {
                "module": self.module.state_dict(), "optimizer": self.optimizers[0].state_dict(),
                "scheduler": self.schedulers[0].state_dict(), "step": self.global_step, "epoch": self.epoch,
                "batches": done,
            }  # fmt: skip
            torch.save(saved, path)
        dist.barrier()
