"""Self-contained pages from the Jinja templates in `templates/`: one style sheet, at most one script, no external
resources. A page is readable without its script.

Templates escape every value as `escape` does, since texts of users are hostile. Only `Markup` is inserted unchanged:
the output of macros and filters, the SVG of a figure, and the script. A browser runs no other script, because the page
allows only the hash of its own.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lmtool.errors import UserError, cannot_write
from lmtool.reporting.text import format_value, is_number, is_numeric, number, percent, plain, title
from lmtool.system.files import replace_bytes
from lmtool.system.secrets import masked
from lmtool.system.terminal import counted

if TYPE_CHECKING:
    from jinja2 import Environment
GENERATOR = '<meta name="generator" content="lmtool">'
"""The mark of a page that lmtool wrote, in its head."""
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Word:
    """A word of a text in a page.

    kind: "right" or "wrong" for a colored word, "quiet" for gray, "" for a plain one. truth: the right word or label,
    struck out. label: a small label after the word. space: the text before the word.
    """

    text: str
    kind: str = ""
    truth: str = ""
    label: str = ""
    space: str = " "


def escape(value: object, limit: int | None = 2000) -> Markup:
    """Returns text for HTML: control characters made visible, cut at `limit` characters, <>&"' escaped."""
    return Markup(html.escape(plain(value, limit), quote=True))


def escape_lines(value: object, limit: int) -> Markup:
    """Returns the text for a <pre>: as by `escape`, but line ends are preserved."""
    text = str(value)
    shown_text = text if len(text) <= limit else text[:limit] + "\n… (cut here)"
    return Markup("\n").join(escape(line.replace("\t", "    "), None) for line in shown_text.split("\n"))


@cache
def _environment() -> Environment:
    # Imported late: a command that writes no page should not wait for it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if hasattr(value, "__html__") else escape(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cut": escape, "lines": escape_lines, "number": number, "percent": percent, "words": title}
    environment.globals |= {
        "cell": _cell,
        "cell_class": _cell_class,
        "column_classes": _column_classes,
        "content_policy": _content_policy,
        "counted": counted,
        "format_value": format_value,
        "sort_value": _sort_value,
        "generator": Markup(GENERATOR),
    }
    return environment


def render(template: str, **values: Any) -> str:
    """Returns a template of `templates/`, filled with the values."""
    return _environment().get_template(template).render(values)


def write_page(path: Path, template: str, heading: str, **values: Any) -> Path:
    """Writes a page atomically, with secrets masked. template: one of `templates/` that extends page.html; or page.html
    itself, with finished HTML as `body`. heading: the title of the page. values: those in the template. Raises
    UserError if the file cannot be written."""
    text = render(template, heading=heading, **values)
    with report_write_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Lone surrogates of a damaged file name become question marks instead of an error.
        replace_bytes(path, masked(text).encode("utf-8", "replace"))
    return path


@contextmanager
def report_write_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError into a UserError, which advises to copy the run: a report is always in the folder of its run."""
    try:
        yield
    except OSError as error:
        hint = (
            f"free space there, or copy the folder to a writable disk (cp -r {folder} FOLDER) and "
            "pass the copy to lmtool report"
        )
        raise UserError(cannot_write(Path(error.filename or folder), error).message, hint) from error


def _content_policy(script: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    scripts = f"script-src 'sha256-{digest}'; " if script else ""
    return Markup(f"default-src 'none'; {scripts}style-src 'unsafe-inline'; img-src data:")


def _column_classes(rows: Sequence[Sequence[object]]) -> list[str]:
    return ["number" if is_numeric(column) else "" for column in zip(*rows, strict=True)]


# Longer words may be broken between any two letters, so that they do not widen their column.
_WORD_CHARACTERS = 24


def _cell_class(column_class: str, text: str) -> Markup:
    has_long_word = any(len(word) > _WORD_CHARACTERS for word in text.split())
    names = " ".join(filter(None, (column_class, "long" if has_long_word else "")))
    return Markup(f' class="{names}"' if names else "")


def _sort_value(value: object, text: str) -> Markup:
    is_plain = text.replace(",", "").replace(".", "", 1).isdecimal()
    return Markup(f' data-sort="{value}"' if is_number(value) and not is_plain else "")


def _cell(name: str, value: object) -> Markup:
    if isinstance(value, float) and not name.endswith(("seconds", "bytes", "fraction")):
        return escape(number(value))
    return escape("" if value is None else format_value(name, value), 300)
