"""A Ray Train run of two workers, and the example; run by test_ray.py.  Argument: a folder for their answers."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ray
import ray.train.torch
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pacecar.adapters.ray import attach

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "docs" / "examples" / "ray_train.py"


def job(tune: str | None, run_dir: str, steps: int = 60) -> dict[str, Any]:
    from turning import OPTIONS, Ear  # here the worker knows its rank

    torch.manual_seed(0)
    x = torch.randn(8 * 2 * steps, 16)
    loader = prepare_data_loader(DataLoader(TensorDataset(x, x[:, :4].sum(1, keepdim=True)), batch_size=8))
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), *(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ear = Ear()
    pacer = None if tune is None else attach(model, optimizer, tune=tune, **OPTIONS, run_dir=run_dir)
    if pacer is not None:
        ear.follow(pacer)
    losses = []
    for inputs, targets in loader if pacer is None else pacer.data(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if pacer is not None:
        with pacer.checkpoint():
            ray.train.report({"loss": losses[-1]})
        pacer.close()
    return ear.answer(model) | {"history": losses, "version": ray.__version__}


def loop(config: dict[str, Any]) -> None:
    """Train twice in each worker, without pacecar and with it: starting workers is what takes time."""
    sys.path.insert(0, config["here"])
    torch.set_num_threads(1)
    folder = Path(config["folder"])
    answers = [job(tune, str(folder / "run")) for tune in (None, "exact")]
    (folder / f"rank{ray.train.get_context().get_world_rank()}.json").write_text(json.dumps(answers))


def main(folder: Path) -> None:
    """Run the example unchanged, but have its workers train our jobs first, since starting them takes longest."""

    def trainer(example: Callable[..., None], *, train_loop_config: dict[str, Any], **options: Any) -> TorchTrainer:
        def both(config: dict[str, Any]) -> None:
            loop(config)
            example(config)

        more = {"folder": str(folder), "here": str(Path(__file__).parent)}
        return TorchTrainer(both, train_loop_config=train_loop_config | more, **options)

    try:
        attach(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    except RuntimeError as error:
        (folder / "outside").write_text(str(error))
    ray.train.torch.TorchTrainer = trainer
    sys.argv = [str(EXAMPLE), "--steps", "40"]
    with (folder / "example").open("w") as said, redirect_stdout(said):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
