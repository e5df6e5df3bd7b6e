"""Generates the Grafana dashboards and Prometheus rules from the metric catalog, and exports the committed ones.

    queries        PromQL through the catalog, in the scope of a dashboard        pure
    palette        the meaning of colours                                         pure
    panels         panels with title, help, queries, unit and a text for "no data"
    frame          variables, links and annotations of all dashboards
    boards/        the five dashboards (fleet, node, job, tuning, itself), their rows and ranked tables
    rules/         recording and alert rules
    tidy           removes unused and harmful fields from grafanalib's output     pure
    render         all dashboards and rules as text
    kubernetes     the same for the Prometheus operator and for Grafana's sidecar
    reference      docs/metrics.md, from the same catalog                         pure
    push           sends dashboards to a running Grafana

grafanalib and pyyaml are an extra and are imported only to draw; `export` and `push` use the committed files.  Left
out: contact points and routes of alerts, which depend on the receivers.
"""

from __future__ import annotations

import importlib.util
from importlib.resources import files
from pathlib import Path

from pacecar.safe_files import FOLDER_MODE, replacing

__all__ = ["DashboardsError", "committed", "export", "generate"]

_RUNBOOK = "runbook: docs/runbook.md#"


class DashboardsError(RuntimeError):
    """The dashboards cannot be generated here; the message says what to do."""


def generate(out_dir: Path) -> list[Path]:
    """Write all dashboards and rules from the catalog to `out_dir`, replacing files, and return the paths.

    Raises:
        DashboardsError: grafanalib or pyyaml is not installed.
        OSError: `out_dir` cannot be written.
    """
    missing = [name for name in ("grafanalib", "yaml") if importlib.util.find_spec(name) is None]
    if missing:
        raise DashboardsError(
            f"{missing[0]} is not installed: pip install 'pacecar[dashboards]', or export the dashboards that come with"
            " pacecar"
        )
    from .render import render

    return _write(out_dir, render())


def committed(suffix: str = "") -> dict[str, str]:
    """Return name -> text of the files in this version of pacecar whose names end in `suffix`."""
    generated = files("pacecar.dashboards") / "generated"
    names = sorted(item.name for item in generated.iterdir() if item.name.endswith((".json", ".yml")))
    return {name: (generated / name).read_text(encoding="utf-8") for name in names if name.endswith(suffix)}


def export(out_dir: Path, *, runbook_url: str | None = None) -> list[Path]:
    """Copy the dashboards and rules of this version of pacecar to `out_dir` and return the paths.

    With `runbook_url`, alerts link to that page instead of the file in pacecar's sources.

    Raises:
        OSError: `out_dir` cannot be written.
    """
    texts = committed()
    if runbook_url is not None:
        texts = {name: text.replace(_RUNBOOK, f"runbook_url: {runbook_url}#") for name, text in texts.items()}
    return _write(out_dir, texts)


def _write(out_dir: Path, texts: dict[str, str]) -> list[Path]:
    written = []
    for name, text in texts.items():
        path = out_dir / name
        # Not 0600, because Prometheus and Grafana read them as other users.
        with replacing(path, mode=0o644, keep_mode=True, make_mode=FOLDER_MODE) as stream:
            stream.write(text.encode())
        written.append(path)
    return written
