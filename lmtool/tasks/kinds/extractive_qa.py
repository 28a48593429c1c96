"""Extractive question answering (Devlin et al. 2019, sections 4.2 and 4.3; Rajpurkar et al. 2016, Rajpurkar, Jia, Liang
2018): one head scores each token as the start and the end of the answer.

If a window has no answer, both targets are the class token. Text formats without a class token (GPT, T5) end a text
with a token that stands for no answer. Heads equal those of transformers' ...ForQuestionAnswering: only ModernBERT's
has a pooler, and the decoder of an encoder-decoder reads the same text as its encoder.

Shape letters: T tokens, N windows, L tokens of the longest window, H hidden width, K reported answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.configs import FORMATS
from lmtool.data.examples import Rows, SplitData
from lmtool.data.formats import assemble, ragged_ranges
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.metrics import Metric
from lmtool.learners.metrics.spans import ANSWER_METRICS, answer_scores, best_threshold, summarize, threshold_scores
from lmtool.models.base import Backbone
from lmtool.models.heads.base import loss_sum, losses
from lmtool.models.heads.predicted import Classes, Predicted
from lmtool.models.heads.sequence import SequenceHead
from lmtool.system.terminal import counted
from lmtool.tasks.configs.texts import ExtractiveQaConfig
from lmtool.tasks.kinds.base import TextKind
from lmtool.tasks.kinds.labels import IDS, Columns, Origin, location
from lmtool.tasks.kinds.learner import TaskInspector, TaskLearner
from lmtool.tasks.kinds.predictions import Label, Prediction, PredictionColumns, values_of
from lmtool.tasks.kinds.texts import AlignedTexts, InputFormat, TaskExamples, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, Target

# Parses the answer column in its common layouts and checks the answers against the contexts.


_ANSWER_HINT = 'write {"text": [...], "answer_start": [...]}, or a list of {"text": ..., "answer_start": ...}'
_MAX_SHOWN_CHARACTERS = 60


class GoldAnswer(NamedTuple):
    """A gold answer. start: the index of its first character in the context."""

    text: str
    start: int


def gold_answers(value: Label, place: tuple[str, int]) -> tuple[GoldAnswer, ...]:
    """Returns the answers of a row, given as parallel lists (on the hub) or as a list of objects (in SQuAD's files). An
    empty cell means no answer. Raises UserError with file:line for any other layout."""
    if value is None:
        return ()
    pairs: list[tuple[Label, Label]] | None = None
    if isinstance(value, dict) and value.keys() >= {"text", "answer_start"}:
        texts, starts = value["text"], value["answer_start"]
        if isinstance(texts, str):
            texts, starts = [texts], [starts]
        if _is_list(texts) and _is_list(starts) and len(texts) == len(starts):
            pairs = list(zip(texts, starts, strict=True))
    elif _is_list(value) and all(isinstance(item, dict) for item in value):
        pairs = [(item.get("text"), item.get("answer_start")) for item in value]
    if pairs is None or not all(isinstance(text, str) and _is_number(start) for text, start in pairs):
        raise UserError(f"{location(place)}: unknown layout of answers: {_truncate(repr(value))}", _ANSWER_HINT)
    return tuple(GoldAnswer(text, int(start)) for text, start in pairs)


def problem_of(config: ExtractiveQaConfig, context: str, answers: Sequence[GoldAnswer]) -> tuple[str, str] | None:
    """Returns the message and the hint for invalid answers of a row; None if they are valid."""
    if not answers and not config.unanswerable:
        return (
            "a question without an answer",
            "set task.unanswerable=true (task=squad_v2 has it), or remove the row; task.bad_answers=skip skips "
            "and counts such rows",
        )
    for text, start in answers:
        if not text.strip():
            return "an empty answer", "give its text, or an empty list; task.bad_answers=skip skips it"
        if start >= 0 and context.startswith(text, start):
            continue
        index = context.find(text)
        skip = "task.bad_answers=skip skips and counts such rows"
        if index < 0:
            return f"the answer {_truncate(text)!r} is not in its context", f"correct the row; {skip}"
        found = context[max(start, 0) : max(start, 0) + len(text)]
        return (
            f"answer_start={start} does not point at the answer {_truncate(text)!r}: the context has "
            f"{_truncate(found)!r} there",
            f"answer_start counts characters from 0 (it is at {index}); {skip}",
        )
    return None


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) or type(value).__name__ == "ndarray"


def _is_number(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."


# The search for the best answers in windows, given scores of their tokens.
# Shape letters: T tokens, N windows, L tokens of the longest window, A maximum tokens of an answer, K reported answers.


def pad(values_T: Tensor, packed: Packed, fill: float) -> Tensor:
    """Returns (N, L): the values of each document as a row, padded with `fill`."""
    table_NL = values_T.new_full((len(packed.lengths), max(packed.lengths, default=0)), fill)
    return table_NL.index_put((packed.documents, packed.positions), values_T)


def best_spans(
    starts_NL: Tensor, ends_NL: Tensor, allowed_NL: Tensor, longest: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (N, K): the scores of the best spans in descending order, and their first and last tokens; -inf after the
    last span.

    A span's score is the sum of its start and end scores (Devlin et al. 2019, section 4.2). Every span with allowed
    boundaries and at most `longest` tokens is considered, not only those of the best starts and ends.
    """
    excluded = -torch.inf
    starts_NL = starts_NL.float().masked_fill(~allowed_NL, excluded)
    ends_NL = ends_NL.float().masked_fill(~allowed_NL, excluded)
    length = starts_NL.shape[1]
    longest_span = min(longest, length)
    ends_NLA = torch.nn.functional.pad(ends_NL, (0, longest_span - 1), value=excluded).unfold(1, longest_span, 1)
    scores = (starts_NL[:, :, None] + ends_NLA).flatten(1)
    best_NK, flat_NK = scores.topk(min(count, scores.shape[1]), dim=1)
    first_NK = flat_NK // longest_span
    return best_NK, first_NK, first_NK + flat_NK % longest_span


# Answers as spans of a context. The predictions for a window and for a row are arrays.
# Shape letters: K reported answers.


class Span(NamedTuple):
    """The characters [start, end) of the context, and the sum of their start and end scores. [0, 0) means no answer."""

    start: int
    end: int
    score: float


SPANS = np.dtype([("start", "i4"), ("end", "i4"), ("score", "f4")])
"""The dtype of a `Span` in an array. One object for each span would exhaust the memory."""


class WindowAnswers(NamedTuple):
    """The best spans of a window, (K,) of dtype `SPANS` in descending order of score, and the score of no answer."""

    best: np.ndarray
    null: float


@dataclass(frozen=True, slots=True)
class PredictedAnswer:
    """The prediction of a row. spans_K: (K,) the best spans, of dtype `SPANS`, in descending order of score; empty if
    the context is empty. null: the score of no answer, which is the lowest of all windows. answered: whether the best
    span is predicted, rather than no answer."""

    spans_K: np.ndarray
    null: float
    answered: bool = True

    @property
    def best_spans(self) -> tuple[Span, ...]:
        """The reported spans, in descending order of score."""
        return tuple(map(Span._make, self.spans_K.tolist()))

    @property
    def null_difference(self) -> float:
        """The score of no answer minus the score of the best span."""
        return self.null - float(self.spans_K[0]["score"]) if len(self.spans_K) else np.inf

    @property
    def span(self) -> tuple[int, int]:
        """The characters of the predicted answer."""
        return self.best_span if self.answered else (0, 0)

    @property
    def best_span(self) -> tuple[int, int]:
        """The characters of the best span, even if no answer is predicted."""
        return (int(self.spans_K[0]["start"]), int(self.spans_K[0]["end"])) if len(self.spans_K) else (0, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PredictedAnswer) and self.span == other.span

    __hash__ = None  # type: ignore[assignment]


# Questions and windows of their contexts as packed batches: a context that does not fit next to its question is read in
# overlapping windows, each laid out as a pair of the question and the window.
# Shape letters: E rows, W windows, N windows of a batch, T tokens.


CHARACTERS = ("character_start", "character_end")
"""Columns of a batch's inputs: the first character of each token in the context and the one after its last; both 0 for
tokens outside the context."""


def null_first(format_name: str) -> bool:
    """Whether no answer is represented by the first token, a class token; otherwise by the last token, which ends a
    text."""
    return FORMATS[format_name].layouts[0].startswith("cls")


class QuestionWindows(TaskExamples):
    """Examples of a question and a window of its context. Adjacent windows share `InputFormat.stride` tokens."""

    def __init__(self, config: ExtractiveQaConfig, rows: Rows, input_format: InputFormat, split: str):
        super().__init__(rows, config.name, split, input_format.start)
        self.max_length, self.null_first = input_format.max_length, null_first(input_format.format_name)
        self.template = input_format.template(2, min_tokens=2)
        self._questions, self._contexts = (
            AlignedTexts(rows.columns[name], input_format.tokenizer) for name in config.text
        )
        capacity = input_format.max_length - self.template.special_count
        # At least half of the capacity belongs to the context.
        question_E = np.minimum(self._questions.lengths_E, min(config.question_tokens, capacity // 2))
        self.cut_questions = int(np.sum(question_E < self._questions.lengths_E))
        context_E = capacity - question_E
        context_windows = windows(
            self._contexts.lengths_E, context_E, np.minimum(input_format.stride or 0, context_E // 2)
        )
        self._require_all_tokens(context_windows.text, context_windows.start, context_windows.end)
        question_W = question_E[context_windows.text]
        packed_W = question_W + context_windows.lengths + self.template.special_count
        self._plan = self.build_plan(
            packed_W,
            row=context_windows.text,
            part=context_windows.part,
            start=context_windows.start,
            end=context_windows.end,
            question=question_W,
        )
        self._spans_E = None if rows.labels is None else self._answer_tokens(rows.labels)

    def _require_all_tokens(self, rows_W: np.ndarray, starts_W: np.ndarray, ends_W: np.ndarray) -> None:
        lengths_W = self._contexts.lengths_E[rows_W]
        first, last = np.append(True, np.diff(rows_W) > 0), np.append(np.diff(rows_W) > 0, True)
        gaps = ~first[1:] & (starts_W[1:] > ends_W[:-1])
        if starts_W[first].any() or (ends_W != lengths_W)[last].any() or gaps.any() or first.sum() != len(self.rows):
            raise RuntimeError(f"the windows of the {self.split} split do not cover a context")

    def _answer_tokens(self, labels: Sequence[tuple[GoldAnswer, ...]] | np.ndarray) -> np.ndarray:
        """Returns (E, 2): the first and the last token; -1 if there is no answer."""
        spans_E = np.full((len(self.rows), 2), -1, dtype=np.int64)
        for row, answers in enumerate(labels):
            if answers:
                text, start = answers[0]
                first, last = self._contexts.tokens_of(row, start, start + len(text))
                if first <= last:
                    spans_E[row] = first, last
        return spans_E

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        row_N, question_N, length_N = rows["row"], rows["question"], rows["end"] - rows["start"]
        read_T = ragged_ranges(self._contexts.starts_E[row_N] + rows["start"], length_N)
        question_ids = self._questions.ids[ragged_ranges(self._questions.starts_E[row_N], question_N)]
        assembled = assemble(self.template, [(question_ids, question_N), (self._contexts.ids[read_T], length_N)])
        inputs = assembled.packed()
        first_N = np.cumsum(assembled.lengths) - assembled.lengths
        context_at = torch.from_numpy(ragged_ranges(first_N + self._before(rows), length_N))
        for side, name in enumerate(CHARACTERS):
            column = torch.zeros_like(inputs.tokens)
            column[context_at] = torch.from_numpy(self._contexts.spans[read_T, side])
            inputs.columns[name] = column
        target = None if self._spans_E is None else Target(torch.from_numpy(self.labels(rows)))
        return self.batch_of(inputs, target, rows, examples)

    def labels(self, rows: np.ndarray) -> np.ndarray:
        """Returns (N, 2): the positions of the answer's first and last token in each window. If a window does not
        contain the whole answer, both are the position that means no answer. rows: (N,) records of the plan,
        labeled."""
        assert self._spans_E is not None
        spans_N2, before_N = self._spans_E[rows["row"]], self._before(rows)
        positions_N2 = spans_N2 - rows["start"][:, None] + before_N[:, None]
        last_N = before_N + rows["end"] - rows["start"] + len(self.template.pieces[2]) - 1
        null_N = np.zeros_like(last_N) if self.null_first else last_N
        return np.where(self._holds_answer(rows)[:, None], positions_N2, null_N[:, None])

    def _before(self, rows: np.ndarray) -> np.ndarray:
        return len(self.template.pieces[0]) + rows["question"] + len(self.template.pieces[1])

    def _holds_answer(self, rows: np.ndarray) -> np.ndarray:
        assert self._spans_E is not None
        first_N, last_N = self._spans_E[rows["row"]].T
        return (first_N >= 0) & (first_N >= rows["start"]) & (last_N < rows["end"])

    def metadata(self) -> JsonObject:
        """Adds the numbers of questions, of truncated questions, and of answers that no window contains."""
        metadata = {**super().metadata(), "questions": len(self.rows), "cut_questions": self.cut_questions}
        if self._spans_E is not None:
            rows = self._plan.rows
            answered = np.unique(rows["row"][self._holds_answer(rows)])
            metadata["answers_in_no_window"] = int(np.sum(self._spans_E[:, 0] >= 0) - len(answered))
        return metadata


class ExtractiveQa(TextKind):
    """Rows of a question and a context, with gold answers. skipped: the number of rows, over all splits, that
    bad_answers=skip has dropped."""

    config: ExtractiveQaConfig

    def __init__(self, config: ExtractiveQaConfig):
        super().__init__(config)
        self.skipped = 0

    def rows(self, columns: Columns, origin: Origin, labeled: bool) -> Rows:
        _require_different_ids(columns, origin)
        rows = super().rows(columns, origin, labeled)
        labels = list(rows.labels or ())
        if not labeled and not self.config.unanswerable and not any(labels):
            return replace(rows, labels=None)  # on the hub, the answers of a test split are empty lists
        return self._valid_rows(rows, labels) if rows.labels is not None else rows

    def decoded_labels(self, values: Sequence[object], origin: Origin) -> list[tuple[GoldAnswer, ...]]:
        return [gold_answers(value, place) for value, place in zip(values, origin, strict=True)]

    def labels_of_predictions(self, columns: Columns) -> list[object]:
        """Converts predicted texts to gold answers. An empty text means no answer."""
        spans = zip(columns["prediction"], columns["start"], strict=True)
        return [{"text": [text][: bool(text)], "answer_start": [start][: bool(text)]} for text, start in spans]

    def _valid_rows(self, rows: Rows, labels: list[tuple[GoldAnswer, ...]]) -> Rows:
        contexts, valid_rows = rows.columns[self.config.text[1]], []
        for number, (context, answers) in enumerate(zip(contexts, labels, strict=True)):
            problem = problem_of(self.config, context, answers)
            if problem is None:
                valid_rows.append(number)
            elif self.config.bad_answers == "refuse" or not (valid_rows or number + 1 < len(rows)):
                raise UserError(f"{location(rows.origin[number])}: {rows.ids[number]}: {problem[0]}", problem[1])
        self.skipped += len(rows) - len(valid_rows)
        return rows if len(valid_rows) == len(rows) else rows.take(np.array(valid_rows))

    def groups(self, rows: Rows) -> Sequence[object]:
        """Returns the contexts: questions about the same context are held out together."""
        return rows.columns[self.config.text[1]]

    def metadata(self, train: Rows) -> tuple[JsonObject, list[str]]:
        metadata, warnings = super().metadata(train)
        if self.skipped:
            warnings.append(f"{counted(self.skipped, 'row')} skipped: an answer does not occur in its context")
        metadata["skipped_answers"] = self.skipped
        if self.config.unanswerable:
            metadata["unanswerable"] = sum(not answers for answers in train.labels or ())
        return metadata, warnings

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> ExtractiveQaLearner:
        return ExtractiveQaLearner(self, backbone, tokenizer, seed)

    def join(self, parts: Sequence[WindowAnswers]) -> Prediction:
        """Joins the windows of a row: the best distinct spans of all windows, and the lowest score of no answer."""
        spans = np.concatenate([part.best for part in parts])
        spans = spans[np.argsort(-spans["score"], kind="stable")]
        _, first = np.unique(spans[["start", "end"]], return_index=True)
        answer = PredictedAnswer(spans[np.sort(first)[: self.config.n_best]], min(part.null for part in parts))
        return Prediction(answer, float(self.probabilities(answer)[0]))

    def probabilities(self, answer: PredictedAnswer) -> np.ndarray:
        """Returns the probabilities of the reported spans, followed by the probability of no answer if it is
        allowed."""
        scores = np.append(answer.spans_K["score"].astype(np.float64), [answer.null] * self._includes_null(answer))
        probabilities = np.exp(scores - scores.max())
        return probabilities / probabilities.sum()

    def _includes_null(self, answer: PredictedAnswer) -> bool:
        return self.config.unanswerable or not len(answer.spans_K)

    def with_threshold(self, prediction: Prediction, threshold: float) -> Prediction:
        """Returns the prediction under a threshold: it is no answer if the null difference is above the threshold."""
        answer = prediction.value
        is_answered = len(answer.spans_K) > 0 and answer.null_difference <= threshold
        probabilities = self.probabilities(answer)
        return Prediction(
            PredictedAnswer(answer.spans_K, answer.null, is_answered), float(probabilities[0 if is_answered else -1])
        )

    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        (metrics,) = self._metrics_of_samples(rows, predictions, [np.arange(len(rows))])
        return metrics

    def resampled(
        self, rows: Rows, predictions: Sequence[Prediction], draws: Iterable[np.ndarray]
    ) -> dict[str, list[float]]:
        samples = list(self._metrics_of_samples(rows, predictions, draws))
        return {name: [sample[name] for sample in samples] for name in self.config.metrics}

    def _metrics_of_samples(
        self, rows: Rows, predictions: Sequence[Prediction], draws: Iterable[np.ndarray]
    ) -> Iterator[dict[str, float]]:
        gold, answered_N = self._gold(rows)
        answers = [self._text(rows, number, answer.span) for number, answer in enumerate(values_of(predictions))]
        scores = answer_scores(gold, answers, self.config.unanswerable)
        raw, null_N = scores, np.zeros(len(rows))
        if self.config.unanswerable:
            raw, null_N = self._best_span_scores(rows, predictions)
        for numbers in draws:
            sample = {name: values[numbers] for name, values in scores.items()}
            raw_sample = {name: values[numbers] for name, values in raw.items()}
            yield summarize(self.config.metrics, sample, raw_sample, answered_N[numbers], null_N[numbers])

    def tuned_threshold(self, rows: Rows, predictions: Sequence[Prediction]) -> float:
        """Returns the threshold with the best f1 on labeled rows."""
        raw, null_N = self._best_span_scores(rows, predictions)
        return best_threshold(raw["f1"], self._gold(rows)[1], null_N).value

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> JsonObject:
        """Returns the best threshold for each of the two metrics."""
        if not self.config.unanswerable:
            return {}
        (raw, null_N), answered_N = self._best_span_scores(rows, predictions), self._gold(rows)[1]
        return {f"best_{name}_threshold": best_threshold(raw[name], answered_N, null_N).value for name in raw}

    def _gold(self, rows: Rows) -> tuple[list[list[str]], np.ndarray]:
        assert rows.labels is not None
        return [[answer.text for answer in answers] for answers in rows.labels], np.array(list(map(bool, rows.labels)))

    def _best_span_scores(
        self, rows: Rows, predictions: Sequence[Prediction]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        answers = values_of(predictions)
        texts = [self._text(rows, number, answer.best_span) for number, answer in enumerate(answers)]
        null_N = np.array([answer.null_difference for answer in answers])
        return threshold_scores(self._gold(rows)[0], texts), null_N

    def _text(self, rows: Rows, number: int, span: tuple[int, int]) -> str:
        return rows.columns[self.config.text[1]][number][span[0] : span[1]]

    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """Returns the constant baseline: no answer."""
        return "no answer", Prediction(PredictedAnswer(np.zeros(0, SPANS), 0.0, False), 1.0)

    def shown(self, value: Label) -> object:
        if isinstance(value, tuple):
            return [answer.text for answer in value]
        start, end = value.span
        return f"characters {start} to {end}" if end else "no answer"

    def record(self, rows: Rows, number: int, prediction: Prediction) -> JsonObject:
        """Adds the text of the answer, its `start` and `end` in the context, and the `n_best` answers. If questions may
        have no answer, "" means no answer, and `null_difference` is added."""
        answer = prediction.value
        record = super().record(rows, number, prediction)
        start, end = answer.span
        record |= {"prediction": self._text(rows, number, (start, end)), "start": start, "end": end}
        probabilities = self.probabilities(answer).tolist()
        best: list[JsonObject] = [
            {
                "text": self._text(rows, number, span[:2]),
                "start": span.start,
                "end": span.end,
                "probability": probability,
            }
            for span, probability in zip(answer.best_spans, probabilities, strict=False)
        ]
        if self._includes_null(answer):
            best.append({"text": "", "start": 0, "end": 0, "probability": probabilities[-1]})
            best.sort(key=lambda row: -row["probability"])
        if self.config.unanswerable and len(answer.spans_K):
            record["null_difference"] = answer.null_difference
        return {**record, "n_best": best}

    def line(self, record: JsonMapping) -> str:
        question = record[self.config.text[0]]
        return f"{record['prediction'] or '(no answer)'} {record['score']:.2f}  {question}"

    @property
    def metric(self) -> Metric:
        return ANSWER_METRICS[self.config.metric]


def _require_different_ids(columns: Columns, origin: Origin) -> None:
    name = next((name for name in IDS if name in columns), None)
    row_of_id: dict[str, int] = {}
    for number, value in enumerate(columns[name] if name is not None else []):
        first = row_of_id.setdefault(str(value), number)
        if value is not None and first != number:
            raise UserError(
                f"{location(origin[number])}: {name}={value} repeats the id of {location(origin[first])}",
                "give each question a unique id",
            )


class AnswerInspector(TaskInspector):
    """Inspects questions and windows."""

    def label(self, value: Label, of_token: bool) -> str:
        return f"tokens {value[0]} to {value[1]}"


class ExtractiveQaLearner(TaskLearner):
    """Learns the start and the end of the answer. The loss is the mean of two cross entropies over the tokens of a
    window."""

    config: ExtractiveQaConfig
    kind: ExtractiveQa
    inspector_class = AnswerInspector

    def __init__(self, kind: ExtractiveQa, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        head = SequenceHead(self.token_width, 2, kind.config.dropout)
        self.add_token_head(head)
        if kind.config.unanswerable:
            threshold = kind.config.null_threshold or 0.0
            head.register_buffer("null_threshold", torch.tensor(threshold, dtype=torch.float64, device=self.device))

    def examples(self, data: SplitData, max_length: int) -> QuestionWindows:
        name, stride = self.backbone.config.text_format, self.config.stride
        input_format = InputFormat(self.tokenizer, name, max_length, self.start_token, stride)
        return QuestionWindows(self.config, self.rows(data), input_format, data.split)

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """Returns (T, 2): scores of each token as start and end."""
        rng = self.dropout_rng(batch, step)
        return self.heads[self.term](self.pool_tokens(self.hidden_of(batch, rng)), self.head_rng(rng, batch))

    def samples(self, batch: Batch, n: int) -> list[dict[str, object]]:
        return []  # a row spans several windows; a batch holds only some

    def labels(self, batch: Batch) -> Tensor:
        """Returns (2N,): the start of each window's answer, then the end of each, as positions in the window."""
        return super().labels(batch).flatten()

    def documents(self, batch: Batch) -> Tensor:
        return super().documents(batch) // 2

    @staticmethod
    def _choices(outputs_T2: Tensor, batch: Batch) -> Tensor:
        """Returns (2N, L): scores of each window's tokens, as start and then as end."""
        starts_NL, ends_NL = (pad(side_T, batch.inputs, -torch.inf) for side_T in outputs_T2.float().unbind(1))
        return torch.stack([starts_NL, ends_NL], dim=1).flatten(0, 1)

    def training_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return loss_sum(self._choices(outputs, batch), self.labels(batch))

    def predicted(self, outputs: Tensor, batch: Batch) -> Predicted:
        return Classes(self._choices(outputs, batch))

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        choices, labels = self._choices(outputs, batch), self.labels(batch)
        return Scores(losses(choices, labels), labels, choices.argmax(-1), self.documents(batch))

    def parts(self, outputs: Tensor, batch: Batch) -> list[WindowAnswers]:
        inputs, config = batch.inputs, self.config
        starts_NL, ends_NL = (pad(side_T, inputs, -torch.inf) for side_T in outputs.float().unbind(1))
        characters = [pad(inputs.columns[name], inputs, 0) for name in CHARACTERS]
        scores_NK, first_NK, last_NK = best_spans(
            starts_NL, ends_NL, characters[1] > characters[0], config.answer_tokens, config.n_best
        )
        null_N = (starts_NL + ends_NL).gather(1, self._null_positions(batch)[:, None])[:, 0]
        last_NK = last_NK.clamp(max=starts_NL.shape[1] - 1)
        table_NK = np.empty(tuple(scores_NK.shape), SPANS)
        table_NK["start"] = characters[0].gather(1, first_NK).cpu().numpy()
        table_NK["end"] = characters[1].gather(1, last_NK).cpu().numpy()
        table_NK["score"] = scores_NK.cpu().numpy()
        return [
            WindowAnswers(spans_K[spans_K["score"] > -np.inf], null)
            for spans_K, null in zip(table_NK, null_N.tolist(), strict=True)
        ]

    def _null_positions(self, batch: Batch) -> Tensor:
        lengths_N = batch.inputs.segments.cu_lengths.diff().long()
        return torch.zeros_like(lengths_N) if null_first(self.backbone.config.text_format) else lengths_N - 1

    def predictors(self, train: SplitData, examples: QuestionWindows) -> dict[str, Predictor]:
        """Returns constant baselines: the frequencies of the start and end positions in the training windows."""
        positions = examples.labels(examples.plan(0).rows).reshape(-1)
        counts = np.bincount(positions, minlength=examples.max_length)
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}

    def calibrate(self, rows: Rows, predictions: Sequence[Prediction]) -> None:
        """Tunes the threshold of the null difference on labeled rows, and stores it with the head."""
        if self.config.unanswerable and self.config.null_threshold is None:
            self.heads[self.term].get_buffer("null_threshold").fill_(self.kind.tuned_threshold(rows, predictions))

    def with_thresholds(self, predictions: Sequence[Prediction]) -> Sequence[Prediction]:
        if not self.config.unanswerable:
            return predictions
        threshold = self.config.null_threshold  # overrides the tuned one
        if threshold is None:
            threshold = float(self.heads[self.term].get_buffer("null_threshold"))
        decided = PredictionColumns(len(predictions))
        for row, prediction in enumerate(predictions):
            decided.put(row, self.kind.with_threshold(prediction, threshold))
        return decided
