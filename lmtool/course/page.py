"""Writes the course as one self-contained HTML page: its text, the output of the commands, and figures and tables of
the pages that they have written. Checks the claims of the course against the runs that they name."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markupsafe import Markup

from lmtool.course.document import Claim, Commands, Course, Part, Prose, Show, Topic, Value
from lmtool.learners.metrics.intervals import mean_and_error, t_quantile
from lmtool.reporting.html import escape, escape_lines, write_page
from lmtool.reporting.run_files import with_own_errors
from lmtool.reporting.scores import CLEAR_ERRORS
from lmtool.reporting.text import duration, number

# The titles of topics are the largest headings; embedded pages have smaller ones. Printed tables keep their columns.
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
_PRINTED_CHARACTERS = 40_000  # maximum characters of a printed output
_LINE_WIDTH = 110  # width of a printed line
# A heading, a figure or a table of a page.
_PIECE = re.compile(r"<h[23][^>]*>.*?</h[23]>|<figure>.*?</figure>|<table.*?</table>", re.DOTALL)


_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


@dataclass
class TimeSpent:
    """The time that a topic took. seconds: for each finished command, in order. finished: whether all commands have
    run."""

    seconds: list[float] = field(default_factory=list)
    finished: bool = False

    def __str__(self) -> str:
        return "not run yet" if not self.finished else duration(sum(self.seconds)) if self.seconds else ""


def write_course(course: Course, folder: Path, spent: dict[str, TimeSpent]) -> Path:
    """Writes FOLDER/index.html, for the folder in which the commands ran, and returns its path. spent: the time that
    each topic took, by id."""
    embedded, verdicts = _PageEmbedder(folder), list[tuple[Topic, Claim, Verdict]]()
    sections = []
    for topic in course.topics:
        title = f"{topic.number}. {_MARKDOWN.renderInline(topic.title)} <small>{spent[topic.id]}</small>"
        parts = [f'<h2 id="{topic.id}">{title}</h2>']
        for part in topic.parts:
            if isinstance(part, Claim):
                verdicts.append((topic, part, judge(part, folder)))
                parts.append(_claim(part, verdicts[-1][2]))
            else:
                parts.append(_part(topic, part, spent[topic.id], embedded))
        sections.append("<section>\n" + "\n".join(parts) + "\n</section>")
    opening = [_STYLE, f"<h1>{escape(course.title)}</h1>", _MARKDOWN.render(course.opening)]
    path = folder / "index.html"
    body = [*opening, _contents(course.topics, spent), *sections, _claims(verdicts)]
    write_page(path, "page.html", course.title, body=Markup("\n".join(body)))
    return path


def _paragraph(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>'


def _contents(topics: Sequence[Topic], spent: dict[str, TimeSpent]) -> str:
    lines = "".join(
        f'<li><a href="#{topic.id}">{topic.number}. {_MARKDOWN.renderInline(topic.title)}</a>'
        f"<span>{spent[topic.id]}</span></li>"
        for topic in topics
    )
    seconds = duration(sum(sum(each.seconds) for each in spent.values()))
    total = f"{seconds} in all. In a terminal, each command takes some seconds more to load torch."
    return f'<ul class="contents">{lines}</ul>' + _paragraph(total)


def _part(topic: Topic, part: Part, spent: TimeSpent, embedded: _PageEmbedder) -> str:
    if isinstance(part, Prose):
        return _MARKDOWN.render(part.text)
    if isinstance(part, Commands):
        seconds = spent.seconds[part.first : part.first + len(part.lines)]
        typed = escape_lines("\n".join(part.lines), _PRINTED_CHARACTERS)
        return f"<pre>{typed}</pre>{_runs(part, embedded.folder, seconds)}"
    if isinstance(part, Show):
        return embedded.embed(part)
    assert not isinstance(part, Claim)
    numbers = range(part.block.first, part.block.first + len(part.block.lines))
    printed = "".join(_read(stdout_of(embedded.folder, topic, number)) for number in numbers)
    text = "\n".join(wrapped for line in part.lines(printed) for wrapped in _wrap(line))
    return f'<pre class="printed">{escape_lines(text, _PRINTED_CHARACTERS)}</pre>' if text else ""


def _wrap(line: str) -> list[str]:
    if len(line) <= _LINE_WIDTH:
        return [line]
    label = re.match(r"\s*\S+( \S+)?\s{2,}", line)
    indent = " " * (len(label[0]) if label else 2)
    return textwrap.wrap(line, _LINE_WIDTH, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False)


def _runs(block: Commands, folder: Path, seconds: Sequence[float]) -> str:
    links = []
    for name in dict.fromkeys(re.findall(r"\bname=([\w-]+)", " ".join(block.lines))):
        page = next((file for file in ("report.html", "sweep.html") if (folder / "runs" / name / file).exists()), None)
        if page:
            links.append(f'<a href="runs/{name}/{page}">{name}</a>')
    time_spent = duration(sum(seconds)) if len(seconds) == len(block.lines) else ""
    text = " · ".join(filter(None, (time_spent, f"report of {', '.join(links)}" if links else "")))
    return f'<p class="quiet"><small>{text}</small></p>' if text else ""


def _claim(claim: Claim, verdict: Verdict) -> str:
    kind = {HOLDS: "better", FAILS: "worse"}.get(verdict.words, "unclear")
    words = f'<span class="{kind}">{escape(verdict.words)}</span>'
    numbers = f"<small class='quiet'>{escape(verdict.numbers)}</small>"
    return f"<blockquote>{_MARKDOWN.renderInline(claim.text)}: {words}<br>{numbers}</blockquote>"


def _claims(verdicts: Sequence[tuple[Topic, Claim, Verdict]]) -> str:
    if not verdicts:
        return ""
    explanation = (
        "A difference is clear if its 95% confidence interval excludes zero. For several runs the interval reflects "
        "the variation between runs (Welch's t), for one run the number of rows it was scored on. With two runs only a "
        "large difference is clear. A claim that is not clear or does not hold here may hold at a larger scale."
    )
    counts = Counter(verdict.words for _, _, verdict in verdicts)
    counted = ", ".join(f"{verdict}: {count}" for verdict, count in counts.most_common())
    rows = "".join(
        f'<tr><td class="number">{topic.number}</td><td>{escape(claim.text, 300)}</td><td>{verdict.words}</td></tr>'
        for topic, claim, verdict in verdicts
    )
    header = '<thead><tr><th class="number">topic</th><th>claim</th><th>here</th></tr></thead>'
    table = f"<table>{header}<tbody>{rows}</tbody></table>"
    return f'<h2 id="claims">Claims</h2>{_paragraph(counted)}{_paragraph(explanation)}{table}'


def stdout_of(folder: Path, topic: Topic, number: int) -> Path:
    """Returns the file with the output of a command of a topic. number: the index of the command, from 0."""
    return folder / "logs" / f"{topic.id}-{number + 1}.out"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


class _PageEmbedder:
    def __init__(self, folder: Path):
        self.folder = folder
        self._pieces_embedded = 0

    def embed(self, show: Show) -> str:
        page = _read(self.folder / show.page)
        if not page:
            return _paragraph(f"{show.page}: not written yet")
        main = page[page.find("<main>") + len("<main>") : page.rfind("</main>")]
        pieces = list(self._pieces(main, show))
        if not re.search("<figure>|<table", main):
            pieces = [re.sub(r"<h1>.*?</h1>", "", main, flags=re.DOTALL)]  # text alone
        if not pieces:
            return _paragraph(f"{show.page} has no figure or table {show.first}")
        content = "\n".join(map(self._with_unique_ids, pieces))
        link = f'<p class="quiet"><small><a href="{escape(show.page)}">{escape(show.page)}</a></small></p>'
        return f"<div>{link}{content}</div>"

    def _pieces(self, main: str, show: Show) -> Iterator[str]:
        count, headings = 0, list[str]()
        for match in _PIECE.finditer(main):
            piece = match[0]
            if piece.startswith("<h"):
                headings = [piece] if piece.startswith("<h2") else [*headings[:1], piece]
                continue
            count += 1
            if show.first <= count <= (show.last or count):
                yield from headings
                headings = []
                yield piece if piece.startswith("<figure") else f'<div class="wide">{piece}</div>'

    def _with_unique_ids(self, piece: str) -> str:
        self._pieces_embedded += 1
        prefix = f"e{self._pieces_embedded}-"
        piece = re.sub(r'\bid="', f'id="{prefix}', piece)
        piece = piece.replace("url(#", f"url(#{prefix}").replace('href="#', f'href="#{prefix}')
        return re.sub(r"(</?h)([23])", lambda tag: f"{tag[1]}{int(tag[2]) + 1}", piece)


# --- claims -----------------------------------------------------------------------------------------------------------

HOLDS, FAILS, UNCLEAR, MISSING = "holds here", "does not hold at this scale", "not clear here", "not run yet"


@dataclass(frozen=True)
class Mean:
    """The mean of a number over runs, or a constant. error: the standard error of the mean; None if unknown. runs: 0
    for a constant."""

    value: float
    error: float | None
    runs: int

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the error; infinite for a single run, whose error comes from its many rows."""
        return self.runs - 1 if self.runs > 1 else math.inf

    def __str__(self) -> str:
        return number(self.value) + (f" (n = {self.runs})" if self.runs else "")


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds. words: HOLDS, FAILS, UNCLEAR or MISSING. numbers: the measurements, as a phrase."""

    words: str
    numbers: str


def judge(claim: Claim, folder: Path) -> Verdict:
    """Checks a claim against the runs below a folder. The verdict is clear if the 95% confidence interval of the
    difference excludes zero (Welch's t over runs)."""
    try:
        left = _mean(claim.left, folder)
        right = _mean(claim.right, folder) if isinstance(claim.right, Value) else Mean(claim.right, 0.0, 0)
    except LookupError as missing:
        return Verdict(MISSING, str(missing.args[0]))
    difference = left.value - right.value
    measured = f"{left} against {right}, difference {difference:+.3g}"
    if left.error is None or right.error is None:
        return Verdict(UNCLEAR, f"{measured}, its standard error is unknown")
    error = math.hypot(left.error, right.error)
    if not error and max(left.runs, right.runs) > 1:
        return Verdict(UNCLEAR, f"{measured}: all runs give the same number, so that its standard error is unknown")
    measured += f" ± {error:.2g}" if error else ""
    if difference == 0 or abs(difference) < _half_width(left, right) * error:
        return Verdict(UNCLEAR, measured)
    return Verdict(HOLDS if (difference > 0) == (claim.sign == ">") else FAILS, measured)


def _half_width(left: Mean, right: Mean) -> float:
    """Returns half the width of the 95% confidence interval of the difference, in standard errors (Welch 1947;
    Satterthwaite 1946)."""
    squares = [(mean.error or 0.0) ** 2 for mean in (left, right)]
    terms = [square**2 / mean.freedom for square, mean in zip(squares, (left, right), strict=True)]
    return t_quantile(max(1, int(sum(squares) ** 2 / sum(terms)))) if any(terms) else CLEAR_ERRORS


def _mean(value: Value, folder: Path) -> Mean:
    """Returns the mean over the runs that a pattern matches, or the number of a JSON file. The error comes from the
    variation between runs, for a single run from the rows it was scored on. Raises LookupError if there is no run, or
    if a result lacks the number."""
    paths = [path for path in sorted(folder.glob(value.folder)) if path.name != "latest"]
    files = [path if path.suffix == ".json" else path / "result.json" for path in paths]
    results = [json.loads(path.read_text()) for path in files if path.is_file()]
    results = [with_own_errors(result) if isinstance(result, dict) else result for result in results]
    if not results:
        raise LookupError(f"no result of {value.folder}")
    values = [_number(result, value) for result in results]
    mean, error = mean_and_error(values)
    return Mean(mean, _error_of_one(results[0], value.key) if len(values) == 1 else error, len(values))


def _number(result: Any, value: Value) -> float:
    for name in value.key.split("."):
        result = _by_index(result)
        if not isinstance(result, dict) or name not in result:
            known = ", ".join(result) if isinstance(result, dict) else "a number"
            raise LookupError(f"no {value.key} in the results of {value.folder}: {name} is not among {known}")
        result = result[name]
    if isinstance(result, dict):
        result = result.get("value")
    if isinstance(result, bool) or not isinstance(result, int | float):
        raise LookupError(f"{value.key} of {value.folder} is not a number")
    return result


def _by_index(result: Any) -> Any:
    return {str(index): item for index, item in enumerate(result)} if isinstance(result, list) else result


def _error_of_one(result: dict[str, Any], key: str) -> float | None:
    """From the interval, or from a standard error or a number of rows next to it. 0 for counts, and for baselines,
    which are exact on the same rows."""
    *above, leaf = key.split(".")
    neighbors: Any = result
    for name in above:
        neighbors = _by_index(neighbors)[name]
    value = neighbors[leaf]
    if isinstance(value, dict):
        return (value["high"] - value["low"]) / (2 * 1.96) if "low" in value else None
    if isinstance(value, int) or leaf.endswith("baseline"):
        return 0.0
    metric = leaf
    if key == "value":
        metric, neighbors = str(result.get("metric")), {**result, **result.get("metrics", {})}
    if metric == "accuracy" and "standard_error" in neighbors:
        return neighbors["standard_error"]
    if metric.endswith("accuracy"):
        rows = neighbors.get(f"{metric.removesuffix('accuracy')}count") or result.get("validation_examples")
        return math.sqrt(max(value * (1 - value), 0.0) / rows) if rows else None
    error = neighbors.get(f"{metric.removesuffix('loss')}standard_error", neighbors.get(f"{metric}_standard_error"))
    return error if isinstance(error, float) else None
