"""The session of a pretraining run: text, tokenizer, learner."""

from __future__ import annotations

from typing import Any

from lmtool.config.plugins import command_line
from lmtool.data.configs import DataConfig
from lmtool.data.examples import SplitData
from lmtool.data.sources import OnStage, Source, open_source
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.learners.base import BaseLearner
from lmtool.reporting.text import plain
from lmtool.resolver.schema.run import PretrainConfig
from lmtool.session.distilling import distilled
from lmtool.session.open_run import OpenRun
from lmtool.session.phases import phases_of, text_of, tokenized_metadata
from lmtool.session.provenance import Contents, contents_of, require_same_data
from lmtool.session.session import Session
from lmtool.session.start import require_fit, saved_tokenizer, start_weights
from lmtool.tasks.mixture import read_tasks, rows_of
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.assemble import assemble

# The suggested prompt: so many words of the held-out text, and tokens that surely hold them.
_PROMPT_WORDS, _PROMPT_TOKENS = 5, 40


class Pretraining:
    """Prepares a pretraining run. config: with the labels of the tasks among its objectives as found in their data, for
    a checkpoint must know their names. tasks: the data of these tasks."""

    verb = "pretrain"

    def __init__(self, config: PretrainConfig):
        objective, self.tasks = read_tasks(config.objective, config.seed, config.cache_dir, config.offline)
        self.config = config.model_copy(update={"objective": objective})
        self.stem = f"{objective.name}-{config.model.name}"
        self._sources: list[tuple[DataConfig, Source]] = []

    def prepare(self, run: OpenRun) -> Session:
        """Build everything that the run needs. UserError where the run resumes and its data have changed, or where
        its parts do not go together."""
        config, on_stage = self.config, run.output.stage
        tokenizer = saved_tokenizer(run)
        contents, metadata = self._provenance(on_stage)
        require_same_data(run, contents)
        tokenizer = tokenizer or self.trained_tokenizer(on_stage)
        require_fit(config, tokenizer)
        by_phase: list[dict[str, SplitData]] = []
        for number, form in enumerate(config.forms):
            same_text = next((earlier for earlier in range(number) if config.forms[earlier].data == form.data), None)
            if same_text is not None:
                by_phase.append(by_phase[same_text])
                continue
            by_phase.append({split: self.split(form, split, tokenizer, on_stage) for split in ("train", "validation")})
        metadata["tokenized"] = tokenized_metadata(by_phase[0]["train"])
        learner, loaded = assemble(config, tokenizer, start_weights(config, own=run.checkpoint))
        return Session(
            run=run,
            subject={"model": config.model.name, "objective": config.objective.name, "data": config.data.name},
            learner=learner,
            tokenizer=tokenizer,
            loaded=loaded,
            phases=phases_of(config, learner, tokenizer, by_phase),
            metadata=metadata,
            contents=contents,
            next_commands=_next_commands(str(run.folder.path), tokenizer, learner, by_phase[-1]["validation"]),
            distilled=distilled(config, learner, tokenizer, run.precision, contents),
        )

    def source(self, data: DataConfig, on_stage: OnStage) -> Source:
        """The text of a section, opened once: phases of the same section share it."""
        for section, source in self._sources:
            if section == data:
                return source
        source = open_source(data, self.config.cache_dir, on_stage, self.config.offline)
        self._sources.append((data, source))
        return source

    def trained_tokenizer(self, on_stage: OnStage, data: DataConfig | None = None) -> Tokenizer:
        """A tokenizer trained on text. data: its section; None: that of the first phase."""
        config = self.config
        size = config.tokenizer.vocab_size or config.model.vocab_size
        source = self.source(data or config.forms[0].data, on_stage)
        return trained_tokenizer(config.tokenizer, source, size, config.cache_dir, on_stage)

    def split(self, form: PretrainConfig, split: str, tokenizer: Tokenizer, on_stage: OnStage) -> SplitData:
        """The tokenized text of a split. form: the configuration of a phase."""
        source, rows = self.source(form.data, on_stage), rows_of(self.tasks, split)
        return text_of(form.data, source, split, tokenizer, form.cache_dir, on_stage, rows)

    def _provenance(self, on_stage: OnStage) -> tuple[Contents, dict[str, Any]]:
        """The hashes of the data, and their metadata for the first screen."""
        forms = self.config.forms
        first = self.source(forms[0].data, on_stage)
        contents = contents_of(self.tasks, (forms[0].data.name, first))
        metadata = {**first.metadata(), **{f"task {name}": task.metadata for name, task in self.tasks.items()}}
        seen = [first]
        for number, form in enumerate(forms[1:], 1):
            source = self.source(form.data, on_stage)
            if source not in seen:
                of_phase = contents_of({}, (form.data.name, source))
                contents |= {f"phases.{number} {name}": content for name, content in of_phase.items()}
                metadata[f"text of phase {number + 1}"] = source.metadata()
                seen.append(source)
        return contents, metadata


def _next_commands(folder: str, tokenizer: Tokenizer, learner: BaseLearner, held_out: SplitData) -> list[str]:
    """What the user may type next."""
    finetune = command_line("finetune", "task=pydocs", f"checkpoint={folder}")
    if type(learner).respond is BaseLearner.respond:  # it answers no texts
        return [finetune]
    mask = tokenizer.roles.get("mask") if hasattr(learner, "logits_at") else None  # for objectives that fill masks
    prompt = _prompt(held_out, tokenizer)
    prompt = prompt if mask is None else f"{prompt} {tokenizer.pieces([mask])[0]}"
    return [finetune, command_line("predict", f"checkpoint={folder}", f"text={prompt}")]


def _prompt(held_out: SplitData, tokenizer: Tokenizer) -> str:
    """The first words of the held-out text, as the model reads them: a prompt in the run's own language."""
    text = next((split.store for split in (held_out, *held_out.members.values()) if split.store is not None), None)
    if text is None or not len(text):
        return "This function returns"
    tokens = text.tokens[: min(_PROMPT_TOKENS, int(text.lengths[0]))]
    return " ".join(plain(tokenizer.decode(tokens.tolist())).split()[:_PROMPT_WORDS])
