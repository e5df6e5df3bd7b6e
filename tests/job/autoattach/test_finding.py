"""Which model belongs to an optimizer, and when have all ranks come?  Values in, values out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pacecar.job.autoattach.model_finder import ModelProbes, children_of, roots_of
from pacecar.job.autoattach.tuning_permission import LEAD_STEPS, STEPS_MAX, RankGathering
from pacecar.profiler.hook.optimizer_succession import parameters_of


def pair() -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)


@pytest.mark.slow
def test_the_root_is_the_module_that_no_other_holds() -> None:
    model, other = pair()
    parameters = parameters_of(torch.optim.SGD(model.parameters(), lr=0.1))
    assert roots_of(parameters) == [model]
    holder = nn.ModuleDict({"inner": model, "other": other})
    assert roots_of(parameters) == [holder]
    assert children_of([holder], parameters) == [model]
    assert roots_of(parameters_of(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))) == []


def test_of_what_is_called_the_outermost_with_most_parameters_comes_first_and_evaluation_does_not_count() -> None:
    model, other = pair()
    parameters = parameters_of(torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
    probes = ModelProbes([other, model[0], model])
    probes.install()
    with torch.no_grad():
        model(torch.ones(1, 2))
    model.eval()
    model(torch.ones(1, 2))
    model.train()
    assert probes.called(parameters) == []
    other(model(torch.ones(1, 2)))
    probes.remove()
    assert probes.called(parameters) == [model, other]
    assert not model._forward_pre_hooks
    assert not other._forward_pre_hooks


def gather(come_at: list[int], steps: int) -> list[tuple[int, bool | None]]:
    """Each rank's verdict and the iteration in which it had it; a rank's first step is in iteration `come_at`."""
    store = dist.HashStore()
    ranks = [RankGathering(store, rank, len(come_at), "mode-exact") for rank in range(len(come_at))]
    verdicts: list[tuple[int, bool | None]] = [(-1, None)] * len(come_at)
    for iteration in range(steps):
        for rank in reversed(range(len(come_at))):  # rank 0 comes last: the others must read it a step later
            if iteration >= come_at[rank] and verdicts[rank][1] is None:
                verdicts[rank] = (iteration, ranks[rank].step())
    return verdicts


def test_ranks_that_all_came_attach_in_the_same_iteration() -> None:
    (when, verdict), *others = gather([0, 0, 0], 20)
    assert verdict is True
    assert when == LEAD_STEPS
    assert others == [(when, verdict)] * 2


def test_if_one_never_comes_none_attaches_and_none_waits() -> None:
    verdicts = gather([0, 0, 10_000], STEPS_MAX + 20)
    assert [verdict for _, verdict in verdicts] == [False, False, None]


def test_without_rank_zero_the_others_go_on_too() -> None:
    assert [verdict for _, verdict in gather([10_000, 0, 0], STEPS_MAX + 20)] == [None, False, False]
