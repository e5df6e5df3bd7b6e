"""A loop under Ray Train with pacecar: `attach` inside the function that each worker runs.

python docs/examples/ray_train.py
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from pacecar.adapters.ray import attach


def train_loop(config: dict[str, Any]) -> None:
    """Fit a small network to sums of its inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
    model = prepare_model(net)
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    with attach(model, optimizer, tune="exact") as pacer:
        for x in pacer.data(torch.randn(16, 32) for _ in range(config["steps"])):
            x = x.to(device)
            loss = nn.functional.mse_loss(model(x), x[:, :8].sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with pacer.checkpoint(), tempfile.TemporaryDirectory() as folder:
            torch.save(net.state_dict(), f"{folder}/net.pt")
            metrics = {"loss": loss.item(), "knobs": dict(pacer.knobs.values)}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    """Train on two workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    ray.init(num_cpus=None if torch.cuda.is_available() else 2, include_dashboard=False)
    result = TorchTrainer(
        train_loop,
        train_loop_config={"steps": steps},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name="sums", storage_path=tempfile.mkdtemp()),
    ).fit()
    assert result.metrics is not None
    print(f"loss {result.metrics['loss']:.3f}; knobs at the end {result.metrics['knobs']}")
    ray.shutdown()


if __name__ == "__main__":
    main()
