"""What happens in a python before its script: next to nothing, and nothing that the script could notice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from pacecar.commands.run import PTH, STARTUP, environment
from pacecar.job.startup.pacecar_startup import claim

PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_") and name != "PYTHONPATH"}

STATE = """
import json, sys
print(json.dumps({
    "path": sys.path, "argv": sys.argv, "main": sorted(vars(sys.modules["__main__"])),
    "modules": sorted(sys.modules), "site": getattr(sys.modules.get("sitecustomize"), "__file__", None),
    "finders": [type(finder).__name__ for finder in sys.meta_path],
}))
"""

AFTER_TORCH = """
import random, sys
random.seed(1)
import torch
print(random.random(), torch.initial_seed() == torch.default_generator.initial_seed())
print(sorted(name for name in sys.modules if not name.startswith("pacecar")))
print([type(finder).__name__ for finder in sys.meta_path], torch.__loader__, torch.__spec__.loader)
"""


def state(folder: Path, **environ: str) -> dict[str, object]:
    (folder / "state.py").write_text(STATE)
    done = subprocess.run(
        [sys.executable, "state.py", "a"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        env=PLAIN | environ,
        check=True,
    )
    assert done.stderr == ""
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_script_that_needs_no_torch_sees_the_same_modules_path_and_main(tmp_path: Path) -> None:
    bare, watched = state(tmp_path), state(tmp_path, **environment({}))
    assert watched.pop("finders") == ["Finder", *bare.pop("finders")]  # type: ignore[misc]
    modules = set(watched.pop("modules"))  # type: ignore[call-overload]
    assert modules - set(bare.pop("modules")) == {"pacecar_startup"}  # type: ignore[call-overload]
    assert watched == bare


@pytest.mark.slow
def test_a_script_that_imports_torch_finds_pacecar_s_modules_besides_and_its_random_numbers_untouched(
    tmp_path: Path,
) -> None:
    (tmp_path / "before.py").write_text(AFTER_TORCH)
    said = []
    for environ in ({}, environment({})):
        command = [sys.executable, "before.py"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=PLAIN | environ, check=True, cwd=tmp_path
        )
        said.append((re.sub("0x[0-9a-f]+", "", done.stdout), done.stderr))
    assert said[0] == said[1]


def test_a_library_that_looks_whether_torch_is_installed_does_not_use_the_finder_up(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    asks = "import importlib.util as u\nspec = u.find_spec('torch')\nassert spec.origin.endswith('torch.py')\n"
    loads = "import torch, sys\nassert torch.__spec__.loader is torch.__loader__\n"
    said = "print('Finder' in [type(finder).__name__ for finder in sys.meta_path], type(torch.__loader__).__name__)\n"
    (tmp_path / "state.py").write_text(asks + asks + loads + said)
    done = subprocess.run(
        [sys.executable, "state.py"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, env=PLAIN | environment({}), check=True,
    )  # fmt: skip
    assert done.stdout == "False SourceFileLoader\n"
    assert done.stderr.startswith("pacecar: does not attach: "), "it listened to this torch, which has no optimizers"
    assert done.stderr.count("\n") == 1


@pytest.mark.full
@pytest.mark.slow
def test_another_finder_that_asks_all_others_for_torch_does_not_go_round_in_circles_with_ours(tmp_path: Path) -> None:
    """Tracers and test kits wait for a module as we do, some of them unaware of others like them."""
    code = """
import sys
class Tracer:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
            return next((spec for spec in found if spec is not None), None)
sys.meta_path.insert(0, Tracer())
import torch
print("Finder" in [type(finder).__name__ for finder in sys.meta_path], type(torch.__loader__).__name__)
"""
    environ = PLAIN | environment({})
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, env=environ, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "False SourceFileLoader\n", "ours was told that torch was loaded, and left"


@pytest.mark.slow
def test_the_users_own_sitecustomize_is_the_one_that_python_has(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = __name__\n")
    bare = state(tmp_path, PYTHONPATH=str(theirs))
    watched = state(tmp_path, **environment({"PYTHONPATH": str(theirs)}))
    assert watched["site"] == bare["site"] == str(theirs / "sitecustomize.py")
    assert watched["path"] == bare["path"]


@pytest.mark.slow
def test_a_sitecustomize_that_fails_fails_as_it_does_alone(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    said = []
    for environ in ({"PYTHONPATH": str(tmp_path)}, environment({"PYTHONPATH": str(tmp_path)})):
        command = [sys.executable, "-c", "print('runs')"]
        said.append(
            subprocess.run(command, capture_output=True, text=True, timeout=60, env=PLAIN | environ, check=True)
        )
    assert said[0].stdout == said[1].stdout == "runs\n"
    assert said[0].stderr == said[1].stderr
    assert "theirs" in said[0].stderr


def test_a_python_without_pacecar_runs_its_script_and_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import torch, sys\nprint(torch.__name__, torch.__loader__.__class__.__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(STARTUP)!r}); import pacecar_startup as p;"
         f" p.begin(); sys.path[0] = {str(tmp_path)!r}; import script"],
        capture_output=True,
        text=True,
        timeout=60,
        env=PLAIN | environment({}),
        cwd=tmp_path,
        check=True,
    )  # fmt: skip
    assert done.stdout == "torch SourceFileLoader\n"
    assert done.stderr == "pacecar: does not attach: ModuleNotFoundError: No module named 'pacecar'\n"


@pytest.mark.parametrize("value", ["", "0"])
def test_empty_or_zero_switches_it_off(tmp_path: Path, value: str) -> None:
    assert "Finder" not in state(tmp_path, **(environment({}) | {"PACECAR_RUN": value}))["finders"]  # type: ignore[operator]


@pytest.mark.slow
def test_the_line_for_a_pth_file_does_the_same_and_nothing_without_the_variable(tmp_path: Path) -> None:
    code = f"import sys\nbefore = list(sys.path)\n{PTH.format(folder=str(STARTUP))}\nassert sys.path == before\n"
    code += "print([type(f).__name__ for f in sys.meta_path].count('Finder'), 'pacecar_startup' in sys.modules)"
    for environ, printed in (({"PACECAR_RUN": "1"}, "1 True\n"), ({}, "0 False\n")):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=PLAIN | environ, check=True)
        assert done.stdout == printed


def test_a_pth_file_needs_only_the_variable_and_no_path(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "pacecar-run.pth").write_text(PTH.format(folder=str(STARTUP)) + "\n")
    code = "import sys; print([type(f).__name__ for f in sys.meta_path].count('Finder'), sys.path)"
    said = {}
    for value in ("", "1"):
        command = [str(tmp_path / "env/bin/python"), "-c", code]
        env = PLAIN | {"PACECAR_RUN": value}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True)
        assert done.stderr == ""
        said[value] = done.stdout
    assert said["1"].startswith("1 [")
    assert said["1"][2:] == said[""][2:], "sys.path is as it was"


def test_the_first_python_that_sees_a_ranks_variables_is_the_rank_and_its_children_are_helpers() -> None:
    launcher = {"PACECAR_RUN": "1", "SLURM_PROCID": "0"}
    assert claim(launcher, 10) is None
    rank = {**launcher, "RANK": "3", "LOCAL_RANK": "1"}  # torchrun adds its own
    assert claim(rank, 20) is None
    assert claim(dict(rank), 30) == "20"
    assert claim(rank, 20) is None, "a script may restart itself, in the same process"
    restarted = {**launcher, "RANK": "3", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert claim(restarted, 40) is None
    alone = {"PACECAR_RUN": "1"}
    assert claim(alone, 50) is None
    assert alone == {"PACECAR_RUN": "1"}
