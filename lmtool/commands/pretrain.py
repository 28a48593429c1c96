"""`lmtool pretrain`: learn a language from text."""

from __future__ import annotations

from typing import Any

from lmtool.commands.configs import PretrainConfig
from lmtool.commands.distilling import distilled
from lmtool.commands.opening import open_run, words
from lmtool.commands.planning import require_memory
from lmtool.commands.provenance import contents_of, require_same_data
from lmtool.commands.screens import told_again
from lmtool.commands.starting import require_fit, saved_tokenizer, start_weights, with_tasks
from lmtool.commands.training import fit
from lmtool.data.sources import open_source
from lmtool.data.split import SplitData
from lmtool.data.store import open_store
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.tasks.members import rows_of
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.assemble import assemble


def run(config: PretrainConfig, overrides: list[str]) -> dict[str, Any]:
    """Build, train, evaluate, save. Returns result.json."""
    config, tasks = with_tasks(config)
    choices = {"model": config.model.name, "objective": config.objective.name, "data": config.data.name}
    with open_run("pretrain", config, f"{config.objective.name}-{config.model.name}") as opened:
        finished = opened.folder.result()
        if finished is not None:
            return told_again(opened, finished)
        require_memory(config, opened.precision)
        progress = opened.output.stage
        tokenizer = saved_tokenizer(opened)
        source = open_source(config.data, config.cache_dir, progress, config.offline)
        contents = contents_of(tasks, (config.data.name, source))
        require_same_data(opened, contents)
        tokenizer = tokenizer or trained_tokenizer(
            config.tokenizer, source, config.tokenizer.vocab_size or config.model.vocab_size, config.cache_dir, progress
        )
        require_fit(config, tokenizer)
        data = {}
        for split in ("train", "validation"):
            store = open_store(source, split, tokenizer, config.cache_dir, progress)
            data[split] = SplitData(split, store, config.data.documents, rows_of(tasks, split))
        learner, loaded = assemble(config, tokenizer, start_weights(config, own=opened.checkpoint))
        facts = {**source.facts(), **{f"task {name}": task.facts for name, task in tasks.items()}}
        following = _next(str(opened.folder.path), tokenizer)
        student_of = distilled(config, learner, tokenizer, opened.precision, contents)
        return fit(opened, learner, data, tokenizer, loaded, choices, facts, contents, following, distilled=student_of)


def _next(folder: str, tokenizer: Tokenizer) -> list[str]:
    """What may be typed next."""
    prompt = "This function returns a [MASK]." if "mask" in tokenizer.roles else "This function returns"
    return [
        words(["lmtool", "finetune", "task=pydocs", f"checkpoint={folder}"]),
        words(["lmtool", "predict", f"checkpoint={folder}", f"text={prompt}"]),
    ]
