"""A process group is destroyed under the hook, the crew and the tuner; the job goes on alone, and meets again."""

import pytest

from tests.kit.ranks import LATENESS_WORDS, finish, start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SCRIPT = """
import logging, os, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import pacecar
from tests.kit.hook_inspection import hook_of, inspect
rank, folder, tune = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="LOG %(name)s %(message)s")
torch.set_num_threads(1)

def meet(name):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)

meet("first")
torch.manual_seed(7)
net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
model = DistributedDataParallel(net, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
if tune != "none":
    pacer = pacecar.attach(
        model, optimizer, tune=tune, run_dir=folder, socket=folder + "/none", overhead_budget=1.0,
        window_interval_steps=8, bucket_bytes_min=4096, warmup_steps=4,
    )
draw = torch.Generator().manual_seed(rank)

def run(model, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 64, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        print(float(loss.detach()).hex())

run(model, 60)
dist.barrier()
dist.destroy_process_group()
begun = time.monotonic()
run(net, 40)
assert time.monotonic() - begun < 20.0
meet("second")
again = DistributedDataParallel(net)
run(again, 40)
if tune != "none":
    assert hook_of(pacer).step == 140, hook_of(pacer).step
    assert inspect(pacer).failures == 0
    begun = time.monotonic()
    pacer.close()
    assert time.monotonic() - begun < 20.0
dist.barrier()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def run(folder, tune):
    folder.mkdir()
    heard = finish(start_ranks(["-c", SCRIPT, folder, tune], 2))
    codes = [rank.code for rank in heard]
    assert codes == [0, 0], (codes, [rank.err[-2000:] for rank in heard])
    return [(rank.out, rank.err) for rank in heard]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return [output for output, _ in run(tmp_path_factory.mktemp("groups") / "none", "none")]


@pytest.mark.parametrize("tune", ["off", "advise", "exact"])
def test_a_group_destroyed_and_made_anew_costs_the_crew_and_the_tuner_and_not_the_job(tmp_path, plain, tune):
    heard = run(tmp_path / tune, tune)
    assert [output for output, _ in heard] == plain, "the same losses, to the last bit"
    for _, errors in heard:
        lines = [line for line in errors.splitlines() if line.startswith("LOG pacecar")]
        said = [line for line in lines if not any(words in line for words in LATENESS_WORDS)]
        assert errors.count("Traceback") <= 1, "the tuner's, once"
        assert len(said) == len(set(said)), "each thing is said once"
        assert len(said) <= 4, said
