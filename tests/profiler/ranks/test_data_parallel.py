"""DDP and FSDP2 are found wherever a module keeps them, without running code of what is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.profiler.ranks.data_parallel import (
    ENTRIES_MAX,
    find_ddp,
    find_fsdp,
    is_one_group,
    meets_inside,
    parallel_of,
    uncompiled,
    wrappers_in,
)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Task(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, attribute in attributes.items():
            setattr(self, name, attribute)


def compiled(module: nn.Module) -> nn.Module:
    """As torch.compile wraps a module."""
    return Task(_orig_mod=module)


class Proxy:
    """An object that answers whoever asks it for its class or attributes by raising."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("asked")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("asked")

    __getattribute__ = __getattr__


class FSDPModule:
    """What FSDP2 puts under a module's class."""


class Sharded(FSDPModule, nn.Sequential):
    def _get_fsdp_state(self) -> Any:
        dp = SimpleNamespace(size=lambda dim=None: 2, mesh_dim_names=("dp",))
        return SimpleNamespace(_fsdp_param_group=SimpleNamespace(mesh_info=SimpleNamespace(mesh=dp, shard_mesh_size=2)))


def test_ddp_is_found_at_the_top_inside_and_in_lists_dicts_and_objects() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    trainer = SimpleNamespace(inner=SimpleNamespace(model=ddp))
    holders = [ddp, compiled(ddp), Task(model=ddp), Task(inner=Task(model=ddp)), Task(parts=[0, {"a": ddp}])]
    holders += [Task(trainer=trainer), Task(data=[0] * 3, model=ddp)]
    vars(holders[-1])["proxy"] = Proxy()  # torch would ask it
    assert all(find_ddp(holder) is ddp for holder in holders)
    assert all(parallel_of(holder) == {"data": 1} for holder in holders)


def test_it_is_not_found_where_it_holds_the_model_itself_or_is_too_far_away_or_compiled_over() -> None:
    model = Task(linear=nn.Linear(2, 2))
    model.trainer = SimpleNamespace(wrapped=DistributedDataParallel(model))
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    far = Task(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(model=ddp))))
    data = Task(rows=[*range(ENTRIES_MAX), ddp])
    assert [find_ddp(holder) for holder in (model, far, data, compiled(Task(model=ddp)))] == [None] * 4
    assert parallel_of(model) == {}


def test_of_several_the_largest_is_found_and_what_is_inside_one_is_not_looked_at() -> None:
    small, large = DistributedDataParallel(nn.Linear(2, 2)), DistributedDataParallel(nn.Linear(8, 8))
    towers = Task(bottom=small, top=large)
    assert find_ddp(towers) is large
    assert wrappers_in(towers) == [small, large]


def test_fsdp2_is_found_by_its_outermost_module_and_its_mesh_says_over_how_many_ranks() -> None:
    whole = Sharded(Sharded(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert find_fsdp(Task(model=whole)) is whole
    assert find_fsdp(nn.Sequential(Sharded(nn.Linear(2, 2)), Sharded(nn.Linear(2, 2)))) is None
    assert parallel_of(Task(model=whole)) == {"data": 2}
    assert parallel_of(nn.Linear(2, 2)) == {}
    assert meets_inside(Task(model=whole))
    assert meets_inside(Task(trainer=SimpleNamespace(model=whole)))
    assert not meets_inside(DistributedDataParallel(nn.Linear(2, 2)))


def test_a_stage_of_a_pipeline_is_not_shared_by_all_ranks() -> None:
    ddp, stage = DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
    assert [is_one_group(model, 1) for model in (ddp, stage)] == [True, True]
    assert [is_one_group(model, 4) for model in (ddp, stage)] == [False, False]


class Items(list[Any]):
    """A list that answers in its own way."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("asked")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_torchscript_and_a_list_of_another_kind_can_be_looked_at() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert find_ddp(scripted) is None
    assert uncompiled(scripted) is scripted
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    assert find_ddp(Task(script=scripted, items=Items([ddp]))) is ddp
