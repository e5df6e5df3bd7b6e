"""The hook never harms the job: same numbers, same hooks, same user's profiler, and it dies alone."""

import gc
import os
import subprocess
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from pacecar.config import HookConfig
from pacecar.profiler.hook.hook import Hook, make_hello
from pacecar.profiler.timing.failure_guard import FAILURES_MAX
from pacecar.profiler.windows.kineto_log import KINETO_LOG_VARIABLE
from tests.kit.forking_python import forking_python
from tests.kit.listeners import HeardSteps
from tests.kit.ranks import run_ranks

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
PROFILER_METHODS = ("_prepare_trace", "_start_trace", "__exit__")


def hook_counts(job):
    counts = [len(getattr(module, table)) for module in job.model.modules() for table in HOOKS]
    return counts + [len(getattr(job.optimizer, table)) for table in OPTIMIZER_HOOKS]


class Small(nn.Module):
    """A transformer of two layers, with dropout, so that random numbers drawn by the hook would show."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64)

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


def train(kind, hooked, steps=200):
    """Return the bytes of all losses and of the final parameters, and the records."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    if kind == "mlp":
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64))
        inputs = torch.randn(8, 16, 32)
        targets = torch.randint(64, (8, 16))
    else:
        model = Small()
        inputs = torch.randint(64, (8, 4, 12))
        targets = torch.randint(64, (8, 4, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    records = []
    config = HookConfig(overhead_budget=1.0, window_interval_steps=10)
    hook = Hook(model, optimizer, hello=make_hello(model), config=config)
    if hooked:
        hook.start(HeardSteps(lambda step: records.append(step.settled())))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        logits = model(inputs[step % 8])
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets[step % 8].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    hook.close()
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return torch.stack(losses).numpy().tobytes(), parameters, records


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_losses_and_parameters_are_equal_to_the_last_bit(kind):
    losses, parameters, records = train(kind, hooked=True)
    assert sum(r.source == "exact" for r in records) >= 15, "windows were on"
    plain_losses, plain_parameters, none = train(kind, hooked=False)
    assert none == []
    assert losses == plain_losses
    assert parameters == plain_parameters


def test_close_leaves_model_optimizer_and_profiler_as_they_were(job, attach):
    before = hook_counts(job)
    methods = [getattr(torch.autograd.profiler.profile, name) for name in PROFILER_METHODS]
    hook = attach(job)
    assert hook_counts(job) != before
    job.run(7)
    hook.close()
    assert hook_counts(job) == before
    assert [getattr(torch.autograd.profiler.profile, name) for name in PROFILER_METHODS] == methods
    assert not torch.autograd._profiler_enabled()
    job.run(2)


def test_a_loader_that_is_asked_for_after_close_leaves_torchs_as_they_are(job, attach):
    iterators = torch.utils.data.dataloader._BaseDataLoaderIter
    before = iterators._next_index
    hook = attach(job)
    hook.loop.data(job.batches)
    assert iterators._next_index is not before
    hook.close()
    assert iterators._next_index is before
    assert list(hook.loop.data([1, 2])) == [1, 2]
    assert iterators._next_index is before


def test_close_in_the_middle_of_a_window_ends_it(job, attach):
    hook = attach(job)
    job.run(3)
    assert torch.autograd._profiler_enabled()
    hook.close()
    assert not torch.autograd._profiler_enabled()
    assert KINETO_LOG_VARIABLE not in os.environ


def test_close_inside_on_boundary_is_safe_and_complete_after_the_next_forward(job, attach):
    before = hook_counts(job)
    hook = attach(job, on_boundary=lambda record: hook.close() if record.step == 4 else None)
    assert len(job.run(8)) == 8
    assert not hook.is_alive
    assert hook_counts(job) == before


def test_an_exception_in_the_callback_is_logged_once_and_training_goes_on(job, attach, sink, caplog):
    def boundary(record):
        raise ZeroDivisionError("planted")

    before = hook_counts(job)
    hook = attach(job, on_boundary=boundary)
    expected = type(job)().run(12)
    assert job.run(12) == expected
    assert not hook.is_alive
    assert sum("planted" in (r.exc_text or "") for r in caplog.records) == 1
    assert len(sink.steps) == FAILURES_MAX
    hook.close()
    assert hook_counts(job) == before


def test_a_hook_that_turned_itself_off_still_tells_its_listener_of_every_boundary(job, attach, sink):
    """The listener votes with other ranks at fixed boundaries; one that it misses would hang them."""
    heard = []

    def fail(*_):
        raise ValueError("planted")

    sink.put = fail
    hook = attach(job, on_boundary=heard.append)
    for _ in range(12):
        job.run(1)
        hook.records.flush()
    assert not hook.is_alive
    assert len(heard) == 12
    assert heard[-1] is None
    sink.put = lambda record: None
    hook.close()
    job.run(2)
    assert len(heard) == 12


@pytest.mark.parametrize("place", ["batch_samples", "sink"])
def test_exceptions_elsewhere_leave_the_loop_alive(job, attach, sink, place, caplog):
    def fail(*_):
        raise ValueError("planted")

    arguments = {}
    if place == "sink":
        sink.put = fail
    else:
        arguments["batch_samples"] = fail
    hook = attach(job, **arguments)
    for _ in range(12):
        assert len(job.run(1, hook.loop.data(job.batches))) == 1
        hook.records.flush()
    assert not hook.is_alive
    sink.put = lambda record: None


def test_keyboard_interrupt_passes(job, attach):
    def interrupt(record):
        raise KeyboardInterrupt

    attach(job, on_boundary=interrupt)
    with pytest.raises(KeyboardInterrupt):
        job.run(1)


def test_an_exception_of_the_users_own_passes_and_the_next_step_is_sound(job, attach, sink):
    attach(job)
    job.run(2)

    def explode(gradient):
        raise RuntimeError("the user's")

    handle = next(job.model.parameters()).register_hook(explode)
    with pytest.raises(RuntimeError, match="the user's"):
        job.run(1)
    handle.remove()
    job.run(3)
    for record in sink.steps:
        assert sum(record.ledger.parts().values()) == record.wall_ns


def users_events(job, steps, scheduled):
    """Profile the loop as users do; return how often each operator was seen."""
    seen = {}

    def collect(prof):
        for event in prof.key_averages():
            if event.key.startswith(("aten::", "Optimizer.step")):
                seen[event.key] = seen.get(event.key, 0) + event.count

    plan = schedule(wait=1, warmup=1, active=2, repeat=2) if scheduled else None
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=collect) as prof:
        for x, y in [*job.batches, *job.batches][:steps]:
            job.step(x, y)
            if scheduled:
                prof.step()
    return seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("head_start", [3, 4])
def test_the_users_own_profiler_keeps_all_its_events(job, attach, sink, scheduled, head_start):
    job.run(head_start)
    expected = users_events(job, 12, scheduled)
    again = type(job)()
    hook = attach(again, config=HookConfig(overhead_budget=1.0, window_interval_steps=1))
    again.run(head_start)
    found = users_events(again, 12, scheduled)
    assert found == expected
    assert expected["aten::addmm"] > 0
    again.run(8)
    steps = sink.steps
    is_exact = steps[-1].source == "exact" or steps[-2].source == "exact"
    # Under a schedule torch keeps a record open across our windows, which therefore stop.
    assert is_exact != scheduled, "windows come back when the user's profiler is gone"
    assert hook.is_alive


@pytest.mark.slow
def test_batches_and_outputs_are_not_kept(job, attach):
    hook = attach(job)
    alive = []

    def fresh():
        for x, y in job.batches:
            copy = x.clone()
            alive.append(weakref.ref(copy))
            yield copy, y

    for x, y in hook.loop.data(fresh()):
        output = job.model(x)
        alive.append(weakref.ref(output))
        (output - y).square().mean().backward()
        job.optimizer.step()
    del x, y, output
    gc.collect()
    assert [ref for ref in alive if ref() is not None] == []


@pytest.mark.slow
def test_the_jobs_stderr_stays_clean_and_its_environment_as_it_was(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, torch\n"
        "from pacecar.config import HookConfig\n"
        "from pacecar.profiler.hook.hook import Hook, StepListener, make_hello\n"
        "m = torch.nn.Linear(4, 4); o = torch.optim.SGD(m.parameters(), lr=.1); seen = []\n"
        "class Heard(StepListener):\n"
        "    def wants_boundary(self): return True\n"
        "    def on_boundary(self, step): seen.append(step.source)\n"
        "h = Hook(m, o, hello=make_hello(m), config=HookConfig(overhead_budget=1.0, window_interval_steps=5))\n"
        "before = dict(os.environ); h.start(Heard())\n"
        "for _ in range(20): m(torch.ones(2, 4)).sum().backward(); o.step()\n"
        "h.close(); assert dict(os.environ) == before; print(seen.count('exact'))\n"
    )
    done = subprocess.run([forking_python(), script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert int(done.stdout) >= 3


def test_a_record_that_outlives_a_window_ends_windows_and_not_the_process(job, attach, sink, caplog):
    """Opened inside one profiled step and closed inside a later one: torch would write into freed memory."""
    caplog.set_level("INFO")
    attach(job, config=HookConfig(overhead_budget=1.0, window_interval_steps=2))
    job.run(3)
    epoch = torch.profiler.record_function("epoch")
    epoch.__enter__()
    job.run(4)
    epoch.__exit__(None, None, None)
    job.run(8)
    assert [r.step for r in sink.steps if r.source == "exact"] == [3]
    assert "'epoch' outlives" in caplog.text
    assert not torch.autograd._profiler_enabled()


LONG_JOB = """
import json, os, sys, torch, torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import pacecar
from pacecar.records import Command
from tests.kit.hook_inspection import hook_of, inspect
rank, hooked, kind, folder = int(os.environ["RANK"]), sys.argv[1] == "hooked", sys.argv[2], sys.argv[3]
steps = int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(7)
if kind == "mlp":
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    inputs = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(rank))
else:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    net = nn.Sequential(nn.Embedding(64, 32), layers, nn.Linear(32, 8))
    inputs = torch.randint(64, (8, 4, 12), generator=torch.Generator().manual_seed(rank))
model = DistributedDataParallel(net, bucket_cap_mb=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
pacer = None
if hooked:
    pacer = pacecar.attach(model, optimizer, tune="off", overhead_budget=1.0, window_interval_steps=10,
                           run_dir=folder, socket=folder + "/none")
losses = []
for step in range(steps):
    optimizer.zero_grad()
    loss = (model(inputs[step % 8]) - 0.5).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    if pacer is not None and step == steps // 2:  # as the daemon passes it on
        pacer._run.messages.receive(Command(number=1, action="trace", at_step=steps // 2 + 50, arguments={"steps": 4}))
if pacer is not None:
    crew, windows, gathers = pacer._run.rank_monitor, hook_of(pacer).budget.windows, pacer._run.rank_monitor.gathers
    assert pacer.is_active and crew.off_because is None, crew.off_because
    assert inspect(pacer).failures == 0
    pacer.close()
    folder = Path(folder)
    records = [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
    vitals = [record for record in records if record["type"] == "vitals"]
    exact = sum(record.get("source") == "exact" for record in records)
    traces = list(folder.glob(f"trace-*-step{steps // 2 + 50}-rank{rank}.json.gz"))
    found = dict(windows=windows, exact=exact, gathers=gathers, vitals=len(vitals), traces=len(traces),
                 flops=sum(record["flops_steps"] for record in vitals))
    assert windows >= steps // 25 and exact >= steps // 25 and gathers >= steps // 160 and len(traces) == 1, found
    assert vitals and found["flops"] > 0, found
    print(found, file=sys.stderr)
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
open(f"{folder}/result-{hooked}-{rank}", "wb").write(torch.stack(losses).numpy().tobytes() + parameters)
dist.barrier()
os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "steps"),
    [("transformer", 200), *(pytest.param(kind, 500, marks=pytest.mark.full) for kind in ("mlp", "transformer"))],
)
def test_two_ranks_train_the_same_to_the_last_bit_with_windows_gathers_vitals_and_a_trace(tmp_path, kind, steps):
    results = {}
    for mode in ("hooked", "plain"):
        run_ranks(["-c", LONG_JOB, mode, kind, tmp_path, str(steps)])
        results[mode] = [(tmp_path / f"result-{mode == 'hooked'}-{rank}").read_bytes() for rank in range(2)]
    assert results["hooked"] == results["plain"]
    assert len(results["plain"][0]) > steps * 4


SUBCLASS = """
import torch
from pacecar.profiler.timing.hook_cost import call_price

class Mine(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

assert not hasattr(torch.optim.SGD.step, "hooked"), "an SGD was made before"
call_price()
mine, ended = Mine([torch.nn.Parameter(torch.ones(1))], lr=0.1), []
mine.register_step_post_hook(lambda *_: ended.append(1))
mine.step()
assert len(ended) == 1, "a hook ran twice in one step"
"""


@pytest.mark.slow
def test_torchs_own_optimizers_are_left_as_they_were_for_those_who_inherit_from_them(tmp_path):
    """The first SGD of a process wraps `SGD.step`: it must not be one of pacecar's."""
    script = tmp_path / "subclass.py"
    script.write_text(SUBCLASS)
    done = subprocess.run([forking_python(), script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
