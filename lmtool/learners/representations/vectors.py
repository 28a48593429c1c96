"""Vectors of texts from the hidden states of a model: one vector per text, or one per token.

Shape letters: W layers, L tokens of a text, T tokens of a packed batch, N texts of a batch, H hidden width, D width of
a vector.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lmtool.data.examples import Rows
from lmtool.data.formats import text_format
from lmtool.data.loader import PackedLoader
from lmtool.errors import NotFinite, UserError
from lmtool.learners.base import forward_tokens, no_progress
from lmtool.models.base import Backbone
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.models.heads.sequence import summary
from lmtool.nn.stack import Stack, Tap, TapPoint
from lmtool.tasks.kinds.texts import InputFormat, SequenceExamples
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.types import Batch, Packed
from lmtool.weights.folders import HFFolder
from lmtool.weights.reading import read_file
from lmtool.weights.sentence_encoders import Dense, SentenceEncoder, dense_file

# The activations of sentence-transformers' Dense module.
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Identity": nn.Identity,
}


# The pooling modes of sentence-transformers that `summary` computes, with their names there.
_SUMMARIES: dict[str, Literal["first", "last", "max", "mean"]] = {
    "cls": "first",
    "lasttoken": "last",
    "max": "max",
    "mean": "mean",
}


class SentenceModules(nn.Module):
    """The modules of a sentence encoder after the model: pooling, then linear maps and normalization (Reimers and
    Gurevych 2019; the modules Pooling, Dense and Normalize of sentence-transformers).

    Attributes:
        width: The width of the resulting vectors, D.

    Args:
        encoder: The settings of the sentence encoder.
        folder: The folder with the weights.
        hidden_size: The hidden width of the model.
        offline: Whether downloads are forbidden.

    Raises:
        UserError: The weights of a linear map have a wrong shape.
    """

    def __init__(self, encoder: SentenceEncoder, folder: HFFolder, hidden_size: int, offline: bool):
        super().__init__()
        self.modes = encoder.modes
        self.layers = nn.ModuleList()
        width = len(self.modes) * hidden_size
        for module in encoder.modules:
            if not isinstance(module, Dense):
                self.layers.append(_Normalize())
                continue
            path = dense_file(folder, module, offline)
            dense = _Dense(module)
            tensors = {name: tensor.float() for name, tensor in read_file(path).items()}
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            expected = {name: tuple(tensor.shape) for name, tensor in dense.state_dict().items()}
            if shapes != expected or width != module.inputs:
                raise UserError(
                    f"{path} has tensors of the shapes {shapes}, but {expected} are needed for {width} inputs",
                    "copy the folder again",
                )
            dense.load_state_dict(tensors)
            self.layers.append(dense)
            width = module.outputs
        self.width = width if encoder.dimensions is None else min(width, encoder.dimensions)

    @torch.no_grad()
    def forward(self, states_TH: Tensor, inputs: Packed) -> Tensor:
        """Returns the vectors (N, D) of packed texts, from the hidden states of the last layer, float32."""
        vectors = torch.cat([_pool_mode(mode, states_TH, inputs) for mode in self.modes], dim=-1)
        for module in self.layers:
            vectors = module(vectors)
        return vectors[:, : self.width]


def _pool_mode(mode: str, states_TH: Tensor, inputs: Packed) -> Tensor:
    if mode in _SUMMARIES:
        return summary(states_TH, inputs, _SUMMARIES[mode])
    lengths_N = inputs.segments.cu_lengths.diff().to(states_TH.dtype)
    if mode == "mean_sqrt_len_tokens":
        return summary(states_TH, inputs, "mean") * lengths_N[:, None].sqrt()
    # "weightedmean": the weight of a token is its position, counted from 1.
    weights_T = (inputs.positions + 1).to(states_TH.dtype)
    mean_NH = summary(states_TH * weights_T[:, None], inputs, "mean")
    return mean_NH * (2 / (lengths_N + 1))[:, None]


class _Normalize(nn.Module):
    def forward(self, vectors_ND: Tensor) -> Tensor:
        return nn.functional.normalize(vectors_ND, dim=-1)


class _Dense(nn.Module):
    """Its submodules have the same names as the tensors in the file."""

    def __init__(self, module: Dense):
        super().__init__()
        self.linear = nn.Linear(module.inputs, module.outputs, module.bias)
        self.activation, self.adds_input = _ACTIVATIONS[module.activation](), module.residual
        changes_width = module.residual and module.inputs != module.outputs
        self.residual = nn.Linear(module.inputs, module.outputs, bias=False) if changes_width else nn.Identity()

    def forward(self, vectors_ND: Tensor) -> Tensor:
        mapped_ND = self.activation(self.linear(vectors_ND))
        return mapped_ND + self.residual(vectors_ND) if self.adds_input else mapped_ND


class _StateRecorder(Tap):
    """For an encoder-decoder, the layers are those of the encoder."""

    def __init__(self, layers: Sequence[int]):
        self.layers = frozenset(layers)
        self.states: dict[int, Tensor] = {}

    def __call__(self, place: TapPoint, x_TH: Tensor) -> Tensor:
        if place.side == "inputs" and place.layer in self.layers:
            self.states[place.layer] = x_TH
        return x_TH


def depth_of(backbone: Backbone) -> int:
    """Returns the number of layers that process a text. Raises UserError if the model is not a stack of layers."""
    stack = backbone.encoder if isinstance(backbone, EncoderDecoder) else backbone
    if not isinstance(stack, Stack):
        raise UserError(f"model={backbone.config.name} is not a stack of layers", "use a checkpoint of another model")
    return len(list(stack.applied_layers()))


class HiddenStates:
    """Computes the hidden states of some layers of a model, which must be in evaluation mode.

    Attributes:
        layers: The numbers of the layers; 0 is the embedding.
        width: The hidden width of these layers, H.

    Args:
        backbone: The model.
        precision: Number format and device.
        layers: The numbers of the layers; None means all layers whose states have the width of the last layer.

    Raises:
        UserError: The selected layers have different widths.
    """

    def __init__(self, backbone: Backbone, precision: Precision, layers: Sequence[int] | None = None):
        self.backbone, self.precision, self.depth = backbone, precision, depth_of(backbone)
        widths = backbone.state_widths
        if layers is None:
            layers = [layer for layer in range(self.depth + 1) if widths[layer] == widths[-1]]
        self.layers, self.width = tuple(layers), widths[layers[-1]]
        if any(widths[layer] != self.width for layer in self.layers):
            first = next(layer for layer in self.layers if widths[layer] != self.width)
            message = (
                f"layer {first} has states of width {widths[first]}, but layer {self.layers[-1]} of width {self.width}"
            )
            raise UserError(f"model={backbone.config.name}: {message}", "set layers=last, or the number of a layer")

    @torch.no_grad()
    def read(self, inputs: Packed) -> Tensor:
        """Returns the states (W, T, H) of a packed batch, float32. Raises NotFinite if a state is not finite."""
        tap = _StateRecorder(self.layers)
        # The model returns the states of its last layer, so this layer needs no tap.
        recorder = None if self.layers == (self.depth,) else tap
        with self.precision.autocast():
            tap.states[self.depth] = self.backbone.read_inputs(inputs, tap=recorder)
        states_WTH = torch.stack([tap.states[layer].float() for layer in self.layers])
        if not bool(torch.isfinite(states_WTH).all()):
            raise NotFinite("hidden states", Batch(inputs, {}, torch.zeros(0), torch.zeros(0)))
        return states_WTH


Pooling = Literal["none", "first", "mean", "max", "last"]
# Number of texts whose vectors are in memory at a time: with one vector per text, and with one per token.
_TEXTS_AT_ONCE, _TEXTS_AT_ONCE_PER_TOKEN = 4096, 256


class Vectors(NamedTuple):
    """The vectors of one text. tokens: the token ids (L,), including special tokens. vectors: one vector per layer (W,
    H), or one per layer and token (W, L, H), float32."""

    tokens: np.ndarray
    vectors: np.ndarray


@dataclass(frozen=True)
class Embedder:
    """Computes vectors of texts.

    Attributes:
        states: Computes the states of the selected layers.
        tokenizer: The tokenizer.
        format_name: The name of the text format in `lmtool.data.formats`.
        pooling: How the states of all tokens of a text, including special tokens, become one vector; none means one
            vector per token.
        average: Whether the vectors of the layers are averaged.
        max_length: Maximum tokens of a text. Longer texts are truncated.
        batch_tokens: Maximum number of tokens in one forward pass, see `forward_tokens`.
        modules: The modules of a sentence encoder, which replace `pooling`; None for other models.
        prompt: A text that is put before the first text of every row.
        notes: Remarks for the user.
    """

    states: HiddenStates
    tokenizer: Tokenizer
    format_name: str
    pooling: Pooling
    average: bool
    max_length: int
    batch_tokens: int
    modules: SentenceModules | None = None
    prompt: str = ""
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The width of a vector."""
        return self.states.width if self.modules is None else self.modules.width

    @property
    def portion(self) -> int:
        """The number of texts whose vectors are in memory at a time."""
        return _TEXTS_AT_ONCE_PER_TOKEN if self.pooling == "none" else _TEXTS_AT_ONCE

    def vectors(
        self, rows: Rows, truncated: Counter[str], progress: Callable[[int, int], None] = no_progress
    ) -> Iterator[Vectors]:
        """Yields the vectors of each row, in order. Except for rounding, they do not depend on the other rows.

        Args:
            rows: Rows with one text or two texts each.
            truncated: Counts the truncated texts, see `truncation_warnings`.
            progress: Called with the number of finished rows and the number of all rows.

        Raises:
            UserError: A text has no tokens; the message names its file and line.
        """
        for start in range(0, len(rows), self.portion):
            selected = rows.take(np.arange(start, min(start + self.portion, len(rows))))
            input_format = InputFormat(self.tokenizer, self.format_name, self.max_length)
            examples = SequenceExamples(self._with_prompt(selected), input_format, "text", "input")
            if examples.truncated:
                truncated[f"texts are truncated to {self.max_length} tokens"] += examples.truncated
            yield from self._in_order(examples, start, len(rows), progress)

    def _with_prompt(self, rows: Rows) -> Rows:
        if not self.prompt:
            return rows
        first = next(iter(rows.columns))
        return replace(rows, columns={**rows.columns, first: [self.prompt + text for text in rows.columns[first]]})

    def _in_order(
        self, examples: SequenceExamples, before: int, total: int, progress: Callable[[int, int], None]
    ) -> Iterator[Vectors]:
        finished: dict[int, Vectors] = {}
        budget = max(forward_tokens(self.batch_tokens, self.states.precision), self.max_length)
        for batch in PackedLoader(examples, 0, None, budget, shuffle=False).epoch_batches():
            inputs = batch.inputs.to(self.states.precision.device)
            states_WTH = self.states.read(inputs)
            if self.average:
                states_WTH = states_WTH.mean(0, keepdim=True)
            tokens = np.split(batch.inputs.tokens.numpy(), np.cumsum(batch.inputs.lengths)[:-1])
            for number, ids, vectors in zip(
                batch.examples.tolist(), tokens, self._pooled(states_WTH, inputs), strict=True
            ):
                finished[number] = Vectors(ids, vectors)
            progress(before + len(finished), total)
        for number in range(len(finished)):
            yield finished.pop(number)

    def _pooled(self, states_WTH: Tensor, inputs: Packed) -> list[np.ndarray]:
        """Returns (W, H), or (W, L, H) with one vector per token."""
        if self.pooling == "none":
            return np.split(states_WTH.cpu().numpy(), np.cumsum(inputs.lengths)[:-1], axis=1)
        if self.modules is not None:
            return list(torch.stack([self.modules(states_TH, inputs) for states_TH in states_WTH], dim=1).cpu().numpy())
        pooled = [summary(states_TH, inputs, self.pooling).cpu().numpy() for states_TH in states_WTH]
        return list(np.stack(pooled, axis=1))


# --- one word in several sentences --------------------------------------------------------------------------------
#
# The similarity of a word's vectors in different sentences, compared with the similarity of different words
# (Ethayarajh, "How Contextual are Contextualized Word Representations?", EMNLP 2019).
#
# Shape letters: W layers, S sentences, O other words, H hidden width.

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class WordSimilarity:
    """The similarity of a word's vectors in different sentences.

    Attributes:
        layers: The numbers of the layers; 0 is the embedding.
        similarity_WSS: The cosine of the word's vectors, for each pair of sentences.
        others_W: The mean cosine of two different words of the sentences.
    """

    layers: tuple[int, ...]
    similarity_WSS: np.ndarray
    others_W: np.ndarray

    @property
    def same_W(self) -> np.ndarray:
        """The mean cosine of the word's vectors in two different sentences."""
        count = self.similarity_WSS.shape[-1]
        return (self.similarity_WSS.sum((1, 2)) - count) / (count * (count - 1))


def compare_word(
    states: HiddenStates, tokenizer: Tokenizer, format_name: str, sentences: Sequence[str], word: str
) -> WordSimilarity:
    """Compares the vectors of a word in several sentences; in each sentence, its first occurrence counts.

    Args:
        states: Computes the hidden states.
        tokenizer: The tokenizer.
        format_name: The name of the text format in `lmtool.data.formats`.
        sentences: The sentences.
        word: The word.

    Raises:
        UserError: A sentence does not contain the word.
    """
    word_vectors, other_vectors = [], []
    for sentence in sentences:
        vectors = _sentence_vectors(states, tokenizer, format_name, sentence)
        index = next((index for index, (text, _) in enumerate(vectors) if text.lower() == word.lower()), None)
        if index is None:
            raise UserError(f"text: no {word!r} in {sentence!r}", "use sentences that contain the word, separated by |")
        word_vectors.append(vectors[index][1])
        other_vectors += [vector for text, vector in vectors if text.lower() != word.lower()]
    word_WSH = _unit_vectors(np.stack(word_vectors, 1))
    # The word is one of the different words too; its first vector stands for it.
    others_WOH = _unit_vectors(np.stack([*other_vectors, word_vectors[0]], 1))
    similarity_WSS = word_WSH @ word_WSH.transpose(0, 2, 1)
    between_WOO = others_WOH @ others_WOH.transpose(0, 2, 1)
    count = between_WOO.shape[-1]
    pairs = max(count * (count - 1), 1)
    return WordSimilarity(states.layers, similarity_WSS, (between_WOO.sum((1, 2)) - count) / pairs)


def _sentence_vectors(
    states: HiddenStates, tokenizer: Tokenizer, format_name: str, sentence: str
) -> list[tuple[str, np.ndarray]]:
    sentence_ids, spans = tokenizer.encode_aligned(sentence)
    ids, columns = text_format(format_name, tokenizer).join(sentence_ids)
    # The text format puts special tokens around the sentence.
    starts = range(len(ids) - len(sentence_ids) + 1)
    before = next(start for start in starts if np.array_equal(ids[start : start + len(sentence_ids)], sentence_ids))
    tensors = {name: torch.from_numpy(np.asarray(column)) for name, column in columns.items()}
    inputs = Packed(torch.from_numpy(np.asarray(ids, dtype=np.int64)), (len(ids),), tensors)
    states_WTH = states.read(inputs.to(states.precision.device)).cpu().numpy()
    words = []
    for match in _WORD.finditer(sentence):
        tokens_of_word = np.flatnonzero((spans[:, 0] < match.end()) & (spans[:, 1] > match.start()))
        if len(tokens_of_word):
            words.append((match[0], states_WTH[:, before + tokens_of_word].mean(1)))
    return words


def _unit_vectors(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30)
