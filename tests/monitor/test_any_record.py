"""Whatever records pass validation, of whatever mixture of jobs: there is a page and a document of them."""

import math

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.export.job_samples import job_samples
from pacecar.monitor.export.prometheus import Exporter
from pacecar.monitor.fault_containment import FaultContainment
from pacecar.monitor.http.request import HttpRequest
from pacecar.monitor.http.status_document import StatusDocumentBuilder
from pacecar.monitor.http.status_history import points
from pacecar.monitor.ingest.frame_validation import FrameValidation, Peer
from pacecar.monitor.jobs.job_energy import JobEnergies
from pacecar.monitor.jobs.state import DaemonState
from pacecar.records import JobHello, Ok, Sample, Snapshot
from pacecar.records.status_document import StatusDocument
from pacecar.wire import MAGIC, VERSION, FrameError, payload_of
from tests.kit.anyrecord import JOB_RECORDS, Drawn, Rolled, make, mutated
from tests.kit.fake_clock import FakeClock
from tests.kit.selection import reduced

pytestmark = pytest.mark.slow

JOBS = ("a", 'b"\n\\{}')
RANKS = 2
ENERGY = "pacecar_gpu_energy_joules_total"


def framed(fields):
    payload = msgspec.msgpack.encode(fields)
    return MAGIC + bytes([VERSION, 0]) + len(payload).to_bytes(4, "big") + payload


class Node:
    """The daemon from an accepted connection to the page, without threads and sockets."""

    def __init__(self):
        self.clock = FakeClock(monotonic_ns=5_000_000_000)
        self.faults = FaultContainment()
        self.board = DaemonState(self.clock, jobs_max=8, ranks_max=32, job_forget_seconds=900.0, faults=self.faults)
        self.exporter = Exporter(lambda: job_samples(self.board.jobs(), faults=self.faults), self.faults)
        self.builder = StatusDocumentBuilder(faults=self.faults, node="n", period_seconds=1.0)
        self.energies = JobEnergies(self.faults)
        self.hooks = {}
        self.taken = self.refused = self.ticks = 0

    def hello(self, job, rank, source):
        fields = make(
            JobHello, source, job=job, rank=rank, world_size=RANKS, pid=7, device_uuid=f"GPU-{job}-{rank}", launch=""
        )  # fmt: skip  one launch: the ranks are of one job
        conversation = self.hooks[job, rank] = FrameValidation(Peer(7, 1000, 1000), own_pid=lambda pid: pid)
        self.say(conversation, fields)
        return conversation

    def say(self, conversation, fields):
        """Send a record as a hook does; return whether it was taken."""
        try:
            frame = framed(fields)
            record, hello = conversation.decode(frame)
            if hello is not None and record.__class__ in (*JOB_RECORDS, JobHello):
                number = list(self.hooks.values()).index(conversation)
                self.board.record(record, hello=hello, uid=1000, owner=number)
        except FrameError:
            self.refused += 1
            return False
        self.taken += 1
        assert payload_of(frame)
        return True

    def tick(self):
        """Tick and serve everything; return the page."""
        self.ticks += 1
        self.clock.advance(11 * NS_PER_SECOND)
        uuids = [f"GPU-{job}-{rank}" for job in JOBS for rank in range(RANKS)]
        samples = [
            one
            for number, uuid in enumerate(uuids)
            for one in (
                Sample("pacecar_gpu_info", (str(number), uuid, "H100", "", "", "", "", "", "off"), 1),
                Sample(ENERGY, (str(number),), 1000 * self.ticks),
            )
        ]
        snapshot = Snapshot(self.ticks, self.clock.monotonic_ns(), 1, 0, {"gpu": Ok(tuple(samples))}, {"gpu": 1})
        energy = self.energies.update(snapshot, self.board.jobs)
        self.exporter.publish(energy)
        self.board.publish(snapshot)
        for job in JOBS:
            self.board.rank_steps(job)
        self.board.paces()
        own = list(self.board.own_samples())
        document = self.builder.build(
            snapshot, self.board.jobs(), own, wall_ns=1, now_ns=self.clock.monotonic_ns(), throttled={}
        )
        answer = self.exporter(HttpRequest("GET", "/metrics"))
        assert answer.status == "200 OK"
        encoded = msgspec.json.encode(document)
        assert all(math.isfinite(value) for value in points(document).values())
        assert msgspec.json.decode(encoded, type=StatusDocument).jobs_left_out == 0
        assert not any(self.faults.counts().values()), "nothing had to be contained"
        return answer.body.decode()


def check(page):
    """Every value is a number, and the page can be read."""
    values = [line.rpartition(" ")[2] for line in page.split("\n") if line and not line.startswith("#")]
    assert values
    assert not {"NaN", "+Inf", "-Inf"} & set(values)


@pytest.mark.slow
@settings(
    max_examples=reduced(15), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(data=st.data())
def test_any_mixture_of_valid_records_gives_a_page_without_nan(data):
    node, source = Node(), Drawn(data.draw)
    hooks = [node.hello(job, rank, source) for job in JOBS for rank in range(RANKS)]
    more = [source.pick(JOB_RECORDS) for _ in range(data.draw(st.integers(0, 4)))]
    for kind in (*JOB_RECORDS, *more):  # each kind at least once: of a few at random a fault of one is rarely found
        conversation = source.pick(hooks)
        fields = make(kind, source)
        fields |= {name: getattr(conversation.hello, name) for name in ("job", "rank") if name in fields}
        node.say(conversation, fields)
        if source.integer(0, 2) == 0:
            check(node.tick())
    page = node.tick()
    check(page)
    assert {s.labels["training_job"] for f in parse(page) for s in f.samples if s.name == "pacecar_rank_info"} == set(
        JOBS
    )


def fuzz(count, seed):
    """Say `count` frames, every second with a value that may not be allowed; return the node."""
    node, source = Node(), Rolled(seed)
    hooks = [node.hello(job, rank, source) for job in JOBS for rank in range(RANKS)]
    for number in range(count):
        conversation = source.pick(hooks)
        fields = make(source.pick(JOB_RECORDS), source)
        fields |= {name: getattr(conversation.hello, name) for name in ("job", "rank") if name in fields}
        if number % 2:
            fields = mutated(fields, source)
        node.say(conversation, fields)
        if number % 64 == 63:
            check(node.tick())
    check(node.tick())
    return node


def test_frames_with_odd_values_are_taken_or_refused_and_there_is_a_page():
    frames = reduced(5_000)
    node = fuzz(frames, seed=26)
    assert node.taken > 0.3 * frames
    assert node.refused > 0.3 * frames


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_a_million_frames_with_odd_values_are_taken_or_refused_and_there_is_a_page(seed):
    node = fuzz(100_000, seed)
    assert node.taken + node.refused == 100_000 + len(node.hooks)
