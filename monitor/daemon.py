"""What runs on a node?  Ticks, an inbox and a web server over one board, started in order and stopped in order.

    collectors --tick--> sampler --> board <-- inbox <-- hooks
                                       |
                               exporter, /api/snapshot

Left out on purpose: everything that acts.  The daemon sets nothing on any device and starts no program.
"""

from __future__ import annotations

import logging
import platform
import random
import signal
import threading
from collections.abc import Sequence
from importlib import metadata
from types import FrameType

import msgspec

from pacecar.clock import NS_PER_SECOND, Clock, SystemClock
from pacecar.config import DaemonConfig
from pacecar.monitor.board import Board
from pacecar.monitor.collectors.cpu import CpuCollector
from pacecar.monitor.collectors.disk import DiskCollector
from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.collectors.memory import MemoryCollector
from pacecar.monitor.collectors.network import NetworkCollector
from pacecar.monitor.collectors.own import OwnCollector
from pacecar.monitor.collectors.reading import Collector, Files
from pacecar.monitor.exporter import metrics_app
from pacecar.monitor.inbox import Inbox
from pacecar.monitor.jobs import JobView
from pacecar.monitor.meeting import Meeting, MeetingError
from pacecar.monitor.nvml import PyNvml
from pacecar.monitor.sampler import Sampler
from pacecar.monitor.series import DaemonFigures, daemon_samples, job_samples
from pacecar.monitor.tick import Beat, beats
from pacecar.monitor.web import WebError, WebServer, pages
from pacecar.records import Sample, Snapshot

__all__ = ["Daemon", "DaemonError", "default_collectors", "run", "sample_once"]

DEADLINE_RATIO = 0.8
"""Share of the period that a tick waits for its collectors; the rest is for jitter and for publishing."""

UNHEALTHY_PERIODS = 10
"""A daemon that did not tick for so many periods says 503 on /-/healthy."""

SAMPLE_ONCE_SECONDS = 0.2
"""Between the two ticks of `sample_once`; twenty of the kernel's 10 ms ticks, so utilization is good to 5 %."""

_log = logging.getLogger(__name__)


class DaemonError(RuntimeError):
    """The daemon cannot start; the message names the thing and what to do."""


class NodeSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What /api/snapshot gives: the latest tick and the jobs."""

    host: str
    pacecar_version: str
    wall_ns: int
    snapshot: Snapshot | None
    snapshot_age_ns: int | None
    jobs: tuple[JobView, ...]


def default_collectors(config: DaemonConfig, clock: Clock) -> list[Collector]:
    """Return the collectors that `config` does not disable; raises DaemonError for a name that is none."""
    files = Files(config.proc_root, config.sys_root)
    collectors: list[Collector] = [
        CpuCollector(files),
        MemoryCollector(files),
        DiskCollector(files),
        NetworkCollector(files),
        GpuCollector(PyNvml(), clock),
        OwnCollector(),
    ]
    names = [collector.name for collector in collectors]
    unknown = [name for name in config.disable if name not in names]
    if unknown:
        raise DaemonError(f"[daemon] disable: no collector {', '.join(unknown)}; there are {', '.join(names)}")
    return [collector for collector in collectors if collector.name not in config.disable]


class Daemon:
    """The daemon of one node.  Construct, `start`, `close`; everything it needs of the world is passed in."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        clock: Clock | None = None,
        collectors: Sequence[Collector] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._version = _version()
        self._sampler = Sampler(
            default_collectors(config, self._clock) if collectors is None else collectors,
            self._clock,
            deadline_seconds=config.period_seconds * DEADLINE_RATIO,
        )
        self._board = Board(
            self._clock,
            jobs_max=config.jobs_max,
            ranks_max=config.ranks_max,
            job_forget_seconds=config.job_forget_seconds,
        )
        self._inbox = Inbox(Meeting(config.socket), self._board, self._clock)
        self._web = WebServer(config.host, config.port)
        self._stopping = threading.Event()
        self._ticker: threading.Thread | None = None
        self._beat: Beat | None = None
        self._started_wall_ns: int | None = None

    @property
    def port(self) -> int:
        """The port that is served; after `start` never 0."""
        return self._web.port

    @property
    def socket(self) -> str:
        """The path at which hooks connect."""
        return self._config.socket

    def start(self) -> None:
        """Take the port and the socket and begin to tick; raises DaemonError and then holds nothing."""
        self._started_wall_ns = self._clock.wall_ns()
        try:
            # The port first: it tells two daemons apart before either touches the socket file.
            self._web.bind()
            self._inbox.start()
        except (WebError, MeetingError) as error:
            self.close()
            raise DaemonError(str(error)) from error
        self._sampler.start()
        self._ticker = threading.Thread(target=self._tick, name="pacecar-tick", daemon=True)
        self._ticker.start()
        self._web.start(pages(metrics_app(self.samples), self.snapshot_json, self.is_healthy))

    def close(self) -> None:
        """Stop, give back port and socket, and wait for the threads; a hanging collector is left behind."""
        self._stopping.set()
        self._sampler.interrupt()
        self._web.close()
        self._inbox.close()
        if self._ticker is not None:
            self._ticker.join()
            self._ticker = None
            self._sampler.close()

    def samples(self) -> list[Sample]:
        """Return everything that a scrape serves, of this moment."""
        snapshot, jobs = self._board.snapshot(), self._board.jobs()
        beat = self._beat
        figures = DaemonFigures(
            version=self._version,
            started_wall_ns=self._started_wall_ns or self._clock.wall_ns(),
            ticks=0 if beat is None else beat.number + 1,
            ticks_missed=0 if beat is None else beat.missed,
            snapshot=snapshot,
            snapshot_age_ns=self._age_ns(snapshot),
            failures=self._sampler.failures(),
            connections=self._inbox.connections,
            frames=self._inbox.frames,
            refused=self._inbox.refused(),
            jobs=len(jobs),
        )
        host = [] if snapshot is None else snapshot.samples()
        return [*host, *job_samples(jobs), *daemon_samples(figures)]

    def snapshot_json(self) -> bytes:
        """Return the latest snapshot and the jobs as JSON, in inside units; see `NodeSnapshot`."""
        snapshot = self._board.snapshot()
        node = NodeSnapshot(
            host=platform.node(),
            pacecar_version=self._version,
            wall_ns=self._clock.wall_ns(),
            snapshot=snapshot,
            snapshot_age_ns=self._age_ns(snapshot),
            jobs=self._board.jobs(),
        )
        return msgspec.json.encode(node)

    def is_healthy(self) -> bool:
        """Return whether a tick was published lately."""
        age = self._age_ns(self._board.snapshot())
        return age is not None and age < UNHEALTHY_PERIODS * self._config.period_seconds * NS_PER_SECOND

    def _age_ns(self, snapshot: Snapshot | None) -> int | None:
        return None if snapshot is None else max(0, self._clock.monotonic_ns() - snapshot.started_ns)

    def _tick(self) -> None:
        for beat in beats(
            self._clock,
            self._stopping.wait,
            period_ns=int(self._config.period_seconds * NS_PER_SECOND),
            jitter_ratio=self._config.jitter_ratio,
            chance=random.Random(),
        ):
            self._beat = beat
            self._board.publish(self._sampler.sample(beat))


def _version() -> str:
    # Not pacecar.__version__: the root package also leads to the hook, and the daemon must not depend on that.
    try:
        return metadata.version("pacecar")
    except metadata.PackageNotFoundError:
        return "not installed"


def run(config: DaemonConfig) -> int:
    """Run the daemon until SIGTERM or SIGINT and return the exit code; raises DaemonError when it cannot start."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    daemon = Daemon(config)
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        daemon.start()
        _log.info("serving http://%s:%d/metrics, hooks connect at %s", config.host, daemon.port, daemon.socket)
        stop.wait()
        _log.info("stopping")
    finally:
        daemon.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def sample_once(config: DaemonConfig) -> Snapshot:
    """Return one snapshot of this machine: two ticks a moment apart, so that what needs a rate has one."""
    clock = SystemClock()
    sampler = Sampler(default_collectors(config, clock), clock, deadline_seconds=5.0)
    sampler.start()
    try:
        sampler.sample(Beat(0, clock.monotonic_ns(), 0, 0))
        threading.Event().wait(SAMPLE_ONCE_SECONDS)
        return sampler.sample(Beat(1, clock.monotonic_ns(), 0, 0))
    finally:
        sampler.close()
