"""`lmtool pretrain`: learn a language from text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmtool.commands import session as shared
from lmtool.commands.configs import PretrainConfig
from lmtool.commands.provenance import contents_of, extras, require_same_data
from lmtool.config.tables import build
from lmtool.data.loader import PackedLoader
from lmtool.data.store import open_store
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.objectives.baseline import mean_losses
from lmtool.objectives.evaluation import evaluate
from lmtool.tasks.objective import rows_of
from lmtool.training.loop import train

SAMPLES = 6


def run(config: PretrainConfig, overrides: list[str]) -> dict[str, Any]:
    """Build, train, evaluate, save. Returns result.json."""
    config, tasks = shared.with_tasks(config)
    names = {"model": config.model.name, "objective": config.objective.name, "data": config.data.name}
    with shared.session("pretrain", config, f"{names['objective']}-{names['model']}") as session:
        finished = session.run.result()
        if finished is not None:
            return shared.told_again(session, finished)
        progress = session.output.stage
        tokenizer = shared.saved_tokenizer(session)
        source = build(config.data, config.cache_dir, progress)
        contents = contents_of(tasks, (config.data.name, source))
        require_same_data(session, contents)
        tokenizer = tokenizer or trained_tokenizer(
            config.tokenizer, source, config.tokenizer.vocab_size or config.model.vocab_size, config.cache_dir, progress
        )
        shared.require_fit(config, tokenizer)
        stores = {
            split: replace(open_store(source, split, tokenizer, config.cache_dir, progress), rows=rows_of(tasks, split))
            for split in ("train", "validation")
        }

        learner = build(config.objective, build(config.model, config.seed), tokenizer, config.seed)
        loaded = shared.start_weights(config, learner)
        examples = {
            split: learner.examples(store, config.max_length, config.data.documents, split)
            for split, store in stores.items()
        }
        loader = PackedLoader(
            examples["train"], config.seed, config.batch_examples, config.batch_tokens, config.micro_batch_tokens
        )
        held_out = PackedLoader(
            examples["validation"],
            config.seed,
            None,
            config.micro_batch_tokens or config.batch_tokens or shared.EVALUATION_TOKENS,
            shuffle=False,
        )
        baselines = learner.baselines(stores["train"], examples["train"])
        constant = mean_losses(baselines, held_out.epoch_batches())
        baseline = {
            "name": " and ".join(dict.fromkeys(one.name for one in baselines.values())),
            "metric": "loss",
            "value": sum(learner.weights[term] * loss for term, loss in constant.items()),
        }
        plan, epochs = shared.plan_of(config, learner, loader.facts(), session.precision)
        shared.begin(
            session,
            learner,
            choices=names,
            data={
                **source.facts(),
                **{f"task {name}": one.facts for name, one in tasks.items()},
                "train": loader.facts(),
                "validation": held_out.facts(),
            },
            model=shared.model_facts(config.model, tokenizer, loaded),
            plan=plan,
            epochs=epochs,
            baseline=baseline,
        )

        def score() -> Any:
            return evaluate(
                learner, held_out.epoch_batches(), session.precision.device, session.precision.autocast, baselines
            )

        with shared.listener(session, "loss", baseline) as listener:
            training = train(
                learner,
                loader,
                lambda step: score().metrics(),
                session.run,
                shared.settings_of(config, "loss", False, plan.flops_per_token),
                config.optimizer,
                config.schedule,
                listener,
                extras(tokenizer, contents),
            )
        shared.best_weights(session, training, learner)
        baseline = shared.settled(session, baseline, learner.weights, training.metrics)
        learner.eval()
        batch = next(iter(held_out.epoch_batches())).to(session.precision.device)
        session.run.write_json("samples.json", learner.samples(batch, tokenizer, SAMPLES))
        more = {
            "baseline": baseline["value"],
            "standard_error": training.metrics.get("standard_error"),
            "padding_fraction": loader.facts()["padding_fraction"],
        }
        result = shared.result_of(session, training, names, "loss", more)
        folder = str(session.run.path)
        prompt = "This function returns a [MASK]." if "mask" in tokenizer.roles else "This function returns"
        return shared.finish(
            session,
            result,
            baseline,
            [
                shared.words(["lmtool", "finetune", "task=pydocs", f"checkpoint={folder}"]),
                shared.words(["lmtool", "predict", f"checkpoint={folder}", f"text={prompt}"]),
            ],
        )
