"""GloVe: learns word vectors from counts of words that occur together.

Pennington, Socher, Manning, "GloVe: Global Vectors for Word Representation", EMNLP 2014. The counts are sums of
1 / distance within a window of a document. The loss of a pair is weight * (score - log count)^2 (equation 8), and the
vector of a word is the sum of its two vectors (section 4.2). The paper trains with AdaGrad at a rate of 0.05.

Shape letters: N pairs of a batch, E pairs of words that occur together, T tokens of a chunk of text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.data.examples import Plan, SplitData, cached_plan
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.learners.baseline import WeightedValue
from lmtool.learners.model import labels_of
from lmtool.models.base import Backbone
from lmtool.models.heads.base import TokenLogits
from lmtool.models.heads.sampled import CooccurrenceHead
from lmtool.objectives.checks.language import CooccurrencesInspector
from lmtool.objectives.configs import GloveConfig
from lmtool.objectives.examples.windows import FixedPlan, Stream, numbers_of
from lmtool.objectives.skip_gram import WordVectorLearner
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Packed, Scores, StepOutput, Target


class Glove(WordVectorLearner):
    """GloVe, with the term `glove`: the mean over pairs of the weighted squared errors."""

    config: GloveConfig
    inspector_class = CooccurrencesInspector

    def __init__(self, config: GloveConfig, backbone: Backbone, tokenizer: Tokenizer, seed: int):
        super().__init__(config, backbone, tokenizer, seed)
        self.loss_weights = {"glove": 1.0}
        self.add_head("glove", CooccurrenceHead(backbone.config.vocab_size, backbone.hidden_size))
        self._total: float | None = None

    @property
    def _head(self) -> CooccurrenceHead:
        return cast(CooccurrenceHead, self.heads["glove"])

    def examples(self, data: SplitData, max_length: int) -> Cooccurrences:
        """The counts of held-out text are scaled to the size of the training text, if that is known."""
        saved_total, special = self._head.total, self.tokenizer.special_ids
        arguments = self.config, data.text, data.split, special, self.tokenizer.vocab_size
        if data.split != "train":
            total = self._total
            if total is None:
                total = 0.0 if saved_total.is_meta else float(saved_total[0])
            return Cooccurrences(*arguments, training_total=total)
        examples = Cooccurrences(*arguments)
        self._total = examples.total
        if not saved_total.is_meta:
            saved_total[0] = examples.total
        return examples

    def predictors(self, train: SplitData, examples: Cooccurrences) -> dict[str, WeightedValue]:
        """Returns the predictor of one count for all pairs."""
        counts = examples.plan(0).rows["count"]
        weights = examples.weights(counts)
        return {"glove": WeightedValue("one count", float((weights * np.log(counts)).sum() / weights.sum()))}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"glove": float(len(labels_of(batch, "glove")))}

    def forward(self, batch: Batch, step: int) -> StepOutput:
        losses_N, _ = self._losses(batch)
        return StepOutput({"glove": losses_N.sum()}, self.loss_weights)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the loss (N,) and the score (N,) of each pair."""
        labels_N2 = labels_of(batch, "glove")
        scores_N = self._head(self.backbone(batch.inputs), batch.inputs.tokens.view(-1, 2))
        return labels_N2[:, 1] * (scores_N - labels_N2[:, 0]) ** 2, scores_N

    @torch.no_grad()
    def score(self, batch: Batch) -> dict[str, Scores]:
        losses_N, scores_N = self._losses(batch)
        documents_N = torch.arange(len(losses_N), device=losses_N.device)
        return {"glove": Scores(losses_N.float(), labels_of(batch, "glove"), scores_N, documents_N)}

    def interpret_logits(self, head: str, logits: Tensor | TokenLogits, batch: Batch) -> None:
        """Scores of pairs are not logits of classes."""
        return None


COOCCURRENCE = np.dtype([("word", "i4"), ("context", "i4"), ("count", "f8")])
"""The record of a pair of words, and the sum of 1 / distance over the places where they occur together."""
# Number of tokens read at a time, and of counts that are summed at once.
_CHUNK, _PENDING = 1 << 20, 1 << 23


class Cooccurrences(FixedPlan):
    """All pairs of words that occur together in a text, each an example of two tokens in both orders. The plan is the
    same in every epoch, and does not depend on max_length.

    special: the ids of special tokens, which are removed from the text before distances are measured. training_total:
    the sum of the counts in the training text; 0 if it is not known, or for the training text itself. Raises UserError
    if no words occur together.
    """

    def __init__(
        self,
        config: GloveConfig,
        store: TokenStore,
        split: str,
        special: Collection[int],
        vocab_size: int,
        training_total: float = 0.0,
    ):
        self.config, self.special = config, np.array(sorted(special))
        self.stream = Stream.from_store(store, None)
        plan = cached_plan(cooccurrences, self.stream, config.window, self.special, vocab_size)
        if not len(plan):
            raise UserError(
                f"the {split} text has no two words of the vocabulary in a document",
                "use a tokenizer that was trained on such text, or use more text",
            )
        super().__init__(store, split, plan)
        self.total = float(plan.rows["count"].sum())
        # Held-out counts are scaled to the size of the training text; their weights are not, since rare counts of a
        # small text are as uncertain as they are small.
        self.scale = training_total / self.total if training_total else 1.0

    @property
    def predicted_fraction(self) -> float:
        return self.config.predicted_fraction

    def metadata(self) -> JsonObject:
        return {**super().metadata(), "cooccurrences": self.total}

    def document_lengths(self) -> np.ndarray:
        """Returns the number of words of each document."""
        count = len(self.stream.offsets) - 1
        lengths_D = np.zeros(count, dtype=np.int64)
        for tokens_T, document_T in _chunks(self.stream):
            lengths_D += np.bincount(document_T[~np.isin(tokens_T, self.special)], minlength=count)
        return lengths_D

    def weights(self, counts: np.ndarray) -> np.ndarray:
        """Returns the weights of counts (equation 9)."""
        weights: np.ndarray = np.minimum(counts / self.config.cap, 1.0) ** self.config.power
        return weights

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        """Returns the pairs as documents of two tokens. Their labels (N, 2) are the log of the count and the weight."""
        tokens = np.stack([rows["word"], rows["context"]], 1).astype(np.int64)
        numbers_N2 = np.stack([np.log(rows["count"] * self.scale), self.weights(rows["count"])], 1)
        labels = numbers_N2.astype(np.float32)
        targets = {"glove": Target(torch.from_numpy(labels))}
        return Batch(Packed(torch.from_numpy(tokens.reshape(-1)), (2,) * len(rows)), targets, *numbers_of(examples))


def cooccurrences(stream: Stream, window: int, special: np.ndarray, vocab_size: int) -> Plan:
    """Counts the pairs of words of a text that are at most `window` words apart in a document: a pair at distance d
    adds 1 / d in both orders. special: the ids that are removed from the text. vocab_size: the number of ids. Returns
    the (E,) records, sorted."""
    keys, counts = np.empty(0, dtype=np.int64), np.empty(0)
    pending: list[tuple[np.ndarray, np.ndarray]] = []
    # The last words of the previous chunk, and the documents in which they are.
    last_words = last_documents = np.empty(0, dtype=np.int64)
    for tokens_T, document_T in _chunks(stream):
        regular = ~np.isin(tokens_T, special)
        words = np.concatenate([last_words, tokens_T[regular]])
        documents = np.concatenate([last_documents, document_T[regular]])
        for distance in range(1, window + 1):
            right = np.arange(max(len(last_words), distance), len(words))
            right = right[documents[right] == documents[right - distance]]
            pairs, occurrences = np.unique(words[right - distance] * vocab_size + words[right], return_counts=True)
            pending.append((pairs, occurrences / distance))
        last_words, last_documents = words[-window:], documents[-window:]
        if sum(len(pairs) for pairs, _ in pending) > max(len(keys), _PENDING):
            keys, counts = _summed([(keys, counts), *pending])
            pending = []
    keys, counts = _summed([(keys, counts), *pending])
    first, second = np.divmod(keys, vocab_size)
    keys, counts = _summed([(keys, counts), (second * vocab_size + first, counts)])
    rows = np.empty(len(keys), dtype=COOCCURRENCE)
    rows["word"], rows["context"] = np.divmod(keys, vocab_size)
    rows["count"] = counts
    return Plan(rows, np.full(len(rows), 2, dtype=np.int64))


def _chunks(stream: Stream) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the tokens (T,) of consecutive parts of the text, and the document of each."""
    for start in range(int(stream.offsets[0]), int(stream.offsets[-1]), _CHUNK):
        positions = np.arange(start, min(start + _CHUNK, int(stream.offsets[-1])))
        tokens_T = np.asarray(stream.tokens[positions[0] : positions[-1] + 1], dtype=np.int64)
        yield tokens_T, np.searchsorted(stream.offsets, positions, side="right") - 1


def _summed(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct keys of several arrays of keys and counts, sorted, and the sum of the counts of each key."""
    keys, index = np.unique(np.concatenate([part for part, _ in parts]), return_inverse=True)
    return keys, np.bincount(index, np.concatenate([counts for _, counts in parts]), len(keys))
