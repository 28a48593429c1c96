"""A tag for each word of a sentence: names, parts of speech, chunks (Devlin et al. 2019, section 5.3).

Shape letters: M words, S sentences, C tags.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.data.formats import assemble, ragged_ranges
from lmtool.data.trees import ANCESTORS, paths_of_tokens
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.metrics import by_class, compute, confusion
from lmtool.learners.metrics.spans import EntityScores, EntityTags, total
from lmtool.learners.model import indices_of, normalized_entropy
from lmtool.models.base import Backbone
from lmtool.models.heads.sequence import SequenceHead
from lmtool.nn.stack import Side
from lmtool.system.terminal import counted
from lmtool.tasks.configs.texts import TokenClassificationConfig
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.classes import ClassLearner, with_class_weights
from lmtool.tasks.kinds.labels import (
    Columns,
    Origin,
    balanced_weights,
    class_indices,
    is_unlabeled,
    items_of,
    label_counts,
    parents_of,
    row_ids,
    text_of_label,
    unknown_label,
    word_location,
    words_of,
)
from lmtool.tasks.kinds.predictions import Label, Prediction, values_of
from lmtool.tasks.kinds.texts import InputFormat, TaskExamples, encode_words, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target

# Tagging schemes of entities and chunks in files. All are converted to BIO. bio (IOB2): B begins an entity, I continues
# it. iob1: I begins and continues an entity; B begins one right after an entity of the same type (Ramshaw and Marcus
# 1995; CoNLL-2003 as distributed). iobes: bio with E for the last word and S for the only word of an entity. BILOU has
# L for E and U for S.


OUTSIDE = "O"
_BILOU_TO_IOBES = {"L": "E", "U": "S"}
_PREFIXES = {"B", "I", "E", "S", "L", "U"}


def split_tag(tag: str) -> tuple[str, str] | None:
    """Returns the prefix and the type of a tag; ("O", "") outside of entities; None if the tag is neither O nor
    PREFIX-TYPE."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = tag.partition("-")
    return (_BILOU_TO_IOBES.get(prefix, prefix), kind) if dash and kind and prefix in _PREFIXES else None


def scheme_of(sentences: Iterable[Sequence[str]]) -> str:
    """Returns the scheme of training tags: bio, iob1, iobes, or none if a tag has another form.

    Tags with E or S are iobes. Without them, tags are iob1 if, where the previous tag is O or of another type, entities
    begin with I at least once and never with B; otherwise they are bio.
    """
    b_starts = i_starts = 0
    has_ends, has_entity = False, False
    for tags in sentences:
        previous = (OUTSIDE, "")
        for tag in tags:
            parts = split_tag(tag)
            if parts is None:
                return "none"
            prefix, kind = parts
            has_ends |= prefix in "ES"
            has_entity |= prefix != OUTSIDE
            if kind and previous[1] != kind:
                b_starts += prefix == "B"
                i_starts += prefix == "I"
            previous = parts
    if not has_entity:
        return "none"
    return "iobes" if has_ends else "iob1" if i_starts and not b_starts else "bio"


def to_bio(tags: Sequence[str], scheme: str) -> list[str]:
    """Converts the tags of a sentence to BIO. Raises ValueError with the position and the text of the first invalid
    tag.

    In bio, an I that continues no entity stays as it is, and counts as a beginning, as in conlleval.
    """
    if scheme == "none":
        return list(tags)
    converted: list[str] = []
    previous = (OUTSIDE, "")
    for offset, tag in enumerate(tags):
        parts = split_tag(tag)
        if parts is None or (parts[0] in "ES" and scheme != "iobes"):
            raise ValueError(offset, tag)
        prefix, kind = parts
        if prefix == OUTSIDE:
            converted.append(OUTSIDE)
        elif scheme == "bio":
            converted.append(tag)
        else:
            previous_is_open = previous[1] == kind and (scheme == "iob1" or previous[0] in "BI")
            begins = prefix in "BS" or not previous_is_open
            converted.append(f"{'B' if begins else 'I'}-{kind}")
        previous = parts
    return converted


def continuation_tags(labels: Sequence[str], scheme: str) -> list[int]:
    """Returns, for each tag, the tag that the later tokens of its word learn: for a B, the I of the same type if there
    is one; otherwise the same tag."""
    number = {label: index for index, label in enumerate(labels)}
    if scheme == "none":
        return list(number.values())
    return [number.get(f"I-{label[2:]}", index) if label[:2] == "B-" else index for label, index in number.items()]


def bio_labels(tags: Iterable[str]) -> tuple[str, ...]:
    """Returns the labels of a BIO tagger: O, then B and I of each type, sorted."""
    kinds = sorted({tag[2:] for tag in tags if tag != OUTSIDE})
    return (OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI"))


# Sentences of words as packed batches. Sentences are tokenized once, and long sentences are read in overlapping
# windows; each word is predicted exactly once. Shape letters: E sentences, W windows, N windows of a batch, T tokens,
# M predicting tokens.


# Placeholders for a word without tokens; the first one in the vocabulary is used.
_UNKNOWN = ("unk", "mask", "eos", "pad")
WORD = "word"
"""The column of a batch with the word index of each word's first token; -1 for other tokens."""


class TaggedWindows(TaskExamples):
    """Examples of one sentence per row, read in overlapping windows (`InputFormat.stride`).

    later_tags: for each tag, the tag that the later tokens of a word learn (`continuation_tags`); None: only the first
    token of a word predicts, as in unlabeled data. With `InputFormat.start`, tags are predicted from the decoder's
    states. A word without tokens becomes one unknown token; so does an empty sentence, for which nothing is predicted.
    """

    def __init__(
        self, rows: Rows, input_format: InputFormat, term: str, split: str, later_tags: np.ndarray | None = None
    ):
        super().__init__(rows, term, split, input_format.start)
        self.template = input_format.template(1, min_tokens=2)  # adjacent windows can share a token
        capacity, stride = input_format.max_length - self.template.special_count, input_format.stride or 0
        (sentences,) = rows.columns.values()
        self._encode(sentences, input_format.tokenizer)
        self._label(later_tags)
        self.windows = sentence_windows = windows(self._lengths_E, capacity, min(stride, capacity // 2))
        # The tokens [start, end) of each window that predict (`Windows`), counted from the window's first token.
        text, start = sentence_windows.text, sentence_windows.start
        core_W2 = np.stack([sentence_windows.core_start - start, sentence_windows.core_end - start], axis=1)
        lengths = sentence_windows.lengths
        start_W, packed_W = self._starts_E[text] + start, lengths + self.template.special_count
        self._plan = self.build_plan(
            packed_W, row=text, part=sentence_windows.part, start=start_W, length=lengths, core=core_W2
        )

    def _encode(self, sentences: list[list[str]], tokenizer: Tokenizer) -> None:
        """Stores the ids and, for each id, the index of the word that it begins, or -1."""
        unknown = next((tokenizer.roles[role] for role in _UNKNOWN if role in tokenizer.roles), 0)
        ids, words, word_of, self.unknown_words = [], [], [], 0
        for sentence, (ids_T, word_T) in zip(sentences, encode_words(sentences, tokenizer), strict=True):
            missing = np.setdiff1d(np.arange(len(sentence)), word_T)
            self.unknown_words += len(missing)
            if len(missing) or not len(ids_T):
                indices = np.searchsorted(word_T, missing) if len(sentence) else np.zeros(1, dtype=np.int64)
                ids_T = np.insert(ids_T, indices, unknown)
                word_T = np.insert(word_T, indices, missing if len(sentence) else -1)
            first_T = np.diff(word_T, prepend=-1) != 0
            ids.append(ids_T)
            word_of.append(word_T)
            words.append(np.where(first_T & (word_T >= 0), word_T, -1))
        self._lengths_E = np.array([len(sentence) for sentence in ids], dtype=np.int64)
        self._starts_E = np.cumsum(self._lengths_E) - self._lengths_E
        self._ids, self._words = np.concatenate(ids), np.concatenate(words)
        trees = self.rows.parents.values()
        self._columns = {WORD: self._words}
        if trees:
            (self._columns[ANCESTORS],) = paths_of_tokens(list(trees), [word_of])

    def _label(self, later_tags: np.ndarray | None) -> None:
        self._predicts, self._labels = self._words >= 0, None
        if self.rows.labels is None:
            return
        tags = np.array([tag for sentence in self.rows.labels for tag in sentence], dtype=np.int64)
        # First tokens are in the order of the tags, so their running count minus 1 is the index of each token's tag.
        numbers_T = np.cumsum(self._predicts) - 1
        if int(numbers_T[-1]) + 1 != len(tags):
            raise RuntimeError(f"{int(numbers_T[-1]) + 1} words and {len(tags)} tags")
        after_first_word_T = numbers_T >= 0 if len(tags) else np.zeros(len(numbers_T), dtype=bool)
        labels_T = np.where(after_first_word_T, tags[numbers_T] if len(tags) else -1, -1)
        if later_tags is not None:
            # The token of an empty sentence belongs to no word.
            empty_T = np.zeros(len(self._ids), dtype=bool)
            empty_T[self._starts_E[[not sentence for sentence in self.rows.labels]]] = True
            labels_T = np.where(self._predicts, labels_T, later_tags[labels_T])
            self._predicts = after_first_word_T & ~empty_T
        self._labels = labels_T

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths_N = rows["length"].astype(np.int64)
        source_T = ragged_ranges(rows["start"], lengths_N)
        inside_T = ragged_ranges(np.zeros(len(rows), dtype=np.int64), lengths_N)
        window_T = np.repeat(np.arange(len(rows)), lengths_N)
        core_T = (inside_T >= rows["core"][window_T, 0]) & (inside_T < rows["core"][window_T, 1])
        predicting = np.flatnonzero(core_T & self._predicts[source_T])
        before = len(self.template.pieces[0])
        packed_T = np.arange(len(source_T)) + window_T * self.template.special_count + before
        columns = {name: [values[source_T]] for name, values in self._columns.items()}
        inputs = assemble(self.template, [(self._ids[source_T], lengths_N)], columns).packed()
        labels = None if self._labels is None else torch.from_numpy(self._labels[source_T[predicting]])
        side: Side = "inputs" if self.start is None else "outputs"
        target = Target(labels, at=torch.from_numpy(packed_T[predicting]), side=side)
        return self.batch_of(inputs, target, rows, examples)

    def metadata(self) -> JsonObject:
        """Adds the number of sentences that are read in several windows, and of words without tokens, unless 0."""
        counts = {
            "sentences_in_windows": int(np.sum(self.windows.part == 1)),
            "words_without_pieces": self.unknown_words,
        }
        return {**super().metadata(), **{name: count for name, count in counts.items() if count}}


# A head on the hidden state of the first token of each word and, in training, on those of its later tokens.
# Shape letters: N windows, M predicting words or tokens, H hidden width, C tags.


class TokenLearner(ClassLearner):
    """Tags words: the backbone and a linear layer with the task's name, like transformers' ...ForTokenClassification.
    Reads the states of encoders, of decoders, of T5's encoder, and of BART's decoder, which reads the same text as its
    encoder (Lewis et al. 2020, section 3.2)."""

    @property
    def head_side(self) -> Side:
        return self.config.states_read(self.backbone.config)

    def __init__(self, kind: TaskKind, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        problem = kind.config.first_conflict(backbone.config)
        if problem is not None:
            raise UserError(problem.message, problem.hint)
        super().__init__(kind, backbone, tokenizer, seed)
        self.set_loss(self.config.loss)
        self.add_token_head(SequenceHead(self.token_width, len(kind.classes), self.head_dropout))

    def examples(self, data: SplitData, max_length: int) -> TaggedWindows:
        """Returns the examples of a split, in the text format of this backbone."""
        model, learns_later = self.backbone.config, data.split == "train" and self.config.train_on == "all"
        start = self.start_token if model.token_states == "outputs" else None
        input_format = InputFormat(
            self.tokenizer, self.config.text_format(model), max_length, start, self.config.stride
        )
        later_tags = np.array(continuation_tags(self.config.labels, self.config.scheme)) if learns_later else None
        return TaggedWindows(self.rows(data), input_format, self.term, data.split, later_tags)

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """Returns (M, C): tag scores."""
        rng, at_M = self.dropout_rng(batch, step), indices_of(batch, self.term)
        return self.heads[self.term](
            self.pool_tokens(self.hidden_of(batch, rng, at_M)), self.head_rng(rng, batch, at_M)
        )

    def documents(self, batch: Batch) -> Tensor:
        return batch.inputs.documents[indices_of(batch, self.term)]

    def uncertainty(self, outputs: Tensor, batch: Batch) -> Tensor:
        entropy_N = outputs.new_zeros(len(batch.inputs.lengths), dtype=torch.float32)
        return entropy_N.scatter_reduce(0, self.documents(batch), normalized_entropy(outputs), "amax")

    def parts(self, outputs: Tensor, batch: Batch) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns, for each window, the indices of its words in order, their best tags, and the probabilities of these
        tags."""
        word_M = batch.inputs.columns[WORD][indices_of(batch, self.term)].cpu().numpy()
        probability_M, tag_M = (values.cpu().numpy() for values in outputs.float().softmax(-1).max(-1))
        first_M = word_M >= 0  # the later tokens of a word predict in training only
        counts = np.bincount(self.documents(batch).cpu().numpy()[first_M], minlength=len(batch.inputs.lengths))
        boundaries = np.cumsum(counts)[:-1]
        pieces = (np.split(values[first_M], boundaries) for values in (word_M, tag_M, probability_M))
        return list(zip(*pieces, strict=True))

    def predictors(self, train: SplitData, examples: Examples) -> dict[str, Predictor]:
        """Returns a constant baseline: the frequencies of the tags of the training words."""
        tags = np.fromiter(chain(*(self.rows(train).labels or ())), dtype=np.int64)
        counts = np.bincount(tags, minlength=len(self.kind.classes))
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}


class TokenClassification(TaskKind):
    """Rows of words, each word with the number of a tag. Tags that mark entities (IOB1, BIOES, ...) are converted to
    BIO tags, which are learned, predicted and scored."""

    config: TokenClassificationConfig
    unit = "word"

    def with_labels(self, columns: Columns, origin: Origin) -> TokenClassificationConfig:
        """Returns the configuration with the scheme of the training tags and the tag names."""
        config = self.config
        sentences = self._tag_names(items_of(columns[config.label]))
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
        words = words_of(name, columns, origin)
        labels = None
        if labeled or (
            values is not None
            and not is_unlabeled([tag for sentence in items_of(values) for tag in sentence], self.classes)
        ):
            labels = self._numbers(words, columns, origin)
        parents = {text: parents_of(heads, words, columns, origin) for text, heads in self.config.head_columns.items()}
        return Rows(row_ids(columns, len(origin)), {name: words}, labels, origin, parents)

    def _numbers(self, words: list[list[str]], columns: Columns, origin: Origin) -> list[list[int]]:
        sentences = self._tag_names(items_of(columns[self.config.label]))
        for number, (sentence, tags) in enumerate(zip(words, sentences, strict=True)):
            if len(sentence) != len(tags):
                counts = f"{counted(len(sentence), 'word')} and {counted(len(tags), 'tag')}"
                raise UserError(
                    f"{word_location(columns, origin, number, 0)}: {counts}",
                    "give each word one tag",
                )
        number_of = {label: index for index, label in enumerate(self.classes)}
        decoded = []
        for number, tags in enumerate(self._to_bio(sentences, columns, origin)):
            for offset, tag in enumerate(tags):
                if tag not in number_of:
                    place = word_location(columns, origin, number, offset)
                    raise unknown_label(self.config, self.classes, tag, place)
            decoded.append([number_of[tag] for tag in tags])
        return decoded

    def _tag_names(self, sentences: list[list[object]]) -> list[list[str]]:
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
                place = word_location(columns, origin, number, offset)
                raise UserError(
                    f"{place}: {problem_text} in task.scheme={self.config.scheme}",
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
                "precision": score.precision,
                "recall": score.recall,
                "f1": score.f1,
                "support": score.gold,
                "predicted": score.predicted,
            }
            for name, score in self._entities(rows, gold_M, predicted_M).items()
        }
        stray = EntityTags(self.classes).stray_entities(gold_M, _lengths(rows.labels))
        return {"classes": classes, "gold_beginning_with_i": stray}


def flat(sentences: Label) -> np.ndarray:
    """Returns (M,) int64: the tags of all sentences."""
    return np.fromiter(chain.from_iterable(sentences), dtype=np.int64)


def _lengths(sentences: Label) -> np.ndarray:
    return np.fromiter(map(len, sentences), dtype=np.int64)
