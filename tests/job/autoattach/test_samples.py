"""Samples of a step under `pacecar run` are those that the loader's batch sampler named; else they are a guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job.autoattach.scripts import EACH_STEP, run

pytestmark = [pytest.mark.slow]

SCRIPT = '''
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
kind = sys.argv[1]
STEPS = 14


class Recurrent(nn.Module):
    """Takes (time, sequence, feature), as torch's LSTM does by default."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 8)

    def forward(self, x):
        return self.cell(x)[0].square().mean()


def over_time(rows):
    return torch.stack([row for row, in rows]).reshape(len(rows), 35, 4).transpose(0, 1)


def train(model, batches, optimizer, times=1, cut=None):
    for batch in batches:
        batch = batch[0] if isinstance(batch, list) else batch
        for part in batch.split(cut) if cut else [batch]:
            optimizer.zero_grad()
            for _ in range(times):
                out = model(part)
                (out if out.dim() == 0 else out.square().mean()).backward()
            optimizer.step()


def data(samples, *shape, **options):
    return DataLoader(TensorDataset(torch.randn(samples, *shape)), **options)


if kind == "recurrent":
    model = Recurrent()
    train(model, [torch.randn(35, 20, 4) for _ in range(STEPS)], torch.optim.SGD(model.parameters(), 0.1))
elif kind == "recurrent loader":
    model = Recurrent()
    loader = data(20 * (STEPS - 1) + 5, 140, batch_size=20, collate_fn=over_time, num_workers=int(sys.argv[2]))
    train(model, loader, torch.optim.SGD(model.parameters(), 0.1))
elif kind == "gan":
    model = nn.Linear(4, 1)  # called with real, fake and fake once more
    train(model, data(16 * STEPS, 4, batch_size=16), torch.optim.SGD(model.parameters(), 0.1), times=3)
elif kind == "cut":
    model = nn.Linear(4, 1)
    train(model, data(64 * 4, 4, batch_size=64), torch.optim.SGD(model.parameters(), 0.1), cut=16)
elif kind == "lbfgs":
    model = nn.Linear(4, 1)
    x, optimizer = torch.randn(20, 4), torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=7)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
elif kind == "evaluates":
    model, seen = nn.Linear(4, 1), data(10 * 64, 4, batch_size=64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (batch,) in data(16 * STEPS, 4, batch_size=16):
        train(model, [batch], optimizer)
        model.eval()
        with torch.no_grad():
            for (other,) in seen:
                model(other)
        model.train()
print("done")
'''


@pytest.mark.parametrize(
    ("kind", "samples", "last", "is_guess"),
    [
        (("recurrent",), 35, 35, True),
        (("recurrent loader", "0"), 20, 5, False),
        (("recurrent loader", "2"), 20, 5, False),
        (("gan",), 16, 16, False),
        (("cut",), 16, 16, False),
        (("lbfgs",), 20, 20, True),
        (("evaluates",), 16, 16, False),
    ],
    ids=["recurrent", "its loader", "with workers", "gan", "cut", "lbfgs", "evaluates"],
)
def test_samples_are_those_of_the_batch_sampler_and_a_closure_counts_once(
    tmp_path: Path, kind: tuple[str, ...], samples: int, last: int, is_guess: bool
) -> None:
    script = tmp_path / "samples.py"
    script.write_text(SCRIPT)
    seen = run(script, *kind, ranks=1, watched=("--run-dir", str(tmp_path)), **EACH_STEP)
    assert (seen.code, seen.out) == (0, "done\n"), seen.errors
    steps = seen.of(0, "step")[3:]  # before, there are batches that were drawn when there was no hook
    assert len(steps) >= 8
    assert [step["samples"] for step in steps] == [samples] * (len(steps) - 1) + [last]
    assert all(step.get("samples_guessed", False) is is_guess for step in steps)
    sees_data = kind[0] not in ("recurrent", "lbfgs")
    for step in steps:  # where no loader was seen nobody knows of a wait
        assert [step[of]["data_wait_ns"] is not None for of in ("ledger", "totals")] == [sees_data] * 2
