"""What the adapter for Ray Train adds to a plain loop, with a stand-in for Ray; test_ray starts Ray's own workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import settings, stand_ins

from tests.kit.ranks import run_ranks

LOOP = """
import json, sys
import torch
from torch import nn
from pacecar.adapters import shared_attach
from pacecar.adapters.ray import attach

options = json.loads(sys.argv[1])
if options.pop("untested", False):
    shared_attach.TESTED["ray"] = ((1, 1), (1, 2))
said, given = {}, {}
theirs = shared_attach.attach
def seen(model, optimizer, *, tune, **more):
    given.update(tune=tune, job=more.get("job"), model=model is net, optimizer=optimizer is inner)
    return theirs(model, optimizer, tune=tune, **more)
shared_attach.attach = seen
torch.manual_seed(0)
net = nn.Linear(8, 1)
inner = torch.optim.SGD(net.parameters(), lr=0.1)
try:
    with attach(net, inner, socket="/nonexistent/s", windows=False, crew=False, **options) as pacer:
        for x in pacer.data([torch.ones(4, 8) * n for n in range(1, 6)]):
            net(x).square().mean().backward()
            inner.step()
            inner.zero_grad()
        said = {"is_active": pacer.is_active}
    said["is_over"] = not pacer.is_active
except Exception as error:
    said = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(said | given | {"weights": net.weight.flatten().tolist()}))
"""


def train(options: Mapping[str, Any] = {}, run: str | None = "sums") -> dict[str, Any]:
    (said,) = run_ranks(
        ["-c", LOOP, json.dumps(dict(options))], 1,
        environ={**settings(), "PYTHONPATH": stand_ins(), "RAY_EXPERIMENT": run, "WORLD_SIZE": None, "RANK": None},
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


@pytest.mark.slow
@pytest.mark.distributed
def test_a_worker_is_measured_under_the_name_of_rays_run_and_the_loop_is_untouched() -> None:
    measured = train({"tune": "off"})
    assert (measured["job"], measured["tune"]) == ("sums", "off")
    assert measured["model"]
    assert measured["optimizer"]
    assert measured["is_active"]
    assert measured["is_over"]
    mine = train({"tune": "exact", "job": "mine"})
    assert (mine["job"], mine["tune"]) == ("mine", "exact")
    assert mine["weights"] == measured["weights"]


@pytest.mark.slow
@pytest.mark.distributed
def test_an_untested_version_is_measured_and_not_tuned() -> None:
    untested = train({"tune": "exact", "untested": True})
    assert untested["tune"] == "off"
    assert untested["is_active"]


@pytest.mark.slow
@pytest.mark.distributed
def test_outside_of_a_worker_and_with_a_wrong_option_it_is_an_error() -> None:
    assert "outside of a Ray Train training function" in train(run=None)["error"]
    assert train({"bucket_size": 1})["error"].startswith("TypeError: attach() has no option 'bucket_size'")
    assert train({"tune": "fast"})["error"].startswith("ConfigError")
