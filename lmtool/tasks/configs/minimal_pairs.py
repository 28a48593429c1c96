"""Configuration of minimal pairs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from lmtool.config.registry import component
from lmtool.errors import Problem
from lmtool.tasks.configs.base import BestMetric, Metrics, TaskConfig, TaskName


@component("task", "minimal_pairs", builder="lmtool.tasks.minimal_pairs:refuse_training")
class MinimalPairsConfig(TaskConfig):
    """Pairs of sentences of which a language model should find the first more probable (Warstadt et al. 2020, BLiMP).
    They are scored without training."""

    kind: Literal["minimal_pairs"] = Field("minimal_pairs", description="Pairs of a good and a bad sentence.")
    text: tuple[str, ...] = Field(
        ("sentence_good", "sentence_bad"),
        min_length=2,
        max_length=2,
        description="columns of the good and of the bad sentence",
    )
    label: str = Field("UID", description="column of the paradigm that a pair belongs to; absent: the file's name")
    phenomenon: str | None = Field(
        "linguistics_term", description="column of the phenomenon that a paradigm belongs to; absent or null: none"
    )
    name: TaskName = "minimal_pairs"
    hub: None = Field(None, description="none: pairs are read from files")
    embedded: None = Field(None, description="none: pairs are read from files")
    train_examples: None = Field(None, description="none: all pairs are scored")
    dropout: None = Field(None, description="none: nothing is trained")
    path: str | None = Field(None, description="a folder with a file for each paradigm (.jsonl .csv .tsv), or one file")
    first_token: Literal["scored", "skipped"] = Field(
        "scored",
        description="decoders without a start token; scored: after the end-of-text token, as in lm-evaluation-harness; "
        "skipped: only the tokens after it, as in the evaluation of BabyLM",
    )
    masking: Literal["token", "word"] = Field(
        "token",
        description="masked language models; token: mask one token at a time (Salazar et al. 2020); word: also the "
        "later tokens of its word (Kauf and Ivanova 2023), which does not favour words of many tokens",
    )
    reading: Literal["causal", "masked"] | None = Field(
        None,
        description="how a model trained with objective=mntp_hybrid reads a sentence; null: causal. As a decoder, or "
        "with each token masked in turn, predicted from the position before it",
    )
    ngrams: int | None = Field(
        None,
        ge=1,
        le=8,
        description="order of an n-gram model of the run's training text, the baseline; null: none. Witten-Bell "
        "smoothing, over the tokens of the run's tokenizer",
    )
    metrics: Metrics[Literal["accuracy"]] = ("accuracy",)
    metric: BestMetric[Literal["accuracy"]] = "accuracy"

    def conflicts(self, section: str) -> Iterator[Problem]:
        message = f"task={self.name}: minimal pairs are scored, not learned"
        yield Problem("task", message, f"lmtool evaluate RUN task={self.name} scores a pretrained model")
