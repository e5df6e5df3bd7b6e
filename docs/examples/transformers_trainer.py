"""transformers' Trainer under pacecar: one callback.

torchrun --nproc_per_node 2 docs/examples/transformers_trainer.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from pacecar.adapters.transformers import PacecarCallback


class Copies(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences in which every token comes twice."""

    def __init__(self, count: int) -> None:
        tokens = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(0))
        self.rows = tokens.repeat_interleave(2, dim=1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """Train a very small Llama."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4,
        )
    )  # fmt: skip
    ours = PacecarCallback(tune="exact")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=4,
            learning_rate=3e-3, use_cpu=not torch.cuda.is_available(), report_to=[], disable_tqdm=True,
            save_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=Copies(4096), callbacks=[ours])
        loss = trainer.train().training_loss
    if trainer.is_world_process_zero() and ours.pacer is not None:
        print(f"loss {loss:.3f}; knobs at the end {ours.pacer.knobs.values}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
