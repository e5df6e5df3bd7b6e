"""What do the dashboards look like?  Drawn with Grafana's own components in Chromium, from a live Prometheus.

    make seen                                           all of them into docs/images
    make seen SEEN_FLAGS="--only job --open --out /tmp" one, its collapsed rows open, elsewhere

This is no Grafana server: nothing can be clicked, and the bar chart and the state timeline, which Grafana keeps to
itself, are drawn after its options.  Everything else is @grafana/ui and @grafana/data of the version whose types the
dashboards are checked against: fields, overrides, transformations, units, thresholds, colours.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.dashboards.cluster import BUSY_JOB, HOT_NODE, SCRAPE_SECONDS, cluster
from tests.dashboards.questions import built_in, choices, filled_in, resolve
from tests.dashboards.store import Prometheus
from tests.kit.browser import chromium
from tests.kit.tools import TOOLS

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "dashboards" / "generated"
SOURCE = Path(__file__).parent / "grafana" / "seen"
BUILD = TOOLS.parent / "grafana" / "seen"
PATIENCE_MS = 60_000
CHOSEN = {
    "job": {"job": BUSY_JOB},
    "tuning": {"job": BUSY_JOB},
    "node": {"node": HOT_NODE},
}
"""Dashboard -> what its reader chose; all of the rest."""


def build() -> Path:
    """Bundle the page with vite; return the folder to serve."""
    for name in ("index.html", "vite.config.ts", "tsconfig.json"):
        shutil.copy(SOURCE / name, BUILD)
    shutil.copytree(SOURCE / "src", BUILD / "src", dirs_exist_ok=True)
    environ = os.environ | {"PATH": f"{TOOLS}:{os.environ['PATH']}"}
    bundle = ["node_modules/.bin/vite", "build", "--logLevel", "error"]
    for command in (["node_modules/.bin/tsc", "-p", "."], bundle):
        subprocess.run(command, cwd=BUILD, env=environ, check=True)
    # Where Grafana's components look for its icons, and its styles for its font.
    icons = BUILD / "node_modules" / "@grafana" / "ui" / "dist" / "public" / "img"
    shutil.copytree(icons, BUILD / "dist" / "public" / "build" / "img", dirs_exist_ok=True)
    fonts = BUILD / "dist" / "public" / "fonts" / "inter"
    fonts.mkdir(parents=True, exist_ok=True)
    for weight, name in ((400, "Regular"), (500, "Medium")):
        font = BUILD / "node_modules" / "@fontsource" / "inter" / "files" / f"inter-latin-{weight}-normal.woff2"
        shutil.copy(font, fonts / f"Inter-{name}.woff2")
    return BUILD / "dist"


def scene(dashboard: Mapping[str, Any], store: Prometheus, wishes: Mapping[str, str], **given: Any) -> dict[str, Any]:
    """Return what the page draws: the dashboard with its variables filled in, and when to look."""
    to = int(time.time()) // SCRAPE_SECONDS * SCRAPE_SECONDS
    seconds, is_open = given.pop("seconds"), given.pop("is_open")
    values = resolve(dashboard, store.label_values, wishes, built_in(SCRAPE_SECONDS, seconds))
    shown = [
        {
            "label": v.get("label", v["name"]),
            "text": wishes.get(v["name"], "All" if v.get("includeAll") else "prometheus"),
        }
        for v in dashboard["templating"]["list"]
        if not v.get("hide")
    ]
    many = {
        v["name"]: choices(v, store.label_values, values)
        for v in dashboard["templating"]["list"]
        if v["type"] == "query"
    }
    panels = laid_out(dashboard["panels"], values, many, is_open=is_open)
    for number, panel in enumerate(panels):
        panel["id"] = number
    marks = [
        mark | {"expr": filled_in(mark["expr"], values)} for mark in dashboard["annotations"]["list"] if "expr" in mark
    ]
    return given | {
        "title": dashboard["title"], "description": dashboard.get("description", ""), "panels": panels,
        "annotations": marks, "variables": shown, "links": [link["title"] for link in dashboard.get("links", [])],
        "prometheus": store.url, "from": to - seconds, "to": to, "step": SCRAPE_SECONDS,
    }  # fmt: skip


def laid_out(
    panels: Sequence[dict[str, Any]], values: Mapping[str, str], many: Mapping[str, list[str]], *, is_open: bool
) -> list[dict[str, Any]]:
    """Return the panels that are seen, repeated ones several times, rows opened where `is_open`."""
    placed: list[dict[str, Any]] = []
    lower = 0
    for panel in panels:
        top = copy.deepcopy(panel)
        top["gridPos"]["y"] += lower
        inside = top.pop("panels", [])
        placed += _several(top, values, many)
        if top["type"] == "row" and top.get("collapsed") and is_open and inside:
            top["collapsed"] = False
            shift = top["gridPos"]["y"] + 1 - min(one["gridPos"]["y"] for one in inside)
            opened = []
            for one in inside:
                one["gridPos"]["y"] += shift
                opened += _several(one, values, many)
            placed += opened
            lower += max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in opened) - top["gridPos"]["y"] - 1
    return placed


def _several(
    panel: dict[str, Any], values: Mapping[str, str], many: Mapping[str, list[str]]
) -> Iterator[dict[str, Any]]:
    """Yield the panel, once for each value of the variable that it is repeated for, as Grafana places them."""
    repeated = panel.get("repeat")
    if not repeated:
        yield _with(panel, values)
        return
    wide = max(24 // len(many[repeated]), 24 // panel.get("maxPerRow", 4))
    for number, value in enumerate(many[repeated]):
        one = copy.deepcopy(panel)
        line, column = divmod(number, 24 // wide)
        one["gridPos"] |= {"x": column * wide, "w": wide, "y": one["gridPos"]["y"] + line * one["gridPos"]["h"]}
        yield _with(one, {**values, repeated: value})


def _with(panel: dict[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    panel["title"] = filled_in(panel.get("title", ""), values)
    for target in panel.get("targets", ()):
        target["expr"] = filled_in(target["expr"], values)
    return panel


class Quiet(SimpleHTTPRequestHandler):
    """Serves the page without a line on the terminal for each file."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve `folder` on the loopback; yield the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def draw(opened: Any, address: str, file: Path, *, width: int, height: int | None) -> list[str]:
    """Write a picture of the page; return what is wrong with it: complaints of the browser, panels without data."""
    complaints: list[str] = []
    page = opened.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("response", lambda answer: complaints.append(f"{answer.status} {answer.url}") if not answer.ok else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.wait_for_function("document.body.dataset.open === '0'")
    page.wait_for_timeout(1500)  # plots are drawn a frame or two after they have their data
    whole = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": width, "height": min(whole, height or whole)})
    page.wait_for_timeout(1000)
    page.screenshot(path=str(file))
    empty = page.eval_on_selector_all("[data-empty=true]", "all => all.map(one => one.dataset.panel)")
    page.close()
    return [*complaints, *(f"no data: {title}" for title in empty)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--only", action="append", help="a dashboard's file name without its ending")
    arguments.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    arguments.add_argument("--theme", choices=["light", "dark"], default="dark")
    arguments.add_argument("--seconds", type=int, default=240, help="how long the cluster runs before it is looked at")
    arguments.add_argument("--open", action="store_true", help="open the rows that are collapsed")
    arguments.add_argument("--width", type=int, default=1440)
    arguments.add_argument("--height", type=int, help="cut the picture off there")
    given = arguments.parse_args()
    names = given.only or sorted(path.stem for path in GENERATED.glob("*.json"))
    given.out.mkdir(parents=True, exist_ok=True)
    pages = build()
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), sorted(GENERATED.glob("*.rules.yml"))) as store:
        time.sleep(given.seconds)
        with served(pages) as address, chromium() as opened:
            for name in names:
                dashboard = json.loads((GENERATED / f"{name}.json").read_text(encoding="utf-8"))
                document = scene(dashboard, store, CHOSEN.get(name, {}), seconds=given.seconds, is_open=given.open,
                                 theme=given.theme)  # fmt: skip
                (pages / "scene.json").write_text(json.dumps(document), encoding="utf-8")
                file = given.out / f"dashboard-{name}.png"
                wrong = draw(opened, address, file, width=given.width, height=given.height)
                print(file, *wrong, sep="\n  ")  # noqa: T201  a tool's answer


if __name__ == "__main__":
    main()
