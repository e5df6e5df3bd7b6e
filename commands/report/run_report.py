"""Runs `pacecar report`: reads the inputs, builds the document, writes a file or prints text, and returns an exit code.

    0 the report is complete    1 no report, or one of damaged input, which it mentions    130 Ctrl-C

The file is replaced atomically, so that reloading a page never shows half of it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from pacecar.formatting.plain_text import clean
from pacecar.safe_files import is_stdout, output

from ..shared_options import complain
from .build import BuildOptions, Built, build_report
from .comparison import compare
from .document import Report, RunComparison
from .output.html import comparison_page, report_page
from .output.markdown import comparison_markdown, report_markdown
from .reading.inputs import find_inputs
from .reading.notices import ReportError

__all__ = ["ReportOptions", "run_report"]

Form = Literal["html", "json", "markdown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """The command's options, parsed.  `runs` has more than one only with `is_comparison`."""

    runs: tuple[Path, ...]
    build: BuildOptions
    is_comparison: bool = False
    form: Form = "html"
    output: Path | None = None
    recordings: tuple[Path, ...] = ()


def run_report(options: ReportOptions) -> int:
    """Make the report; return the exit code."""
    folder = Path()
    try:
        built: list[Built] = []
        for run in options.runs:
            inputs = find_inputs(run, options.recordings)
            folder = folder if built else inputs.folder
            one = build_report(inputs, options.build)
            for notice in one.report.notices:
                complain(clean(f"{run}: {notice.line}"))
            built.append(one)
        text = _text(built, options)
        _write(text, options, _default_output(options, folder))
    except ReportError as error:
        complain(clean(str(error)))
        return 1
    except BrokenPipeError:
        raise  # click handles a closed pipe
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else options.output or folder
        complain(clean(f"{where}: cannot be written: {error.strerror or error}; use --output FILE to write elsewhere"))
        return 1
    except OverflowError as error:
        complain(clean(f"{folder}: a number in the records is out of range: {error}"))
        return 1
    except KeyboardInterrupt:
        return 130
    damaged = any(notice.is_damage for one in built for notice in one.report.notices)
    return 1 if damaged else 0


def _text(built: list[Built], options: ReportOptions) -> str:
    document: Report | RunComparison = compare(built) if options.is_comparison else built[0].report
    if options.form == "json":
        return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
    if isinstance(document, RunComparison):
        return comparison_page(document) if options.form == "html" else comparison_markdown(document)
    return report_page(document) if options.form == "html" else report_markdown(document)


def _default_output(options: ReportOptions, folder: Path) -> Path:
    if options.is_comparison:
        return Path("comparison.html")
    run = options.runs[0]
    return folder / (f"{run.resolve().stem}.report.html" if run.is_file() else "report.html")


def _write(text: str, options: ReportOptions, default: Path) -> None:
    """Print the text, or write it and print where."""
    if options.output is None and options.form != "html":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = options.output or default
    with output(path) as stream:
        stream.write(text.encode())
    if is_stdout(path):
        return
    sys.stdout.write(f"{clean(path)}\n")
