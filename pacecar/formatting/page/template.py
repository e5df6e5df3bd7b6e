"""Makes the parts of pages by the macros of `page.html.jinja`, which escapes whatever it prints.

So what comes from records and traces (names, reasons) is never markup.  Only drawings, and parts that the template
itself has made, are handed to it as markup.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["NOTHING", "file_text", "part"]

NOTHING = Markup()
"""What is left out of a page."""


def part(name: str, *values: Any) -> Markup:  # noqa: ANN401  a macro takes what it prints
    """Return the part of the page that the macro `name` makes of `values`, all of which it escapes."""
    return Markup(getattr(_template(), name)(*values))


def file_text(name: str) -> str:
    """Return the text of a file of this folder."""
    return (resources.files("pacecar.formatting.page") / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:  # noqa: ANN401  its macros are attributes that only the template knows
    environment = Environment(loader=FunctionLoader(file_text), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.jinja").module
