"""Jobs of two ranks, each in a fork of this process, in which some module cannot be imported from some moment on.

    python job_unimportable_ranks.py CASES      CASES: a JSON list of [way, module, moment], as of job_unimportable.py

Writes a JSON list with, for each case, [exit code, losses, stderr] of each rank.  Each rank comes to the moment by
itself, and trains on for some steps.  A script in place of the policy tries one size of DDP's buckets after the other:
the order in which two ranks' gradients are summed is the same in all of them, so the losses are.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.job.job_unimportable import STARTUP, Moment, forked_jobs, goes, listening, remember_code

RANKS = 2
MOMENTS = ("window", "vote", "trial", "gathering", "closing", "exiting")
"""In an exact window; between a vote and its reading; while a trial's values are in force; in a gather of the crew."""

STEPS_MAX, STEPS_AFTER, ASK_STEPS = 400, 12, 4


class Trying:
    """A policy that tries the next values as soon as the last ones are in force, and proves none."""

    def __init__(self, turn: Any) -> None:
        self.make, self.turn, self.turns = turn, None, 0
        self.spaces: Any = ()

    def begin(self, facts: Any, spaces: Any, *, turns_knobs: bool) -> None:
        self.spaces = spaces

    def hold(self, reason: Any, *, is_brief: bool = False) -> None: ...

    def advance(self, observations: Any) -> tuple[Any, list[Any]]:
        if self.turn is None or observations[-1].values == self.turn.values:
            self.turns += 1
            values = {space.knob: space.domain[self.turns % len(space.domain)] for space in self.spaces}
            self.turn = self.make(self.turns, values, is_trial=True)
        return self.turn, []

    def is_calm(self) -> bool:
        return False

    def wants_window(self) -> bool:
        return True

    def finish(self, reason: str = "") -> list[Any]:
        return []


class RankJob:
    """One rank of a job; `module` goes at `moment`."""

    def __init__(self, way: str, module: str, moment: str, rank: int, store: str) -> None:
        self.way, self.module, self.moment, self.rank, self.store = way, module, moment, rank, store
        self.is_there = moment == "never"
        self.pacer: Any = None
        self.is_followed = False

    def at(self, moment: str) -> None:
        """Announce the moment, once or more often."""
        if moment == self.moment and not self.is_there:
            self.is_there = True
            goes(self.module)

    def run(self) -> list[str]:
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank), "WORLD_SIZE": str(RANKS)}
        dist.init_process_group(
            "gloo", init_method=f"file://{self.store}", rank=self.rank, world_size=RANKS, timeout=timedelta(seconds=60)
        )
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
        model = DistributedDataParallel(nn.Sequential(*layers, Moment(self.at)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        if self.way == "run":
            os.environ["PACECAR_RUN"] = "1"
            sys.path.insert(0, STARTUP)
            import pacecar_startup

            pacecar_startup.begin()
        elif self.way == "attach":
            import pacecar

            self.pacer = pacecar.attach(model, optimizer, tune="exact")
        losses = list(self.train(model, optimizer))
        self.at("closing")
        if self.pacer is not None and self.moment != "exiting":
            self.pacer.close()
        self.at("exiting")
        assert self.is_there, f"there was no moment {self.moment!r}"
        return losses

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
        draw = torch.Generator().manual_seed(self.rank)
        is_at_end = self.moment in ("closing", "exiting")
        left = STEPS_AFTER
        for step in range(STEPS_MAX):
            batch = torch.randn(8, 32, generator=draw)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield float(loss.detach()).hex()
            if self.way != "plain":
                self.look()
            left -= self.is_there or is_at_end
            if self.moment != "never" and step % ASK_STEPS == 0:
                most = torch.tensor(left)
                dist.all_reduce(most, dist.ReduceOp.MAX)
                if most <= 0:
                    return

    def look(self) -> None:
        """Follow the pacer as soon as it exists, and check what is under way at the end of a step."""
        if self.pacer is None:
            heard = getattr(sys.modules.get("pacecar.job.autoattach.optimizer_hook"), "_record_step", None)
            self.pacer = getattr(getattr(heard, "__self__", None), "_pacer", None)
        if self.pacer is None:
            return
        tuner, crew = self.pacer._tuner, self.pacer._run.rank_monitor
        if not self.is_followed:
            self.is_followed = True
            if self.rank == 0:
                from pacecar.controller.observation import Proposal

                tuner._policy = Trying(Proposal)
            post = crew._transport.post
            crew._transport.post = lambda words: (post(words), self.at("gathering"))
        if tuner.agreement._vote is not None:
            self.at("vote")
        if tuner._proven is not None:
            self.at("trial")


def job_of(case: list[str]) -> list[tuple[int, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [partial(RankJob(*case, rank, f"{folder}/store").run) for rank in range(RANKS)]
        return forked_jobs(ranks, str(case))


if __name__ == "__main__":
    torch.set_num_threads(1)
    remember_code()
    place = listening()
    os.environ |= {"PACECAR_TUNE_BUCKET_BYTES_MIN": "1024", "PACECAR_TUNE_MODE": "exact"}
    try:
        answers = [job_of(case) for case in json.loads(sys.argv[1])]
    finally:
        shutil.rmtree(place)
    sys.stdout.write(json.dumps(answers))
