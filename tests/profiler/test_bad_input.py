"""Whatever the user's code does inside a step, the hook carries on or lets go, and adds nothing of its own."""

import json
import os
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch

from pacecar.records import JobRecord, Ledger, StepRecord
from tests.kit.forking_python import forking_python
from tests.kit.hook_inspection import inspect

PLACES = ("forward", "backward", "loader", "optimizer", "between")


class Planted(Exception):  # noqa: N818  the user's
    pass


def check(records):
    """What holds for every run of records."""
    total = Ledger(wall_ns=0, data_wait_ns=None)
    for number, record in enumerate(records):
        assert record.step == number
        assert record.ledger.wall_ns == record.wall_ns == sum(record.ledger.parts().values())
        total += record.ledger
        assert record.totals == total


class Trap:
    """Raises the user's exception at one place of a loop, when armed."""

    def __init__(self, job, place):
        self.armed = False
        self.place = place
        if place == "forward":
            job.model[2].register_forward_pre_hook(lambda *_: self.spring("forward"))
        elif place == "backward":
            next(job.model.parameters()).register_hook(lambda gradient: self.spring("backward"))
        elif place == "optimizer":
            step = type(job.optimizer).step.__wrapped__

            def trapped(*args, **kwargs):
                self.spring("optimizer")
                return step(*args, **kwargs)

            job.optimizer.step = torch.optim.Optimizer.profile_hook_step(trapped).__get__(job.optimizer)

    def spring(self, place):
        if self.armed and place == self.place:
            self.armed = False
            raise Planted(place)


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_that_the_user_catches_costs_its_step_and_nothing_else(job, attach, sink, place, caplog):
    trap = Trap(job, place)
    hook = attach(job)

    def batches():
        while True:
            yield from job.batches

    def endless():
        source = batches()
        while True:
            trap.spring("loader")
            yield next(source)

    caught = done = 0
    data = iter(hook.loop.data(endless()))
    for attempt in range(24):
        trap.armed = attempt in (3, 9, 10, 16)  # inside a window, before one and between
        try:
            x, y = next(data)
            trap.spring("between")
            job.step(x, y)
            done += 1
        except Planted:
            caught += 1
            if place == "loader":
                data = iter(hook.loop.data(endless()))
    assert (caught, done) == (4, 20)
    records = sink.steps
    assert len(records) == done
    check(records)
    assert hook.is_alive
    assert caplog.text == ""
    assert sum(r.source == "exact" for r in records) >= 3
    usual = [r for r in records if r.micro_batches == 1]
    assert len(usual) >= 16
    assert all(r.forward_ns and r.backward_ns and r.optimizer_ns for r in usual)


FAILING = """
import sys, torch
from torch import nn
import pacecar
place = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        if step == 5 and place == "forward":
            raise LookupError("planted")
        return self.layer(x)

def fail(gradient):
    if step == 5:
        raise LookupError("planted")

def batches():
    for number in range(10):
        if number == 5 and place == "loader":
            raise LookupError("planted")
        yield torch.ones(4, 8)

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = dict(tune="off", socket="/nowhere/socket", overhead_budget=1.0, window_interval_steps=1)
pacer = pacecar.attach(model, optimizer, window_warmup_steps=1, **settings)
if place == "backward":
    model.layer.weight.register_hook(fail)
step = 0
for batch in pacer.data(batches()):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    if step == 5 and place == "exit":
        sys.exit(3)
    if step == 5 and place == "optimizer":
        optimizer.step(lambda: 1 / 0)
    if step == 5 and place == "kill":
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
    optimizer.step()
    step += 1
"""


TO_THE_END = os.environ | {"FORKED_FINALIZES": "1", "PYTHONPATH": os.getcwd()}
"""What python does last may hang or crash where torch's profiler ran."""

ENDS = {
    "forward": (1, "LookupError: planted"),
    "backward": (1, "LookupError: planted"),
    "loader": (1, "LookupError: planted"),
    "optimizer": (1, "ZeroDivisionError: division by zero"),
    "exit": (3, None),
    "kill": (-signal.SIGTERM, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", ENDS)
def test_a_script_that_fails_ends_with_its_own_code_and_its_own_last_words(place):
    code, last = ENDS[place]
    done = subprocess.run(
        [forking_python(), "-c", FAILING, place],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=TO_THE_END,
    )
    assert done.returncode == code
    said = [line for line in done.stderr.splitlines() if not line.startswith("pacecar cannot write to the daemon")]
    assert (said[-1] if said else None) == last
    ours = [line for line in said if "/profiler/" in line]
    # The generator that times the loader stands between the loop and the loader.
    assert all("loading.py" in line for line in ours) if place == "loader" else not ours


HANGING = """
import itertools, sys, time, torch
from torch import nn
import pacecar
torch.set_num_threads(1)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = dict(tune="off", socket="/nowhere/socket", overhead_budget=1.0, window_interval_steps=1)
pacer = pacecar.attach(model, optimizer, run_dir=sys.argv[1], window_warmup_steps=1, **settings)
for _ in range(6):
    model(torch.ones(4, 8)).mean().backward()
    optimizer.step()
try:
    for number in itertools.count():
        model(torch.ones(4, 8)).mean().backward()
        if number == 200:
            print("hanging", torch.autograd._profiler_enabled(), flush=True)
except KeyboardInterrupt:
    begun = time.monotonic()
    pacer.close("interrupted")
    print("closed", time.monotonic() - begun < 20.0, torch.autograd._profiler_enabled(), flush=True)
    raise
"""


@pytest.mark.slow
def test_a_step_that_never_ends_is_interrupted_by_the_keyboard_and_closes_at_once(tmp_path):
    process = subprocess.Popen(
        [forking_python(), "-c", HANGING, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=TO_THE_END,
    )
    try:
        assert process.stdout.readline().split()[0] == "hanging"
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert out.split() == ["closed", "True", "False"]
    assert "KeyboardInterrupt" in errors.splitlines()
    assert process.returncode == -signal.SIGINT
    records = [
        msgspec.json.decode(line, type=JobRecord) for line in (tmp_path / "rank0.jsonl").read_bytes().splitlines()
    ]
    assert records[-1].reason == "interrupted"


def test_iterations_without_an_update_belong_to_the_next_one(job, attach, sink):
    hook = attach(job)
    skipped = {2, 3, 7, 8, 9, 14}
    for number, (x, y) in enumerate(hook.loop.data([*job.batches, *job.batches])):
        loss = (job.model(x) - y).square().mean()
        if number in skipped:
            continue
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    records = sink.steps
    check(records)
    assert [r.micro_batches for r in records] == [1, 1, 3, 1, 1, 4, 1, 1, 1, 2]
    assert [r.samples for r in records] == [16 * r.micro_batches for r in records]
    assert hook.is_alive


def test_of_two_models_in_a_process_the_first_is_measured_and_the_second_trains_beside_it(job, attach, sink):
    from pacecar.profiler.hook.hook import AlreadyAttachedError

    other = type(job)(seed=5)
    attach(job)
    with pytest.raises(AlreadyAttachedError):
        attach(other)
    expected = type(job)(seed=5).run(10)
    losses = []
    for number in range(10):
        x, y = job.batches[number % 8]
        job.step(x, y)
        losses.append(other.step(*other.batches[number % 8]))
    assert losses == expected
    records = sink.steps
    check(records)
    assert [r.micro_batches for r in records] == [1] * 10


def test_a_model_inside_the_model_that_trains_by_itself_does_not_disturb(job, attach, sink):
    """A part of the attached model is called alone, as losses of GANs and auxiliary heads do."""
    hook = attach(job)
    for x, y in job.batches:
        job.model[0](x).mean().backward()
        job.step(x, y)
    check(sink.steps)
    assert [r.micro_batches for r in sink.steps] == [1] * len(job.batches)
    assert hook.is_alive


def broken_cuda(*_args, **_kwargs):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.slow
@pytest.mark.parametrize("call", ["_prepare", "_enable", "_disable"])
def test_a_profiler_that_fails_is_said_once_and_the_job_trains_to_the_same_losses(
    job, attach, sink, call, monkeypatch, caplog
):
    hook = attach(job)
    expected = type(job)().run(30)
    losses = job.run(6)
    # Torch's own function, as it was found when the hook was attached: what a broken device context makes of it.
    monkeypatch.setattr(inspect(hook).profiler, call, broken_cuda)
    for number in range(24):
        losses.append(job.step(*job.batches[(6 + number) % 8]))
    monkeypatch.undo()
    assert losses == expected
    assert sum("illegal memory access" in (r.exc_text or "") for r in caplog.records) == 1
    check(sink.steps)
    hook.close()
    if torch.autograd._profiler_enabled():  # what could not be ended
        torch._C._autograd._disable_profiler()


def test_windows_that_failed_on_one_occasion_do_not_cost_the_hook(job, attach, sink, monkeypatch):
    hook = attach(job)
    job.run(4)
    monkeypatch.setattr(inspect(hook).profiler, "_prepare", broken_cuda)
    job.run(5)
    assert "exact" not in [r.source for r in sink.steps[4:]], "it failed"
    monkeypatch.undo()
    job.run(12)
    assert hook.is_alive
    assert [r.source for r in sink.steps[9:]].count("exact") >= 1


FORKING = """
import json, multiprocessing, os, sys, torch
from torch import nn
import pacecar
from tests.kit.hook_inspection import hook_of
folder = sys.argv[1]
torch.set_num_threads(1)

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((8,), float(index))

def run(steps):
    train([ones] * steps)

def train(batches):
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

def be_child(how):
    if how == "exit_inside":
        with pacer:
            sys.exit(7)
    if how == "train":
        run(6)
    elif how == "close":
        run(2)
        pacer.close()
    elif how == "attach":
        mine = pacecar.attach(model, optimizer, **settings)
        assert mine.is_active
        run(6)
        assert hook_of(mine).step == 6 and hook_of(mine).budget.windows
        mine.close()
    sys.exit(7)

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
ones = torch.ones(4, 8)
if __name__ == "__main__":
    settings = dict(tune="off", socket="/nowhere/socket", overhead_budget=1.0, window_interval_steps=1)
    pacer = pacecar.attach(model, optimizer, run_dir=folder, **settings)
    codes = {}
    for how in ("exit", "exit_inside", "train", "close", "attach"):
        for is_open in (True, False):  # with a window of the parent's under way and without
            while torch.autograd._profiler_enabled() != is_open:
                run(1)
            sys.stdout.flush()
            child = os.fork()
            if not child:
                be_child(how)
            run(4)
            codes[how, is_open] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    child = multiprocessing.get_context("fork").Process(target=run, args=(3,))
    child.start()
    run(4)
    child.join(60)
    codes["multiprocessing"] = child.exitcode
    for context, keeps in (("fork", False), ("fork", True), ("spawn", False)):
        workers = dict(num_workers=2, persistent_workers=keeps, multiprocessing_context=context)
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=8, **workers)
        for epoch in range(2):
            train(pacer.data(loader))
    run(4)
    steps = hook_of(pacer).step
    pacer.close("finished")
    print(json.dumps({"codes": [[str(key), code] for key, code in codes.items()], "steps": steps}))
"""


@pytest.mark.slow
def test_child_processes_end_as_they_would_and_the_parents_records_are_its_own(tmp_path):
    """A forked child's exit hung for ever once torch's profiler had run in the parent."""
    script = tmp_path / "job.py"
    script.write_text(FORKING)
    done = subprocess.run(
        [forking_python(), script, tmp_path], capture_output=True, text=True, timeout=200, check=False, env=TO_THE_END
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert dict(result["codes"]).pop("multiprocessing") == 0
    assert [code for key, code in result["codes"] if key != "multiprocessing"] == [7] * 10
    assert "Traceback" not in done.stderr
    lines = Path(tmp_path / "rank0.jsonl").read_bytes().splitlines()
    records = [msgspec.json.decode(line, type=JobRecord) for line in lines]
    stepped = [r for r in records if isinstance(r, StepRecord)]
    check(stepped)
    assert len(stepped) == result["steps"] >= 95
    assert sum(r.source == "exact" for r in stepped) >= 15
    assert records[-1].reason == "finished"
