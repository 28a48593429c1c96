"""Extractive question answering (Devlin et al. 2019, sections 4.2 and 4.3; Rajpurkar et al. 2016, Rajpurkar, Jia, Liang
2018): one head scores each token as the start and the end of the answer.

If a window has no answer, both targets are the class token. Text formats without a class token (GPT, T5) end a text
with a token that stands for no answer. Heads equal those of transformers' ...ForQuestionAnswering: only ModernBERT's
has a pooler, and the decoder of an encoder-decoder reads the same text as its encoder.

Shape letters: T tokens, N windows, L tokens of the longest window, H hidden width, K reported answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.data.examples import Rows, SplitData
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.metrics import Metric
from lmtool.learners.metrics.spans import ANSWER_METRICS, answer_scores, best_threshold, summarize, threshold_scores
from lmtool.models.base import Backbone
from lmtool.models.heads.base import TokenLogits, loss_sum, losses
from lmtool.models.heads.predicted import Classes, Predicted
from lmtool.models.heads.sequence import SequenceHead
from lmtool.system.terminal import counted
from lmtool.tasks.configs import ExtractiveQaConfig
from lmtool.tasks.kinds.answers import (
    CHARACTERS,
    SPANS,
    GoldAnswer,
    PredictedAnswer,
    QuestionWindows,
    WindowAnswers,
    best_spans,
    gold_answers,
    null_first,
    pad,
    problem_of,
)
from lmtool.tasks.kinds.base import TextKind
from lmtool.tasks.kinds.labels import IDS, Columns, Origin, location
from lmtool.tasks.kinds.learner import TaskInspector, TaskLearner
from lmtool.tasks.kinds.predictions import Label, Prediction, PredictionColumns, values_of
from lmtool.tasks.kinds.texts import InputFormat
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores


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
        """Returns the rows whose answers occur in their contexts. Raises UserError at the first other row, unless
        bad_answers=skip."""
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
        """Yields the metrics of several samples of the rows. Each answer is scored only once."""
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
        """Returns the texts of each row's gold answers, and (N,) bool, whether a row has any."""
        assert rows.labels is not None
        return [[answer.text for answer in answers] for answers in rows.labels], np.array(list(map(bool, rows.labels)))

    def _best_span_scores(
        self, rows: Rows, predictions: Sequence[Prediction]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the inputs of `threshold_scores`: the scores of each row's best text, whether or not it is predicted,
        and the null differences."""
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
    """Raises UserError with file:line if two rows have the same id."""
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
    scores_tokens = True
    inspector_class = AnswerInspector

    def __init__(self, kind: ExtractiveQa, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        head = SequenceHead(self.token_width, 2, kind.config.dropout)
        self.add_token_head(head)
        if kind.config.unanswerable:
            configured_threshold = kind.config.null_threshold
            threshold = torch.tensor(
                0.0 if configured_threshold is None else configured_threshold, dtype=torch.float64, device=self.device
            )
            head.register_buffer("null_threshold", threshold)

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

    def interpret_logits(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> tuple[str, Predicted] | None:
        if head == self.term and isinstance(logits, Tensor):
            return self.term, Classes(self._choices(logits, batch))
        return super().interpret_logits(head, logits, batch)

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
        """Returns (N,): the position in each window of the token that means no answer (`null_first`)."""
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
        configured_threshold = self.config.null_threshold  # overrides the tuned one
        threshold = (
            float(self.heads[self.term].get_buffer("null_threshold"))
            if configured_threshold is None
            else configured_threshold
        )
        decided = PredictionColumns(len(predictions))
        for row, prediction in enumerate(predictions):
            decided.put(row, self.kind.with_threshold(prediction, threshold))
        return decided
