"""Every command and example of the pages is run, or parsed, or listed with the reason why not."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pacecar.config import load_config
from pacecar.metrics.catalog import CATALOG
from tests.docs.pages import PAGES, ROOT, SHELLS, Command, Example, commands, examples
from tests.docs.recipes import RECIPES, Cannot, Run, click_accepts, recipe_for, written
from tests.docs.world import World
from tests.kit.net import free_port
from tests.kit.tools import find_tool

EXAMPLES = [
    example for page in PAGES for example in examples(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))
]
COMMANDS = [command for example in EXAMPLES if example.language in SHELLS for command in commands(example)]
UNIQUE = list({(command.text, command.before): command for command in reversed(COMMANDS)}.values())[::-1]
"""Each command once, at its first place."""

LANGUAGES = {"", "python", "toml", "yaml", "ini", "promql", "nginx"}
"""Beside shells.  nginx is not here to read its block."""


def place(what: Command | Example) -> str:
    return f"{what.page}:{what.line}"


# --- nothing is left out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=place)
def test_each_command_is_run_here_or_listed_with_a_reason(command: Command) -> None:
    found = recipe_for(command.text)
    assert found is not None, (
        f"{command.place}: nobody runs `{command.text}`: give it a recipe in tests/docs/recipes.py,"
        " or a reason and what to check instead"
    )


def test_each_recipe_is_used() -> None:
    used = {id(recipe_for(command.text)) for command in COMMANDS}
    assert [recipe.pattern for recipe in RECIPES if id(recipe) not in used] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=place)
def test_each_block_says_what_it_is(example: Example) -> None:
    assert example.language in SHELLS | LANGUAGES, f"{place(example)}: who reads ```{example.language}?"
    if not example.language:
        typed = [
            line for line in example.lines if re.match(r"\$ |(sudo|pip|kubectl|docker|make) \w|pacecar [a-z]+ ", line)
        ]
        assert not typed, f"{place(example)}: commands in a block that is not ```sh: {typed}"


def test_comments_and_continued_lines_are_read_as_a_shell_does() -> None:
    block = Example("page", 9, "sh", ("a '# no' # yes", "b \\", "  c", "", "# all of it", "x=1", "d$#"))
    assert commands(block) == [
        Command("page", 10, "a '# no'"),
        Command("page", 11, "b c"),
        Command("page", 15, "x=1"),
        Command("page", 16, "d$#", ("x=1",)),
    ]
    shown = Example("page", 1, "console", ("$ pacecar version", "0.1.0"))
    assert commands(shown) == [Command("page", 2, "pacecar version")]


# --- what is not run ------------------------------------------------------------------------------------------------

NOT_RUN = [command for command in UNIQUE if isinstance(recipe_for(command.text), Cannot)]


@pytest.mark.parametrize("command", NOT_RUN, ids=place)
def test_what_cannot_run_here_names_only_what_there_is(command: Command) -> None:
    recipe = recipe_for(command.text)
    assert isinstance(recipe, Cannot)
    assert recipe.reason
    try:
        recipe.check(command.text)
    except (AssertionError, OSError, ValueError) as error:
        pytest.fail(f"{command.place}: `{command.text}`: {error}")


@pytest.mark.parametrize(
    "command",
    [
        "sudo systemctl restart pacer",
        "sudo systemctl kick pacecar",
        "kubectl apply -k deploy/kubernetes/bases",
        "kubectl -n pacecar rollout status daemonset/pacer",
        "kubectl -n pacecar exec daemonset/pacecar -- pacecar tops",
        "docker build -f deploy/Containerfile -t pacecar:0.1.0 .",
        "docker build -f deploy/container/Containerfile -t pacecar:9.9 .",
        "docker build -f deploy/container/Containerfile --build-arg PYTON=x .",
        "pip install 'pacecar[torches]'",
        "make dashbords",
        "sudo cp deploy/systemd/pacer.service /etc/systemd/system/",
        "sudo rm -rf /opt/pacer",
        "sudo apt install ./dist/pacecar_9.9-1_amd64.deb",
        "man pacecar-demon",
        "helm install pacecar deploy/helm/pacecar --set image.repo=x",
        "helm install pacecar deploy/helm/pacer",
        "sbatch job.sh",
        "srun --jobid 1 pacecar top --twice",
        "journalctl -u pacer",
    ],
)
def test_a_slip_in_what_is_not_run_is_found(command: str) -> None:
    recipe = recipe_for(command)
    assert isinstance(recipe, Cannot)
    with pytest.raises(AssertionError):
        recipe.check(command)


# --- what is run ----------------------------------------------------------------------------------------------------

RUN = [command for command in UNIQUE if isinstance(recipe_for(command.text), Run)]
SERVERS = [command for command in RUN if re.fullmatch(r"(\w+=\S+ )?pacecar daemon.*", command.text)]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    made = World()
    yield made
    made.close()


def ours(command: str) -> Iterator[list[str]]:
    """Yield the arguments of each `pacecar` in it, including after a launcher, with variables, and before a pipe."""
    read = shlex.shlex(command, posix=True, punctuation_chars=True)
    read.whitespace_split = True
    words: list[str] = []
    for word in (*read, "|"):
        if not set(word) <= set("|&;<>"):
            words.append(word)
            continue
        if "pacecar" in words:
            yield words[words.index("pacecar") + 1 :]
        words = []


def test_every_command_of_ours_is_one_that_our_parser_accepts() -> None:
    """Also those that are run, to find mistakes before starting anything."""
    refused, count = [], 0
    for command in RUN:
        for words in ours(command.text):
            count += 1
            try:
                click_accepts(words)
            except AssertionError as error:
                refused.append(f"{command.place}: `{command.text}`: {error}")
    assert refused == []
    assert count > 60
    with pytest.raises(AssertionError, match="--twice"):
        click_accepts(next(ours("PACECAR_JOB=x sudo pacecar top --twice | head")))


RUN_TO_THEIR_END = [
    pytest.param(command, marks=[pytest.mark.full] if recipe_for(command.text).is_long else [], id=place(command))
    for command in RUN
    if command not in SERVERS
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("command", RUN_TO_THEIR_END)
def test_a_command_does_what_it_says(command: Command, world: World) -> None:
    recipe = recipe_for(command.text)
    assert isinstance(recipe, Run)
    if command.text.startswith(("promtool", "systemd-analyze")):
        find_tool(shlex.split(command.text)[0])
    if "prometheus" in recipe.needs:
        find_tool("prometheus")
    line = written(recipe, command.text, command.before, world)
    done = world.run(line)
    said = done.stdout + done.stderr
    assert done.returncode in recipe.exits, f"{command.place}: `{line}` ended with {done.returncode}:\n{said[-3000:]}"
    assert re.search(recipe.says, said), f"{command.place}: `{line}` says nothing of {recipe.says!r}:\n{said[-3000:]}"
    assert "Traceback" not in said, f"{command.place}: `{line}`:\n{said[-3000:]}"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("command", SERVERS, ids=place)
def test_a_daemon_of_the_pages_serves_until_it_is_ended(command: Command, world: World) -> None:
    variables = dict(re.findall(r"(\w+)=(\S+) ", command.text))
    words = shlex.split(command.text.split("=", 1)[-1].split(" ", 1)[-1] if variables else command.text.rstrip("& "))
    click_accepts(words[words.index("pacecar") + 1 :] if "pacecar" in words else words)
    (world.folder / "pacecar.toml").write_text("[daemon]\nperiod_seconds = 0.5\n")
    port = free_port()
    name = f"daemon-{command.line}-{Path(command.page).stem}"
    line = " ".join(words).replace("--port 0", f"--port {port}")
    given = {"PACECAR_DAEMON_PORT": str(port), "PACECAR_DAEMON_SOCKET": str(world.folder / f"{port}.sock")}
    # Without the collector exports fail and are counted, and the daemon serves.
    world.serving(name, line, port, "/-/healthy", **given, **variables)
    process = world._running.pop(name)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 0, world.log(name)[-3000:]


# --- examples that are no commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.language == "toml"], ids=place)
def test_a_configuration_is_accepted(example: Example, tmp_path: Path) -> None:
    file = tmp_path / "pacecar.toml"
    file.write_text(example.text, encoding="utf-8")
    load_config(file, environ={})


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.language == "yaml"], ids=place)
def test_a_yaml_block_parses_and_names_folders_that_are_there(example: Example) -> None:
    found = yaml.safe_load(example.text)
    assert isinstance(found, dict)
    for path in (*found.get("resources", ()), *found.get("components", ())):
        assert (ROOT / path / "kustomization.yaml").is_file(), f"{place(example)}: {path}"


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.language == "ini"], ids=place)
def test_a_unit_has_sections(example: Example) -> None:
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(example.text)
    assert set(parser.sections()) <= {"Unit", "Service", "Socket", "Install"}


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.language == "python"], ids=place)
def test_python_compiles(example: Example) -> None:
    compile(ast.parse(example.text), place(example), "exec")


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.language == "promql"], ids=place)
def test_prometheus_reads_the_expressions(example: Example, tmp_path: Path) -> None:
    promtool = find_tool("promtool")
    rules = [
        {"record": f"pages:example:{number}", "expr": expression}
        for number, expression in enumerate(re.split(r"\n\s*\n", example.text.strip()))
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "pages", "rules": rules}]}))
    done = subprocess.run(
        [promtool, "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"{place(example)}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_that_a_page_names_are_in_the_catalog(page: Path) -> None:
    known = {metric.name for metric in CATALOG} | {"pacecar_version"}  # a field of documents
    text = page.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        for name in re.findall(r"(?<![\w:./-])pacecar_[a-z0-9_]+(?![\w*:.…]|\.\.\.)", line):
            bare = re.sub(r"_(bucket|sum|count)$", "", name)
            assert {name, bare} & known, f"{page.relative_to(ROOT)}:{number}: no metric is called {name}"
