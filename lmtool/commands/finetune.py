"""`lmtool finetune`: learn a task from labelled text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmtool.commands import session as shared
from lmtool.commands.configs import FinetuneConfig
from lmtool.commands.labelled import data_to_learn
from lmtool.commands.provenance import contents_of, extras, require_same_data
from lmtool.config.tables import build
from lmtool.data.loader import PackedLoader
from lmtool.data.vocabulary import tokenizer_of_rows
from lmtool.tasks.evaluation import TaskReport, baseline, evaluate, predictions, report
from lmtool.tasks.loading import TaskData
from lmtool.training.loop import train


def run(config: FinetuneConfig, overrides: list[str]) -> dict[str, Any]:
    """Build, train, evaluate, save. Returns result.json."""
    config, task, taken = data_to_learn(config)
    names = {"model": config.model.name, "task": config.task.name, "tuning": config.tuning.name}
    with shared.session("finetune", config, f"{names['task']}-{names['model']}") as session:
        finished = session.run.result()
        if finished is not None:
            return shared.told_again(session, finished)
        contents = contents_of({config.task.name: task})
        require_same_data(session, contents)
        # A run that starts from nothing trains its tokenizer on its own training rows.
        tokenizer = shared.saved_tokenizer(session) or tokenizer_of_rows(
            config.tokenizer,
            task.train.texts,
            config.tokenizer.vocab_size or config.model.vocab_size,
            session.output.stage,
        )
        shared.require_fit(config, tokenizer)
        learner = build(config.task, build(config.model, config.seed), tokenizer, config.seed)
        loaded = shared.start_weights(config, learner, taken)
        build(config.tuning).apply(learner, None if loaded is None else frozenset(loaded.new))

        loader = PackedLoader(
            learner.examples(task.train, config.max_length, "train"),
            config.seed,
            config.batch_examples,
            config.batch_tokens,
            config.micro_batch_tokens,
        )
        held_out = {
            split: PackedLoader(
                learner.examples(rows, config.max_length, split),
                config.seed,
                None,
                shared.EVALUATION_TOKENS,
                shuffle=False,
            )
            for split, rows in task.validation.items()
        }
        first = next(iter(task.validation))
        constant = baseline(config.task, task.train, task.validation[first])
        plan, epochs = shared.plan_of(config, learner, loader.facts(), session.precision)
        shared.begin(
            session,
            learner,
            choices=names,
            data={**task.facts, "train": loader.facts(), **{split: one.facts() for split, one in held_out.items()}},
            model={
                **shared.model_facts(config.model, tokenizer, loaded),
                **({"labels": taken.note} if taken is not None and taken.note else {}),
            },
            plan=plan,
            epochs=epochs,
            baseline=constant,
        )

        def score() -> TaskReport:
            return report(
                config.task,
                {
                    split: evaluate(
                        learner,
                        task.validation[split],
                        one.epoch_batches(),
                        session.precision.device,
                        session.precision.autocast,
                    )
                    for split, one in held_out.items()
                },
            )

        metric = config.task.metric
        with shared.listener(session, metric, constant) as listener:
            training = train(
                learner,
                loader,
                lambda step: score().metrics,
                session.run,
                shared.settings_of(config, metric, metric != "mse", plan.flops_per_token),
                config.optimizer,
                config.schedule,
                listener,
                extras(tokenizer, contents),
            )
        shared.best_weights(session, training, learner)
        final = score()
        session.run.write_rows("predictions.jsonl", _predicted(config, task, final))
        for warning in final.warnings:
            session.output.line(f"warning: {warning}", "yellow")
        result = shared.result_of(
            session,
            training,
            names,
            metric,
            {
                "baseline": constant["value"],
                "validation_examples": len(task.validation[first]),
                "warnings": final.warnings,
                "padding_fraction": loader.facts()["padding_fraction"],
            },
        )
        folder = str(session.run.path)
        return shared.finish(
            session,
            result,
            constant,
            [
                shared.words(["lmtool", "predict", f"checkpoint={folder}", "text=..."]),
                shared.words(["lmtool", "evaluate", f"checkpoint={folder}"]),
            ],
        )


def _predicted(config: FinetuneConfig, task: TaskData, final: TaskReport) -> Iterator[dict[str, Any]]:
    for split, one in final.splits.items():
        yield from predictions(config.task, task.validation[split], one.predicted, split)
