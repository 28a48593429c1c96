"""The transformers side of a comparison with lmtool, a class a kind of task: how its example recipes make features,
batches and a loss of the rows that lmtool reads, and where lmtool expects the outputs.

`published.py` trains these with the Trainer, `same_batches.py` on the batches of lmtool.

Shape letters: N documents of a batch, L tokens of the longest, T real tokens, M words, C outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lmtool.resolver.schema.run import FinetuneConfig
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.training.configs import AdamWConfig, LinearConfig
from lmtool.training.schedules import warmup_steps
from lmtool.types import Batch

IGNORED = -100  # the label of a token that predicts nothing, as transformers has it
UNKNOWN_WORD = "\U0002a6d6"  # a rare character: one unknown token


class SequencePeer:
    """run_glue.py: a class or a value of a text or a pair, through the pooler.

    words: what lmtool is given so that both sides do the same. examples, max_length: of a comparison. auto: the class
    of the model. head: its new layer.
    """

    words: ClassVar[tuple[str, ...]] = ("task.pooling=first",)
    examples: ClassVar[int] = 2000
    max_length: ClassVar[int] = 128
    auto: ClassVar[str] = "AutoModelForSequenceClassification"
    head: ClassVar[str] = "classifier"

    def __init__(self, config: FinetuneConfig):
        from transformers import AutoTokenizer

        self.config, self.task = config, config.task
        self.checkpoint = str(config.checkpoint)
        self.tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)

    @property
    def outputs(self) -> int:
        """Columns of the head."""
        return len(getattr(self.task, "labels", None) or (0,))

    def model(self) -> Any:
        """The published weights under a new head."""
        import transformers

        return getattr(transformers, self.auto).from_pretrained(self.checkpoint, num_labels=self.outputs)

    @cached_property
    def collate(self) -> Any:
        """Features to a batch, padded to its longest row."""
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(self.tokenizer)

    def features(self, rows: Any) -> list[dict[str, Any]]:
        """What the Trainer reads of labelled rows: all that the tokenizer makes of each, and its target."""
        encoded = self.encoded(*rows.columns.values(), truncation=True)
        labels = rows.labels.astype(np.float32) if rows.labels.dtype.kind == "f" else rows.labels
        return listed_features({**encoded, "labels": labels.tolist()})

    def encoded(self, *texts: Any, **settings: Any) -> Any:
        """What the tokenizer makes of texts. What looks like a special token is text, as in lmtool."""
        return self.tokenizer(*texts, max_length=self.config.max_length, split_special_tokens=True, **settings)

    def loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """The mean loss of a batch, as the model has it."""
        return model(**inputs).loss

    def arranged(self, output: Any, inputs: dict[str, Tensor], batch: Batch, learner: TaskLearner) -> Tensor:
        """The model's logits as `learner.outputs` gives them: (N, C)."""
        return output.logits

    @staticmethod
    def comparable(outputs: Tensor, batch: Batch) -> Tensor:
        """Outputs as they are compared between the sides."""
        return outputs

    @staticmethod
    def targets(batch: Batch, term: str) -> list[Any]:
        """The targets of lmtool's batch, one of each document, as `target_of` gives them of features."""
        labels = batch.targets[term].labels
        assert labels is not None
        return labels.tolist()

    @staticmethod
    def target_of(feature: dict[str, Any]) -> Any:
        """What a feature is to learn."""
        return feature["labels"]


class TokenPeer(SequencePeer):
    """run_ner.py: a tag for each word, learned and predicted on its first piece (its label_all_tokens is off)."""

    words: ClassVar[tuple[str, ...]] = ("task.train_on=first",)
    # No sentence should be that long: the recipe cuts it, and lmtool reads it in windows.
    max_length: ClassVar[int] = 256
    auto: ClassVar[str] = "AutoModelForTokenClassification"

    @cached_property
    def collate(self) -> Any:
        from transformers import DataCollatorForTokenClassification

        return DataCollatorForTokenClassification(self.tokenizer)

    def features(self, rows: Any) -> list[dict[str, Any]]:
        (sentences,) = rows.columns.values()
        encoded = self.encoded(sentences, truncation=True, is_split_into_words=True)
        with_pieces = [set(encoded.word_ids(row)) for row in range(len(sentences))]
        if any(len(words - {None}) < len(own) for words, own in zip(with_pieces, sentences, strict=True)):
            # A word without pieces is an unknown token, as in lmtool: each word is to predict a tag.
            sentences = [
                [word if number in words else UNKNOWN_WORD for number, word in enumerate(own)]
                for words, own in zip(with_pieces, sentences, strict=True)
            ]
            encoded = self.encoded(sentences, truncation=True, is_split_into_words=True)
        labels = []
        for row, tags in enumerate(rows.labels):
            words = encoded.word_ids(row)
            first = [word is not None and word != before for word, before in zip(words, [None, *words], strict=False)]
            labels.append([tags[word] if here else IGNORED for word, here in zip(words, first, strict=True)])
        return listed_features({**encoded, "labels": labels})

    def arranged(self, output: Any, inputs: dict[str, Tensor], batch: Batch, learner: TaskLearner) -> Tensor:
        """(M, C) of the words."""
        at_M = batch.targets[learner.term].at
        assert at_M is not None
        return output.logits[inputs["attention_mask"].bool()][at_M]

    @staticmethod
    def targets(batch: Batch, term: str) -> list[Any]:
        """With the place of each tag in its sentence."""
        target = batch.targets[term]
        assert target.labels is not None and target.at is not None
        own: list[list[tuple[int, int]]] = [[] for _ in batch.inputs.lengths]
        document_M, place_M = batch.inputs.documents[target.at], batch.inputs.positions[target.at]
        for document, *pair in zip(document_M.tolist(), place_M.tolist(), target.labels.tolist(), strict=True):
            own[document].append(tuple(pair))
        return own

    @staticmethod
    def target_of(feature: dict[str, Any]) -> Any:
        return [(place, tag) for place, tag in enumerate(feature["labels"]) if tag != IGNORED]


class QuestionPeer(SequencePeer):
    """run_qa.py: the answer in windows of a context. Unlike the recipe's, its loss leaves padding out of the softmax
    over the places of a window, as the predictions of both do."""

    # Half of a window at most is shared in lmtool; 64 are less than that beside any question.
    stride: ClassVar[int] = 64
    # Windows are long: 1,000 questions are to be more than a few steps.
    words: ClassVar[tuple[str, ...]] = (f"task.stride={stride}", "batch_examples=8")
    examples: ClassVar[int] = 1000
    max_length: ClassVar[int] = 256
    auto: ClassVar[str] = "AutoModelForQuestionAnswering"
    head: ClassVar[str] = "qa_outputs"

    @property
    def outputs(self) -> int:
        return 2

    def features(self, rows: Any) -> list[dict[str, Any]]:
        questions, contexts = (rows.columns[name] for name in self.task.text)
        encoded = self.encoded(
            questions,
            contexts,
            truncation="only_second",
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        offsets, row_of = encoded.pop("offset_mapping"), encoded.pop("overflow_to_sample_mapping")
        spans = []
        for window, row in enumerate(row_of):
            sides, answer = encoded.sequence_ids(window), rows.labels[row][0]
            inside = [place for place, side in enumerate(sides) if side == 1]
            spans.append(answer_places(offsets[window], inside, answer.start, answer.start + len(answer.text)))
        starts, ends = zip(*spans, strict=True)
        return listed_features({**encoded, "start_positions": starts, "end_positions": ends})

    def loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        given = dict(inputs)
        labels = [given.pop("start_positions"), given.pop("end_positions")]
        output, padding = model(**given), inputs["attention_mask"] == 0
        sides = [side.float().masked_fill(padding, -torch.inf) for side in (output.start_logits, output.end_logits)]
        return sum(F.cross_entropy(*pair) for pair in zip(sides, labels, strict=True)) / 2  # type: ignore[return-value]

    def arranged(self, output: Any, inputs: dict[str, Tensor], batch: Batch, learner: TaskLearner) -> Tensor:
        """(T, 2) of the real tokens."""
        return torch.stack([output.start_logits, output.end_logits], -1)[inputs["attention_mask"].bool()]

    @staticmethod
    def comparable(outputs: Tensor, batch: Batch) -> Tensor:
        """Without the mean of each window. A softmax over its places does not see the head's bias, whose gradient is
        rounding alone, of which Adam makes whole steps."""
        windows = outputs.split(list(batch.inputs.lengths))
        return torch.cat([window - window.mean(0) for window in windows])

    @staticmethod
    def target_of(feature: dict[str, Any]) -> Any:
        return [feature["start_positions"], feature["end_positions"]]


PEERS: dict[str, type[SequencePeer]] = {
    "classification": SequencePeer,
    "regression": SequencePeer,
    "token_classification": TokenPeer,
    "extractive_qa": QuestionPeer,
}
"""By the kind of a task of lmtool."""


def listed_features(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Columns as one dictionary a row."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def answer_places(offsets: Sequence[tuple[int, int]], inside: Sequence[int], start: int, end: int) -> tuple[int, int]:
    """The first and last token of the characters [start, end) in a window; the class token twice where the window does
    not hold all of them. inside: the places of the context's tokens."""
    if not inside or offsets[inside[0]][0] > start or offsets[inside[-1]][1] < end:
        return 0, 0
    first = max(place for place in inside if offsets[place][0] <= start)
    last = min(place for place in inside if offsets[place][1] >= end)
    return first, last


def read_by(peer: SequencePeer, model: Any, features: Sequence[dict[str, Any]], learner: TaskLearner) -> Any:
    """A function with which the model stands in for `learner.outputs`. features: of the split that is read."""

    @torch.no_grad()
    def outputs(batch: Batch, step: int) -> Tensor:
        inputs = moved(peer.collate([features[number] for number in batch.examples.tolist()]), model)
        return peer.arranged(model(**inputs), inputs, batch, learner)

    return outputs


def moved(inputs: Any, model: Any) -> dict[str, Tensor]:
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def training_arguments(config: FinetuneConfig, rows: int, seed: int, folder: str, cpu: bool = False) -> Any:
    """TrainingArguments of lmtool's configuration. folder: the Trainer wants one, nothing is saved."""
    from transformers import TrainingArguments

    optimizer, schedule = config.optimizer, config.schedule
    assert isinstance(optimizer, AdamWConfig) and isinstance(schedule, LinearConfig)
    assert config.batch_examples is not None and config.max_epochs is not None and not schedule.final_fraction
    steps = math.ceil(rows / config.batch_examples) * config.max_epochs
    return TrainingArguments(
        output_dir=folder,
        use_cpu=cpu or not torch.cuda.is_available(),
        bf16=config.precision == "bf16",
        per_device_train_batch_size=config.batch_examples,
        num_train_epochs=config.max_epochs,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_norm or 0.0,
        lr_scheduler_type="linear",
        warmup_steps=int(warmup_steps(schedule, steps)),
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
