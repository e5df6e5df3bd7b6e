"""The record of vitals: FLOPs known or given, MFU only with a peak, the allocator's figures, checkpoints wherever."""

import time

import pytest
import torch

from pacecar.config import HookConfig
from pacecar.profiler.utilization.allocator_memory import MemoryMeter
from pacecar.profiler.utilization.model_flops_utilization import UtilizationMeter
from pacecar.records import DeviceMemory, Goodbye, Vitals
from tests.kit.records import step_record

CUDA = torch.device("cuda", 0)


class Allocator:
    """Stands in for torch.cuda.memory_stats_as_nested_dict; what is asked of it is counted."""

    def __init__(self, **figures):
        self.figures = {"allocated": 300, "reserved": 400, "peak": 350, "split": 50} | figures
        self.retries = self.ooms = 0
        self.asked = 0
        self.error = None

    def __call__(self):
        self.asked += 1
        if self.error is not None:
            raise self.error
        figures = self.figures
        return {
            "allocated_bytes": {"all": {"current": figures["allocated"], "peak": figures["peak"]}},
            "reserved_bytes": {"all": {"current": figures["reserved"]}},
            "inactive_split_bytes": {"all": {"current": figures["split"]}},
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
        }


def test_each_figure_of_the_allocator_goes_to_its_own_field():
    allocator = Allocator()
    allocator.retries, allocator.ooms = 2, 1
    assert MemoryMeter(allocator).read() == DeviceMemory(
        allocated_bytes=300,
        reserved_bytes=400,
        allocated_peak_bytes=350,
        interval_peak_bytes=350,
        inactive_split_bytes=50,
        total_allocation_retries=2,
        total_out_of_memory=1,
    )


def test_zero_is_a_measurement_and_what_an_allocator_does_not_count_is_absent():
    reading = MemoryMeter(Allocator(allocated=0, reserved=0, peak=0, split=0)).read()
    assert (reading.allocated_bytes, reading.reserved_bytes, reading.inactive_split_bytes) == (0, 0, 0)
    assert (reading.total_allocation_retries, reading.total_out_of_memory) == (0, 0)
    assert reading.fragmentation_ratio is None
    assert DeviceMemory(allocated_bytes=0, reserved_bytes=8).fragmentation_ratio == 1.0
    assert DeviceMemory(allocated_bytes=8, reserved_bytes=8).fragmentation_ratio == 0.0
    bare = {"allocated_bytes": {"all": {"current": 1}}, "reserved_bytes": {"all": {"current": 2}}}
    assert MemoryMeter(lambda: bare).read() == DeviceMemory(allocated_bytes=1, reserved_bytes=2)
    assert MemoryMeter(dict).read() is None


def test_the_peak_of_an_interval_follows_without_resetting_anything():
    allocator = Allocator(peak=100)
    meter = MemoryMeter(allocator)
    peaks = []
    for peak in (100, 100, 120, 120, 80, 80, 90):  # the script resets it between the fourth reading and the fifth
        allocator.figures["peak"] = peak
        peaks.append(meter.read().interval_peak_bytes)
    assert peaks == [100, None, 120, None, 80, None, 90]


def make_step(number=0, **changes):
    given = {"wall_ns": 600_000_000, "ended_wall_ns": 1, "samples": 4, "tokens": 100}
    return step_record(step=number, **(given | changes))


def make_meter(device=CUDA, name="NVIDIA H200", stats=None, dtype=torch.float32, **options):
    model = torch.nn.Linear(4, 4).to(dtype)
    if device == CUDA:  # no GPU here: what matters is that the parameters are where the job is
        model = torch.nn.Linear(4, 4, device="meta", dtype=dtype)
        device = torch.device("meta")
    return UtilizationMeter(model, HookConfig(**options), device=device, stats=stats, device_name=name)


def run(meter, steps=2, **changes):
    return [r for r in (step_over(meter, make_step(n, **changes)) for n in range(steps)) if r is not None]


def step_over(meter, step):
    meter.add(step, None)
    return meter.report() if meter.is_due else None


def test_flops_that_the_user_gives_win_over_counting_and_tokens_over_samples():
    (record,) = run(make_meter(flops_per_sample=1000.0, vitals_interval_steps=2, dtype=torch.bfloat16))
    assert (record.flops_source, record.step_flops, record.flops, record.flops_steps) == ("given", 4000, 8000, 2)
    assert record.flops_wall_ns == record.wall_ns == 1_200_000_000
    assert (record.arithmetic, record.peak_flops_per_second) == ("bfloat16", 989_500_000_000_000)
    assert record.mfu_ratio == pytest.approx(8000 / 1.2 / 989.5e12)
    (record,) = run(make_meter(flops_per_token=7.0, flops_per_sample=1.0, vitals_interval_steps=2))
    assert record.flops == 1400


def test_a_step_whose_flops_are_unknown_leaves_both_sides_of_mfu():
    meter = make_meter(flops_per_token=10.0, peak_flops_per_second=1e4, vitals_interval_steps=3)
    step_over(meter, make_step(0))
    step_over(meter, make_step(1, tokens=None, samples=None))
    record = step_over(meter, make_step(2, tokens=0))
    assert (record.steps, record.flops_steps, record.flops, record.step_flops) == (3, 2, 1000, 0)
    assert record.flops_wall_ns == 1_200_000_000
    assert record.mfu_ratio == pytest.approx(1000 / 1.2 / 1e4)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "NVIDIA Graphics Device"},
        {"device": torch.device("cpu"), "name": None},
        {"dtype": torch.float64},
        {"flops_per_sample": None, "count_flops": False},
    ],
    ids=["an unknown board", "a CPU", "an arithmetic without a peak", "no FLOPs"],
)
def test_without_a_peak_or_without_flops_there_is_no_mfu(changes):
    (record,) = run(make_meter(**({"flops_per_sample": 5.0, "vitals_interval_steps": 2} | changes)))
    assert record.peak_flops_per_second is None
    assert record.mfu_ratio is None


def test_parameters_on_several_devices_have_no_peak():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2))
    config = HookConfig(flops_per_sample=5.0, vitals_interval_steps=2)
    meter = UtilizationMeter(model, config, device=torch.device("meta"), device_name="NVIDIA H200")
    (record,) = run(meter)
    assert record.flops == 40
    assert record.peak_flops_per_second is None


def test_records_come_every_so_many_steps_but_never_more_than_one_a_second():
    allocator = Allocator()
    records = run(make_meter(stats=allocator, vitals_interval_steps=2), steps=6)
    assert [r.step for r in records] == [1, 3, 5]
    assert allocator.asked == 3
    records = run(make_meter(vitals_interval_steps=2), steps=3000, wall_ns=1_000_000)
    assert [r.steps for r in records] == [1000, 1000, 1000]


def test_an_allocator_that_fails_is_asked_no_more_and_costs_its_own_figures_only(caplog):
    allocator = Allocator()
    allocator.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    records = run(make_meter(stats=allocator, flops_per_sample=1.0, vitals_interval_steps=2), steps=6)
    assert [(r.memory, r.flops) for r in records] == [(None, 8)] * 3
    assert allocator.asked == 1
    assert len(caplog.records) == 1


# --- in the hook --------------------------------------------------------------------------------


def vitals_of(sink):
    return [r for r in sink.records if isinstance(r, Vitals)]


def test_a_short_job_still_has_its_record_before_the_goodbye(job, attach, sink):
    hook = attach(job)
    job.run(6)
    hook.close()
    assert isinstance(sink.records[-1], Goodbye)
    (record,) = vitals_of(sink)
    assert sink.records[-2] is record
    assert (record.steps, record.flops_steps, record.samples) == (6, 4, 96)
    assert (record.flops_source, record.arithmetic, record.peak_flops_per_second) == ("counted", "float32", None)
    flops = 16 * (2 * 3 * 48 * 48 + 2 * 48 * 4)
    assert record.step_flops == 3 * flops - 16 * 2 * 48 * 48, "forward, and twice that but for the first input"


def test_a_checkpoint_is_charged_before_the_first_step_between_steps_and_after_the_last(job, attach, sink):
    hook = attach(job)
    with hook.loop.checkpoint():
        time.sleep(0.02)
    job.run(2)
    with hook.loop.checkpoint():
        time.sleep(0.01)
        with hook.loop.checkpoint():  # a trainer's save inside a script's
            time.sleep(0.01)
    job.run(1)
    with hook.loop.checkpoint():
        time.sleep(0.02)
    hook.close()
    charged = [r.ledger.checkpoint_ns for r in sink.steps]
    assert [ns >= 20_000_000 for ns in charged] == [True, False, True]
    assert charged[1] == 0
    (record,) = vitals_of(sink)
    assert record.total_checkpoints == 3
    assert 60_000_000 <= record.total_checkpoint_ns < 120_000_000
    assert all(r.ledger.wall_ns == r.wall_ns for r in sink.steps)


def save_on_a_full_disk():
    time.sleep(0.01)
    raise OSError("disk full")


def test_an_exception_while_saving_is_the_users_and_still_charged(job, attach, sink):
    hook = attach(job)
    job.run(1)
    with pytest.raises(OSError, match="disk full"), hook.loop.checkpoint():
        save_on_a_full_disk()
    job.run(1)
    steps = sink.steps
    assert steps[-1].ledger.checkpoint_ns >= 10_000_000


def test_an_inert_pacer_has_a_checkpoint_too():
    import pacecar
    from pacecar.config import Config

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pacer = pacecar.attach(model, optimizer, config=Config(hook=HookConfig(enabled=False)))
    with pacer.checkpoint():
        pass
