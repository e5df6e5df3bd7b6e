"""How long is a set-up waited for that many tests share, and that fails?  Twice in all, not twice for each of them.

On CI a failed test is run once more, and pytest-rerunfailures sets its fixtures up anew for that: right for the test
that met a disturbed machine.  But ranks that hang for minutes, under a fixture of seven tests, would be waited for
fourteen times, and the whole suite would be ended before anybody reads why.  So a fixture of a module or of wider scope
that failed ATTEMPTS_MAX times fails at once from then on, with what it said.

Left out: fixtures of single tests.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

__all__ = ["ATTEMPTS_MAX", "pytest_fixture_setup"]

ATTEMPTS_MAX = 2

_failures: dict[tuple[str, str, str], list[str]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Set a shared fixture up, unless it has failed too often already."""
    if fixturedef.scope == "function":
        return (yield)
    key = request.node.nodeid, fixturedef.argname, repr(getattr(request, "param", None))
    failed = _failures.setdefault(key, [])
    if len(failed) >= ATTEMPTS_MAX:
        pytest.fail(f"{fixturedef.argname} failed {ATTEMPTS_MAX} times and is not tried again; at last: {failed[-1]}")
    try:
        return (yield)
    except pytest.skip.Exception:
        raise
    except (Exception, pytest.fail.Exception) as failure:
        failed.append(f"{type(failure).__name__}: {failure}")
        raise
