"""A training process does not import the daemon's modules, nor the daemon torch."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

MODULES_MAX = 12
"""What `import pacecar` loads besides itself is typing's four; a dataclass would bring ten."""

DAEMON_ONLY = {"prometheus_client", "pynvml", "psutil", "click", "grafanalib"}


def loaded_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after `statement`."""
    code = f"{statement}\nimport sys\nsys.stdout.write(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_import_pacecar_loads_nothing_but_itself() -> None:
    assert not loaded_after("import pacecar") & (DAEMON_ONLY | {"torch", "numpy", "msgspec"})


@pytest.mark.slow
def test_attach_does_not_load_the_daemons_libraries() -> None:
    # torch.cuda imports pynvml where it is installed
    statement = "import sys, torch\nby_itself = set(sys.modules)\nimport pacecar\nattach = pacecar.attach\n"
    loaded = loaded_after(statement + "[sys.modules.pop(name) for name in by_itself - {'sys', 'torch'}]")
    assert {"torch", "pacecar", "msgspec"} <= loaded
    assert not loaded & DAEMON_ONLY


@pytest.mark.slow
def test_the_daemon_does_not_load_torch() -> None:
    loaded = loaded_after("import pacecar.commands.main, pacecar.monitor.daemon")
    assert {"click", "prometheus_client", "msgspec"} <= loaded
    assert not loaded & {"torch", "numpy", "grafanalib", "rich"}


@pytest.mark.slow
def test_help_loads_no_room() -> None:
    statement = (
        "import pacecar.commands.main\nfrom click.testing import CliRunner\n"
        "CliRunner().invoke(pacecar.commands.main.cli, ['--help'])"
    )
    loaded = loaded_after(statement)
    assert not loaded & {"torch", "numpy", "msgspec", "prometheus_client", "psutil", "pynvml", "rich"}


def test_import_pacecar_loads_few_modules() -> None:
    """The cost of the import without a clock: few modules."""
    count = "import sys\nbare = len(sys.modules)\nimport pacecar\nprint(len(sys.modules) - bare)"
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, timeout=120, check=True)
    assert 0 < int(done.stdout) <= MODULES_MAX


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.slow
def test_import_pacecar_costs_under_20_ms() -> None:
    """The interpreter counts its own time for each import, so a loaded machine disturbs the median little."""
    costs_us = []
    for _ in range(7):
        command = [sys.executable, "-X", "importtime", "-c", "import pacecar"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        (line,) = [line for line in done.stderr.splitlines() if line.endswith("| pacecar")]
        costs_us.append(int(line.split("|")[1]))
    assert statistics.median(costs_us) < 20_000
