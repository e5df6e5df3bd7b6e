"""What should people look at?  Dashboards and alert rules that cannot drift from the metrics: one list feeds all.

    queries        PromQL through the catalog, in the scope of a dashboard        pure
    palette        which colour means what                                        pure
    panels         a panel is a title, help, queries, a unit and a word for "nothing"
    ranking        a table of jobs, nodes or GPUs, the worst first
    frame          variables, links and annotations, the same on all dashboards
    fleet, node, job, tuning, itself      the five dashboards
    node_..., pace, ledgers, vitals, whatif      their rows
    omitted        metrics that are drawn nowhere, and why
    recording, alerts, alerts_..., rules  what Prometheus computes and when it calls somebody
    tidy           what of grafanalib's output may reach Grafana                  pure
    render         all of it as files
    reference      docs/metrics.md, from the same catalog                         pure
    push           the committed dashboards into a running Grafana

grafanalib and pyyaml are an extra and are imported only by what draws; `export` and `push` hand out the committed files
without them.  Left out: contact points and routes of alerts, which belong to whoever is called.
"""

from __future__ import annotations

import importlib.util
from importlib.resources import files
from pathlib import Path

from pacecar.safe_files import FOLDER_MODE, replacing

__all__ = ["DashboardsError", "committed", "export", "generate"]

_RUNBOOK = "runbook: docs/runbook.md#"


class DashboardsError(RuntimeError):
    """The dashboards cannot be drawn here; the message says what to do."""


def generate(out_dir: Path) -> list[Path]:
    """Write every dashboard and rule from the catalog into `out_dir` and return the files, replaced if they exist.

    Raises:
        DashboardsError: grafanalib or pyyaml is not installed.
        OSError: `out_dir` cannot be written.
    """
    missing = [name for name in ("grafanalib", "yaml") if importlib.util.find_spec(name) is None]
    if missing:
        raise DashboardsError(
            f"{missing[0]} is not installed: pip install 'pacecar[dashboards]', or export the dashboards that come with"
            " pacecar, which need nothing"
        )
    from .render import render

    return _write(out_dir, render())


def committed(suffix: str = "") -> dict[str, str]:
    """Return name -> text of the files that came with this version of pacecar and end in `suffix`."""
    generated = files("pacecar.dashboards") / "generated"
    names = sorted(item.name for item in generated.iterdir() if item.name.endswith((".json", ".yml")))
    return {name: (generated / name).read_text(encoding="utf-8") for name in names if name.endswith(suffix)}


def export(out_dir: Path, *, runbook_url: str | None = None) -> list[Path]:
    """Copy dashboards and rules that came with this version of pacecar into `out_dir` and return the files.

    With `runbook_url` alerts lead to that page instead of to the file in pacecar's sources.

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
        # Not 0600: they are the same in every installation, and Prometheus and Grafana read them as other users.
        with replacing(path, mode=0o644, keep_mode=True, make_mode=FOLDER_MODE) as stream:
            stream.write(text.encode())
        written.append(path)
    return written
