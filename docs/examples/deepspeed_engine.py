"""A DeepSpeed loop with pacecar: `attach` after `deepspeed.initialize`.

torchrun --nproc_per_node 2 docs/examples/deepspeed_engine.py
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pacecar.adapters.deepspeed import attach

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 4194304, "overlap_comm": True},
}

if not torch.cuda.is_available():
    # On CPUs DeepSpeed compiles an operator at first use, which takes two minutes; without the operator it uses gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    """Fit a small network to sums of its inputs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
    x = torch.randn(4096, 32)
    engine, _, loader, _ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3),
        training_data=TensorDataset(x, x[:, :8].sum(1, keepdim=True)),
        config=CONFIG,
    )
    done, loss = 0, torch.zeros(())
    with attach(engine, tune="exact") as pacer:
        while done < steps:
            for inputs, targets in pacer.data(loader):
                loss = nn.functional.mse_loss(engine(inputs.to(engine.device)), targets.to(engine.device))
                engine.backward(loss)
                done += engine.is_gradient_accumulation_boundary()
                engine.step()
                if done == steps:
                    break
    if engine.global_rank == 0:
        print(f"loss {loss.item():.3f}; knobs at the end {pacer.knobs.values}")
    engine.destroy()
    deepspeed.comm.barrier()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
