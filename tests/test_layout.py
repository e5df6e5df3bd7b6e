"""The house stands as it is drawn: packages, links, sizes; and it never takes the names `monitor` and `profiler`."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import grimp
import pytest
import yaml

from tests.kit.ours import ROOMS

ROOT = Path(__file__).resolve().parent.parent
MODULES_MAX = 12
CATALOGUES = {"commands", "dashboards/boards", "monitor/collectors", "pacecar"}
"""Folders whose modules are one of a kind each, so that there are no parts; `pacecar` has the public names."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules() -> list[Path]:
    own = [folder for folder in (ROOT / "pacecar").iterdir() if folder.is_dir() and not folder.is_symlink()]
    tops = [*own, *(ROOT / room for room in ROOMS)]
    return sorted([*(ROOT / "pacecar").glob("*.py"), *(path for top in tops for path in top.rglob("*.py"))])


def imported(text: str) -> set[str]:
    """Return the first names of the absolute imports of a module."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    whole = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {
        name.partition(".")[0]
        for name in [*whole, *(a.name for n in nodes if isinstance(n, ast.Import) for a in n.names)]
    }


@pytest.mark.slow
def test_rooms_are_imported_by_their_names_in_the_package() -> None:
    """`import monitor` would take a user's own module of that name."""
    files = [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").rglob("*.py")]
    texts = {str(path): path.read_text() for path in files}
    may = re.compile(rf"\b(?:import|from) +(?:{'|'.join(ROOMS)})\b")  # a statement names one module: ruff E401
    found = {name: imported(text) & {*ROOMS} for name, text in texts.items() if may.search(text)}
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


@pytest.mark.slow
def test_no_module_imports_another_that_imports_it_in_turn() -> None:
    """Nor by a third, nor within a function, nor for types alone."""
    graph = grimp.build_graph("pacecar", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert {"pacecar.job.attach", "pacecar.kernel_files"} < imports.keys()
    graphlib.TopologicalSorter(imports).prepare()


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_is_linked(room: str) -> None:
    assert os.readlink(ROOT / "pacecar" / room) == f"../{room}"
    assert (ROOT / room / "py.typed").exists()


@pytest.mark.slow
def test_a_relative_import_goes_up_one_folder_at_most() -> None:
    """Farther away is named from the top: who reads it need not count folders."""
    far = re.compile(r"^\s*from \.{3}", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in modules() if far.search(path.read_text())] == []


def test_modules_say_what_they_are_for() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in modules()}
    assert len(texts) > 300, "they are found"
    silent = [name for name, text in texts.items() if not text.lstrip("r").startswith('"""')]
    assert silent == [], "a module docstring says what the module does"


@pytest.mark.slow
def test_a_folders_map_names_what_is_there() -> None:
    """A map is made of rows in a package's docstring: four spaces, names, two spaces or more, what they are for."""
    wrong = []
    for path in modules():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        rows = re.findall(r"^ {4}([a-z_0-9]+/?(?:, [a-z_0-9]+/?)*)  +\S", text, re.MULTILINE)
        if path.name != "__init__.py" or not rows:
            continue
        parts = {one.stem for one in path.parent.glob("*.py") if not one.stem.startswith("__")}
        parts |= {one.parent.name for one in path.parent.glob("*/__init__.py") if not one.parent.is_symlink()}
        named = {name.strip("/") for row in rows for name in row.split(", ")}
        silent = {name for name in parts if not re.search(rf"\b{name}\b", text)}
        wrong += [f"{path.parent.relative_to(ROOT)}: {name}" for name in sorted(named - parts | silent)]
    assert wrong == []


PUBLIC_NAMES = {"PacecarCallback"}
"""In one module for each trainer, whose users import it from there."""


@pytest.mark.slow
def test_a_class_name_means_one_class() -> None:
    """But for names that begin with an underscore, which are known to their module alone."""
    names = Counter(name for path in modules() for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE))
    assert {name for name, count in names.items() if count > 1 and not name.startswith("_")} == PUBLIC_NAMES


def test_a_folder_has_no_more_modules_than_a_newcomer_can_keep_in_view() -> None:
    counted = Counter(str(path.parent.relative_to(ROOT)) for path in modules() if path.name != "__init__.py")
    assert {name: count for name, count in counted.items() if count > MODULES_MAX and name not in CATALOGUES} == {}


def test_hooks_before_a_commit_run_what_make_lint_runs() -> None:
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0].splitlines()[1:]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    assert hooks == [line.strip().replace("$(BIN)", ".venv/bin") for line in lint]


def test_no_file_of_the_project_is_named_twice_among_the_tests() -> None:
    """`--import-mode=importlib` allows it, but people who run one file by name do not."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_command_and_the_version_are_the_packages_own() -> None:
    import pacecar

    assert PROJECT["project"]["scripts"] == {"pacecar": "pacecar.commands.main:main"}
    assert PROJECT["project"]["version"] == pacecar.__version__


TRAIN = """
import monitor, profiler
assert monitor.MINE == profiler.MINE == "the user's own"

import pacecar, pacecar.profiler, pacecar.monitor, pacecar.controller, pacecar.dashboards
import torch
assert pacecar.profiler is not profiler and pacecar.__file__.startswith(EXPECTED), pacecar.__file__
assert pacecar.profiler.__file__.startswith(EXPECTED), pacecar.profiler.__file__

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with pacecar.attach(model, optimizer, tune="off") as pacer:
    assert pacer.is_active, pacer.inert_because
    for batch in pacer.data([torch.ones(2, 4)] * 3):
        model(batch).mean().backward()
        optimizer.step()
print("trained")
"""


def train_beside_own_modules(folder: Path, expected: Path, **environ: str) -> None:
    """Run a training script in a folder that has its own profiler.py and monitor.py."""
    for name in ("profiler.py", "monitor.py"):
        (folder / name).write_text('MINE = "the user\'s own"\n')
    script = folder / "train.py"
    script.write_text(f"EXPECTED = {str(expected)!r}\n{TRAIN}")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PACECAR_HOOK_SOCKET": str(folder / "none"), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"


@pytest.mark.full
@pytest.mark.slow
def test_the_users_own_profiler_and_monitor_stay_theirs_beside_an_editable_install(tmp_path: Path) -> None:
    user = tmp_path / "user"
    user.mkdir()
    train_beside_own_modules(user, ROOT)


@pytest.mark.full
def test_the_users_own_profiler_and_monitor_stay_theirs_beside_an_installed_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    # Built from a copy: setuptools leaves build/ behind, and a stale one would go into the wheel.
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pacecar", *ROOMS):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            shutil.copy(path, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = wheels.glob("pacecar-*.whl")
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    assert sorted(path.name for path in target.iterdir() if "dist-info" not in path.name) == ["bin", "pacecar"]
    assert {str(path.relative_to(target / "pacecar")) for path in (target / "pacecar").rglob("*.py")} == {
        str(path.relative_to(ROOT / "pacecar" if path.is_relative_to(ROOT / "pacecar") else ROOT)) for path in modules()
    }
    assert (target / "pacecar" / "py.typed").exists()
    assert list((target / "pacecar" / "dashboards" / "generated").glob("*.json"))
    assert list((target / "pacecar" / "dashboards" / "generated").glob("*.rules.yml"))
    user = tmp_path / "user"
    user.mkdir()
    train_beside_own_modules(user, target, PYTHONPATH=str(target))
