"""What each command reads: the run-wide keys, and the sections whose classes their rooms define."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.tables import Choice

# Each room's module enters its components into the tables.
from lmtool.data.configs import DataConfig
from lmtool.models.configs import ModelConfig
from lmtool.objectives.configs import ObjectiveConfig
from lmtool.tasks.configs import TaskConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.training.configs import OptimizerConfig, ScheduleConfig
from lmtool.tuning.configs import TuningConfig


class RunConfig(Config):
    """The keys that every training command shares."""

    name: str | None = Field(None, description="Stable name of the run: runs/NAME. The same command goes on with it. Null: made from what was chosen, and a counter.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    run_dir: str | None = Field(None, description="Folder of the run; null: runs/NAME.")
    seed: int = Field(0, ge=0, description="Seed of every random stream: initial weights, order, corruption, sampling, dropout.")
    device: str = Field("auto", description="Where to run: auto, cpu, cuda or cuda:N.", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field("auto", description="Number format of the matrix products; weights stay fp32. auto: bf16 where the device has it, else fp32.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps; whichever budget comes first ends the run.")
    max_epochs: float | None = Field(None, gt=0, description="Stop after this many passes over the training examples.")
    max_tokens: int | None = Field(None, ge=1, description="Stop after this many training tokens.")
    max_minutes: float | None = Field(None, gt=0, description="Stop after this many minutes of training; the schedule's horizon is measured once and stored.")
    max_flops: float | None = Field(None, gt=0, description="Stop after this many floating-point operations (forward and backward).")
    batch_examples: int | None = Field(None, ge=1, description="Examples in a step's batch; or give batch_tokens.")
    batch_tokens: int | None = Field(None, ge=1, description="Real tokens in a step's batch, at most; or give batch_examples.")
    micro_batch_tokens: int | None = Field(None, ge=1, description="Real tokens in one forward, at most; a larger batch is accumulated. Null: no limit. Changes no result beyond rounding.")
    max_length: int = Field(128, ge=8, description="Tokens in one packed sequence, at most; longer texts are cut or split.")
    log_every: int = Field(10, ge=1, description="Steps between rows in metrics.jsonl.")
    evaluate_every: int | None = Field(None, ge=1, description="Steps between evaluations. Null: about ten times in a run.")
    checkpoint_every: int | None = Field(None, ge=1, description="Steps between checkpoints. Null: with each evaluation.")
    patience: int | None = Field(None, ge=1, description="Stop early after this many evaluations without a better score. Null: never.")
    checkpoint: str | None = Field(None, description="Weights to start from: a run folder, a checkpoint folder, or none for random ones.")
    cache_dir: str = Field("~/.cache/lmtool", description="Folder of the token stores, shared by all runs.")
    offline: bool = Field(False, description="Open no network connection.")
    plugins: tuple[str, ...] = Field((), description="Python modules whose components are added; typed with --plugin.")
    optimizer: Annotated[OptimizerConfig, Choice("optimizer")] = Field(description="How the weights move.")
    schedule: Annotated[ScheduleConfig, Choice("schedule")] = Field(description="The learning rate over the steps.")
    tokenizer: Annotated[TokenizerConfig, Choice("tokenizer")] = Field(description="How text becomes tokens; auto: the checkpoint's, else the kind the model names, trained on the run's text.")
    model: Annotated[ModelConfig, Choice("model")] = Field(description="The architecture.")


class PretrainConfig(RunConfig):
    """`lmtool pretrain`."""

    data: Annotated[DataConfig, Choice("data")] = Field(description="The text to learn from.")
    objective: Annotated[ObjectiveConfig, Choice("objective")] = Field(description="What is learned from it; auto: the published one of the model.")


class FinetuneConfig(RunConfig):
    """`lmtool finetune`."""

    task: Annotated[TaskConfig, Choice("task", key="kind")] = Field(description="What is learned, and from which labelled data.")
    tuning: Annotated[TuningConfig, Choice("tuning")] = Field(description="Which parameters learn.")
