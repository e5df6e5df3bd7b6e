"""The Debian package: its contents, and its installation by dpkg in a scratch root.

With modules that are here already, by `dpkg --root` below a scratch folder, whose maintainer scripts are told
by DPKG_ROOT where they are.  The package database of this machine is never touched.  test_in_debian.py installs the
package of real wheels in a Debian.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pacecar.config import load_config
from tests.deploy.readers import DEPLOY, ran

BUILD = DEPLOY / "deb" / "build.sh"
CONFIG = "etc/pacecar/pacecar.toml"
UNIT = "usr/lib/systemd/system/pacecar.service"
WANTED = "etc/systemd/system/multi-user.target.wants/pacecar.service"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PACECAR_", "PYTHON"))} | {
    "DPKG_DEB_COMPRESSOR_TYPE": "gzip", "DPKG_DEB_COMPRESSOR_LEVEL": "1", "DEBIAN_FRONTEND": "noninteractive",
    "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "LC_ALL": "C",
}  # fmt: skip
"""Without variables that refer to the checkout, and with fast compression."""

SECRET = '[daemon]\nlog_level = "debug"\n'
"""What an administrator wrote."""


def build(out: Path, *words: str | Path, **variables: str) -> Path:
    done = ran(BUILD, *words, out, env=ENVIRONMENT | {"PYTHON": sys.executable, "PYTHON_VERSIONS": PYTHON} | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.strip())


STAND_IN = f"""
import os, sys

def main():
    os.environ.pop("PYTHONPATH", None)
    os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "pacecar", *sys.argv[1:]])
"""
"""A pacecar that calls this checkout's: small, so it is quickly packed and compiled."""


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    """A folder of modules, as wheels would fill it."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg is not here")
    folder = tmp_path_factory.mktemp("deb") / "lib"
    (folder / "pacecar/commands").mkdir(parents=True)
    for name, text in {"__init__": "", "commands/__init__": "", "commands/main": STAND_IN}.items():
        (folder / f"pacecar/{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def package(lib, tmp_path_factory):
    return build(tmp_path_factory.mktemp("built"), "--lib", lib)


def field(package: Path, name: str) -> str:
    return ran("dpkg-deb", "--field", package, name).stdout.strip()


# --- what is in it ------------------------------------------------------------------------------------------------

pytestmark = pytest.mark.slow


def test_the_package_holds_program_unit_account_configuration_pages_and_completions(package, tmp_path):
    assert ran("dpkg-deb", "--extract", package, tmp_path).returncode == 0
    for path, ours in {
        UNIT: DEPLOY / "systemd/pacecar.service",
        "usr/lib/sysusers.d/pacecar.conf": DEPLOY / "systemd/sysusers.conf",
        CONFIG: DEPLOY / "deb/pacecar.toml",
        "etc/default/pacecar": DEPLOY / "deb/default.conf",
    }.items():
        assert (tmp_path / path).read_text() == ours.read_text()
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o644
    started = re.search(r"^ExecStart=(\S+)", (tmp_path / UNIT).read_text(), re.MULTILINE)
    assert os.access(tmp_path / started[1].lstrip("/"), os.X_OK), "what the unit starts"
    assert (tmp_path / "usr/bin/pacecar").readlink() == Path("/opt/pacecar/bin/pacecar")
    assert b"PACECAR" in gzip.decompress((tmp_path / "usr/share/man/man1/pacecar-daemon.1.gz").read_bytes())
    for path in ("bash-completion/completions/pacecar", "zsh/vendor-completions/_pacecar",
                 "fish/vendor_completions.d/pacecar.fish"):  # fmt: skip
        assert "_PACECAR_COMPLETE" in (tmp_path / "usr/share" / path).read_text()
    assert not list(tmp_path.rglob("__pycache__"))
    listed = ran("dpkg-deb", "--contents", package).stdout
    assert set(re.findall(r"^\S+ (\S+)", listed, re.MULTILINE)) == {"root/root"}
    assert not re.search(r"^[^l].{4}w|^[^l].{7}w", listed, re.MULTILINE), "nobody but root may write"


def test_the_record_says_what_it_needs(package):
    assert field(package, "Package") == "pacecar"
    assert field(package, "Version") == f"{metadata.version('pacecar')}-1"
    assert f"python3 (>= {PYTHON})" in field(package, "Depends")
    assert ran("dpkg-deb", "--info", package, "conffiles").stdout.split() == [f"/{CONFIG}", "/etc/default/pacecar"]


def test_the_shipped_configuration_is_one_and_changes_nothing():
    assert load_config(DEPLOY / "deb/pacecar.toml", environ={}) == load_config(environ={"PACECAR_CONFIG": "/dev/null"})
    text = (DEPLOY / "deb/default.conf").read_text()
    assert all(line.startswith("#") for line in text.splitlines())
    load_config(environ=dict(re.findall(r"(PACECAR_\w+)=(\S+)", text)))


@pytest.mark.full
def test_the_same_sources_give_the_same_package(package, lib, tmp_path):
    assert build(tmp_path, "--lib", lib).read_bytes() == package.read_bytes()


def test_what_cannot_be_built_is_named(tmp_path):
    for words, variables, said in (
        (["--wheel", "a.whl", "--lib", "b"], {}, "--wheel and --lib"),
        (["--lib"], {}, "--lib needs a path"),
        (["--root"], {}, "unknown option --root"),
        ([], {"ARCH": "riscv64"}, "ARCH=riscv64"),
    ):
        done = ran(BUILD, *words, env=ENVIRONMENT | variables, cwd=tmp_path)
        assert done.returncode == 1
        assert f"build.sh: {said}" in done.stderr


# --- what dpkg does with it ---------------------------------------------------------------------------------------


class Root:
    """A root folder with its own package database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("var/lib/dpkg/info", "var/lib/dpkg/updates", "etc", "usr/bin", "usr/lib", "tmp"):
            (folder / name).mkdir(parents=True)
        (folder / "var/lib/dpkg/status").touch()

    def dpkg(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        # Its dependencies are on this machine: the scripts run outside the root, which DPKG_ROOT names.
        return ran(
            "dpkg", f"--root={self.folder}", "--force-script-chrootless", "--force-depends", *words,
            env=ENVIRONMENT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def state(self) -> str:
        done = ran("dpkg-query", f"--admindir={self.folder}/var/lib/dpkg", "-W", "-f", "${Status}", "pacecar")
        return done.stdout.rpartition(" ")[2]


@pytest.fixture
def root(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root unpacks a package")
    if shutil.which("systemd-sysusers") is None:
        pytest.skip("systemd-sysusers is not here to make an account")
    return Root(tmp_path / "root")


def test_it_is_installed_upgraded_removed_and_purged(root, package, lib, tmp_path):
    done = root.dpkg("--install", package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert root.state() == "installed"
    assert (root.folder / "etc/passwd").read_text().startswith("pacecar:")
    assert (root.folder / WANTED).is_symlink()
    compiled = [path.name for path in (root.folder / "opt/pacecar/lib/pacecar/__pycache__").iterdir()]
    assert f"__init__.cpython-{PYTHON.replace('.', '')}.pyc" in compiled

    config = root.folder / CONFIG
    config.write_text(SECRET)
    # The same file in the next version: the administrator's stays, without a question.
    done = root.dpkg("--install", package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert config.read_text() == SECRET
    assert not (config.parent / "pacecar.toml.dpkg-dist").exists()

    done = root.dpkg("--remove", "pacecar")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (root.folder / "opt/pacecar").exists(), "what was compiled is gone, too"
    assert config.read_text() == SECRET
    assert root.state() == "config-files"

    (root.folder / "var/lib/pacecar/recordings").mkdir(parents=True)
    done = root.dpkg("--purge", "pacecar")
    assert done.returncode == 0, done.stdout + done.stderr
    for path in ("etc/pacecar", "etc/default/pacecar", "var/lib/pacecar", WANTED):
        assert not (root.folder / path).exists(), path


@pytest.mark.full
def test_a_version_with_another_configuration_keeps_the_administrators_beside_its_own(root, package, tmp_path):
    assert root.dpkg("--install", package).returncode == 0
    config = root.folder / CONFIG
    config.write_text(SECRET)
    unpacked = tmp_path / "next"
    assert ran("dpkg-deb", "--raw-extract", package, unpacked).returncode == 0
    (unpacked / CONFIG).write_text('[daemon]\ndisable = ["numa"]\n')
    control = unpacked / "DEBIAN/control"
    control.write_text(re.sub(r"(Version: .*)-1", r"\1-2", control.read_text()))
    ran("dpkg-deb", "--root-owner-group", "--build", unpacked, tmp_path / "next.deb", env=ENVIRONMENT)
    # Without a terminal for its question dpkg fails instead of deciding.
    done = root.dpkg("--install", tmp_path / "next.deb")
    assert done.returncode != 0
    assert config.read_text() == SECRET
    done = root.dpkg("--force-confdef", "--force-confold", "--configure", "pacecar")
    assert done.returncode == 0, done.stdout + done.stderr
    assert config.read_text() == SECRET
    assert "numa" in (config.parent / "pacecar.toml.dpkg-dist").read_text()


def test_what_pip_installed_at_the_same_place_is_not_mixed_with_it(root, package):
    (root.folder / "opt/pacecar").mkdir(parents=True)
    (root.folder / "opt/pacecar/pyvenv.cfg").touch()
    done = root.dpkg("--install", package)
    assert done.returncode != 0
    assert "/opt/pacecar is a virtual environment" in done.stderr
    assert not (root.folder / "opt/pacecar/lib").exists()
