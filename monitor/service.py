"""Runs the daemon as a service: handles signals, changed configuration, stalled threads and systemd, on one thread.

    SIGTERM, SIGINT   stop
    SIGHUP            read the configuration again
    a file changed    the same; a few stat(2) each LOOK_SECONDS
    a thread stalls   end with a status that a supervisor takes for a failure

A reload happens beside the running threads: shared objects are replaced in one assignment, so no scrape waits or is
refused.  `reload` defines what may change; other changes are logged and wait for a restart.

Left out: logging.config, and daemonizing, which systemd or a container do.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from pacecar.clock import Clock, SystemClock
from pacecar.config import ConfigError, DaemonConfig, OtlpConfig
from pacecar.formatting.plain_text import PlainFormatter

from .daemon import Daemon
from .heap_trimming import HeapTrimming
from .http.security.web_config import WebConfigError
from .reload import ReloadWatch, changes
from .systemd import Notifier, inherited_socket
from .watched_threads import StallConfirmation

__all__ = ["EXIT_STALLED", "run"]

EXIT_STALLED = 70
"""Exit status after a thread ended or hung: EX_SOFTWARE of sysexits.h."""

CLOSE_SECONDS = 10.0
"""The longest time that a stalled daemon takes to close what it can."""

LOOK_SECONDS = 1.0
"""Seconds between two checks of the files.  A change is applied after two equal checks."""

OPEN_FILES = 4096
"""Enough for 512 hooks, 256 clients and the daemon itself; the usual soft limit is 1024, the hard one far above."""

SWITCH_SECONDS = 0.0005
"""How long a thread may keep the interpreter from waiting ones.  With Python's 5 ms a scrape during a tick waits up to
5 ms for each busy thread; lower values brought nothing when measured."""

_log = logging.getLogger(__name__)


class _Settings:
    """The configuration of a running daemon, and how it is read again."""

    def __init__(
        self, daemon: Daemon, load: Callable[[], DaemonConfig] | None, file: Path | None, clock: Clock
    ) -> None:
        self._daemon = daemon
        self._load = load
        self._clock = clock
        self._wanted = daemon.config
        files = () if load is None or file is None else (file,)
        self._watches = {
            "configuration": ReloadWatch(self._read, lambda: files, (ConfigError, WebConfigError)),
            "web configuration": ReloadWatch(self._secure, lambda: daemon.security.files, (WebConfigError,)),
        }

    @property
    def is_good(self) -> bool:
        """Whether all files were valid when last read."""
        return all(watch.is_good for watch in self._watches.values())

    def due(self) -> list[str]:
        """Return what changed and has settled."""
        return [name for name, watch in self._watches.items() if watch.is_due()]  # each must check, so no any()

    def reload(self, names: list[str] | None = None) -> None:
        """Read `names` again; None means all."""
        done = [
            watch.reload(f"the {name} could not be reloaded")
            for name, watch in self._watches.items()
            if names is None or name in names
        ]
        self._daemon.reloads.record(has_succeeded=all(done), is_good=self.is_good, wall_ns=self._clock.wall_ns())

    def _read(self) -> None:
        if self._load is None:
            return
        wanted = self._load()
        changed = changes(self._wanted, wanted)
        self._daemon.adopt(wanted)
        if "log_level" in changed.live:
            logging.getLogger().setLevel(wanted.log_level.upper())
        self._wanted = wanted
        if changed.live:
            _log.info("reloaded: %s", ", ".join(f"{n} = {getattr(wanted, n)!r}" for n in changed.live))
        waiting = changes(self._daemon.config, wanted).restart
        if waiting:
            _log.warning("changed, but applied only after a restart: %s", ", ".join(waiting))

    def _secure(self) -> None:
        self._daemon.secure(self._daemon.config)
        if self._daemon.security.files:
            _log.info("reloaded: the web configuration %s", self._daemon.security.files[0])


def run(
    config: DaemonConfig,
    *,
    otlp: OtlpConfig | None = None,
    load: Callable[[], DaemonConfig] | None = None,
    file: Path | None = None,
) -> int:
    """Run the daemon until SIGTERM or SIGINT and return the exit code; raises DaemonError if it cannot start.

    It also ends, with EXIT_STALLED, if a thread that it needs to serve new data has ended or hangs; its supervisor
    (systemd, Kubernetes) then restarts it.  The process may end inside this call if that thread cannot be closed.
    `load` reads the configuration again, from `file` and elsewhere; without it there is nothing to reload.
    """
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[to_stderr])
    sys.setswitchinterval(SWITCH_SECONDS)
    _allow_files()
    # Not an Event: Python runs a handler in the main thread, which would be waiting for the Event.  The byte in the
    # pipe is written at once, by whichever thread receives the signal.
    signalled, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def on_signal(number: int, frame: FrameType | None) -> None:
        """Do nothing: the byte in the pipe is enough."""

    HeapTrimming().settle()  # affects the whole process, so not in Daemon, which may be part of another program
    daemon, notifier = Daemon(config, otlp=otlp, listener=inherited_socket()), Notifier()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    woken_before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    stall: str | None = None
    try:
        daemon.start()
        settings = _Settings(daemon, load, file, SystemClock())
        scheme = "http" if daemon.security.context is None else "https"
        _log.info("serving %s://%s:%d/metrics, hooks connect at %s", scheme, config.host, daemon.port, daemon.socket)
        notifier.ready(f"serving {config.host}:{daemon.port}")
        stall = _serve(daemon, settings, notifier, signalled)
        if stall is not None:
            _log.critical("%s: the daemon ends with status %d so that its supervisor restarts it", stall, EXIT_STALLED)
        _log.info("stopping")
        notifier.stopping()
    finally:
        if stall is None:
            daemon.close()
        else:
            _close_or_exit(daemon)
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken_before)
        os.close(signalled)
        os.close(wake)
    return 0 if stall is None else EXIT_STALLED


def _close_or_exit(daemon: Daemon) -> None:
    """Close a daemon that has a hung thread; if that hangs too, end the process."""
    closing = threading.Thread(target=daemon.close, name="pacecar-close", daemon=True)
    closing.start()
    closing.join(CLOSE_SECONDS)
    if closing.is_alive():
        _log.critical("the daemon cannot be closed: the process ends at once")
        logging.shutdown()
        os._exit(EXIT_STALLED)


def _serve(daemon: Daemon, settings: _Settings, notifier: Notifier, signalled: int) -> str | None:
    """Handle signals, files, threads and the watchdog; return None when told to stop, else what stalls."""
    confirmation = StallConfirmation()
    clock = SystemClock()
    pause = min(LOOK_SECONDS, notifier.interval_seconds or LOOK_SECONDS)
    poll = select.poll()
    poll.register(signalled, select.POLLIN)
    looked_ns = clock.monotonic_ns()
    while True:
        numbers = os.read(signalled, 4096) if poll.poll(1000 * pause) else b""
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            return None
        if signal.SIGHUP in numbers:
            _reload(daemon, settings, notifier, None)
        elif clock.monotonic_ns() - looked_ns >= 0.9e9 * LOOK_SECONDS:
            looked_ns = clock.monotonic_ns()
            stall = confirmation.update(daemon.stalls())
            if stall is not None:
                return stall
            due = settings.due()
            if due:
                _reload(daemon, settings, notifier, due)
        notifier.feed(clock.monotonic_ns(), is_alive=daemon.is_healthy())


def _reload(daemon: Daemon, settings: _Settings, notifier: Notifier, names: list[str] | None) -> None:
    notifier.reloading()
    try:
        settings.reload(names)
    except Exception:  # noqa: BLE001  a bug in a reload must not end the daemon
        _log.exception("the reload failed; the previous settings stay in force")
    status = "" if settings.is_good else "; its configuration cannot be used, see the log"
    notifier.ready(f"serving {daemon.config.host}:{daemon.port}{status}")


def _allow_files() -> None:
    """Raise the soft limit of open files as far as needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
