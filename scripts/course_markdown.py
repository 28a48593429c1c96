"""The Markdown that docs/course.md is written in, as HTML: paragraphs, lists, tables, blocks, `code`, **bold**,
*emphasis*, [links](address). Everything else stays text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lmtool.reporting import html


def rendered(text: str) -> str:
    """Blocks between empty lines."""
    return "\n".join(_block(block) for block in _blocks(text))


def inline(text: str) -> str:
    """What stands within a line."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"<code>{html.escape(part[1:-1])}</code>" if part.startswith("`") else _words(part) for part in parts
    )


def _words(text: str) -> str:
    text = html.escape(text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    text = re.sub(r"(?<![\w*])\*([^\s*](?:[^*]*[^\s*])?)\*(?![\w*])", r"<i>\1</i>", text)
    return re.sub(r"\[([^]]+)\]\(([^)\s]+)\)", lambda link: f'<a href="{_address(link[2])}">{link[1]}</a>', text)


def _address(address: str) -> str:
    """A page beside docs/course.md, from runs/course/index.html."""
    return address if address.startswith(("#", "http")) else f"../../docs/{address}"


def _blocks(text: str) -> Iterator[list[str]]:
    block: list[str] = []
    fenced = False
    for line in text.splitlines():
        if not line.strip() and not fenced:
            if block:
                yield block
            block = []
            continue
        block.append(line)
        fenced ^= line.startswith("```")
        if line.startswith("```") and not fenced:
            yield block
            block = []
    if block:
        yield block


def _block(lines: list[str]) -> str:
    if lines[0].startswith("```"):
        return html.commands(lines[1:-1])
    if lines[0].startswith("|"):
        return _table(lines)
    if lines[0].startswith("### "):
        return f"<h3>{inline(lines[0][4:])}</h3>" + (_block(lines[1:]) if lines[1:] else "")
    words, items = [], []
    for line in lines:
        item = re.match(r"(?:[-*]|\d+\.) (.*)", line)
        if item:
            items.append(item[1])
        elif items:
            items[-1] += " " + line.strip()
        else:
            words.append(line.strip())
    paragraph = f"<p>{inline(' '.join(words))}</p>" if words else ""
    listed = "".join(f"<li>{inline(item)}</li>" for item in items)
    return paragraph + (f"<ul>{listed}</ul>" if listed else "")


def _table(lines: list[str]) -> str:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    head, *body = [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
    heads = "".join(f"<th>{inline(cell)}</th>" for cell in head)
    cells = "".join("<tr>" + "".join(f"<td>{inline(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table></div>'
