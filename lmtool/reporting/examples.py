"""The examples on the page of a run: predictions and samples, grouped, and the table of predictions."""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple, TypeGuard

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.reporting.html import Word
from lmtool.reporting.scores import as_number
from lmtool.reporting.text import is_number, number, percent, plain, shorten, tenths
from lmtool.system.terminal import counted

_EXAMPLES_PER_GROUP = 4
_SAMPLES_PER_GROUP = 6
_LEADING_EXAMPLES = 2
_TABLE_ROWS = 200  # of right, and of wrong predictions
_MAX_TOKENS = 300
_MAX_CONFUSED_PAIRS = 20
_KNOWN_KEYS = ("id", "gold", "prediction", "score", "split", "scores", "probabilities")
_MASKED_LEGEND = (
    "Green: right. Rust: the model's word, with the truth struck out. Below each text: the truth and the top guesses."
)
_DETECTED_LEGEND = (
    "Green: replaced and detected. Rust: replaced and missed, or, with a question mark, an original token flagged as "
    "replaced. Struck out: the original token."
)
_CLOSING_PUNCTUATION = set(".,;:!?)]}%'’”")


@dataclass
class PredictionSummary:
    """Counts and sampled rows from one pass over the predictions of a task.

    split_counts: number of predictions by split. pairs: counts of (gold, predicted) labels. gold, predicted: the values
    of a regression. right, wrong, surprising: the rows to show as examples. table: the rows of the table, at most
    _TABLE_ROWS right and as many wrong ones.
    """

    split_counts: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    gold: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    right: list[JsonObject] = field(default_factory=list)
    wrong: list[JsonObject] = field(default_factory=list)
    surprising: list[JsonObject] = field(default_factory=list)
    table: list[JsonObject] = field(default_factory=list)

    @property
    def scored_count(self) -> int | None:
        """Number of predictions of the first split, which has the main score; None without predictions."""
        return next(iter(self.split_counts.values()), None)

    @property
    def is_regression(self) -> bool:
        return bool(self.gold)

    @property
    def predicts_texts(self) -> bool:
        """Whether predictions are texts rather than labels: most gold values occur once."""
        return 2 * len({gold for gold, _ in self.pairs}) > sum(self.pairs.values())

    def has_labels(self, classes: Iterable[str]) -> bool:
        """Whether a confusion matrix makes sense: not for texts, and not for sets of labels, which contain commas.
        classes: names of the classes, if known."""
        names = {name for pair in self.pairs for name in pair}
        if names <= {plain(name) for name in classes}:
            return True
        return not self.predicts_texts and not any(name == "" or "," in name for name in names)

    def confused_pairs(self) -> tuple[list[str], list[list[object]]]:
        """Returns the header and the rows of a table of wrong predictions, the most frequent first."""
        golds: Counter[str] = Counter()
        for (gold, _), rows in self.pairs.items():
            golds[gold] += rows
        wrong = Counter({pair: rows for pair, rows in self.pairs.items() if pair[0] != pair[1]})
        table: list[list[object]] = [
            [gold, predicted, rows, tenths(rows / golds[gold])]
            for (gold, predicted), rows in wrong.most_common(_MAX_CONFUSED_PAIRS)
        ]
        return ["gold", "predicted", "rows", "of the gold label"], table


class _TopRows:
    def __init__(self, capacity: int = _EXAMPLES_PER_GROUP) -> None:
        self.capacity = capacity
        self.heap: list[tuple[float, int, JsonObject]] = []
        self.offered = 0

    def offer(self, key: float, row: JsonObject) -> None:
        self.offered += 1  # makes entries with equal keys different, so that rows are never compared
        entry = (key, -self.offered, row)
        if len(self.heap) < self.capacity:
            heapq.heappush(self.heap, entry)
        else:
            heapq.heappushpop(self.heap, entry)

    def rows(self) -> list[JsonObject]:
        return [row for _, _, row in sorted(self.heap, key=lambda entry: entry[:2], reverse=True)]


def summarize(rows: Iterable[JsonObject]) -> PredictionSummary:
    """Summarizes predictions.jsonl in one pass; the selection of examples depends only on their ids."""
    summary = PredictionSummary()
    right, wrong, surprising = (_TopRows() for _ in range(3))
    table = {True: _TopRows(_TABLE_ROWS), False: _TopRows(_TABLE_ROWS)}
    for index, row in enumerate(rows):
        summary.split_counts[str(row.get("split", ""))] += 1
        gold, predicted = as_number(row["gold"]), as_number(row["prediction"])
        random_key = zlib.crc32(str(row.get("id", index)).encode())
        table[_is_right(row)].offer(random_key, row)
        if gold is not None and predicted is not None and not isinstance(row["gold"], str):
            summary.gold.append(gold)
            summary.predicted.append(predicted)
            right.offer(-abs(gold - predicted), row)
            surprising.offer(abs(gold - predicted), row)
            continue
        summary.pairs.update((plain(label), plain(guess)) for label, guess in _label_pairs(row))
        score = as_number(row.get("score"))
        if _is_right(row):
            right.offer(random_key, row)
        else:
            wrong.offer(random_key, row)
            if score is not None:
                surprising.offer(score, row)
    summary.surprising = surprising.rows()
    summary.right = right.rows()
    summary.table = [row for rows in (table[False], table[True]) for row in sorted(rows.rows(), key=_confidence)]
    surprising_ids = {id(row) for row in summary.surprising}
    summary.wrong = [row for row in wrong.rows() if id(row) not in surprising_ids]
    return summary


def _confidence(row: JsonMapping) -> float:
    return -(as_number(row.get("score")) or 0.0)


def _label_pairs(row: JsonMapping) -> Iterable[tuple[object, object]]:
    """Alternative answers to a question are not labels."""
    gold, predicted = row["gold"], row["prediction"]
    if not isinstance(gold, list):
        return [(gold, predicted)]
    return zip(gold, predicted, strict=False) if isinstance(predicted, list) else []


def _is_right(row: JsonMapping) -> bool:
    gold, predicted = row["gold"], row["prediction"]
    if not isinstance(gold, list) or not isinstance(predicted, str):
        return bool(gold == predicted)
    from lmtool.learners.metrics.spans import normalize

    accepted = {normalize(str(answer)) for answer in gold or [""]}  # without answers, an empty prediction is right
    return normalize(predicted) in accepted


class Example(NamedTuple):
    """An example in the page.

    kind: "right", "wrong" or "". texts: whole texts, one per line. words: a text with marks. caption: a line below.
    guesses: each masked word and its guesses. prompt: the text before a generated one.
    """

    kind: str = ""
    texts: Sequence[str] = ()
    words: Sequence[Word] = ()
    caption: str = ""
    guesses: Sequence[tuple[Word, str]] = ()
    prompt: str | None = None


def predicted_example(row: JsonMapping) -> Example:
    """Returns one example: text, gold label, prediction and confidence."""
    gold, predicted = as_number(row["gold"]), as_number(row["prediction"])
    is_right = _is_right(row)
    kind = "right" if is_right else "wrong"
    values = (value for key, value in row.items() if key not in _KNOWN_KEYS)
    texts = [" ".join(value) if isinstance(value, list) else value for value in values if _is_text(value)][:3]
    if gold is not None and predicted is not None:
        return Example("", texts, caption=f"gold {number(gold)}, predicted {number(predicted)}")
    if isinstance(row["prediction"], list) and (words := _words(row)) is not None:
        return _tagged_example(words, row, kind)
    gold_label, empty = row["gold"], "nothing"
    if isinstance(gold_label, list):  # alternative answers to a question
        gold_label, empty = " or ".join(dict.fromkeys(map(str, gold_label))), "no answer"
    gold_name, caption = shorten([gold_label or empty, row["prediction"] or empty], 80)
    score = as_number(row.get("score"))
    if score is not None and 0 <= score <= 1:
        caption += f" ({percent(score)})"
    if not is_right:
        caption += f", gold: {gold_name}"
    return Example(kind, texts, caption=caption)


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(word, str) for word in value))


def _words(row: JsonMapping) -> list[object] | None:
    gold, length = row["gold"], len(row["prediction"])
    if not isinstance(gold, list) or len(gold) != length:
        return None
    lists = (value for key, value in row.items() if key not in _KNOWN_KEYS and isinstance(value, list))
    return next((value for value in lists if len(value) == length), None)


def _tagged_example(words: list[object], row: JsonMapping, kind: str) -> Example:
    def tagged(word: object, gold: object, predicted: object) -> Word:
        if gold != predicted:
            return Word(str(word), "wrong", str(gold), str(predicted))
        return Word(str(word), "right", label=str(predicted)) if gold != "O" else Word(str(word))

    score = as_number(row.get("score"))
    caption = "" if score is None else f"least confident word: {percent(score)}"
    tagged_words = map(tagged, words[:_MAX_TOKENS], row["gold"], row["prediction"])
    return Example(kind, words=list(tagged_words), caption=caption)


def _without_mark(piece: str) -> str:
    return piece.replace("Ċ", "⏎ ").replace("Ġ", "").removeprefix("▁") or "␣"


def _is_special(piece: str) -> bool:
    """Whether a token looks special: [SEP], <sep>, <extra_id_0>."""
    return len(piece) > 2 and (piece[0], piece[-1]) in (("[", "]"), ("<", ">"))


def _join(pieces: Sequence[str]) -> list[tuple[str, str]]:
    marked = any(piece.startswith(("Ġ", "Ċ", "▁")) for piece in pieces)
    texts = []
    for piece in pieces:
        if marked:
            texts.append((" " if piece.startswith(("Ġ", "▁")) or _is_special(piece) else "", _without_mark(piece)))
        elif piece.startswith("##") and len(piece) > 2:
            texts.append(("", piece[2:]))
        else:
            texts.append(("" if piece in _CLOSING_PUNCTUATION else " ", piece))
    return texts


def masked_example(sample: JsonMapping) -> Example:
    """Returns a text with its masked words replaced by the model's; wrong ones are followed by the truth, struck
    out."""
    pieces = [str(piece) for piece in sample["pieces"]][:_MAX_TOKENS]
    masked_positions = {masked["position"]: masked for masked in sample["masked"] if masked["guesses"]}
    words = []
    for position, (space, token) in enumerate(_join(pieces)):
        masked = masked_positions.get(position)
        if masked is None:
            words.append(Word(token, "quiet" if _is_special(pieces[position]) else "", space=space))
            continue
        guess, truth = str(masked["guesses"][0][0]), str(masked.get("truth"))
        is_right = guess == truth
        word = Word(_without_mark(guess), "right" if is_right else "wrong", space=space)
        words.append(word if is_right else replace(word, truth=_without_mark(truth)))
    shown = [masked for position, masked in sorted(masked_positions.items())[:8] if position < len(pieces)]
    return Example(words=words, guesses=list(map(_guesses_row, shown)))


def _guesses_row(target: JsonMapping) -> tuple[Word, str]:
    guesses = (
        f"{plain(_without_mark(str(piece)), 40)} {tenths(float(probability))}"
        for piece, probability, *_ in target["guesses"][:5]
    )
    truth = str(target.get("truth"))
    kind = "right" if str(target["guesses"][0][0]) == truth else "wrong"
    return Word(_without_mark(truth), kind, space=""), " · ".join(guesses)


def detected_example(sample: JsonMapping) -> Example:
    """Returns a text as a discriminator read it: replaced tokens that it detected and missed, and false positives."""
    pieces = [str(piece) for piece in sample["pieces"]]
    replaced = {
        target["position"]: str(target["sampled"])
        for target in sample["masked"]
        if target["sampled"] != target["truth"]
    }
    filled_pieces = [replaced.get(position, piece) for position, piece in enumerate(pieces)]
    flagged = {position for position, probability in enumerate(sample["replaced"]) if probability > 0.5}
    words = []
    for position, (space, token) in enumerate(_join(filled_pieces[:_MAX_TOKENS])):
        if position in replaced:
            kind = "right" if position in flagged else "wrong"
            words.append(Word(token, kind, _without_mark(pieces[position]), space=space))
        elif position in flagged:
            words.append(Word(f"{plain(token, 58)} ?", "wrong", space=space))
        else:
            words.append(Word(token, space=space))
    counts = (
        f"{len(replaced)} of {len(pieces)} tokens replaced: {len(replaced.keys() & flagged)} detected, "
        f"{len(replaced.keys() - flagged)} missed; {len(flagged - replaced.keys())} false positives"
    )
    return Example(words=words, caption=counts)


def _is_detected(sample: object) -> TypeGuard[JsonObject]:
    if not _is_masked(sample) or not isinstance(sample.get("replaced"), list):
        return False
    probabilities, targets = sample["replaced"], sample["masked"]
    return (
        len(probabilities) == len(sample["pieces"])
        and all(as_number(probability) is not None for probability in probabilities)
        and all({"sampled", "truth"} <= target.keys() for target in targets)
    )


def generated_example(sample: JsonMapping) -> Example:
    """Returns a prompt and its continuation."""
    prompt = str(sample.get("prompt", ""))
    return Example(texts=[str(sample.get("text", "")).removeprefix(prompt)], prompt=prompt)


def _neighbors_row(sample: JsonMapping) -> tuple[str, str]:
    neighbors = (
        f"{plain(_without_mark(str(word)), 40)} {number(float(cosine))}" for word, cosine in sample["neighbours"]
    )
    return _without_mark(str(sample["text"])), " · ".join(neighbors)


def _has_neighbors(sample: object) -> TypeGuard[JsonObject]:
    neighbors = sample.get("neighbours") if isinstance(sample, dict) and "text" in sample else None
    return isinstance(neighbors, list) and all(_is_scored_token(pair) and len(pair) == 2 for pair in neighbors)


def _is_scored_token(guess: object) -> bool:
    return isinstance(guess, list) and len(guess) >= 2 and as_number(guess[1]) is not None


def _is_masked(sample: object) -> TypeGuard[JsonObject]:
    if not isinstance(sample, dict) or not isinstance(sample.get("pieces"), list):
        return False
    masked = sample.get("masked")
    return isinstance(masked, list) and all(
        isinstance(target, dict)
        and isinstance(target.get("position"), int)
        and isinstance(target.get("guesses"), list)
        and all(_is_scored_token(guess) for guess in target["guesses"])
        for target in masked
    )


class ExampleGroup(NamedTuple):
    """Examples below a heading. legend: a sentence below the heading. neighbors: rows of words and their neighbors."""

    heading: str
    examples: Sequence[Example] = ()
    legend: str = ""
    neighbors: Sequence[tuple[str, str]] = ()


def prediction_groups(summary: PredictionSummary) -> list[ExampleGroup]:
    """Returns the selected predictions under their headings."""
    groups = {"Right": summary.right, "Wrong": summary.wrong, "Surprising: confident and wrong": summary.surprising}
    if summary.is_regression:
        groups = {"Closest": summary.right, "Furthest off": summary.surprising}
    return [ExampleGroup(name, list(map(predicted_example, rows))) for name, rows in groups.items() if rows]


class PredictionRow(NamedTuple):
    """A row of the table of predictions. texts, words: as in `Example`. gold, predicted: labels, texts or numbers.
    confidence: the score of the prediction."""

    texts: Sequence[str]
    words: Sequence[Word]
    gold: str
    predicted: str
    confidence: str
    result: str


def prediction_rows(summary: PredictionSummary) -> list[PredictionRow]:
    """Returns the rows of the table of predictions: the wrong ones first, the most confident first."""
    return list(map(_prediction_row, summary.table))


def _prediction_row(row: JsonMapping) -> PredictionRow:
    example, score = predicted_example(row), as_number(row.get("score"))
    gold, predicted = row["gold"], row["prediction"]
    result = example.kind
    if example.words:  # the words have their labels
        wrong = sum(word.kind == "wrong" for word in example.words)
        gold = predicted = ""
        result = f"{counted(wrong, 'word')} wrong" if wrong else "right"
    elif not example.kind:
        result = f"off by {number(abs(float(gold) - float(predicted)))}"
    elif isinstance(gold, list):
        gold = " or ".join(dict.fromkeys(map(str, gold))) or "no answer"
    texts = [number(value) if is_number(value) else plain(value, 200) for value in (gold, predicted)]
    is_probability = score is not None and 0 <= score <= 1 and example.kind
    confidence = tenths(score) if score is not None and is_probability else ""
    return PredictionRow(example.texts, example.words, texts[0], texts[1], confidence, result)


def predictions_note(summary: PredictionSummary) -> str:
    rows = sum(summary.split_counts.values())
    if rows <= len(summary.table):
        return f"All {counted(rows, 'prediction')}, wrong ones first."
    wrong = sum(not _is_right(row) for row in summary.table)
    shown = f"{wrong} wrong and {len(summary.table) - wrong} right ones, selected at random"
    return f"{shown} from {counted(rows, 'prediction')}; predictions.jsonl has all."


def leading_examples(groups: Sequence[ExampleGroup]) -> tuple[list[ExampleGroup], list[ExampleGroup]]:
    """Splits groups into two leading examples, if possible of different groups, and the rest."""
    with_examples = [group for group in groups if group.examples]
    per_group = _LEADING_EXAMPLES if len(with_examples) == 1 else 1
    leading = with_examples[:_LEADING_EXAMPLES]
    rest = [group._replace(examples=group.examples[per_group:]) if group in leading else group for group in groups]
    return (
        [group._replace(examples=group.examples[:per_group], neighbors=()) for group in leading],
        [group for group in rest if group.examples or group.neighbors],
    )


def sample_groups(samples: Sequence[object]) -> list[ExampleGroup]:
    """Returns the samples of samples.json: masked, generated and labeled texts; unknown entries are skipped."""

    def examples(make: Callable[[JsonObject], Example], samples: Iterable[JsonObject]) -> list[Example]:
        return list(map(make, islice(samples, _SAMPLES_PER_GROUP)))

    texts = [sample for sample in samples if isinstance(sample, dict) and "text" in sample]
    written = [sample for sample in texts if not sample.keys() & {"prediction", "neighbours"}]
    predicted = [sample for sample in texts if sample.keys() >= {"gold", "prediction"}]
    masked = examples(masked_example, filter(_is_masked, samples))
    detected = examples(detected_example, filter(_is_detected, samples))
    neighbors = list(map(_neighbors_row, islice(filter(_has_neighbors, samples), _SAMPLES_PER_GROUP)))
    generated = examples(generated_example, written)
    groups = [
        ExampleGroup("Masked words and the model's predictions", masked, _MASKED_LEGEND),
        ExampleGroup("Detection of replaced tokens", detected, _DETECTED_LEGEND),
        ExampleGroup("Nearest words", neighbors=neighbors),
        ExampleGroup("Generated text", generated, "Bold: the prompt. After it: the generated text."),
        ExampleGroup("Predicted labels", examples(predicted_example, predicted)),
    ]
    return [group for group in groups if group.examples or group.neighbors]
