"""Reads, renders and validates the files of deploy/ with the tools that use them."""

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
"""Kind -> schema of the Prometheus operator's objects, whose version is in the file."""


def ran(*command: str | Path, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with its output as text."""
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
    """Return the objects that `kubectl kustomize` renders from a folder; skips without kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not here: it brings kustomize")
    done = ran(kubectl, "kustomize", folder)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one is not None]


def valid(objects: list[dict[str, Any]], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Validate the objects, except the Prometheus operator's, strictly by Kubernetes' own schemas."""
    file = tmp_path / "objects.yaml"
    # Without the texts of dashboards, which other tests validate and which take seconds here.
    judged = [
        one | {"data": dict.fromkeys(one["data"], "text")} if one["kind"] == "ConfigMap" else one
        for one in objects
        if one["kind"] not in OPERATOR
    ]
    file.write_text(yaml.dump_all(judged, Dumper=yaml.CSafeDumper))
    return ran(beside_python("kubernetes-validate"), "--strict", file)


def operator_errors(objects: list[dict[str, Any]]) -> list[str]:
    """Return the errors of the Prometheus operator's schemas in its objects, including unknown fields."""
    return [
        f"{one['kind']}/{one['metadata']['name']}: {error.json_path}: {error.message}"
        for one in objects
        if one["kind"] in OPERATOR
        for error in jsonschema.Draft7Validator(_strict(OPERATOR[one["kind"]])).iter_errors(one)
    ]


def _strict(schema: Any) -> Any:
    """Return the schema without additional properties."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    return strict
