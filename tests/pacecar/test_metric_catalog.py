"""The catalog follows the naming rules."""

from __future__ import annotations

import re

import pytest

from pacecar.metrics.catalog import CATALOG, Metric, MetricKind, MetricSubject, MetricUnit, by_name


def test_names_keep_the_law() -> None:
    def is_lawful(metric: Metric) -> bool:
        return (
            re.fullmatch(r"pacecar_[a-z][a-z0-9]*(_[a-z0-9]+)+", metric.name) is not None
            and metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
            and metric.name.removesuffix("_total").endswith(metric.unit.outside)
        )

    assert len(CATALOG) > 100
    assert [metric.name for metric in CATALOG if not is_lawful(metric)] == []
    other_units = re.compile(r"_(ms|us|ns|kb|mb|mib|gib|percent|milliseconds)(_|$)")
    assert [metric.name for metric in CATALOG if other_units.search(metric.name)] == [], "base units only"


def test_help_is_one_sentence() -> None:
    def is_sentence(text: str) -> bool:
        return (text[0].isupper() or text[0].isdigit()) and text.endswith(".") and "\n" not in text

    assert [metric.name for metric in CATALOG if not is_sentence(metric.help)] == []


def test_labels_are_few_and_lawful() -> None:
    own = {"le", "quantile", "instance", "__name__"}
    pairs = [(metric.name, label) for metric in CATALOG for label in metric.labels]
    assert len(set(pairs)) == len(pairs), "no label twice"
    assert [pair for pair in pairs if not re.fullmatch(r"[a-z][a-z0-9_]*", pair[1])] == []
    assert [pair for pair in pairs if pair[1] in own] == [], "Prometheus' own"
    many = [
        metric.name
        for metric in CATALOG
        if len(metric.labels) - ("launch" in metric.labels) > 3 and not metric.name.endswith("_info")
    ]
    assert many == [], "constant facts belong into an _info series"


def test_a_name_is_listed_once_and_found_by_it() -> None:
    assert len({metric.name for metric in CATALOG}) == len(CATALOG)
    for metric in CATALOG:
        assert by_name(metric.name) is metric
    with pytest.raises(KeyError):
        by_name("pacecar_no_such_thing")


def test_no_name_is_taken_twice_once_the_exporter_drops_total() -> None:
    families = [metric.name.removesuffix("_total") for metric in CATALOG]
    assert len(set(families)) == len(families)


@pytest.mark.parametrize(
    ("name", "kind", "unit", "text"),
    [
        ("step_seconds", MetricKind.GAUGE, MetricUnit.NANOSECONDS, "No prefix."),
        ("pacecar_steps", MetricKind.COUNTER, MetricUnit.COUNT, "A counter without total."),
        ("pacecar_step_seconds_total", MetricKind.GAUGE, MetricUnit.NANOSECONDS, "A gauge with total."),
        ("pacecar_step_ms", MetricKind.GAUGE, MetricUnit.NANOSECONDS, "Not the base unit."),
        ("pacecar_step_seconds", MetricKind.GAUGE, MetricUnit.NANOSECONDS, "No full stop"),
    ],
)
def test_an_unlawful_metric_cannot_be_made(name: str, kind: MetricKind, unit: MetricUnit, text: str) -> None:
    with pytest.raises(AssertionError):
        Metric(name, kind, unit, MetricSubject.JOB, (), text)


def test_inside_values_become_base_units() -> None:
    assert MetricUnit.NANOSECONDS.scale * 1_500_000_000 == pytest.approx(1.5)
    assert MetricUnit.MILLIWATTS.scale * 250_000 == pytest.approx(250.0)
    assert MetricUnit.MEGAHERTZ.scale * 1980 == pytest.approx(1.98e9)
    assert MetricUnit.BYTES.scale == MetricUnit.RATIO.scale == MetricUnit.COUNT.scale == 1.0
