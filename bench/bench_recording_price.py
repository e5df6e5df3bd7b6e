"""Measures what recordings of steps cost relative to what they were allowed, in jobs whose steps change meanwhile.

One process trains a small model with the shipped hook.  Recordings are offered and ordered as rank 0 orders
cross-rank windows, and between the count of rows and the end of the recording, steps get more operators: the worst for
a price that was predicted from rows.  Costs are processor time, so that other programs count as little as they can.

    python -m bench.bench_recording_price
    python -m bench.bench_recording_price --budgets 0.01 --operators 50
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pacecar.clock import SystemClock
from pacecar.config import HookConfig
from pacecar.profiler.hangs.account_road import Question, WindowState
from pacecar.profiler.hook.hook import Hook, StepListener
from pacecar.profiler.ranks.cross_rank.cross_rank_window import AHEAD_STEPS, WINDOW_STEPS, WindowRank
from pacecar.profiler.ranks.cross_rank.row_watch import SLOWED_ROW_NS
from pacecar.profiler.windows.kineto_window import WindowProfiler
from tests.kit.records import job_hello

SECOND_NS = 10**9
OFFER_STEPS, OFFERS_MAX = 10, 400
"""Steps between two offers, and the offers after which a recording is given up."""

CHANGES = ("none", "doubled", "tenfold", "one_step", "no_grad", "outside")
"""What happens after the count: nothing; from the first recorded step on, twice or ten times the operators; ten times
in one step; ten times without gradients; ten times between the steps' phases."""


class Paid(NamedTuple):
    """A recording, in seconds: predicted, allowed at its beginning, and paid."""

    predicted: float
    allowed: float
    paid: float
    rows: int
    steps: int
    refusal: str | None


class Model(nn.Module):
    """A linear layer with `operators` small operators before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.operators, self.has_grad = 500, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.set_grad_enabled(self.has_grad):
            z = y if self.has_grad else y.detach()
            for _ in range(self.operators):
                z = z + 1.0
        return y + z.mean()


class Listener(StepListener):
    """Calls the recorder at boundaries."""

    def __init__(self) -> None:
        self.rank: WindowRank | None = None

    def on_boundary(self, step: object) -> None:
        if self.rank is not None:
            self.rank.recorder.boundary()

    def wants_boundary(self) -> bool:
        return self.rank is not None and self.rank.recorder.is_pending


class Job:
    """A training loop with one rank's part of cross-rank windows; times what ends its sessions."""

    def __init__(self, budget: float, batch: int) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        hello = job_hello(1, 2)
        self.listener = Listener()
        self.hook = Hook(self.model, self.optimizer, hello=hello, config=HookConfig(overhead_budget=budget))
        self.rank = WindowRank(hello, self.hook, SystemClock(), on_device=False)
        self.listener.rank = self.rank
        self.x = torch.randn(batch, 256)
        self.ended: list[tuple[int, int]] = []
        self.worst_ns = -SECOND_NS
        self.outside = 0
        self._time_sessions()
        self.hook.start(self.listener)

    def _time_sessions(self) -> None:
        close = WindowProfiler.close

        def timed(profiler: WindowProfiler, path: str | None = None) -> Any:
            begun_ns = time.thread_time_ns()
            found = close(profiler, path)
            self.ended.append((len(found[0]), time.thread_time_ns() - begun_ns))
            return found

        WindowProfiler.close = timed  # type: ignore[method-assign]

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        z = torch.zeros(4)
        for _ in range(self.outside):
            z.mul_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        budget = self.hook.budget
        allowed_ns = budget.ratio_max * budget.wall_ns + budget.start_ns + 0.2 * SECOND_NS
        self.worst_ns = max(self.worst_ns, round(budget.cost_ns - allowed_ns))

    def ask(self, what: Any, first_step: int, steps: int = WINDOW_STEPS) -> WindowState:
        return self.rank.answer(Question(what=what, first_step=first_step, steps=steps))

    def record(self, change: str, usual: int, chance: random.Random) -> Paid | None:
        """Return what a recording cost with `change` after the count; None: it was never affordable."""
        model = self.model
        model.operators, model.has_grad, self.outside = usual, True, 0
        for _ in range(5):
            self.step()
        since = self.hook.step
        for _ in range(OFFERS_MAX):
            answer = self.ask("window_offer", since)
            if answer.steps:
                break
            for _ in range(OFFER_STEPS):
                self.step()
        else:
            return None
        first = self.hook.step + AHEAD_STEPS
        refused = self.ask("window_order", first, answer.steps).refusal
        assert refused is None, refused
        at = first + chance.randrange(answer.steps)
        was_traced = False
        allowed_ns, before = 0, len(self.ended)
        while self.rank.recorder.is_pending:
            if self.hook.step >= first:
                is_on = change != "none" and (change != "one_step" or self.hook.step == at)
                more = usual * {"doubled": 1}.get(change, 9) * is_on
                model.operators, model.has_grad, self.outside = usual, change != "no_grad", 0
                if change == "outside":
                    self.outside = more
                else:
                    model.operators += more
            self.step()
            if self.hook.is_traced and not was_traced:
                was_traced, allowed_ns = True, self.rank.recorder._allowed_ns
        model.has_grad, self.outside = True, 0
        result = self.rank.recorder.result
        assert result is not None, "ended"
        ended = self.ended[before:]
        rows = sum(rows for rows, _ in ended)
        paid_ns = sum(ns for _, ns in ended) + SLOWED_ROW_NS * rows
        predicted_ns = self.rank._predicted_ns
        self.rank.close()
        return Paid(predicted_ns / 1e9, allowed_ns / 1e9, paid_ns / 1e9, rows, result.steps, result.refusal)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.05, 0.2])
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--recordings", type=int, default=5, help="of each budget and change")
    parser.add_argument("--operators", nargs="+", type=int, default=[50, 200, 1000], help="of the forward")
    parser.add_argument("--batch", type=int, default=512, help="samples of a step, which make it long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="show each recording")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    chance = random.Random(args.seed)
    sys.stdout.write("budget change    judged cut never | paid/predicted  worst s over allowed | over the bound, s\n")
    for budget in args.budgets:
        for change in args.changes:
            job = Job(budget, args.batch)
            try:
                tries = [job.record(change, chance.choice(args.operators), chance) for _ in range(args.recordings)]
            finally:
                job.hook.close()
            found = [each for each in tries if each is not None]
            if args.verbose:
                sys.stdout.writelines(f"{each}\n" for each in found)
            judged = [each for each in found if each.refusal is None]
            ratios = [each.paid / each.predicted for each in found]
            over = max((each.paid - each.allowed for each in found), default=0.0)
            sys.stdout.write(
                f"{budget:6g} {change:9s} {len(judged):6d} {len(found) - len(judged):3d} {len(tries) - len(found):5d} |"
                f" {min(ratios, default=0):.2f} to {max(ratios, default=0):.2f}  {over:+20.3f} |"
                f" {job.worst_ns / 1e9:+.3f}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
