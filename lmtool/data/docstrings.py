"""Docstrings of Python files, by parsing them. Run as a script: a JSON list of paths in, a JSON list out.

Only the standard library is imported, so that a child process starts in milliseconds and needs no lmtool on its path;
the files are parsed, never imported. For each path: a list of [line, docstring], in the order of the source.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import tokenize
import warnings
from collections.abc import Iterator

LARGEST = 400_000  # bytes of a file; larger ones are generated tables rather than prose


def docstrings(path: str) -> list[tuple[int, str]]:
    """Line and text of each docstring of a file; none where it is not parseable Python."""
    try:
        with tokenize.open(path) as file:
            source = file.read(LARGEST + 1)
        if len(source) > LARGEST or ('"""' not in source and "'''" not in source):
            return []
        return list(_inside(ast.parse(source)))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _inside(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.lineno, inspect.cleandoc(first.value.value).strip()
    for name in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, name, ()):
            if isinstance(child, ast.stmt | ast.ExceptHandler):
                yield from _inside(child)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # invalid escapes in other people's sources
    json.dump([docstrings(path) for path in json.load(sys.stdin)], sys.stdout)
