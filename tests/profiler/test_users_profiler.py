"""The user's own torch.profiler in a real DDP job keeps every event that it has without pacecar, and exports them."""

import json
from collections import Counter

import pytest

from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SCRIPT = """
import json, os, sys, time, warnings, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
import pacecar
from tests.kit.hook_inspection import hook_of, inspect
rank, folder, how, hooked = int(os.environ["RANK"]), sys.argv[1], sys.argv[2], sys.argv[3] == "hooked"
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "Profiler clears events")  # torch says so of every schedule
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(7)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), bucket_cap_mb=0.01)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if hooked:
    settings = dict(tune="off", overhead_budget=1.0, window_interval_steps=1, socket=folder + "/none")
    pacer = pacecar.attach(model, optimizer, run_dir=folder, **settings)
x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))

def step():
    optimizer.zero_grad()
    (model(x) - 0.5).square().mean().backward()
    optimizer.step()

def collect(prof):
    found.append([event.name for event in prof.events()])
    path = f"{folder}/trace-{rank}-{len(found)}.json"
    prof.export_chrome_trace(path)
    with open(path) as stream:
        assert len(json.load(stream)["traceEvents"]) > len(found[-1]) / 2

found = []
for _ in range(9):  # rank 0's second turn for a window follows
    step()
has_window = hooked and torch.autograd._profiler_enabled()
if how == "in_window":
    # Half a step, inside a window of pacecar's where there is one.
    optimizer.zero_grad()
    loss = (model(x) - 0.5).square().mean()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        loss.backward()
        optimizer.step()
        for _ in range(3):
            step()
    collect(prof)
else:
    plan = schedule(wait=1, warmup=1, active=3, repeat=1) if how == "scheduled" else None
    handler = collect if plan else None
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=handler) as prof:
        for _ in range(9):
            step()
            if plan:
                time.sleep(0.02)  # gloo's rows end on its own threads; torch crashes on one that ends after the session
                prof.step()
        time.sleep(0.02)  # the same at the end of a profile that has no schedule
    if not plan:
        collect(prof)
for _ in range(13):  # two turns of each rank
    step()
windows = 0
if hooked:
    assert pacer.is_active and inspect(pacer).failures == 0
    windows = hook_of(pacer).budget.windows
    pacer.close()
with open(f"{folder}/{rank}.json", "w") as stream:
    json.dump({"found": found, "has_window": has_window, "windows": windows}, stream)
dist.barrier()
os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)
"""


def run(folder, how, mode):
    folder.mkdir()
    run_ranks(["-c", SCRIPT, folder, how, mode])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("how", ["plain", "scheduled", "in_window"])
def test_names_and_numbers_of_the_users_events_are_the_same_beside_pacecars_windows(tmp_path, how):
    plain = run(tmp_path / "plain", how, "plain")
    hooked = run(tmp_path / "hooked", how, "hooked")
    assert any(rank["has_window"] for rank in hooked), "a window was open when the user's profiler began"
    for rank in range(2):
        assert hooked[rank]["windows"] >= 1
        assert len(plain[rank]["found"]) == len(hooked[rank]["found"]) == 1
        for mine, theirs in zip(hooked[rank]["found"], plain[rank]["found"], strict=True):
            assert Counter(mine) == Counter(theirs)
            assert len(theirs) > 100
            assert any(name.startswith("gloo:") for name in theirs)
