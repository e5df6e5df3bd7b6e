"""Runs the daemon of one node: ticks, a socket server and a web server over one state, started and stopped in order.

    collectors --tick--> sampler --> state <-- socket server <-- hooks
                                       |
                               exporter, routes (page, /api/), OTLP

The daemon sets nothing on any device and starts no program.
"""

from __future__ import annotations

import logging
import platform
import random
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import TypeVar

import msgspec

from pacecar.clock import NS_PER_SECOND, Clock, SystemClock
from pacecar.config import DaemonConfig, OtlpConfig
from pacecar.gpu_health import GpuHealth
from pacecar.kernel_files.reader import KernelFiles
from pacecar.records import HangVerdict, Sample, Throttling
from pacecar.records.status_document import StatusDocument

from .catalog_sample import sample
from .collectors.cgroup import CgroupMember
from .collectors.identity import IdentityCollector, gpu_processes
from .collectors.source_reader import Collector
from .export.job_samples import job_samples
from .export.otlp import Otlp, OtlpError, OtlpReading
from .export.prometheus import Exporter
from .fault_containment import ContainedPart, FaultContainment
from .gpu.health_source import GpuHealthSource, health_samples
from .gpu.known_gpus import GpuInventory, known_gpus_path
from .heap_trimming import HeapTrimming
from .histogram import Served
from .http.routes import Routes
from .http.security.web_config import Security, WebConfigError, read_security
from .http.server import WebError, WebServer
from .http.status_document import GpuVerdicts, StatusDocumentBuilder, StatusFigures
from .http.web import pages
from .ingest.socket_server import SocketServer
from .ingest.unix_socket import UnixSocket, UnixSocketError
from .jobs.job_energy import JobEnergies
from .jobs.node_signals import SIGNAL_TICKS, NodeSignalsSource, Throttles
from .jobs.silent_jobs import SilentJob, SilentJobs
from .jobs.state import DaemonState
from .recorder.recorder import Around, FlightRecorder, RecorderLimits
from .reload import ReloadResults, in_force
from .sampling.collector_registry import DaemonError, default_collectors
from .sampling.cpu_budget import GlanceControl
from .sampling.sampler import Sampler
from .sampling.ticker import SamplingTick, sampling_ticks
from .watched_threads import CLOSE_SECONDS, LIMIT_SECONDS, ThreadWatch, WatchedThread

__all__ = ["Daemon", "DaemonError"]

DEADLINE_RATIO = 0.8
"""Share of the period that a tick waits for its collectors; the rest is for jitter and for publishing."""

STALE_PERIODS = 3
"""Data older than this many periods is not served: pages and /-/healthy answer 503 instead."""

STALE_SECONDS_MIN = 3.0
"""The least age at which data is stale: with short periods every pause of a busy machine would be a gap."""

RARE_READ_SECONDS = 3.0
"""The longest time for which totals and levels that no chart shows are not read, while no reader is expected."""

STALLED_PERIODS = 10
"""A daemon without a tick for so many periods, and at least LIMIT_SECONDS, ends; its supervisor restarts it."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Daemon:
    """The daemon of one node.  Construct, `start`, `close`; its world is passed in."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        otlp: OtlpConfig | None = None,
        clock: Clock | None = None,
        collectors: Sequence[Collector] | None = None,
        listener: sockets.socket | None = None,
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._version = _version()
        self._glances = GlanceControl(
            config.cpu_budget, config.glances_per_second, interval_ns=int(config.window_seconds * NS_PER_SECOND)
        )
        self._heap = HeapTrimming()
        self._faults = FaultContainment()
        self._watch = ThreadWatch()
        self._identity = IdentityCollector(
            KernelFiles(config.proc_root, config.sys_root),
            self._clock,
            lambda: self._socket_server.members(),
            lambda: self._on_gpus,
            pod_logs=config.pod_logs,
            forget_seconds=config.job_forget_seconds,
        )
        self._recorder = self._make_recorder(config) if config.recorder else None
        self._on_gpus: set[int] = set()
        self._energies = JobEnergies(self._faults)
        self._sampler = Sampler(
            default_collectors(config, self._clock, self._members, self._identity)
            if collectors is None
            else collectors,
            self._clock,
            deadline_seconds=config.period_seconds * DEADLINE_RATIO,
            glances_per_second=lambda: self._glances.rate,
            window_seconds=config.window_seconds,
            on_glance=None if self._recorder is None else self._recorder.overhear_glance,
        )
        self._state = DaemonState(
            self._clock,
            jobs_max=config.jobs_max,
            ranks_max=config.ranks_max,
            job_forget_seconds=config.job_forget_seconds,
            faults=self._faults,
        )
        self._socket_server = SocketServer(
            UnixSocket(config.socket, mode=config.socket_mode, group=config.socket_group, inherited=listener),
            self._state,
            self._clock,
            recorder=self._recorder,
            faults=self._faults,
            trouble=self._trouble,
        )
        self._silent_jobs = SilentJobs(
            KernelFiles(config.proc_root, config.sys_root),
            self._clock,
            lambda: self._socket_server.members(),
            self._report_hang,
        )
        self._throttles = Throttles()
        self._signals = NodeSignalsSource(int(config.period_seconds * NS_PER_SECOND))
        self._throttled: Mapping[str, Throttling] = {}
        self._gpu_health = GpuHealthSource()
        self._inventory = GpuInventory(known_gpus_path(config.recordings, platform.node()), self._clock)
        self._gpu_verdicts = GpuVerdicts()
        self._derived: Sequence[Sample] = ()
        self._health_samples: Sequence[Sample] = ()
        self._builder = StatusDocumentBuilder(
            self._identity.residence, self._faults, node=platform.node(), period_seconds=config.period_seconds
        )
        self._routes = Routes(self._clock, config.period_seconds, self._document, self._figures)
        self._exporter = Exporter(self._live_samples, self._faults, self._clock)
        self._web = WebServer(config.host, config.port, faults=self._faults)
        self._otlp_config = otlp if otlp is not None and otlp.endpoint is not None else None
        self._otlp: Otlp | None = None
        self._stopping = threading.Event()
        self._ticker: WatchedThread | None = None
        self._ticks: Iterator[SamplingTick] = iter(())
        self._started_wall_ns: int | None = None
        self._started_ns: int | None = None
        self._security = Security()
        self.reloads = ReloadResults()
        """Results of reloads, recorded by the caller of `adopt`."""

    @property
    def config(self) -> DaemonConfig:
        """The settings in force."""
        return self._config

    @property
    def security(self) -> Security:
        """The TLS settings and passwords in force."""
        return self._security

    @property
    def port(self) -> int:
        """The port that is served; never 0 after `start`."""
        return self._web.port

    @property
    def socket(self) -> str:
        """The path at which hooks connect."""
        return self._config.socket

    def start(self) -> None:
        """Open the port and the socket and start to tick; raises DaemonError, and then holds nothing open."""
        self._started_wall_ns, self._started_ns = self._clock.wall_ns(), self._clock.monotonic_ns()
        self.reloads.started(self._started_wall_ns)
        try:
            self.secure(self._config)
            # The port first, so that a second daemon fails before it touches the socket file.
            self._web.bind()
            self._socket_server.start()
            self._start_otlp()
        except (WebError, WebConfigError, UnixSocketError, OtlpError) as error:
            self.close()
            raise DaemonError(str(error)) from error
        if self._recorder is not None:
            self._recorder.start()
        self._inventory.start()
        self._sampler.start()
        self._ticks = self._make_ticks()
        limit_seconds = max(LIMIT_SECONDS, STALLED_PERIODS * self._config.period_seconds)
        self._ticker = WatchedThread("tick", self._tick, self._clock, limit_seconds=limit_seconds)
        self._ticker.start()
        self._routes.start()
        self._web.start(pages(self._exporter, self._routes, self.staleness_reason, self._has_begun))
        self._watch_threads()

    def secure(self, config: DaemonConfig) -> None:
        """Read the web configuration again and apply it to each new client; raises WebConfigError."""
        self._security = read_security(config.web_config_file)
        self._web.secure(self._security)

    def adopt(self, wanted: DaemonConfig) -> None:
        """Apply the settings of `wanted` that need no restart; raises WebConfigError, and then has changed nothing."""
        config = in_force(self._config, wanted)
        if config.web_config_file != self._config.web_config_file:
            self.secure(config)
        self._glances.set_limits(config.cpu_budget, config.glances_per_second)
        self._state.limit(
            jobs_max=config.jobs_max, ranks_max=config.ranks_max, job_forget_seconds=config.job_forget_seconds
        )
        self._config = config

    def close(self) -> None:
        """Stop, release port and socket, and wait for the threads; a hung collector is left behind."""
        self._stopping.set()
        if self._otlp is not None:
            self._otlp.close()
        self._sampler.interrupt()
        self._web.close()
        self._routes.close()
        self._socket_server.close()
        if self._ticker is not None:
            if not self._ticker.join(CLOSE_SECONDS):
                _log.warning("the tick's thread does not return and is left behind")
            self._ticker = None
            self._sampler.close()
        self._inventory.close()
        if self._recorder is not None:
            self._recorder.close()

    def _start_otlp(self) -> None:
        if self._otlp_config is not None:
            otlp = Otlp(self._otlp_config, self._clock, self._readings, version=self._version, port=self.port)
            otlp.start()
            self._otlp = otlp

    def _readings(self) -> list[OtlpReading]:
        """Return what a scrape would return now."""
        snapshot = self._state.snapshot()
        is_old = snapshot is None or self._staleness() is not None
        ticked = (
            [] if snapshot is None or is_old else [OtlpReading(snapshot.wall_ns, [*snapshot.samples(), *self._derived])]
        )
        return [*ticked, OtlpReading(self._clock.wall_ns(), self._live_samples())]

    def _live_samples(self) -> list[Served]:
        """Return the samples that each scrape makes: those of jobs and of the daemon's parts."""
        jobs = self._state.jobs()
        own = list(self._own_samples())  # before the jobs', which take long: the page was just found fresh
        return [*job_samples(jobs, self._identity.residence, self._faults), *own]

    def _own_samples(self) -> Iterator[Sample]:
        """Yield the samples of the daemon's parts; `collectors.daemon_process` reads its CPU time and memory."""
        for name, samples in self._parts().items():
            yield from self._faults.each(ContainedPart.DAEMON, f"the samples of {name}", samples)

    def _parts(self) -> dict[str, Callable[[], Iterable[Sample]]]:
        """Return, by name, what yields each part's samples: callable from any thread, without waiting."""
        parts: dict[str, Callable[[], Iterable[Sample]]] = {
            "the state": self._state.own_samples,
            "the process": self._process_samples,
            "the sampler": self._sampler.own_samples,
            "the inventory of GPUs": self._inventory.own_samples,
            "the control of glances": self._glances.own_samples,
            "the socket server": self._socket_server.own_samples,
            "the exporter": self._exporter.own_samples,
            "the web server": self._web.own_samples,
            "the event stream": self._routes.viewers.own_samples,
            "the history": self._routes.own_samples,
            "the reloads": self.reloads.own_samples,
            "the threads": self._watch.own_samples,
            "the faults": self._faults.own_samples,
        }
        if self._recorder is not None:
            parts["the flight recorder"] = self._recorder.own_samples
        if self._otlp is not None:
            parts["the OTLP push"] = self._otlp.own_samples
        return parts

    def _process_samples(self) -> Iterator[Sample]:
        yield sample("pacecar_build_info", 1, self._version, platform.python_version())
        if self._started_wall_ns is not None:
            yield sample("pacecar_daemon_start_time_seconds", self._started_wall_ns)

    def _document(self) -> StatusDocument:
        """Return the current status document."""
        return self._builder.build(
            self._state.snapshot(),
            self._state.jobs(),
            list(self._own_samples()),
            wall_ns=self._clock.wall_ns(),
            now_ns=self._clock.monotonic_ns(),
            throttled=self._throttled,
            gpus=self._gpu_verdicts,
        )

    def _figures(self) -> StatusFigures:
        """Return the figures of the status document that the history keeps."""
        return self._builder.figures(self._state.snapshot(), self._state.jobs(), now_ns=self._clock.monotonic_ns())

    def is_healthy(self) -> bool:
        """Return whether a tick was published recently, and everything that serves hooks and clients works."""
        return self._trouble() is None

    def _trouble(self) -> str | None:
        """Return why the daemon is not healthy, in words; None while it is."""
        return self.staleness_reason() or (None if self._has_begun() else "no tick yet")

    def _has_begun(self) -> bool:
        return self._state.snapshot() is not None

    def staleness_reason(self) -> str | None:
        """Return why the data served now is stale, in words; None if it is not."""
        troubles = self._watch.troubles()
        return troubles[0] if troubles else self._staleness()

    def stalls(self) -> list[str]:
        """Return the problems that do not pass by themselves, in words: threads that ended or hang, missing ticks."""
        late = self._late_seconds(max(LIMIT_SECONDS, STALLED_PERIODS * self._config.period_seconds))
        return self._watch.troubles() + ([] if late is None else [f"no tick has been published for {late:.0f} s"])

    def _staleness(self) -> str | None:
        late = self._late_seconds(max(STALE_SECONDS_MIN, STALE_PERIODS * self._config.period_seconds))
        return None if late is None else f"the newest numbers are {late:.1f} s old: no tick has been published since"

    def _late_seconds(self, limit_seconds: float) -> float | None:
        """Return the age of the newest tick, or of the daemon before its first, if that is over the limit."""
        snapshot, now = self._state.snapshot(), self._clock.monotonic_ns()
        since_ns = self._started_ns if snapshot is None else snapshot.started_ns
        if since_ns is None or now - since_ns <= limit_seconds * NS_PER_SECOND:
            return None
        return (now - since_ns) / NS_PER_SECOND

    def _watch_threads(self) -> None:
        self._watch.add(lambda: self._ticker, lambda: self._socket_server.thread, lambda: self._web.thread)
        self._watch.add(lambda: self._web.checker, lambda: self._routes.viewers.thread, is_vital=False)
        self._watch.add(lambda: self._inventory.thread, is_vital=False)
        recorder, otlp = self._recorder, self._otlp
        if recorder is not None:
            self._watch.add(lambda: recorder.thread, lambda: recorder.writer.thread, is_vital=False)
        if otlp is not None:
            self._watch.add(lambda: otlp.thread, is_vital=False)

    def _make_ticks(self) -> Iterator[SamplingTick]:
        return sampling_ticks(
            self._clock,
            self._stopping.wait,
            period_ns=int(self._config.period_seconds * NS_PER_SECOND),
            jitter_ratio=self._config.jitter_ratio,
            chance=random.Random(),
        )

    def _tick(self) -> None:
        """Tick until the daemon stops; a tick that fails loses only itself, a step of it only that step."""
        ticker = self._ticker
        assert ticker is not None, "it runs this"
        for tick in self._ticks:  # they outlive a failure of this loop, so their numbers go on
            ticker.progress()
            self._faults.contain(ContainedPart.TICK, "a tick", partial(self._run_tick, tick), None)

    def _run_tick(self, tick: SamplingTick) -> None:
        snapshot = self._sampler.sample(tick, everything=self._should_read_everything(tick))
        self._on_gpus = self._step("processes on GPUs", lambda: gpu_processes(snapshot), set[int]())
        energy = self._step("energy", lambda: self._energies.update(snapshot, self._state.jobs), list[Sample]())
        health = self._step("health of GPUs", lambda: self._gpu_health.update(snapshot), dict[str, GpuHealth]())
        self._step("missing GPUs", lambda: self._inventory.update(snapshot), None)
        if health is not self._gpu_verdicts.health:
            self._health_samples = list(health_samples(health))
        self._gpu_verdicts = GpuVerdicts(health, self._inventory.missing(), self._inventory.last_known)
        self._derived = [*energy, *self._health_samples]
        self._exporter.publish([*snapshot.samples(), *self._derived])
        self._state.publish(snapshot)
        if self._recorder is not None:
            self._step("the flight recorder", partial(self._recorder.overhear_tick, snapshot), None)
        self._step("silent jobs", lambda: self._silent_jobs.tick(self._state.silent_jobs()), None)
        self._throttled = self._step("throttles", lambda: self._throttles.update(snapshot), {})
        signals = self._step("signals of the node", lambda: self._signals.update(snapshot), None)
        self._step("signals to hooks", lambda: self._socket_server.tell(self._throttled, signals), None)
        self._step("the page and its history", self._routes.tick, None)
        now_ns, glance_ns = self._clock.monotonic_ns(), self._sampler.glance_cpu_ns()
        self._step("the CPU budget", lambda: self._glances.update(time.process_time_ns(), glance_ns, now_ns), None)
        self._step("the heap", lambda: self._heap.tick(now_ns), None)

    def _should_read_everything(self, tick: SamplingTick) -> bool:
        """Return whether this tick also reads the collectors that no peak and no chart needs each time.

        It does if a reader is expected to look at the result, and for each of the node's signals.
        """
        is_short = self._config.period_seconds <= RARE_READ_SECONDS / SIGNAL_TICKS
        return (
            not is_short
            or (tick.number + 1) % SIGNAL_TICKS == 0
            or self._exporter.is_awaited(tick.started_ns)
            or self._routes.is_awaited()
        )

    def _step(self, name: str, act: Callable[[], T], otherwise: T) -> T:
        return self._faults.contain(ContainedPart.TICK, name, act, otherwise)

    def _report_hang(self, job: SilentJob, verdict: HangVerdict) -> None:
        self._state.add_verdict(job.key, verdict)
        if self._recorder is not None:
            self._recorder.record_rank(verdict, msgspec.msgpack.encode(verdict), job.ranks[0].hello, job.uid)

    def _make_recorder(self, config: DaemonConfig) -> FlightRecorder:
        limits = RecorderLimits(
            window_ns=int(config.recorder_seconds * NS_PER_SECOND),
            memory_bytes=config.recorder_bytes,
            folder=config.recordings,
            folder_bytes=config.recordings_bytes,
            stall_ns=int(config.stall_seconds * NS_PER_SECOND),
        )
        return FlightRecorder(
            self._clock,
            limits,
            host=platform.node(),
            version=self._version,
            around=self._around,
            paces=lambda: self._state.paces(),
        )

    def _around(self) -> Around:
        """Return the known ranks and their identity, for a recording."""
        jobs = self._state.jobs()
        served = job_samples(jobs, self._identity.residence)
        identity = [s for s in served if isinstance(s, Sample) and s.metric == "pacecar_rank_info"]
        return Around(tuple(rank.hello for job in jobs for rank in job.ranks), tuple(identity))

    def _members(self) -> list[CgroupMember]:
        return [
            CgroupMember(str(pid), "rank", hello.job, str(hello.rank), hello.launch)
            for pid, hello in self._socket_server.members()
        ]


def _version() -> str:
    # Not pacecar.__version__: the root package also leads to the hook, and the daemon must not depend on that.
    try:
        return metadata.version("pacecar")
    except metadata.PackageNotFoundError:
        return "not installed"
