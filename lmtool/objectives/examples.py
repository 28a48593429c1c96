"""What an objective makes of a token store: a plan of each epoch, and packed batches of it.

Shape letters: E examples of an epoch, N of them in a batch, T their tokens, M predicted places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lmtool.data.assembly import Assembled, Template, assemble, ragged_ranges
from lmtool.data.formats import text_format
from lmtool.data.plan import Plan
from lmtool.data.store import TokenStore
from lmtool.errors import UserError
from lmtool.objectives.configs import MlmConfig
from lmtool.objectives.masking import Vocabulary, mask_tokens
from lmtool.objectives.pairs import sentence_pairs
from lmtool.objectives.windows import Stream, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target


def _room(max_length: int, overhead: int, texts: int) -> int:
    """Tokens of text that fit; raises UserError where a text would have fewer than two."""
    room = max_length - overhead
    if room < 2 * texts:
        raise UserError(
            f"max_length={max_length} leaves {max(room, 0)} tokens of text beside {overhead} special ones",
            f"max_length={overhead + 2 * texts} or more",
        )
    return room


def _some(plan: Plan, split: str) -> Plan:
    if not len(plan.lengths):
        raise UserError(
            f"the {split} text has nothing to learn from: no window of two tokens", "give more text with data.path="
        )
    return plan


def _numbers(examples_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples and parts of a batch: no example has parts here."""
    examples_N = np.asarray(examples_N, dtype=np.int64)
    return torch.from_numpy(examples_N), torch.zeros(len(examples_N), dtype=torch.int32)


def _facts(plan: Plan, store: TokenStore, split: str) -> dict[str, Any]:
    lengths = plan.lengths
    return {
        "split": split,
        "documents": int(len(store.document_offsets) - 1),
        "store_tokens": int(store.document_offsets[-1]),
        "examples": len(lengths),
        "tokens": int(lengths.sum()),
        "mean_length": float(lengths.mean()),
        "longest": int(lengths.max()),
    }


class MaskedWindows:
    """Masked language modelling over windows of text: `[CLS] text [SEP]` in the backbone's format.

    joined: windows of one running stream, with the separator after each document (RoBERTa's full sentences);
    separate: of each document by itself.
    """

    def __init__(
        self, config: MlmConfig, tokenizer: Tokenizer, format_name: str, store: TokenStore,
        max_length: int, documents: str, split: str, seed: int,
    ):  # fmt: skip
        self.config, self.store, self.split, self.seed = config, store, split, seed
        self.vocabulary = Vocabulary.of(tokenizer)
        self.template = Template.of(text_format(format_name, tokenizer), 1)
        joined = documents == "joined"
        self.stream = Stream(store.tokens, store.document_offsets, tokenizer.role("sep") if joined else None)
        rows = windows(self.stream, _room(max_length, self.template.overhead, 1), joined)
        self._plan = _some(Plan(rows, rows["length"].astype(np.int64) + self.template.overhead), split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def assemble(self, rows: np.ndarray) -> Assembled:
        """The windows as they are before masking."""
        return assemble(self.template, [(self.stream.read(rows["start"], rows["length"]), rows["length"])])

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.assemble(rows)
        masked = mask_tokens(
            self.config, self.vocabulary, whole.tokens, whole.lengths, np.asarray(examples), self.seed, epoch
        )
        target = Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))
        return Batch(whole.packed(masked.tokens), {"mlm": target}, *_numbers(examples))

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, and the share of tokens that is predicted."""
        return {**_facts(self._plan, self.store, self.split), "predicted_fraction": self.config.probability}


class MaskedPairs:
    """Masked language modelling with next-sentence prediction: `[CLS] a [SEP] b [SEP]`, drawn anew each epoch."""

    def __init__(
        self, config: MlmConfig, tokenizer: Tokenizer, format_name: str, store: TokenStore,
        max_length: int, split: str, seed: int,
    ):  # fmt: skip
        self.config, self.store, self.split, self.seed = config, store, split, seed
        self.vocabulary = Vocabulary.of(tokenizer)
        self.template = Template.of(text_format(format_name, tokenizer), 2)
        self.limit = _room(max_length, self.template.overhead, 2)
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        drawn = epoch % self.config.duplicates if self.config.masking == "static" else epoch
        if drawn not in self._plans:
            rows = sentence_pairs(
                self.store.sentence_offsets, self.store.document_sentences, self.limit,
                self.config.short_sequence_probability, self.seed, drawn,
            )  # fmt: skip
            lengths = rows["a_length"].astype(np.int64) + rows["b_length"] + self.template.overhead
            # The epoch before and the one ahead: a prefetching loader looks over the border.
            self._plans = dict([*self._plans.items()][-1:]) | {drawn: Plan(rows, lengths)}
        return self._plans[drawn]

    def assemble(self, rows: np.ndarray) -> Assembled:
        """The pairs as they are before masking."""
        texts = []
        for side in ("a", "b"):
            lengths = rows[f"{side}_length"]
            ids = np.asarray(self.store.tokens[ragged_ranges(rows[f"{side}_start"], lengths)], dtype=np.int64)
            texts.append((ids, lengths))
        return assemble(self.template, texts)

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.assemble(rows)
        masked = mask_tokens(
            self.config, self.vocabulary, whole.tokens, whole.lengths, np.asarray(examples), self.seed, epoch
        )
        targets = {
            "mlm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at)),
            "nsp": Target(torch.from_numpy(rows["random"].astype(np.int64))),
        }
        return Batch(whole.packed(masked.tokens), targets, *_numbers(examples))

    def facts(self) -> dict[str, Any]:
        """Size of the first epoch, and the shares of tokens predicted and of pairs with a random second segment."""
        plan = self.plan(0)
        shares = {
            "predicted_fraction": self.config.probability,
            "random_next_fraction": float(plan.rows["random"].mean()),
        }
        return {**_facts(plan, self.store, self.split), **shares}


class CausalWindows:
    """Next-token prediction over the stream of documents, each closed by the end-of-text token.

    Consecutive windows share one token, the last of one being the first of the next, so that every token but the
    first of a document (separate) or of the whole stream (joined) is predicted exactly once.
    """

    def __init__(self, tokenizer: Tokenizer, store: TokenStore, max_length: int, documents: str, split: str):
        self.store, self.split = store, split
        self.stream = Stream(store.tokens, store.document_offsets, tokenizer.role("eos"))
        rows = windows(self.stream, _room(max_length, 0, 1), documents == "joined", overlap=1)
        self._plan = _some(Plan(rows, rows["length"].astype(np.int64)), split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        lengths = rows["length"].astype(np.int64)
        tokens = self.stream.read(rows["start"], lengths)
        predicts = np.ones(len(tokens), dtype=bool)
        predicts[np.cumsum(lengths) - 1] = False
        at = np.flatnonzero(predicts)
        packed = Assembled(tokens, lengths, {}).packed()
        return Batch(
            packed, {"clm": Target(torch.from_numpy(tokens[at + 1]), at=torch.from_numpy(at))}, *_numbers(examples)
        )

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, and the share of tokens that predict."""
        facts = _facts(self._plan, self.store, self.split)
        return {**facts, "predicted_fraction": 1 - facts["examples"] / facts["tokens"]}
