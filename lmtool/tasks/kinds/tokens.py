"""A tag for each word of a sentence: names, parts of speech, chunks (Devlin et al. 2019, section 5.3).

Shape letters: M words, S sentences, C tags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from lmtool.config.saved import JsonMapping, JsonObject
from lmtool.data.examples import Rows
from lmtool.data.tables import LINES
from lmtool.errors import UserError
from lmtool.learners.metrics import by_class, compute, confusion
from lmtool.learners.metrics.spans import EntityScores, EntityTags, total
from lmtool.models.base import Backbone
from lmtool.system.terminal import counted
from lmtool.tasks.configs import TokenClassificationConfig
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.classes import with_class_weights
from lmtool.tasks.kinds.labels import (
    Columns,
    Origin,
    balanced_weights,
    class_indices,
    is_unlabeled,
    label_counts,
    row_ids,
    text_of_label,
    unknown_label,
)
from lmtool.tasks.kinds.predictions import Label, Prediction, values_of
from lmtool.tasks.kinds.token_learner import TokenLearner, bio_labels, scheme_of, to_bio
from lmtool.tokenizers.tokenizer import Tokenizer


class TokenClassification(TaskKind):
    """Rows of words, each word with the number of a tag. Tags that mark entities (IOB1, BIOES, ...) are converted to
    BIO tags, which are learned, predicted and scored."""

    config: TokenClassificationConfig
    unit = "word"

    def with_labels(self, columns: Columns, origin: Origin) -> TokenClassificationConfig:
        """Returns the configuration with the scheme of the training tags and the tag names."""
        config = self.config
        sentences = self._tag_names(_lists(columns[config.label]))
        scheme = scheme_of(sentences) if config.scheme == "auto" else config.scheme
        if scheme == "none" and config.metrics != ("accuracy",):
            raise UserError(
                f"task.metrics={list(config.metrics)} score entities; the tags in the column {config.label} mark no "
                f"entities: {', '.join(sorted(set(chain(*sentences)))[:4])}, ...",
                "set task.metrics=[accuracy] task.metric=accuracy, or name another column with task.label=",
            )
        config = config.model_copy(update={"scheme": scheme})
        if config.labels is None:
            tags = list(chain(*type(self)(config)._to_bio(sentences, columns, origin)))
            labels = tuple(sorted(set(tags))) if scheme == "none" else bio_labels(tags)
            if len(labels) < 2:
                found = f"all {len(tags):,} training words have the tag {labels[0]}" if labels else "there are no tags"
                raise UserError(
                    f"task.label={config.label}: {found}, so there is nothing to learn",
                    "set task.label= to the column of the tags",
                )
            config = config.model_copy(update={"labels": labels})
        return config

    def rows(self, columns: Columns, origin: Origin, labeled: bool) -> Rows:
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
        if labeled or (
            values is not None
            and not is_unlabeled([tag for sentence in _lists(values) for tag in sentence], self.classes)
        ):
            labels = self._numbers(words, columns, origin)
        return Rows(row_ids(columns, len(origin)), {name: words}, labels, origin)

    def _numbers(self, words: list[list[str]], columns: Columns, origin: Origin) -> list[list[int]]:
        """Returns the number of each word's tag. Raises UserError with file:line if a row has different numbers of
        words and tags, or an unknown tag."""
        sentences = self._tag_names(_lists(columns[self.config.label]))
        for number, (sentence, tags) in enumerate(zip(words, sentences, strict=True)):
            if len(sentence) != len(tags):
                counts = f"{counted(len(sentence), 'word')} and {counted(len(tags), 'tag')}"
                raise UserError(
                    f"{_place(columns, origin, number, 0)}: {counts}",
                    "give each word one tag",
                )
        number_of = {label: index for index, label in enumerate(self.classes)}
        decoded = []
        for number, tags in enumerate(self._to_bio(sentences, columns, origin)):
            for offset, tag in enumerate(tags):
                if tag not in number_of:
                    place = _place(columns, origin, number, offset)
                    raise unknown_label(self.config, self.classes, tag, place)
            decoded.append([number_of[tag] for tag in tags])
        return decoded

    def _tag_names(self, sentences: list[list[object]]) -> list[list[str]]:
        """Returns the tags as texts. If all tags are class numbers, class names replace them."""
        tag_names = [[text_of_label(tag) for tag in tags] for tags in sentences]
        tags_found, indices = set(chain(*tag_names)), class_indices(self.classes)
        if tags_found and not tags_found & set(self.classes) and tags_found <= indices.keys():
            return [[self.classes[indices[tag]] for tag in tags] for tags in tag_names]
        return tag_names

    def _to_bio(self, sentences: list[list[str]], columns: Columns, origin: Origin) -> list[list[str]]:
        converted = []
        for number, tags in enumerate(sentences):
            try:
                converted.append(to_bio(tags, self.config.scheme))
            except ValueError as problem:
                offset, tag = problem.args
                problem_text = f"the tag {tag!r} is not possible" if tag else "the tag is missing"
                raise UserError(
                    f"{_place(columns, origin, number, offset)}: {problem_text} in task.scheme={self.config.scheme}",
                    "correct the line, or name the scheme of the files: task.scheme=bio, iob1, iobes or none",
                ) from problem
        return converted

    def fit_config(self, train: Rows) -> TokenClassificationConfig:
        """Returns the configuration with the tag weights, if configured."""
        return with_class_weights(self.config, balanced_weights(flat(train.labels), len(self.classes)))

    def metadata(self, train: Rows) -> tuple[JsonObject, list[str]]:
        tags_M, lengths_S = flat(train.labels), _lengths(train.labels)
        metadata: JsonObject = {"words": len(tags_M)}
        warnings = []
        empty = int(np.sum(lengths_S == 0))
        if empty:
            warnings.append(f"{counted(empty, 'training sentence')} without words: not used")
        if self.config.scheme == "none":
            return {**metadata, "labels": label_counts(tags_M, self.classes)}, warnings
        tags = EntityTags(self.classes)
        counts = Counter(tags.entities(tags_M, lengths_S)[2].tolist())
        stray = tags.stray_entities(tags_M, lengths_S)
        if stray:
            warnings.append(
                f"{'1 training entity begins' if stray == 1 else f'{stray:,} training entities begin'} with I, not B: "
                "this I counts as a beginning, as in conlleval"
            )
        entities = {kind: counts.get(number, 0) for number, kind in enumerate(tags.types)}
        return {**metadata, "scheme": self.config.scheme, "entities": entities}, warnings

    def learner(self, backbone: Backbone, tokenizer: Tokenizer, seed: int) -> TokenLearner:
        return TokenLearner(self, backbone, tokenizer, seed)

    def join(self, parts: Sequence[Label]) -> Prediction:
        """Joins the windows of a sentence. parts: for each window, its word indices, their tags and the tags'
        probabilities."""
        words, tags, probabilities = (np.concatenate(values) for values in zip(*parts, strict=True))
        if not np.array_equal(words, np.arange(len(words))):
            raise RuntimeError(f"the words {words.tolist()} were predicted; each must be predicted once")
        return Prediction(tags.tolist(), float(probabilities.min()) if len(probabilities) else 1.0)

    def metrics(self, rows: Rows, predictions: Sequence[Prediction]) -> dict[str, float]:
        gold_M, predicted_M = self._flat_tags(rows, predictions)
        values = compute(("accuracy",), gold_M, predicted_M)
        if self.config.metrics != ("accuracy",):
            scores = total(self._entities(rows, gold_M, predicted_M))
            values |= {name: getattr(scores, name) for name in ("f1", "precision", "recall")}
        return {name: values[name] for name in self.config.metrics}

    def resampled(
        self, rows: Rows, predictions: Sequence[Prediction], draws: Iterable[np.ndarray]
    ) -> dict[str, list[float]]:
        """Returns each metric for each sample of sentences (`draws`: their indices, with repetitions). Counts are
        summed per sentence first, so that a sample only adds them up."""
        gold_M, predicted_M = self._flat_tags(rows, predictions)
        lengths_S = _lengths(rows.labels)
        sentence_M = np.repeat(np.arange(len(lengths_S)), lengths_S)
        right_S = np.bincount(sentence_M[gold_M == predicted_M], minlength=len(lengths_S))
        counts_S = np.stack([right_S, lengths_S], axis=1)
        if self.config.scheme != "none":
            entities = EntityTags(self.classes).counts(gold_M, predicted_M, lengths_S)
            counts_S = np.concatenate([counts_S, entities], axis=1)
        values: dict[str, list[float]] = {name: [] for name in self.config.metrics}
        for numbers in draws:
            right, words, *entity_counts = (int(count) for count in counts_S[numbers].sum(0))
            scores = EntityScores(*entity_counts) if entity_counts else None
            for name, sample in values.items():
                sample.append(right / max(words, 1) if name == "accuracy" else float(getattr(scores, name)))
        return values

    def _flat_tags(self, rows: Rows, predictions: Sequence[Prediction]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the gold tags (M,) and the predicted tags (M,), one of each per word."""
        lengths = _lengths(rows.labels)
        predicted = values_of(predictions)
        if not np.array_equal(lengths, _lengths(predicted)):
            raise RuntimeError("the numbers of predicted tags and words differ")
        return flat(rows.labels), flat(predicted)

    def _entities(self, rows: Rows, gold_M: np.ndarray, predicted_M: np.ndarray) -> dict[str, EntityScores]:
        return EntityTags(self.classes).score(gold_M, predicted_M, _lengths(rows.labels))

    def constant(self, train: Rows) -> tuple[str, Prediction]:
        """Returns the most common tag of the training words."""
        counts = np.bincount(flat(train.labels))
        return "majority tag", Prediction(int(counts.argmax()), float(counts.max() / counts.sum()))

    def constant_predictions(self, rows: Rows, prediction: Prediction) -> list[Prediction]:
        return [prediction._replace(value=[prediction.value] * len(tags)) for tags in rows.labels or ()]

    def flat_values(self, values: Sequence[object] | np.ndarray) -> np.ndarray:
        return flat(values)

    def shown(self, value: Label) -> object:
        """Returns the tags by their names."""
        return [self.classes[tag] for tag in value] if isinstance(value, list) else self.classes[value]

    def line(self, record: JsonMapping) -> str:
        """Returns the words, each followed by its tag unless the tag is O."""
        words = zip(record[self.config.text[0]], record["prediction"], strict=True)
        return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in words)

    def details(self, rows: Rows, predictions: Sequence[Prediction]) -> JsonObject:
        """Returns `classes`, the metrics and the gold count of each entity type or tag, and the number of gold entities
        that begin with a stray I."""
        gold_M, predicted_M = self._flat_tags(rows, predictions)
        if self.config.scheme == "none":
            return {"classes": by_class(confusion(gold_M, predicted_M, len(self.classes)), self.classes)}
        classes = {
            name: {
                "precision": score.precision, "recall": score.recall, "f1": score.f1,
                "support": score.gold, "predicted": score.predicted,
            }
            for name, score in self._entities(rows, gold_M, predicted_M).items()
        }  # fmt: skip
        stray = EntityTags(self.classes).stray_entities(gold_M, _lengths(rows.labels))
        return {"classes": classes, "gold_beginning_with_i": stray}


def flat(sentences: Label) -> np.ndarray:
    """Returns (M,) int64: the tags of all sentences."""
    return np.fromiter(chain.from_iterable(sentences), dtype=np.int64)


def _lengths(sentences: Label) -> np.ndarray:
    return np.fromiter(map(len, sentences), dtype=np.int64)


def _lists(values: Sequence[Label]) -> list[list[Label]]:
    """Returns a list for each value: a list as it is, a text split at white space, None as an empty list."""
    return [value.split() if isinstance(value, str) else list(value or ()) for value in values]


def _place(columns: Columns, origin: Origin, row: int, word: int) -> str:
    lines = columns.get(LINES)
    sentence = lines[row] if lines is not None else []
    return f"{origin[row][0]}:{sentence[word] if word < len(sentence) else origin[row][1]}"
