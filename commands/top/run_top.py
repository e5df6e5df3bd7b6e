"""Runs `pacecar top` in a terminal: reads keys and new documents, writes whole screens, and restores the terminal.

Each screen is one write of all its lines, without clearing first, to avoid flicker.  It is drawn after a key, a resize
or a new document.  The terminal is also restored when the command is stopped (Ctrl-Z) or killed by a signal that can be
caught.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from .daemon_poller import Fetched, Fetcher, address, fetch
from .key_decoder import Keys
from .screen import ScreenView, compose, everything, on_key

if TYPE_CHECKING:
    from pacecar.records.status_document import StatusDocument

__all__ = ["run_live", "run_once"]

KEY_WAIT_SECONDS = 0.1
"""How long an Escape waits for the rest of a sequence, and the longest delay of a new document."""

PIPED_WIDTH = 120
"""Columns without a terminal."""

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""Alternate screen, no cursor, no wrapping at the edge (xterm's control sequences); and back."""


def run_once(where: str) -> None:
    """Print everything once, at any length; raises FetchError."""
    console = Console(highlight=False)
    width = console.width if console.is_terminal else PIPED_WIDTH
    for line in everything(fetch(address(where)), width, console):
        line.rstrip()
        console.print(line, soft_wrap=True)


def run_live(where: str, period_seconds: float) -> None:
    """Show the daemon at `where` until q is pressed; raises FetchError for an invalid address."""
    fetcher = Fetcher(address(where), period_seconds)
    fetcher.start()
    try:
        with _terminal():
            _loop(fetcher, address(where))
    finally:
        fetcher.close()


@contextlib.contextmanager
def _terminal() -> Iterator[None]:
    """Set up the terminal, and restore it at the end in any case."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def set_up() -> None:
        tty.setcbreak(descriptor)
        _write(ENTER)

    def restore() -> None:
        _write(LEAVE)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def stop(number: int, frame: object) -> None:
        restore()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)

    def resume(number: int, frame: object) -> None:
        signal.signal(signal.SIGTSTP, stop)
        set_up()

    handlers = {signal.SIGTERM: leave, signal.SIGHUP: leave, signal.SIGTSTP: stop, signal.SIGCONT: resume}
    kept = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    set_up()
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        restore()
        for number, handler in kept.items():
            signal.signal(number, handler)


def _loop(fetcher: Fetcher, where: str) -> None:
    keys, view, shown = Keys(), ScreenView(), Fetched()
    drawn: object = None
    while True:
        latest = fetcher.latest
        if not view.is_held or shown.document is None:
            shown = latest
        size = os.get_terminal_size()
        now = (shown, latest.error, size, view.__dict__.copy())
        if now != drawn:
            _draw(shown.document, view, size, latest, where)
            drawn = now
        ready, _, _ = select.select([sys.stdin], [], [], KEY_WAIT_SECONDS)
        data = os.read(sys.stdin.fileno(), 256) if ready else b""
        if ready and not data:
            return  # the terminal is gone
        for key in keys.decode(data) if data else keys.quiet():
            if key == "redraw":
                drawn = None
            elif not on_key(key, view, shown.document):
                return


def _draw(
    document: StatusDocument | None, view: ScreenView, size: os.terminal_size, latest: Fetched, where: str
) -> None:
    console = Console(file=StringIO(), width=size.columns, height=size.lines, force_terminal=True, highlight=False)
    if document is None:
        lines = [Text(f"pacecar top  {where}"), Text(latest.error or "waiting for the daemon"), Text("q quits")]
        lines += [Text()] * (size.lines - len(lines))
    else:
        note = latest.error
        if note is not None and latest.at_seconds is not None:
            note = f"{time.monotonic() - latest.at_seconds:.0f} s old: {note}"
        lines = compose(document, view, size.columns, size.lines, console, note)
    screen = []
    for line in lines[: size.lines]:
        with console.capture() as captured:
            console.print(line, end="", no_wrap=True, overflow="crop", crop=True)
        # After a full line the cursor is still on the last cell, which clearing to the end would erase.
        screen.append(captured.get() + ("\x1b[K" if line.cell_len < size.columns else ""))
    _write("\x1b[H" + "\r\n".join(screen))


def _write(text: str) -> None:
    with contextlib.suppress(BlockingIOError):
        sys.stdout.write(text)
        sys.stdout.flush()
