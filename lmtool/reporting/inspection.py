"""Screens and pages of `lmtool inspect` (examples and statistics of a run) and `lmtool check` (a data set)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lmtool.reporting import html
from lmtool.reporting.console import Output, print_table, table_lines
from lmtool.reporting.text import percent, plain
from lmtool.system.terminal import counted, visible_space

# Characters of a side of an example that are shown; the JSON lines have all of it.
_TEXT_LIMIT = 1000
# Between documents of an example, and between the texts of a pair.
_BORDER = "‖"
_PREDICTED, _REPLACED = "→", "←"
_SPECIAL = r"\[[A-Z]+\]|</?[a-zA-Z_0-9|]+>"
_HIGHLIGHTS = {
    r"[␣⏎⇥␍](×\d+)?": "dim",
    rf"\S+{_PREDICTED}\S+": "bold yellow",
    rf"\S+{_REPLACED}\S+": "bold magenta",
    rf"(?<!\S)({_SPECIAL})(?!\S)": "cyan",
}
_HEADER = ("statistic", "measured", "defined", "interval", "of")
_BROKEN = "DOES NOT HOLD"


@dataclass(frozen=True)
class InspectionScreen:
    """Of one configuration, or of one phase of a run. examples: as `Inspector.described` gives them. statistics: rows
    of text under `_HEADER`. broken: which of these are not as defined. verdict: what of all checks holds, in a line.
    checks: the same with their names. definitions: what is defined by no number."""

    heading: str
    fact: str
    examples: Sequence[Mapping[str, Any]]
    statistics: Sequence[Sequence[str]]
    broken: frozenset[int]
    verdict: str
    checks: str
    definitions: Sequence[str] = ()


def print_inspection(output: Output, screen: InspectionScreen, brief: bool = False) -> None:
    """The heading and the fact; unless brief, examples with a legend, and the statistics; what holds."""
    output.paragraph(screen.heading, "bold")
    if screen.fact:
        output.paragraph(screen.fact, "bold green")
    if brief:
        output.paragraph(screen.verdict, "bold red" if screen.broken else None)
        return
    output.line()
    shown: list[str] = []
    for example in screen.examples:
        output.line(_title(example), "bold")
        rows = list(_rows(example))
        output.rows(rows, _HIGHLIGHTS)
        output.rows([(title, text) for title, text in example.get("drawing", ())], _HIGHLIGHTS)
        output.line()
        shown += [text for _, text in rows]
    if words := _legend(shown):
        output.paragraph(words, "dim")
        output.line()
    _print_statistics(output, screen)


def _print_statistics(output: Output, screen: InspectionScreen) -> None:
    header = [*_HEADER, ""] if screen.broken else list(_HEADER)
    ends = [[_BROKEN if number in screen.broken else ""] for number in range(len(screen.statistics))]
    rows = [[*row, *(end if screen.broken else [])] for row, end in zip(screen.statistics, ends, strict=True)]
    filled = [at for at in range(len(header)) if at == 0 or any(row[at] for row in rows)]
    rows = [[row[at] for at in filled] for row in rows]
    for number, line in enumerate(table_lines([header[at] for at in filled], rows, output.columns)):
        output.line(line, "dim" if number < 2 else "bold red" if _BROKEN in line else None)
    for words in screen.definitions:
        output.paragraph(words, "dim")
    output.paragraph(screen.checks, "bold red" if screen.broken else "dim")


def _title(example: Mapping[str, Any]) -> str:
    member = f"{example['member']}: " if "member" in example else ""
    return f"{member}example {example['example']}" + (f", epoch {example['epoch']}" if example["epoch"] else "")


def _rows(example: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Titled lines: the text, each side as pieces with what is predicted behind an arrow, and what is learned."""
    if "text" in example:
        boundaries = [0, *example["boundaries"], len(example["text"]) + 1]
        parts = [_spaced(example["text"][start : end - 1]) for start, end in pairwise(boundaries)]
        yield "text", plain(f" {_BORDER} ".join(parts), _TEXT_LIMIT)
    predicted = {
        term: {place["position"]: place["label"] for place in places}
        for term, places in example["targets"].items()
        if isinstance(places, list)
    }
    term, learned = next(iter(predicted.items()), ("", {}))
    if term and len(learned) < len(example["targets"][term]):  # several at one place: no single arrow is true
        learned = {}
    read = learned if "output" not in example else {}
    if "filled" in example:
        pieces = example["filled"]["pieces"]
        replaced = {at: piece for at, piece in read.items() if pieces[at] != piece}
        yield "generator reads", _pieces(example["input"]["pieces"], read, _PREDICTED)
        yield "model reads", _pieces(pieces, replaced, _REPLACED)
    else:
        yield "input", _pieces(example["input"]["pieces"], read, _PREDICTED)
    if "output" in example:
        yield "output", _pieces(example["output"]["pieces"], learned, _PREDICTED)
    if "prefix" in example["input"]:
        yield "prefix", f"{example['input']['prefix']} tokens, which see each other"
    side = example["output" if "output" in example else "input"]["pieces"]
    for term, value in example["targets"].items():
        yield term, _learned(value, side) if isinstance(value, list) else plain(str(value), _TEXT_LIMIT)
        boundaries = (
            [place["boundaries"] for place in value if "boundaries" in place] if isinstance(value, list) else []
        )
        if boundaries:
            yield f"{term} boundaries", " ".join(f"{a}..{b}" for a, b in sorted({(a, b) for a, b in boundaries}))


def _spaced(text: str) -> str:
    """A text on one line: a single space as it is, what else there is of white space as something to see."""
    return re.sub(r"\s{2,}|[\n\r\t]", lambda space: f"{visible_space(space[0])} ", text)


def _pieces(pieces: Sequence[str], answers: Mapping[int, str], sign: str) -> str:
    """`shown→truth` at the places that predict; where each predicts the one behind it, the pieces alone."""
    answers = {} if _is_next(pieces, answers) else answers
    shown: list[str] = []
    left = _TEXT_LIMIT
    for at, piece in enumerate(pieces):
        word = f"{piece}{sign}{answers[at]}" if at in answers else piece
        left -= len(word) + 1
        if left < 0:
            shown.append(f"… and {len(pieces) - at:,} more")
            break
        shown.append(word)
    return plain(" ".join(shown))


def _is_next(pieces: Sequence[str], answers: Mapping[int, str]) -> bool:
    """Whether what is to be predicted is the token behind, at every place."""
    return bool(answers) and all(at + 1 >= len(pieces) or pieces[at + 1] == label for at, label in answers.items())


def _learned(places: Sequence[Mapping[str, Any]], pieces: Sequence[str]) -> str:
    """At how many of the tokens something is predicted."""
    answers = {place["position"]: place["label"] for place in places}
    if len(answers) < len(places):
        return f"{counted(len(places), 'prediction')} at {counted(len(answers), 'token')}"
    words = f"{len(answers):,} of {counted(len(pieces), 'token')}"
    if answers and set(answers.values()) == {"replaced"}:
        return f"{words} are replaced"
    return f"{words}, each predicts the next" if _is_next(pieces, answers) else f"{words} are predicted"


def _legend(texts: Sequence[str]) -> str:
    """The signs that occur, in a line."""
    every = " ".join(texts)
    signs = {
        _PREDICTED: f"a{_PREDICTED}b: at a, b is to be predicted",
        _REPLACED: f"a{_REPLACED}b: a has replaced b",
        _BORDER: f"{_BORDER} between two texts",
        "␣": "␣ a space",
        "⏎": "⏎ a line end",
        "⇥": "⇥ a tab",
        "×": "×n: n of them",
        "##": "## inside a word",
    }
    runs = re.search(r"[␣⏎⇥␍]×\d", every)
    return " · ".join(words for sign, words in signs.items() if (sign in every if sign != "×" else runs))


def inspection_html(screen: InspectionScreen) -> str:
    """The same as a part of a page."""
    examples = []
    shown: list[str] = []
    for example in screen.examples:
        rows = list(_rows(example))
        shown += [text for _, text in rows]
        cells = "".join(f'<tr><th scope="row">{html.escape(title)}</th><td>{_marked(text)}</td></tr>'
                        for title, text in rows)  # fmt: skip
        drawn = "\n".join(f"{title}\t{text}" for title, text in example.get("drawing", ()))
        lines = html.escape_lines(_aligned(example.get("drawing", ())), 20_000)
        examples.append(
            f'<h3>{html.escape(_title(example))}</h3><table class="facts">{cells}</table>'
            + (f"<pre>{lines}</pre>" if drawn else "")
        )
    words = _legend(shown)
    table = [[*row, _BROKEN if number in screen.broken else ""] for number, row in enumerate(screen.statistics)]
    checks = [*screen.definitions, screen.checks]
    return "".join([
        f"<p><b>{html.escape(screen.fact)}</b></p>" if screen.fact else "",
        *examples,
        html.paragraph(words) if words else "",
        f'<div class="wide">{html.table([*_HEADER, ""], table)}</div>',
        *map(html.paragraph, checks),
    ])  # fmt: skip


def _aligned(drawing: Sequence[Sequence[str]]) -> str:
    width = max((len(title) for title, _ in drawing), default=0)
    return "\n".join(f"{title:<{width}}  {text}" for title, text in drawing)


def _marked(text: str) -> str:
    """Pieces with what is predicted, and special tokens, set off as on the screen."""
    words = []
    for word in text.split(" "):
        shown = html.escape(word)
        if _PREDICTED in word[1:]:
            shown = f'<mark class="right">{shown}</mark>'
        elif _REPLACED in word[1:]:
            shown = f'<mark class="wrong">{shown}</mark>'
        elif re.fullmatch(_SPECIAL, word):
            shown = f'<span class="quiet">{shown}</span>'
        words.append(shown)
    return " ".join(words)


def write_inspection(path: Path, parts: Sequence[InspectionScreen]) -> None:
    """The page. UserError where the disk refuses."""
    body = [f"<h1>{html.escape(parts[0].heading)}</h1>"] if len(parts) == 1 else ["<h1>What the model is fed</h1>"]
    for part in parts:
        body.append(html.section(part.heading if len(parts) > 1 else "What the model is fed", inspection_html(part)))
    html.write_page(path, parts[0].heading, body)


_HEADINGS = ("from", "to", "rows", "words", "by chance", "unknown words", "unknown types", "labels")


def print_shifts(output: Output, shifts: Sequence[Any], heading: str) -> None:
    """shifts: as `lmtool.tasks.checking.Shift`."""
    rows = [
        [
            shift.source, shift.target, f"{shift.rows:,}", f"{shift.words:.4f}", f"{shift.chance:.4f}",
            percent(shift.unknown), percent(shift.unknown_types),
            "" if shift.labels is None else f"{shift.labels:.4f}",
        ]
        for shift in shifts
    ]  # fmt: skip
    if rows:
        print_table(output, list(_HEADINGS), rows, f"shift · {heading}")
        output.paragraph(
            "words, labels: Jensen-Shannon divergence in bits, 0 to 1; by chance: of a draw of the first rows beside "
            "the rest of them; unknown: what the first rows never have; of 20,000 rows of a side at most", "dim"
        )  # fmt: skip


_TEXT = 60
_LABELS = 8
_KINDS = ("equal", "other_label", "similar")


def print_failed_rows(output: Output, name: str, messages: Sequence[str], most: int) -> None:
    """Rows that would fail, the first of them by file:line."""
    if not messages:
        return
    output.line(f"{name}: {counted(len(messages), 'row')} failed", "bold red")
    for message in messages[:most]:
        output.line(f"  {plain(message, 200)}")
    if len(messages) > most:
        output.line(f"  and {len(messages) - most:,} more")


def print_findings(
    output: Output, name: str, findings: Mapping[str, Any], unit: str, longest: int | None, most: int
) -> None:
    """findings: of tasks/checking.py. unit: of the lengths. longest: of a text that is not cut, where
    that is known."""
    splits: Mapping[str, Any] = findings["splits"]
    if not splits:
        return
    header = ["split", "rows", "empty", f"median {unit}", "95%", "longest", *(["cut"] if longest else []), "labels"]
    rows = [
        [
            split,
            summary["rows"],
            summary["empty"],
            summary["lengths"]["median"],
            summary["lengths"]["percentile_95"],
            summary["lengths"]["longest"],
            *([percent(summary["lengths"]["cut"])] if longest else []),
            _labels(summary["labels"]),
        ]
        for split, summary in splits.items()
    ]
    print_table(output, header, rows, heading=name)
    output.line()
    of_text = all(summary["labels"] is None for summary in splits.values())
    header = ["texts that occur twice", "equal", "of the words" if of_text else "other label", "similar"]
    print_table(output, header, list(_twice(splits, of_text)))
    for split, summary in splits.items():
        for kind, words in (("in_training", "stand in the training rows too"), ("within", "repeat rows above them")):
            pairs = summary.get(kind, {}).get("pairs", ())[:most]
            if pairs:
                output.line(f"{split}: rows that {words}", "bold")
            for pair in pairs:
                output.line(f"  {_pair(pair)}")
    for warning in findings["warnings"]:
        output.line(f"warning: {warning}", "yellow")


def _twice(splits: Mapping[str, Any], of_text: bool) -> Iterator[list[Any]]:
    for split, summary in splits.items():
        for key, words in (("within", f"within {split}"), ("in_training", f"{split} in train")):
            if key in summary:
                counts = summary[key]
                equal, other, similar = (_share(counts[kind], summary["rows"]) for kind in _KINDS)
                yield [words, equal, percent(counts["share"]) if of_text else other, similar]


def _share(count: int, rows: int) -> str:
    return f"{count:,} ({percent(count / rows)})" if count else "0"


def _pair(pair: Mapping[str, Any]) -> str:
    how = "=" if pair["similarity"] == 1 else f"{pair['similarity']:.0%} of"
    labels = f"  {pair['label']} | {pair['label_repeated']}" if "label" in pair else ""
    other = "" if pair["similarity"] == 1 else f" | {plain(pair['text_repeated'], _TEXT)}"
    return f"{pair['row']} {how} {pair['repeats']}{labels}  {plain(pair['text'], _TEXT)}{other}"


def _labels(labels: Mapping[str, Any] | None) -> str:
    if not labels:
        return ""
    if "deviation" in labels:
        return f"mean {labels['mean']:.3g} ± {labels['deviation']:.3g}, {labels['least']:g} to {labels['most']:g}"
    total = sum(labels.values())
    shown = [f"{name} {percent(count / total)}" for name, count in list(labels.items())[:_LABELS]]
    return " · ".join(shown) + (f" · {len(labels) - _LABELS} more" if len(labels) > _LABELS else "")
