"""The queries that Grafana sends for a dashboard: its variables first, then every target with their values.

Pure but for the answers about variables: a dashboard's JSON and a `labels` function in, expressions out.  It follows
Grafana's own rules: a variable with several values becomes an alternation `(a|b)`, "All" becomes `allValue` where there
is one, and values are escaped for a regular expression (Grafana's documentation, "Variable syntax" and "Prometheus
template variables").  Left out: ad-hoc filters and variable formats that no dashboard of ours uses; those fail loudly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Question", "built_in", "choices", "filled_in", "panels_of", "questions", "resolve"]

Labels = Callable[[str, str | None], list[str]]
"""(label, selector) -> the existing values."""

RANGE_SECONDS = 60

_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?::(\w+))?\}|\[\[(\w+)\]\]")
_LABEL_VALUES = re.compile(r"^label_values\((?:(?P<selector>.+),)?\s*(?P<label>\w+)\s*\)$", re.DOTALL)
_QUERY_RESULT = re.compile(r"^query_result\(.*?(?P<selector>pacecar_\w+\{[^}]*\}).*\)$", re.DOTALL)
_OF_RESULT = re.compile(r'^/(?P<label>\w+)="\(\[\^"\]\*\)"/$')
_SPECIAL = re.compile(r"[\\^$*+?.()|{}\[\]]")


@dataclass(frozen=True, slots=True)
class Question:
    """One expression; `where` is dashboard, panel and reference, `name` leaves out the reference."""

    dashboard: str
    panel: str
    reference: str
    expression: str
    is_instant: bool

    @property
    def name(self) -> str:
        return f"{self.dashboard}: {self.panel}"

    def __str__(self) -> str:
        return f"{self.name} [{self.reference}] {self.expression}"


def built_in(scrape_seconds: int, range_seconds: int) -> dict[str, str]:
    """Return Grafana's own variables; a rate's window is at least four scrapes, and one more for a late one."""
    return {
        "__rate_interval": f"{5 * scrape_seconds}s",
        "__interval": f"{scrape_seconds}s",
        "__interval_ms": f"{scrape_seconds}000",
        "__range": f"{range_seconds}s",
        "__range_s": f"{range_seconds}",
        "__range_ms": f"{range_seconds}000",
    }


def filled_in(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with each variable's value in its place; KeyError for one that has none."""

    def value(found: re.Match[str]) -> str:
        assert found[3] in (None, "regex", "raw", "pipe"), f"nothing is known of the format in {found[0]}"
        return values[found[1] or found[2] or found[4]]

    return _VARIABLE.sub(value, text)


def resolve(
    dashboard: Mapping[str, Any], labels: Labels, chosen: Mapping[str, str], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return variable -> text, for what a user gets who chooses `chosen` and leaves the rest as it comes.

    `base` are Grafana's own variables; without them they are those of a scrape a second and a minute that is shown.

    Raises:
        LookupError: a variable offers nothing to choose from, or not what was chosen.
    """
    values = dict(base or built_in(1, RANGE_SECONDS))
    for variable in dashboard["templating"]["list"]:
        name = variable["name"]
        if variable["type"] == "datasource":
            values[name] = "prometheus"
        elif variable["type"] == "query":
            values[name] = _chosen(variable, choices(variable, labels, values), chosen.get(name))
        else:
            raise AssertionError(f"variable {name}: nothing is known of the type {variable['type']}")
    return values


def choices(variable: Mapping[str, Any], labels: Labels, values: Mapping[str, str]) -> list[str]:
    """Return what the variable offers, those before it being `values`."""
    query = variable["query"]
    text = filled_in(query if isinstance(query, str) else query["query"], values)
    asked, result = _LABEL_VALUES.match(text), _QUERY_RESULT.match(text)
    if result is not None:  # and the regular expression takes one label out of it
        label = _OF_RESULT.match(variable["regex"])
        assert label, f"variable {variable['name']}: nothing is known of {variable['regex']}"
        return sorted(labels(label["label"], result["selector"]))
    assert asked, f"variable {variable['name']}: nothing is known of {text}"
    return sorted(labels(asked["label"], asked["selector"]))


def _chosen(variable: Mapping[str, Any], options: list[str], wish: str | None) -> str:
    name, is_regex = variable["name"], bool(variable.get("multi") or variable.get("includeAll"))
    if wish is not None:
        if wish not in options:
            raise LookupError(f"variable {name} does not offer {wish!r} but {options}")
        return _escaped(wish) if is_regex else wish
    if variable.get("includeAll") and variable.get("allValue"):
        return str(variable["allValue"])
    if not options:
        raise LookupError(f"variable {name} has nothing to choose from: {variable['query']}")
    if variable.get("includeAll"):
        return f"({'|'.join(_escaped(option) for option in options)})"
    return _escaped(options[0]) if is_regex else options[0]


def _escaped(value: str) -> str:
    """Escape for a regular expression inside a quoted string of PromQL: each backslash twice."""
    return _SPECIAL.sub(lambda found: f"\\\\{found[0]}", value)


def panels_of(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every panel that draws something, including those in collapsed rows."""
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels", ())


def questions(dashboard: Mapping[str, Any], values: Mapping[str, str]) -> list[Question]:
    """Return every question that the dashboard asks, annotations last."""
    title = dashboard["title"]
    asked = [
        Question(title, panel["title"], target["refId"], filled_in(target["expr"], values), bool(target.get("instant")))
        for panel in panels_of(dashboard)
        for target in panel.get("targets", ())
    ]
    marks = [
        Question(title, f"annotation {mark['name']}", "-", filled_in(mark["expr"], values), False)
        for mark in dashboard.get("annotations", {}).get("list", ())
        if "expr" in mark
    ]
    return [*asked, *marks]
