"""torch.compile sees nothing of the hooks: no graph break, no error, no compiled hook, the same numbers."""

import json
import subprocess
from itertools import pairwise

import pytest

from tests.kit.forking_python import forking_python

pytestmark = pytest.mark.slow

SCRIPT = """
import json, logging, sys, warnings, torch
from torch import nn
import pacecar
from pacecar.profiler.timing import torch_compile
from tests.kit.hook_inspection import hook_of, inspect

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

class Heard(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

def train(what, is_full, hooked):
    torch._dynamo.reset()
    counted = torch._dynamo.utils.counters
    counted.clear()
    torch_compile._told.clear()
    said.clear()
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
    losses = []
    with warnings.catch_warnings(record=True) as warned:
        for _ in range(12):
            optimizer.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            update()
            losses.append(float(loss.detach()).hex())
    result = {
        "losses": losses,
        "breaks": sum(counted["graph_break"].values()),
        "graphs": counted["stats"]["unique_graphs"],
        "warned": [str(each.message) for each in warned],
        "said": [line for line in said if not line.startswith("pacecar cannot write")],
    }
    if hooked:
        hook_of(pacer).records.flush()
        assert pacer.is_active and inspect(pacer).failures == 0
        last = inspect(pacer).last_record
        result["has_forward"] = last is not None and last.forward_ns is not None and last.backward_ns is not None
        result |= {"steps": hook_of(pacer).step, "windows": hook_of(pacer).budget.windows}
        pacer.close()
    return result

said = []
logging.getLogger("pacecar").addHandler(Heard())
logging.getLogger("torch._dynamo").addHandler(Heard())
train("optimizer", False, False)  # dynamo's own warnings, which it says once
print(json.dumps([[train(*case, hooked) for hooked in (True, False)] for case in json.loads(sys.argv[1])]))
"""

MODELS = [("model", True), ("function", True), ("in_place", False), ("model", False)]
OPTIMIZERS = [("optimizer", False), ("own_optimizer", False)]
ONE_GRAPH = ("own_optimizer", True)


@pytest.fixture(scope="module")
def results():
    cases = [*MODELS, *OPTIMIZERS, ONE_GRAPH]
    done = subprocess.run(
        [forking_python(), "-c", SCRIPT, json.dumps(cases)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", MODELS)
def test_a_model_compiled_after_attach_has_the_same_graphs_and_losses_and_what_is_lost_is_said_once(results, case):
    hooked, plain = results[case]
    assert hooked["losses"] == plain["losses"]
    assert (hooked["breaks"], hooked["graphs"]) == (plain["breaks"], plain["graphs"]) == (0, 1)
    assert (hooked["steps"], hooked["warned"]) == (12, plain["warned"])
    if hooked["has_forward"]:  # dynamo compiles the forward of one's own module apart: the hooks are around it
        assert hooked["said"] == []
    else:
        assert sum("compiled from outside" in line for line in hooked["said"]) == len(hooked["said"]) == 1


def test_hooks_inlined_into_a_graph_are_not_in_it_and_those_around_it_see_their_phases(results):
    assert not results["function", True][0]["has_forward"]
    assert results["in_place", False][0]["has_forward"]


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_compiled_optimizer_still_ends_steps_and_none_of_the_hook_is_compiled(results, case):
    hooked, plain = results[case]
    assert hooked["losses"] == plain["losses"]
    assert hooked["steps"] == 12
    assert hooked["windows"] >= 2
    assert hooked["graphs"] == plain["graphs"]
    assert (hooked["warned"], hooked["said"]) == (plain["warned"], plain["said"])


def test_an_optimizer_compiled_in_one_graph_is_not_seen_and_not_harmed(results):
    hooked, plain = results[ONE_GRAPH]
    assert hooked["losses"] == plain["losses"]
    assert (hooked["breaks"], hooked["graphs"]) == (plain["breaks"], plain["graphs"])
    assert hooked["steps"] == 0
    assert sum("steps are not seen" in line for line in hooked["said"]) == 1


NEW_OPTIMIZERS = """
import json, sys, torch, pacecar
from tests.kit.hook_inspection import hook_of, inspect

class Plain(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-0.01)

def train(what, hooked):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    other = torch.nn.Linear(4, 4)
    model = torch.compile(net, backend="aot_eager") if what == "model" else net
    make = Plain if what == "own" else torch.optim.AdamW
    optimizer = make(net.parameters())
    if hooked:
        pacer = pacecar.attach(model, optimizer, tune="off", overhead_budget=1.0, socket="/nowhere/socket")
    losses, steps = [], []
    for epoch in range(3):
        if epoch:
            optimizer = make(net.parameters())
        update = optimizer.step
        if what in ("step", "own"):
            update = torch.compile(optimizer.step, backend="aot_eager")
        elif what == "function":
            update = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="aot_eager")
        critic = Plain(other.parameters())
        judge = torch.compile(critic.step, backend="aot_eager", fullgraph=True)
        for _ in range(8):
            loss = model(torch.ones(8, 16)).square().mean()
            loss.backward()
            update()
            optimizer.zero_grad()
            other(torch.ones(1, 4)).sum().backward()
            judge()
            losses.append(float(loss.detach()).hex())
        steps.append(hook_of(pacer).step if hooked else None)
    if hooked:
        assert inspect(pacer).failures == 0
        pacer.close()
    return losses, steps

print(json.dumps({what: [train(what, hooked) for hooked in (True, False)] for what in sys.argv[1:]}))
"""


@pytest.mark.parametrize("kinds", [("model", "own"), pytest.param(("step", "function"), marks=pytest.mark.full)])
def test_a_new_optimizer_is_followed_through_compiled_models_and_compiled_steps(kinds):
    done = subprocess.run(
        [forking_python(), "-c", NEW_OPTIMIZERS, *kinds], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    for what, ((losses, steps), (bare, _)) in json.loads(done.stdout).items():
        assert losses == bare, what
        assert steps == [8, 16, 24], what


RECOMPILED = """
import json, torch, pacecar
from torch import nn
from tests.kit.hook_inspection import hook_of, inspect

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, backend="aot_eager", dynamic=False)
pacer = pacecar.attach(compiled, optimizer, tune="off", socket="/nowhere/socket", overhead_budget=1.0)
totals = []
for step in range(12):
    if step == 6:
        torch._dynamo.reset()  # forgets callbacks as well as code
    optimizer.zero_grad()
    compiled(torch.randn(3 if step == 9 else 2, 8)).sum().backward()
    optimizer.step()
    hook_of(pacer).records.flush()
    record = inspect(pacer).last_record
    totals.append((record.total_compile_ns, record.totals.wall_ns))
pacer.close()
callbacks = torch._dynamo.callback.callback_handler
print(json.dumps([totals, len(callbacks.start_callbacks) + len(callbacks.end_callbacks)]))
"""


def test_compilations_are_timed_in_the_first_step_and_when_a_shape_changes():
    done = subprocess.run(
        [forking_python(), "-c", RECOMPILED], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    totals, left_behind = json.loads(done.stdout)
    grew = [(step, after - before) for step, (before, after) in enumerate(pairwise([0, *(t for t, _ in totals)]))]
    assert [step for step, ns in grew if ns] == [0, 9]  # in step 6 nobody watched: dynamo had been reset
    walls = [after - before for before, after in pairwise([0, *(wall for _, wall in totals)])]
    assert all(ns < walls[step] for step, ns in grew)
    assert grew[0][1] > walls[0] / 2
    assert left_behind == 0
