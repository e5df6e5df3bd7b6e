"""The tests' queries equal Grafana's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dashboards.questions import built_in, filled_in, questions, resolve


def variable(name: str, query: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "query", "query": query, **more}


def dashboard(*variables: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"title": "d", "templating": {"list": list(variables)}, "panels": [], **more}


SERIES = {"rank": ["1", "0", "10"], "training_job": ["a.b", "c"]}


def labels(label: str, selector: str | None) -> list[str]:
    return SERIES.get(label, [])


def test_a_variable_is_filled_in_however_it_is_written():
    values = {"job": "a", "jobs": "b"}
    assert filled_in("$job ${job} [[job]] $jobs ${jobs:regex}", values) == "a a a b b"
    with pytest.raises(KeyError, match="rank"):
        filled_in("x{rank=~'$rank'}", values)


def test_all_is_its_own_value_or_each_of_them():
    rank = variable("rank", "label_values(m, rank)", includeAll=True, multi=True)
    assert resolve(dashboard(rank), labels, {})["rank"] == "(0|1|10)"
    assert resolve(dashboard(rank | {"allValue": ".*"}), labels, {})["rank"] == ".*"
    assert resolve(dashboard(rank | {"allValue": ".*"}), lambda *_: [], {})["rank"] == ".*"
    with pytest.raises(LookupError, match="nothing to choose from"):
        resolve(dashboard(rank), lambda *_: [], {})


def test_a_choice_is_escaped_where_a_regular_expression_is_expected():
    one = variable("job", "label_values(training_job)")
    assert resolve(dashboard(one), labels, {"job": "a.b"})["job"] == "a.b"
    assert resolve(dashboard(one | {"multi": True}), labels, {"job": "a.b"})["job"] == r"a\\.b"
    with pytest.raises(LookupError, match=r"does not offer 'd' but \['a.b', 'c'\]"):
        resolve(dashboard(one), labels, {"job": "d"})


def test_a_variable_sees_those_before_it():
    seen = []

    def ask(label: str, selector: str | None) -> list[str]:
        seen.append((label, selector))
        return ["x"]

    resolve(
        dashboard(variable("job", "label_values(m, job)"), variable("rank", 'label_values(m{j="$job"}, rank)')), ask, {}
    )
    assert seen == [("job", "m"), ("rank", 'm{j="x"}')]


def test_panels_in_folded_rows_and_annotations_are_asked_too():
    target = {"refId": "A", "expr": "m[$__range]", "instant": True}
    folded = {"type": "row", "panels": [{"type": "table", "title": "in", "targets": [target]}]}
    marks = {"list": [{"name": "marks", "expr": "n"}, {"name": "Grafana's own"}]}
    found = questions(dashboard(annotations=marks) | {"panels": [folded]}, built_in(15, 3600))
    assert [(q.panel, q.expression, q.is_instant) for q in found] == [
        ("in", "m[3600s]", True),
        ("annotation marks", "n", False),
    ]
