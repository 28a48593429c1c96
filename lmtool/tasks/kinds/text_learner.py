"""What learns to write texts: the target of a row, by teacher forcing, over encoder-decoders and over decoders, which
read the source in front of it.

Shape letters: N documents of a batch, T their tokens, M tokens that are predicted, H hidden width.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lmtool import streams
from lmtool.data.split import Rows, SplitData
from lmtool.generation.configs import GenerationConfig
from lmtool.generation.decoding import Answer, Continuation, Decoding
from lmtool.heads.lm import LMHead, lm_head
from lmtool.learners.baseline import ConstantPredictor, token_counts
from lmtool.learners.targets import places_of
from lmtool.learners.writing import Writer, writer_of
from lmtool.models.base import Backbone, Decoder
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.tasks.configs import Seq2SeqConfig
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.inspection import TextPairInspector
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.kinds.scheduled_sampling import read_step_by_step, share_of_truth
from lmtool.tasks.kinds.text_pairs import TextPairs
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput, send


class TextLearner(TaskLearner):
    """The one term is the cross entropy of every token of the target, its end too."""

    def __init__(self, kind: TaskKind, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(kind, backbone, tokenizer, seed)
        # The pretrained one, where there is one: a target is text like any other.
        self.add_head("lm", lm_head(backbone))

    @property
    @abstractmethod
    def writing(self) -> Seq2SeqConfig:
        """How its texts are read, learned and written."""

    @property
    def _lm(self) -> LMHead:
        return cast(LMHead, self.heads["lm"])

    @property
    def _table(self) -> Tensor:
        return self.backbone.embed.token.weight

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest target that the backbone reads."""
        backbone = self.backbone
        return backbone.longest_answer if isinstance(backbone, EncoderDecoder) else backbone.longest_text

    def pairs_of(self, rows: Rows, max_length: int, split: str) -> TextPairs:
        """Rows of sources and targets as this backbone reads them."""
        reads = self.writing, rows, self.tokenizer, self.backbone.config
        return TextPairs(*reads, max_length, split, self.longest_answer)

    def inspector(self, examples: TextPairs, max_length: int) -> TextPairInspector:
        return TextPairInspector(self, examples, max_length)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {self.term: float(len(self.labels(batch)))}

    def outputs(self, batch: Batch, step: int) -> Tensor:
        """(M, H) hidden states at the places that predict."""
        read_M = places_of(batch, self.term) if batch.outputs is None else None
        return self.hidden_of(batch, self.draws(batch, step), read_M)

    def forward(self, batch: Batch, step: int) -> StepOutput:
        truth = share_of_truth(self.writing.scheduled_sampling, step)
        if self.training and truth < 1.0:
            batch = self._with_predictions(batch, step, truth)
        labels = self.labels(batch)
        total = self._lm.loss_sum(self.outputs(batch, step), self._table, labels, self.writing.label_smoothing)
        return StepOutput({self.term: total}, self.weights)

    @torch.no_grad()
    def _with_predictions(self, batch: Batch, step: int, truth: float) -> Batch:
        """The batch with own predictions, the best token each, in the place of some true tokens that are read. truth:
        the share that stays."""
        host = batch.host
        packed = host.inputs if host.outputs is None else host.outputs
        # Token m of the targets is read one place behind the one that predicts it, unless it is the text's last one.
        at_M = places_of(host, self.term)
        documents_M = packed.documents[at_M]
        ends_N = torch.tensor([start + length for start, length in zip(packed.starts, packed.lengths, strict=True)])
        read_M = at_M + 1 < ends_N[documents_M]
        uniform = streams.uniform_at(
            self.seed, "sample", step, host.examples[documents_M].numpy(), packed.positions[at_M].numpy()
        )
        own_M = read_M & (torch.from_numpy(uniform) >= truth)
        side = batch.inputs if batch.outputs is None else batch.outputs
        tokens_T, device = side.tokens.clone(), side.tokens.device
        self.eval()
        try:
            if self.writing.scheduled_sampling.predictions == "step_by_step":
                own_T = torch.zeros(len(tokens_T), dtype=torch.bool)
                own_T[at_M[own_M] + 1] = True
                tokens_T = send(self._stepwise(host, packed, own_T), device)
            else:
                _, best_M = self._lm.scores(self.outputs(batch, step), self._table, self.labels(batch))
                chosen = send(own_M.nonzero()[:, 0], device)
                tokens_T[send(at_M, device)[chosen] + 1] = best_M[chosen]
        finally:
            self.train()
        changed = replace(side, tokens=tokens_T)
        return replace(batch, inputs=changed) if batch.outputs is None else replace(batch, outputs=changed)

    def _stepwise(self, host: Batch, packed: Packed, own_T: Tensor) -> Tensor:
        """(T,) the tokens of the side that is written, on the host; those of `own_T` as the model predicts them."""
        at_M = places_of(host, self.term)
        first_N = torch.full((len(packed.lengths),), len(packed.tokens)).scatter_reduce(
            0, packed.documents[at_M], at_M, "amin"
        )
        begun = [int(first) + 1 - start for first, start in zip(first_N, packed.starts, strict=True)]
        texts, owned = packed.tokens.split(packed.lengths), own_T.split(packed.lengths)
        starts = [text[:count].tolist() for text, count in zip(texts, begun, strict=True)]
        more = [text[count:].tolist() for text, count in zip(texts, begun, strict=True)]
        rows, longest = self.backbone.config.vocab_size, max(packed.lengths)
        decoding: Decoding
        if isinstance(self.backbone, EncoderDecoder):
            inputs = [text.tolist() for text in host.inputs.tokens.split(host.inputs.lengths)]
            decoding = Answer(self.backbone, self._lm, rows, inputs, starts[0][0], longest)
        else:
            assert isinstance(self.backbone, Decoder)
            decoding = Continuation(self.backbone, self._lm, rows, starts, longest, bool(packed.prefixes))
        own = [flags[count:].tolist() for flags, count in zip(owned, begun, strict=True)]
        read = read_step_by_step(decoding, more, own)
        return torch.tensor([token for pair in zip(starts, read, strict=True) for part in pair for token in part])

    def scores(self, outputs: Tensor, batch: Batch) -> Scores:
        side = batch.inputs if batch.outputs is None else batch.outputs
        labels = self.labels(batch)
        each, best = self._lm.scores(outputs, self._table, labels)
        return Scores(each, labels, best, side.documents[places_of(batch, self.term)])

    def predictors(self, train: SplitData, examples: TextPairs) -> dict[str, ConstantPredictor]:
        """Unigrams of the training targets, with the special tokens around them."""
        assert examples.targets is not None
        counts = token_counts(examples.targets.ids, self.tokenizer.vocab_size)
        for token in (
            examples.template.pieces[-1] if not examples.two_stacks else np.concatenate(examples.template.pieces)
        ):
            counts[token] += len(examples.rows)
        return {self.term: ConstantPredictor.of_counts("unigram", counts)}

    def writes(self) -> GenerationConfig:
        return self.writing.generation

    def label_of(self, text: str) -> Any:
        """Of a text that is learned the one right text."""
        return (text,) if text.strip() else None

    def samples(self, batch: Batch, n: int) -> list[dict[str, Any]]:
        return []  # predictions.jsonl has them

    def writer(self) -> Writer:
        """Reads a source, as in training."""
        section = {"prefix": self.writing.prefix, "mask": self.writing.mask}
        return writer_of(self.backbone, self._lm, self.tokenizer, section)
