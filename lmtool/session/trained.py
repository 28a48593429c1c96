"""A trained checkpoint with its configuration, tokenizer and weights, from which commands rebuild its learner.

A published folder of transformers is read as if lmtool had trained it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lmtool.config.base import JsonObject
from lmtool.config.decode import AUTO, chosen_class
from lmtool.config.registry import Choice
from lmtool.config.saved import body
from lmtool.data.formats import layout_difference
from lmtool.errors import ConfigError, UserError, nearest
from lmtool.learners.base import BaseLearner
from lmtool.learners.configs import ObjectiveConfig, has_segments
from lmtool.models.configs import ModelConfig
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig
from lmtool.reporting.console import Output
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig, UseConfig
from lmtool.resolver.decoding import decode_config
from lmtool.session.requests import PAIR, TEXT
from lmtool.tasks.configs.base import TaskConfig
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tasks.configs.mixture import tasks_of
from lmtool.tasks.labels import LoadedHead
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision, select_device, select_precision
from lmtool.tuning.configs.base import TuningConfig
from lmtool.weights.assemble import assemble
from lmtool.weights.exporting import IMPORT_COMMAND
from lmtool.weights.folders import HFFolder, hf_folder, read_settings
from lmtool.weights.reading import Weights, ignored_warnings, layout_warnings, read
from lmtool.weights.saved_model import PAIR_HEADS, decode_section, saved_config
from lmtool.weights.task_heads import CLASSIFIER, QUESTION_ANSWERING, head_of_class


@dataclass(frozen=True)
class _Blueprint:
    model: ModelConfig
    seed: int
    learner_config: TaskConfig | ObjectiveConfig
    tuning_config: TuningConfig | None
    exits: tuple[int, ...]


@dataclass(frozen=True)
class Trained:
    """A trained checkpoint that a command uses.

    checkpoint: as the user named it. saved: its configuration as plain data. config: the configuration that it was
    trained with. weights: all of its tensors. precision: the device and the number format in which its learner runs.
    is_published: whether its task comes from a published folder, whose configuration names neither the data nor the
    columns of the task.
    """

    checkpoint: str
    saved: JsonObject
    config: PretrainConfig | FinetuneConfig
    weights: Weights
    tokenizer: Tokenizer
    precision: Precision
    is_published: bool = False

    @property
    def longest(self) -> int:
        """Maximum number of tokens per text: max_length of finetuning; for a pretrained model, all its positions."""
        return self.config.max_length if isinstance(self.config, FinetuneConfig) else self.config.model.max_positions

    @property
    def tasks(self) -> dict[str, TaskConfig]:
        """The tasks, by name, that the checkpoint was trained for by finetuning or as an objective of pretraining."""
        config = self.config
        parts = config.task.member_configs() if isinstance(config, FinetuneConfig) else tasks_of(config.objective)
        return {part.name: part for part in parts}

    def task(self, name: str | None) -> TaskConfig | None:
        """Returns the task with this name; None for None. Raises UserError if the checkpoint was not trained for the
        task, and for None if it was finetuned on several tasks."""
        tasks = self.tasks
        if name is None and not (isinstance(self.config, FinetuneConfig) and len(tasks) > 1):
            return None
        if name not in tasks:
            reason = f"has no head for task={name}" if name is not None else f"was trained for {len(tasks)} tasks"
            hint = f"name one of them: task={nearest(name or '', tasks) or next(iter(tasks), 'NAME')}"
            names = ", ".join(tasks) or "none"
            raise UserError(
                f"checkpoint={self.checkpoint} {reason}; its tasks: {names}", hint if tasks else "omit task="
            )
        return tasks[name]

    def learner(
        self, learner_config: TaskConfig | ObjectiveConfig | None = None, heads: Mapping[str, LoadedHead] | None = None
    ) -> BaseLearner:
        """Builds the complete learner on its device, in evaluation mode. learner_config: the objective or task to build
        instead of the checkpoint's; None means the checkpoint's. heads: by task, the checkpoint's head to use where its
        name or the order of its classes differs from the task's. Raises UserError if the weights do not fit."""
        weights = self.weights
        for name, head in (heads or {}).items():
            weights = replace(weights, tensors=head.tensors(weights.tensors, name))
        for member in (
            learner_config.member_configs() if isinstance(learner_config, TaskConfig) and heads is not None else ()
        ):
            weights = replace(weights, tensors=member.with_unstored_tensors(weights.tensors))
        config = self.config
        if isinstance(config, FinetuneConfig):
            tuning, exits = config.tuning_config, config.exits
        else:  # an imported language model may have a tuning method
            tuning, exits = decode_section(self.checkpoint, self.saved, Choice("tuning", optional=True)), ()
        blueprint = _Blueprint(config.model, config.seed, learner_config or config.learner_config, tuning, exits)
        learner: BaseLearner
        learner, _ = assemble(blueprint, self.tokenizer, trained=weights)
        return learner.to(self.precision.device).eval()


def load_trained(config: UseConfig) -> Trained:
    """Reads the checkpoint of a command and prints warnings about it. Raises UserError as `read_trained` does."""
    precision = select_precision(config.precision, select_device(config.device))
    trained = read_trained(config.checkpoint, config.offline, precision)
    for note in ignored_warnings(config.checkpoint, trained.weights.ignored):
        Output().warn(note)
    return trained


def read_trained(checkpoint: str, offline: bool, precision: Precision) -> Trained:
    """Reads a trained checkpoint of lmtool or a published folder. Raises UserError if it is damaged, or has no head
    that predicts."""
    published = hf_folder(checkpoint, offline)
    saved = saved_config(checkpoint, offline)
    weights = read(checkpoint, offline)
    verb, is_published = saved.get("command"), False
    full_config = saved
    if published is None and verb not in ("pretrain", "finetune", IMPORT_COMMAND):
        reason = "has no command" if verb is None else f"has the command {verb}, which trains no model"
        raise UserError(
            f"checkpoint={checkpoint}: its config.json {reason}",
            "set checkpoint= to a run of lmtool pretrain or lmtool finetune, or to a published model",
        )
    if verb not in ("pretrain", "finetune"):
        if published is not None and classifies(published, weights):
            saved = published.classifier_config()
        is_published = "task" in saved
        verb = "finetune" if is_published else "pretrain"
        full_config = _as_finetuned(saved) if is_published else _as_pretrained(checkpoint, saved, weights)
    # The weights are complete: the checkpoint that this one started from is not needed, and may no longer exist.
    try:
        config = decode_config(verb, {**body(full_config), "checkpoint": "none"}, reads_checkpoint=False)
    except ConfigError as error:
        raise error.in_file(
            f"checkpoint={checkpoint}", "use another checkpoint: this value is in its config.json"
        ) from error
    config = config.last if isinstance(config, PretrainConfig) else config  # the configuration of the last phase
    tokenizer = Tokenizer.load(weights.folder, config.tokenizer.parse_special_tokens)
    if is_published and published is not None:
        require_same_reading(published, config.model, tokenizer)
    elif published is not None:
        weights = replace(weights, ignored=(*weights.ignored, *layout_warnings(tokenizer, config.model)))
    return Trained(checkpoint, saved, config, weights, tokenizer, precision, is_published)


def classifies(published: HFFolder, weights: Weights) -> bool:
    """Whether a published folder has the head of a task: config.json names a class of transformers with such a head, or
    no class while the weights include those of a classifier."""
    names_class = bool(published.config.get("architectures"))
    has_classifier_weights = f"heads.{CLASSIFIER}.output.weight" in weights.tensors
    return (not names_class and has_classifier_weights) or head_of_class(published.config) is not None


def require_same_reading(published: HFFolder, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError if transformers and lmtool would tokenize the texts of a published classifier differently."""
    settings, config = read_settings(published.path), published.config
    hint = "use another checkpoint"
    # A pooled state (that of one token, or the mean) depends on the special tokens around the texts, which must thus be
    # those of the published classifier. Question answering scores each token, so lmtool's own layout can be used.
    head = head_of_class(config)
    answers = head is not None and head.name == QUESTION_ANSWERING
    text_format = (model if answers else model.sequence_form("transformers")).text_format
    problem = layout_difference(tokenizer, text_format)
    if problem is not None:
        problem = f"its tokenizer.json lays out texts as {problem}"
        hint = f"finetune it with lmtool's layout: lmtool finetune task=NAME checkpoint={published.checkpoint}"
    names = settings.get("model_input_names")
    if names and "token_type_ids" not in names and has_segments(model):
        problem = f"its tokenizer_config.json says model_input_names={names}: both texts of a pair are in one segment"
        hint = "if it was trained with two segments, add token_type_ids to that list in a copy of the folder"
    if model.architecture == "decoder":
        token_settings = [name for name in ("add_bos_token", "add_eos_token") if settings.get(name)]
        pad = config.get("pad_token_id")
        if token_settings:
            setting = f"{token_settings[0]}=true"
            problem = f"its tokenizer_config.json says {setting}, but lmtool adds no special tokens to its texts"
        if pad is not None and pad not in tokenizer.special_ids:
            # transformers classifies by the last token that is not the padding token.
            problem = f"its config.json says pad_token_id={pad}, which is not a special token, so texts may end with it"
    if isinstance(model, EncoderDecoderConfig):
        for key, role in (("decoder_start_token_id", model.start_role), ("eos_token_id", "eos")):
            if config.get(key) not in (None, tokenizer.role(role)):
                problem = f"its config.json says {key}={config[key]}, but model={model.name} has {tokenizer.role(role)}"
    if problem is not None:
        raise UserError(f"checkpoint={published.checkpoint}: {problem}", hint)


def _as_finetuned(saved: JsonObject) -> JsonObject:
    """The folder does not say which data it was trained on; the user names data when the classifier is scored."""
    return {
        **{name: saved[name] for name in ("model", "tokenizer", "max_length")},
        "task": {**saved["task"], "path": "unknown"},
        "tuning": saved.get("tuning", {"name": "full"}),
        "optimizer": AUTO,
        "schedule": AUTO,
        "max_steps": 1,
        "batch_examples": 1,
    }


def _as_pretrained(checkpoint: str, saved: JsonObject, weights: Weights) -> JsonObject:
    """The objective is the one whose head the weights have. Raises UserError if there is none."""
    model = saved.get("model") or {}
    family = chosen_class(saved.get("model"), Choice("model"))
    model_class = family if family is not None and issubclass(family, ModelConfig) else None
    architecture = None if model_class is None else model_class.architecture
    permutes = model_class is not None and model_class.query_stream
    head = "heads.lm." if permutes else "heads.masked_lm." if architecture == "encoder" else None
    if head is None and model.get("tied") is False:
        head = "heads.lm.output."  # an untied output matrix, which a model without a head lacks
    if head is not None and not any(name.startswith(head) for name in weights.tensors):
        raise UserError(
            f"checkpoint={checkpoint} has no language modeling head",
            f"lmtool finetune task=NAME checkpoint={checkpoint}",
        )
    objective = {"encoder": {"name": "plm" if permutes else "mlm"}, "decoder": {"name": "clm"}}.get(
        str(architecture), AUTO
    )
    return {
        "model": saved.get("model"),
        "tokenizer": saved.get("tokenizer", AUTO),
        "objective": objective,
        "data": {"name": "pydocs"},
        "optimizer": AUTO,
        "schedule": AUTO,
        "max_steps": 1,
        "max_length": min(model.get("max_positions", 512), 512),
        "batch_tokens": 8192,
    }


def predicting_learner(trained: Trained, paired: bool) -> BaseLearner:
    """Returns the learner that predicts. A published classifier reads single texts or pairs; a pretrained model reads
    pairs with its head over pairs. Raises UserError if there is no such head. paired: whether the inputs are pairs."""
    if isinstance(trained.config, FinetuneConfig):
        # The folder of a published classifier does not say whether it reads single texts or pairs.
        if not trained.is_published or trained.saved["task"]["name"] != CLASSIFIER:
            return trained.learner()
        columns = (TEXT, PAIR) if paired else (TEXT,)
        return trained.learner(trained.config.task.model_copy(update={"text": columns}))
    if not paired:
        return trained.learner()
    name = next((name for name in PAIR_HEADS if f"heads.{name}.output.weight" in trained.weights.tensors), None)
    if name is None:
        raise UserError(
            f"checkpoint={trained.checkpoint} has no head over pairs of texts ({' or '.join(PAIR_HEADS)})",
            "omit the second text, or finetune the checkpoint on a task over pairs",
        )
    # Mask tokens typed in the texts are parsed as mask tokens, as when masks are filled.
    tokenizer = Tokenizer.load(trained.weights.folder, parse_special_tokens=True)
    task = ClassificationConfig(name=name, text=(TEXT, PAIR), labels=PAIR_HEADS[name])
    return replace(trained, tokenizer=tokenizer).learner(task, {name: LoadedHead(name, {})})
