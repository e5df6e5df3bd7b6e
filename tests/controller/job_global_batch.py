"""One rank of a job in mode "adaptive" whose gradients have a known noise; prints what it saw as JSON.

The loss of a sample with input z is the mean over z of (w - w*)^2 / 2 plus noise * z.w, so its gradient is (w - w*) +
noise * z: with w held still by a tiny true learning rate the noise scale is noise^2 * size / |w - w*|^2.  An update
costs a fixed 20 ms, so that fewer, larger updates go through more samples a second.  The time is counted by the job
itself: on a busy machine an update of the same size took three times as long as the one before.

Run by test_global_batch.py:  RANK, WORLD_SIZE and STORE in the environment, a JSON list of options as the argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pacecar
from pacecar.records import KnobSwitch, Verdict
from tests.controller.run_on import counted_clock
from tests.kit.patient_gathers import wait_for_gathers
from tests.kit.rank_jobs import RANK, WORLD, do_models_agree, records_of, run_jobs

SIZE, BATCH = 4096, 16

UPDATE_NS, SAMPLE_NS = 20_000_000, 50_000

CLOCK = counted_clock()
assert CLOCK is not None


class Bowl(nn.Module):
    def __init__(self, noise: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(SIZE))
        self.noise = noise

    def forward(self, z: Tensor) -> Tensor:
        CLOCK.advance(len(z) * SAMPLE_NS)
        return 0.5 * self.w.square().sum() + self.noise * (z @ self.w)


class Slow(torch.optim.SGD):
    """An optimizer whose step costs time and hardly moves; notes the rate that it used.

    It does not call the step above it: torch would run the hooks of both.
    """

    rates: list[list[float]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        CLOCK.advance(UPDATE_NS)
        self.rates.append([0, self.param_groups[0]["lr"]])
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / 1e4)


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Bowl(options["noise"]))
    optimizer = Slow(model.parameters(), lr=0.01)
    optimizer.rates = []
    pacer = pacecar.attach(
        model, optimizer, tune="adaptive", knobs=("batch_samples",), learning_rate_rule="sqrt", remember=False,
        socket="/nonexistent/pacecar.sock", exploration_budget=0.5, batch_samples_max=256, windows=False, crew=False,
    )  # fmt: skip
    records = records_of(pacer)
    generator = torch.Generator().manual_seed(RANK)
    drawn: list[float] = []
    seen: list[float] = []

    def loader() -> Any:
        while True:
            z = torch.randn(BATCH, SIZE, generator=generator)
            drawn.append(float(z[0, 0]))
            yield z

    scales: list[float | None] = []
    updates = pacer.batches(loader())
    for _ in range(options["steps"]):
        update = next(updates)
        seen += update[::BATCH, 0].tolist()
        optimizer.zero_grad()
        pacer.train_batch(update, lambda z: model(z).mean())
        optimizer.step()
        optimizer.rates[-1][0] = len(update) * WORLD
        scales.append(pacer._run.knobs.global_batch.noise_scale())
    value, state = pacer.knobs.values["batch_samples"], pacer._tuner.state
    pacer.close()
    weights = model.module.w.detach()
    return {
        "noise_scales": scales[::10],
        "true_noise_scale": options["noise"] ** 2 * SIZE / float(weights.square().sum()),
        "batch_samples": value,
        "state": state,
        "rates": optimizer.rates,
        "drawn": drawn,
        "seen": seen,
        "switches": [[r.step, r.epoch, r.knobs.values] for r in records if isinstance(r, KnobSwitch)],
        "verdicts": [[r.outcome, r.reason] for r in records if isinstance(r, Verdict)],
        "models_agree": do_models_agree(weights),
    }


if __name__ == "__main__":
    wait_for_gathers()
    run_jobs(main)
