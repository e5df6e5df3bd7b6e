"""Is `helm` where there is none: renders, lints and packs a chart by Helm's own Go code, a library that PyPI has.

`.ci/tools` installs the library (helm-python-sdk) into .tools/helm and starts this program as .tools/bin/helm.  It
takes the words of helm's own command line that the tests use, so a helm that is installed does as well:

    helm template NAME CHART [--namespace NAMESPACE] [--values FILE]...
    helm lint CHART [--strict] [--values FILE]...
    helm package CHART --destination FOLDER
    helm version

Left out: everything that asks a cluster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

SEVERITIES = ("unknown", "INFO", "WARNING", "ERROR")


def main(arguments: list[str]) -> int:
    """Do what `arguments` say as helm does; return its exit code."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".tools" / "helm"))
    import helm_python as helm

    parser = argparse.ArgumentParser(prog="helm")
    commands = parser.add_subparsers(dest="command", required=True)
    template, lint, package = (commands.add_parser(name) for name in ("template", "lint", "package"))
    commands.add_parser("version")
    template.add_argument("name")
    for one in (template, lint, package):
        one.add_argument("chart")
    for one in (template, lint):
        one.add_argument("--namespace", default="default")
        one.add_argument("--values", action="append", default=[], type=Path)
    lint.add_argument("--strict", action="store_true")
    package.add_argument("--destination", required=True)
    given = parser.parse_args(arguments)
    try:
        if given.command == "version":
            print(helm.helm_sdk_version())
        elif given.command == "package":
            print(helm.package(given.chart, destination=given.destination))
        elif given.command == "template":
            _template(helm, given)
        else:
            return _lint(helm, given)
    except helm.HelmError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _values(helm: Any, files: list[Path]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for file in files:
        merged = _merged(merged, helm.values_from_yaml(file.read_text(encoding="utf-8")))
    return merged


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `over` laid over `under`, at every depth, as helm does with its files of values."""
    return under | {
        key: _merged(under[key], value) if isinstance(value, dict) and isinstance(under.get(key), dict) else value
        for key, value in over.items()
    }


def _template(helm: Any, given: argparse.Namespace) -> None:
    values = _values(helm, given.values)
    with helm.Chart.load(given.chart) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name=given.name, namespace=given.namespace, is_install=True)
    for path, text in sorted(rendered.items()):
        if text.strip() and not path.endswith("NOTES.txt"):
            print(f"---\n# Source: {path}\n{text}")


def _lint(helm: Any, given: argparse.Namespace) -> int:
    report = helm.lint(given.chart, _values(helm, given.values), strict=given.strict, namespace=given.namespace)
    for message in report["messages"]:
        print(f"[{SEVERITIES[message['severity']]}] {message['path']}: {message['error']}")
    for error in report["errors"]:
        print(f"Error: {error}", file=sys.stderr)
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
