"""A shared set-up that fails is tried once more and then told, not waited for by every test that needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = "from tests.kit.patience import pytest_fixture_setup\n"

TESTS = """
import pathlib
import pytest

LOG = pathlib.Path(__file__).with_name("log")

def note(name):
    with LOG.open("a") as log:
        log.write(name + "\\n")

@pytest.fixture(scope="module", params=["good", "bad"])
def ranks(request):
    note(request.param)
    if request.param == "bad":
        pytest.fail("not within 300 s")

@pytest.fixture(scope="module")
def recovers():
    note("recovers")
    assert LOG.read_text().count("recovers") == 2

@pytest.fixture(scope="module")
def absent():
    note("absent")
    pytest.skip("no such machine")

@pytest.fixture
def own():
    note("own")
    raise RuntimeError("each time")

@pytest.mark.parametrize("number", range(4))
def test_shared(ranks, number): pass

def test_recovers(recovers): pass

@pytest.mark.parametrize("number", range(3))
def test_absent(absent, number): pass

@pytest.mark.parametrize("number", range(3))
def test_own(own, number): pass
"""


def test_a_shared_fixture_is_set_up_twice_at_most_and_the_others_as_ever(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeconftest(CONFTEST)
    path = pytester.makepyfile(TESTS)
    done = pytester.runpytest_subprocess("--reruns", "1", "-p", "no:xdist", "-p", "no:cacheprovider")
    done.assert_outcomes(passed=4 + 1, errors=4 + 3, skipped=3)
    log = path.with_name("log").read_text().split()
    assert {name: log.count(name) for name in set(log)} == {"good": 1, "bad": 2, "recovers": 2, "absent": 1, "own": 6}
    done.stdout.fnmatch_lines(["*ranks failed 2 times and is not tried again; at last: Failed: not within 300 s*"])
