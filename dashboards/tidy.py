"""Removes unset fields, and fields that Grafana no longer reads, from grafanalib's output.  Pure.

grafanalib writes every field that it knows: nulls for unset ones, `thresholds.steps: ""`, on which Grafana crashes, and
fields of Grafana 5 beside those of Grafana 10.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["dumps", "tidy"]

LEGACY = frozenset(
    {
        # Dashboard: Grafana 5 and older, or set by the importer.
        "__inputs", "gnetId", "hideControls", "rows", "sharedCrosshair", "style", "time_options",
        # Panel.
        "cacheTimeout", "error", "height", "hideTimeOverride", "minSpan", "span", "editable",
        # Query and variable.
        "intervalFactor", "metric", "step", "useTags", "tagsQuery", "tagValuesQuery",
        "auto", "auto_min", "auto_count",
    }
)  # fmt: skip
"""Fields that Grafana >= 9 does not read."""

TABLE_LEGACY = frozenset({"color", "columns", "fontSize", "mappings", "styles"})
"""Fields of a table in Grafana 6; today they are in fieldConfig."""

ROW_FIELDS = frozenset({"collapsed", "gridPos", "id", "panels", "title", "type"})
"""All fields of a row; grafanalib adds those of a panel."""


def tidy(value: Any) -> Any:  # noqa: ANN401  a JSON value is of any type
    """Return `value` without nulls, empty strings and legacy fields, at every depth.

    The base of thresholds keeps its null, which means minus infinity.  Empty lists and objects, which mean "none", and
    zero and false stay.
    """
    if isinstance(value, dict):
        if value.keys() == {"color", "value"}:
            return value  # a threshold, where null is minus infinity
        kept = {key: item for key, item in value.items() if key not in LEGACY}
        if value.get("type") == "row":
            kept = {key: item for key, item in kept.items() if key in ROW_FIELDS}
        if value.get("type") == "table" and "fieldConfig" in value:
            kept = {key: item for key, item in kept.items() if key not in TABLE_LEGACY}
            kept["fieldConfig"] = _without_display_mode(value["fieldConfig"])
        if "expr" in value:
            kept.pop("query", None)  # the same text, for another kind of data source
        return {key: tidy(item) for key, item in kept.items() if item is not None and item != ""}
    if isinstance(value, list):
        return [tidy(item) for item in value if item is not None]
    return value


def _without_display_mode(config: dict[str, Any]) -> dict[str, Any]:
    """Return the field configuration of a table without `displayMode`, replaced by `cellOptions` in Grafana 9.4."""
    defaults = dict(config.get("defaults", {}))
    defaults["custom"] = {key: item for key, item in defaults.get("custom", {}).items() if key != "displayMode"}
    return config | {"defaults": defaults}


def dumps(value: Any) -> str:  # noqa: ANN401  a JSON value is of any type
    """Return `value` as reproducible JSON: sorted keys, two spaces, a final newline."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
