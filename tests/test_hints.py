"""Every key, value, command and flag that a text of lmtool names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.hints import UNKNOWN, wrong_in
from tests.test_layers import PACKAGE, SOURCES, free_trees, tree_of

__all__ = ["free_trees"]

# HTML attributes, shell variables, and odd texts for tests of tokenizers.
NO_MESSAGES = (
    "reporting/html.py",
    "reporting/drawing.py",
    "cli/completion.py",
    "course/page.py",
    "weights/comparing.py",
)
_MARKUP = re.compile(r'<.*="|\(\?')


def texts(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """The line and text of every string except docstrings, and whether it may name keys of its section without the
    section's name."""
    hidden: set[ast.AST] = set()
    local: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            hidden.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            hidden.update(node.values)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Field", "ValueError"):
            local.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, node in local
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else UNKNOWN for part in node.values]
            yield node.lineno, "".join(map(str, parts)), node in local


@pytest.mark.parametrize("package", sorted({path.relative_to(PACKAGE).parts[0] for path in SOURCES}))
def test_names_in_texts_exist(package: str) -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {problem}"
        for path in SOURCES
        if (name := str(path.relative_to(PACKAGE))).split("/")[0] == package and name not in NO_MESSAGES
        for line, text, local in texts(tree_of(path))
        if not _MARKUP.search(text)
        for problem in wrong_in(text, local)
    ]
    assert not wrong, "\n".join(wrong)
