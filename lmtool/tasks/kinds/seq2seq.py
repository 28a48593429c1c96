"""Text to text: translation, summaries, dialogue, data to text, parsing, code, closed-book answers.

Targets are learned by teacher forcing (Sutskever et al. 2014), with encoder-decoders and with decoders, which read the
source before the target (Liu et al. 2018). Metrics are computed on generated texts. Rows with the same source share one
prediction, which is compared with the targets of all these rows.

Shape letters: R sampled rows, E examples of a split.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from torch import Tensor

from lmtool import random_streams
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.examples import Rows, SplitData
from lmtool.errors import UserError
from lmtool.learners.base import Answers, Inference
from lmtool.learners.baseline import Predictor, TermSums
from lmtool.learners.evaluation import Scorer
from lmtool.learners.metrics import Metric
from lmtool.learners.metrics.texts import TEXT_METRICS, TextScores, require_scorers
from lmtool.models.base import Backbone
from lmtool.tasks.configs.texts import Seq2SeqConfig
from lmtool.tasks.kinds.base import TextKind
from lmtool.tasks.kinds.labels import Columns, Origin, location, text_of
from lmtool.tasks.kinds.learner import TaskEvaluation
from lmtool.tasks.kinds.predictions import Label, Prediction, values_of
from lmtool.tasks.kinds.text_learner import TextLearner, TextPairs, TextTaskResponder
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores

# The counter in the random stream "sample" that chooses the sources to generate texts for during training.
_GENERATION_COUNTER = 2


class Seq2Seq(TextKind):
    """Rows of a source text with its target texts."""

    config: Seq2SeqConfig

    def with_labels(self, columns: Columns, origin: Origin) -> Seq2SeqConfig:
        """Returns the configuration, unchanged. Raises UserError, before training, if a metric cannot be computed."""
        require_scorers(self.config.metrics)
        return self.config

    def inputs(self, columns: Columns, origin: Origin) -> dict[str, list[Label]]:
        """Also reads dialogues, as rows without a reply."""
        if self.config.turns is None:
            return super().inputs(columns, origin)
        (name,) = self.config.text
        sources = [
            source_of(utterances_of(name, value, place), self.config.turns) if isinstance(value, list) else value
            for value, place in zip(columns[name], origin, strict=True)
        ]
        return super().inputs({**columns, name: sources}, origin)

    @property
    def reads_dialogues(self) -> bool:
        return self.config.turns is not None

    def replies(self, columns: Columns, origin: Origin) -> tuple[dict[str, list[Label]], Origin, int]:
        (name,), label, turns = self.config.text, self.config.label, self.config.turns or 1
        if label in columns:
            raise UserError(
                f"{origin[0][0]}: task.turns makes the column {label} of the dialogues' replies, but there is one",
                "set task.label=reply, or task.turns=null to learn the column",
            )
        sources: list[Label] = []
        replies: list[Label] = []
        places: Origin = []
        without_reply = 0
        for value, place in zip(columns[name], origin, strict=True):
            utterances = utterances_of(name, value, place)
            without_reply += len(utterances) < 2
            for number in range(1, len(utterances)):
                sources.append(source_of(utterances[:number], turns))
                replies.append(utterances[number])
                places.append(place)
        return {name: sources, label: replies}, places, without_reply

    def groups(self, rows: Rows) -> Sequence[object]:
        """The replies of a dialogue are held out together."""
        return super().groups(rows) if self.config.turns is None else rows.origin

    def decoded_labels(self, values: Sequence[object], origin: Origin) -> list[tuple[str, ...]]:
        return [self._targets(value, place) for value, place in zip(values, origin, strict=True)]

    def _targets(self, value: object, place: tuple[str, int]) -> tuple[str, ...]:
        texts = value if isinstance(value, list | tuple) else [value]
        targets = tuple("" if text is None else text_of(self.config, self.config.label, text, place) for text in texts)
        if not targets or not all(target.strip() for target in targets):
            raise UserError(
                f"{location(place)}: the column {self.config.label} is empty: there is no target to learn",
                "fill it, or remove the row",
            )
        return targets

    def metadata(self, train: Rows) -> tuple[JsonObject, list[str]]:
        metadata, warnings = super().metadata(train)
        (sources,) = train.columns.values()
        return {**metadata, "sources": len(set(sources))}, warnings

    def texts(self, rows: Rows) -> list[Sequence[str]]:
        """Returns the sources and the targets."""
        (sources,) = rows.columns.values()
        targets = [target for targets in rows.labels or () for target in targets]
        return [[self.config.prefix, *sources], targets]

    def candidates(self, rows: Rows) -> None:
        """Returns None, because answers are generated."""

    def right_answers(self, rows: Rows) -> list[str]:
        """Returns the first target of each row."""
        return [targets[0] for targets in rows.labels or ()]

    def predicted_rows(self, rows: Rows) -> Rows:
        """Returns one row per source."""
        return merge_by_source(rows)

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> Seq2SeqLearner:
        return Seq2SeqLearner(self, backbone, tokenizer, seed)

    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        """Returns the configured metrics. predictions: one for each row."""
        return self._scores(rows, predictions).scores()

    def _scores(self, rows: Rows, predictions: Sequence[Prediction]) -> TextScores:
        references = [tuple(targets) for targets in rows.labels or ()]
        return TextScores(self.config.metrics, values_of(predictions), references)

    def resampled(
        self, rows: Rows, predictions: Sequence[Prediction], draws: Iterable[np.ndarray]
    ) -> dict[str, list[float]]:
        scores = self._scores(rows, predictions)
        samples = [scores.scores(rows_R) for rows_R in draws]
        return {name: [values[name] for values in samples] for name in self.config.metrics}

    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """Returns the most frequent target in training."""
        counts = Counter(target for targets in train.labels or () for target in targets)
        text, count = counts.most_common(1)[0]
        return "most frequent target", Prediction(text, count / counts.total())

    def shown(self, value: Label) -> object:
        if isinstance(value, str):
            return value
        return value[0] if len(value) == 1 else list(value)

    def line(self, record: JsonMapping) -> str:
        return str(record["prediction"])

    @property
    def metric(self) -> Metric:
        return TEXT_METRICS[self.config.metric]


def utterances_of(name: str, value: object, place: tuple[str, int]) -> list[str]:
    """Returns the utterances of a dialogue that are not empty. Raises UserError, with file:line, if it is not a list of
    texts. name: the column."""
    if not isinstance(value, list | tuple) or not all(isinstance(utterance, str) for utterance in value):
        raise UserError(
            f"{location(place)}: the column {name} holds no list of utterances, which task.turns needs",
            "write dialogues as lists of texts in .jsonl or .parquet, or set task.turns=null",
        )
    return [utterance.strip() for utterance in value if utterance.strip()]


def source_of(utterances: Sequence[str], turns: int) -> str:
    """Returns the last utterances as a source, one a line. turns: their maximum number."""
    return "\n".join(utterances[-turns:])


def first_rows(rows: Rows) -> dict[str, int]:
    """Returns the index of the first row of each distinct source, in order."""
    first: dict[str, int] = {}
    (sources,) = rows.columns.values()
    for number, source in enumerate(sources):
        first.setdefault(source, number)
    return first


def merge_by_source(rows: Rows) -> Rows:
    """Returns the first row of each distinct source, in order. Its targets are those of all rows with this source."""
    first, (sources,) = first_rows(rows), rows.columns.values()
    distinct = rows.take(np.array(list(first.values()), dtype=np.int64))
    if rows.labels is None:
        return distinct
    targets: dict[str, list[str]] = {}
    for source, references in zip(sources, rows.labels, strict=True):
        targets.setdefault(source, []).extend(references)
    return replace(distinct, labels=[tuple(dict.fromkeys(targets[source])) for source in first])


class Seq2SeqLearner(TextLearner):
    """Learns the first target of a row."""

    config: Seq2SeqConfig

    @property
    def seq2seq_config(self) -> Seq2SeqConfig:
        return self.config

    def parts(self, outputs: Tensor, batch: Batch) -> list[Label]:
        raise TypeError("predictions are generated, not computed from outputs")

    def scorer(self, data: SplitData, examples: TextPairs, predictors: Mapping[str, Predictor]) -> GeneratedScorer:
        return GeneratedScorer(self, self.rows(data), data.split, examples, predictors.get(self.term))

    def baseline(
        self, train: SplitData, held_out: SplitData, batches: Iterable[Batch], predictors: Mapping[str, Predictor]
    ) -> JsonObject:
        """Returns the better of two baselines without a model: a copy of the source, or the most frequent target."""
        rows, (constant_title, constant) = merge_by_source(self.rows(held_out)), self.kind.constant(self.rows(train))
        (sources,) = rows.columns.values()
        baselines = {
            constant_title: [constant] * len(rows),
            "copy of the source": [Prediction(source, 1.0) for source in sources],
        }
        scores = {title: self.kind.metrics(rows, predictions) for title, predictions in baselines.items()}
        best = max(scores, key=lambda title: scores[title][self.metric.name])
        return {
            "name": best,
            "prediction": constant.value if best == constant_title else "the source",
            "metric": self.metric.name,
            "value": scores[best][self.metric.name],
            "metrics": scores[best],
            "all": scores,
        }

    def responder(self) -> SourceResponder:
        return SourceResponder(self)


class SourceResponder(TextTaskResponder):
    """Writes a text for each source."""

    def answers(self, rows: Rows, inference: Inference) -> Answers:
        """Returns one record for each row. Rows with the same source share one generated text."""
        answers = super().answers(rows, inference)
        name = self.learner.config.text[0]
        texts = {record[name]: record for record in answers.records}
        records = ({**texts[source], "id": rows.ids[row]} for row, source in enumerate(rows.columns[name]))
        return replace(answers, records=records)


class GeneratedEvaluation(TaskEvaluation):
    """The evaluation of a split by generated texts. Its rows are the sources for which a text was generated."""

    def metrics(self) -> dict[str, float]:
        """Returns `loss`, the task's metrics, and the number of sources they cover."""
        return {**super().metrics(), "generated": float(len(self.predictions))}


class GeneratedScorer(Scorer):
    """Scores the tokens of all rows and generates a text for every source; in evaluations during training, for a sample
    of the sources."""

    def __init__(
        self, learner: Seq2SeqLearner, rows: Rows, split: str, examples: TextPairs, predictor: Predictor | None
    ):
        self.learner, self.rows, self.split, self.examples = learner, rows, split, examples
        self.predictor, self.sums = predictor, TermSums()
        self.texts: dict[int, Prediction] = {}

    @cached_property
    def source_indices(self) -> dict[int, int]:
        """The rows for which texts are generated, each with the index of its source."""
        row_of_source, sample_size = list(first_rows(self.rows).values()), self.learner.config.generate_examples
        indices: Iterable[int] = range(len(row_of_source))
        if self.selects and sample_size is not None and sample_size < len(row_of_source):
            order = random_streams.Permutation(len(row_of_source), self.learner.seed, "sample", _GENERATION_COUNTER)
            indices = sorted(order(np.arange(sample_size)).tolist())
        return {row_of_source[source_index]: source_index for source_index in indices}

    def outputs(self, batch: Batch) -> tuple[Scores | None, dict[int, Prediction]]:
        """Returns the scores of a batch's targets, and its generated texts by the index of the source."""
        learner = self.learner
        scores = None if self.rows.labels is None else learner.score(batch)[learner.term].cpu()
        assert batch.rows is not None
        rows = [row for row in batch.host.rows.tolist() if row in self.source_indices]  # type: ignore[union-attr]
        if not rows:
            return scores, {}
        writer, prompts = learner.writer(), self.examples.prompts(rows)
        generated = writer.write(prompts, learner.config.generation, learner.seed)
        return scores, {
            self.source_indices[row]: Prediction(writer.text(prompt, ids), float(len(ids)))
            for row, prompt, ids in zip(rows, prompts, generated, strict=True)
        }

    def take(self, batch: Batch, outputs: tuple[Scores | None, dict[int, Prediction]]) -> None:
        scores, texts = outputs
        if scores is not None:
            self.sums.add(batch, scores, self.predictor)
        self.texts |= texts

    def result(self) -> GeneratedEvaluation:
        kind, term, numbers = self.learner.kind, self.learner.term, sorted(self.texts)
        if numbers != sorted(self.source_indices.values()):
            raise RuntimeError(f"{len(numbers)} of {len(self.source_indices)} sources were generated")
        rows = merge_by_source(self.rows).take(np.array(numbers))
        predictions = [self.texts[number] for number in numbers]
        shared: JsonObject = {"kind": kind, "rows": rows, "split": self.split, "predictions": predictions}
        if rows.labels is None:
            return GeneratedEvaluation({}, {}, **shared)
        sums = self.sums.result(term, self.predictor)
        rows_by_source = sorted(self.source_indices, key=self.source_indices.__getitem__)
        losses = (sums.sums_E / sums.counts_E)[rows_by_source]
        return GeneratedEvaluation(
            {term: sums},
            {term: 1.0},
            kind.metrics(rows, predictions),
            self._warnings(predictions),
            losses=losses,
            **shared,
        )

    @staticmethod
    def _warnings(predictions: Sequence[Prediction]) -> tuple[str, ...]:
        texts = {prediction.value for prediction in predictions}
        if len(predictions) > 1 and len(texts) == 1:
            return (f"every generated text is {texts.pop()[:80]!r}, whatever the source",)
        empty = sum(not prediction.value.strip() for prediction in predictions)
        return (f"{empty:,} of {len(predictions):,} generated texts are empty",) if empty else ()
