"""Lightning's Trainer under pacecar: one callback.

torchrun --nproc_per_node 2 docs/examples/lightning_trainer.py
"""

from __future__ import annotations

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pacecar.adapters.lightning import PacecarCallback


class Sums(LightningModule):
    """A small network fitted to sums of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return a mean over samples, as `micro_batch=True` promises."""
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Fit the network."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    x = torch.randn(4096, 32)
    loader = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True)), batch_size=8, shuffle=True)
    ours = PacecarCallback(tune="exact", micro_batch=True)
    trainer = Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy=DDPStrategy(), max_steps=steps,
        accelerator="gpu" if torch.cuda.is_available() else "cpu", accumulate_grad_batches=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[ours],
    )  # fmt: skip
    trainer.fit(Sums(), loader)
    if trainer.is_global_zero and ours.pacer is not None:
        print(f"{trainer.global_step} steps; knobs at the end {ours.pacer.knobs.values}")
    trainer.strategy.barrier()


if __name__ == "__main__":
    main()
