"""The data loader's workers change in the middle of an epoch, and the job sees the same batches in the same order."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import pacecar.controller.knobs.dataloader
from pacecar.config import TuneConfig
from pacecar.controller.knobs.actuator import ActuatorError
from pacecar.controller.knobs.dataloader.knobs import LoaderKnobs
from pacecar.controller.knobs.dataloader.randomness_check import Draws, WatchedCollate, WatchedInit, fingerprint
from pacecar.controller.knobs.dataloader.switchable_loader import SwitchableLoader, unfit
from pacecar.controller.knobs.dataloader.worker_limits import WorkerRoom
from pacecar.controller.knobs.dataloader.worker_set import WorkerSetting
from tests.controller.loaders import (
    Augmented,
    EagerBatches,
    MoodySampler,
    Numbers,
    OnFile,
    OnlyAtHome,
    PositionedSampler,
)

AMPLE = WorkerRoom(cores=8, shared_bytes=2**34, memory_bytes=2**36, worker_bytes=None)

Turns = dict[int, WorkerSetting]


@pytest.fixture(autouse=True)
def no_workers_are_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # How often torch looks whether workers live, and how long it waits for one that does not end by itself: 5 s.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    yield
    if multiprocessing.active_children():
        gc.collect()
    deadline = time.monotonic() + 10
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert multiprocessing.active_children() == []


def knobs_of(loader: Any, **options: Any) -> LoaderKnobs:
    knobs = LoaderKnobs(TuneConfig(**options), room=lambda pids: AMPLE)
    knobs.wrap(loader, None)
    return knobs


def epochs(loader: Any, count: int, turns: Turns, *, before: Callable[[int], None] = lambda epoch: None) -> list[Any]:
    """Return the batches of `count` epochs, and the next numbers of the job's own generators after each."""
    seen: list[Any] = []
    step = 0
    for epoch in range(count):
        before(epoch)
        for batch in loader:
            step += 1
            seen.append((batch.tolist(), torch.rand(()).item()))  # a job draws too: dropout
            if step in turns:
                loader.turn(turns[step])
        seen.append((torch.rand(()).item(), random.random()))
    return seen


def compare(
    make: Callable[[], DataLoader[Any]], turns: Turns, before: Callable[[Any, int], None] = lambda loader, epoch: None
) -> None:
    torch.manual_seed(7)
    random.seed(7)
    plain = make()
    expected = epochs(plain, 3, {}, before=lambda epoch: before(plain, epoch))
    torch.manual_seed(7)
    random.seed(7)
    switched = SwitchableLoader(make())
    assert epochs(switched, 3, turns, before=lambda epoch: before(switched, epoch)) == expected
    assert switched.failed is None
    switched.close(5)


TURNS: Turns = {
    3: WorkerSetting(3, 2), 4: WorkerSetting(1, 4), 14: WorkerSetting(2, 1), 20: WorkerSetting(3, 2),
    33: WorkerSetting(0, 2),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_their_order_and_the_jobs_own_random_numbers_are_those_of_torch_across_switches_and_epochs(
    workers: int, persistent: bool
) -> None:
    if persistent and not workers:
        pytest.skip("torch has no such loader")
    compare(lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=workers, persistent_workers=persistent), TURNS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_every_sample_comes_once_and_in_order_whenever_the_switches_come(seed: int) -> None:
    chance = random.Random(seed)
    turns = {
        step: WorkerSetting(chance.choice([0, 1, 2, 3]), chance.choice([1, 2, 5]))
        for step in range(1, 49)
        if chance.random() < 0.4
    }
    generator = torch.Generator().manual_seed(seed)
    state = generator.get_state()

    def make() -> DataLoader[Any]:
        generator.set_state(state)
        return DataLoader(Numbers(61), 4, shuffle=True, generator=generator, num_workers=1, drop_last=bool(seed % 2))

    compare(make, turns)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_is_asked_as_often_as_torch_would(workers: int) -> None:
    samplers: list[EagerBatches] = []

    def make() -> DataLoader[Any]:
        samplers.append(EagerBatches())
        return DataLoader(Numbers(), batch_sampler=samplers[-1], num_workers=workers)

    compare(make, TURNS)
    assert samplers[0].asked == samplers[1].asked


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampled", [False, True])
def test_two_loaders_side_by_side_shuffle_as_with_torch_whichever_has_other_workers(
    workers: int, sampled: bool
) -> None:
    """Workers shuffle when the epoch begins, a training process when it wants a batch; here others draw in between."""

    def make() -> DataLoader[Any]:
        if sampled:
            return DataLoader(Numbers(), batch_sampler=EagerBatches(), num_workers=workers)
        return DataLoader(Numbers(), 4, shuffle=True, num_workers=workers)

    def run(one: Any, other: Any, turns: Turns) -> list[Any]:
        torch.manual_seed(7)
        seen: list[Any] = []
        for epoch in range(2):
            pairs = zip(one, other, strict=True)
            seen.append(torch.rand(()).item())
            seen += [(a.tolist(), b.tolist()) for a, b in pairs]
            if epoch in turns:
                one.turn(turns[epoch])
        return seen

    switched = SwitchableLoader(make())
    assert run(switched, make(), {0: WorkerSetting(2 - workers, 2)}) == run(make(), make(), {})
    assert switched.failed is None
    switched.close(5)


def test_without_numpy_a_look_at_the_generators_sees_draws_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    before = fingerprint()
    assert fingerprint() == before
    torch.rand(())
    assert fingerprint() != before


@pytest.mark.filterwarnings("ignore:get_state and legacy:RuntimeWarning")
def test_draws_of_any_bit_generator_of_numpy_are_seen() -> None:
    found = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(1))
        before = fingerprint()
        assert fingerprint() == before
        numpy.random.random()
        assert fingerprint() != before
    finally:
        numpy.random.set_bit_generator(found)


@pytest.mark.slow
def test_samples_that_are_not_batched_switch_too() -> None:
    compare(lambda: DataLoader(Numbers(40), batch_size=None, shuffle=True, num_workers=1), {5: WorkerSetting(3, 2)})


@pytest.mark.slow
def test_a_distributed_sampler_is_told_its_epochs_as_ever() -> None:
    def make() -> DataLoader[Any]:
        sampler = PositionedSampler(Numbers(), num_replicas=2, rank=1, shuffle=True)
        sampler.state_dict = None  # type: ignore[assignment, method-assign]  # an ordinary one
        return DataLoader(Numbers(), 4, sampler=sampler, num_workers=2)

    compare(
        make,
        {3: WorkerSetting(3, 1), 11: WorkerSetting(1, 1)},
        before=lambda loader, epoch: loader.sampler.set_epoch(epoch),
    )


@pytest.mark.slow
def test_the_position_that_a_sampler_would_save_is_at_every_step_what_it_would_be_without_a_switch() -> None:
    def run(turn: bool) -> tuple[list[Any], list[int], LoaderKnobs]:
        sampler = PositionedSampler(Numbers(80), num_replicas=2, rank=0, shuffle=False)
        knobs = knobs_of(DataLoader(Numbers(80), 2, sampler=sampler, num_workers=2, prefetch_factor=2))
        batches, positions = [], []
        assert knobs.loader is not None
        for step, batch in enumerate(knobs.loader):
            batches.append(batch.tolist())
            positions.append(sampler.state_dict()["yielded"])
            if turn and step in (2, 9):
                knobs.turn(workers=4 if step == 2 else 1)
        return batches, positions, knobs

    plain, switched = run(turn=False), run(turn=True)
    assert switched[:2] == plain[:2]
    workers, prefetch = switched[2].actuators
    assert workers.domain() == (1, 2, 4)
    assert "position" in str(prefetch.refusal())


@pytest.mark.slow
def test_a_loop_that_breaks_off_in_the_middle_of_a_switch_begins_its_next_epoch_at_the_beginning() -> None:
    loader = SwitchableLoader(DataLoader(Numbers(), 4, num_workers=2))
    for step, _ in enumerate(loader):
        if step == 2:
            loader.turn(WorkerSetting(1, 2))
        if step == 3:
            break
    assert [batch.tolist() for batch in loader] == [list(range(i, i + 4)) for i in range(0, 64, 4)]
    assert loader.setting == WorkerSetting(1, 2)


@pytest.mark.slow
def test_a_bad_sample_raises_what_it_raises_with_torch_with_any_number_of_workers() -> None:
    def run(workers: int) -> tuple[list[int], str]:
        loader = SwitchableLoader(DataLoader(Numbers(fail_at=30), 4, num_workers=workers))
        seen = []
        try:
            for batch in loader:
                seen += batch.tolist()
                loader.turn(WorkerSetting(3, 2))
        except LookupError as error:
            return seen, str(error)
        return seen, ""

    for workers in (0, 1):  # each that is left by an exception takes 5 s to end, as with torch
        seen, said = run(workers)
        assert seen == list(range(28)), "all before it, none twice"
        assert "sample 30 is bad" in said


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_a_dataset_that_cannot_bear_workers_costs_no_sample(dies: bool, caplog: pytest.LogCaptureFixture) -> None:
    loader = SwitchableLoader(DataLoader(OnlyAtHome(dies=dies), 4))
    seen = []
    for batch in loader:
        seen += batch.tolist()
        if len(seen) == 12:
            loader.turn(WorkerSetting(2, 2))
    assert seen == list(range(64))
    assert "goes on with 0 workers" in caplog.text
    with pytest.raises(ActuatorError, match="other workers failed"):
        loader.turn(WorkerSetting(4, 2))
    loader.turn(WorkerSetting(0, 2))


@pytest.mark.slow
def test_old_workers_end_without_the_loop_waiting_for_them() -> None:
    loader = SwitchableLoader(DataLoader(Numbers(400), 4, num_workers=2))
    for step, _ in enumerate(loader):
        if step in (2, 30, 60):
            loader.turn(WorkerSetting(1 if step == 30 else 2 + step, 1) if step != 60 else WorkerSetting(2, 2))
        assert len(multiprocessing.active_children()) < 40
        if step == 62:
            break
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "pacecar-loader")


# --- what is refused ---------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Own(DataLoader[Any]):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream()), "iterable"),
        (Own(Numbers()), "a Own, not torch's own"),
        ([1, 2], "a list, not torch's own"),
        (DataLoader(Numbers(), num_workers=1, in_order=False), "in_order"),
    ],
)
def test_what_cannot_be_switched_is_refused_and_iterated_as_it_is(loader: Any, reason: str) -> None:
    assert reason in str(unfit(loader))
    knobs = LoaderKnobs(TuneConfig())
    assert knobs.wrap(loader, None) is loader
    assert reason in str(knobs.refusal())


def refusal_after_steps(loader: DataLoader[Any], steps: int = 6, **options: Any) -> str | None:
    knobs = knobs_of(loader, **options)
    assert knobs.loader is not None
    for step, _ in enumerate(knobs.loader):
        if step == steps:
            break
    return knobs.actuators[0].refusal()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation_is_seen_wherever_it_runs_and_refused_unless_the_user_allows_other_draws(
    workers: int,
) -> None:
    assert "draws random numbers" in str(refusal_after_steps(DataLoader(Augmented(), 4, num_workers=workers)))
    assert refusal_after_steps(DataLoader(Augmented(), 4, num_workers=workers), loader_redraw=True) is None
    assert refusal_after_steps(DataLoader(Numbers(), 4, shuffle=True, num_workers=workers)) is None


def test_a_sampler_that_draws_as_it_goes_is_refused() -> None:
    assert "sampler draws" in str(refusal_after_steps(DataLoader(Numbers(), 4, sampler=MoodySampler())))


@pytest.mark.slow
def test_a_dataset_with_an_open_file_is_refused_unless_the_user_has_shared_it_before() -> None:
    assert "BufferedRandom" in str(refusal_after_steps(DataLoader(OnFile(), 4)))
    assert refusal_after_steps(DataLoader(OnFile(), 4, num_workers=2)) is None


@pytest.mark.slow
def test_a_loader_without_workers_gets_none_where_each_would_run_the_script_again() -> None:
    """A script without `if __name__ == "__main__"` would train in its worker, under the rank of its job."""
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        multiprocessing.set_start_method("forkserver", force=True)
        assert "start method forkserver" in str(refusal_after_steps(DataLoader(Numbers(), 4)))
        assert refusal_after_steps(DataLoader(Numbers(), 4, num_workers=1)) is None, "the user has tried it"
        multiprocessing.set_start_method("fork", force=True)
        assert refusal_after_steps(DataLoader(Numbers(), 4)) is None
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_the_first_loader_is_tuned_and_another_only_when_it_is_named() -> None:
    train, evaluation = DataLoader(Numbers(), 4), DataLoader(Numbers(), 4)
    knobs = LoaderKnobs(TuneConfig())
    first = knobs.wrap(train, None)
    assert isinstance(first, SwitchableLoader)
    assert knobs.wrap(evaluation, None) is evaluation
    assert knobs.wrap(train, None) is first, "each epoch may wrap it again"
    named = LoaderKnobs(TuneConfig())
    assert named.wrap(evaluation, False) is evaluation
    named.wrap(evaluation, None)
    assert isinstance(named.wrap(train, True), SwitchableLoader)
    assert named.loader.user_loader is train


def test_the_values_offered_fit_into_the_machine() -> None:
    def domains(room: WorkerRoom) -> list[tuple[int, ...]]:
        knobs = LoaderKnobs(TuneConfig(), room=lambda pids: room)
        knobs.wrap(DataLoader(Numbers(), 4, num_workers=2), None)
        knobs.loader.batch_bytes = 2**20
        return [actuator.domain() for actuator in knobs.actuators]

    assert domains(WorkerRoom(8, 2**34, 2**36, None)) == [(1, 2, 4, 8, 16), (1, 2, 4, 8, 16)]
    assert domains(WorkerRoom(8, 2**34, 2**36, None, ranks=4)) == [(1, 2, 4), (1, 2, 4, 8, 16)]
    assert domains(WorkerRoom(8, 8 * 2**20, 2**36, None)) == [(1, 2, 4), (1, 2)], "/dev/shm of a container"
    assert domains(WorkerRoom(8, 0, 2**36, None))[0] == (1, 2), "no room at all leaves what there is"
    assert domains(WorkerRoom(8, None, 2**30, 2**29))[0] == (1, 2)


def test_a_worker_that_is_not_forked_and_cannot_import_us_has_the_users_own_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker of the next epoch is a new python, and pacecar may have been upgraded or removed meanwhile."""
    draws = Draws(torch.zeros(1))
    pickled = pickle.dumps((WatchedCollate(sum, draws), WatchedInit(None, draws)))
    watched = pickle.loads(pickled)
    assert [type(one) for one in watched] == [WatchedCollate, WatchedInit], "where it can, it watches"
    assert watched[0]._draws is watched[1]._draws
    monkeypatch.delattr(pacecar.controller.knobs.dataloader, "randomness_check")
    monkeypatch.setitem(sys.modules, "pacecar.controller.knobs.dataloader.randomness_check", None)
    assert pickle.loads(pickled) == (sum, None)


@pytest.mark.full
@pytest.mark.slow
def test_spawned_workers_are_watched_like_forked_ones() -> None:
    for dataset, draws in ((Numbers(8), False), (Augmented(8), True)):
        plain = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="spawn")
        loader = SwitchableLoader(plain)
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]
        assert loader.draws.were_seen is draws
