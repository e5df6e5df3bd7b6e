"""One rank of a transformers.Trainer job; run by test_transformers.py in the adapters' environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from turning import OPTIONS, Ear, Numbers, main, planted, regression, shared_folder

from pacecar.adapters.transformers import PacecarCallback

VOCABULARY, POSITIONS = 64, 12


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokens with something to learn; of different lengths where `pads`, so that batches pad to different widths."""

    def __init__(self, count: int, *, pads: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        self.rows = torch.randint(1, VOCABULARY, (count, POSITIONS), generator=generator)
        self.rows[:, 1::2] = self.rows[:, ::2]
        lengths = torch.randint(4, POSITIONS + 1, (count,), generator=generator) if pads else None
        self.lengths = [POSITIONS] * count if lengths is None else lengths.tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index][: self.lengths[index]]}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    rows = [sample["input_ids"] for sample in samples]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Regression(nn.Module):
    """A model that returns a mean and knows nothing of num_items_in_batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = regression()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


class Ignorant(Regression):
    """Accepts any keyword, so Trainer assumes that it divides by num_items_in_batch, but returns a mean."""

    def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


class Contrast(Regression):
    """Compares the samples that go through together."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {"loss": (out - out.mean(0)).square().mean() + super().forward(x, labels)["loss"]}


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=POSITIONS,
            )
        )  # fmt: skip
    return {"regression": Regression, "ignorant": Ignorant, "contrast": Contrast}[name]()


REPLACED = ("training_step", "get_batch_samples", "_save_checkpoint")


class Late(TrainerCallback):
    """Follows the pacer as soon as it exists; ends the training early on request."""

    def __init__(self, ear: Ear, ours: PacecarCallback | None) -> None:
        self.ear, self.ours = ear, ours
        self.trainer: Trainer | None = None
        self.left: set[str] = set()
        """What lay on the Trainer while it trained, of what we replace."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.left |= {name for name in REPLACED if name in vars(self.trainer)}
        if self.ours is not None and self.ours.pacer is not self.ear.pacer:
            assert self.ours.pacer is not None
            self.ear.follow(self.ours.pacer)


def train(
    *,
    tune: str | None,
    model: str = "llama",
    trainer: str = "Trainer",
    steps: int = 60,
    batch: int = 4,
    accumulation: int = 4,
    pads: bool = False,
    micro_batch: bool | None = None,
    save_at: int | None = None,
    untested: bool = False,
    epochs: bool = False,
    breaks: bool = False,
) -> dict[str, Any]:
    from pacecar.adapters import transformers as ours_module

    net, ear = model_of(model), Ear()
    ours = None if tune is None else PacecarCallback(tune=tune, micro_batch=micro_batch, **OPTIONS)
    kind = {"Trainer": Trainer, "OwnStep": OwnStep, "OwnLoss": OwnLoss}[trainer]
    # 2 ranks, and an epoch that ends in the middle of an update where asked.
    count = 2 * batch * accumulation * steps // 3 + (2 * batch * 2 if epochs else 0)
    data = Texts(count, pads=pads) if model == "llama" else Numbers(count, ("x", "labels"))
    with shared_folder() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=batch, use_cpu=True, seed=1,
            gradient_accumulation_steps=accumulation, learning_rate=3e-3, report_to=[], disable_tqdm=True,
            logging_steps=10, save_strategy="no" if save_at is None else "steps", save_steps=save_at or 500,
            dataloader_pin_memory=False, remove_unused_columns=False, ddp_backend="gloo",
        )  # fmt: skip

        lates: list[Late] = []

        def make(net: nn.Module, ours: PacecarCallback | None) -> Trainer:
            late = Late(ear, ours)
            late.trainer = kind(
                model=net, args=arguments, train_dataset=data, callbacks=[late] if ours is None else [ours, late],
                data_collator=collate if model == "llama" else None,
            )  # fmt: skip
            lates.append(late)
            return late.trainer

        with planted("transformers", ours_module, is_untested=untested, is_broken=breaks):
            made = make(net, ours)
            result = made.train()
        answer = ear.answer(net)
        if save_at is not None:
            net = model_of(model)
            ear.pacer, ear.records = None, []
            ours = None if tune is None else PacecarCallback(tune=tune, **OPTIONS)
            made = make(net, ours)
            result = made.train(resume_from_checkpoint=f"{folder}/checkpoint-{save_at}")
            answer["resumed"] = ear.answer(net) | {"loss": result.training_loss}
        mine = {name for name in REPLACED if name in vars(made)}.union(*(late.left for late in lates))
        mine |= {name for name in REPLACED if "MethodReplacement" in str(vars(kind).get(name))}
        history = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        return answer | {
            "loss": result.training_loss, "history": history, "left_behind": sorted(mine),
            "version": transformers.__version__,
        }  # fmt: skip


if __name__ == "__main__":
    main({"train": train})
