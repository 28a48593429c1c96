"""Sentences of words as packed batches, tagging schemes, and a head on each word's first token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from lmtool.config.needs import refusal
from lmtool.data.examples import Plan, Rows, SplitData
from lmtool.data.formats import assemble, ragged_ranges
from lmtool.errors import UserError
from lmtool.learners.baseline import ConstantPredictor, Predictor
from lmtool.learners.model import normalized_entropy
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder import EncoderDecoder, shifted
from lmtool.models.heads.base import loss_sum, losses
from lmtool.models.heads.sequence import SequenceHead
from lmtool.nn.stack import Side
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.kinds.texts import InputFormat, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput, Target

# Tags of entities and chunks in the schemes of files, converted to BIO. bio (IOB2): B begins an entity, I continues it.
# iob1: I, and B only where an entity of the same type ends right before (Ramshaw and Marcus 1995; CoNLL-2003 as
# distributed). iobes: bio with E for the last word and S for the only word; BILOU has L and U.


OUTSIDE = "O"
_SAME = {"L": "E", "U": "S"}
_PREFIXES = {"B", "I", "E", "S", "L", "U"}


def parts_of(tag: str) -> tuple[str, str] | None:
    """Prefix and type of a tag, ("O", "") outside; None for any other form."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = tag.partition("-")
    return (_SAME.get(prefix, prefix), kind) if dash and kind and prefix in _PREFIXES else None


def scheme_of(sentences: Iterable[Sequence[str]]) -> str:
    """The scheme of training tags: bio, iob1, iobes, or none if a tag has another form.

    Tags with E or S are iobes. B and I alone are iob1 if no B begins an isolated entity and some I does, else bio.
    """
    isolated_beginnings = free_insides = 0
    ends, any_entity = False, False
    for tags in sentences:
        before = (OUTSIDE, "")
        for tag in tags:
            parts = parts_of(tag)
            if parts is None:
                return "none"
            prefix, kind = parts
            ends |= prefix in "ES"
            any_entity |= prefix != OUTSIDE
            if kind and before[1] != kind:
                isolated_beginnings += prefix == "B"
                free_insides += prefix == "I"
            before = parts
    if not any_entity:
        return "none"
    return "iobes" if ends else "iob1" if free_insides and not isolated_beginnings else "bio"


def to_bio(tags: Sequence[str], scheme: str) -> list[str]:
    """A sentence's tags in BIO. ValueError with the first invalid tag and its position.

    In bio, an I that continues nothing stays, and counts as a beginning, as in conlleval.
    """
    if scheme == "none":
        return list(tags)
    converted: list[str] = []
    before = (OUTSIDE, "")
    for offset, tag in enumerate(tags):
        parts = parts_of(tag)
        if parts is None or (parts[0] in "ES" and scheme != "iobes"):
            raise ValueError(offset, tag)
        prefix, kind = parts
        if prefix == OUTSIDE:
            converted.append(OUTSIDE)
        elif scheme == "bio":
            converted.append(tag)
        else:
            open_before = before[1] == kind and (scheme == "iob1" or before[0] in "BI")
            begins = prefix in "BS" or not open_before
            converted.append(f"{'B' if begins else 'I'}-{kind}")
        before = parts
    return converted


def continuation_tags(labels: Sequence[str], scheme: str) -> list[int]:
    """By tag number, the tag of a word's later tokens: I of the same type for a B if it exists, else the same tag."""
    number = {label: index for index, label in enumerate(labels)}
    if scheme == "none":
        return list(number.values())
    return [number.get(f"I-{label[2:]}", index) if label[:2] == "B-" else index for label, index in number.items()]


def bio_labels(tags: Iterable[str]) -> tuple[str, ...]:
    """O, and B and I of each type, sorted."""
    kinds = sorted({tag[2:] for tag in tags if tag != OUTSIDE})
    return (OUTSIDE, *(f"{prefix}-{kind}" for kind in kinds for prefix in "BI"))


# Sentences of words as packed batches: tokenized once, long ones read in overlapping windows, so that every word is
# predicted exactly once.
# Shape letters: E sentences, W windows, N windows of a batch, T tokens, M predicting tokens.


# Sentences per tokenizer call: enough for its threads, few enough for memory.
_SENTENCES = 4096
# Placeholders for a word without tokens; the first one in the vocabulary is used.
_UNKNOWN = ("unk", "mask", "eos", "pad")
WORD = "word"
"""The column of a batch with the index of the word of which a token is the first one; -1 for others."""


class TaggedWindows:
    """One sentence per row, read in windows of `InputFormat.stride`; with `InputFormat.start`, the decoder's states
    predict. later: by tag, the tag of a word's later tokens; None: only first tokens predict, as in unlabeled data.

    A word without tokens becomes one unknown token, and so does an empty sentence, which predicts nothing.
    """

    def __init__(self, rows: Rows, layout: InputFormat, term: str, split: str, later: np.ndarray | None = None):
        if not len(rows):
            raise UserError(f"the {split} split has no rows")
        self.rows, self.term, self.split, self.start = rows, term, split, layout.start
        self.template = layout.template(1, fewest=2)
        capacity, stride = layout.max_length - self.template.special_count, layout.stride or 0
        (sentences,) = rows.columns.values()
        self._encode(sentences, layout.tokenizer)
        self._label(later)
        self.windows = windows(self._lengths_E, capacity, min(stride, capacity // 2))
        cut = self.windows
        records = np.empty(
            len(cut), dtype=[("row", "i8"), ("part", "i4"), ("start", "i8"), ("length", "i4"), ("own", "i4", 2)]
        )
        records["row"], records["part"], records["length"] = cut.text, cut.part, cut.lengths
        records["start"] = self._starts_E[cut.text] + cut.start
        records["own"] = np.stack([cut.core_start - cut.start, cut.core_end - cut.start], axis=1)
        sides = 1 if layout.start is None else 2
        self._plan = Plan(records, sides * (cut.lengths + self.template.special_count))

    def _encode(self, sentences: list[list[str]], tokenizer: Tokenizer) -> None:
        """Ids, and the word that each begins, of all sentences."""
        unknown = next((tokenizer.roles[role] for role in _UNKNOWN if role in tokenizer.roles), 0)
        ids, words, self.unknown_words = [], [], 0
        for start in range(0, len(sentences), _SENTENCES):
            part = sentences[start : start + _SENTENCES]
            for sentence, (ids_T, word_T) in zip(part, tokenizer.encode_sentences(part), strict=True):
                missing = np.setdiff1d(np.arange(len(sentence)), word_T)
                self.unknown_words += len(missing)
                if len(missing) or not len(ids_T):
                    places = np.searchsorted(word_T, missing) if len(sentence) else np.zeros(1, dtype=np.int64)
                    ids_T = np.insert(ids_T, places, unknown)
                    word_T = np.insert(word_T, places, missing if len(sentence) else -1)
                first_T = np.diff(word_T, prepend=-1) != 0
                ids.append(ids_T)
                words.append(np.where(first_T & (word_T >= 0), word_T, -1))
        self._lengths_E = np.array([len(sentence) for sentence in ids], dtype=np.int64)
        self._starts_E = np.cumsum(self._lengths_E) - self._lengths_E
        self._ids, self._words = np.concatenate(ids), np.concatenate(words)

    def _label(self, later: np.ndarray | None) -> None:
        """Marks the predicting tokens, with their tags if labeled."""
        self._predicts, self._labels = self._words >= 0, None
        if self.rows.labels is None:
            return
        tags = np.array([tag for sentence in self.rows.labels for tag in sentence], dtype=np.int64)
        # Words are in order within sentences, and sentences are in order; so are first tokens.
        numbers_T = np.cumsum(self._predicts) - 1
        if int(numbers_T[-1]) + 1 != len(tags):
            raise RuntimeError(f"{int(numbers_T[-1]) + 1} words and {len(tags)} tags")
        worded_T = numbers_T >= 0 if len(tags) else np.zeros(len(numbers_T), dtype=bool)
        labels_T = np.where(worded_T, tags[numbers_T] if len(tags) else -1, -1)
        if later is not None:
            # The token of an empty sentence belongs to no word.
            empty_T = np.zeros(len(self._ids), dtype=bool)
            empty_T[self._starts_E[[not sentence for sentence in self.rows.labels]]] = True
            labels_T = np.where(self._predicts, labels_T, later[labels_T])
            self._predicts = worded_T & ~empty_T
        self._labels = labels_T

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths_N = rows["length"].astype(np.int64)
        source_T = ragged_ranges(rows["start"], lengths_N)
        inside_T = ragged_ranges(np.zeros(len(rows), dtype=np.int64), lengths_N)
        window_T = np.repeat(np.arange(len(rows)), lengths_N)
        own_T = (inside_T >= rows["own"][window_T, 0]) & (inside_T < rows["own"][window_T, 1])
        chosen = np.flatnonzero(own_T & self._predicts[source_T])
        before = len(self.template.pieces[0])
        places_T = np.arange(len(source_T)) + window_T * self.template.special_count + before
        inputs = assemble(self.template, [(self._ids[source_T], lengths_N)]).packed()
        words = np.full(len(inputs.tokens), -1, dtype=np.int64)
        words[places_T] = self._words[source_T]
        inputs.columns[WORD] = torch.from_numpy(words)
        labels = None if self._labels is None else torch.from_numpy(self._labels[source_T[chosen]])
        outputs = None if self.start is None else shifted(Packed(inputs.tokens, inputs.lengths), self.start)
        target = Target(
            labels, at=torch.from_numpy(places_T[chosen]), side="inputs" if self.start is None else "outputs"
        )
        numbers = torch.from_numpy(np.asarray(examples, dtype=np.int64))
        row_N, part_N = torch.from_numpy(rows["row"].astype(np.int64)), torch.from_numpy(rows["part"].astype(np.int32))
        return Batch(inputs, {self.term: target}, numbers, part_N, outputs, row_N)

    def metadata(self) -> dict[str, object]:
        """Counts of windows, tokens, and sentences read in several windows."""
        counts = {
            "sentences_in_windows": int(np.sum(self.windows.part == 1)),
            "words_without_pieces": self.unknown_words,
        }
        return {
            "split": self.split,
            **self._plan.metadata(),
            **{name: count for name, count in counts.items() if count},
        }


# A head on the hidden state of each word's first token and, in training, of the later ones.
# Shape letters: N windows, M predicting words or tokens, H hidden width, C tags.


class TokenLearner(TaskLearner):
    """The backbone and a linear map with the task's name, as transformers' ...ForTokenClassification: for encoders,
    decoders, T5's encoder alone, and BART's decoder, which reads the same text (Lewis et al. 2020, section 3.2).

    Cross entropy with the task's smoothing and tag weights, over the learning tokens.
    """

    scores_tokens = True
    class_weights: Tensor | None

    @property
    def head_side(self) -> Side:
        return self.config.states_read(self.backbone.config)

    def __init__(self, kind: TaskKind, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        config = kind.config
        if config.labels is None or config.loss.class_weights == "balanced":
            raise ValueError("build a task from the config that load_task gives back: its labels are filled in")
        problem = refusal(config, model=backbone.config)
        if problem is not None:
            raise UserError(problem.message, problem.hint)
        super().__init__(kind, backbone, tokenizer, seed)
        dropout = backbone.config.dropout if config.dropout is None else config.dropout
        self.add_token_head(SequenceHead(self.token_width, len(config.labels), dropout))
        weights = config.loss.class_weights
        self.loss = config.loss
        self.register_buffer("class_weights", torch.tensor(weights) if weights != "none" else None, persistent=False)

    def examples(self, data: SplitData, max_length: int) -> TaggedWindows:
        """Sentences tokenized, laid out for this backbone and split into windows."""
        model, learns = self.backbone.config, data.split == "train" and self.config.train_on == "all"
        start = None
        if model.token_states == "outputs" and isinstance(self.backbone, EncoderDecoder):
            start = self.tokenizer.role(self.backbone.config.start_role)
        layout = InputFormat(self.tokenizer, self.config.text_format(model), max_length, start, self.config.stride)
        later = np.array(continuation_tags(self.config.labels, self.config.scheme)) if learns else None
        return TaggedWindows(self.rows(data), layout, self.term, data.split, later)

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """(M, C) tag scores."""
        rng, at_M = self.dropout_rng(batch, step), self._places(batch)
        hidden_MH = self.hidden_of(batch, rng, at_M)
        if rng is not None:
            rng = (rng if batch.outputs is None else rng.for_outputs()).rows(at_M)
        return self.heads[self.term](self.pooled(hidden_MH), rng)

    def _places(self, batch: Batch) -> Tensor:
        """(M,) flat indices of the predicting tokens."""
        at_M = batch.targets[self.term].at
        assert at_M is not None
        return at_M

    def counts(self, batch: Batch) -> dict[str, float]:
        labels = self.labels(batch)
        if self.class_weights is None:
            return {self.term: float(len(labels))}
        return {self.term: float(self.class_weights.to(labels.device).double()[labels].sum())}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        logits_MC = self.outputs(batch, step)
        weights_C = None if self.class_weights is None else self.class_weights.to(logits_MC.device)
        loss = self.loss
        total = loss_sum(logits_MC, self.labels(batch), loss.label_smoothing, weights_C, loss.focal_gamma)
        return StepOutput({self.term: total}, self.weights)

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        """Plain cross entropy, without the smoothing and weights of training."""
        labels_M, at_M = self.labels(batch), self._places(batch)
        return Scores(losses(outputs, labels_M), labels_M, outputs.argmax(-1), batch.inputs.documents[at_M])

    def uncertainty(self, outputs: Tensor, batch: Batch) -> Tensor:
        unsure_N = outputs.new_zeros(len(batch.inputs.lengths), dtype=torch.float32)
        return unsure_N.scatter_reduce(
            0, batch.inputs.documents[self._places(batch)], normalized_entropy(outputs), "amax"
        )

    def parts(self, outputs: Tensor, batch: Batch) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each window, its word indices in order, their best tags and the probabilities of these."""
        at_M = self._places(batch)
        word_M = batch.inputs.columns[WORD][at_M].cpu().numpy()
        share_M, tag_M = (values.cpu().numpy() for values in outputs.float().softmax(-1).max(-1))
        first_M = word_M >= 0  # later tokens predict in training only
        boundaries = np.bincount(
            batch.inputs.documents[at_M].cpu().numpy()[first_M], minlength=len(batch.inputs.lengths)
        )
        ends = np.cumsum(boundaries)[:-1]
        pieces = (np.split(values[first_M], ends) for values in (word_M, tag_M, share_M))
        return list(zip(*pieces, strict=True))

    def predictors(self, train: SplitData, examples: TaggedWindows) -> dict[str, ConstantPredictor]:
        """The tag frequencies of the training words."""
        tags = np.fromiter(chain(*(self.rows(train).labels or ())), dtype=np.int64)
        counts = np.bincount(tags, minlength=len(self.config.labels))
        return {self.term: ConstantPredictor.of_counts("base rate", counts)}

    def baseline(
        self, train: SplitData, held_out: SplitData, batches: Iterable[Batch], predictors: Mapping[str, Predictor]
    ) -> dict[str, object]:
        """The most common tag for each word."""
        name, prediction = self.kind.constant(self.rows(train))
        rows = self.rows(held_out)
        constant = [Prediction(prediction.value * len(tags), prediction.score) for tags in rows.labels or ()]
        metrics = self.kind.metrics(rows, constant)
        return {
            "name": name,
            "prediction": self.kind.shown(prediction.value)[0],
            "metric": self.metric.name,
            "value": metrics[self.metric.name],
            "metrics": metrics,
        }
