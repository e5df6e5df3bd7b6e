"""A field with an unchanged answer costs nothing, and is otherwise read like any other."""

from collections import Counter

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.gpu.driver import FieldValue, NvmlError, UnsupportedError
from pacecar.monitor.gpu.queries.field_reader import FieldReader
from pacecar.monitor.gpu.queries.fields import fields_of
from pacecar.monitor.gpu.queries.refusals import REFUSALS_MAX, RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX
from tests.kit.fake_clock import FakeClock

FAST, SLOW = 82, 29
"""Memory temperature, which is read at every tick, and retired pages."""

NAMES = {FAST: "pacecar_gpu_memory_temperature_celsius", SLOW: "pacecar_gpu_retired_pages"}


class Answers:
    """An NVML that answers fields from a dict, by number, and with the scope for those of a link."""

    def __init__(self, answers):
        self.answers, self.error, self.asked = answers, None, Counter()

    def fields(self, handle, ids):
        self.asked.update(field.number for field in ids)
        if self.error is not None:
            raise self.error
        return [self.answers.get(field, self.answers.get(field.number, UnsupportedError("no"))) for field in ids]


@pytest.fixture
def nvml():
    return Answers({FAST: FieldValue(41, 32), SLOW: FieldValue(3, 32)})


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def read(nvml, clock):
    reader = FieldReader("0", nvml, clock)

    def read(*, probe=False, failures=None):
        clock.advance(NS_PER_SECOND)
        if probe:
            reader.begin(fields_of("615.71", 2))
        answers = reader.ask(None, failures if failures is not None else [], everything=probe)
        samples = [*answers.values(), *reader.slow_samples(), *reader.link_totals(answers)]
        return {(sample.metric, *sample.labels): sample.value for sample in samples}

    read.reader = reader
    return read


def of(number, *labels):
    return (NAMES[number], "0", *labels)


def test_an_equal_answer_is_the_same_sample_and_another_one_is_not(read, nvml):
    read(probe=True)
    for _ in range(3):
        assert read() == {of(FAST): 41, of(SLOW, "single_bit"): 3}
    nvml.answers |= {FAST: FieldValue(0, 32), SLOW: FieldValue(4, 32)}
    assert read() == {of(FAST): 0, of(SLOW, "single_bit"): 4}


@pytest.mark.parametrize("number", [FAST, SLOW])
@pytest.mark.parametrize("error", [NvmlError("once", 999), UnsupportedError("for a moment", 3)])
def test_a_field_that_failed_is_back_with_the_answer_that_it_had_before(read, nvml, number, error):
    before = read(probe=True)
    answer, nvml.answers[number] = nvml.answers[number], error
    failures = []
    assert read(failures=failures) == {key: value for key, value in before.items() if key[0] != NAMES[number]}
    assert len(failures) == 1
    nvml.answers[number] = answer
    assert read() == before


def test_refusals_with_equal_answers_between_them_are_not_in_a_row(read, nvml):
    before = read(probe=True)
    answer = nvml.answers[SLOW]
    for _ in range(2 * REFUSALS_MAX):
        nvml.answers[SLOW] = UnsupportedError("for a moment", 3)
        read()
        nvml.answers[SLOW] = answer
        assert read() == before


def test_all_fields_are_there_after_the_next_probe_though_no_answer_changed(read):
    before = read(probe=True)
    assert read() == before
    assert read(probe=True) == before


def test_traffic_is_summed_over_links_while_each_of_them_answers(read, nvml):
    for link in (0, 1):
        nvml.answers[138, link] = FieldValue(10 + link, 64)
    total, of_link = "pacecar_gpu_nvlink_transmit_bytes_total", "pacecar_gpu_nvlink_link_transmit_bytes_total"
    read(probe=True)
    for _ in range(2):
        found = read()
        assert (found[total, "0"], found[of_link, "0", "1"]) == (21 * 1024, 11 * 1024)
    nvml.answers[138, 1] = NvmlError("once", 999)
    assert (total, "0") not in read()


def test_what_was_read_slowly_is_missing_while_the_call_for_all_fields_fails(read, nvml):
    """Old ECC errors, remapped rows and link states were once served while the call failed."""
    nvml.answers[165, 0] = FieldValue(1, 32)
    before = read(probe=True)
    assert of(SLOW, "single_bit") in before
    nvml.error = NvmlError("once", 999)
    failures = []
    assert read(failures=failures) == {}
    assert failures == ["fields: once"]
    nvml.error = None
    assert read() == before, "the answers are those of before, and are read anew"


@pytest.mark.parametrize("number", [FAST, SLOW])
@pytest.mark.parametrize("is_refused_at_the_probe", [True, False])
def test_a_refused_field_is_asked_ever_less_often_and_is_back_when_it_answers(
    read, nvml, clock, number, is_refused_at_the_probe
):
    answer, refusal = nvml.answers[number], UnsupportedError("no", 3)
    if is_refused_at_the_probe:
        nvml.answers[number] = refusal
    whole = {of(FAST): 41, of(SLOW, "single_bit"): 3}
    read(probe=True)
    nvml.answers[number] = refusal
    for _ in range(7300):
        assert read(failures=None).keys() == {key for key in whole if key[0] != NAMES[number]}
    asked = nvml.asked[number]
    assert 10 <= asked <= 14, "in two hours"
    assert read.reader.refused().answered_before == (0 if is_refused_at_the_probe else 1)
    nvml.answers[number] = answer
    for _ in range(RETRY_SECONDS_MAX + 1):
        read()
    assert read() == whole
    assert read.reader.refused().answered_before == 0
    assert nvml.asked[number] > 1000 if number == FAST else nvml.asked[number] > asked


def test_all_fields_may_be_refused_at_the_probe_and_come_back(read, nvml):
    nvml.error = UnsupportedError("the driver initializes", 13)
    assert read(probe=True) == {}
    nvml.error = None
    for _ in range(RETRY_SECONDS_FIRST + 40):
        found = read()
    assert found == {of(FAST): 41, of(SLOW, "single_bit"): 3}


def test_a_refused_field_is_not_asked_while_another_gives_its_series(read, nvml):
    """NVLink 5 counts bytes in other fields; a GPU that answers both would be counted twice."""
    nvml.answers[138, 0] = FieldValue(10, 64)
    nvml.answers[202, 0] = UnsupportedError("not yet", 3)
    series = ("pacecar_gpu_nvlink_link_transmit_bytes_total", "0", "0")
    assert read(probe=True)[series] == 10 * 1024
    nvml.answers[202, 0] = FieldValue(77, 64)
    for _ in range(2 * RETRY_SECONDS_FIRST):
        assert read()[series] == 10 * 1024
    nvml.answers[138, 0] = UnsupportedError("no more", 3)
    for _ in range(RETRY_SECONDS_MAX):
        found = read()
    assert found[series] == 77
