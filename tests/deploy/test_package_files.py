"""What would stand in the wheel, as setuptools itself says without building one; test_wheel builds and installs it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.kit.ours import ROOMS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


ASK = """
import json, warnings
warnings.simplefilter("ignore")
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration
told = Distribution({"src_root": ".", "script_name": "pyproject.toml"})
apply_configuration(told, "pyproject.toml")
told.include_package_data = False  # asks for a manifest, which is written; there is none of ours
packing = told.get_command_obj("build_py")
packing.ensure_finalized()
of = told.metadata
print(json.dumps({
    "folder": packing.build_lib, "files": packing.get_outputs(include_bytecode=False), "name": of.get_name(),
    "version": of.get_version(), "python": str(of.python_requires), "requires": sorted(told.install_requires),
    "extras": {name: sorted(told.extras_require[name]) for name in told.extras_require},
    "scripts": told.entry_points, "license_files": of.license_files, "license": of.license_expression,
}))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer | {"inside": {str(Path(file).relative_to(answer["folder"])) for file in answer["files"]}}


def below(*rooms: str) -> list[Path]:
    return [
        path.relative_to(ROOT)
        for room in rooms
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


@pytest.mark.slow
def test_every_module_and_every_file_that_is_no_source_of_ours_is_inside(told: dict[str, Any]) -> None:
    """As the test of the wheel itself asks of the built one."""
    wanted = {f"pacecar/{path}" for path in below("dashboards/generated", "deploy", "monitor/page")}
    wanted |= {f"pacecar/{path}" for path in below(*ROOMS) if path.suffix in {".py", ".css"}}
    wanted |= {str(path) for path in below("pacecar") if path.suffix in {".py", ".css"}}
    assert wanted - told["inside"] == set(), "name it in [tool.setuptools]"


def test_nothing_else_is_inside(told: dict[str, Any]) -> None:
    here = {f"pacecar/{path}" for path in below(*ROOMS)} | {str(path) for path in below("pacecar")}
    assert told["inside"] - here == set()
    assert not [name for name in told["inside"] if name.endswith(".pyc")]
    assert "pacecar/py.typed" in told["inside"]


def test_the_wheel_says_what_the_project_says(told: dict[str, Any]) -> None:
    assert (told["name"], told["version"]) == (PROJECT["name"], PROJECT["version"])
    assert told["python"] == PROJECT["requires-python"]
    assert told["requires"] == sorted(PROJECT["dependencies"])
    assert not [line for line in told["requires"] if line.startswith(("torch", "numpy"))], "a node's daemon has neither"
    extras = {name: {Requirement(line) for line in lines} for name, lines in told["extras"].items()}
    assert extras == {name: set(map(Requirement, lines)) for name, lines in PROJECT["optional-dependencies"].items()}
    assert (told["license"], told["license_files"]) == (PROJECT["license"], PROJECT["license-files"])
    assert told["scripts"] == {"console_scripts": ["pacecar = pacecar.commands.main:main"]}
    module, _, function = PROJECT["scripts"]["pacecar"].partition(":")
    assert callable(getattr(import_module(module), function))
