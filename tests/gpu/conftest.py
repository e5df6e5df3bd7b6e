"""What the parts of `make gpu` share: the device, and where what they find goes.

A part is a module of tests.  The first line of a test's docstring is the claim that it tries, and what it measures goes
through `figures`; `python -m tests.gpu` runs the parts and writes both to a page.

Without a GPU the same tests run against stand-ins (`device` is the CPU, the driver is `tests.monitor.nvml_standin`), so
that no minute on a GPU is lost to a slip; what only a GPU can decide is asserted on one only (`is_real`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.page import FINDINGS

__all__ = [
    "Figures",
    "device",
    "figures",
    "is_real",
    "pytest_collection_modifyitems",
    "pytest_runtest_makereport",
]

Figures = Callable[..., None]
_SAID = pytest.StashKey[dict[str, Any]]()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def is_real(device: torch.device) -> bool:
    """Return whether there is a GPU."""
    return device.type == "cuda"


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Return a function that keeps what a test measured: `figures(start_ms=1.3, kernels=100)`.

    Numbers and short text stand on the page; lists and whatever else JSON can hold stay in the file of findings.  What
    was kept stays, whatever fails later.
    """
    said = request.node.stash.setdefault(_SAID, {})
    return lambda **values: said.update(values)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU try one case of each test: the others are the same code, and left to `make test-all`."""
    if torch.cuda.is_available() or FINDINGS in os.environ:
        return
    seen: set[object] = set()
    for item in items:
        function = getattr(item, "function", None)
        if item.get_closest_marker("gpu") is None:
            continue
        if function in seen:
            item.add_marker(pytest.mark.full)
        seen.add(function)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Add what the test found to the file of findings."""
    report = yield
    path = os.environ.get(FINDINGS)
    if path is None or not (report.when == "call" or (report.when == "setup" and report.outcome != "passed")):
        return report
    detail = ""
    if report.outcome == "skipped":
        detail = str(call.excinfo.value) if call.excinfo else ""
    elif report.outcome == "failed":
        detail = str(call.excinfo.value if call.excinfo else report.longrepr)[:2000]
    documentation = (getattr(item, "function", None) and item.function.__doc__) or item.name
    finding = {
        "part": item.path.stem.removeprefix("test_").removesuffix("_on_gpu"),
        "test": item.name,
        "claim": documentation.strip().splitlines()[0],
        "outcome": {"passed": "held", "failed": "did not hold", "skipped": "not run"}[report.outcome],
        "detail": detail,
        "seconds": round(call.duration, 2),
        "figures": item.stash.get(_SAID, {}),
    }
    with Path(path).open("a") as file:
        file.write(json.dumps(finding, default=str) + "\n")
    return report
