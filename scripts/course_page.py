"""The page of the course: its text, what the commands printed, and the figures and tables of the pages they wrote, in
one file that needs no other."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from course_claims import FAILS, HOLDS, Verdict, judge
from course_markdown import inline, rendered
from course_text import Claim, Commands, Course, Part, Printed, Prose, Show, Topic

from lmtool.reporting import html
from lmtool.reporting.text import duration

# Topics are the headings of this page; what is embedded has smaller ones. Printed tables keep their columns.
_STYLE = """<style>
h2 { font-size: 20px; letter-spacing: 0; text-transform: none; color: var(--ink); margin-top: 56px; }
.unclear { color: var(--quiet); }
h2 small { font-weight: 400; color: var(--quiet); float: right; }
h3, h4 { font-size: 13px; color: var(--quiet); margin: 14px 0 6px; }
pre.printed { white-space: pre; overflow-wrap: normal; font-size: 11.5px; }
blockquote { margin: 14px 0; padding: 8px 14px; border-left: 3px solid var(--faint); background: var(--wash); }
a { color: var(--blue); } code { font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
td.number, th.number { overflow-wrap: normal; }
@media (max-width: 600px) { h2 small { float: none; display: block; } }
li { margin: 6px 0; } .contents { padding-left: 0; list-style: none; columns: 2 300px; column-gap: 44px; }
.contents li { margin: 0; padding: 3px 0; break-inside: avoid; display: flex; justify-content: space-between;
  gap: 14px; } .contents span { color: var(--quiet); white-space: nowrap; }
</style>"""
_PRINTED = 40_000
_COLUMNS = 110
_PIECE = re.compile(r"<h[23][^>]*>.*?</h[23]>|<figure>.*?</figure>|<table.*?</table>", re.DOTALL)


@dataclass
class Spent:
    """What a topic took: seconds of its finished commands by their number; finished: none is left."""

    seconds: list[float] = field(default_factory=list)
    finished: bool = False


def write_course(course: Course, folder: Path, spent: dict[str, Spent]) -> Path:
    """index.html in the folder of the runs; its path."""
    embedded = _Embedded(folder)
    verdicts = {
        (topic.id, place): judge(part, folder)
        for topic in course.topics
        for place, part in enumerate(topic.parts)
        if isinstance(part, Claim)
    }
    body = [
        _STYLE,
        f"<h1>{html.escape(course.title)}</h1>",
        rendered(course.opening.text),
        _contents(course.topics, spent),
        *(_topic(topic, spent[topic.id], embedded, verdicts) for topic in course.topics),
        _claims(course.topics, verdicts),
    ]
    path = folder / "index.html"
    html.write_page(path, course.title, body)
    return path


def _contents(topics: Sequence[Topic], spent: dict[str, Spent]) -> str:
    lines = "".join(
        f'<li><a href="#{topic.id}">{topic.number}. {inline(topic.title)}</a><span>{_time(spent[topic.id])}</span></li>'
        for topic in topics
    )
    seconds = sum(sum(topic.seconds) for topic in spent.values())
    return f'<ul class="contents">{lines}</ul>' + html.paragraph(
        f"{duration(seconds)} in all. Typed one by one, each command takes some seconds more: it loads torch itself."
    )


def _time(spent: Spent) -> str:
    return "not run yet" if not spent.finished else duration(sum(spent.seconds)) if spent.seconds else ""


def _topic(topic: Topic, spent: Spent, embedded: _Embedded, verdicts: dict[tuple[str, int], Verdict]) -> str:
    parts = []
    for place, part in enumerate(topic.parts):
        if isinstance(part, Claim):
            parts.append(_claim(part, verdicts[topic.id, place]))
        else:
            parts.append(_part(topic, part, spent, embedded))
    heading = f'<h2 id="{topic.id}">{topic.number}. {inline(topic.title)} <small>{_time(spent)}</small></h2>'
    return f"<section>\n{heading}\n" + "\n".join(parts) + "\n</section>"


def _part(topic: Topic, part: Part, spent: Spent, embedded: _Embedded) -> str:
    if isinstance(part, Prose):
        return rendered(part.text)
    if isinstance(part, Commands):
        seconds = spent.seconds[part.first : part.first + len(part.lines)]
        return html.commands(part.lines) + _runs(part, embedded.folder, seconds)
    if isinstance(part, Show):
        return embedded.shown(part)
    assert isinstance(part, Printed)
    numbers = range(part.block.first, part.block.first + len(part.block.lines))
    printed = "".join(_read(stdout_of(embedded.folder, topic, number)) for number in numbers)
    text = "\n".join(wrapped for line in part.lines(printed) for wrapped in _wrapped(line))
    return f'<pre class="printed">{html.escape_lines(text, _PRINTED)}</pre>' if text else ""


def _wrapped(line: str) -> list[str]:
    """A printed line in the width of the page, behind the first below its label."""
    if len(line) <= _COLUMNS:
        return [line]
    label = re.match(r"\s*\S+( \S+)?\s{2,}", line)
    indent = " " * (len(label[0]) if label else 2)
    return textwrap.wrap(line, _COLUMNS, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False)


def _runs(block: Commands, folder: Path, seconds: Sequence[float]) -> str:
    """A line below a block: how long it took, and the reports of the runs that it trained."""
    names = re.findall(r"\bname=([\w-]+)", " ".join(block.lines))
    links = []
    for name in dict.fromkeys(names):
        page = next((file for file in ("report.html", "sweep.html") if (folder / "runs" / name / file).exists()), None)
        if page:
            links.append(f'<a href="runs/{name}/{page}">{name}</a>')
    took = duration(sum(seconds)) if len(seconds) == len(block.lines) else ""
    words = " · ".join(part for part in (took, f"report of {', '.join(links)}" if links else "") if part)
    return f'<p class="quiet"><small>{words}</small></p>' if words else ""


def _claim(claim: Claim, verdict: Verdict) -> str:
    kind = {HOLDS: "better", FAILS: "worse"}.get(verdict.words, "unclear")
    words = f'<span class="{kind}">{html.escape(verdict.words)}</span>'
    return (
        f"<blockquote>{inline(claim.text)}: {words}<br><small class='quiet'>{html.escape(verdict.numbers)}"
        "</small></blockquote>"
    )


def _claims(topics: Sequence[Topic], verdicts: dict[tuple[str, int], Verdict]) -> str:
    """All claims with their verdicts, at the end."""
    rows = [
        (topic.number, claim.text, verdicts[topic.id, place].words)
        for topic in topics
        for place, claim in enumerate(topic.parts)
        if isinstance(claim, Claim)
    ]
    if not rows:
        return ""
    words = (
        "A difference is called clear where its 95% interval leaves zero out: over n runs that of their spread "
        "(Welch's t), of one run that of the rows it was scored on. With two runs a difference has to be large to be "
        "clear, and what is not clear here, or does not hold, may hold at a larger scale."
    )
    counts = Counter(verdict for _, _, verdict in rows)
    counted = ", ".join(f"{verdict}: {count}" for verdict, count in counts.most_common())
    table = html.table(["topic", "claim", "here"], rows)
    return f'<h2 id="claims">Claims</h2>{html.paragraph(counted)}{html.paragraph(words)}{table}'


def stdout_of(folder: Path, topic: Topic, number: int) -> Path:
    """Where the output of a command of a topic, from 0, is kept."""
    return folder / "logs" / f"{topic.id}-{number + 1}.out"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


class _Embedded:
    """Figures and tables of pages below a folder. Each drawing names its parts by ids; in this page it gets its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._drawings = 0

    def shown(self, show: Show) -> str:
        page = _read(self.folder / show.page)
        if not page:
            return html.paragraph(f"{show.page}: not written yet")
        main = page[page.find("<main>") + len("<main>") : page.rfind("</main>")]
        pieces = list(self._pieces(main, show))
        if not _PIECE.search(main) or not re.search("<figure>|<table", main):
            pieces = [re.sub(r"<h1>.*?</h1>", "", main, flags=re.DOTALL)]  # text alone
        if not pieces:
            return html.paragraph(f"{show.page} has no figure or table {show.first}")
        inside = "\n".join(map(self._own, pieces))
        link = f'<p class="quiet"><small><a href="{html.escape(show.page)}">{html.escape(show.page)}</a></small></p>'
        return f"<div>{link}{inside}</div>"

    def _pieces(self, main: str, show: Show) -> Iterator[str]:
        """The figures and tables that are shown, each heading before the first below it."""
        number, headings = 0, []
        for match in _PIECE.finditer(main):
            piece = match[0]
            if piece.startswith("<h"):
                headings = [piece] if piece.startswith("<h2") else [*headings[:1], piece]
                continue
            number += 1
            if show.first <= number <= (show.last or number):
                yield from headings
                headings = []
                yield piece if piece.startswith("<figure") else f'<div class="wide">{piece}</div>'

    def _own(self, piece: str) -> str:
        self._drawings += 1
        prefix = f"e{self._drawings}-"
        piece = re.sub(r'\bid="', f'id="{prefix}', piece)
        piece = piece.replace("url(#", f"url(#{prefix}").replace('href="#', f'href="#{prefix}')
        return re.sub(r"(</?h)([23])", lambda tag: f"{tag[1]}{int(tag[2]) + 1}", piece)
