"""Real gloo jobs of several ranks: the rank that is slowed is named with its cause, and nobody else ever is.

The jobs go on until what they wait for has been said; how soon it is said has a test that needs a quiet machine, and is
a matter of counting ranges in `test_straggler_detector.py`.
"""

from __future__ import annotations

import os

import pytest

from pacecar.profiler.ranks.straggler_detector import ABSOLUTE_NS
from tests.kit.ranks import run_ranks
from tests.kit.shaping import UNLIMITED, shaped
from tests.profiler.ranks.job_rank_monitor import AHEAD, SLOW_SECONDS
from tests.profiler.ranks.ranks import lateness_ns, named, played, run_job, stragglers

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS_MAX = 20
"""From the onset until the finding is out, on a machine that has nothing else to do."""

RUNS_MAX = 3
"""Where other programs take the processors, steps differ as much as a slow rank makes them, and nobody may be named
before there is more evidence.  Then the job is run anew; nobody innocent may be named in any run."""

AMPLE = 0.05
"""An overhead budget under which every step is measured and told of though the machine is busy with something else."""


def check_names(heard):
    """Whoever is named either plays that, or is late by the job's own clock: other programs slow a rank, too.

    The step since when is not judged here: a rank that other programs made late just before its act is late since then.
    """
    for row in named(heard):
        playing = [act for act in heard[0][-1]["acts"] if act["from"] is not None and act["from"] <= row["heard_at"]]
        is_guilty = any(act["rank"] == row["late_rank"] and act["from"] <= row["step"] for act in playing)
        assert is_guilty or lateness_ns(heard, row) > ABSOLUTE_NS, row


def check_findings(heard):
    """Each act was named with its cause while it lasted, and taken back when it was over; a repeated one at last."""
    check_names(heard)
    found = iter(stragglers(heard))
    for act, (rank, cause) in zip(heard[0][-1]["acts"], played(heard), strict=True):
        mine = (row for row in found if row["late_rank"] == rank and row["heard_at"] >= act["from"])
        began = next((row for row in mine if not row["ended"]), None)
        assert began is not None, (act, stragglers(heard))
        assert act["from"] <= began["step"] < began["heard_at"] <= act["until"]
        ended = next((row for row in found if row["late_rank"] == rank and row["ended"]), None)
        assert ended is not None, (act, stragglers(heard))
        assert ended["step"] > act["until"] - AHEAD
        if began["cause"] == cause:
            yield began


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A rank is slow in its forward, then another is late with its data, then one collects garbage in every step."""
    acts = [{"rank": 2, "how": "compute"}, {"rank": 1, "how": "data"}, {"rank": 3, "how": "gc"}]
    return run_job(tmp_path_factory.mktemp("four") / "run", acts, overhead_budget=AMPLE)


def test_ranks_late_in_compute_with_data_and_for_garbage_are_named_with_their_cause_and_taken_back(four):
    found = list(check_findings(four))
    assert [(row["late_rank"], row["cause"], row["phase"]) for row in found] == [
        (2, "compute", "forward"),
        (1, "data_wait", "data_wait"),
        (3, "gc", "forward"),
    ]
    for row in found:
        slow_ns = SLOW_SECONDS["compute"] * 1e9
        assert row["excess_ns"] > slow_ns / 2
        assert lateness_ns(four, row) > slow_ns / 2
    assert all(row["type"] == "summary" for rank in four[1:] for row in rank), "only rank 0 speaks of others"


def test_the_jobs_ledger_is_of_all_ranks_and_adds_up(four):
    ledgers = [row for row in four[0] if row["type"] == "job_ledger"]
    assert len(ledgers) > 1
    for ledger in ledgers:
        assert ledger["ranks"] == 4
        assert sum(ledger["total_phases_ns"].values()) == ledger["total_wall_ns"]
        assert 0 < ledger["median_ns"] <= ledger["pace_ns"]
    assert ledgers[-1]["total_measured_steps"] > 4 * 0.5 * ledgers[-1]["step"]
    assert all(rank[-1]["off"] is None and rank[-1]["is_alive"] for rank in four)


@pytest.mark.full
def test_where_ranks_meet_in_their_forward_late_data_is_named_and_for_slow_compute_there_nobody_else(tmp_path):
    """What a rank computes before they meet is the others' wait in the same phase: host timers cannot tell whose."""
    acts = [{"rank": 1, "how": "data"}, {"rank": 2, "how": "compute", "steps": 24}]
    heard = run_job(tmp_path, acts, meets=True, overhead_budget=AMPLE)
    check_names(heard)
    assert all("forward" in rank[-1]["meets_in"] for rank in heard), "windows saw it"
    assert (1, "data_wait") in [(row["late_rank"], row["cause"]) for row in named(heard)]
    assert all(row["cause"] == "compute" for row in named(heard) if row["late_rank"] == 2)


@pytest.mark.full
def test_rank_0_speaks_for_the_ranks_of_all_subgroups(tmp_path):
    heard = run_job(tmp_path, [{"rank": 3, "how": "compute"}], compared=2, overhead_budget=AMPLE)
    assert [(row["late_rank"], row["cause"]) for row in check_findings(heard)] == [(3, "compute")]
    assert all(row["type"] == "summary" for rank in heard[1:] for row in rank), "leaders say nothing themselves"
    ledgers = [row for row in heard[0] if row["type"] == "job_ledger"]
    assert {ledger["ranks"] for ledger in ledgers} == {4}
    assert all(sum(ledger["total_phases_ns"].values()) == ledger["total_wall_ns"] for ledger in ledgers)
    assert 0 < ledgers[-1]["total_measured_steps"] <= 4 * ledgers[-1]["total_steps"]
    assert all(rank[-1]["off"] is None for rank in heard)


@pytest.mark.full
def test_ranks_that_measure_every_so_many_steps_are_compared_all_the_same(tmp_path):
    heard = run_job(tmp_path, world=2, told_steps=500, pause=0.0, overhead_budget=0.01, windows=False)
    assert [(rank[-1]["off"], rank[-1]["is_alive"]) for rank in heard] == [(None, True)] * 2
    ledger = [row for row in heard[0] if row["type"] == "job_ledger"][-1]
    assert ledger["total_measured_steps"] < ledger["total_steps"], "of two ranks"
    assert ledger["step"] >= 500
    check_names(heard)


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces and traffic shaping need root")
def test_the_rank_behind_a_shaped_link_is_named(tmp_path):
    try:
        with shaped(4, UNLIMITED) as net:
            heard = run_job(tmp_path, [{"rank": 2, "how": "link"}], prefixes=net.prefixes, overhead_budget=AMPLE)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert (2, "link") in [(row["late_rank"], row["cause"]) for row in named(heard)]
    check_names(heard)


# --- how soon, and how seldom wrongly: on a machine that has nothing else to do -----------------


def in_time(heard):
    """Return whether each act's rank was named with its cause within STEPS_MAX."""
    acts = [(*of, act["from"]) for of, act in zip(played(heard), heard[0][-1]["acts"], strict=True)]
    found = [(row["late_rank"], row["cause"], row["heard_at"]) for row in named(heard)]
    return [one[:2] for one in found] == [one[:2] for one in acts] and all(
        0 <= at - onset <= STEPS_MAX for (*_, at), (*_, onset) in zip(found, acts, strict=True)
    )


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("how", ["compute and data", "link"])
def test_a_slow_rank_is_named_within_twenty_steps(tmp_path, how):
    for run in range(RUNS_MAX):
        if how == "link":
            acts = [{"rank": 2, "how": "link", "from": 61, "until": 90}]
            with shaped(4, UNLIMITED) as net:
                heard = run_job(tmp_path / str(run), acts, prefixes=net.prefixes, steps=92, overhead_budget=AMPLE)
        else:
            acts = [
                {"rank": 2, "how": "compute", "from": 62, "until": 92},
                {"rank": 1, "how": "data", "from": 193, "until": 225},
            ]
            heard = run_job(tmp_path / str(run), acts, steps=290, overhead_budget=AMPLE)
        assert {(row["late_rank"], row["cause"]) for row in named(heard)} <= set(played(heard))
        if in_time(heard):
            break
    assert in_time(heard), stragglers(heard)
    since = [(row["since_step"], act["from"]) for row, act in zip(named(heard), acts, strict=True)]
    assert all(abs(found - begun) <= 4 for found, begun in since), since


@pytest.mark.full
@pytest.mark.alone
def test_nobody_is_named_in_five_hundred_steps_in_which_nobody_is_slow(tmp_path):
    heard = run_job(tmp_path, steps=500, pause=0.008)
    assert stragglers(heard) == []
    assert all(rank[-1]["off"] is None for rank in heard)


# --- ranks that do not attach as the others do --------------------------------------------------


SCRIPT = """
import logging, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from pacecar.config import HookConfig
from pacecar.profiler.ranks.rank_monitor import RankMonitor
from pacecar.profiler.hook.hook import Hook, make_hello
from tests.kit.listeners import HeardSteps
logging.basicConfig(stream=sys.stdout, format="%(message)s")
rank, attaches, destroys_first = int(os.environ["RANK"]), True, False
config = HookConfig(windows=False)
{change}
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hook = Hook(model, optimizer, hello=make_hello(model, environ={{}}, job="two"), config=config)
crew = RankMonitor(make_hello(model, environ={{}}, job="two"), config, hook, emit=lambda record: None)
if attaches:
    hook.start(HeardSteps(on_timed=crew.note))
    crew.start()
longest, begun = 0.0, time.monotonic()
for step in range(60):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    longest, begun = max(longest, time.monotonic() - begun), time.monotonic()
assert longest < 15.0, "the meeting's 30 s are not waited for"
if destroys_first:
    dist.destroy_process_group()
    for step in range(40):
        optimizer.zero_grad()
        model.module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.02 * rank)
begun = time.monotonic()
crew.close()
assert time.monotonic() - begun < 15.0, "nor at the end"
hook.close()
if dist.is_initialized():
    dist.destroy_process_group()
print("finished", flush=True)
os._exit(0)  # torch aborts at exit now and then (pytorch issue 190489)
"""


def run_two(change):
    return run_ranks(["-c", SCRIPT.format(change=change)])


def test_ranks_with_other_settings_train_on_without_a_crew_and_say_so():
    for output in run_two("config = HookConfig(windows=False, crew_period_steps=4 + rank)"):
        assert "finished" in output
        assert "period" in output


def test_a_rank_that_does_not_attach_costs_the_others_nothing_but_the_crew():
    assert all("finished" in output for output in run_two("attaches = rank == 0"))


def test_a_job_that_destroys_its_process_groups_under_the_crew_ends_clean():
    assert all(output.strip().endswith("finished") for output in run_two("destroys_first = True"))
