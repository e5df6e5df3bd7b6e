"""`pacecar.attach` from a script's point of view: what is an error, what is only logged, and what stays the same."""

import copy
import logging
import pickle
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import pacecar
from pacecar.config import Config, ConfigError, HookConfig, TuneConfig
from pacecar.records import Goodbye, JobHello, JobRecord, StepRecord


def make_job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_batches(count: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 16, generator=draw), torch.randint(0, 4, (8,), generator=draw)) for _ in range(count)]


def train(pacer: pacecar.Pacer, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    losses = []
    for batch in pacer.data(make_batches()):
        for inputs, targets in pacer.microbatches(batch):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            pacer.backward(loss)
            losses.append(float(loss.detach()).hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plain_losses() -> list[str]:
    model, optimizer = make_job()
    losses = []
    for inputs, targets in make_batches():
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        losses.append(float(loss.detach()).hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def options(tmp_path: Path) -> dict[str, object]:
    return {"socket": str(tmp_path / "nobody.sock"), "run_dir": tmp_path / "run"}


def fail_in_a_loop(model: nn.Module, optimizer: torch.optim.Optimizer, tmp_path: Path) -> None:
    with pacecar.attach(model, optimizer, **options(tmp_path)) as pacer:
        train(pacer, model, optimizer)
        1 / 0  # noqa: B018  the script fails


def records_of(folder: Path) -> list[JobRecord]:
    decoder = msgspec.json.Decoder(JobRecord)
    return [decoder.decode(line) for line in (folder / "rank0.jsonl").read_bytes().splitlines()]


def test_a_script_trains_to_the_same_losses_and_leaves_its_steps_in_the_run_folder(tmp_path: Path) -> None:
    model, optimizer = make_job()
    every_step = {"overhead_budget": 1.0}  # else a busy machine has some counted only
    with pacecar.attach(model, optimizer, tune="exact", **every_step, **options(tmp_path)) as pacer:
        assert pacer.is_active
        losses = train(pacer, model, optimizer)
    assert losses == plain_losses()
    assert not pacer.is_active
    records = records_of(tmp_path / "run")
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert isinstance(records[0], JobHello)
    assert isinstance(records[-1], Goodbye)
    assert records[-1].reason == "finished"
    assert [step.step for step in steps] == list(range(12))
    assert all(step.samples == 8 for step in steps)


def test_an_exception_in_the_script_passes_through_and_is_the_reason_of_the_goodbye(tmp_path: Path) -> None:
    model, optimizer = make_job()
    with pytest.raises(ZeroDivisionError):
        fail_in_a_loop(model, optimizer, tmp_path)
    goodbye = records_of(tmp_path / "run")[-1]
    assert isinstance(goodbye, Goodbye)
    assert goodbye.reason == "failed: ZeroDivisionError"


def test_a_second_pacer_in_the_process_is_inert_says_where_the_first_is_and_trains_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make_job()
    with pacecar.attach(model, optimizer, **options(tmp_path)) as first:
        with caplog.at_level(logging.WARNING, logger="pacecar"):
            second = pacecar.attach(model, optimizer, micro_batch=8)
        assert not second.is_active
        assert second.inert_because is not None
        assert "test_attach.py" in second.inert_because
        assert second.inert_because in caplog.text
        assert train(second, model, optimizer) == plain_losses()
        second.close()
        assert first.is_active
    again = pacecar.attach(model, optimizer, **options(tmp_path))
    assert again.is_active
    again.close()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"tune": "fast"}, ConfigError, "fast"),
        ({"overhead_budget": 2.0}, ConfigError, "overhead_budget"),
        ({"bucket_bytes_min": 8, "bucket_bytes_max": 4}, ConfigError, "bucket_bytes_min is above bucket_bytes_max"),
        ({"micro_batch": 0}, ConfigError, "micro_batch=0"),
        ({"micro_batch": 2.5}, TypeError, "2.5"),
        ({"no_such_option": 1}, TypeError, "no_such_option"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it_and_leaves_no_hook(
    change: dict[str, object], error: type[Exception], words: str
) -> None:
    model, optimizer = make_job()
    with pytest.raises(error, match=words):
        pacecar.attach(model, optimizer, **change)
    assert not model._forward_hooks


def test_a_wrong_model_or_optimizer_is_named() -> None:
    model, optimizer = make_job()
    with pytest.raises(TypeError, match=r"torch\.nn\.Module is needed, not str"):
        pacecar.attach("model", optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer.*not Sequential"):
        pacecar.attach(model, model)  # type: ignore[arg-type]


def test_a_broken_configuration_file_makes_the_pacer_inert_and_not_the_job_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "pacecar.toml"
    broken.write_text("[hook]\noverhead_budgt = 0.1\n")
    monkeypatch.setenv("PACECAR_CONFIG", str(broken))
    model, optimizer = make_job()
    with pacecar.attach(model, optimizer) as pacer:
        assert pacer.inert_because is not None
        assert "overhead_budgt" in pacer.inert_because
        assert str(broken) in pacer.inert_because
        assert train(pacer, model, optimizer) == plain_losses()


def test_enabled_false_is_respected(tmp_path: Path) -> None:
    model, optimizer = make_job()
    config = Config(hook=HookConfig(enabled=False), tune=TuneConfig(mode="off"))
    with pacecar.attach(model, optimizer, config=config, **options(tmp_path)) as pacer:
        assert not pacer.is_active
        assert train(pacer, model, optimizer) == plain_losses()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_folder_that_cannot_be_made_makes_the_pacer_inert_and_not_the_job_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, optimizer = make_job()
    with pacecar.attach(model, optimizer, run_dir=tmp_path / "file" / "run") as pacer:
        assert train(pacer, model, optimizer) == plain_losses()


def test_closing_takes_every_hook_away(tmp_path: Path) -> None:
    model, optimizer = make_job()
    before = (len(model._forward_hooks), len(model._forward_pre_hooks), len(optimizer._optimizer_step_post_hooks))
    pacer = pacecar.attach(model, optimizer, **options(tmp_path))
    train(pacer, model, optimizer)
    pacer.close()
    pacer.close()
    after = (len(model._forward_hooks), len(model._forward_pre_hooks), len(optimizer._optimizer_step_post_hooks))
    assert after == before


def test_a_copy_or_a_pickle_of_what_holds_a_pacer_has_an_inert_one(tmp_path: Path) -> None:
    model, optimizer = make_job()
    with pacecar.attach(model, optimizer, **options(tmp_path)) as pacer:
        mine = {"model": model, "pacer": pacer}
        for twin in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), copy.copy(pacer)):
            other = twin["pacer"] if isinstance(twin, dict) else twin
            assert other.inert_because == "it is a copy or a pickle of a pacer"
            other.close()
        assert pacer.is_active
