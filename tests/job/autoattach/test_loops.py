"""Loops of other kinds in one process: what is taken for the model, what is left alone, and what torch.compile sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacecar.commands.run import STARTUP
from tests.job.autoattach.scripts import EACH_STEP, FRESH, Done, run, run_both
from tests.kit.forking_python import forking_python

pytestmark = pytest.mark.slow

MODULES = ("torch",)
"""What is loaded before pacecar listens, where the loop is to load torch._dynamo itself, as in a fresh python.

That takes seconds of each loop, so the others are forked with it."""

HEAD = """
import sys, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
def mlp(): return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
x = torch.randn(4, 8)
"""

TAIL = """
print(total.hex())
if "torch._dynamo" in sys.modules:
    print(dict(torch._dynamo.utils.counters["stats"]))
"""

PLAIN = """
model = mlp()
optimizer = torch.optim.Adam(model.parameters())
total = 0.0
for _ in range(12):
    loss = model(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad(); total += float(loss.detach())
"""

GAN = """
generator, critic = mlp(), nn.Linear(1, 1)
one = torch.optim.Adam(critic.parameters())
other = torch.optim.Adam(generator.parameters())
total = 0.0
for _ in range(12):
    for _ in range(2):
        loss = critic(generator(x).detach()).mean() - critic(torch.ones(4, 1)).mean()
        loss.backward(); one.step(); one.zero_grad()
    loss = -critic(generator(x)).mean()
    loss.backward(); other.step(); other.zero_grad(); total += float(loss.detach())
"""

HOLDER = """
class Task(nn.Module):
    def __init__(self): super().__init__(); self.model = mlp()
task = Task()
optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
total = 0.0
for _ in range(12):
    loss = task.model(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad(); total += float(loss.detach())
"""

CONTAINER = """
class Container(torch.optim.Optimizer):
    \"\"\"As torchtitan's: an optimizer that steps others, and after them makes its own step's end.\"\"\"
    def __init__(self, model):
        self.inner = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model if list(part.parameters())]
        super().__init__(list(model.parameters()), {})
    def step(self):
        for each in self.inner: each.step()
model = mlp()
optimizer = Container(model)
total = 0.0
for _ in range(12):
    loss = model(x).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad(); total += float(loss.detach())
"""

ONCE = """
model = mlp()
optimizer, once = torch.optim.Adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
total = 0.0
for at in range(300):
    loss = model(x).square().mean()
    loss.backward(); optimizer.step()
    if at == 0: once.step()
    optimizer.zero_grad(); total += float(loss.detach())
"""

COMPILED = PLAIN.replace("model = mlp()", "model = torch.compile(mlp(), backend='eager')")
IN_PLACE = PLAIN.replace("model = mlp()", "model = mlp(); model.compile(backend='eager')")
BLOCKS = PLAIN.replace("model = mlp()", "model = mlp(); model[0] = torch.compile(model[0], backend='eager')")
FUNCTION = """
model = mlp()
optimizer = torch.optim.Adam(model.parameters())
@torch.compile(backend="eager")
def work(x): return model(x).square().mean()
total = 0.0
for _ in range(12):
    loss = work(x)
    loss.backward(); optimizer.step(); optimizer.zero_grad(); total += float(loss.detach())
"""
OPTIMIZER = PLAIN.replace("total = 0.0", "optimizer.step = torch.compile(optimizer.step, backend='eager')\ntotal = 0.0")

BY_HAND = """
model = mlp()
for step in range(12):
    model(x).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-4 * parameter.grad
            parameter.grad = None
total = 0.0
"""
INFERENCE = """
model = mlp()
with torch.no_grad():
    for step in range(12):
        model(x)
total = 0.0
"""
HOGWILD = """
import torch.multiprocessing as processes
model = mlp().share_memory()

def train(rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(12):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

trainers = [processes.get_context("fork").Process(target=train, args=(rank,)) for rank in range(2)]
for trainer in trainers:
    trainer.start()
for trainer in trainers:
    trainer.join()
total = 0.0
"""

LOADING = (PLAIN, COMPILED, FUNCTION, BY_HAND, INFERENCE, HOGWILD)
"""Loops that load torch._dynamo under pacecar's eyes: by an optimizer, for the model, for a function, and never."""

NOTHING = "pacecar: measured nothing: no optimizer of torch made a step in this process, where pacecar would see it"
MEASURES = "pacecar: measures job j, {} on 1 rank; tunes nothing"


def python(text: str = "") -> str:
    return forking_python(FRESH, MODULES) if text in LOADING else forking_python()


def both(tmp_path: Path, text: str) -> tuple[Done, Done]:
    script = tmp_path / "script.py"
    script.write_text(HEAD + text + TAIL)
    bare, seen = run_both(script, ranks=1, python=python(), watched=("--job", "j", "--run-dir", str(tmp_path)))
    assert bare.code == 0, bare.errors
    return bare, seen


EACH = """
import torch
for text in {texts!r}:
    if "torch._dynamo" in __import__("sys").modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    exec(text, {{"__name__": "__main__"}})
    print("---")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each loop prints without pacecar: all in one process, as each would start torch again."""
    # Those without an optimizer come first: the others load torch._dynamo, of which the script prints counts.
    texts = [
        BY_HAND,
        INFERENCE,
        HOGWILD,
        PLAIN,
        GAN,
        HOLDER,
        CONTAINER,
        ONCE,
        COMPILED,
        BLOCKS,
        IN_PLACE,
        FUNCTION,
        OPTIMIZER,
    ]
    script = tmp_path_factory.mktemp("bare") / "script.py"
    script.write_text(EACH.format(texts=[HEAD + text + TAIL for text in texts]))
    done = run(script, ranks=1, python=python(PLAIN))
    assert (done.code, done.errors) == (0, [])
    return dict(zip(texts, done.out.split("---\n")[:-1], strict=True))


@pytest.mark.parametrize(
    ("text", "line", "steps"),
    [
        (PLAIN, MEASURES.format("Sequential and Adam"), 10),
        (GAN, MEASURES.format("Linear and Adam"), 22),
        (HOLDER, MEASURES.format("Sequential and SGD"), 9),
        (CONTAINER, MEASURES.format("Sequential and Container"), 10),
        (ONCE, "pacecar: does not attach: the script trains something else now", 0),
        (COMPILED, MEASURES.format("compiled Sequential and Adam"), 10),
        (BLOCKS, MEASURES.format("Sequential and Adam"), 10),
        (IN_PLACE, "pacecar: does not attach: no module that the loop calls holds the optimizer's parameters", 0),
        (
            FUNCTION,
            "pacecar: does not attach: torch.compile is used on functions; call pacecar.attach in the script",
            0,
        ),
        pytest.param(OPTIMIZER, NOTHING, 0, marks=pytest.mark.full),
        (BY_HAND, NOTHING, 0),
        (INFERENCE, None, 0),
        (HOGWILD, "pacecar: does not attach: the script trains in processes of its own, without torch.distributed", 0),
    ],
    ids=[
        "plain",
        "gan",
        "holder",
        "container",
        "once",
        "compiled",
        "blocks",
        "in place",
        "function",
        "optimizer",
        "by hand",
        "inference",
        "hogwild",
    ],
)
def test_a_loop_is_measured_or_left_alone_and_prints_and_compiles_the_same(
    tmp_path: Path, bare: dict[str, str], text: str, line: str | None, steps: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + text + TAIL)
    seen = run(script, ranks=1, python=python(text), watched=("--job", "j", "--run-dir", str(tmp_path)), **EACH_STEP)
    assert seen.ended == (0, bare[text], [])
    assert seen.pacecar == ([] if line is None else [line])
    assert len(seen.of(0, "step")) == steps
    assert all(step["forward_ns"] for step in seen.of(0, "step")), "a step is a whole one"


def test_a_script_that_attaches_by_itself_is_left_to_it(tmp_path: Path) -> None:
    text = PLAIN.replace(
        "total = 0.0", "import pacecar; pacer = pacecar.attach(model, optimizer, tune='off')\ntotal = 0.0"
    )
    script = tmp_path / "script.py"
    script.write_text(HEAD + text + "print(pacer.is_active)\n")
    seen = run(script, ranks=1, python=python(), watched=("--run-dir", str(tmp_path)), **EACH_STEP)
    assert seen.pacecar == []
    assert "True" in seen.out
    assert len(seen.of(0, "step")) == 12


def test_a_wrong_setting_costs_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + PLAIN + TAIL)
    environ = {"PYTHONPATH": str(STARTUP), "PACECAR_RUN": "1", "PACECAR_HOOK_SOKET": "x"}
    seen = run(script, ranks=1, python=python(), **environ)
    assert seen.code == 0
    (line,) = seen.pacecar
    assert line.startswith("pacecar: does not attach: ConfigError: environment: PACECAR_HOOK_SOKET")


def test_when_the_script_goes_on_to_another_model_the_first_is_let_go(tmp_path: Path) -> None:
    again = PLAIN.replace("range(12)", "range(300)").replace(
        "model = mlp()", "first = weakref.ref(model); model = mlp()"
    )
    text = "import weakref, gc\n" + PLAIN + again + "del loss; gc.collect(); print(first() is None)\n"
    bare, seen = both(tmp_path, text)
    assert seen.ended == bare.ended
    assert "True" in seen.out
    assert seen.pacecar[1:] == ["pacecar: detaches: the script trains something else now"]


@pytest.mark.parametrize(("every", "measured"), [(20, 298), (1, 290)])
def test_a_new_optimizer_each_round_goes_on_with_the_same_measured_model(
    tmp_path: Path, every: int, measured: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch; model = torch.nn.Linear(8, 1)\n"
        "for step in range(300):\n"
        f"    if step % {every} == 0: optimizer = torch.optim.AdamW(model.parameters())\n"
        "    model(torch.ones(4, 8)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    seen = run(script, ranks=1, python=python(), watched=("--job", "j", "--run-dir", str(tmp_path)), **EACH_STEP)
    assert seen.pacecar == ["pacecar: measures job j, Linear and AdamW on 1 rank; tunes nothing"]
    steps = [record["step"] for record in seen.of(0, "step")]
    assert steps == list(range(len(steps)))
    assert measured <= len(steps) <= 298


@pytest.mark.parametrize("steps", [1, 2])
def test_a_script_that_is_over_too_soon_hears_one_line_of_why_nothing_was_measured(tmp_path: Path, steps: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + PLAIN.replace("range(12)", f"range({steps})") + TAIL)
    seen = run(script, ranks=1, python=python(), watched=("--job", "j"))
    if steps == 1:
        line = "pacecar: measured nothing: the script ended after 1 step, before its loop had come round"
        assert (seen.pacecar, seen.end) == ([line], [])
    else:
        (line,) = seen.end
        assert line.startswith("pacecar: measured no step: ")
        assert "--run-dir" in line


def test_loading_in_evaluation_does_not_grow_without_bound_and_is_in_the_ledger(tmp_path: Path) -> None:
    text = PLAIN.replace(
        "    loss.backward()",
        "    if _ in (5, 6): [None for _ in torch.utils.data.DataLoader(range(6000))]\n    loss.backward()",
    )
    bare, seen = both(tmp_path, text)
    assert seen.ended == bare.ended
    steps = seen.of(0, "step")
    assert [at for at, step in enumerate(steps) if step["data_wait_ns"]] == [3, 4], "in the others nothing is loaded"
    *others, less, more = sorted(step["ledger"]["data_wait_ns"] or 0 for step in steps)
    assert less > 10_000_000
    assert max(others) < less / 5, "an estimate has the last known share of a step's time, and these are short"
    assert {steps[3]["ledger"]["data_wait_ns"], steps[4]["ledger"]["data_wait_ns"]} == {less, more}
