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
from lmtool.objectives.configs import MaskingConfig, PairsConfig, RtdConfig, SpanConfig, TokenMaskingConfig
from lmtool.objectives.corruption.masking import Masked, Vocabulary, mask_tokens
from lmtool.objectives.corruption.spans import MaskedSpans, mask_spans
from lmtool.objectives.examples.pairs import sentence_pairs
from lmtool.objectives.examples.windows import Stream, windows
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import Batch, Target

# The second segment is a random one half of the time, and wherever a document has run out of sentences: together 52%
# for documents of a hundred, 60% for those of five and 68% for those of two.
_MOSTLY_RANDOM = 0.7


def room_for(max_length: int, overhead: int, texts: int) -> int:
    """Tokens of text that fit; raises UserError where a text would have fewer than two."""
    room = max_length - overhead
    if room < 2 * texts:
        raise UserError(
            f"max_length={max_length} leaves {max(room, 0)} tokens of text beside {overhead} special ones",
            f"max_length={overhead + 2 * texts} or more",
        )
    return room


def some(plan: Plan, split: str) -> Plan:
    if not len(plan.lengths):
        raise UserError(
            f"the {split} text has nothing to learn from: no window of two tokens", "give more text with data.path="
        )
    return plan


def numbers_of(examples_N: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples and parts of a batch: no example has parts here."""
    examples_N = np.asarray(examples_N, dtype=np.int64)
    return torch.from_numpy(examples_N), torch.zeros(len(examples_N), dtype=torch.int32)


def plan_facts(plan: Plan, store: TokenStore, split: str) -> dict[str, Any]:
    lengths = plan.lengths
    return {
        "split": split,
        "documents": int(len(store.document_offsets) - 1),
        "documents_without_tokens": int(store.facts.get("documents_without_tokens", 0)),
        "store_tokens": int(store.document_offsets[-1]),
        "examples": len(lengths),
        "tokens": int(lengths.sum()),
        "mean_length": float(lengths.mean()),
        "longest": int(lengths.max()),
    }


def corrupt(
    config: MaskingConfig, vocabulary: Vocabulary, whole: Assembled, examples_N: np.ndarray, seed: int, epoch: int
) -> Masked:
    """Mask the tokens of assembled examples, in the way the configuration says."""
    examples_N = np.asarray(examples_N)
    if isinstance(config, SpanConfig):
        return mask_spans(config, vocabulary, whole.tokens, whole.lengths, examples_N, seed, epoch)
    if isinstance(config, TokenMaskingConfig):
        return mask_tokens(config, vocabulary, whole.tokens, whole.lengths, examples_N, seed, epoch)
    raise TypeError(f"{type(config).__name__} says nothing of which tokens are masked")


def masked_targets(
    config: MaskingConfig, vocabulary: Vocabulary, whole: Assembled, masked: Masked
) -> dict[str, Target]:
    """`mlm`: every masked place. `sbo`, for spans with their boundary objective: the places of the spans whose
    neighbours are text, each with the flat indices of these neighbours. `rtd`: labels are made in the step.
    `replace_mlm` is the masked places again, `all_tokens_mlm` all that could be masked."""
    targets = {"mlm": Target(torch.from_numpy(masked.labels), at=torch.from_numpy(masked.at))}
    if isinstance(config, RtdConfig):
        if config.variant == "all_tokens_mlm":
            text = np.flatnonzero(~vocabulary.special[whole.tokens])
            targets[config.variant] = Target(torch.from_numpy(whole.tokens[text]), at=torch.from_numpy(text))
        else:
            rtd = {"electra": Target(None), "electra_15": Target(None, at=targets["mlm"].at)}
            targets |= {"rtd": rtd[config.variant]} if config.variant in rtd else {config.variant: targets["mlm"]}
    if isinstance(config, SpanConfig) and isinstance(masked, MaskedSpans) and config.boundary:
        borders = masked.spans[masked.span_of] + np.array([-1, 1])
        within = masked.at - borders[:, 0] - 1
        kept = masked.bordered[masked.span_of] & (within < config.boundary_targets)
        labels, at, span = (torch.from_numpy(values[kept]) for values in (masked.labels, masked.at, borders))
        targets["sbo"] = Target(labels, at=at, span=span)
    return targets


class MaskedWindows:
    """Masked language modelling over windows of text: `[CLS] text [SEP]` in the backbone's format.

    joined: windows of one running stream, with the separator after each document (RoBERTa's full sentences);
    separate: of each document by itself.
    """

    def __init__(
        self, config: MaskingConfig, tokenizer: Tokenizer, format_name: str, store: TokenStore,
        max_length: int, documents: str, split: str, seed: int,
    ):  # fmt: skip
        self.config, self.store, self.split, self.seed = config, store, split, seed
        self.vocabulary = Vocabulary.of(tokenizer)
        self.template = Template.of(text_format(format_name, tokenizer), 1)
        joined = documents == "joined"
        self.stream = Stream(store.tokens, store.document_offsets, tokenizer.role("sep") if joined else None)
        rows = windows(self.stream, room_for(max_length, self.template.overhead, 1), joined)
        self._plan = some(Plan(rows, rows["length"].astype(np.int64) + self.template.overhead), split)

    def plan(self, epoch: int) -> Plan:
        return self._plan

    def assemble(self, rows: np.ndarray) -> Assembled:
        """The windows as they are before masking."""
        return assemble(self.template, [(self.stream.read(rows["start"], rows["length"]), rows["length"])])

    def batch(self, rows: np.ndarray, examples: np.ndarray, epoch: int) -> Batch:
        whole = self.assemble(rows)
        masked = corrupt(self.config, self.vocabulary, whole, examples, self.seed, epoch)
        return Batch(
            whole.packed(masked.tokens),
            masked_targets(self.config, self.vocabulary, whole, masked),
            *numbers_of(examples),
        )

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, and the share of tokens that is predicted."""
        return {**plan_facts(self._plan, self.store, self.split), "predicted_fraction": self.config.predicted_fraction}


class MaskedPairs:
    """Masked language modelling with a loss over pairs of segments: `[CLS] a [SEP] b [SEP]`, drawn anew each epoch."""

    def __init__(
        self, config: PairsConfig, tokenizer: Tokenizer, format_name: str, store: TokenStore,
        max_length: int, split: str, seed: int,
    ):  # fmt: skip
        self.config, self.store, self.split, self.seed = config, store, split, seed
        self.vocabulary = Vocabulary.of(tokenizer)
        self.template = Template.of(text_format(format_name, tokenizer), 2)
        self.limit = room_for(max_length, self.template.overhead, 2)
        self._plans: dict[int, Plan] = {}

    def plan(self, epoch: int) -> Plan:
        drawn = self.config.drawn_epoch(epoch)
        if drawn not in self._plans:
            self._require_choices()
            rows = sentence_pairs(
                self.store.sentence_offsets, self.store.document_sentences, self.limit,
                self.config.short_sequence_probability, self.seed, drawn,
                "sop" if self.config.pairs == "sop" else "nsp", self.config.pair_of == "sentences",
            )  # fmt: skip
            lengths = rows["a_length"].astype(np.int64) + rows["b_length"] + self.template.overhead
            plan = some(Plan(rows, lengths), self.split)
            # The epoch before and the one ahead: a prefetching loader looks over the border.
            self._plans = dict([*self._plans.items()][-1:]) | {drawn: plan}
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
        masked = corrupt(self.config, self.vocabulary, whole, examples, self.seed, epoch)
        targets = masked_targets(self.config, self.vocabulary, whole, masked)
        targets[self.config.pairs] = Target(torch.from_numpy(rows["label"].astype(np.int64)))
        return Batch(whole.packed(masked.tokens), targets, *numbers_of(examples))

    def facts(self) -> dict[str, Any]:
        """Size of the first epoch, and the shares of tokens predicted and of pairs with a random (nsp) or an earlier
        (sop) second segment."""
        plan = self.plan(0)
        share = float(plan.rows["label"].mean())
        facts = {**plan_facts(plan, self.store, self.split), "predicted_fraction": self.config.predicted_fraction}
        if self.config.pairs != "nsp":
            return {**facts, "swapped_fraction": share}
        lone = self._lone
        facts |= {"random_next_fraction": share, "documents_of_one_sentence": int(lone.sum())}
        if share > _MOSTLY_RANDOM:
            facts["warnings"] = [
                f"{share:.0%} of the second segments are random ones, where next-sentence prediction means half: "
                f"{lone.mean():.0%} of the {self.split} documents are one sentence, which none follows; "
                "data.document=file makes longer ones, objective.pairs=none does without"
            ]
        return facts

    @property
    def _lone(self) -> np.ndarray:
        """(D,) bool: documents of one sentence, whose next one can only be random."""
        return np.diff(self.store.document_sentences) == 1

    def _require_choices(self) -> None:
        """UserError where next-sentence prediction has nothing to tell apart."""
        hint = "or take objective.pairs=none or sop"
        if self.config.pairs == "nsp" and len(self.store) < 2:
            more = "" if self.split == "train" else ", data.validation_fraction= a larger share, or data.validation="
            raise UserError(
                f"next-sentence prediction needs two documents with text; the {self.split} text is one",
                f"split the text into more of them (data.document=block or line){more}, {hint}",
            )
        if self.config.pairs == "nsp" and self.split == "train" and self._lone.all():
            raise UserError(
                "next-sentence prediction has nothing to learn: no document has two sentences, so every second segment "
                "is a random one",
                f"make longer documents (data.document=block or file), {hint}",
            )


class CausalWindows:
    """Next-token prediction over the stream of documents, each closed by the end-of-text token.

    Consecutive windows share one token, the last of one being the first of the next, so that every token but the
    first of a document (separate) or of the whole stream (joined) is predicted exactly once.
    """

    def __init__(self, tokenizer: Tokenizer, store: TokenStore, max_length: int, documents: str, split: str):
        self.store, self.split = store, split
        self.stream = Stream(store.tokens, store.document_offsets, tokenizer.role("eos"))
        rows = windows(self.stream, room_for(max_length, 0, 1), documents == "joined", overlap=1)
        self._plan = some(Plan(rows, rows["length"].astype(np.int64)), split)

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
            packed, {"clm": Target(torch.from_numpy(tokens[at + 1]), at=torch.from_numpy(at))}, *numbers_of(examples)
        )

    def facts(self) -> dict[str, Any]:
        """Size of an epoch, and the share of tokens that predict."""
        facts = plan_facts(self._plan, self.store, self.split)
        return {**facts, "predicted_fraction": 1 - facts["examples"] / facts["tokens"]}
