"""A loop under Accelerate with pacecar: `attach` after `prepare`, and `train_batch` for forward and backward.

torchrun --nproc_per_node 2 docs/examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pacecar.adapters.accelerate import attach


def main() -> None:
    """Fit a small network to sums of its inputs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=4)
    x = torch.randn(4096, 32)
    loader = DataLoader(TensorDataset(x, x[:, :8].sum(1, keepdim=True)), batch_size=8, shuffle=True)
    net = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3), loader)

    def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    done, loss = 0, torch.zeros(())
    with attach(accelerator, model, optimizer, tune="exact") as pacer:
        while done < steps:
            for batch in pacer.data(loader):
                with accelerator.accumulate(model):
                    loss = pacer.train_batch(batch, loss_of)
                    optimizer.step()
                    optimizer.zero_grad()
                done += accelerator.sync_gradients
                if done == steps:
                    break
    accelerator.print(f"loss {loss.item():.3f}; knobs at the end {pacer.knobs.values}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
