"""What the tests of deploy/ share: how its files are read and rendered, and judged by the tools of who reads them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

__all__ = ["DEPLOY", "ROOT", "beside_python", "built", "documents", "operator_errors", "ran", "valid"]

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"

OPERATOR = json.loads((Path(__file__).parent / "operator_schemas.json").read_text(encoding="utf-8"))["schemas"]
"""Kind -> schema, of the objects of the Prometheus operator; the file says of which version."""


def ran(*command: str | Path, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; what it said is text."""
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=timeout, check=False, **options
    )


def beside_python(name: str) -> str:
    """Return a program that a development dependency installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"{name} is a development dependency: run `make test`"
    return found


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the documents of a YAML file, without empty ones."""
    return [one for one in yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader) if one is not None]


def built(folder: Path) -> list[dict[str, Any]]:
    """Return what kustomize makes of a folder, by kubectl; skips where there is none."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not here: it brings kustomize")
    done = ran(kubectl, "kustomize", folder)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one is not None]


def valid(objects: list[dict[str, Any]], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Let Kubernetes' own schemas judge the objects, strictly; those of the Prometheus operator are left out."""
    file = tmp_path / "objects.yaml"
    # Of dashboards only that there is text: what is in it is read elsewhere, and takes seconds here.
    judged = [
        one | {"data": dict.fromkeys(one["data"], "text")} if one["kind"] == "ConfigMap" else one
        for one in objects
        if one["kind"] not in OPERATOR
    ]
    file.write_text(yaml.dump_all(judged, Dumper=yaml.CSafeDumper))
    return ran(beside_python("kubernetes-validate"), "--strict", file)


def operator_errors(objects: list[dict[str, Any]]) -> list[str]:
    """Return what the Prometheus operator's own schemas refuse in its objects, unknown fields too."""
    return [
        f"{one['kind']}/{one['metadata']['name']}: {error.json_path}: {error.message}"
        for one in objects
        if one["kind"] in OPERATOR
        for error in jsonschema.Draft7Validator(_strict(OPERATOR[one["kind"]])).iter_errors(one)
    ]


def _strict(schema: Any) -> Any:
    """Return a schema in which an object has no other fields than those that are named."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    return strict
