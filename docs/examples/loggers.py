"""Pace, ledger and decisions in an experiment's own logs: TensorBoard, Weights & Biases (offline), MLflow (a file).

torchrun --nproc_per_node 2 docs/examples/loggers.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import wandb
from mlflow import MlflowClient
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

import pacecar
from pacecar.adapters.loggers import Mlflow, TensorBoard, Wandb


def main() -> None:
    """Fit a small network to sums of its inputs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loggers = []
    if dist.get_rank() == 0:
        writer = SummaryWriter("logs/tensorboard")
        run = wandb.init(mode="offline", dir="logs", project="pacecar", settings=wandb.Settings(silent=True))
        client = MlflowClient(tracking_uri="sqlite:///logs/mlflow.db")
        known = client.get_experiment_by_name("pacecar")  # exists from the second run on
        experiment = client.create_experiment("pacecar") if known is None else known.experiment_id
        run_id = client.create_run(experiment).info.run_id
        loggers = [TensorBoard(writer), Wandb(run), Mlflow(run_id, client=client)]
    x = torch.randn(4096, 32)
    loss = torch.zeros(())
    with pacecar.attach(model, optimizer, tune="exact", loggers=loggers) as pacer:
        for step, rows in enumerate(pacer.data(x.split(16)[i % 256] for i in range(steps))):
            loss = nn.functional.mse_loss(model(rows), rows[:, :8].sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and step % 100 == 99:
                run.log({"loss": loss.item()}, step=step)  # the script's own rows are unaffected
    if dist.get_rank() == 0:
        writer.close()
        run.finish()
        client.set_terminated(run_id)
        print(f"loss {loss.item():.3f}; knobs at the end {pacer.knobs.values}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
