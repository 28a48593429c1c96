"""Causal language modeling: predicts each token from all preceding tokens.

Radford, Wu, Child, Luan, Amodei, Sutskever, "Language Models are Unsupervised Multitask Learners", 2019.

Shape letters: T tokens, M predicting positions, H hidden width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.examples import Examples, Rows, SplitData
from lmtool.learners.base import Answers, BaseLearner, Inference, Responder
from lmtool.learners.baseline import ConstantPredictor, Predictor, token_counts
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.inspection import Inspector
from lmtool.learners.model import indices_of, labels_of
from lmtool.learners.writing import (
    ContinuationWriter,
    PerplexityScorer,
    ReplyWriter,
    TextScorer,
    generate_continuations,
)
from lmtool.models.base import Backbone, Decoder, read_streams
from lmtool.models.heads.lm import LMHead, lm_head
from lmtool.nn.cache import CarriedState
from lmtool.nn.dropout import DropoutRng
from lmtool.objectives.checks.language import CausalInspector, LanesInspector, RewrittenInspector
from lmtool.objectives.configs import NextTokenConfig, PlmConfig
from lmtool.objectives.examples.language import CarriedWindows, CausalSegments, CausalWindows, RewrittenTexts
from lmtool.objectives.examples.windows import Stream
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Scores, StepOutput

# Number of tokens in the prompt of a sample.
_PROMPT_TOKENS = 12
# How samples are generated. 80 tokens are about a paragraph. A temperature below 1 and top_k avoid improbable words;
# sampling avoids repetition.
SAMPLING = GenerationConfig(max_new_tokens=80, temperature=0.8, top_k=40)


class TextWindows(Examples, Protocol):
    """The interface of examples that are windows of a document stream."""

    stream: Stream


def unigram(train: SplitData, tokenizer: Tokenizer) -> ConstantPredictor:
    """Returns the predictor of the unigram distribution of the training text, without special tokens."""
    counts = token_counts(train.text.tokens, tokenizer.vocab_size)
    return ConstantPredictor.of_counts("unigram", counts, tokenizer.special_ids)


def next_token_unigram(train: SplitData, tokenizer: Tokenizer, documents: int) -> ConstantPredictor:
    """Returns the predictor of the unigram distribution of the training text, in which the end-of-text token after each
    document and unknown tokens count as tokens; other special tokens are never predicted. documents: their number."""
    counts = token_counts(train.text.tokens, tokenizer.vocab_size)
    end = tokenizer.role("eos")
    counts[end] += documents
    never = tokenizer.special_ids - {end, tokenizer.roles.get("unk")}
    return ConstantPredictor.of_counts("unigram", counts, never)


class LanguageModelLearner(BaseLearner):
    """The base class of language models with a single term, predicted by a language-model head over the token table."""

    def __init__(self, config: NextTokenConfig | PlmConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.loss_weights = {self.term: 1.0}
        self.add_head("lm", lm_head(backbone))
        self.carried = CarriedState() if backbone.config.carries_state else None

    @property
    def term(self) -> str:
        """The name of the term, under which the examples have its targets; by default that of the objective."""
        return str(self.config.name)

    @property
    def lm(self) -> LMHead:
        """The language-model head."""
        return cast(LMHead, self.heads["lm"])

    @abstractmethod
    def states(self, batch: Batch, rng: DropoutRng | None) -> Tensor:
        """Returns (M, H): the states from which the targets of a batch are predicted."""

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.term: float(len(labels_of(batch, self.term)))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        hidden_MH = self.states(batch, self.dropout_rng(batch, step))
        labels = labels_of(batch, self.term)
        total = self.lm.loss_sum(hidden_MH, self.table_VW, labels, self.config.label_smoothing)
        return StepOutput({self.term: total}, self.loss_weights)

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        """Returns the loss and the best prediction of each target, in evaluation mode."""
        indices, labels = indices_of(batch, self.term), labels_of(batch, self.term)
        hidden_MH = self.states(batch, None)
        losses, best = self.lm.scores(hidden_MH, self.table_VW, labels)
        return {self.term: Scores(losses, labels, best, batch.inputs.documents[indices])}

    def responder(self) -> Responder:
        return TextResponder(self)


class TextResponder(Responder):
    """Continues texts."""

    continues = True
    learner: LanguageModelLearner

    def answers(self, rows: Rows, inference: Inference) -> Answers:
        """Returns for each row the `text` and its `continuation`, which has at most 80 tokens. The continuation ends
        earlier at an end-of-text token, if the vocabulary has one (that of the GPT of 2018 has none)."""
        writer, seed = self.learner.writer(), self.learner.seed
        return Answers(
            generate_continuations(writer, rows, SAMPLING, seed, inference.batch_tokens, inference.precision)
        )

    def line(self, record: JsonObject) -> str:
        return str(record["text"] + record["continuation"])


class CausalLanguageModel(LanguageModelLearner):
    """Causal language modeling: every position of a window except the last predicts the next token."""

    backbone: Decoder
    term = "clm"
    inspector_class: type[Inspector] = CausalInspector

    def examples(self, data: SplitData, max_length: int) -> TextWindows:
        if self.carried is not None and data.documents == "joined" and data.stride is None:
            return CarriedWindows(self.tokenizer, data.text, max_length, data.split)
        return CausalWindows(self.tokenizer, data.text, max_length, data.documents, data.split, data.stride)

    def scorer(self, data: SplitData, examples: Examples, predictors: Mapping[str, Predictor]) -> PerplexityScorer:
        documents_of = examples.documents_of if type(examples) is CausalWindows else None
        return TextScorer(self, predictors, data.text.metadata, self.tokenizer.role("eos"), documents_of)

    def inspector(self, examples: TextWindows, max_length: int) -> Inspector:
        if isinstance(examples, CausalSegments):
            return LanesInspector(self, examples, max_length)
        return super().inspector(examples, max_length)

    def predictors(self, train: SplitData, examples: TextWindows) -> dict[str, ConstantPredictor]:
        """Returns the unigram predictor of the training text and of its end-of-text tokens."""
        return {self.term: next_token_unigram(train, self.tokenizer, self.ends(examples))}

    def ends(self, examples: TextWindows) -> int:
        """Returns how many end-of-text tokens the text has: one for each document."""
        return len(examples.stream.offsets) - 1

    def states(self, batch: Batch, rng: DropoutRng | None) -> Tensor:
        return read_streams(self.backbone, self.carried, batch, rng, indices_of(batch, self.term))

    def writer(self) -> ContinuationWriter:
        return ContinuationWriter(self.backbone, self.lm, self.tokenizer)

    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """Returns the `prompt`, the first tokens of a document, and the `text` that the model generates after it."""
        texts = batch.inputs.tokens.split(list(batch.inputs.lengths))[:n]
        prompts = [text[:_PROMPT_TOKENS].tolist() for text in texts if len(text)]
        # No token fits after a prompt of the model's maximum length.
        prompts = [prompt for prompt in prompts if len(prompt) <= self.writer().model.longest_prompt]
        continuations = self.writer().write(prompts, SAMPLING, self.seed)
        return [
            {"prompt": self.tokenizer.decode(prompt), "text": self.tokenizer.continuation(prompt, ids)}
            for prompt, ids in zip(prompts, continuations, strict=True)
        ]


class SequenceAutoencoder(CausalLanguageModel):
    """The sequence autoencoder of Dai and Le, "Semi-supervised Sequence Learning", NeurIPS 2015: the model reads a
    text, and writes it again after the end-of-text token."""

    term = "sequence_autoencoder"
    inspector_class = RewrittenInspector

    def examples(self, data: SplitData, max_length: int) -> RewrittenTexts:
        """Returns the examples. A text has at most half of max_length, because it is read and written."""
        return RewrittenTexts(self.tokenizer, data, max_length)

    def ends(self, examples: TextWindows) -> int:
        return len(examples.plan(0))

    def scorer(self, data: SplitData, examples: Examples, predictors: Mapping[str, Predictor]) -> PerplexityScorer:
        """Returns a scorer without perplexity per word and bits per byte: the predicted text has been read."""
        return PerplexityScorer(self, predictors)

    def writer(self) -> ReplyWriter:
        return ReplyWriter(self.backbone, self.lm, self.tokenizer)

    def samples(self, batch: Batch, n: int) -> list[JsonObject]:
        """Returns the `prompt`, which is the text, and the `text` that the model writes after it, at most 80 tokens."""
        examples = batch.inputs.tokens.split(list(batch.inputs.lengths))[:n]
        prompts = [example[: len(example) // 2 + 1].tolist() for example in examples]
        written = self.writer().write(prompts, GenerationConfig(max_new_tokens=SAMPLING.max_new_tokens), self.seed)
        return [
            {"prompt": self.tokenizer.decode(prompt[:-1]), "text": self.tokenizer.decode(ids)}
            for prompt, ids in zip(prompts, written, strict=True)
        ]
