"""torch.compile sees nothing of the hooks: no graph break, no error, no compiled hook, the same numbers."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, torch
from torch import nn
import pacecar
what, is_full, hooked = sys.argv[1], sys.argv[2] == "fullgraph", sys.argv[3] == "hooked"

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
    def forward(self, x):
        return self.second(self.first(x).relu())

class Plain(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-0.1)

torch.manual_seed(0)
model = Net()
optimizer = Plain(model.parameters()) if what == "own_optimizer" else torch.optim.SGD(model.parameters(), lr=0.1)
if hooked:
    settings = dict(tune="off", socket="/nowhere/socket", overhead_budget=1.0, window_interval_steps=4)
    pacer = pacecar.attach(model, optimizer, **settings)
call, update = model, optimizer.step
compiled = torch.compile(backend="aot_eager", fullgraph=is_full)
if what == "model":
    call = compiled(model)
elif what == "function":
    call = compiled(lambda x: model(x))
elif what == "in_place":
    model.compile(backend="aot_eager", fullgraph=is_full)
else:
    update = compiled(lambda: optimizer.step())
x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
for _ in range(12):
    optimizer.zero_grad()
    loss = call(x).square().mean()
    loss.backward()
    update()
    print(float(loss.detach()).hex())
if hooked:
    pacer._hook.flush()
    assert pacer.is_active and pacer._hook._guard.failures == 0
    print("steps", pacer._hook.step, "windows", pacer._hook._budget.windows, file=sys.stderr)
    pacer.close()
counted = torch._dynamo.utils.counters
print("breaks", sum(counted["graph_break"].values()), "graphs", counted["stats"]["unique_graphs"], file=sys.stderr)
"""


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("what", "graph"), [("model", "fullgraph"), ("function", "fullgraph"), ("in_place", "breaks"), ("model", "breaks")]
)
def test_a_model_compiled_after_attach_has_the_same_graphs_and_losses_and_it_is_said_once(what, graph):
    losses, said = run(what, graph, "hooked")
    plain_losses, plain_said = run(what, graph, "plain")
    assert losses == plain_losses
    assert plain_said.splitlines()[-1] == said.splitlines()[-1], "graph breaks and graphs"
    assert "breaks 0 graphs 1" in said
    assert said.count("compiled from outside") == 1
    assert "steps 12" in said
    assert "UserWarning" not in said


@pytest.mark.parametrize("what", ["optimizer", "own_optimizer"])
def test_a_compiled_optimizer_still_ends_steps_and_none_of_the_hook_is_compiled(what):
    losses, said = run(what, "breaks", "hooked")
    assert losses == run(what, "breaks", "plain")[0]
    assert "steps 12 windows 3" in said or "steps 12 windows 2" in said
    assert "UserWarning" not in said
    assert "recompile_limit" not in said


def test_an_optimizer_compiled_in_one_graph_is_not_seen_and_not_harmed():
    losses, said = run("own_optimizer", "fullgraph", "hooked")
    assert losses == run("own_optimizer", "fullgraph", "plain")[0]
    assert said.count("steps are not seen") == 1
    assert "steps 0" in said
