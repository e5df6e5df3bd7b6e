"""Prints and exports the files of `deploy/` (units, manifests, scripts) of the installed version.

An installation from a wheel has no checkout to copy a unit file from, and a unit file on a web page may be of another
version.

Exported files keep their paths in the repository (`deploy/...` and `dashboards/generated/...`), because
compose.yaml and the kustomizations name each other by them.

This module applies nothing to a machine.

To add a value to the Helm chart in `deploy/helm/pacecar/`: document it in `values.yaml`, declare its type in
`values.schema.json`, use it in a template, and refuse contradicting values in
`deploy/helm/pacecar/templates/_checks.tpl`.  In `tests/deploy/test_helm.py`, add it to `EVERYTHING`, and test the
refusal.  If `deploy/kubernetes/base` also needs it,
add it there.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from pacecar.safe_files import FOLDER_MODE, replacing

__all__ = ["DeployError", "export", "listing", "show"]

DATA_SUFFIXES = (
    ".conf", ".dockerignore", ".json", ".md", ".sbatch", ".service", ".sh", ".socket", ".toml", ".tpl", ".txt", ".yaml",
    ".yml",
)  # fmt: skip

PROGRAMS = (".sbatch", ".sh")


class DeployError(RuntimeError):
    """A file cannot be shown or written; the message names it."""


def listing() -> dict[str, list[str]]:
    """Return the paths of the files of each topic, which is a folder."""
    found: dict[str, list[str]] = {}
    for path in _texts(files("pacecar.deploy"), ""):
        topic, slash, _ = path.partition("/")
        if slash:
            found.setdefault(topic, []).append(path)
    return dict(sorted(found.items()))


def show(what: str) -> str:
    """Return a file, or all files of a topic with headings; raises DeployError."""
    topics = listing()
    texts = _texts(files("pacecar.deploy"), "")
    if what in texts:
        return texts[what]
    if what not in topics:
        raise DeployError(f"no file or topic {what!r}; the topics are {', '.join(topics)}")
    return "\n".join(f"# ---- deploy/{path}\n{texts[path]}" for path in topics[what])


def export(out_dir: Path, *, force: bool = False) -> list[Path]:
    """Write all files below `out_dir` and return their paths.

    Raises:
        DeployError: an existing file differs and `force` is false; then nothing is written.
        OSError: a file cannot be written.
    """
    wanted = {f"deploy/{path}": text for path, text in _texts(files("pacecar.deploy"), "").items()}
    generated = files("pacecar.dashboards") / "generated"
    wanted |= {f"dashboards/generated/{path}": text for path, text in _texts(generated, "").items()}
    if not force:
        for path, text in wanted.items():
            if (out_dir / path).exists() and (out_dir / path).read_text(encoding="utf-8", errors="replace") != text:
                raise DeployError(f"{out_dir / path} exists and differs; nothing was written (--force replaces it)")
    written = []
    for path, text in sorted(wanted.items()):
        file = out_dir / path
        is_program = file.suffix in PROGRAMS
        # Not 0600: the files hold no secrets, and Prometheus and Grafana read them as other users.
        with replacing(
            file, mode=0o755 if is_program else 0o644, keep_mode=not is_program, make_mode=FOLDER_MODE
        ) as stream:
            stream.write(text.encode())
        written.append(file)
    return written


def _texts(folder: Traversable, prefix: str) -> dict[str, str]:
    """Return path -> text of all data files, sorted."""
    return dict(sorted(_walk(folder, prefix)))


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _walk(item, f"{prefix}{item.name}/")
        elif item.name.endswith(DATA_SUFFIXES) or item.name == "Containerfile":
            yield f"{prefix}{item.name}", item.read_text(encoding="utf-8")
