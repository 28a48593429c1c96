"""Reading the small files of a tokenizer folder, with errors that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmtool.errors import UserError


def read_text(path: Path) -> str:
    """A file in UTF-8, its line ends as they are."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as problem:
        raise broken(path, str(problem)) from problem


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. UserError naming the file, and the line, where it is none."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        if "\\ud" in text.lower():  # escapes, of which one alone is half a character
            json.dumps(content, ensure_ascii=False).encode()
    except json.JSONDecodeError as problem:
        raise broken(path, problem.msg, problem.lineno) from problem
    except (UnicodeError, RecursionError) as problem:
        raise broken(path, str(problem)) from problem
    if not isinstance(content, dict):
        raise broken(path, "it holds no JSON object")
    return content


def broken(path: Path, problem: str, line: int | None = None) -> UserError:
    """The error of a file that is not a tokenizer's."""
    at = f"{path}:{line}" if line else str(path)
    return UserError(
        f"{at}: not a readable tokenizer: {' '.join(problem.split())[:200]}",
        "copy the file again, or train a tokenizer with `lmtool tokenizer`",
    )
