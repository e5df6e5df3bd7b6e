"""One rank of a loop under Accelerate; run by test_accelerate.py in the adapters' environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import accelerate
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from turning import OPTIONS, Ear, Numbers, main, planted, regression, shared_folder

from pacecar.adapters.accelerate import attach


def train(
    *,
    tune: str | None,
    steps: int = 60,
    batch: int = 4,
    accumulation: int = 4,
    uses: bool = True,
    remainder: int = 0,
    untested: bool = False,
    resume_at: int | None = None,
) -> dict[str, Any]:
    """Train with or without pacecar; `uses`: by `train_batch`.  `remainder`: batches beyond whole updates."""
    torch.manual_seed(0)
    accelerate.utils.set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    accelerator.step = 0
    net = regression()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.5)
    data = Numbers(2 * batch * (accumulation * steps // 3 + remainder))
    loader = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    ear = Ear()
    with planted("accelerate", is_untested=untested):
        pacer = None if tune is None else attach(accelerator, model, optimizer, tune=tune, **OPTIONS)
    if pacer is not None:
        ear.follow(pacer.pacer)

    def loss_of(part: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(part[0]), part[1])

    done, losses, bodies, update = 0, [], 0, 0.0
    with shared_folder() as folder:
        while done < steps:
            for batch_of in loader if pacer is None else pacer.data(loader):
                bodies += 1
                with accelerator.accumulate(model):
                    if pacer is not None and uses:
                        loss = pacer.train_batch(batch_of, loss_of)
                    else:
                        loss = loss_of(batch_of)
                        accelerator.backward(loss)
                    # What loops do in their body: all ranks must come here equally often.
                    update += accelerator.gather(loss.detach()).mean().item()
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    done += 1
                    losses.append(update)
                    update = 0.0
                    if done == resume_at:
                        accelerator.save_state(folder)
                        accelerator.wait_for_everyone()
                        accelerator.load_state(folder)
                    if done == steps:
                        break
    if pacer is not None:
        pacer.close()
    return ear.answer(net) | {
        "history": losses, "bodies": bodies, "version": accelerate.__version__,
        "accumulation": accelerator.gradient_accumulation_steps, "rate": scheduler.get_last_lr(),
    }  # fmt: skip


def mistakes() -> dict[str, Any]:
    """Call `attach` with invalid arguments."""
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, prepared = accelerator.prepare(net, optimizer)
    said = {}
    for name, call in {
        "no accelerator": lambda: attach(net, model, prepared),
        "not prepared": lambda: attach(accelerator, net, prepared),
        "no such option": lambda: attach(accelerator, model, prepared, bucket_size=1),
        "no such mode": lambda: attach(accelerator, model, prepared, tune="fast"),
    }.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


if __name__ == "__main__":
    main({"train": train, "mistakes": mistakes})
