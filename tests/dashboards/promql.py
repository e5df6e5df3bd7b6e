"""Evaluates expressions in Prometheus' own engine, promtool, over series that a test invents."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

VARIABLES = {
    "$__rate_interval": "1m", "$__range": "5m", "$__interval_ms": "15000", "$__interval": "15s",
    "$job": "train", "$launch": "3f2a9c01d4e5b678", "$rank": ".+",
    "$node": "node1:9850", "$cluster": ".*", "$gpu": ".*",
}  # fmt: skip
"""Grafana's variables and what these tests put in their place."""


def filled_in(expression: str) -> str:
    """Return `expression` as Grafana would send it."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression, f"a variable without a value in {expression}"
    return expression


def check(
    promtool: Path,
    folder: Path,
    *questions: dict[str, object],
    series: Sequence[dict[str, str]],
    rules: Sequence[Path] = (),
    interval: str = "15s",
) -> None:
    """Let promtool answer `questions` (its promql_expr_test) over `series`; AssertionError with what it found.

    `series` have a value, and `rules` are evaluated, every `interval`.
    """
    test = {
        "rule_files": [str(path) for path in rules],
        "evaluation_interval": interval,
        "tests": [{"interval": interval, "input_series": list(series), "promql_expr_test": list(questions)}],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps(test), encoding="utf-8")
    ran = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
