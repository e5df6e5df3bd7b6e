"""Brings pages that lie outside docs/ into the site, and turns links between them into links of the site.

The pages are written to be read in the repository, where a link is a path from the page to a file.  mkdocs knows only
docs/.  So README, ARCHITECTURE and the like become pages under `repository/`, and every link is resolved to a path in
the repository and from there to the page that shows it.  A link to a file that is no page, such as a module, becomes
its path in code type, because the site does not contain it.

mkdocs calls `on_files` and `on_page_markdown`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

OUTSIDE = {
    "README.md": "repository/readme.md",
    "ARCHITECTURE.md": "repository/architecture.md",
    "CONTRIBUTING.md": "repository/contributing.md",
    "CHANGELOG.md": "repository/changelog.md",
    "deploy/README.md": "repository/deploy.md",
    "bench/README.md": "repository/bench.md",
}
"""Path in the repository -> page of the site."""

_PLACE = {page: path for path, page in OUTSIDE.items()}

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")

_BLOCK = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any, **_: object) -> Any:  # noqa: ANN401  mkdocs' own types
    """Add the pages that lie outside docs/."""
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: object) -> str:  # noqa: ANN401
    """Rewrite the links of one page."""
    here = page.file.src_uri
    place = posixpath.dirname(_PLACE.get(here, f"docs/{here}"))

    def rewrite(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(place, path))
        shown = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if shown is None or files.get_file_from_path(shown) is None:
            if not (ROOT / path).exists():
                return match[0]  # mkdocs says that it leads nowhere
            return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
        return f"{mark}[{text}]({posixpath.relpath(shown, posixpath.dirname(here) or '.')}{hash_mark}{anchor})"

    parts = _BLOCK.split(markdown)
    return "".join(part if part.lstrip().startswith("```") else _LINK.sub(rewrite, part) for part in parts)
