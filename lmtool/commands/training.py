"""Train a learner, score it, and write what a run leaves behind: what pretrain and finetune share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lmtool.commands import screens
from lmtool.commands.agreeing import require_same
from lmtool.commands.configs import PretrainConfig, RunConfig
from lmtool.commands.distilling import side_by_side
from lmtool.commands.forgetting import Forgetting
from lmtool.commands.held_out import HeldOutSplits, evaluation_tokens
from lmtool.commands.lane_rules import reads_lanes
from lmtool.commands.lineage import as_fact, lineage_of
from lmtool.commands.opening import OpenRun, words
from lmtool.commands.provenance import Contents, extras, require_same_teachers, require_unchanged, teachers_of
from lmtool.commands.rates import rates
from lmtool.commands.reading import Reads, planned, realised
from lmtool.config.checkpoint import MODEL
from lmtool.data.loader import PackedLoader
from lmtool.data.phases import PhasedLoader
from lmtool.data.sources import OnStage
from lmtool.data.split import SplitData
from lmtool.distillation.distilled import Distilled
from lmtool.distillation.seen import Reading
from lmtool.errors import UserError
from lmtool.heads.features import layer_mix
from lmtool.learners.base import BaseLearner
from lmtool.learners.mixed_examples import MixedExamples
from lmtool.learners.mixed_sources import predictors_of
from lmtool.metrics import Metric
from lmtool.runs.checkpoints import load_weights, read_weights
from lmtool.secrets import masked
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.compiling import choose_compilation
from lmtool.training.loop import train
from lmtool.training.progress import TrainingResult, TrainingSettings
from lmtool.training.sharded import outside_layers
from lmtool.weights.bases import Base
from lmtool.weights.loading import LoadReport
from lmtool.weights.unread import notes

SAMPLES = 6


def fit(
    opened: OpenRun,
    learner: BaseLearner,
    data: Mapping[str, SplitData],
    tokenizer: Tokenizer,
    loaded: LoadReport | None,
    choices: Mapping[str, Any],
    facts: Mapping[str, Any],
    contents: Contents,
    next_commands: Sequence[str],
    tests: Mapping[str, SplitData] | None = None,
    base: Base | None = None,
    forgetting: Forgetting | None = None,
    distilled: Distilled | None = None,
    phases: Sequence[Reads] = (),
) -> dict[str, Any]:
    """Train on data["train"], score on the other splits, of which the first gives the headline; show, write and return
    result.json.

    loaded: what was taken of a checkpoint. choices: what the run is called on the screens. facts: of the data.
    contents: hashes of the data, which a resumed run must find again. next_commands: what a user may type next.
    tests: labelled splits that choose nothing: the best checkpoint is scored on them once, at the end. base: what the
    checkpoints of a tuned run leave out. forgetting: what its checkpoint scores on held-out text. distilled: what is
    trained in the place of the learner, the student of it. phases: what each of them reads; held-out text is read as
    in the last one.
    """
    config, precision = opened.config, opened.precision
    trained = learner if distilled is None else distilled
    teachers = teachers_of(distilled)
    require_same_teachers(opened, teachers)
    group = opened.group
    group.wait()  # one of them may have tokenized for hours, or read what is checked by one after the other
    require_same(group, {**_things(contents), **{f"teacher {name}": value for name, value in teachers.items()}})
    parts = phases or [Reads(config, learner, data)]
    last, examples = parts[-1], parts[-1].examples
    loader, plan, epochs = planned(config, learner, parts, precision)
    compilation = choose_compilation(config.compile, precision.device, plan.flops, config.max_minutes)
    warn_of_idle(opened, loader)
    warn_of_state(opened)
    learner.begin(loader.steps_in_epoch)
    predictors = predictors_of(learner, last.data["train"], examples)
    held_out = HeldOutSplits(
        learner, last.data, last.config.max_length, evaluation_tokens(last.config), config.seed, predictors,
        last.learner, group,
    )  # fmt: skip
    plan = replace(plan, evaluation_tokens=held_out.tokens)
    baseline = held_out.baseline(last.data["train"])
    uninformed_loss = held_out.uninformed_loss(baseline)
    if distilled is not None:
        begun = distilled.begin(reading_of(last, opened.output.stage))
        facts = {**facts, "distillation": {**distilled.facts(), **begun}}
    if loaded is not None and loaded.ignored:
        unread = notes(str(config.checkpoint), loaded.ignored)
        facts = {**facts, "warnings": [*facts.get("warnings", ()), *unread]}
    copied = facts.get("distillation", {}).get("started from")
    in_base = frozenset() if base is None else base.names
    lineage = lineage_of(opened)
    screens.begin(
        opened,
        learner,
        choices=choices,
        data={**facts, **train_facts(loader), **held_out.facts()},
        model=screens.model_facts(config, tokenizer, loaded, copied) | as_fact(lineage),
        lineage=lineage,
        plan=plan,
        compilation=compilation,
        epochs=epochs,
        rates=rates(learner, config.optimizer, plan.steps),
        baseline=baseline,
    )
    with screens.listener(opened, learner.metric.name, baseline) as listener:
        training = train(
            trained,
            loader,
            lambda step: held_out.score(precision, calibrates=True).metrics(),
            opened.folder,
            settings_of(config, learner.metric, plan.flops_per_token, uninformed_loss, compilation.on),
            config.optimizer,
            config.schedule,
            [listener, opened.trackers],
            extras(tokenizer, contents, base, lineage, teachers),
            group,
            in_base,
        )
    best_weights(opened, training, trained, in_base)
    baseline = screens.settled(opened, baseline, learner.headline, training.metrics)
    more = {"baseline": baseline["value"], "compiled": compilation.on}
    more |= {name: loader.facts()[name] for name in screens.WASTE if name in loader.facts()}
    term = learner.metric.name.removesuffix("_loss")
    error = f"{term}_gain_standard_error" if term in learner.weights else "standard_error"
    more |= {"standard_error": training.metrics[error]} if error in training.metrics else {}
    more |= {} if base is None else tuned_size(base, training)
    more |= {name: facts[name] for name in ("few_shot",) if name in facts}
    more |= {"lineage": list(lineage)} if lineage else {}
    if isinstance(examples, MixedExamples) and all(
        isinstance(part.examples, MixedExamples) and [*part.examples.members] == [*examples.members] for part in parts
    ):
        more["mixture"] = shares_read(examples, loader, training.steps)
    more |= realised(plan, loader, training.steps)
    with outside_layers(trained):
        more |= layer_mix(learner)
        more |= write_predictions(opened, learner, held_out)
        if tests:
            more["tests"] = scores_on(opened, learner, tests)
        if forgetting is not None:
            more["forgetting"] = forgetting.after(learner)
        if distilled is not None:
            models = side_by_side(learner, distilled, held_out, config, precision)
            require_unchanged(teachers, distilled)
            more["distillation"] = {
                "models": models,
                "teachers": teachers,
                **distilled.results(held_out.first.sample(), precision),
            }
    result = screens.result_of(opened, training, choices, learner.metric.name, more)
    return screens.finish(opened, result, baseline, next_commands)


def _things(contents: Contents) -> dict[str, Any]:
    """What the data hold, by the name that a user reads."""
    return {f"{origin} {key}": value for origin, own in contents.items() for key, value in own.items()}


def train_facts(loader: PackedLoader | PhasedLoader) -> dict[str, Any]:
    """The facts of what is trained on, by phase where there are any."""
    facts = loader.facts()
    if not isinstance(loader, PhasedLoader):
        return {"train": facts}
    return {name: own for name, own in facts.items() if isinstance(own, dict)}


def warn_of_idle(opened: OpenRun, loader: PackedLoader | PhasedLoader) -> None:
    """Say so where steps have fewer examples than there are processes: the others compute what counts nothing."""
    size = opened.group.size
    for name, facts in train_facts(loader).items():
        examples = math.ceil(facts["examples"] / facts["steps_per_epoch"])
        if examples < size:
            opened.output.line(
                f"warning: {name}: a step has {examples:,} examples, and {size} processes share it: some do nothing; "
                f"give batch_examples={size} or more (or batch_tokens), or devices={examples}",
                "yellow",
            )


def warn_of_state(opened: OpenRun) -> None:
    """Say so where a model could carry state from batch to batch, and what it reads has no lanes."""
    config = opened.config
    if not isinstance(config, PretrainConfig) or not config.model.carries_state or config.data.documents == "separate":
        return
    if not reads_lanes(config.model, config.objective, config.data):
        opened.output.line(
            f"warning: model={config.model.name} carries no state from batch to batch: "
            f"objective={config.objective.name} with data={config.data.name} is not read in lanes of text",
            "yellow",
        )


def reading_of(reads: Reads, progress: OnStage) -> Reading:
    """What a run reads, for what is computed of it before."""
    config = reads.config
    sizes = {"batch_examples": config.batch_examples, "batch_tokens": config.batch_tokens}
    budgets = config.max_steps, config.max_epochs
    return Reading(
        reads.data["train"], config.max_length, reads.examples, reads.loader, *budgets, sizes,
        evaluation_tokens(config), progress,
    )  # fmt: skip


def shares_read(
    examples: MixedExamples, loader: PackedLoader | PhasedLoader, steps: int
) -> dict[str, dict[str, float]]:
    """Of each member of a mixture, how many of its examples a run has read (`examples`), their `share`, and the share
    that was `planned`."""
    read = dict.fromkeys(examples.members, 0)
    for rows in loader.read(steps):
        for name, count in examples.drawn(rows).items():
            read[name] += count
    return {
        name: {"examples": count, "share": count / sum(read.values()), "planned": share}
        for (name, count), share in zip(read.items(), examples.shares, strict=True)
    }


def write_predictions(opened: OpenRun, learner: BaseLearner, held_out: HeldOutSplits) -> dict[str, Any]:
    """predictions.jsonl of a learner that predicts rows, else samples.json. Returns what result.json says of them."""
    if not learner.predicts_rows:
        learner.eval()
        batch = next(iter(held_out.first.loader.epoch_batches())).to(opened.precision.device)
        with torch.no_grad():
            samples = learner.samples(batch, SAMPLES)
        opened.folder.write_json("samples.json", samples)
        return {}
    final = held_out.score(opened.precision)
    opened.folder.write_rows("predictions.jsonl", final.records())
    for warning in final.warnings:
        opened.output.line(f"warning: {warning}", "yellow")
    classes = final.first.details.get("classes")
    said = {"validation_examples": sum(map(len, held_out.first.data.rows.values())), "warnings": final.warnings}
    if learner.scores_part:
        # In training a part of the rows was scored: here are all.
        said |= {"metrics": final.metrics(), "value": final.metrics()[learner.metric.name]}
    return said if classes is None else {**said, "classes": classes}


def scores_on(opened: OpenRun, learner: BaseLearner, tests: Mapping[str, SplitData]) -> dict[str, Any]:
    """By test split, its number of rows and its scores."""
    config = opened.config
    tokens = evaluation_tokens(config)
    splits = HeldOutSplits(learner, tests, config.max_length, tokens, config.seed, group=opened.group)
    evaluations = splits.score(opened.precision).splits
    sizes = {split: sum(map(len, part.data.rows.values())) for split, part in splits.splits.items()}
    return {split: {"examples": sizes[split], **evaluation.metrics()} for split, evaluation in evaluations.items()}


def settings_of(
    config: RunConfig, metric: Metric, flops_per_token: float, uninformed_loss: float, compiles: bool
) -> TrainingSettings:
    """The run-wide numbers as the loop takes them."""
    shared = set(TrainingSettings.__dataclass_fields__) & set(type(config).model_fields)
    return TrainingSettings(
        metric=metric.name,
        greater_is_better=not metric.smaller_is_better,
        flops_per_token=flops_per_token,
        uninformed_loss=uninformed_loss,
        compiles=compiles,
        chooses=config.distill.teaches_heads,
        **{name: getattr(config, name) for name in shared},
    )


def tuned_size(base: Base, training: TrainingResult) -> dict[str, Any]:
    """What result.json says of a tuned run's file: what its weights are tuned on, and the bytes of those it holds."""
    folder = training.best or training.last
    sizes = {} if folder is None else {"delta_bytes": (folder / MODEL).stat().st_size}
    return {"base": masked(base.checkpoint), **sizes}


def best_weights(opened: OpenRun, training: TrainingResult, learner: nn.Module, in_base: Collection[str] = ()) -> None:
    """Put the best checkpoint's weights into the learner, for the last evaluation and the examples. in_base: names of
    those that stay as they are. UserError where it was damaged since it was written."""
    if training.best is None or training.best == training.last:
        return
    try:
        weights = read_weights(training.best)
    except UserError as error:
        resume = words(["lmtool", "resume", str(opened.folder.path)])
        raise UserError(error.message, f"{resume} sets it aside and ends with the best of the others") from error
    load_weights(learner, weights, training.best, in_base)
