"""report.html: configuration, results and reproduction of a run on one self-contained page."""

from __future__ import annotations

import heapq
import json
import os
import shlex
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import command_line
from lmtool.reporting import html
from lmtool.reporting.html import Word
from lmtool.reporting.run_files import (
    MISSING_RESULT,
    UNDISTILLED,
    RunFiles,
    as_object,
    as_objects,
    models_of,
    read_predictions,
    read_run,
)
from lmtool.reporting.scores import Score, as_number, score_of, selection_note, stop_reason, test_scores
from lmtool.reporting.screens import parameter_rows
from lmtool.reporting.text import count, duration, is_number, number, percent, plain, shorten, size, tenths, title
from lmtool.runs.identity import budgets
from lmtool.runs.locks import is_held
from lmtool.system.terminal import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure
_EXAMPLES_PER_GROUP = 4
_SAMPLES_PER_GROUP = 6
_LEADING_EXAMPLES = 2
_TABLE_ROWS = 200  # of right, and of wrong predictions
_MAX_TOKENS = 300
_MAX_CONFUSED_PAIRS = 20
_KNOWN_KEYS = ("id", "gold", "prediction", "score", "split", "scores", "probabilities")
_ROW_KEYS = ("step", "split", "tokens", "best", "phase")  # of a validation row, beside its metrics
_CELL_KEYS = {"side", "student_layer", "teacher_layer", "region", "value", "n"}
_MODEL_COLUMNS = {
    "standard_error": "±", "parameters": "parameters", "weight_bytes": "bytes", "tokens_per_second": "tokens/s",
}  # fmt: skip
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
    """The rows with the largest keys, in constant memory. capacity: number of rows."""

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
    """Returns a key that sorts the predictions from the most to the least confident one."""
    return -(as_number(row.get("score")) or 0.0)


def _label_pairs(row: JsonMapping) -> Iterable[tuple[object, object]]:
    """Returns the gold and the predicted label of a row, or of each of its labels. Alternative answers to a question
    are not labels."""
    gold, predicted = row["gold"], row["prediction"]
    if not isinstance(gold, list):
        return [(gold, predicted)]
    return zip(gold, predicted, strict=False) if isinstance(predicted, list) else []


def _is_right(row: JsonMapping) -> bool:
    """Whether a prediction equals the gold value, or one of several accepted answers."""
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
    texts = [value for key, value in row.items() if key not in _KNOWN_KEYS and isinstance(value, str)][:3]
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


def _words(row: JsonMapping) -> list[object] | None:
    """Returns the words of a row with a gold and a predicted label per word; None for other rows."""
    gold, length = row["gold"], len(row["prediction"])
    if not isinstance(gold, list) or len(gold) != length:
        return None
    lists = (value for key, value in row.items() if key not in _KNOWN_KEYS and isinstance(value, list))
    return next((value for value in lists if len(value) == length), None)


def _tagged_example(words: list[object], row: JsonMapping, kind: str) -> Example:
    """Returns words followed by their labels; wrong labels have the truth struck out, correct O labels are omitted."""

    def tagged(word: object, gold: object, predicted: object) -> Word:
        if gold != predicted:
            return Word(str(word), "wrong", str(gold), str(predicted))
        return Word(str(word), "right", label=str(predicted)) if gold != "O" else Word(str(word))

    score = as_number(row.get("score"))
    caption = "" if score is None else f"least confident word: {percent(score)}"
    tagged_words = map(tagged, words[:_MAX_TOKENS], row["gold"], row["prediction"])
    return Example(kind, words=list(tagged_words), caption=caption)


def _without_mark(piece: str) -> str:
    """Returns a token without the space marker of byte-level BPE or SentencePiece."""
    return piece.replace("Ċ", "⏎ ").replace("Ġ", "").removeprefix("▁") or "␣"


def _is_special(piece: str) -> bool:
    """Whether a token looks special: [SEP], <sep>, <extra_id_0>."""
    return len(piece) > 2 and (piece[0], piece[-1]) in (("[", "]"), ("<", ">"))


def _join(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (preceding space, text) of each token, without ## and space markers."""
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
    """Whether `detected_example` can read an entry of samples.json."""
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
    """Whether `_neighbors_row` can read an entry of samples.json."""
    neighbors = sample.get("neighbours") if isinstance(sample, dict) and "text" in sample else None
    return isinstance(neighbors, list) and all(_is_scored_token(pair) and len(pair) == 2 for pair in neighbors)


def _is_scored_token(guess: object) -> bool:
    """Whether a value is a list of a token, a number and possibly more."""
    return isinstance(guess, list) and len(guess) >= 2 and as_number(guess[1]) is not None


def _is_masked(sample: object) -> TypeGuard[JsonObject]:
    """Whether `masked_example` can read an entry of samples.json."""
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


def _predictions_note(summary: PredictionSummary) -> str:
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


def distillation_summary(run: RunFiles) -> JsonObject | None:
    """Returns the table of the models, sentences about their agreement, and the command that trains the student without
    a teacher, unless there is such a run; None if the run has no teacher."""
    models = models_of(run)
    if not models:
        return None

    def rounded(value: object) -> object:
        return round(value) if isinstance(value, float) and abs(value) > 1000 else value

    names = {"score": title(str(run.result.get("metric", "score"))), **_MODEL_COLUMNS}
    columns = [key for key in names if any(model.get(key) is not None for model in models)]
    rows = [[model.get("name"), *(rounded(model.get(key)) for key in columns)] for model in models]
    command = None
    if not any(model["name"] == UNDISTILLED for model in models):
        words = ["--config", str(run.run_dir / "config.yaml"), "distill=none", f"name={run.name}-alone"]
        command = command_line(str(run.result.get("command")), *words, modules=run.plugins)
    return {
        "models": (["model", *(names[key] for key in columns)], rows),
        "agreement": list(_agreement(run)),
        "command": command,
    }


def interchange_of(run: RunFiles) -> JsonObject:
    """Returns the measurements under interchange interventions; {} if there were none."""
    accuracy = as_object(as_object(run.result.get("distillation")).get("interchange_accuracy"))
    cells = accuracy.get("cells")
    if not isinstance(cells, list):
        return {}
    return accuracy if all(isinstance(cell, dict) and cell.keys() >= _CELL_KEYS for cell in cells) else {}


def _agreement(run: RunFiles) -> Iterator[str]:
    if layers := as_object(run.section("data").get("distillation")).get("layers"):
        yield f"Student layers and their teacher layers: {layers}."
    distillation: JsonObject = run.result["distillation"]
    fidelity, accuracy = distillation.get("fidelity"), interchange_of(run)
    if _is_fraction(fidelity):
        yield f"Student and teacher agree on {_fraction_text(fidelity)}."
    if _is_fraction(accuracy):
        changed, changed_text = accuracy.get("changed"), ""
        if _is_fraction(changed):
            changed_text = f"; where the swap changes the teacher's prediction, on {_fraction_text(changed)}"
        swapped = "With states of another text swapped into both models (interchange accuracy)"
        yield f"{swapped}, they agree on {_fraction_text(accuracy)}{changed_text}."
    elif distillation.get("interchange_accuracy_reason"):
        reason = plain(str(distillation["interchange_accuracy_reason"]), 300)
        yield f"Agreement under interchange interventions was not measured: {reason}."


def _is_fraction(value: object) -> TypeGuard[JsonObject]:
    """Whether a value has the keys that `_fraction_text` reads."""
    return isinstance(value, dict) and isinstance(value.get("value"), float) and isinstance(value.get("n"), int)


def _fraction_text(fraction: JsonMapping) -> str:
    return f"{percent(fraction['value'])} of {count(fraction['n'])} targets"


def write_report(run_dir: str | Path, trains: bool | None = None, reason: str = "") -> Path:
    """Writes report.html and plots/*.png of a run folder and returns the path of the report.

    The section of a missing or damaged file is left out, with a note on the page.

    Args:
        run_dir: the run folder.
        trains: for a run without a result, whether it is still training, which the page says, and no PNG is written;
            None if only the run's lock says so.
        reason: why it stopped; may be empty.

    Raises:
        UserError: the folder is not a run or cannot be written.
    """
    run = read_run(run_dir)
    note = ""
    if not os.path.lexists(run.run_dir / "result.json"):
        held = is_held(run.run_dir / "LOCK") if trains is None else trains
        note = _unfinished_note(run, held, reason)
        run.problems.remove(MISSING_RESULT)
        run.result = _result_so_far(run)
    predictions = summarize(read_predictions(run))
    figures = _page_figures(run, predictions, writes_png=not trains)
    score = score_of(run.result, run.baseline, predictions.scored_count)
    leading, more = leading_examples([*sample_groups(run.samples), *prediction_groups(predictions)])
    class_header, classes = _classes(run)
    return html.write_page(
        run.run_dir / "report.html",
        "report.html",
        run.name,
        run=run,
        subtitle=_subtitle(run.result),
        status=run.result.get("status"),
        note=note,
        score=score,
        score_label=_score_label(score, run.result) if score else "",
        selection_note=selection_note(run.result),
        tests=test_scores(run.result) if score else (),
        key_numbers=list(_key_numbers(run.result)),
        figures=figures,
        terms=_terms(run),
        phases=_phases(run),
        distillation=distillation_summary(run),
        mixture=_mixture(run),
        classes=(class_header, classes),
        confused=predictions.confused_pairs(),
        predictions=prediction_rows(predictions),
        predictions_note=_predictions_note(predictions),
        leading_examples=leading,
        more_examples=more,
        scores={key: number(value) for key, value in as_object(run.result.get("metrics")).items() if is_number(value)},
        trainable=_trainable(run),
        rates=_learning_rates(run),
        lineage=_lineage(run),
        forgetting=_forgetting(run),
        commands=repeat_commands(run),
        environment=_environment_text(run.environment),
        result="" if note or not run.result else json.dumps(run.result, indent=2),
    )


def _unfinished_note(run: RunFiles, trains: bool, reason: str) -> str:
    """Returns the state of a run without a result: whether it is training, its step, and how it continues."""
    step = max((row["step"] for row in (*run.train, *run.validation)), default=0)
    limits = " or ".join(f"{key}={value:g}" for key, value in budgets(run.keys).items() if is_number(value))
    place = f"step {count(step)}" + (f" of a run that ends at {limits}" if limits else "")
    written = f"This page was written at {time.strftime('%Y-%m-%d %H:%M')}"
    if trains:
        return f"Training, at {place}. {written}; {command_line('report', str(run.run_dir))} writes it again."
    cause = f": {plain(reason, 300)}" if reason else ""
    resume = command_line("resume", str(run.run_dir), modules=run.plugins)
    return f"Stopped after {place}{cause}. {written}; {resume} continues the run."


def _result_so_far(run: RunFiles) -> JsonObject:
    """Returns the keys of result.json that the rows of an unfinished run give: those of its best evaluation."""
    keys, last = run.keys, run.train[-1] if run.train else {}
    named = {key: as_object(keys.get(key)).get("name") for key in ("model", "task", "objective")}
    best = [row for row in run.validation if row.get("best") is True] or run.validation
    metrics = {name: value for name, value in best[-1].items() if name not in _ROW_KEYS} if best else {}
    metric = str(run.baseline.get("metric"))
    return {
        "command": keys.get("command"),
        "seed": keys.get("seed"),
        **named,
        "steps": last.get("step"),
        **{name: last.get(name) for name in ("tokens", "tokens_per_second")},
        "metric": metric,
        "value": metrics.get(metric),
        "metrics": metrics,
        **({"validation_step": best[-1]["step"]} if best else {}),
    }


def write_run_figures(run_dir: str | Path, file_format: str) -> list[Path]:
    """Writes plots/*.svg or plots/*.pdf of a run folder, and returns the paths. Raises as `write_report`."""
    from lmtool.reporting import drawing

    run = read_run(run_dir)
    figures = _run_figures(run, summarize(read_predictions(run)))
    with html.report_write_errors(run.run_dir):
        return drawing.write_figures(figures, run.run_dir / "plots", file_format)


def _run_figures(run: RunFiles, predictions: PredictionSummary) -> dict[str, Figure]:
    # matplotlib takes most of a second to import, so a command that draws nothing does not.
    from lmtool.reporting import heat_maps, plots

    figures = {name: draw(run) for name, draw in plots.OVER_STEPS.items()}
    figures["agreement"] = heat_maps.agreement_figure(interchange_of(run))
    if not isinstance(run.result.get("mixture"), dict):  # labels of several tasks do not fit into one plot
        if predictions.is_regression:
            figures["scatter"] = plots.scatter_figure(predictions.gold, predictions.predicted)
        elif len(predictions.pairs) > 0 and predictions.has_labels(run.result.get("classes") or ()):
            figures["confusion"] = heat_maps.confusion_figure(*heat_maps.most_confused(predictions.pairs))
    return {name: figure for name, figure in figures.items() if figure is not None}


def _page_figures(run: RunFiles, predictions: PredictionSummary, writes_png: bool) -> dict[str, tuple[str, ...]]:
    """Writes the PNG files if asked to, and returns (SVG, caption, SVG for narrow pages) of each figure by name."""
    from lmtool.reporting import drawing, plots

    captions = {
        "loss": plots.loss_caption(run),
        "terms": "Each term of the training loss before its weight. Dots: held-out data; dashed: its baseline.",
        "agreement": "Fraction of predictions on which both models agree, with states of another text swapped in.",
        "confusion": _confusion_caption(predictions),
        "scatter": "One dot per held-out example.",
    }
    figures = _run_figures(run, predictions)
    if writes_png:
        with html.report_write_errors(run.run_dir):
            drawing.write_figures(figures, run.run_dir / "plots")
    page_figures: dict[str, tuple[str, ...]] = {}
    for name, figure in figures.items():
        narrow_figure = plots.OVER_STEPS[name](run, drawing.NARROW) if name in plots.OVER_STEPS else None
        narrow_svg = "" if narrow_figure is None else drawing.svg(narrow_figure)
        page_figures[name] = drawing.svg(figure), captions.get(name, ""), narrow_svg
    return page_figures


def _confusion_caption(predictions: PredictionSummary) -> str:
    from lmtool.reporting.heat_maps import MAX_CLASSES

    classes = len({name for pair in predictions.pairs for name in pair})
    caption = "Rows: gold labels. Columns: predictions. Shade: fraction of the gold label."
    if classes > MAX_CLASSES:
        caption += (
            f" The {MAX_CLASSES} of {classes} labels with the most errors; others: predictions of all other labels."
        )
    return caption


def _subtitle(result: JsonMapping) -> str:
    seed = f"seed {result['seed']}" if result.get("seed") is not None else None
    learned_name = result.get("objective") or result.get("task")
    parts = (result.get("command"), result.get("model"), learned_name, seed, stop_reason(result))
    return " · ".join(plain(part, 80) for part in parts if part)


def _score_label(score: Score, result: JsonMapping) -> str:
    label, metrics = title(score.metric), as_object(result.get("metrics"))
    if "validation_step" in result:
        return f"{label} so far, at step {result['validation_step']}"
    if isinstance(metrics.get("perplexity"), (int, float)):
        return f"validation {label} · perplexity {number(float(metrics['perplexity']))}"
    return "validation loss" if score.metric == "loss" else label


# By key of result.json: the name in the page, and the function that formats the value.
_KEY_NUMBERS: dict[str, tuple[str, Callable[[float], str]]] = {
    "steps": ("steps", count),
    "tokens": ("tokens", count),
    "seconds": ("training", duration),
    "evaluation_seconds": ("evaluation", duration),
    "tokens_per_second": ("tokens per second", lambda rate: count(round(rate))),
    "padding_fraction": ("padding", percent),
    "peak_memory_bytes": ("peak memory", size),
    "parameters": ("parameters", count),
    "trainable_parameters": ("trainable", count),
}


def _key_numbers(result: JsonMapping) -> Iterator[tuple[str, str]]:
    for key, (name, formatter) in _KEY_NUMBERS.items():
        repeated = key == "trainable_parameters" and result.get(key) == result.get("parameters")
        if isinstance(result.get(key), (int, float)) and not repeated:
            yield name, formatter(result[key])


def _terms(run: RunFiles) -> list[list[object]]:
    metrics = as_object(run.result.get("metrics"))
    names = [key.removesuffix("_baseline") for key in metrics if key.endswith("_baseline")]
    columns = ("loss", "baseline", "accuracy", "count")
    rows = [[name, *(metrics.get(f"{name}_{column}") for column in columns)] for name in names]
    return rows if len(rows) > 1 else []


def _trainable(run: RunFiles) -> list[tuple[str, ...]]:
    by_role = run.section("learns")
    has_all_counts = all(
        isinstance(counts, dict) and {"trainable", "total"} <= set(counts) for counts in by_role.values()
    )
    return parameter_rows(by_role) if by_role and has_all_counts else []


def _table(rows: Sequence[JsonMapping], names: Mapping[str, str]) -> tuple[list[str], list[list[object]]]:
    return [*names.values()], [[row.get(name) for name in names] for row in rows]


def _phases(run: RunFiles) -> tuple[list[str], list[list[object]]]:
    names = {
        "phase": "phase", "share": "share of the budget", "given": "changed keys", "first_step": "first step",
        "last_step": "last step",
    }  # fmt: skip
    phases = enumerate(as_objects(run.result.get("phases")), 1)
    rows = [{**row, "phase": phase, "share": percent(row.get("share") or 0)} for phase, row in phases]
    return _table(rows, names)


def _mixture(run: RunFiles) -> list[list[object]]:
    members, metrics = as_object(run.result.get("mixture")), as_object(run.result.get("metrics"))
    if not metrics:
        return []
    baselines = run.baseline.get("members") or {}
    rows = []
    for name, member in members.items():
        baseline = baselines.get(name) or {}
        metric, value = baseline.get("metric"), baseline.get("value")
        score = metrics.get(f"{name}_{metric}")
        percentages = [percent(member[key]) for key in ("share", "planned")]
        rows.append([name, member["examples"], *percentages, metric, score, value, metrics.get(f"{name}_loss")])
    return rows


def _forgetting(run: RunFiles) -> JsonObject | None:
    forgetting = as_object(run.result.get("forgetting"))
    if not {"before", "after", "distance"} <= set(forgetting):
        return None
    before, after = forgetting["before"], forgetting["after"]
    return {
        "subject": f"{forgetting.get('objective')} on {forgetting.get('text')}",
        "scores": [[name, before[name], after.get(name)] for name in before],
        "distances": list(forgetting["distance"].items()),
    }


def _learning_rates(run: RunFiles) -> tuple[list[str], list[list[object]]]:
    columns = ("group", "parameters", "learning_rate", "weight_decay", "without_decay", "from_step")
    # Three digits, since 0.0015 must not become 0.002.
    rows = [
        {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}
        for row in as_objects(run.metadata.get("rates"))
    ]
    return _table(rows, {column: title(column) for column in columns})


def _lineage(run: RunFiles) -> tuple[list[str], list[list[object]]]:
    names = {"checkpoint": "checkpoint", "step": "step", "command": "command", "sha256": "sha256 of its weights"}
    return _table(as_objects(run.metadata.get("lineage")), names)


def _classes(run: RunFiles) -> tuple[list[str], list[list[object]]]:
    classes = as_object(run.result.get("classes"))
    rows = [{**as_object(scores), "class": name} for name, scores in classes.items()]
    rows.sort(key=lambda row: -(row.get("support") or 0))
    names = {"class": "class", "precision": "precision", "recall": "recall", "f1": "F1", "support": "n"}
    return _table(rows, names)


def _environment_text(environment: JsonMapping) -> str:
    lines: list[str] = []

    def add(values: JsonMapping, indent: str) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                lines.append(f"{indent}{key}:")
                add(value, indent + "  ")
            elif isinstance(value, (list, tuple)):
                lines.append(f"{indent}{key}: {' '.join(str(item) for item in value)}")
            else:
                lines.append(f"{indent}{key}: {value}")

    add(environment, "")
    return "\n".join(lines)


def repeat_commands(run: RunFiles) -> list[str]:
    """Returns the commands that repeat the run: from its saved configuration, and as typed."""
    command = run.result.get("command") or run.environment.get("command")
    lines = []
    if isinstance(command, str) and command.replace("_", "").isalnum():
        repeated = command_line(command, "--config", str(run.run_dir / "config.yaml"), modules=run.plugins)
        lines += ["# the same run again, from its saved configuration", repeated]
    argv = run.environment.get("arguments")
    if isinstance(argv, list) and argv:
        lines += ["# the original command", shlex.join(["lmtool", *map(str, argv[1:])])]
    following = run.metadata.get("next")
    if isinstance(following, list) and following:
        lines += ["# possible next steps", *map(str, following[:5])]
    return lines
