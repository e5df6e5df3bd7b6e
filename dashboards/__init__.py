"""What should people look at?  Grafana dashboards that cannot drift from the metrics, because both come from one list.

    queries     PromQL through the catalog               pure
    palette     which colour means what                  pure
    panels      a panel is a title, help, queries, a unit and a word for "nothing"
    job, node   the dashboard of one job: pace, ledger, tuner, host, GPU, pacecar itself
    tidy        what of grafanalib's output may reach Grafana           pure
    reference   docs/metrics.md, from the same catalog   pure

grafanalib is an extra and is imported only by what draws; `export` hands out the committed JSON without it.
Left out: talking to a Grafana server, and alert rules.
"""

from __future__ import annotations

import importlib.util
from importlib.resources import files
from pathlib import Path

__all__ = ["DashboardsError", "export", "generate"]


class DashboardsError(RuntimeError):
    """The dashboards cannot be drawn here; the message says what to do."""


def generate(out_dir: Path) -> list[Path]:
    """Draw every dashboard from the catalog into `out_dir` and return the files, which are replaced if they exist.

    Raises:
        DashboardsError: grafanalib is not installed.
        OSError: `out_dir` cannot be written.
    """
    if importlib.util.find_spec("grafanalib") is None:
        raise DashboardsError(
            "grafanalib is not installed: pip install 'pacecar[dashboards]', or export the dashboards that come with"
            " pacecar, which need nothing"
        )
    from pacecar.dashboards.render import render

    return _write(out_dir, render())


def export(out_dir: Path) -> list[Path]:
    """Copy the dashboards that came with this version of pacecar into `out_dir` and return the files.

    Raises:
        OSError: `out_dir` cannot be written.
    """
    generated = files("pacecar.dashboards") / "generated"
    found = {item.name: item.read_text(encoding="utf-8") for item in generated.iterdir() if item.name.endswith(".json")}
    return _write(out_dir, dict(sorted(found.items())))


def _write(out_dir: Path, texts: dict[str, str]) -> list[Path]:
    out_dir.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in texts.items():
        path = out_dir / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
