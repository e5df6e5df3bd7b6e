"""FSDP2's knobs move gathers in time and nothing else; what cannot be turned is refused with the reason."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pacecar.config import TuneConfig
from pacecar.controller.knobs import fsdp2, memory_limit
from pacecar.controller.knobs.actuator import ActuatorError, Objection
from pacecar.controller.knobs.fsdp2 import fsdp_knobs
from pacecar.controller.observation import ShardedBytes
from pacecar.kernel_files.reader import KernelFiles

JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates": {"micro": 3},
    "keeps its parameters": {"keeps": True},
    "evaluates between steps": {"evaluates": True},
    "evaluates before the step": {"amid": True},
    "evaluates other weights": {"swaps": True},
}


@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_and_weights_are_equal_to_the_last_bit_whatever_is_turned_and_everything_can_be_undone(
    run_ranks: Any,
) -> None:
    *turned, tuned = run_ranks("job_fsdp.py", 2, [*JOBS.values(), {"tuned": 200}])
    jobs = dict(zip(JOBS, turned, strict=True))
    assert [name for name, ranks in jobs.items() if not all(rank["is_equal"] for rank in ranks)] == []
    assert [name for name, ranks in jobs.items() if not all(rank["is_undone"] for rank in ranks)] == []
    for name, ranks in jobs.items():
        prefetch, reshard = ranks[0]["refused"]
        assert prefetch is None
        # Where the root is gathered when the tuner asks, it is left alone; who evaluates so later must be safe too.
        assert reshard is None or (name == "evaluates before the step" and "stay gathered" in reshard)
        assert ranks[0]["domains"] == [[0, 1, 2, 3, 4], [0, 1, 3, 4, 5]]
        assert ranks[0]["values"] == [0, 0 if name == "keeps its parameters" else 5]
        assert ranks[0]["layouts"] == ranks[1]["layouts"]
        block = (32 * 32 + 32) * 4
        assert [rank["held_bytes"] for rank in ranks] == [[[n, (5 - n) * block] for n in (0, 1, 3, 4, 5)]] * 2
    assert [rank["refused"] for rank in tuned] == [{}, {}]
    assert all(rank["is_equal"] for rank in tuned)
    assert tuned[0]["values"] == tuned[1]["values"]
    assert len({str(values) for values in tuned[0]["values"] if values}) > 1, "the tuner has tried one"


@pytest.mark.slow
@pytest.mark.distributed
def test_all_ranks_go_back_where_one_runs_short_of_memory(run_ranks: Any) -> None:
    (ranks,) = run_ranks("job_fsdp.py", 2, [{"shrinks": 300}])
    assert [rank["is_equal"] for rank in ranks] == [True, True]
    assert ranks[0]["values"] == ranks[1]["values"], "all switch at the same steps"
    turned = [at for at, _ in itertools.groupby(ranks[0]["values"])]
    assert turned[-3:] == [5, 0, 5], "back, for good; FSDP2's root is not counted"
    reason = "taken back: on rank 1 memory became short while blocks keep their parameters"
    assert [rank["verdicts"] for rank in ranks] == [[reason], []]
    assert ranks[1]["said"] == [
        "pacecar: fsdp_reshard goes back: memory became short while blocks keep their parameters"
    ]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.alone
def test_blocks_that_keep_their_parameters_save_a_gather_each_for_the_memory_that_was_estimated(run_ranks: Any) -> None:
    kept, tuned = run_ranks("job_fsdp_gain.py", 2, [{"pairs": 4, "block_steps": 15}, {"steps": 150}])
    for rank in kept:
        assert (rank["refused"], rank["is_equal"], rank["beside_estimate"]) == (None, True, [0])
        assert rank["estimate"] == 8 * (1024 + 1) * 1024 * 4
        without, with_it = rank["seconds"]["A"], rank["seconds"]["B"]
        print([1 - b / a for a, b in zip(without, with_it, strict=True)])  # noqa: T201  the figure, with pytest -s
        assert fmean(with_it) < 0.95 * fmean(without)
    assert [rank["is_equal"] for rank in tuned] == [True, True]
    assert tuned[0]["values"] == tuned[1]["values"]
    (first, *_) = tuned[0]["decisions"]
    assert first[:2] == [8, 0], "the best forecast is tried first"
    assert 0.05 < first[2] < 0.5
    assert "8 gathers fewer in each backward" in first[4]


class FSDPModule:
    """What FSDP2 puts under a module's class, with its setters."""

    reshards = True

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        self.forward_prefetch = modules

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        self.backward_prefetch = modules

    def set_reshard_after_forward(self, reshards: bool, recurse: bool = True) -> None:
        assert not recurse
        self.reshards = reshards

    def _get_fsdp_state(self) -> Any:
        mesh = object() if self.reshards else None
        group = SimpleNamespace(
            _reshard_after_forward=self.reshards, post_forward_mesh_info=mesh, mesh_info=mesh, is_unsharded=False
        )
        return SimpleNamespace(_fsdp_param_group=group, _states_to_forward_prefetch=[], _states_to_backward_prefetch=[])


class Block(FSDPModule, nn.Linear):
    pass


class Root(FSDPModule, nn.Sequential):
    reshards = False


def knobs_of(net: nn.Module, config: TuneConfig) -> list[Any]:
    return fsdp_knobs(net, config)


def model(blocks: int = 3) -> Root:
    return Root(*[Block(4, 4) for _ in range(blocks)])


def test_blocks_are_gathered_ahead_in_forward_and_behind_in_backward() -> None:
    net = model(4)
    prefetch, _ = knobs_of(net, TuneConfig())
    prefetch.apply(2)
    blocks = list(net)
    assert [blocks.index(m) for m in blocks[0].forward_prefetch] == [1, 2]
    assert [blocks.index(m) for m in blocks[3].backward_prefetch] == [2, 1]
    assert blocks[3].forward_prefetch == blocks[0].backward_prefetch == []
    prefetch.apply(0)
    assert all(m.forward_prefetch == m.backward_prefetch == [] for m in blocks)
    with pytest.raises(ActuatorError):
        prefetch.apply(9)


def test_blocks_that_a_list_hides_from_the_model_are_found() -> None:
    holder = nn.Module()
    holder.nets = [model()]
    assert [knob.knob for knob in fsdp_knobs(holder, TuneConfig())] == [
        "fsdp_prefetch",
        "fsdp_reshard",
    ]


def test_what_the_script_set_for_each_module_comes_back() -> None:
    net = model()
    _, reshard = knobs_of(net, TuneConfig())
    assert reshard.value() == 3
    reshard.apply(0)
    assert [m.reshards for m in (net, *net)] == [False, False, False, False]
    reshard.apply(2)  # the last one keeps its parameters: backward needs them first
    assert [m.reshards for m in (net, *net)] == [False, True, True, False]
    reshard.apply(3)
    assert [m.reshards for m in (net, *net)] == [False, True, True, True]
    for wrong in (-1, 4):
        with pytest.raises(ActuatorError, match=f"fsdp_reshard {wrong} is not 0 to 3"):
            reshard.apply(wrong)
    assert reshard.value() == 3


def test_a_setter_that_raises_leaves_the_setting_before_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    prefetch, _ = knobs_of(net, TuneConfig())
    prefetch.apply(1)
    plain = FSDPModule.set_modules_to_backward_prefetch

    def breaks(self: FSDPModule, modules: list[Any]) -> None:
        if len(modules) > 1:
            raise ValueError("planted")
        plain(self, modules)

    monkeypatch.setattr(FSDPModule, "set_modules_to_backward_prefetch", breaks)
    with pytest.raises(ActuatorError, match="planted"):
        prefetch.apply(2)
    assert prefetch.value() == 1
    assert [len(m.forward_prefetch) for m in net] == [1, 1, 0]


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_more_memory_than_the_device_has_is_not_offered(monkeypatch: pytest.MonkeyPatch, is_offloaded: bool) -> None:
    net = model()
    parameter = SimpleNamespace(
        device=torch.device("cpu") if is_offloaded else SimpleNamespace(type="cuda", index=0),
        device_mesh=SimpleNamespace(device_type="cuda"),
        numel=int,
        element_size=int,
    )
    free = 1000
    monkeypatch.setattr(fsdp2.torch.cuda, "max_memory_allocated", lambda device: 800)
    monkeypatch.setattr(fsdp2.torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(fsdp2.torch.cuda, "mem_get_info", lambda device: (free, 1000))
    prefetch, reshard = knobs_of(net, TuneConfig())
    # A block is 80 bytes: one more ahead would fit (880), two would not (960), all three neither (1040).
    monkeypatch.setattr(net, "parameters", lambda: iter([parameter]))
    assert prefetch.domain() == (0, 1, 2)
    assert reshard.domain() == (2, 3)  # in each quarter's place the nearest number of three blocks
    assert reshard.refusal() is None
    assert [reshard.is_barred(value) for value in (3, 2, 1, 0)] == [False, False, True, True]
    free = 850  # another process takes some, and half of it again
    assert reshard.objection() is None
    reshard.apply(2)
    assert reshard.objection() is None
    free = 840
    assert reshard.objection() is Objection.ROOM
    free = 1000
    assert reshard.objection() is Objection.ROOM, "until it is back"
    assert reshard.is_barred(1)
    reshard.apply(3)
    assert reshard.objection() is None
    assert reshard.is_barred(2), "for good"
    reshard = knobs_of(net, TuneConfig())[1]
    reshard.apply(2)
    monkeypatch.setattr(fsdp2.torch.cuda, "max_memory_allocated", lambda device: 880)
    assert [reshard.is_barred(value) for value in (3, 2, 1, 0)] == [False, False, True, True]
    reshard.apply(3)
    assert reshard.domain() == (3,)
    assert "96%" in str(reshard.refusal())


def test_a_peak_that_the_script_has_just_reset_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    device, peak = torch.device("cuda", 0), 700
    for name, value in (("memory_allocated", 300), ("memory_reserved", 850), ("mem_get_info", (150, 1000))):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    assert memory_limit.beyond_memory(device, 100, "blocks") is None
    peak = 300
    assert memory_limit.beyond_memory(device, 100, "blocks") == "blocks would bring the device's memory to 95%"
    assert not memory_limit.is_short(device), "what the allocator holds is not in use"


@pytest.mark.parametrize(("available_kib", "domain"), [(1000, (0, 1, 2, 3)), (200, (2, 3)), (0, (3,))])
def test_on_cpus_the_host_must_have_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, available_kib: int, domain: tuple[int, ...]
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 1000 kB\nMemAvailable: {available_kib} kB\n")
    monkeypatch.setattr(memory_limit, "KernelFiles", lambda: KernelFiles(proc=tmp_path))
    net = Root(*[Block(150, 150) for _ in range(3)])  # 88 KiB each
    reshard = knobs_of(net, TuneConfig())[1]
    assert reshard.domain() == domain
    if domain == (3,):
        assert "host's memory to 109%" in str(reshard.refusal())


def test_modules_that_are_gathered_as_one_count_once_and_inner_ones_on_their_own() -> None:
    net = Root(*[Block(4, 4) for _ in range(3)])
    net[0].inner = Block(2, 2)
    state = net[1]._get_fsdp_state()
    net[1]._get_fsdp_state = net[2]._get_fsdp_state = lambda: state
    reshard = knobs_of(net, TuneConfig())[1]
    assert reshard._shards.modules == [net, net[0], net[0].inner, net[1]]
    assert reshard.gathers() == ShardedBytes(freeable_bytes=(80, 24, 160), other_bytes=(0,), on_host=True)
    assert reshard.value() == 3


def test_a_model_that_is_sharded_as_one_is_refused() -> None:
    assert "one FSDP2 module" in str(knobs_of(Block(4, 4), TuneConfig())[1].refusal())


class FullyShardedDataParallel(nn.Sequential):
    """As FSDP1's class is called."""


class OldBlock(nn.Linear):
    pass


OldFSDPModule = type("FSDPModule", (), {})


class Old(OldFSDPModule, nn.Linear):  # type: ignore[misc, valid-type]  # FSDP2 of a torch without the setters
    pass


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (FullyShardedDataParallel(nn.Linear(2, 2)), "FSDP1 fixes"),
        (Old(2, 2), f"torch {torch.__version__}: FSDP2 has no set_modules_to_forward_prefetch"),
    ],
)
def test_what_cannot_be_turned_is_refused_with_the_reason(net: nn.Module, reason: str) -> None:
    assert all(reason in str(knob.refusal()) for knob in knobs_of(net, TuneConfig()))
    assert len(knobs_of(net, TuneConfig())) == 2


def test_a_model_that_is_not_sharded_has_no_such_knobs() -> None:
    assert knobs_of(nn.Linear(2, 2), TuneConfig()) == []
    assert len(knobs_of(model(), TuneConfig(knobs=("fsdp_reshard",)))) == 1
