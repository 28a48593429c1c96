"""Elements of a self-contained page: one style sheet, no scripts, no external resources.

Everything that comes from a file goes through `escape`. Functions escape the texts that they are given. Only these
arguments are finished HTML: the body of `write_page`, the parts of `section` and `columns`, the SVG of `figure` and the
table of `scrolling_table`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmtool.errors import UserError, cannot_write
from lmtool.reporting.text import format_value, is_number, number, plain, title
from lmtool.system.files import replace_bytes
from lmtool.system.secrets import masked

_STYLE = """
:root { --paper: #fffffc; --ink: #2b2b2b; --quiet: #70706c; --faint: #d8d8d2; --wash: #f5f5ef; --blue: #1f5f99;
  --rust: #b5532a; --pale: #9db4c8; --green: #2f7a45; --right: #e3f0e4; --wrong: #f8e4da; }
@media (prefers-color-scheme: dark) { :root { --paper: #161718; --ink: #dededa; --quiet: #9a9a95; --faint: #3b3c3e;
  --wash: #202123; --blue: #74b0e4; --rust: #e08a5f; --pale: #5d7488; --green: #77c08c; --right: #1f3526;
  --wrong: #432a20; } }
@media print { :root { --paper: #fff; --wash: #fff; } main { max-width: none; padding: 0; }
  section, figure, .example { break-inside: avoid; } details::details-content { content-visibility: visible; } }
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink); color-scheme: light dark; }
body { margin: 0; font: 15px/1.5 "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; }
main { max-width: 880px; margin: 0 auto; padding: 40px 28px 80px; }
h1 { font-size: 22px; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 12px; font-weight: 600; letter-spacing: .08em; text-transform: uppercase; color: var(--quiet);
  border-top: 1px solid var(--faint); padding-top: 12px; margin: 40px 0 14px; }
h3 { font-size: 14px; font-weight: 600; margin: 20px 0 8px; }
p { margin: 6px 0; } .quiet { color: var(--quiet); } small { font-size: 12.5px; }
.head { display: flex; flex-wrap: wrap; align-items: flex-end; gap: 4px 28px; margin: 24px 0 2px; }
.head .value { font-size: 50px; line-height: 1.1; font-weight: 300; letter-spacing: -.02em; white-space: nowrap; }
.head .value small { font-size: 20px; color: var(--quiet); letter-spacing: 0; }
.head .baseline { font-size: 24px; font-weight: 300; color: var(--rust); white-space: nowrap; }
.head .label { display: block; font-size: 13px; font-weight: 400; color: var(--quiet); letter-spacing: 0;
  white-space: normal; }
.better { color: var(--green); font-weight: 600; } .worse { color: var(--rust); font-weight: 600; }
.unclear { color: var(--rust); }
.strip { display: flex; flex-wrap: wrap; gap: 10px 32px; margin: 22px 0 0; padding: 0; }
.strip div { font-size: 16px; } .strip span { display: block; font-size: 12.5px; color: var(--quiet); }
figure { margin: 0 0 14px; } .narrow { display: none; }
table + figure, pre + figure { margin-top: 20px; }
figure svg { width: 100%; height: auto; display: block; overflow: visible; }
figcaption { font-size: 12.5px; color: var(--quiet); margin-top: 4px; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 0 44px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--faint);
  overflow-wrap: anywhere; } th { font-weight: 400; color: var(--quiet); white-space: nowrap; }
thead th { font-size: 12.5px; white-space: normal; overflow-wrap: break-word; } td.number { white-space: nowrap; }
td.number, th.number { text-align: right; }
.wide { overflow-x: auto; } .wide td, .wide thead th { white-space: nowrap; }
.metadata th { width: 1%; padding-right: 22px; }
.example { border-left: 3px solid var(--faint); padding: 2px 0 2px 14px; margin: 0 0 14px; overflow-wrap: anywhere; }
.example.right { border-color: var(--green); } .example.wrong { border-color: var(--rust); }
mark { color: inherit; border-radius: 3px; padding: 1px 4px; background: var(--wash); }
mark.right { background: var(--right); } mark.wrong { background: var(--wrong); }
mark s { color: var(--quiet); text-decoration-color: var(--rust); }
.guesses { font-size: 13px; margin-top: 6px; } .guesses { width: auto; }
.guesses td { padding: 2px 14px 2px 0; border: 0; }
.guesses td:first-child { white-space: nowrap; }
pre { background: var(--wash); padding: 12px 14px; overflow-x: auto; font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono",
  Menlo, Consolas, monospace; margin: 8px 0; white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--blue); }
@media (max-width: 640px) { main { padding: 28px 16px 60px; } .roomy { display: none; } .narrow { display: block; }
  table { font-size: 12.5px; } th, td { padding-right: 8px; } .metadata th { padding-right: 12px; } }
"""


def escape(value: object, limit: int = 2000) -> str:
    """Returns text for HTML: control characters made visible, cut at `limit` characters, <>&"' escaped."""
    return html.escape(plain(value, limit), quote=True)


def escape_lines(value: object, limit: int) -> str:
    """Returns the text for a <pre>: as by `escape`, but line ends are preserved."""
    text = str(value)
    shown_text = text if len(text) <= limit else text[:limit] + "\n… (cut here)"
    return "\n".join(html.escape(plain(line.replace("\t", "    "))) for line in shown_text.split("\n"))


def write_page(path: Path, heading: str, body: Iterable[str]) -> Path:
    """Writes a page atomically, with secrets masked.

    Args:
        path: the file.
        heading: the title of the page.
        body: HTML elements; empty ones are left out.

    Raises:
        UserError: the file cannot be written.
    """
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(heading, 190)} · lmtool</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + "\n</main>\n</body>\n</html>\n"
    )
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


def section(heading: str, *parts: str) -> str:
    """Returns a section with a heading; "" if all parts are empty."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(heading)}</h2>\n{content}\n</section>" if content else ""


def columns(*parts: str) -> str:
    """Returns blocks in columns, if the page is wide enough."""
    blocks = [f"<div>{part}</div>" for part in parts if part]
    return f'<div class="columns">{"".join(blocks)}</div>' if blocks else ""


def paragraph(text: object, kind: str = "quiet") -> str:
    return f'<p class="{kind}">{escape(text)}</p>'


def headline(value: float, label: str, standard_error: float | None = None, kind: str = "value") -> str:
    """Returns a score in large digits above its label. kind: `value`, or `baseline` for smaller digits."""
    error = f" <small>± {escape(number(standard_error))}</small>" if standard_error is not None else ""
    return f'<div class="{kind}">{escape(number(value))}{error}<span class="label">{escape(label)}</span></div>'


def figure(svg: str, caption: str = "", narrow: str = "") -> str:
    """Returns an inline SVG with its caption. narrow: the SVG for narrow pages, where the first would be illegible."""
    caption_html = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    if svg and narrow:
        svg = f'<div class="roomy">{svg}</div><div class="narrow">{narrow}</div>'
    return f"<figure>{svg}{caption_html}</figure>" if svg else ""


def commands(lines: Sequence[str]) -> str:
    return f"<pre>{escape_lines(chr(10).join(lines), 4000)}</pre>" if lines else ""


def collapsible(summary: str, text: str, limit: int = 100_000) -> str:
    """Returns a long text that a click unfolds."""
    if not text:
        return ""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape_lines(text, limit)}</pre></details>"


def metadata(heading: str, values: Mapping[str, object], limit: int = 60) -> str:
    """Returns the values as a two-column table, each nested mapping as a table below it."""
    flat = [(key, value) for key, value in values.items() if not isinstance(value, Mapping) and value is not None]
    rows = "".join(
        f'<tr><th scope="row">{escape(title(str(key)))}</th><td>{escape(format_value(str(key), value), 600)}</td></tr>'
        for key, value in flat[:limit]
    )
    flat_table = f'<h3>{escape(title(heading))}</h3><table class="metadata">{rows}</table>' if rows else ""
    nested = (
        metadata(f"{heading} · {key}", value, limit) for key, value in values.items() if isinstance(value, Mapping)
    )
    return flat_table + "".join(nested)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table with right-aligned numbers. Columns named seconds, bytes or fraction have readable units."""
    rows = [list(row) for row in rows]

    def number_class(index: int) -> str:
        cells = [row[index] for row in rows if row[index] not in (None, "")]
        numeric = bool(cells) and all(is_number(cell) for cell in cells)
        return ' class="number"' if numeric else ""

    classes = [number_class(index) for index in range(len(header))]
    header_cells = "".join(
        f"<th{number_attribute}>{escape(name, 80)}</th>" for name, number_attribute in zip(header, classes, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{number_attribute}>{_cell(name, value)}</td>"
            for name, number_attribute, value in zip(header, classes, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{header_cells}</tr></thead><tbody>{body}</tbody></table>"


def scrolling_table(table_html: str) -> str:
    """Returns a table that scrolls horizontally on a narrow page."""
    return f'<div class="wide">{table_html}</div>'


def _cell(name: str, value: object) -> str:
    if isinstance(value, float) and not name.endswith(("seconds", "bytes", "fraction")):
        return escape(number(value))
    return "" if value is None else escape(format_value(name, value), 300)
