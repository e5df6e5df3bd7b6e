"""An adapter whose shared part cannot be imported trains on as without it, and logs one line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from world import settings, stand_ins

from tests.job.job_unimportable import modules
from tests.job.test_unimportable import WITHOUT_PACECAR
from tests.kit.forking_python import forking_python

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("job_unloaded.py")

NAMED = {
    f"pacecar.adapters.{name}"
    for name in ("transformers", "lightning", "accelerate", "deepspeed", "ray", "loggers", "guarded_imports")
} | {"pacecar.job.handle"}
"""What the script's own imports need: without it they fail, as where pacecar is not installed."""


def check(missing: list[str]) -> dict[str, dict[str, str]]:
    """Train with each adapter without each of `missing`; return each one's output."""
    done = subprocess.run(
        [forking_python(modules=WITHOUT_PACECAR), str(JOB), json.dumps(["", "-", *missing])],
        capture_output=True, text=True, timeout=1500, check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")}
        | {**settings(), "PYTHONPATH": stand_ins(), "PACECAR_HOOK_SOCKET": "/nobody"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain, measured, *without = json.loads(done.stdout)
    for adapter, (code, losses, errors) in plain.items():
        assert (code, len(losses.split()), errors) == (0, 10, ""), (adapter, errors)
    said: dict[str, dict[str, str]] = {}
    for module, answers in zip(["-", *missing], [measured, *without], strict=True):
        for adapter, (code, losses, errors) in answers.items():
            lines = [line for line in errors.splitlines() if "cannot write to the daemon" not in line]
            assert (code, losses) == (0, plain[adapter][1]), (adapter, module, errors)
            assert len(lines) <= 1, (adapter, module, errors)
            said.setdefault(module, {})[adapter] = "".join(lines)
    return said


def test_without_a_part_of_it_every_adapter_trains_on_and_says_so_once() -> None:
    said = check(["pacecar.job.attach", "msgspec"])
    assert set(said.pop("-").values()) == {""}, "nothing to say where all is there"
    for module, adapters in said.items():
        line = (
            f"pacecar does not measure this job: could not be loaded: ModuleNotFoundError: No module named {module!r}"
        )
        assert set(adapters.values()) == {line}


@pytest.mark.full
def test_without_any_module_every_adapter_trains_on() -> None:
    check([name for name in (*modules(), "msgspec", "numpy") if name not in NAMED])
