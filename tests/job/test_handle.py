"""The pacer that `attach` returns if the rest of pacecar cannot be imported: the script trains as without it."""

from __future__ import annotations

import importlib.abc
import logging
import subprocess
import sys
from typing import Any

import pytest

import pacecar
from tests.job.test_attach import make_job, plain_losses, train


class Broken(importlib.abc.MetaPathFinder):
    """A module that raises while it is imported, like one that uses what the next torch lacks."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.name:
            raise self.error


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["pacecar.job.attach", "pacecar.job.wiring", "pacecar.profiler.utilization.flop_counter", "msgspec"]
)
@pytest.mark.parametrize("error", [AttributeError("no attribute '__func__'"), ImportError("no such thing")])
def test_whatever_cannot_be_imported_the_pacer_is_inert_and_says_why_once(
    module: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in list(sys.modules):
        if name.startswith("pacecar.") and name.count(".") == 1 and hasattr(pacecar, name.partition(".")[2]):
            # Put back afterwards: importing it again makes it the package's attribute.
            monkeypatch.setattr(pacecar, name.partition(".")[2], sys.modules[name])
        if name.startswith("pacecar.") or name.partition(".")[0] == module:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(module, error), *sys.meta_path])
    model, optimizer = make_job()
    with caplog.at_level(logging.INFO, logger="pacecar"):
        pacer = pacecar.attach(model, optimizer, micro_batch=8, tune="exact")
    assert not pacer.is_active
    assert pacer.inert_because == f"could not be loaded: {type(error).__name__}: {error}"
    assert [record.getMessage() for record in caplog.records] == [
        f"pacecar does not measure this job: {pacer.inert_because}"
    ]
    with pacer:
        assert train(pacer, model, optimizer) == plain_losses()


@pytest.mark.slow
def test_what_breaks_while_the_parts_are_made_is_said_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pacecar.job import attach as attaching

    def breaks(*_: object) -> None:
        raise AttributeError("DistributedDataParallel has no such thing any more")

    for name in ("find_ddp", "load_config", "JobRun"):
        caplog.clear()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="pacecar"):
            patch.setattr(attaching, name, breaks)
            model, optimizer = make_job()
            pacer = pacecar.attach(model, optimizer)
        assert "no such thing any more" in str(pacer.inert_because)
        assert len(caplog.records) == 1
        assert train(pacer, model, optimizer) == plain_losses()
        pacer.close()


SCRIPT = """
import sys
for name in ("torch", "msgspec", "numpy"):
    sys.modules[name] = None
import pacecar

class Loss:
    def __init__(self, scale=1.0): self.scale, self.did = scale, []
    def __mul__(self, other): return Loss(self.scale * other)
    def backward(self, **kwargs): done.append((self.scale, kwargs))
    def detach(self): return "detached"

class Scaler:
    def scale(self, loss): return loss * 8

done = []
with pacecar.attach(object(), object(), tune="exact", micro_batch=4, scaler=Scaler(), no_such_option=1) as pacer:
    assert isinstance(pacer, pacecar.Pacer) and not pacer.is_active and pacer.advice == ()
    assert "ImportError" in pacer.inert_because or "ModuleNotFoundError" in pacer.inert_because
    loader = [1, 2]
    assert pacer.data(loader) is loader and list(pacer.batches(loader)) == loader
    assert list(pacer.microbatches(7, tokens=1, count=2, trim=True)) == [7]
    pacer.backward(Loss(), retain_graph=True)
    pacer.backward(Loss(), weight=0.5)
    assert pacer.train_batch(7, lambda batch: Loss(batch)) == "detached"
    pacer.loss(1.0)
    pacer.count(samples=1, tokens=2)
    pacer.resume(3)
    with pacer.checkpoint(), pacer.waiting():
        pass
assert done == [(8.0, {"retain_graph": True}), (4.0, {}), (56, {})], done
pacer.close()
assert "torch" not in {name for name, module in sys.modules.items() if module is not None}
"""


def test_the_pacer_needs_the_standard_library_alone() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("pacecar does not measure this job") == 1
