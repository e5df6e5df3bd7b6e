"""A script in the manner of transformers' own examples; it knows nothing of pacecar, and must not.

Arguments by dataclasses, a model from a configuration, a Dataset, a collator, `Trainer.train` with gradient
accumulation, evaluation and a checkpoint at the end.  `--end` says how it ends.
"""

import dataclasses
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments


@dataclasses.dataclass
class ModelArguments:
    width: int = 32
    layers: int = 2
    length: int = 16


@dataclasses.dataclass
class RunArguments:
    steps: int = 10
    batch: int = 4
    accumulate: int = 2
    end: str = "well"


class Texts(torch.utils.data.Dataset):
    def __init__(self, count: int, length: int) -> None:
        self.rows = torch.randint(0, 64, (count, length), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class End(TrainerCallback):
    def __init__(self, end: str) -> None:
        self.end = end

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == args.max_steps - 2:
            sys.stdout.flush()
            if self.end == "raise":
                raise ValueError("no more data")
            if self.end == "exit":
                sys.exit(3)


def main() -> None:
    model_args, run_args = HfArgumentParser((ModelArguments, RunArguments)).parse_args_into_dataclasses()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        training_args = TrainingArguments(
            output_dir=folder,
            max_steps=run_args.steps,
            per_device_train_batch_size=run_args.batch,
            gradient_accumulation_steps=run_args.accumulate,
            learning_rate=1e-3,
            logging_steps=5,
            use_cpu=True,
            seed=3,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
            ddp_backend="gloo" if "RANK" in os.environ else None,
        )
        torch.manual_seed(3)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=64,
                n_positions=model_args.length,
                n_embd=model_args.width,
                n_layer=model_args.layers,
                n_head=4,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        trainer = Trainer(
            model=model,
            args=training_args,
            train_dataset=Texts(4096, model_args.length),
            eval_dataset=Texts(16, model_args.length),
            callbacks=[End(run_args.end)],
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            total = sum(parameter.detach().double().sum() for parameter in model.parameters())
            print("evaluated", loss.hex(), "parameters", float(total).hex(), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.1)  # gloo's threads let go of their work: torch aborts at exit otherwise (pytorch issue 190489)


if __name__ == "__main__":
    main()
