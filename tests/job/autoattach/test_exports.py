"""What the user saves, copies, scripts and exports is as without pacecar, at every moment and after `close`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.world import stand_ins
from tests.job.autoattach.scripts import run
from tests.kit.forking_python import forking_python

JOB = Path(__file__).with_name("job_exports.py")

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

KINDS = {"plain": 1, "own": 1, "compiled": 1, "ddp": 2, "fsdp2": 2, "trainer": 2}
"""Models, and the ranks that train them."""

QUICK = [
    ("plain", "attach", "whole"),
    ("plain", "run", "quick"),
    ("own", "attach", "quick"),
    ("ddp", "run", "quick"),
    ("trainer", "attach", "quick"),
]
WHOLE = [(kind, way, "whole") for kind in KINDS for way in ("attach", "run")]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in WHOLE if case not in QUICK)]


@cache
def said(kind: str, way: str, scope: str) -> dict[str, dict[str, Any]]:
    """Return {moment: {operation: outcome}} of a job."""
    watched = ("--job", "exports") if way == "run" else None
    needs_path = way != "bare" or kind == "trainer"  # of pacecar, and of the stand-in for transformers
    environ = {"PYTHONPATH": stand_ins()} if needs_path else {}
    done = run(JOB, kind, way, scope, ranks=KINDS[kind], watched=watched, is_torchrun=False, **environ)
    assert done.code == 0, done.errors[-5:]
    if way == "run":
        assert any("measures job exports" in line for line in done.pacecar), done.pacecar
    found: dict[str, dict[str, Any]] = json.loads(done.out)
    return found


@pytest.mark.parametrize(("kind", "way", "scope"), CASES)
def test_every_operation_has_the_outcome_that_it_has_without_pacecar(kind: str, way: str, scope: str) -> None:
    bare, seen = said(kind, "bare", scope), said(kind, way, scope)
    assert seen.keys() == bare.keys()
    assert {"step 0", "step 3", "last step", "closed", "losses"} <= bare.keys()
    other = {
        f"{operation} at {moment}": (outcome, seen[moment].get(operation))
        for moment, outcomes in bare.items()
        for operation, outcome in outcomes.items()
        if seen[moment].get(operation) != outcome
    }
    assert other == {}


def test_the_operations_do_something_without_pacecar() -> None:
    """Otherwise their outcomes would be equal because all of them raise."""
    whole = {name: result for name, (result, _) in said("plain", "bare", "whole")["last step"].items()}
    assert {name for name, result in whole.items() if failed(result)} == {"torch.load by default"}, "refuses any class"
    answers = {name: result for name, result in whole.items() if name.startswith("process")}
    assert len(answers) == 3
    assert {code for _, code in answers.values()} == {0}, "and what the spawned processes say is compared"
    trained = said("trainer", "bare", "quick")["last step"]["trainer"]
    assert not failed(trained[0]), trained


def failed(result: object) -> bool:
    return isinstance(result, str) and "Error: " in result.partition("\n")[0]


WORD_LANGUAGE_MODEL = """
import io, sys, torch
from torch import nn
class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.Linear(8, 20)
    def forward(self, x, hidden):
        y, hidden = self.rnn(self.embed(x), hidden)
        return self.out(y), hidden
if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Rnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for epoch in range(3):
        hidden = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
        for step in range(4):
            x = torch.arange(24).view(6, 4) % 20
            y, hidden = model(x, tuple(h.detach() for h in hidden))
            loss = nn.functional.cross_entropy(y.view(-1, 20), x.view(-1))
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        with open(f"{sys.argv[1]}.{epoch}.pt", "wb") as file:
            torch.save(model, file)
        with torch.serialization.safe_globals([Rnn, nn.Embedding, nn.LSTM, nn.Linear]):
            model = torch.load(f"{sys.argv[1]}.{epoch}.pt")
        model.rnn.flatten_parameters()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        print(epoch, float(loss.detach()).hex())
"""

READING = """
import sys
sys.modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] != "pacecar"}
class Never:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pacecar":
            raise ModuleNotFoundError("there is no pacecar on this machine", name=name)
sys.meta_path.insert(0, Never())
import torch
exec(open(sys.argv[1]).read().partition("if __name__")[0])
for epoch in range(3):
    model = torch.load(f"{sys.argv[2]}.{epoch}.pt", weights_only=False)
    print([float(p.detach().sum()).hex() for p in model.parameters()])
"""


def test_a_model_saved_each_epoch_under_run_is_the_same_file_and_is_read_where_there_is_no_pacecar(
    tmp_path: Path,
) -> None:
    """As pytorch/examples' word_language_model does: save the best model whole, load it at the end."""
    script = tmp_path / "main.py"
    script.write_text(WORD_LANGUAGE_MODEL)
    reading = tmp_path / "reading.py"
    reading.write_text(READING)
    bare = run(script, str(tmp_path / "bare"), ranks=1)
    seen = run(script, str(tmp_path / "seen"), ranks=1, watched=("--job", "rnn"))
    assert seen.ended == bare.ended
    assert bare.code == 0, bare.errors
    assert any("measures job rnn" in line for line in seen.pacecar), seen.pacecar
    for epoch in range(3):
        assert (tmp_path / f"seen.{epoch}.pt").read_bytes() == (tmp_path / f"bare.{epoch}.pt").read_bytes()
    read = run(reading, str(script), str(tmp_path / "seen"), ranks=1, python=forking_python())
    assert (read.code, len(read.out.splitlines())) == (0, 3), read.errors
