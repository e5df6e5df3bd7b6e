"""One rank of a Lightning job; run by test_lightning.py in the adapters' environment."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from turning import OPTIONS, Ear, Numbers, main, planted, regression, shared_folder

from pacecar.adapters.lightning import PacecarCallback

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = regression()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        optimizer.step()


class Twice(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=1e-3), torch.optim.SGD(self.parameters(), lr=1e-3)]


def replaced_in(trainer: Trainer) -> dict[str, Any]:
    """Return which methods we replace, and of what."""
    loop = trainer.fit_loop.epoch_loop
    return {"save_checkpoint": trainer, "_make_closure": loop.automatic_optimization, "_on_before_fetch": loop}


class Listener(Callback):
    """Follows the pacer, and sums up what the Trainer hands to callbacks."""

    def __init__(self, ear: Ear, ours: PacecarCallback | None) -> None:
        self.ear, self.ours = ear, ours
        self.losses: list[float] = []
        self.batches = 0
        self.left: set[str] = set()
        """What lay on the Trainer while it trained, of what we replace."""
        self.means: list[float] = []
        self._sum = 0.0
        self._steps = 0

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self.ours is not None and self.ours.pacer is not self.ear.pacer and self.ours.pacer is not None:
            self.ear.follow(self.ours.pacer)
        self._steps = trainer.global_step
        if self.ours is not None and copy.deepcopy(self.ours).pacer is not None:
            self.left.add("pacer in a copy of the callback")
        self.left |= {name for name, owner in replaced_in(trainer).items() if name in vars(owner)}

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.batches += 1
        self._sum += float(outputs["loss"]) if outputs else 0.0
        if trainer.global_step > self._steps:
            self.losses.append(self._sum)
            self._sum = 0.0

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if "mean" in trainer.callback_metrics:
            self.means.append(float(trainer.callback_metrics["mean"]))


def train(
    *,
    tune: str | None,
    steps: int = 60,
    batch: int = 4,
    accumulation: int = 4,
    module: str = "Module",
    micro_batch: bool = True,
    remainder: int = 0,
    untested: bool = False,
    save_at: int | None = None,
    breaks: bool = False,
) -> dict[str, Any]:
    from pacecar.adapters import lightning as ours_module

    seed_everything(0, verbose=False)
    data = Numbers(2 * batch * (accumulation * steps // 3 + remainder))
    ear = Ear()

    def fit(path: str | None, folder: str) -> tuple[Any, Listener, Trainer]:
        net = {"Module": Module, "Manual": Manual, "Twice": Twice}[module]()
        ours = None if tune is None else PacecarCallback(tune=tune, micro_batch=micro_batch, **OPTIONS)
        listener = Listener(ear, ours)
        callbacks: list[Callback] = [listener] if ours is None else [ours, listener]
        if save_at is not None:
            callbacks.append(ModelCheckpoint(folder, every_n_train_steps=save_at, save_top_k=-1, filename="{step}"))
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
            max_steps=steps, accumulate_grad_batches=1 if module != "Module" else accumulation, logger=False,
            enable_checkpointing=save_at is not None, enable_progress_bar=False, enable_model_summary=False,
            callbacks=callbacks, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True), ckpt_path=path)
        return net, listener, trainer

    with shared_folder() as folder:
        with planted("lightning", ours_module, is_untested=untested, is_broken=breaks):
            net, listener, trainer = fit(None, folder)
        owners = replaced_in(trainer)
        answer = ear.answer(net) | {
            "history": listener.losses, "bodies": listener.batches,
            "means": listener.means, "version": lightning.__version__,
            "left_behind": sorted(
                listener.left | {name for name, owner in owners.items() if name in vars(owner)}
                | {name for name, owner in owners.items() if "MethodReplacement" in str(vars(type(owner)).get(name))}
            ),
        }  # fmt: skip
        if save_at is not None:
            ear.records, ear.pacer = [], None
            net, *_ = fit(f"{folder}/step={save_at}.ckpt", folder)
            answer["resumed"] = ear.answer(net)
    return answer


if __name__ == "__main__":
    main({"train": train})
