"""Jobs of ten steps, each in a fork of this process, in which some module cannot be imported from some moment on.

    python job_unimportable.py CASES      CASES: a JSON list of [way, module, moment]

Writes a JSON list of [exit code, losses, stderr] of each.  `way` is "plain" (without pacecar), "attach", "off" (with
tune="off"), "held" (a script that took `attach` out of pacecar at once) or "run" (as under `pacecar run`).  `module` is
a name, "*" for all of pacecar and msgspec, or "=*" for an upgrade: they are there, and have nothing in them.
"""

from __future__ import annotations

import atexit
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

ROOT = Path(__file__).resolve().parents[1]
STARTUP = str(ROOT / "pacecar" / "startup")
MOMENTS = ("begun", "imported", "attached", "stepped", "measured", "closing", "exiting")
OURS = ("pacecar", "msgspec")
STEPS = 10


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """From now on there is no `module`; it is not in `sys.modules` either."""

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


class Job:
    """One job; `module` goes at `moment`."""

    def __init__(self, way: str, module: str, moment: str) -> None:
        self.way, self.module, self.moment = way, module, moment

    def at(self, moment: str) -> None:
        if moment == self.moment:
            Missing(self.module)

    def run(self) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
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
                socket=os.environ["SILENT"], window_warmup_steps=2, overhead_budget=1.0,
            )  # fmt: skip
        self.at("attached")
        losses = list(self.train(model, optimizer, pacer))
        self.at("closing")
        if pacer is not None and self.moment != "exiting":
            pacer.close()
        self.at("exiting")
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
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
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
        _, status = os.waitpid(pid, 0)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    sys.stderr.write(f"{name}\n")  # for who waits
    return os.waitstatus_to_exitcode(status), texts[0], texts[1]


def remember_code() -> None:
    """Compile all of pacecar once, and not in each fork again."""
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
    """Return all modules of pacecar by name, packages left out: without one of these all in it are missing."""
    found = {}
    for folder in ("", "adapters", "controller", "controller/baselines", "profiler", "profiler/crew", "zerocode"):
        for path in sorted((ROOT / "pacecar" / folder).glob("*.py")):
            parts = ["pacecar", *folder.split("/")] if folder else ["pacecar"]
            if path.stem != "__init__":
                found[".".join([*parts, path.stem])] = path
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    remember_code()
    place = tempfile.mkdtemp()
    os.environ["SILENT"] = os.environ["PACECAR_HOOK_SOCKET"] = f"{place}/socket"
    daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # takes what comes, and says nothing
    daemon.bind(os.environ["SILENT"])
    daemon.listen(16)
    try:
        answers = [forked_job(Job(*case).run, str(case)) for case in json.loads(sys.argv[1])]
    finally:
        shutil.rmtree(place)
    sys.stdout.write(json.dumps(answers))
