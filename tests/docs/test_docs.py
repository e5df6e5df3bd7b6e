"""The documentation matches the code."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest

from pacecar.config import Config, TuneConfig, load_config
from pacecar.controller.consensus.protocol import CALM_PERIOD, LEISURE_PERIOD, PERIOD
from pacecar.controller.consensus.rank_agreement import VOTE_WORDS
from pacecar.records import LEDGER_HEADINGS
from tests.kit.forking_python import forking_python

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "deploy/*.md", "bench/*.md")
    for page in ROOT.glob(pattern)
    if page.is_file()
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def tables(text: str) -> dict[str, list[list[str]]]:
    """Heading -> the rows of the tables below it, cells stripped."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("| `"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def written(value: object) -> str:
    """A default in TOML."""
    if isinstance(value, tuple):
        return "[" + ", ".join(written(item) for item in value) + "]"
    return msgspec.json.encode(value).decode()


def bounds(kind: Any) -> tuple[Any, Any]:
    """Lowest and highest allowed value of a field, None where there is none."""
    low = high = None
    for meta in getattr(kind, "__metadata__", ()):
        low = meta.ge if meta.ge is not None else meta.gt if meta.gt is not None else low
        high = meta.le if meta.le is not None else meta.lt if meta.lt is not None else high
    return low, high


def choices(kind: Any) -> set[str]:
    """Every literal value that the type allows, at any depth."""
    if get_origin(kind) is None:
        return set()
    return {a for a in get_args(kind) if isinstance(a, str)} | {c for a in get_args(kind) for c in choices(a)}


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings in links: lower case, no punctuation, a hyphen for each space."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_internal_links_resolve(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", prose(page)):
        if not re.match(r"\w+:", target):
            path = page.parent / target if target else page
            assert path.exists(), f"{names(page)}: {target}"
            assert not anchor or anchor in anchors(path), f"{names(page)}: {target}#{anchor}"


def test_paths_that_are_named_exist():
    rooms = "analysis|monitor|profiler|controller|commands|job|adapters|dashboards|tests|deploy|docs|bench"
    gone = []
    for page in PAGES:
        for path in re.findall(rf"`((?:{rooms})/[\w./]*|pacecar/[\w/]+\.py)[`:]", prose(page)):
            is_module = (ROOT / f"{path}.py").exists()
            if not is_module and not (ROOT / path).exists():
                gone.append(f"{names(page)}: {path}")
    assert gone == []


def test_make_targets_that_are_named_exist():
    makefile = ROOT / "Makefile"
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile.read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = "\n".join([*blocks(text, "sh"), *re.findall(r"`([^`\n]+)`", text)])
        named = set(re.findall(r"^make (\w[\w-]*)", code, re.MULTILINE))
        assert named <= targets, f"{names(page)}: {named - targets}"


def test_commands_that_are_named_exist():
    import click

    from pacecar.commands.main import cli

    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = "\n".join([*blocks(text, "sh"), *re.findall(r"`([^`\n]+)`", text)])
        for line in re.findall(r"^(?:\S*/)?pacecar ([a-z].*)$", code, re.MULTILINE):
            command: click.Command = cli
            for word in line.split("#")[0].split("-- ")[0].split():  # what follows is another's command
                if word.startswith("-") and word != "-":  # `-` is standard output
                    known = {option for parameter in command.params for option in parameter.opts}
                    assert word in known, f"{names(page)}: pacecar {line}: {word}"
                elif isinstance(command, click.Group):
                    assert word in command.commands, f"{names(page)}: pacecar {line}"
                    command = command.commands[word]


def test_every_configuration_key_is_described_with_its_default():
    described = tables(CONFIGURATION)
    for section in msgspec.structs.fields(Config):
        rows = {row[0].strip("`"): row for row in described[f"[{section.name}]"]}
        fields = msgspec.structs.fields(section.type)
        assert list(rows) == [field.name for field in fields], f"[{section.name}]"
        for field in fields:
            default = rows[field.name][1]
            if field.default is msgspec.NODEFAULT:
                assert default == "see below"
            elif field.default is None:
                assert default == "none"
            else:
                assert default == f"`{written(field.default)}`", f"[{section.name}] {field.name}"


def test_the_collectors_that_can_be_disabled_are_named():
    from pacecar.clock import SystemClock
    from pacecar.config import DaemonConfig
    from pacecar.monitor.sampling.collector_registry import default_collectors

    meaning = next(row[3] for row in tables(CONFIGURATION)["[daemon]"] if row[0] == "`disable`")
    collectors = default_collectors(DaemonConfig(), SystemClock())
    assert re.findall(r"`(\w+)`", meaning) == [collector.name for collector in collectors]


def test_every_bound_and_choice_of_the_configuration_is_described():
    described = tables(CONFIGURATION)
    for section in msgspec.structs.fields(Config):
        rows = {row[0].strip("`"): row[2] for row in described[f"[{section.name}]"]}
        for field in msgspec.structs.fields(section.type):
            allowed = rows[field.name]
            given = [number for number in bounds(field.type) if number is not None]
            assert [float(n) for n in re.findall(r"(?<![\w\"])\d+(?:\.\d+)?", allowed)] == given, field.name
            assert set(re.findall(r'`"([\w-]+)"`', allowed)) == choices(field.type), field.name


def test_the_readmes_configuration_table_has_todays_defaults():
    rows = re.findall(r"^\| `(daemon|hook|tune)` \| `(\w+)` \| `([^`]+)` \|", README, re.MULTILINE)
    assert len(rows) >= 5
    config = Config()
    for section, key, default in rows:
        assert written(getattr(getattr(config, section), key)) == default, f"[{section}] {key}"


def test_the_example_configuration_is_accepted(tmp_path):
    file = tmp_path / "pacecar.toml"
    file.write_text(blocks(CONFIGURATION, "toml")[0], encoding="utf-8")
    variables = dict(re.findall(r"(PACECAR_[A-Z_]+)=(\S+)", blocks(CONFIGURATION, "sh")[0]))
    config = load_config(file, environ=variables)
    assert config.tune.mode == "advise"
    assert config.daemon.port == 9851, "the environment wins over the file"


def test_modes_and_headings_in_the_documentation_are_those_of_the_code():
    tuning = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
    modes = set(get_args(msgspec.structs.fields(TuneConfig)[0].type))
    assert set(re.findall(r'^\| `"(\w+)"`', tuning, re.MULTILINE)) == modes
    assert set(re.findall(r'`tune="(\w+)"`', README)) == modes
    ledger = tables((ROOT / "docs/ledger.md").read_text(encoding="utf-8"))["Headings"]
    assert tuple(row[0].strip("`") for row in ledger) == LEDGER_HEADINGS


def test_what_tuning_adds_between_the_ranks_is_what_the_code_adds():
    numbers = {2: "two", 4: "four", 6: "six", 16: "sixteen"}
    votes, low, high = numbers[VOTE_WORDS], numbers[min(LEISURE_PERIOD, PERIOD)], numbers[CALM_PERIOD]
    assert f"a vote of {votes} numbers on another every {low} to {high} steps" in README
    tuning = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
    assert f"a vote of {votes} numbers" in tuning


def test_the_pictures_of_the_ledger_are_what_the_attribution_gives():
    """Every column of the drawings in docs/ledger.md, charged by the code that charges real steps."""
    from pacecar.ledger.attribution import LossCause, Work, attribute
    from pacecar.ledger.intervals import intervals

    letters = {"compute": "c", "exposed_communication": "e", "exposed_copy": "y"}
    letters |= {"data_wait": "d", "optimizer_host": "o", "host_bound": "h"}
    text = (ROOT / "docs/ledger.md").read_text(encoding="utf-8")
    pictures = [block for block in re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "charged" in block]
    assert len(pictures) == 2
    for picture in pictures:
        rows = dict(re.findall(r"^(\w+(?: to)?) +(\S+)", picture, re.MULTILINE))
        drawn, hidden = rows["charged to"], rows["hidden"]

        def at(column: int, row: str, mark: str, rows: dict[str, str] = rows) -> Any:
            return intervals([(column, column + 1)] if rows.get(row, "")[column : column + 1] == mark else [])

        for column, letter in enumerate(drawn):
            ledger = attribute(
                {
                    Work.COMPUTE: at(column, "compute", "#"),
                    Work.COMMUNICATION: at(column, "communication", "#"),
                    Work.COPY: at(column, "copy", "#"),
                },
                (column, column + 1),
                causes={LossCause.DATA_WAIT: at(column, "host", "d"), LossCause.OPTIMIZER: at(column, "host", "o")},
            )
            charged = next(heading for heading, ns in ledger.parts().items() if ns)
            assert letters[charged] == letter, f"column {column}"
            assert (hidden[column] == "o") == bool(ledger.overlapped_communication_ns), f"column {column}"


def test_the_drawn_steps_of_the_ledger_are_what_the_analyzer_draws(tmp_path):
    from tests.docs.pictures import DRAWINGS, draw

    draw(tmp_path)
    page = (ROOT / "docs/ledger.md").read_text(encoding="utf-8")
    for name in DRAWINGS:
        committed = (ROOT / f"docs/images/{name}.svg").read_text(encoding="utf-8")
        assert (tmp_path / f"{name}.svg").read_text(encoding="utf-8") == committed, name
        assert "prefers-color-scheme: dark" in committed
        assert f"images/{name}.svg" in page
    assert "takes 17 ms" in page
    assert "takes 23 ms" in page


def test_what_troubleshooting_quotes_of_the_daemon_is_what_the_daemon_says():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    section = page.split("## The daemon\n")[1].split("\n## ")[0]
    said = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "monitor").rglob("*.py"))
    fixed = ("cannot listen on ", "a daemon is listening on ", " already", "belongs to uid ",
             ", who could listen in your place", "exists and is not a socket", "no NVIDIA driver",
             "no rank of a job ", "is connected to this daemon", "belongs to another user")  # fmt: skip
    for words in fixed:
        assert words in section, words
        assert words in said, words


def test_python_in_the_documentation_parses():
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8"), "python"):
            ast.parse(block)


@pytest.mark.distributed
@pytest.mark.slow
def test_the_readmes_script_trains_on_two_ranks_with_the_hook_active(tmp_path):
    """Run the README's script as it says, and check that it is measured."""
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    # The barrier: gloo may abort a process that ends while it lets go of the last work (pytorch issue 190489).
    script = blocks(README, "python")[0].replace(
        "dist.destroy_process_group()",
        "assert pacer.inert_because is None\ndist.barrier()\ndist.destroy_process_group()",
    )
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    ran = subprocess.run(
        [forking_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1",
             "PACECAR_HOOK_SOCKET": str(tmp_path / "nobody.sock"), "PACECAR_HOOK_RUN_DIR": str(tmp_path / "run")},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    for rank in (0, 1):
        records = [json.loads(row) for row in (tmp_path / f"run/rank{rank}.jsonl").read_text().splitlines()]
        steps = [record for record in records if record["type"] == "step"]
        # All of them, or some where these steps are too short for the budget: on a busy machine no burst may follow the
        # first one.  The others are counted, the last ones in the goodbye.
        assert len(steps) == 100 or (len(steps) > 0 and steps[-1]["measured_every"] > 1)
        assert [record["total_steps"] for record in records if record["type"] == "goodbye"] == [100]


def test_every_promise_of_the_security_page_has_a_test_that_exists():
    section = (ROOT / "docs/security.md").read_text(encoding="utf-8").split("\n## Promises\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert len(rows) > 2
    for row in rows[2:]:
        assert len(row) == 3, f"three columns, and no | in a cell: {row}"
        promise, _how, tests = row
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert named, f"{promise}: no test is named as `tests/file.py::test_name`"
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{promise}: {file}::{name}"


@pytest.mark.full
def test_the_pictured_page_of_the_analysis_says_what_the_documentation_says_of_it(tmp_path):
    from tests.docs.analysis_pictures import write_page_of_job

    page = write_page_of_job(tmp_path).read_text(encoding="utf-8")
    assert '<p class="lead">Rank 3 holds the job up, in compute: mending it would save 1.40 ms of ' in page
    said = (ROOT / "docs/analyze.md").read_text(encoding="utf-8")
    for name in ("analyze-page", "analyze-ranks"):
        assert f"images/{name}.png" in said
        assert (ROOT / f"docs/images/{name}.png").read_bytes().startswith(b"\x89PNG")
