"""What operators install, in a Debian of its own: the package of real wheels, and the image, built without any daemon.

mmdebstrap makes the Debian in a scratch folder; what runs there runs in a mount namespace with that folder as its root.
Neither the packages nor the containers of this machine are touched.  The image's base is that Debian with python,
because there is no registry here to fetch the Containerfile's own from; all its steps are run as they stand.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.readers import DEPLOY, ROOT, ran
from tests.kit.tools import find_tool

pytestmark = [pytest.mark.slow, pytest.mark.full]

PACKAGES = (
    "python3,python3-venv,python-is-python3,ca-certificates,init-system-helpers,systemd-standalone-sysusers,man-db"
    ",buildah"
)

SHARED = ("/etc/ssl/certs", "/etc/pip.conf", "/etc/resolv.conf")
"""How this machine reaches its package index."""

ENTER = """
mount --make-rprivate / && mount --bind "$1" "$1" && mount -t proc proc "$1/proc" && mount --rbind /sys "$1/sys" \
  && mount --rbind /dev "$1/dev" && mount -t tmpfs tmpfs "$1/run" && mkdir -p "$1/.old" "$1/base" "$1/source" || exit 99
mount --bind "$1" "$1/base" && mount --bind "$2" "$1/source" && mount --bind "$3" "$1/var/lib/containers" || exit 99
for path in SHARED; do
  [ ! -e "$path" ] || { [ -d "$path" ] || touch "$1$path"; mount --rbind "$path" "$1$path"; } || exit 99
done
cd "$1" && pivot_root . .old || exit 99
shift 3
exec chroot . /bin/sh -c 'umount -l /.old; exec "$@"' sh /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  LC_ALL=C.UTF-8 HOME=/root BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs "$@"
""".replace("SHARED", " ".join(SHARED))
"""root, sources, folder of images, command: runs the command in a mount namespace with that root."""

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PACECAR_", "PYTHON"))}

TLS = """
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=elsewhere \
  -keyout /tmp/web/node.key -out /tmp/web/node.crt 2>/dev/null
printf 'tls_server_config: {cert_file: node.crt, key_file: node.key, client_ca_file: node.crt, client_auth_type:
  RequireAndVerifyClientCert}\\n' >/tmp/web/web.yml
"""


class Debian:
    """A Debian below a folder."""

    def __init__(self, folder: Path, images: Path) -> None:
        self.folder = folder
        self._images = images

    def run(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a program inside."""
        return ran(
            "unshare", "--mount", "sh", "-c", ENTER, "enter", self.folder, ROOT, self._images, *words,
            env=ENVIRONMENT, timeout=timeout, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def shell(self, script: str, timeout: float = 120) -> str:
        """Run lines of shell inside; fails with what they said."""
        done = self.run("sh", "-euc", script, timeout=timeout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout


@pytest.fixture(scope="module")
def debian(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("only root changes its root")
    bootstrap = find_tool("mmdebstrap")
    folder = tmp_path_factory.mktemp("debian")
    root, images = folder / "root", folder / "images"
    images.mkdir()
    done = ran(bootstrap, "--variant=minbase", "--mode=root", f"--include={PACKAGES}", "bookworm", root, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (root / "var/lib/containers").mkdir(exist_ok=True)
    made = Debian(root, images)
    made.shell("test -f /source/pyproject.toml")
    yield made
    shutil.rmtree(folder)


TICKS = """
{before}pacecar daemon --port 0 >/tmp/log 2>&1 &
for i in $(seq 100); do sleep 0.2; {health} 2>/tmp/said && break; done || cat /tmp/log /tmp/said
kill $!; wait $!
"""
"""Starts a daemon, asks whether it is healthy until it is, and ends it."""


def test_the_image_is_built_and_its_healthcheck_works_under_tls(debian, tmp_path):
    """As `make image BUILDER=buildah` builds it, whose command is written down by a stand-in."""
    mounts = " ".join(f"--volume {path}:{path}:ro" for path in SHARED[:2] if Path(path).exists())
    (tmp_path / "buildah").write_text('#!/bin/sh\necho "buildah $*"\n')
    (tmp_path / "buildah").chmod(0o755)
    flags = f"--build-arg PYTHON_IMAGE=localhost/base {mounts}"
    words = (f"BUILDER={tmp_path}/buildah", "IMAGE=pacecar:test", f"BUILD_FLAGS={flags}")
    build = ran("make", "--no-print-directory", "image", *words, cwd=ROOT).stdout
    debian.shell(
        'c=$(buildah from scratch); buildah add -q "$c" /base /; buildah commit -q --rm "$c" base', timeout=600
    )
    debian.shell(f"cd /source; {build}", timeout=900)
    said = json.loads(debian.shell("buildah inspect --type image localhost/pacecar:test"))["Docker"]["config"]
    assert said["User"] == "65532:65532"
    assert said["Entrypoint"] + said["Cmd"] == ["pacecar", "daemon"]
    (kind, *health) = said["Healthcheck"]["Test"]
    assert kind == "CMD"
    inside = TICKS.format(before="", health=" ".join(health))
    container = (
        "mkdir -p /tmp/run /tmp/web; {tls} chmod 644 /tmp/web/node.key; chown 65532:65532 /tmp/run\n"
        "c=$(buildah from localhost/pacecar:test)\nbuildah run --user 65532:65532 {environ}"
        ' --volume /tmp/run:/run/pacecar --volume /tmp/web:/tmp/web:ro "$c" sh -c "$(cat /tmp/inside)"'
    )
    (debian.folder / "tmp/inside").write_text(inside)
    for environ in ("", "--env PACECAR_DAEMON_WEB_CONFIG_FILE=/tmp/web/web.yml"):
        assert debian.shell(container.format(tls=TLS, environ=environ)).splitlines()[-1] == "ok"


def test_the_package_of_real_wheels_is_installed_runs_and_keeps_what_was_changed(debian, tmp_path):
    built = ran(DEPLOY / "deb/build.sh", tmp_path, env={**ENVIRONMENT, "PYTHON": sys.executable}, timeout=900)
    assert built.returncode == 0, built.stdout + built.stderr
    shutil.copy(built.stdout.strip(), debian.folder / "tmp/pacecar.deb")
    contents = ran("dpkg-deb", "--contents", built.stdout.strip()).stdout
    for version in ("311", "312", "313"):
        assert f"msgspec/_core.cpython-{version}-" in contents
    debian.shell("dpkg --install /tmp/pacecar.deb")
    assert debian.shell("pacecar version").startswith("pacecar ")
    assert "cpus" in debian.shell("pacecar sample")
    assert "pacecar" in debian.shell("getent passwd pacecar")
    assert "fresh numbers" in " ".join(debian.shell("man pacecar-health").split())
    environ = "export PACECAR_DAEMON_SOCKET=/run/s\n"
    assert debian.shell(environ + TICKS.format(before="", health="pacecar health")).splitlines()[-1] == "ok"
    mine = '[daemon]\nlog_level = "debug"\n'
    (debian.folder / "etc/pacecar/pacecar.toml").write_text(mine)
    debian.shell("dpkg --install /tmp/pacecar.deb")
    assert (debian.folder / "etc/pacecar/pacecar.toml").read_text() == mine
    assert "pacecar top" in debian.shell("pacecar top --help"), "with what it draws with"
    debian.shell("dpkg --purge pacecar")
    assert not (debian.folder / "opt/pacecar").exists()
    assert not (debian.folder / "etc/pacecar").exists()
