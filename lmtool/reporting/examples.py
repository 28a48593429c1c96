"""Selected examples of a report: right, wrong and surprising predictions, masked words, generated text."""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.reporting.html import escape, escape_lines, table
from lmtool.reporting.scores import as_number
from lmtool.reporting.text import number, percent, plain, shorten

_EXAMPLES_PER_GROUP = 4
_SAMPLES_PER_GROUP = 6
_MAX_TOKENS = 300
_MAX_CHARACTERS = 1200
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

    rows: number of predictions by split. pairs: counts of (gold, predicted) labels. gold, predicted: the values of a
    regression. right, wrong, surprising: the rows to show.
    """

    rows: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    gold: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    right: list[JsonObject] = field(default_factory=list)
    wrong: list[JsonObject] = field(default_factory=list)
    surprising: list[JsonObject] = field(default_factory=list)

    @property
    def examples(self) -> int | None:
        """Scored examples of the first split, which has the main score; None without predictions."""
        return next(iter(self.rows.values()), None)

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

    def confusion(self, limit: int = 20) -> tuple[list[str], list[list[int]]]:
        """Returns the most frequent labels and their counts, gold by predicted."""
        frequency: Counter[str] = Counter()
        for (gold, predicted), count in self.pairs.items():
            frequency[gold] += count
            frequency[predicted] += 0
        labels = sorted(label for label, _ in frequency.most_common(limit))
        return labels, [[self.pairs[gold, predicted] for predicted in labels] for gold in labels]


class _TopRows:
    """The _EXAMPLES_PER_GROUP rows with the largest keys, in constant memory."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, JsonObject]] = []
        self.offered = 0

    def offer(self, key: float, row: JsonObject) -> None:
        self.offered += 1  # makes entries with equal keys different, so that rows are never compared
        entry = (key, -self.offered, row)
        if len(self.heap) < _EXAMPLES_PER_GROUP:
            heapq.heappush(self.heap, entry)
        else:
            heapq.heappushpop(self.heap, entry)

    def rows(self) -> list[JsonObject]:
        return [row for _, _, row in sorted(self.heap, key=lambda entry: entry[:2], reverse=True)]


def summarize(rows: Iterable[JsonObject]) -> PredictionSummary:
    """Summarizes predictions.jsonl in one pass; the selection of examples depends only on their ids."""
    summary = PredictionSummary()
    right, wrong, surprising = (_TopRows() for _ in range(3))
    for row in rows:
        summary.rows[str(row.get("split", ""))] += 1
        gold, predicted = as_number(row["gold"]), as_number(row["prediction"])
        if gold is not None and predicted is not None and not isinstance(row["gold"], str):
            summary.gold.append(gold)
            summary.predicted.append(predicted)
            right.offer(-abs(gold - predicted), row)
            surprising.offer(abs(gold - predicted), row)
            continue
        # Each label of a row with several labels counts separately.
        is_list = isinstance(row["gold"], list) and isinstance(row["prediction"], list)
        labels = zip(row["gold"], row["prediction"], strict=False) if is_list else [(row["gold"], row["prediction"])]
        if is_list or not isinstance(row["gold"], list):  # alternative answers to a question are not labels
            summary.pairs.update((plain(label), plain(guess)) for label, guess in labels)
        random_key = zlib.crc32(str(row.get("id", summary.rows)).encode())
        score = as_number(row.get("score"))
        if _is_right(row):
            right.offer(random_key, row)
        else:
            wrong.offer(random_key, row)
            if score is not None:
                surprising.offer(score, row)
    summary.surprising = surprising.rows()
    summary.right = right.rows()
    surprising_ids = {id(row) for row in summary.surprising}
    summary.wrong = [row for row in wrong.rows() if id(row) not in surprising_ids]
    return summary


def _is_right(row: JsonMapping) -> bool:
    """Whether a prediction equals the gold value, or one of several accepted answers."""
    gold, predicted = row["gold"], row["prediction"]
    if not isinstance(gold, list) or not isinstance(predicted, str):
        return bool(gold == predicted)
    from lmtool.learners.metrics.spans import normalize

    accepted = {normalize(str(answer)) for answer in gold or [""]}
    return normalize(predicted) in accepted


def prediction_html(row: JsonMapping) -> str:
    """Returns one example: text, gold label, prediction and confidence."""
    gold, predicted = as_number(row["gold"]), as_number(row["prediction"])
    is_regression = gold is not None and predicted is not None
    is_right = _is_right(row)
    css_class = "" if is_regression else "right" if is_right else "wrong"
    if isinstance(row["prediction"], list) and (words := _words(row)) is not None:
        return _tagged_html(words, row, css_class)
    texts = [value for key, value in row.items() if key not in _KNOWN_KEYS and isinstance(value, str)]
    body = "<br>".join(escape(text, 600) for text in texts[:3])
    if is_regression:
        caption = f"gold {number(float(row['gold']))}, predicted {number(float(row['prediction']))}"
    else:
        score = as_number(row.get("score"))
        confidence_text = f" ({percent(score)})" if score is not None and 0 <= score <= 1 else ""
        has_answers = isinstance(row["gold"], list)
        answers_text = " or ".join(dict.fromkeys(map(str, row["gold"]))) if has_answers else row["gold"]
        empty_text = "no answer" if has_answers else "nothing"
        gold_name, predicted_name = shorten([answers_text or empty_text, row["prediction"] or empty_text], 80)
        caption = f"{predicted_name}{confidence_text}" + ("" if is_right else f", gold: {gold_name}")
    return f'<div class="example {css_class}">{body}<br><small class="quiet">{escape(caption)}</small></div>'


def _words(row: JsonMapping) -> list[object] | None:
    """Returns the words of a row with a gold and a predicted label per word; None for other rows."""
    gold, count = row["gold"], len(row["prediction"])
    if not isinstance(gold, list) or len(gold) != count:
        return None
    lists = (value for key, value in row.items() if key not in _KNOWN_KEYS and isinstance(value, list))
    return next((value for value in lists if len(value) == count), None)


def _tagged_html(words: list[object], row: JsonMapping, css_class: str) -> str:
    """Returns words followed by their labels; wrong labels have the truth struck out, correct O labels are omitted."""
    words_html = []
    for word, gold, predicted in list(zip(words, row["gold"], row["prediction"], strict=True))[:_MAX_TOKENS]:
        label = f"<small>{escape(predicted, 40)}</small>"
        if gold != predicted:
            label = f"{label} <small><s>{escape(gold, 40)}</s></small>"
            words_html.append(f'<mark class="wrong">{escape(word, 60)} {label}</mark>')
        elif gold != "O":
            words_html.append(f'<mark class="right">{escape(word, 60)} {label}</mark>')
        else:
            words_html.append(escape(word, 60))
    score = as_number(row.get("score"))
    confidence_text = (
        "" if score is None else f'<br><small class="quiet">least confident word: {percent(score)}</small>'
    )
    return f'<div class="example {css_class}">{" ".join(words_html)}{confidence_text}</div>'


def predictions_html(summary: PredictionSummary) -> str:
    """Returns the selected predictions under their headings."""
    surprising = ("Surprising: confident and wrong", summary.surprising)
    groups = [("Right", summary.right), ("Wrong", summary.wrong), surprising]
    if summary.is_regression:
        groups = [("Closest", summary.right), ("Furthest off", summary.surprising)]
    return "".join(
        f"<h3>{escape(name)}</h3>" + "".join(prediction_html(row) for row in rows) for name, rows in groups if rows
    )


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


def masked_html(sample: JsonMapping) -> str:
    """Returns a text with its masked words replaced by the model's; wrong ones are followed by the truth, struck
    out."""
    pieces = [str(piece) for piece in sample["pieces"]][:_MAX_TOKENS]
    masked_positions = {masked["position"]: masked for masked in sample["masked"] if masked["guesses"]}
    words = []
    for position, (space, token) in enumerate(_join(pieces)):
        masked = masked_positions.get(position)
        if masked is None:
            is_special = _is_special(pieces[position])
            words.append(
                space + (f'<span class="quiet">{escape(token, 60)}</span>' if is_special else escape(token, 60))
            )
            continue
        guess, truth = str(masked["guesses"][0][0]), str(masked.get("truth"))
        guess_html = escape(_without_mark(guess), 60)
        if guess == truth:
            words.append(f'{space}<mark class="right">{guess_html}</mark>')
        else:
            words.append(f'{space}<mark class="wrong">{guess_html} <s>{escape(_without_mark(truth), 60)}</s></mark>')
    rows = "".join(
        _guesses_row(masked) for position, masked in sorted(masked_positions.items())[:8] if position < len(pieces)
    )
    return f'<div class="example">{"".join(words)}<table class="guesses">{rows}</table></div>'


def detected_html(sample: JsonMapping) -> str:
    """Returns a text as a discriminator read it: replaced tokens that it detected and missed, and false positives."""
    pieces = [str(piece) for piece in sample["pieces"]]
    replaced = {
        target["position"]: str(target["sampled"])
        for target in sample["masked"]
        if target["sampled"] != target["truth"]
    }
    filled_pieces = [replaced.get(position, piece) for position, piece in enumerate(pieces)]
    flagged = {position for position, share in enumerate(sample["replaced"]) if share > 0.5}
    words = []
    for position, (space, token) in enumerate(_join(filled_pieces[:_MAX_TOKENS])):
        text = escape(token, 60)
        if position in replaced:
            css_class = "right" if position in flagged else "wrong"
            text = f'<mark class="{css_class}">{text} <s>{escape(_without_mark(pieces[position]), 60)}</s></mark>'
        elif position in flagged:
            text = f'<mark class="wrong">{text} ?</mark>'
        words.append(space + text)
    counts = (
        f"{len(replaced)} of {len(pieces)} tokens replaced: {len(replaced.keys() & flagged)} detected, "
        f"{len(replaced.keys() - flagged)} missed; {len(flagged - replaced.keys())} false positives"
    )
    return f'<div class="example">{"".join(words)}<br><small class="quiet">{escape(counts)}</small></div>'


def _is_detected(sample: object) -> TypeGuard[JsonObject]:
    """Whether `detected_html` can read an entry of samples.json."""
    if not _is_masked(sample) or not isinstance(sample.get("replaced"), list):
        return False
    probabilities, targets = sample["replaced"], sample["masked"]
    return (
        len(probabilities) == len(sample["pieces"])
        and all(as_number(share) is not None for share in probabilities)
        and all({"sampled", "truth"} <= target.keys() for target in targets)
    )


def _guesses_row(target: JsonMapping) -> str:
    guesses = " · ".join(
        f"{plain(_without_mark(str(piece)), 40)} {percent(float(share))}" for piece, share, *_ in target["guesses"][:5]
    )
    css_class = "right" if str(target["guesses"][0][0]) == str(target.get("truth")) else "wrong"
    truth = f'<mark class="{css_class}">{escape(_without_mark(str(target.get("truth"))), 40)}</mark>'
    return f'<tr><td>{truth}</td><td class="quiet">{escape(guesses)}</td></tr>'


def generated_html(sample: JsonMapping) -> str:
    """Returns a prompt and its continuation."""
    prompt = str(sample.get("prompt", ""))
    continuation = str(sample.get("text", "")).removeprefix(prompt)
    parts = [escape_lines(text, _MAX_CHARACTERS).replace("\n", "<br>") for text in (prompt, continuation)]
    return f'<div class="example"><b>{parts[0]}</b>{parts[1]}</div>'


def neighbors_html(samples: Sequence[JsonMapping]) -> str:
    """Returns the words with their nearest neighbors."""
    rows = []
    for sample in samples:
        neighbors = " · ".join(
            f"{plain(_without_mark(str(word)), 40)} {number(float(cosine))}" for word, cosine in sample["neighbours"]
        )
        rows.append([_without_mark(str(sample["text"])), neighbors])
    return table(["word", "nearest words, with cosine similarity"], rows)


def _has_neighbors(sample: object) -> TypeGuard[JsonObject]:
    """Whether `neighbors_html` can read an entry of samples.json."""
    neighbors = sample.get("neighbours") if isinstance(sample, dict) and "text" in sample else None
    return isinstance(neighbors, list) and all(_is_scored_token(pair) and len(pair) == 2 for pair in neighbors)


def _is_scored_token(guess: object) -> bool:
    """Whether a value is a list of a token, a number and possibly more."""
    return isinstance(guess, list) and len(guess) >= 2 and as_number(guess[1]) is not None


def _is_masked(sample: object) -> TypeGuard[JsonObject]:
    """Whether `masked_html` can read an entry of samples.json."""
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


def samples_html(samples: Sequence[object]) -> str:
    """Returns the samples of samples.json: masked, generated and labeled texts; unknown entries are skipped."""
    masked = [sample for sample in samples if _is_masked(sample)]
    texts = [sample for sample in samples if isinstance(sample, dict) and "text" in sample]
    detected = [sample for sample in samples if _is_detected(sample)]
    with_neighbors = [sample for sample in samples if _has_neighbors(sample)][:_SAMPLES_PER_GROUP]
    generated = [sample for sample in texts if not sample.keys() & {"prediction", "neighbours"}]
    predicted = [sample for sample in texts if sample.keys() >= {"gold", "prediction"}]

    def part(
        heading: str, examples: Sequence[JsonObject], render: Callable[[JsonObject], str], legend: str = ""
    ) -> str:
        legend_html = f'<p class="quiet"><small>{escape(legend)}</small></p>' if legend else ""
        return (
            f"<h3>{heading}</h3>{legend_html}{''.join(map(render, examples[:_SAMPLES_PER_GROUP]))}" if examples else ""
        )

    return "".join([
        part("Masked words and the model's predictions", masked, masked_html, _MASKED_LEGEND),
        part("Detection of replaced tokens", detected, detected_html, _DETECTED_LEGEND),
        f"<h3>Nearest words</h3>{neighbors_html(with_neighbors)}" if with_neighbors else "",
        part("Generated text", generated, generated_html, "Bold: the prompt. After it: the generated text."),
        part("Predicted labels", predicted, prediction_html),
    ])  # fmt: skip
