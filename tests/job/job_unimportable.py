"""Jobs of ten steps, each in a fork of this process, in which some module cannot be imported from some moment on.

    python job_unimportable.py CASES [here]      CASES: a JSON list of [way, module, moment]

Writes a JSON list of [exit code, losses, stderr] of each; with `here` the first runs in this process, to python's own
end, and writes its losses.  `way` is "plain" (without pacecar), "attach", "off" (with
tune="off"), "held" (a script that took `attach` out of pacecar at once) or "run" (as under `pacecar run`).  `module` is
a name, "*" for all of pacecar and msgspec, or "=*" for an upgrade: they are there, and have nothing in them.  With "?"
all are there, and it is said on stderr which of them are asked for from that moment on.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
STARTUP = str(ROOT / "job" / "startup")
MOMENTS = ("begun", "imported", "attached", "stepped", "window", "measured", "closing", "exiting")
"""`window` is inside a forward of the model while torch's profiler takes an exact window of it."""
OURS = ("pacecar", "msgspec")
NOT_IN_A_JOB = (("job", "startup"),)
STEPS = 10


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """From now on `module` does not exist; it is not in `sys.modules` either."""

    def __init__(self, module: str) -> None:
        self.is_upgrade = module.startswith("=")
        self.module = module.removeprefix("=")
        for name in [name for name in sys.modules if self.means(name)]:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def means(self, name: str) -> bool:
        return name.partition(".")[0] in OURS if self.module == "*" else name == self.module

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not self.means(name):
            return None
        if self.is_upgrade:
            return importlib.machinery.ModuleSpec(name, self, is_package=name not in modules())
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def exec_module(self, module: object) -> None:
        """Leave it empty."""


def goes(module: str) -> None:
    """Make `module` missing from now on; "?": all exist, and imports of them are recorded."""
    if module == "?":
        Asked()
    else:
        Missing(module)


class Asked:
    """Records which modules of pacecar are imported from now on, including loaded ones; prints them on stderr."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.imports, self.import_module = builtins.__import__, importlib.import_module
        builtins.__import__ = self.asked  # type: ignore[assignment]
        importlib.import_module = self.asked_by_name
        atexit.register(self.say)

    def asked(self, name: str, *given: Any, **more: Any) -> Any:
        if name.partition(".")[0] in OURS:
            self.names |= {name} | {f"{name}.{part}" for part in (given[2] if len(given) > 2 else None) or ()}
        return self.imports(name, *given, **more)

    def asked_by_name(self, name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] in OURS:
            self.names.add(name)
        return self.import_module(name, package)

    def say(self) -> None:
        sys.stderr.write(f"asked for {sorted(self.names)}\n")


class Moment(nn.Module):
    """A place in a model; `at("window")` while torch's profiler is on."""

    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.autograd._profiler_enabled():
            self.at("window")
        return x


class Job:
    """One job; `module` goes at `moment`."""

    def __init__(self, way: str, module: str, moment: str) -> None:
        self.way, self.module, self.moment = way, module, moment
        self.has_come = moment == "never"

    def at(self, moment: str) -> None:
        """Announce the moment, once or more often."""
        if moment == self.moment and not self.has_come:
            self.has_come = True
            goes(self.module)

    def run(self) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), Moment(self.at), nn.GELU(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        pacer: Any = None
        self.at("begun")
        if self.way == "run":
            os.environ["PACECAR_RUN"] = "1"
            sys.path.insert(0, STARTUP)
            import pacecar_startup

            pacecar_startup.begin()
            self.at("imported")
        elif self.way != "plain":
            import pacecar

            attach = pacecar.attach if self.way == "held" else None
            self.at("imported")
            pacer = (attach or pacecar.attach)(
                model, optimizer, tune="off" if self.way == "off" else "exact", micro_batch=4,
            )  # fmt: skip
        self.at("attached")
        losses = list(self.train(model, optimizer, pacer))
        self.at("closing")
        if pacer is not None and self.moment != "exiting":
            pacer.close()
        self.at("exiting")
        assert self.has_come, f"there was no moment {self.moment!r}"
        return losses

    def train(self, model: nn.Module, optimizer: torch.optim.Optimizer, pacer: Any) -> Iterator[str]:
        draw = torch.Generator().manual_seed(1)
        batches: Any = [
            (torch.randn(8, 16, generator=draw), torch.randint(0, 4, (8,), generator=draw)) for _ in range(STEPS)
        ]
        for step, batch in enumerate(batches if pacer is None else pacer.batches(pacer.data(batches))):
            # Without pacecar in two micro-batches, too: the losses are compared to the bit.
            halves: Sequence[Any] = (tuple(part[:4] for part in batch), tuple(part[4:] for part in batch))
            cuts = halves if pacer is None or pacer.inert_because else pacer.microbatches(batch)
            for inputs, targets in cuts:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                if pacer is None:
                    (loss * 0.5).backward()
                else:
                    pacer.backward(loss, weight=0.5)
                yield float(loss.detach()).hex()
            optimizer.step()
            optimizer.zero_grad()
            if pacer is not None:
                pacer.count(samples=8)
                assert isinstance(pacer.knobs.epoch, int)
                assert isinstance(pacer.advice, tuple)
                assert list(pacer.microbatches(batch))
                with pacer.checkpoint(), pacer.waiting():
                    pass
            if step == 0:
                self.at("stepped")
            if step == 4:
                self.at("measured")


def forked_job(job: Callable[[], list[str]], name: str) -> tuple[int, str, str]:
    """Run `job` in a child, to the end of its exit handlers; return its exit code, its losses and its stderr."""
    return forked_jobs([job], name)[0]


def forked_jobs(jobs: Sequence[Callable[[], list[str]]], name: str) -> list[tuple[int, str, str]]:
    """Run each of `jobs` as `forked_job` does, all at the same time."""
    with contextlib.ExitStack() as files:
        started = []
        for job in jobs:
            out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            started.append((start_forked(job, out.fileno(), err.fileno()), out, err))
        ended = []
        for pid, *streams in started:
            _, status = os.waitpid(pid, 0)
            for stream in streams:
                stream.seek(0)
            ended.append((os.waitstatus_to_exitcode(status), streams[0].read(), streams[1].read()))
    sys.stderr.write(f"{name}\n")  # for who waits
    return ended


def start_forked(job: Callable[[], list[str]], out: int, err: int) -> int:
    """Return the process id of a child that runs `job` and writes to the files `out` and `err`."""
    pid = os.fork()
    if pid == 0:
        os.dup2(out, 1)
        os.dup2(err, 2)
        code = 1
        try:
            print(*job())  # noqa: T201
            code = 0
        except BaseException:  # noqa: BLE001  as python's own end
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return pid


DAEMONS: list[socket.socket] = []


def listening() -> str:
    """Start a daemon that accepts everything and sends nothing, and have each step measured; return its folder."""
    place = tempfile.mkdtemp()
    os.environ["PACECAR_HOOK_SOCKET"] = f"{place}/socket"
    os.environ |= {"PACECAR_HOOK_OVERHEAD_BUDGET": "1.0", "PACECAR_HOOK_WINDOW_WARMUP_STEPS": "2"}
    daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    daemon.bind(os.environ["PACECAR_HOOK_SOCKET"])
    daemon.listen(16)
    DAEMONS.append(daemon)
    return place


def remember_code() -> None:
    """Compile all of pacecar once, not again in each fork."""
    compiled = importlib.machinery.SourceFileLoader.get_code
    known: dict[str, Any] = {}

    def get_code(loader: Any, name: str) -> Any:
        if name not in known:
            known[name] = compiled(loader, name)
        return known[name]

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    for name, path in modules().items():
        get_code(importlib.machinery.SourceFileLoader(name, str(path)), name)


def modules() -> dict[str, Path]:
    """Return all modules of pacecar by name, without packages: without one of those, all in it are missing."""
    found = {}
    for room in ("pacecar", "adapters", "controller", "job", "profiler"):
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_link = any(parent.is_symlink() for parent in path.parents)  # a room, which is looked at by itself
            if path.stem == "__init__" or is_link or parts[:2] in NOT_IN_A_JOB:
                continue
            found[".".join(parts if room == "pacecar" else ("pacecar", *parts))] = path
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = listening()
    if sys.argv[2:] == ["here"]:
        atexit.register(shutil.rmtree, place)
        print(*Job(*json.loads(sys.argv[1])[0]).run())  # noqa: T201
        sys.exit()
    remember_code()
    try:
        answers = [forked_job(Job(*case).run, str(case)) for case in json.loads(sys.argv[1])]
    finally:
        shutil.rmtree(place)
    sys.stdout.write(json.dumps(answers))
