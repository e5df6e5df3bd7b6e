"""A method of one object is replaced, and neither the object nor another of its class shows it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from pacecar.adapters.method_descriptors import MethodReplacement, replace_method
from tests.kit.ours import OURS


class Base:
    def step(self) -> str:
        return "base"

    def save(self) -> str:
        return "saved"


class Trainer(Base):
    def step(self) -> str:
        return f"trainer, {super().step()}"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = vars(Trainer)["step"]
    yield
    assert vars(Trainer)["step"] is before
    assert "save" not in vars(Trainer)


def replaced(owner: Any, name: str) -> MethodReplacement:
    found = replace_method(owner, name, lambda: "ours")
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "own"), [("step", "trainer, base"), ("save", "saved")])
def test_the_object_has_ours_all_others_theirs_and_nothing_is_on_the_object(name: str, own: str) -> None:
    mine, other = Trainer(), Trainer()
    before = pickle.dumps(mine)
    replacement = replaced(mine, name)
    assert getattr(mine, name)() == "ours"
    assert (getattr(other, name)(), getattr(Trainer, name)(other)) == (own, own)
    for twin in (copy.deepcopy(mine), copy.copy(mine), pickle.loads(pickle.dumps(mine))):
        assert getattr(twin, name)() == own
    assert (pickle.dumps(mine), vars(mine)) == (before, {})
    replacement.remove()
    assert getattr(mine, name)() == own


def test_what_the_script_sets_on_the_object_comes_first_and_stays() -> None:
    early, late = Trainer(), Trainer()
    early.step = lambda: "script"  # type: ignore[method-assign]
    assert replace_method(early, "step", lambda: "ours") is None
    replacement = replaced(late, "step")
    late.step = lambda: "script"  # type: ignore[method-assign]
    assert late.step() == "script"
    replacement.remove()
    assert (early.step(), late.step()) == ("script", "script")


def test_two_objects_of_a_class_have_theirs_and_go_in_any_order() -> None:
    first, second = Trainer(), Trainer()
    one = replaced(first, "step")
    two = replaced(second, "step")
    one.remove()
    assert (first.step(), second.step()) == ("trainer, base", "ours")
    two.remove()
    assert second.step() == "trainer, base"
    Trainer.step = (
        vars(Trainer)["step"]._replaced if isinstance(vars(Trainer)["step"], MethodReplacement) else Trainer.step
    )  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["step", "save"])
def test_a_class_that_is_pickled_by_its_parts_needs_nothing_of_us(name: str) -> None:
    kind = type("OfMain", (Base,), {"step": lambda self: "trainer, base", "__module__": "__main__"})
    mine = kind()
    own = getattr(mine, name)()
    replacement = replaced(mine, name)
    data = cloudpickle.dumps(mine)
    replacement.remove()
    assert not OURS.search(data)
    assert getattr(cloudpickle.loads(data), name)() == own
