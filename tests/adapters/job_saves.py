"""Trains under a library's own trainer, and at several moments does what its users do: save, copy, pickle, load.

    job_saves.py LIBRARY WAY FOLDER      LIBRARY a key of JOBS; WAY bare, attach (its adapter) or run; FOLDER to save in

Two ranks train; prints {moment: {operation: outcome}} as JSON on rank 0.  Files are compared by their bytes, so FOLDER
is the same in all ways: some libraries write it into them.  The script names pacecar only where WAY is attach.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "job" / "autoattach"))

import exports
import torch
import torch.distributed as dist
from torch import Tensor, nn

LIBRARY, WAY, FOLDER = sys.argv[1:]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, BATCH, ACCUMULATION = 10, 4, 2
"""Under `pacecar run` the model is attached to in the third, and one that is not found is given up in the eighth."""

LOOKS = (1, 3, 4, STEPS)
"""Steps at whose end it is done; and after the training."""

OPTIONS: dict[str, Any] = {"tune": "exact", "overhead_budget": 1.0, "socket": "/nowhere"}

SAID: dict[str, dict[str, Any]] = {}


def look(moment: str, operations: exports.Operations) -> None:
    """Run all operations; training goes on as if nothing had been done."""
    where = torch.get_rng_state()
    SAID[moment] = exports.outcomes(operations)
    torch.set_rng_state(where)


class Average:
    """Weights averaged in the usual way: a deep copy of the model, taken while it trains."""

    def __init__(self) -> None:
        self.copy: Any = None

    def kept(self, model: nn.Module) -> exports.Operations:
        if self.copy is None:
            self.copy = copy.deepcopy(model).eval().requires_grad_(False)
        for mean, now in zip(self.copy.parameters(), model.parameters(), strict=True):
            mean.lerp_(now.detach(), 0.1)
        return {
            "average": lambda: (
                exports.file_of(self.copy),
                exports.file_of(self.copy.state_dict()),
            )
        }


def written(*names: str, by: Callable[[], Any], varying: Sequence[str] = ()) -> list[Any]:
    """Return what `by` writes into the folders `names`, and what torch loads of it by default: weights alone.

    Files whose names end as `varying` hold other bytes in each run, also without pacecar.
    """
    by()
    dist.barrier()
    found: list[Any] = []
    for name in names:
        found.append(exports.files_in(Path(name), varying=varying))
        for path in sorted(Path(name).rglob("*")):
            if path.suffix in (".pt", ".pth", ".bin", ".ckpt") and "zero_pp" not in path.name:
                found += [loaded_by_default(path)]
    return found


def loaded_by_default(path: Path) -> str:
    try:
        return exports.stable(torch.load(path, weights_only=True))
    except (pickle.UnpicklingError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def inner_kept(wrapper: Any) -> exports.Operations:
    """Return what is done to the optimizer inside Accelerate's, which cannot be pickled itself."""
    return {f"inner {name}": done for name, done in exports.optimizer_kept(wrapper.optimizer).items()}


def attributes(*things: Any) -> exports.Operations:
    """Return what lies on what a library made, and whose its methods are."""
    return {
        "attributes": lambda: [
            (sorted(vars(thing)), [type(thing).__qualname__, sorted(name for name in dir(thing))]) for thing in things
        ]
    }


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 16, generator=draw)
        self.labels = self.x[:, :4].sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Texts(Numbers):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (self.x[index].abs() * 20).long().clamp(0, 63)
        return {"input_ids": ids, "labels": ids}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))


COUNT = WORLD * BATCH * ACCUMULATION * STEPS
X = torch.ones(2, 16)


def transformers() -> None:
    """Train by transformers' Trainer, with a callback that looks at each step's end."""
    import transformers as library

    average = Average()
    ids = torch.arange(16).view(2, 8)

    def operations(trainer: Any, moment: str) -> exports.Operations:
        model, folder = trainer.model, f"{FOLDER}/{moment}"
        found = exports.model_kept(model, ids) | average.kept(model)
        found |= {"ddp saved": lambda: exports.file_of(trainer.model_wrapped)}
        found |= exports.optimizer_kept(trainer.optimizer) | exports.scheduler_kept(trainer.lr_scheduler)
        found |= inner_kept(trainer.optimizer)
        found |= {"save_model": lambda: written(folder, by=lambda: trainer.save_model(folder))}
        found |= {
            "from_pretrained": lambda: exports.stable(library.AutoModelForCausalLM.from_pretrained(folder).state_dict())
        }
        found |= {"save_state": lambda: (trainer.save_state(), written_state())[1:]}
        found |= {
            "arguments": lambda: (
                exports.file_of(trainer.args),
                exports.stable(copy.deepcopy(trainer.args)),
            )
        }
        return found | attributes(trainer, model, trainer.model_wrapped, trainer.optimizer, trainer.accelerator)

    def written_state() -> list[dict[str, Any]]:
        """Return the log that was saved, but for what says how fast this machine is."""
        state = json.loads((Path(FOLDER) / "trainer_state.json").read_text()) if RANK == 0 else {"log_history": []}
        log = [
            {k: v for k, v in row.items() if not k.endswith(("_runtime", "_per_second"))}
            for row in state["log_history"]
        ]
        return [state | {"log_history": log}]

    class Look(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            assert not ours or (ours[0].pacer is not None and ours[0].pacer.is_active)
            if state.global_step in LOOKS:
                look(f"step {state.global_step}", operations(trainer, f"step {state.global_step}"))

        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            name = f"{FOLDER}/checkpoint-{state.global_step}"
            look(f"save {state.global_step}", {"checkpoint": lambda: written(name, by=dist.barrier)})

    ours = []
    if WAY == "attach":
        from pacecar.adapters.transformers import PacecarCallback

        ours = [PacecarCallback(**OPTIONS)]
    torch.manual_seed(0)
    model = library.LlamaForCausalLM(
        library.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=16,
        )
    )  # fmt: skip
    arguments = library.TrainingArguments(
        output_dir=FOLDER, max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, seed=1,
        gradient_accumulation_steps=ACCUMULATION, learning_rate=3e-3, report_to=[], disable_tqdm=True, logging_steps=1,
        save_strategy="steps", save_steps=5, dataloader_pin_memory=False, ddp_backend="gloo",
    )  # fmt: skip
    trainer = library.Trainer(model=model, args=arguments, train_dataset=Texts(COUNT), callbacks=[*ours, Look()])
    result = trainer.train()
    SAID["losses"] = {"all": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    SAID["losses"]["mean"] = result.training_loss
    look("closed", operations(trainer, "closed"))


def lightning() -> None:
    """Train by Lightning's Trainer, with its own averaging of weights and its own checkpoints."""
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    average = Average()

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self, rate: float = 3e-3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = nn.functional.mse_loss(self(batch["x"]), batch["labels"])
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    globals()["Module"] = Module  # where pickle finds it
    Module.__qualname__ = "Module"

    def operations(trainer: Any, module: Any, moment: str) -> exports.Operations:
        whole, weights = f"{FOLDER}/{moment}/whole.ckpt", f"{FOLDER}/{moment} weights/weights.ckpt"

        def save(path: str, **given: Any) -> Callable[[], Any]:
            return lambda: written(str(Path(path).parent), by=lambda: trainer.save_checkpoint(path, **given))

        found = exports.model_kept(module, X) | average.kept(module)
        found |= {"ddp saved": lambda: exports.file_of(trainer.strategy.model)}
        found |= {"ddp deepcopy": lambda: exports.stable(copy.deepcopy(trainer.strategy.model).state_dict())}
        found |= exports.optimizer_kept(trainer.optimizers[0])
        found |= {"its optimizers": lambda: exports.stable([one.state_dict() for one in [module.optimizers()]])}
        found |= exports.scheduler_kept(trainer.lr_scheduler_configs[0].scheduler)
        found |= {"save_checkpoint": save(whole), "save_checkpoint of weights": save(weights, weights_only=True)}
        found |= {
            "load_from_checkpoint": lambda: exports.stable(
                Module.load_from_checkpoint(whole, weights_only=False).state_dict()
            )
        }
        found |= {"loops": lambda: exports.stable([loop.state_dict() for loop in (trainer.fit_loop,)])}
        loop = trainer.fit_loop.epoch_loop
        return found | attributes(trainer, module, trainer.strategy, loop, loop.automatic_optimization)

    class Look(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            SAID.setdefault("losses", {})[str(batch_idx)] = float(outputs["loss"]).hex()
            moment = f"step {trainer.global_step}"
            assert not ours or (ours[0].pacer is not None and ours[0].pacer.is_active)
            if trainer.global_step in LOOKS and moment not in SAID:
                look(moment, operations(trainer, module, moment))

    ours = []
    if WAY == "attach":
        from pacecar.adapters.lightning import PacecarCallback

        ours = [PacecarCallback(micro_batch=True, **OPTIONS)]
    seed_everything(0, verbose=False)
    kept = ModelCheckpoint(f"{FOLDER}/kept", every_n_train_steps=2, save_top_k=-1, filename="{step}", save_last=True)
    trainer = Trainer(
        accelerator="cpu", devices=WORLD, strategy=DDPStrategy(process_group_backend="gloo"), max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATION, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*ours, EMAWeightAveraging(decay=0.9), kept, Look()], default_root_dir=FOLDER,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(Numbers(COUNT), batch_size=BATCH, shuffle=True))
    found = operations(trainer, module, "closed")
    look("closed", found | {"kept": lambda: written(f"{FOLDER}/kept", by=dist.barrier)})


class Custom:
    """Something of the user's that Accelerate saves with its state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def accelerate() -> None:
    """Train in a loop under Accelerate."""
    import accelerate as library

    library.utils.set_seed(0)
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    accelerator.step = 0  # what newer ones count in save_state
    model, average, custom = net(), Average(), Custom()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader: Any = torch.utils.data.DataLoader(Numbers(COUNT), batch_size=BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(custom)
    pacer: Any = None
    if WAY == "attach":
        from pacecar.adapters.accelerate import attach

        pacer = attach(accelerator, model, optimizer, **OPTIONS)
        assert pacer.is_active
    batches = loader if pacer is None else pacer.data(loader)

    def operations(moment: str) -> exports.Operations:
        inner, state, weights = accelerator.unwrap_model(model), f"{FOLDER}/{moment}", f"{FOLDER}/{moment} model"
        found = exports.model_kept(inner, X) | average.kept(inner)
        found |= {"ddp saved": lambda: exports.file_of(model)}
        found |= {"ddp deepcopy": lambda: exports.stable(copy.deepcopy(model).state_dict())}
        found |= (
            exports.optimizer_kept(optimizer) | exports.scheduler_kept(scheduler) | exports.loader_kept(loader, batches)
        )
        found |= inner_kept(optimizer)
        found |= {"save_state": lambda: written(state, by=lambda: accelerator.save_state(state))}
        found |= {"load_state": lambda: (accelerator.load_state(state), exports.stable(model.state_dict()))[1:]}
        found |= {"save_model": lambda: written(weights, by=lambda: accelerator.save_model(model, weights))}
        found |= {"get_state_dict": lambda: exports.file_of(accelerator.get_state_dict(model))}
        return found | attributes(accelerator, model, optimizer, scheduler, loader)

    def loss_of(part: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(part["x"]), part["labels"])

    for number, batch in enumerate(batches, start=1):
        with accelerator.accumulate(model):
            if pacer is not None:
                loss = pacer.train_batch(batch, loss_of)
            else:
                loss = loss_of(batch)
                accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        SAID.setdefault("losses", {})[str(number)] = float(loss.detach()).hex()
        custom.count += 1
        if number % ACCUMULATION == 0 and number // ACCUMULATION in LOOKS:
            look(f"step {number // ACCUMULATION}", operations(f"step {number // ACCUMULATION}"))
    if pacer is not None:
        assert pacer.is_active
        pacer.close()
    look("closed", operations("closed"))


def deepspeed(stage: int) -> None:
    """Train by DeepSpeed's engine."""
    import deepspeed as library
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # On CPUs DeepSpeed compiles an operator for ranks on one machine, two minutes long; without it, it asks gloo.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 32768, "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }  # fmt: skip
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler)
    pacer: Any = None
    if WAY == "attach":
        from pacecar.adapters.deepspeed import attach

        pacer = attach(engine, **OPTIONS)
        assert pacer.is_active

    def operations(moment: str) -> exports.Operations:
        module, folder, weights = engine.module, f"{FOLDER}/{moment}", f"{FOLDER}/{moment} weights"
        found = exports.model_kept(module, X)
        varying: tuple[str, ...] = ()
        if stage == 3:  # a forward between steps would be one of those whose order ZeRO remembers
            # What pads the last rank's part of a parameter, and lies behind a gathered one, is whatever was in memory.
            varying = ("rank_1_mp_rank_00_optim_states.pt", "pytorch_model.bin")
            found = {name: found[name] for name in ("vars", "torch.save", "torch.save of weights", "pickle")}
        found |= {
            "deepcopy of the module": lambda: exports.stable(copy.deepcopy(module).state_dict()),
            "save_checkpoint": lambda: written(
                folder,
                by=lambda: engine.save_checkpoint(folder, tag=moment, client_state={"moment": moment}),
                varying=varying,
            ),
            "fp32 weights": lambda: exports.stable(get_fp32_state_dict_from_zero_checkpoint(folder, tag=moment)),
            "save_16bit_model": lambda: written(weights, by=lambda: engine.save_16bit_model(weights), varying=varying),
            "optimizer state": lambda: exports.stable(engine.optimizer.state_dict()),
            "engine pickled": lambda: len(exports.free_of_us(pickle.dumps(engine))),
        }
        found |= exports.optimizer_kept(optimizer) | exports.scheduler_kept(engine.lr_scheduler)
        if stage == 3:  # this optimizer's state_dict() raises, and names an id
            del found["optimizer deepcopy"]
        return found | attributes(engine, module, engine.optimizer)

    draw = torch.Generator().manual_seed(RANK)
    data = [torch.randn(BATCH, 16, generator=draw) for _ in range(STEPS * ACCUMULATION)]
    for number, x in enumerate(data if pacer is None else pacer.data(data), start=1):
        loss = nn.functional.mse_loss(engine(x), x[:, :4].sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        SAID.setdefault("losses", {})[str(number)] = float(loss.detach()).hex()
        if number % ACCUMULATION == 0 and number // ACCUMULATION in LOOKS:
            look(f"step {number // ACCUMULATION}", operations(f"step {number // ACCUMULATION}"))
    if pacer is not None:
        assert pacer.is_active
        pacer.close()
    look("closed", operations("closed"))


JOBS: dict[str, Callable[[], None]] = {
    "transformers": transformers,
    "lightning": lightning,
    "accelerate": accelerate,
    "deepspeed 1": lambda: deepspeed(1),
    "deepspeed 3": lambda: deepspeed(3),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    JOBS[LIBRARY]()
    dist.barrier()
    if RANK == 0:
        sys.stdout.write(f"\n{json.dumps(SAID)}\n")  # some libraries say things on stdout
        sys.stdout.flush()
    os._exit(0)  # torch's own end aborts now and then
