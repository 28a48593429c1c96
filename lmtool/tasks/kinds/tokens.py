"""A tag for each word of a sentence: names, parts of speech, chunks (Devlin et al. 2019, section 5.3).

Shape letters: M words, S sentences, C tags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from lmtool.data.examples import Rows
from lmtool.data.tables import LINES
from lmtool.errors import UserError
from lmtool.learners.metrics import by_class, compute, confusion
from lmtool.learners.metrics.spans import EntityScores, EntityTags, total
from lmtool.models.base import Backbone
from lmtool.tasks.configs import TokenClassificationConfig
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.labels import balanced_weights, is_unlabelled, label_counts, row_ids, unknown_label, word_of
from lmtool.tasks.kinds.predictions import Prediction, values_of
from lmtool.tasks.kinds.token_learner import TokenLearner, bio_labels, scheme_of, to_bio
from lmtool.tokenizers.tokenizer import Tokenizer

Origin = Sequence[tuple[str, int]]


class TokenClassification(TaskKind):
    """Rows of words with one tag number each. If the tags have a scheme, BIO is learned, predicted and scored."""

    config: TokenClassificationConfig
    unit = "word"

    def with_labels(self, columns: Mapping[str, list[object]], origin: Origin) -> TokenClassificationConfig:
        """Adds the scheme of the training tags, and the tag names."""
        config = self.config
        sentences = self._named(_lists(columns[config.label]))
        scheme = scheme_of(sentences) if config.scheme == "auto" else config.scheme
        if scheme == "none" and config.metrics != ("accuracy",):
            raise UserError(
                f"task.metrics={list(config.metrics)} score entities; the tags in the column {config.label} mark no "
                f"entities: {', '.join(sorted(set(chain(*sentences)))[:4])}, ...",
                "set task.metrics=[accuracy] task.metric=accuracy, or name another column with task.label=",
            )
        config = config.model_copy(update={"scheme": scheme})
        if config.labels is None:
            tags = list(chain(*type(self)(config)._in_bio(sentences, columns, origin)))
            labels = tuple(sorted(set(tags))) if scheme == "none" else bio_labels(tags)
            if len(labels) < 2:
                raise UserError(
                    f"task.label={config.label} is {', '.join(labels) or 'empty'} for all {len(tags):,} training words",
                    "name another column with task.label=",
                )
            config = config.model_copy(update={"labels": labels})
        return config

    def rows(self, columns: dict[str, list[object]], origin: list[tuple[str, int]], labelled: bool) -> Rows:
        name, values = self.config.text[0], columns.get(self.config.label)
        words = _lists(columns[name])
        for number, sentence in enumerate(words):
            for offset, word in enumerate(sentence):
                if not isinstance(word, str):
                    raise UserError(
                        f"{_place(columns, origin, number, offset)}: the column {name} holds {type(word).__name__}, "
                        "not words",
                        "write a list of words or a text, or name another column with task.text=",
                    )
        labels = None
        if labelled or (
            values is not None and not is_unlabelled([tag for sentence in _lists(values) for tag in sentence])
        ):
            labels = self._numbers(words, columns, origin)
        return Rows(row_ids(columns, len(origin)), {name: words}, labels, origin)

    def _numbers(self, words: list[list[str]], columns: Mapping[str, list[object]], origin: Origin) -> list[list[int]]:
        """Each word's tag. UserError with file:line if the numbers of words and tags differ, or a tag is unknown."""
        sentences = self._named(_lists(columns[self.config.label]))
        for number, (sentence, tags) in enumerate(zip(words, sentences, strict=True)):
            if len(sentence) != len(tags):
                raise UserError(
                    f"{_place(columns, origin, number, 0)}: {len(sentence)} words and {len(tags)} tags",
                    "give each word one tag",
                )
        number_of = {label: index for index, label in enumerate(self.config.labels or ())}
        decoded = []
        for number, tags in enumerate(self._in_bio(sentences, columns, origin)):
            for offset, tag in enumerate(tags):
                if tag not in number_of:
                    where = _place(columns, origin, number, offset)
                    raise unknown_label(self.config, self.config.labels or (), tag, where)
            decoded.append([number_of[tag] for tag in tags])
        return decoded

    def _named(self, sentences: list[list[object]]) -> list[list[str]]:
        """Tags as words; numbers become names if all tags are numbers."""
        labels = self.config.labels or ()
        named = [[word_of(tag) for tag in tags] for tags in sentences]
        problem_text, numbers = set(chain(*named)), {str(number): label for number, label in enumerate(labels)}
        if problem_text and not problem_text & set(labels) and problem_text <= numbers.keys():
            return [[numbers[tag] for tag in tags] for tags in named]
        return named

    def _in_bio(
        self, sentences: list[list[str]], columns: Mapping[str, list[object]], origin: Origin
    ) -> list[list[str]]:
        converted = []
        for number, tags in enumerate(sentences):
            try:
                converted.append(to_bio(tags, self.config.scheme))
            except ValueError as problem:
                offset, tag = problem.args
                problem_text = f"the tag {tag!r}" if tag else "no tag"
                raise UserError(
                    f"{_place(columns, origin, number, offset)}: {problem_text} where the tags are in "
                    f"task.scheme={self.config.scheme}",
                    "correct the line, or name the scheme of the files: task.scheme=bio, iob1, iobes or none",
                ) from problem
        return converted

    def fitted(self, train: Rows) -> TokenClassificationConfig:
        """Adds tag weights, if configured."""
        names, values = self.config.labels or (), self.config.model_dump()
        if self.config.loss.class_weights == "balanced":
            values["loss"]["class_weights"] = balanced_weights(flat(train.labels), len(names))
        weights = values["loss"]["class_weights"]
        if isinstance(weights, tuple) and len(weights) != len(names):
            raise UserError(
                f"task.loss.class_weights has {len(weights)} weights for the {len(names)} tags {', '.join(names[:8])}",
                "give one weight per tag, in their order, or task.loss.class_weights=balanced",
            )
        return type(self.config).model_validate(values)

    def metadata(self, train: Rows) -> tuple[dict[str, object], list[str]]:
        labels = self.config.labels or ()
        tags_M, lengths_S = flat(train.labels), _lengths(train.labels)
        metadata: dict[str, object] = {"words": len(tags_M)}
        warnings = []
        empty = int(np.sum(lengths_S == 0))
        if empty:
            warnings.append(f"{empty:,} training sentences have no words and are not used")
        if self.config.scheme == "none":
            return {**metadata, "labels": label_counts(tags_M, labels)}, warnings
        tags = EntityTags(labels)
        counts = Counter(tags.entities(tags_M, lengths_S)[2].tolist())
        stray = tags.stray(tags_M, lengths_S)
        if stray:
            warnings.append(
                f"{stray:,} training entities begin with I, not B: they count as beginnings, as in conlleval"
            )
        entities = {kind: counts.get(number, 0) for number, kind in enumerate(tags.types)}
        return {**metadata, "scheme": self.config.scheme, "entities": entities}, warnings

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> TokenLearner:
        return TokenLearner(self, backbone, tokenizer, seed)

    def join(self, parts: Sequence[object]) -> Prediction:
        """parts: for each window, its word indices, their tags and the tags' probabilities."""
        words, tags, fractions = (np.concatenate(values) for values in zip(*parts, strict=True))
        if not np.array_equal(words, np.arange(len(words))):
            raise RuntimeError(f"the words {words.tolist()} were predicted; each must be predicted once")
        return Prediction(tags.tolist(), float(fractions.min()) if len(fractions) else 1.0)

    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        gold_M, predicted_M = self._both(rows, predictions)
        values = compute(("accuracy",), gold_M, predicted_M)
        if self.config.metrics != ("accuracy",):
            scores = total(self._entities(rows, gold_M, predicted_M))
            values |= {name: getattr(scores, name) for name in ("f1", "precision", "recall")}
        return {name: values[name] for name in self.config.metrics}

    def resampled(
        self, rows: Rows, predictions: Sequence[Prediction], draws: Iterable[np.ndarray]
    ) -> dict[str, list[float]]:
        """Sums counts per sentence."""
        gold_M, predicted_M = self._both(rows, predictions)
        lengths_S = _lengths(rows.labels)
        sentence_M = np.repeat(np.arange(len(lengths_S)), lengths_S)
        right_S = np.bincount(sentence_M[gold_M == predicted_M], minlength=len(lengths_S))
        counts_S = np.stack([right_S, lengths_S], axis=1)
        if self.config.scheme != "none":
            entities = EntityTags(self.config.labels or ()).counts(gold_M, predicted_M, lengths_S)
            counts_S = np.concatenate([counts_S, entities], axis=1)
        values: dict[str, list[float]] = {name: [] for name in self.config.metrics}
        for numbers in draws:
            right, words, *entity_counts = (int(count) for count in counts_S[numbers].sum(0))
            scores = EntityScores(*entity_counts) if entity_counts else None
            for name, sample in values.items():
                sample.append(right / max(words, 1) if name == "accuracy" else float(getattr(scores, name)))
        return values

    def _both(self, rows: Rows, predictions: Sequence[Prediction]) -> tuple[np.ndarray, np.ndarray]:
        """(M,) gold and (M,) predicted tags; each word is predicted once."""
        lengths = _lengths(rows.labels)
        predicted = values_of(predictions)
        if not np.array_equal(lengths, _lengths(predicted)):
            raise RuntimeError("the numbers of predicted tags and words differ")
        return flat(rows.labels), flat(predicted)

    def _entities(self, rows: Rows, gold_M: np.ndarray, predicted_M: np.ndarray) -> dict[str, EntityScores]:
        return EntityTags(self.config.labels or ()).score(gold_M, predicted_M, _lengths(rows.labels))

    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """The most common tag of the training words."""
        counts = np.bincount(flat(train.labels))
        return "majority tag", Prediction([int(counts.argmax())], float(counts.max() / counts.sum()))

    def single(self, values: Sequence[object] | np.ndarray) -> np.ndarray:
        return flat(values)

    def shown(self, value: Any) -> Any:
        """Tags by their names."""
        labels = self.config.labels or ()
        return [labels[tag] for tag in value] if isinstance(value, list) else labels[value]

    def line(self, record: Mapping[str, Any]) -> str:
        """Words, each followed by its tag unless outside of an entity."""
        words = zip(record[self.config.text[0]], record["prediction"], strict=True)
        return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in words)

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, object]:
        """`classes`: the metrics and gold count of each entity type or tag; and how many gold entities begin with a
        stray I."""
        gold_M, predicted_M = self._both(rows, predictions)
        labels = self.config.labels or ()
        if self.config.scheme == "none":
            return {"classes": by_class(confusion(gold_M, predicted_M, len(labels)), labels)}
        classes = {
            name: {
                "precision": score.precision, "recall": score.recall, "f1": score.f1,
                "support": score.gold, "predicted": score.predicted,
            }
            for name, score in self._entities(rows, gold_M, predicted_M).items()
        }  # fmt: skip
        return {"classes": classes, "gold_beginning_with_i": EntityTags(labels).stray(gold_M, _lengths(rows.labels))}


def flat(sentences: Any) -> np.ndarray:
    """(M,) int64: the tags of all sentences."""
    return np.fromiter(chain.from_iterable(sentences), dtype=np.int64)


def _lengths(sentences: Any) -> np.ndarray:
    return np.fromiter(map(len, sentences), dtype=np.int64)


def _lists(values: Sequence[Any]) -> list[list[Any]]:
    """Lists unchanged; texts split at white space."""
    return [value.split() if isinstance(value, str) else list(value or ()) for value in values]


def _place(columns: Mapping[str, list[Any]], origin: Origin, row: int, word: int) -> str:
    """file:line of a word, if known."""
    lines = columns.get(LINES)
    sentence = lines[row] if lines is not None else []
    return f"{origin[row][0]}:{sentence[word] if word < len(sentence) else origin[row][1]}"
