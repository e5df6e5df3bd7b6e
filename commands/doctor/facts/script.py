"""Reads the training script: its calls and their literal arguments, parsed from the source without running it.

Values that the script computes (`num_workers=args.workers`, `DDP(model, **options)`) are UNKNOWN, and no rule judges
them.

Left out: other modules that the script imports.
"""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

from .evidence import FactError
from .job import UNKNOWN, Call, Script

__all__ = ["SCRIPT_BYTES_MAX", "read_script"]

SCRIPT_BYTES_MAX = 4 * 1024 * 1024
TEXT_MAX = 160


def read_script(path: Path) -> tuple[Script, tuple[str, ...]]:
    """Return the contents of the script, and no notes; raises OSError, and FactError if it is not Python."""
    with path.open("rb") as stream:
        source = stream.read(SCRIPT_BYTES_MAX + 1)
    if len(source) > SCRIPT_BYTES_MAX:
        raise FactError(f"{path}: larger than {SCRIPT_BYTES_MAX >> 20} MiB, and not read")
    reader = _Reader(str(path), source.decode("utf-8", "replace").splitlines())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in the script do not matter here
            tree = ast.parse(source, filename=str(path))
        reader.visit(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        place = path if line is None else f"{path}:{line}"
        raise FactError(f"{place}: not valid Python: {getattr(error, 'msg', error)}") from error
    return Script(str(path), tuple(reader.calls), frozenset(reader.names), tuple(reader.assigned)), ()


class _Reader(ast.NodeVisitor):
    def __init__(self, path: str, lines: list[str]) -> None:
        self.calls: list[Call] = []
        self.assigned: list[Call] = []
        self.names: set[str] = set()
        self._path = path
        self._lines = lines
        self._imported: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._imported[alias.asname or alias.name.split(".")[0]] = (
                alias.name if alias.asname else alias.name.split(".")[0]
            )
            self.names.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._imported[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"
            self.names.add(f"{node.module or ''}.{alias.name}")

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and len(node.value) <= 32:
            self.names.add(node.value)  # "cuda" is more often a string than a name

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.names.add(node.attr)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            name = self._dotted(target)
            if name is not None and "." in name:
                self.assigned.append(self._call(name, node.lineno, {"value": _literal(node.value)}))
            elif isinstance(target, ast.Subscript) and self._dotted(target.value) == "os.environ":
                key = _literal(target.slice)
                if isinstance(key, str):
                    self.assigned.append(self._call(f"os.environ.{key}", node.lineno, {"value": _literal(node.value)}))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._dotted(node.func)
        if name is not None:
            keywords = {word.arg: _literal(word.value) for word in node.keywords if word.arg is not None}
            is_open = any(word.arg is None for word in node.keywords) or any(
                isinstance(argument, ast.Starred) for argument in node.args
            )
            positional = tuple(_literal(argument) for argument in node.args)
            self.calls.append(self._call(name, node.lineno, keywords, positional, is_open=is_open))
        self.generic_visit(node)

    def _call(
        self,
        name: str,
        line: int,
        keywords: dict[str, object],
        positional: tuple[object, ...] = (),
        *,
        is_open: bool = False,
    ) -> Call:
        text = self._lines[line - 1].strip()[:TEXT_MAX] if line <= len(self._lines) else name
        return Call(name, f"{self._path}:{line}", text, keywords, positional, is_open)

    def _dotted(self, node: ast.expr) -> str | None:
        """Return the full name, as `torch.nn.parallel.DistributedDataParallel` for an alias `DDP`."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join([self._imported.get(node.id, node.id), *reversed(parts)])


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN
