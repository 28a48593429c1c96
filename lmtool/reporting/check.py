"""What `lmtool check` found of a data set, on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmtool.reporting.console import Output
from lmtool.reporting.table import print_table
from lmtool.reporting.text import percent, plain
from lmtool.system.terminal import counted

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


def print_problems(output: Output, name: str, messages: Sequence[str], most: int) -> None:
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
            said["rows"],
            said["empty"],
            said["lengths"]["median"],
            said["lengths"]["percentile_95"],
            said["lengths"]["longest"],
            *([percent(said["lengths"]["cut"])] if longest else []),
            _labels(said["labels"]),
        ]
        for split, said in splits.items()
    ]
    print_table(output, header, rows, heading=name)
    output.line()
    of_text = all(said["labels"] is None for said in splits.values())
    header = ["texts that occur twice", "equal", "of the words" if of_text else "other label", "similar"]
    print_table(output, header, list(_twice(splits, of_text)))
    for split, said in splits.items():
        for kind, words in (("in_training", "stand in the training rows too"), ("within", "repeat rows above them")):
            pairs = said.get(kind, {}).get("pairs", ())[:most]
            if pairs:
                output.line(f"{split}: rows that {words}", "bold")
            for pair in pairs:
                output.line(f"  {_pair(pair)}")
    for warning in findings["warnings"]:
        output.line(f"warning: {warning}", "yellow")


def _twice(splits: Mapping[str, Any], of_text: bool) -> Iterator[list[Any]]:
    for split, said in splits.items():
        for key, words in (("within", f"within {split}"), ("in_training", f"{split} in train")):
            if key in said:
                counts = said[key]
                equal, other, similar = (_share(counts[kind], said["rows"]) for kind in _KINDS)
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
