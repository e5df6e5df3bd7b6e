"""`python -m pacecar.dashboards`: write what is generated from the catalog into the checkout one stands in.

That is dashboards/generated/*.json and docs/metrics.md; `make dashboards` calls it.  Elsewhere, to get the dashboards
out of an installed pacecar, there is `pacecar dashboards export DIR`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import DashboardsError, generate
from .reference import reference


def main(root: Path) -> int:
    """Write the generated files below `root`; return an exit code."""
    page = root / "docs" / "metrics.md"
    if not (root / "pyproject.toml").is_file() or not page.parent.is_dir():
        print(f"{root}: not a checkout of pacecar; run this where pyproject.toml is", file=sys.stderr)
        return 2
    try:
        written = generate(root / "dashboards" / "generated")
        page.write_text(reference(), encoding="utf-8")
    except DashboardsError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    for path in [*written, page]:
        print(path.relative_to(root))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
