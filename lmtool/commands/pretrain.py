"""`lmtool pretrain`: learn a language from text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmtool.commands.branches import begin_branch
from lmtool.commands.configs import PretrainConfig
from lmtool.commands.distilling import distilled
from lmtool.commands.opening import open_run
from lmtool.commands.planning import require_memory
from lmtool.commands.provenance import contents_of, require_same_data
from lmtool.commands.reading import phases_of
from lmtool.commands.screens import told_again
from lmtool.commands.starting import require_fit, saved_tokenizer, start_weights, with_tasks
from lmtool.commands.texts import text_of, tokenized_facts
from lmtool.commands.training import fit
from lmtool.config.plugins import command_line
from lmtool.data.configs import DataConfig
from lmtool.data.sources import OnStage, Source, open_source
from lmtool.data.split import SplitData
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.learners.base import BaseLearner
from lmtool.reporting.text import plain
from lmtool.tasks.members import rows_of
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.assemble import assemble

# Of the held-out text, in the prompt that is offered: words, and tokens that surely have so many.
_WORDS, _TOKENS = 5, 40


def run(config: PretrainConfig, overrides: list[str], then: Callable[..., dict[str, Any]] = fit) -> dict[str, Any]:
    """Build, train, evaluate, save. Returns result.json. then: what is done with the parts that were built, in the
    place of `fit`, whose arguments it takes."""
    config, tasks = with_tasks(config)
    choices = {"model": config.model.name, "objective": config.objective.name, "data": config.data.name}
    with open_run("pretrain", config, f"{config.objective.name}-{config.model.name}") as opened:
        finished = opened.folder.result()
        if finished is not None:
            return told_again(opened, finished)
        begin_branch(opened)
        require_memory(config, opened.precision)
        progress = opened.output.stage
        tokenizer = saved_tokenizer(opened)
        texts = _texts(config, progress)
        source, contents = texts[0], contents_of(tasks, (config.forms[0].data.name, texts[0]))
        facts = {**source.facts(), **{f"task {name}": task.facts for name, task in tasks.items()}}
        for number, further in enumerate(texts):
            if further not in texts[:number] and number:
                own = contents_of({}, (config.forms[number].data.name, further))
                contents |= {f"phases.{number} {name}": content for name, content in own.items()}
                facts[f"text of phase {number + 1}"] = further.facts()
        require_same_data(opened, contents)
        tokenizer = tokenizer or trained_tokenizer(
            config.tokenizer, source, config.tokenizer.vocab_size or config.model.vocab_size, config.cache_dir, progress
        )
        require_fit(config, tokenizer)
        data: list[dict[str, SplitData]] = []
        for number, (form, text) in enumerate(zip(config.forms, texts, strict=True)):
            if text in texts[:number]:
                data.append(data[texts.index(text)])
                continue
            data.append({})
            for split in ("train", "validation"):
                rows = rows_of(tasks, split)
                data[number][split] = text_of(form.data, text, split, tokenizer, config.cache_dir, progress, rows)
        facts["tokenized"] = tokenized_facts(data[0]["train"])
        learner, loaded = assemble(config, tokenizer, start_weights(config, own=opened.checkpoint))
        phases = phases_of(config, learner, tokenizer, data)
        following = _next(str(opened.folder.path), tokenizer, learner, _beginning(data[-1]["validation"], tokenizer))
        student_of = distilled(config, learner, tokenizer, opened.precision, contents)
        return then(
            opened, learner, data[0], tokenizer, loaded, choices, facts, contents, following, distilled=student_of,
            phases=phases,
        )  # fmt: skip


def _texts(config: PretrainConfig, progress: OnStage) -> list[Source]:
    """The text of each phase; of a run without phases its own. Phases of the same section share it."""
    opened: list[tuple[DataConfig, Source]] = []
    for form in config.forms:
        known = next((text for data, text in opened if data == form.data), None)
        opened.append((form.data, known or open_source(form.data, config.cache_dir, progress, config.offline)))
    return [text for _, text in opened]


def _beginning(held_out: SplitData, tokenizer: Tokenizer) -> str:
    """The first words of the held-out text, as the model reads them: a prompt of the run's own language."""
    text = next((split.store for split in (held_out, *held_out.members.values()) if split.store is not None), None)
    if text is None or not len(text):
        return "This function returns"
    words_of_text = plain(tokenizer.decode(text.tokens[: min(_TOKENS, int(text.lengths[0]))].tolist())).split()
    return " ".join(words_of_text[:_WORDS])


def _next(folder: str, tokenizer: Tokenizer, learner: BaseLearner, beginning: str) -> list[str]:
    """What may be typed next. beginning: of a text."""
    finetune = command_line("finetune", "task=pydocs", f"checkpoint={folder}")
    if type(learner).respond is BaseLearner.respond:  # it answers no texts
        return [finetune]
    mask = tokenizer.roles.get("mask") if hasattr(learner, "logits_at") else None  # what fills masks
    prompt = beginning if mask is None else f"{beginning} {tokenizer.pieces([mask])[0]}"
    return [
        finetune,
        command_line("predict", f"checkpoint={folder}", f"text={prompt}"),
    ]
