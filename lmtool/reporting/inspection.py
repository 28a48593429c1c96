"""Screens and pages of `lmtool inspect` (examples and statistics of a run) and `lmtool check` (a data set)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.reporting import html
from lmtool.reporting.console import Output, print_table, table_lines
from lmtool.reporting.text import percent, plain
from lmtool.system.terminal import counted, visible_space

# Maximum characters of a text on the screen; the JSON lines have all of it.
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
_HEADER = ("statistic", "measured", "expected", "interval", "n")
_BROKEN = "DOES NOT HOLD"


@dataclass(frozen=True)
class InspectionScreen:
    """The inspection of one configuration, or of one phase of a run.

    finding: a line about the outcome, such as the measured fractions of masked tokens; may be empty. examples: from
    `Inspector.describe`. statistics: rows under `_HEADER`. broken: indices of statistics whose measured value
    contradicts the expected one. summary: one line, such as "all 7 checks hold". checks: the summary, followed by what
    was checked.
    definitions: the definitions of the expected values in words, without numbers.
    """

    heading: str
    finding: str
    examples: Sequence[JsonMapping]
    statistics: Sequence[Sequence[str]]
    broken: frozenset[int]
    summary: str
    checks: str
    definitions: Sequence[str] = ()


def print_inspection(output: Output, screen: InspectionScreen, brief: bool = False) -> None:
    """Prints the heading, the examples with a legend, and the statistics; if brief, only the heading and summary."""
    output.paragraph(screen.heading, "bold")
    if screen.finding:
        output.paragraph(screen.finding, "bold green")
    if brief:
        output.paragraph(screen.summary, "bold red" if screen.broken else None)
        return
    output.line()
    texts: list[str] = []
    for example in screen.examples:
        output.line(_title(example), "bold")
        rows = list(_rows(example))
        output.rows(rows, _HIGHLIGHTS)
        output.rows([(title, text) for title, text in example.get("drawing", ())], _HIGHLIGHTS)
        output.line()
        texts += [text for _, text in rows]
    if words := _legend(texts):
        output.paragraph(words, "dim")
        output.line()
    _print_statistics(output, screen)


def _statistics_rows(screen: InspectionScreen) -> list[list[str]]:
    return [[*row, _BROKEN if number in screen.broken else ""] for number, row in enumerate(screen.statistics)]


def _print_statistics(output: Output, screen: InspectionScreen) -> None:
    header, rows = [*_HEADER, ""], _statistics_rows(screen)
    filled = [column for column in range(len(header)) if column == 0 or any(row[column] for row in rows)]
    lines = table_lines(
        [header[column] for column in filled], [[row[column] for column in filled] for row in rows], output.columns
    )
    for number, line in enumerate(lines):
        output.line(line, "dim" if number < 2 else "bold red" if _BROKEN in line else None)
    for words in screen.definitions:
        output.paragraph(words, "dim")
    output.paragraph(screen.checks, "bold red" if screen.broken else "dim")


def _title(example: JsonMapping) -> str:
    member = f"{example['member']}: " if "member" in example else ""
    return f"{member}example {example['example']}" + (f", epoch {example['epoch']}" if example["epoch"] else "")


def _rows(example: JsonMapping) -> Iterator[tuple[str, str]]:
    """Yields (title, text) rows: the source text, the tokens, as `token→target` where something is predicted, and a
    summary of the targets of each loss term."""
    if "text" in example:
        boundaries = [0, *example["boundaries"], len(example["text"]) + 1]
        parts = [_show_spaces(example["text"][start : end - 1]) for start, end in pairwise(boundaries)]
        yield "text", plain(f" {_BORDER} ".join(parts), _TEXT_LIMIT)
    predicted = {
        term: {target["position"]: target["label"] for target in targets}
        for term, targets in example["targets"].items()
        if isinstance(targets, list)
    }
    term, first_targets = next(iter(predicted.items()), ("", {}))
    if term and len(first_targets) < len(example["targets"][term]):  # an arrow cannot show several labels of a position
        first_targets = {}
    input_targets = first_targets if "output" not in example else {}
    if "filled" in example:
        pieces = example["filled"]["pieces"]
        replaced = {index: piece for index, piece in input_targets.items() if pieces[index] != piece}
        yield "generator reads", _pieces(example["input"]["pieces"], input_targets, _PREDICTED)
        yield "model reads", _pieces(pieces, replaced, _REPLACED)
    else:
        yield "input", _pieces(example["input"]["pieces"], input_targets, _PREDICTED)
    if "output" in example:
        yield "output", _pieces(example["output"]["pieces"], first_targets, _PREDICTED)
    if "prefix" in example["input"]:
        yield "prefix", f"{example['input']['prefix']} tokens, which attend to each other"
    side = example["output" if "output" in example else "input"]["pieces"]
    for term, value in example["targets"].items():
        yield term, _target_summary(value, side) if isinstance(value, list) else plain(str(value), _TEXT_LIMIT)
        spans = {tuple(target["borders"]) for target in value if "borders" in target} if isinstance(value, list) else ()
        if spans:
            yield f"{term} boundaries", " ".join(f"{start}..{end}" for start, end in sorted(spans))


def _show_spaces(text: str) -> str:
    return re.sub(r"\s{2,}|[\n\r\t]", lambda space: f"{visible_space(space[0])} ", text)


def _pieces(pieces: Sequence[str], answers: Mapping[int, str], sign: str) -> str:
    answers = {} if _is_next(pieces, answers) else answers
    words: list[str] = []
    remaining = _TEXT_LIMIT
    for index, piece in enumerate(pieces):
        word = f"{piece}{sign}{answers[index]}" if index in answers else piece
        remaining -= len(word) + 1
        if remaining < 0:
            words.append(f"… and {len(pieces) - index:,} more")
            break
        words.append(word)
    return plain(" ".join(words))


def _is_next(pieces: Sequence[str], answers: Mapping[int, str]) -> bool:
    return bool(answers) and all(
        index + 1 >= len(pieces) or pieces[index + 1] == label for index, label in answers.items()
    )


def _target_summary(targets: Sequence[JsonMapping], pieces: Sequence[str]) -> str:
    answers = {target["position"]: target["label"] for target in targets}
    if len(answers) < len(targets):
        return f"{counted(len(targets), 'prediction')} at {counted(len(answers), 'token')}"
    words = f"{len(answers):,} of {counted(len(pieces), 'token')}"
    if answers and set(answers.values()) == {"replaced"}:
        return f"{words} are replaced"
    return f"{words}, each predicts the next" if _is_next(pieces, answers) else f"{words} are predicted"


def _legend(texts: Sequence[str]) -> str:
    all_texts = " ".join(texts)
    signs = {
        _PREDICTED: f"a{_PREDICTED}b: b is the target at a",
        _REPLACED: f"a{_REPLACED}b: a has replaced b",
        _BORDER: f"{_BORDER} between two texts",
        "␣": "␣ a space",
        "⏎": "⏎ a line end",
        "⇥": "⇥ a tab",
        "×": "×n: n of them",
        "##": "## inside a word",
    }
    runs = re.search(r"[␣⏎⇥␍]×\d", all_texts)
    return " · ".join(words for sign, words in signs.items() if (sign in all_texts if sign != "×" else runs))


def _aligned(diagram: Sequence[Sequence[str]]) -> str:
    width = max((len(title) for title, _ in diagram), default=0)
    return "\n".join(f"{title:<{width}}  {text}" for title, text in diagram)


def _marked_words(text: str) -> list[html.Word]:
    def kind(word: str) -> str:
        if _PREDICTED in word[1:]:
            return "right"
        if _REPLACED in word[1:]:
            return "wrong"
        return "quiet" if re.fullmatch(_SPECIAL, word) else ""

    return [html.Word(word, kind(word)) for word in text.split(" ")]


def write_inspection(path: Path, parts: Sequence[InspectionScreen]) -> None:
    """Writes the page. Raises UserError if that fails."""
    html.write_page(path, "inspection.html", parts[0].heading, parts=list(map(_part_values, parts)))


def _part_values(screen: InspectionScreen) -> JsonObject:
    rows = [list(_rows(example)) for example in screen.examples]
    return {
        "screen": screen,
        "examples": [
            (
                _title(example),
                [(title, _marked_words(text)) for title, text in example_rows],
                _aligned(example.get("drawing", ())),
            )
            for example, example_rows in zip(screen.examples, rows, strict=True)
        ],
        "legend": _legend([text for example_rows in rows for _, text in example_rows]),
        "statistics": ([*_HEADER, ""], _statistics_rows(screen)),
    }


_PAIR_TEXT_LIMIT = 60  # characters of a text in a list of duplicates
_MAX_LABELS = 8
_KINDS = ("equal", "other_label", "similar")


def print_failed_rows(output: Output, name: str, messages: Sequence[str], most: int) -> None:
    """Prints the first `most` rows with errors, as file:line."""
    if not messages:
        return
    output.line(f"{name}: {counted(len(messages), 'row')} failed", "bold red")
    for message in messages[:most]:
        output.line(f"  {plain(message, 200)}")
    if len(messages) > most:
        output.line(f"  and {len(messages) - most:,} more")


def print_findings(output: Output, name: str, findings: JsonMapping, unit: str, longest: int | None, most: int) -> None:
    """Prints statistics, duplicates and warnings of a data set. findings: its `warnings`, and as `splits` the result of
    `lmtool.tasks.checking.compare`. unit: the unit of the lengths. longest: maximum length of a text that is not
    truncated; None if unknown. most: maximum number of duplicates to print per split and kind."""
    splits: JsonMapping = findings["splits"]
    if not splits:
        return
    header = ["split", "rows", "empty", f"median {unit}", "95%", "longest"]
    header += ["truncated", "labels"] if longest else ["labels"]
    rows: list[list[object]] = []
    for split, summary in splits.items():
        lengths = summary["lengths"]
        row = [
            split,
            summary["rows"],
            summary["empty"],
            lengths["median"],
            lengths["percentile_95"],
            lengths["longest"],
        ]
        rows.append([*row, *([percent(lengths["cut"])] if longest else []), _labels(summary["labels"])])
    print_table(output, header, rows, heading=name)
    output.line()
    unlabeled = all(summary["labels"] is None for summary in splits.values())
    header = ["texts that occur twice", "equal", "words in equal texts" if unlabeled else "other label", "similar"]
    print_table(output, header, list(_duplicate_rows(splits, unlabeled)))
    for split, summary in splits.items():
        compared = summary["near_compared"]
        if compared and compared["texts"] < compared["of"]:
            words = f"a sample of {compared['texts']:,} of {compared['of']:,} texts of {split}"
            output.paragraph(f"note: near-duplicates were searched in {words}; seed= draws another sample", "yellow")
    for split, summary in splits.items():
        for kind, words in (("in_training", "also occur in the training rows"), ("within", "repeat earlier rows")):
            pairs = summary.get(kind, {}).get("pairs", ())[:most]
            if pairs:
                output.line(f"{split}: rows that {words}", "bold")
            for pair in pairs:
                output.line(f"  {_pair(pair)}")
    for warning in findings["warnings"]:
        output.warn(warning)


def _duplicate_rows(splits: JsonMapping, unlabeled: bool) -> Iterator[list[object]]:
    for split, summary in splits.items():
        for key, words in (("within", f"within {split}"), ("in_training", f"{split} in train")):
            if key in summary:
                counts = summary[key]
                equal, other, similar = (_share(counts[kind], summary["rows"]) for kind in _KINDS)
                yield [words, equal, percent(counts["share"]) if unlabeled else other, similar]


def _share(count: int, rows: int) -> str:
    return f"{count:,} ({percent(count / rows)})" if count else "0"


def _pair(pair: JsonMapping) -> str:
    how = "=" if pair["similarity"] == 1 else f"{pair['similarity']:.0%} similar to"
    labels = f"  {pair['label']} | {pair['label_repeated']}" if "label" in pair else ""
    other = "" if pair["similarity"] == 1 else f" | {plain(pair['text_repeated'], _PAIR_TEXT_LIMIT)}"
    return f"{pair['row']} {how} {pair['repeats']}{labels}  {plain(pair['text'], _PAIR_TEXT_LIMIT)}{other}"


def _labels(labels: JsonMapping | None) -> str:
    if not labels:
        return ""
    if "deviation" in labels:
        return f"mean {labels['mean']:.3g} ± {labels['deviation']:.3g}, {labels['least']:g} to {labels['most']:g}"
    total = sum(labels.values())
    parts = [f"{name} {percent(count / total)}" for name, count in list(labels.items())[:_MAX_LABELS]]
    return " · ".join(parts) + (f" · {len(labels) - _MAX_LABELS} more" if len(labels) > _MAX_LABELS else "")
