"""`lmtool finetune`: learn a task from labelled text."""

from __future__ import annotations

from typing import Any

from lmtool.commands import session as shared
from lmtool.commands.configs import FinetuneConfig
from lmtool.commands.labelled import data_to_learn
from lmtool.commands.provenance import contents_of, require_same_data
from lmtool.commands.training import fit
from lmtool.data.vocabulary import tokenizer_of_rows
from lmtool.reporting.console import Output
from lmtool.tasks.loading import TaskData
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.assemble import assemble


def run(config: FinetuneConfig, overrides: list[str]) -> dict[str, Any]:
    """Build, train, evaluate, save. Returns result.json."""
    config, task, taken = data_to_learn(config)
    choices = {"model": config.model.name, "task": config.task.name, "tuning": config.tuning.name}
    with shared.session("finetune", config, f"{config.task.name}-{config.model.name}") as session:
        finished = session.run.result()
        if finished is not None:
            return shared.told_again(session, finished)
        contents = contents_of({config.task.name: task})
        require_same_data(session, contents)
        tokenizer = shared.saved_tokenizer(session) or own_tokenizer(config, task, session.output)
        shared.require_fit(config, tokenizer)
        learner, loaded = assemble(config, tokenizer, shared.start_weights(config, taken))
        facts = {**task.facts, **({"head": taken.note} if taken is not None and taken.note else {})}
        following = _next(str(session.run.path))
        return fit(session, learner, task.splits(), tokenizer, loaded, choices, facts, contents, following)


def own_tokenizer(config: FinetuneConfig, task: TaskData, output: Output) -> Tokenizer:
    """A run that starts from nothing trains its tokenizer on its own training rows."""
    size = config.tokenizer.vocab_size or config.model.vocab_size
    texts = [task.train.columns[name] for name in task.config.text]
    return tokenizer_of_rows(config.tokenizer, texts, size, output.stage)


def _next(folder: str) -> list[str]:
    """What may be typed next."""
    return [
        shared.words(["lmtool", "predict", f"checkpoint={folder}", "text=..."]),
        shared.words(["lmtool", "evaluate", f"checkpoint={folder}"]),
    ]
