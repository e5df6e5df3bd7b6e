"""Stands in for transformers where it is not installed: the calls that its Trainer makes, in its order, on two ranks.

After `Trainer` of transformers 5.23: `train` -> `_inner_training_loop` -> `_run_epoch`, which fetches the batches of an
update at once by `get_batch_samples`, calls `training_step` once a batch, and callbacks around it.  What
job_transformers uses of models and arguments is here; evaluation, precision and all other options are not.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

__version__ = "stand-in"


class LlamaConfig:
    def __init__(self, *, vocab_size: int, hidden_size: int, intermediate_size: int, **_: Any) -> None:
        self.vocabulary, self.hidden, self.inner = vocab_size, hidden_size, intermediate_size


class LlamaForCausalLM(nn.Module):
    """A language model whose loss is a sum over tokens, divided by the update's number of them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.hidden)
        self.up, self.down = nn.Linear(config.hidden, config.inner), nn.Linear(config.inner, config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None, **_: Any,
    ) -> dict[str, Tensor]:  # fmt: skip
        hidden = self.embed(input_ids)
        logits = self.head(hidden + self.down(nn.functional.silu(self.up(hidden))))[:, :-1]
        targets = labels[:, 1:]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return {"loss": total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)}


class TrainingArguments:
    def __init__(self, **given: Any) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.device, self.n_gpu, self.max_grad_norm = torch.device("cpu"), 0, 1.0
        self.seed, self.logging_steps = 42, 500
        self.__dict__.update(given)


class TrainerCallback:
    """All that happens, and nothing done."""

    def _nothing(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        pass

    on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = on_step_begin = on_step_end = _nothing
    on_substep_end = on_pre_optimizer_step = on_optimizer_step = on_log = on_save = _nothing


class CallbackHandler:
    def __init__(self, trainer: Trainer, callbacks: list[TrainerCallback]) -> None:
        self.trainer, self.callbacks = trainer, callbacks

    def call_event(self, event: str) -> None:
        trainer = self.trainer
        for callback in self.callbacks:
            getattr(callback, event)(
                trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=trainer.optimizer
            )


class Trainer:
    def __init__(
        self, *, model: nn.Module, args: TrainingArguments, train_dataset: Any, callbacks: list[TrainerCallback],
        data_collator: Any = None,
    ) -> None:  # fmt: skip
        self.model = self.model_wrapped = model
        self.args, self.data, self.collate = args, train_dataset, data_collator or default_collate
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.accelerator = SimpleNamespace(
            distributed_type=SimpleNamespace(value="MULTI_CPU"), mixed_precision="no", parallelism_config=None,
            gradient_state=SimpleNamespace(plugin_kwargs={}), backward=lambda loss: loss.backward(),
        )  # fmt: skip
        parameters = inspect.signature(model.forward).parameters.values()
        self.model_accepts_loss_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.compute_loss_func = self.loss_is_scaled_for_ga = None
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self.optimizer: Any = None
        self.state = SimpleNamespace(global_step=0, log_history=[])
        self.control = SimpleNamespace()
        self.callback_handler = CallbackHandler(self, callbacks)

    def is_world_process_zero(self) -> bool:
        return self.rank == 0

    def train(self, resume_from_checkpoint: str | None = None) -> Any:
        return self._inner_training_loop(resume_from_checkpoint)

    def _inner_training_loop(self, checkpoint: str | None) -> Any:
        torch_s = torch.optim.AdamW(self.model.parameters(), lr=self.args.learning_rate)
        self.model_wrapped = DistributedDataParallel(self.model)
        self.optimizer = AcceleratedOptimizer(torch_s)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(torch_s, lambda step: 1 - step / self.args.max_steps)
        if checkpoint is not None:
            saved = torch.load(Path(checkpoint) / "state.pt")
            self.model.load_state_dict(saved["model"])
            torch_s.load_state_dict(saved["optimizer"])
            self.scheduler.load_state_dict(saved["scheduler"])
            self.state.global_step = saved["step"]
        begun = self._logged = self.state.global_step
        self._loss, self._total = torch.zeros(()), 0.0
        self.callback_handler.call_event("on_train_begin")
        batches = len(self._batches(0))
        updates = -(-batches // self.args.gradient_accumulation_steps)
        epoch = begun // updates
        done = begun % updates
        while self.state.global_step < self.args.max_steps:
            self._run_epoch(self.model_wrapped, epoch, done, updates)
            epoch, done = epoch + 1, 0
        self._total += self._loss.item()
        self.callback_handler.call_event("on_train_end")
        return SimpleNamespace(training_loss=self._total / (self.state.global_step - begun))

    def _batches(self, epoch: int) -> list[list[int]]:
        """Return this rank's batches, as indices; the ranks take turns."""
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.args.seed + epoch)).tolist()
        size = self.args.per_device_train_batch_size
        return [order[at : at + size] for at in range(0, len(order), size)][self.rank :: self.world]

    def _run_epoch(self, model: nn.Module, epoch: int, done: int, updates: int) -> None:
        each = self.args.gradient_accumulation_steps
        indices = self._batches(epoch)[done * each :]
        epoch_iterator = iter([self.collate([self.data[index] for index in batch]) for batch in indices])
        for update in range(done, updates):
            number = each if update < updates - 1 else len(self._batches(epoch)) - each * (updates - 1)
            batch_samples, items = self.get_batch_samples(epoch_iterator, number, self.args.device)
            self.current_gradient_accumulation_steps = len(batch_samples)
            for at, inputs in enumerate(batch_samples, start=1):
                is_last = at == len(batch_samples)
                if at == 1:
                    self.callback_handler.call_event("on_step_begin")
                with contextlib.nullcontext() if is_last else model.no_sync():
                    self._loss += self.training_step(model, inputs, items)
                if not is_last:
                    self.callback_handler.call_event("on_substep_end")
            nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            self.callback_handler.call_event("on_pre_optimizer_step")
            self.optimizer.step()
            self.callback_handler.call_event("on_optimizer_step")
            self.scheduler.step()
            model.zero_grad()
            self.state.global_step += 1
            self.callback_handler.call_event("on_step_end")
            self._log_and_save(model)
            if self.state.global_step == self.args.max_steps:
                break
        self.callback_handler.call_event("on_epoch_end")

    def _log_and_save(self, model: nn.Module) -> None:
        step = self.state.global_step
        if step % self.args.logging_steps == 0:
            loss = self._loss.clone()
            dist.all_reduce(loss)
            self.state.log_history.append({"loss": loss.item() / self.world / (step - self._logged), "step": step})
            self._total += self._loss.item()
            self._logged = step
            self._loss.zero_()
        if self.args.save_strategy == "steps" and step % self.args.save_steps == 0:
            self._save_checkpoint(model, None)
            self.callback_handler.call_event("on_save")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.rank == 0:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            folder.mkdir(exist_ok=True)
            saved = {
                "model": self.model.state_dict(), "optimizer": self.optimizer.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(), "step": self.state.global_step,
            }  # fmt: skip
            torch.save(saved, folder / "state.pt")
        dist.barrier()

    def get_batch_samples(self, epoch_iterator: Iterator[Any], number: int, device: Any) -> tuple[list[Any], Any]:
        batches = [batch for _, batch in zip(range(number), epoch_iterator, strict=False)]
        if not self.model_accepts_loss_kwargs or "labels" not in batches[0]:
            return batches, None
        items = sum((batch["labels"][..., 1:] != -100).sum() for batch in batches)
        dist.all_reduce(items)  # average_tokens_across_devices
        return batches, items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        if not (self.model_accepts_loss_kwargs and num_items_in_batch is not None):
            loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(self, model: nn.Module, inputs: Any, *, num_items_in_batch: Any = None) -> Tensor:
        is_scaled = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        loss: Tensor = model(**inputs, **({"num_items_in_batch": num_items_in_batch} if is_scaled else {}))["loss"]
        return loss * self.world if is_scaled else loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def compute_loss_context_manager(self) -> Any:
        return contextlib.nullcontext()
