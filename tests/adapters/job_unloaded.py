"""A training with each adapter (on stand-ins), in a fork each, where a module of ours is missing.

    job_unloaded.py MODULES      MODULES: a JSON list; "" for a training without any adapter, "-" with all modules there

Writes a JSON list of {adapter: [exit code, losses, stderr]}, one for each of MODULES.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.job.job_unimportable import Missing, forked_job, remember_code

STEPS = 10


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(4 * STEPS, 16, generator=draw), torch.randn(4 * STEPS, 1, generator=draw)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Net(nn.Module):
    """Keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses: list[str] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(self.net(x), labels)
        if torch.is_grad_enabled():  # else it is only tried (adapters.losses)
            self.losses.append(float(loss.detach()).hex())
        return {"loss": loss}


def batches() -> Iterator[dict[str, Tensor]]:
    data = Numbers()
    for step in range(STEPS):
        yield {"x": data.x[4 * step : 4 * step + 4], "labels": data.y[4 * step : 4 * step + 4]}


def descent(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-2)


def transformers(net: Net, is_plain: bool) -> None:
    from transformers import Trainer, TrainingArguments

    callbacks: list[Any] = []
    if not is_plain:
        from pacecar.adapters.transformers import PacecarCallback

        callbacks = [PacecarCallback(tune="exact")]
    arguments = TrainingArguments(
        output_dir=".", max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=1,
        learning_rate=1e-2, save_strategy="no",
    )  # fmt: skip
    Trainer(model=net, args=arguments, train_dataset=Numbers(), callbacks=callbacks).train()


def lightning(net: Net, is_plain: bool) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return descent(self)

    callbacks: list[Any] = []
    if not is_plain:
        from pacecar.adapters.lightning import PacecarCallback

        callbacks = [PacecarCallback(tune="exact", micro_batch=True)]
    trainer = Trainer(strategy=DDPStrategy(), max_steps=STEPS, accumulate_grad_batches=1, callbacks=callbacks)
    trainer.fit(Module(), torch.utils.data.DataLoader(Numbers(), batch_size=4))


def accelerate(net: Net, is_plain: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, descent(net))
    pacer: Any = None
    if not is_plain:
        from pacecar.adapters.accelerate import attach

        pacer = attach(accelerator, model, optimizer, tune="exact")
    for batch in batches() if pacer is None else pacer.data(batches()):
        with accelerator.accumulate(model):
            if pacer is None:
                accelerator.backward(model(**batch)["loss"])
            else:
                pacer.train_batch(batch, lambda micro: model(**micro)["loss"])
                assert isinstance(pacer.knobs.epoch, int)
            optimizer.step()
            optimizer.zero_grad()
    with nullcontext() if pacer is None else pacer:
        pass


def deepspeed(net: Net, is_plain: bool) -> None:
    import deepspeed as library

    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
        "zero_optimization": {"reduce_bucket_size": 10**6},
    }  # fmt: skip
    engine, *_ = library.initialize(model=net, optimizer=descent(net), config=config)
    pacer: Any = None
    if not is_plain:
        from pacecar.adapters.deepspeed import attach

        pacer = attach(engine, tune="exact")
    for batch in batches() if pacer is None else pacer.data(batches()):
        engine.backward(engine(batch["x"], batch["labels"])["loss"])
        engine.step()
    if pacer is not None:
        assert isinstance(pacer.knobs.epoch, int)
        pacer.close()


def ray(net: Net, is_plain: bool) -> None:
    os.environ["RAY_EXPERIMENT"] = "unloaded"
    optimizer, pacer = descent(net), None
    if not is_plain:
        from pacecar.adapters.ray import attach

        pacer = attach(net, optimizer, tune="exact")
    loop(net, optimizer, pacer)


def loggers(net: Net, is_plain: bool) -> None:
    class Writer:
        def add_scalar(self, *_: object, **__: object) -> None: ...

        def add_text(self, *_: object, **__: object) -> None: ...

    class Run:
        step = 0

        def log(self, *_: object, **__: object) -> None: ...

    optimizer, pacer = descent(net), None
    if not is_plain:
        import pacecar
        from pacecar.adapters.loggers import TensorBoard, Wandb

        pacer = pacecar.attach(net, optimizer, tune="off", loggers=[TensorBoard(Writer()), Wandb(Run())])
    loop(net, optimizer, pacer)


def loop(net: Net, optimizer: torch.optim.Optimizer, pacer: Any) -> None:
    for batch in batches() if pacer is None else pacer.data(batches()):
        loss = net(**batch)["loss"]
        loss.backward() if pacer is None else pacer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if pacer is not None:
        pacer.close()


ADAPTERS: tuple[Callable[[Net, bool], None], ...] = (transformers, lightning, accelerate, deepspeed, ray, loggers)


def train(adapter: Callable[[Net, bool], None], module: str) -> list[str]:
    torch.manual_seed(0)
    net = Net()
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}x", rank=0, world_size=1)
        if module not in ("", "-"):
            Missing(module)
        adapter(net, module == "")
    return net.losses


def train_without(module: str) -> dict[str, tuple[int, str, str]]:
    return {
        adapter.__name__: forked_job(partial(train, adapter, module), f"{adapter.__name__} without {module}")
        for adapter in ADAPTERS
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    remember_code()
    sys.stdout.write(json.dumps([train_without(module) for module in json.loads(sys.argv[1])]))
