"""Train a learner, score it, and write what a run leaves behind: what pretrain and finetune share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmtool.commands import session as shared
from lmtool.commands.provenance import Contents, extras
from lmtool.data.loader import PackedLoader
from lmtool.data.plan import Examples
from lmtool.data.split import SplitData
from lmtool.learners.base import BaseLearner
from lmtool.learners.evaluation import SplitEvaluations, evaluate
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.loop import train
from lmtool.weights.loading import LoadReport

SAMPLES = 6


def fit(
    session: shared.Session,
    learner: BaseLearner,
    data: Mapping[str, SplitData],
    tokenizer: Tokenizer,
    loaded: LoadReport | None,
    choices: Mapping[str, Any],
    facts: Mapping[str, Any],
    contents: Contents,
    next_commands: Sequence[str],
) -> dict[str, Any]:
    """Train on data["train"], score on the other splits, of which the first gives the headline; show, write and return
    result.json.

    loaded: what was taken of a checkpoint. choices: what the run is called on the screens. facts: of the data.
    contents: hashes of the data, which a resumed run must find again. next_commands: what a user may type next.
    """
    config, precision = session.config, session.precision
    train_data = data["train"]
    examples = learner.examples(train_data, config.max_length)
    loader = PackedLoader(examples, config.seed, config.batch_examples, config.batch_tokens, config.micro_batch_tokens)
    held_out = {
        split: HeldOut(learner, rest, config.max_length, evaluation_tokens(config), config.seed)
        for split, rest in data.items()
        if split != "train"
    }
    predictors = learner.predictors(train_data, examples)
    first = next(iter(held_out.values()))
    baseline = learner.baseline(train_data, first.data, first.loader.epoch_batches(), predictors)
    plan, epochs = shared.plan_of(config, learner, loader.facts(), precision)
    shared.begin(
        session,
        learner,
        choices=choices,
        data={**facts, "train": loader.facts(), **{split: rest.loader.facts() for split, rest in held_out.items()}},
        model=shared.model_facts(config.model, tokenizer, loaded),
        plan=plan,
        epochs=epochs,
        baseline=baseline,
    )

    def score() -> SplitEvaluations:
        return SplitEvaluations(
            {
                split: evaluate(
                    learner,
                    learner.scorer(rest.data, rest.examples, predictors),
                    rest.loader.epoch_batches(),
                    precision,
                )
                for split, rest in held_out.items()
            }
        )

    with shared.listener(session, learner.metric.name, baseline) as listener:
        training = train(
            learner,
            loader,
            lambda step: score().metrics(),
            session.run,
            shared.settings_of(config, learner.metric.name, not learner.metric.smaller_is_better, plan.flops_per_token),
            config.optimizer,
            config.schedule,
            listener,
            extras(tokenizer, contents),
        )
    shared.best_weights(session, training, learner)
    baseline = shared.settled(session, baseline, learner.weights, training.metrics)
    more: dict[str, Any] = {"baseline": baseline["value"], "padding_fraction": loader.facts()["padding_fraction"]}
    if "standard_error" in training.metrics:
        more["standard_error"] = training.metrics["standard_error"]
    if learner.predicts_rows:
        final = score()
        session.run.write_rows("predictions.jsonl", final.records())
        for warning in final.warnings:
            session.output.line(f"warning: {warning}", "yellow")
        more |= {"validation_examples": len(first.examples.plan(0)), "warnings": final.warnings}
    else:
        learner.eval()
        batch = next(iter(first.loader.epoch_batches())).to(precision.device)
        session.run.write_json("samples.json", learner.samples(batch, SAMPLES))
    result = shared.result_of(session, training, choices, learner.metric.name, more)
    return shared.finish(session, result, baseline, next_commands)


class HeldOut:
    """A split to score on: its data, and all of its examples in their order."""

    def __init__(self, learner: BaseLearner, data: SplitData, max_length: int, batch_tokens: int, seed: int):
        self.data = data
        self.examples: Examples = learner.examples(data, max_length)
        self.loader = PackedLoader(self.examples, seed, None, max(batch_tokens, max_length), shuffle=False)


def evaluation_tokens(config: Any) -> int:
    """Tokens in one forward without gradients."""
    return config.micro_batch_tokens or config.batch_tokens or shared.EVALUATION_TOKENS
