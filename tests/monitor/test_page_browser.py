"""The page in a real browser: what a user clicks, types and sees, in Chromium by playwright.

`make tools` fetches Chromium; $PACECAR_CHROMIUM names another.
"""

import json
import platform
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from pacecar.clock import SystemClock
from pacecar.config import DaemonConfig
from pacecar.monitor.daemon import Daemon
from pacecar.monitor.gpu.known_gpus import KnownGpu, known_gpus_path
from pacecar.records import Ok, Sample
from tests.kit.axe import violations
from tests.kit.browser import chromium
from tests.kit.net import scrape
from tests.kit.waiting import until
from tests.monitor.showcase import ShowCollector, ShowJob, show_daemon

pytestmark = pytest.mark.slow

PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    daemon = show_daemon(tmp_path_factory.mktemp("node") / "s", period_seconds=0.5)
    daemon.start()
    jobs = [ShowJob(daemon.socket), ShowJob(daemon.socket, name="dlrm <b>x</b>", ranks=2, pace_ms=35, is_tuned=False)]
    stop = threading.Event()

    def train():
        while not stop.wait(0.4):
            for job in jobs:
                job.step()

    thread = threading.Thread(target=train)
    thread.start()
    yield daemon
    stop.set()
    thread.join()
    for job in jobs:
        job.close()
    daemon.close()


class SickCollector(ShowCollector):
    """Invented GPUs: one is degraded, one failed, one lost, and one cut into MIG instances."""

    name = "gpu"  # so that the inventory of GPUs takes it for theirs

    def collect(self):
        lost = [Sample("pacecar_gpu_up", ("2",), 0), Sample("pacecar_gpu_down", ("2", "lost"), 1)]
        kept = [one for one in super().collect().samples if one.labels[:1] != ("2",)]
        return Ok((
            *kept, *lost,
            Sample("pacecar_gpu_pcie_width", ("1",), 4), Sample("pacecar_gpu_pcie_width_max", ("1",), 16),
            Sample("pacecar_gpu_row_remap_failed", ("4",), 1),
            Sample("pacecar_gpu_mps_processes", ("5",), 4), Sample("pacecar_gpu_mig_enabled", ("6",), 1),
            Sample("pacecar_gpu_instance_info", ("6", "2", "0", "MIG-a", "3g.71gb"), 1),
            Sample("pacecar_gpu_instance_memory_size_bytes", ("6", "2", "0"), 71 << 30),
            Sample("pacecar_gpu_instance_memory_used_bytes", ("6", "2", "0"), 7 << 30),
            Sample("pacecar_gpu_instance_processes", ("6", "2", "0"), 3),
        ))  # fmt: skip


@pytest.fixture(scope="module")
def sick_node(tmp_path_factory):
    """A daemon that knows GPU 2 from before, and one that is not there any more."""
    folder = tmp_path_factory.mktemp("sick")
    recordings = folder / "recordings"
    recordings.mkdir(mode=0o700)
    known = [
        KnownGpu("GPU-0002", "NVIDIA H200", "0000:02:00.0", "2", time.time_ns()),
        KnownGpu("GPU-gone", "NVIDIA <b>H200</b>", "0000:5d:00.0", "8", time.time_ns()),
    ]
    known_gpus_path(recordings, platform.node()).write_bytes(msgspec.json.encode({"version": 1, "gpus": known}))
    config = DaemonConfig(port=0, socket=str(folder / "s"), period_seconds=0.5, recordings=str(recordings))
    daemon = Daemon(config, clock=SystemClock(), collectors=[SickCollector()])
    daemon.start()
    job = ShowJob(daemon.socket)
    job.step()
    yield daemon
    job.close()
    daemon.close()


@pytest.fixture
def opened(browser, node):
    """Open the page at a root, live; fails when the browser complained of anything."""
    contexts, complaints = [], []

    def visit(root=None, **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(root or f"http://127.0.0.1:{node.port}/")
        page.wait_for_selector("#state[data-state=live]")
        page.wait_for_selector(".job")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


def ticks(node):
    return json.loads(scrape(node.port, "/api/snapshot"))["tick"]


def test_a_user_looks_around(opened):
    page = opened(color_scheme="dark")
    assert page.locator("#gpus tbody tr").count() == 8
    assert page.locator(".job").count() == 2
    page.wait_for_selector("#gpus tbody tr:nth-child(6) .bad:has-text('thermal')")  # a rate: known after two ticks
    job = page.locator(".job", has_text="llama-8b-pretrain")
    assert "Rank 3 is late" in job.locator(".alarm").inner_text()
    assert "kept" in job.locator(".moves").inner_text()
    assert "communication hidden" in job.inner_text()
    assert "Slurm job 48213" in job.locator("details").text_content()
    assert "the last " in page.locator("#daemon dd", has_text="recording").inner_text()
    assert "compute 61." in job.locator(".bar").first.get_attribute("aria-label")
    # Open the ranks, sort them by their last step; they stay open and sorted at the next tick.
    job.locator("summary").click()
    job.get_by_role("button", name="Last step").click()
    assert job.locator("details tbody th").first.inner_text() == "3"
    step = job.locator("dd").first.inner_text()
    page.wait_for_function("step => document.querySelectorAll('.job dd')[0].textContent !== step", arg=step)
    assert job.locator("details").get_attribute("open") is not None
    assert job.locator("details tbody th").first.inner_text() == "3"
    # Sort the GPUs, filter the jobs.
    page.get_by_role("button", name="Power").click()
    assert page.locator("#gpus th[aria-sort=descending]").inner_text().startswith("Power")
    page.get_by_label("Filter").fill("dlrm")
    assert page.locator(".job").count() == 1
    assert page.locator(".job h3").inner_text() == "dlrm <b>x</b>"  # text, never markup
    page.get_by_label("Filter").fill("nothing like it")
    assert "No job has that in its name" in page.locator("#joblist").inner_text()


def test_the_charts_have_a_past_for_whoever_comes_late(opened):
    page = opened()
    page.wait_for_selector("figure canvas")
    assert page.locator("figure").count() >= 8
    said = page.locator('[data-chart="power"] p').inner_text()
    assert "GPU 7: now" in said
    page.get_by_label("Show").select_option("120")
    step = page.locator(".job dd").first.inner_text()
    page.wait_for_function("step => document.querySelectorAll('.job dd')[0].textContent !== step", arg=step)
    assert page.locator("figure canvas").count() >= 8


def test_pausing_holds_the_picture_and_going_on_catches_up(opened, node):
    page = opened()
    page.get_by_role("button", name="Pause").click()
    assert page.locator("#state").inner_text() == "paused"
    held = page.locator("#joblist").inner_text()
    said = ticks(node)
    until(lambda: ticks(node) >= said + 3, "the daemon ticks on")
    assert page.locator("#joblist").inner_text() == held
    page.get_by_role("button", name="Go on").click()
    assert page.locator("#joblist").inner_text() != held


def test_the_theme_follows_the_system_until_a_reader_chooses_and_is_remembered(opened):
    page = opened(color_scheme="dark")

    def background():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark = background()
    page.get_by_label("Theme").select_option("light")
    assert background() == "rgb(255, 255, 255)" != dark
    page.reload()
    page.wait_for_selector(".job")
    assert background() == "rgb(255, 255, 255)"


def test_everything_can_be_reached_by_keyboard_and_is_named(opened):
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#jobs"
    unnamed = page.evaluate("""() =>
      [...document.querySelectorAll('button, select, input, [tabindex="0"], section, article')].filter(e => !(
        e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.closest('label') || e.textContent.trim()
      )).map(e => e.outerHTML)""")
    assert unnamed == []
    assert page.locator("main").count() == 1
    own = "[...document.querySelectorAll('table:not(.u-legend)')]"  # charts' legends are hidden from screen readers
    assert page.evaluate(f"{own}.every(one => one.caption && [...one.querySelectorAll('th')].every(th => th.scope))")
    assert page.locator("[aria-live], [role=status], [role=alert]").count() == 1  # figures that change are not read out


@pytest.mark.parametrize("width", [360, 800, 1920])
def test_no_width_makes_the_page_scroll_sideways(opened, width):
    page = opened(viewport={"width": width, "height": 800})
    page.wait_for_selector("figure canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1280, 390])
def test_what_is_wrong_with_gpus_is_said_above_them_with_what_to_do(opened, sick_node, width):
    page = opened(f"http://127.0.0.1:{sick_node.port}/", viewport={"width": width, "height": 900})
    alarms = page.locator("#gpu-alarms .alarm")
    page.wait_for_selector("#gpu-alarms .alarm:has-text('A GPU is missing')")
    *sick, missing = alarms.all_inner_texts()  # once: the age of the missing one goes on
    assert [text.split(" To do")[0] for text in sick] == [
        "GPU 2 failed: down: lost.",
        "GPU 4 failed: memory: row remapping failed: no spare row is left.",
        "GPU 1 degraded: PCIe link: 4 of 16 lanes.",
    ]
    assert "NVIDIA H200, 0000:02:00.0, GPU-0002" in sick[0], "it was known before it was lost"
    assert missing.startswith("A GPU is missing: NVIDIA <b>H200</b> at 0000:5d:00.0. It was last read as GPU 8,")
    assert "GPU-gone" in missing
    rows = page.locator("#gpus tbody tr")
    state = {number: rows.nth(number).locator("td").first.inner_text() for number in range(8)}
    assert (state[0], state[1], state[2], state[4]) == (
        "ok", "degraded: pcie width", "failed: down (lost)", "failed: row remap failed",
    )  # fmt: skip
    assert (state[5].endswith(", MPS: 4 clients"), state[6]) == (True, "ok, MIG")
    (instance,) = page.locator("#instances tbody tr").all_inner_texts()
    assert " ".join(instance.split()) == "GPU 6, 2/0 3g.71gb 7.0 GiB of 71.0 GiB 3 MIG-a"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.wait_for_selector("figure canvas")
    assert violations(page) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(opened, width):
    page = opened(viewport={"width": width, "height": 900})
    page.wait_for_selector("figure canvas")
    for summary in page.query_selector_all("summary"):
        summary.click()
    assert violations(page) == []
    # What scrolls sideways can be focused.
    assert page.evaluate("[...document.querySelectorAll('.wide')].every((one) => one.tabIndex === 0)")


def test_text_has_contrast_in_both_themes(opened):
    """WCAG 2.1, 1.4.3: 4.5 to 1, by its own formula of relative luminance."""
    page = opened()
    script = """() => {
      const style = getComputedStyle(document.documentElement);
      const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
      const light = (hex) => [1, 3, 5].map(at => linear(parseInt(hex.slice(at, at + 2), 16) / 255))
        .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
      const ratio = (a, b) => {
        const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
        return (x + 0.05) / (y + 0.05);
      };
      const of = (name) => style.getPropertyValue(name).trim();
      const found = [];
      for (const text of ['--text', '--soft', '--strong', '--good', '--bad'])
        for (const page of ['--page', '--card']) found.push([text, page, ratio(of(text), of(page))]);
      found.push(['--bad', '--bad-page', ratio(of('--bad'), of('--bad-page'))]);
      return found.filter(one => one[2] < 4.5);
    }"""
    for theme in ("light", "dark"):
        page.get_by_label("Theme").select_option(theme)
        assert page.evaluate(script) == []


class Prefix(BaseHTTPRequestHandler):
    """A proxy that serves the daemon under /node/a/, streaming."""

    def do_GET(self):
        if not self.path.startswith("/node/a/"):
            self.send_error(404)
            return
        with urllib.request.urlopen(self.server.root + self.path.removeprefix("/node/a")) as answer:
            self.send_response(answer.status)
            for name in ("Content-Type", "Content-Security-Policy"):
                if answer.headers[name]:
                    self.send_header(name, answer.headers[name])
            self.end_headers()
            try:
                while line := answer.readline():
                    self.wfile.write(line)
            except OSError:
                pass  # the browser left

    def log_message(self, *args):
        """Log nothing."""


def test_the_page_works_behind_a_path_prefix(opened, node):
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Prefix)
    proxy.daemon_threads = True
    proxy.root = f"http://127.0.0.1:{node.port}"
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        page = opened(f"http://127.0.0.1:{proxy.server_port}/node/a/")
        page.wait_for_selector("figure canvas")
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
