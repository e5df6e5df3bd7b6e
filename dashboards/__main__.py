"""Writes the generated dashboards, rules and docs/metrics.md into the checkout in the working directory.

Run as `python -m pacecar.dashboards` or `make dashboards`.  It writes dashboards/generated/, docs/metrics.md, and the
rules as an object of the Prometheus operator.  To get the dashboards of an installed pacecar, use `pacecar dashboards
export DIR`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import DashboardsError, generate
from .reference import reference


def main(root: Path) -> int:
    """Write the generated files below `root`; return an exit code."""
    page = root / "docs" / "metrics.md"
    rule = root / "deploy" / "kubernetes" / "components" / "prometheusrule" / "prometheusrule.yaml"
    if not (root / "pyproject.toml").is_file() or not page.parent.is_dir():
        print(f"{root}: not a checkout of pacecar; run this where pyproject.toml is", file=sys.stderr)
        return 2
    try:
        written = generate(root / "dashboards" / "generated")
        from .kubernetes import prometheus_rule  # needs pyyaml, for which `generate` has checked

        page.write_text(reference(), encoding="utf-8")
        rule.write_text(prometheus_rule(), encoding="utf-8")
    except DashboardsError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    for path in [*written, page, rule]:
        print(path.relative_to(root))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
