"""Writes folders: a checkpoint in transformers' format (export), or an imported model as a checkpoint of lmtool."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import cast

from torch import Tensor

from lmtool.config import saved
from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import builder_module, entry_of
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GENERATION
from lmtool.models.configs import ModelConfig, TransformerConfig
from lmtool.models.encoder_decoder_configs import EncoderDecoderConfig, T5Config
from lmtool.models.family import HFFormat
from lmtool.runs.checkpoints import save_tensors
from lmtool.runs.finding import CONFIG, MODEL, STATE
from lmtool.system.files import draft_path, write_manifest
from lmtool.system.secrets import masked, masked_data
from lmtool.tokenizers.classes import Settings, TokenizerClass, transformers_class
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import part_of
from lmtool.weights.base import BASE, Base
from lmtool.weights.comparing import ADVERSARIAL, different_ids
from lmtool.weights.reading import to_hf_names
from lmtool.weights.saved_model import sequence_form_of
from lmtool.weights.task_heads import (
    CLASSIFIER,
    DECISIONS,
    HEADS,
    MULTIPLE_CHOICE,
    TOKEN_CLASSIFIER,
    TaskHead,
    head_of_task,
    labels_of,
)


@dataclass(frozen=True)
class Export:
    """The content of an exported folder. architecture: name of the transformers class. config: of config.json.
    hf_tensors, lmtool_tensors: the same tensors under transformers' and under lmtool's names. left_out: parts and
    tensors that are not exported."""

    architecture: str
    config: JsonObject
    hf_tensors: dict[str, Tensor]
    lmtool_tensors: dict[str, Tensor]
    left_out: tuple[str, ...]


def export_of(
    model: ModelConfig, tensors: Mapping[str, Tensor], task: Mapping[str, object] | None, tokenizer: Tokenizer
) -> Export:
    """Converts a checkpoint to transformers' format. Raises UserError if transformers does not have the family, the
    variant or the task's head. task: the `task` section of a finetuned checkpoint, including its labels."""
    declared = _format_of(model)
    if declared is None:
        alternative = "" if model.contextual else "; format=vectors writes its vectors as text"
        hint = f"use the run with lmtool, or export a model of a family that transformers has{alternative}"
        raise UserError(f"model={model.name} has no counterpart in transformers", hint)
    assert isinstance(model, TransformerConfig)
    renamed, head = dict(tensors), None
    if task is not None:
        head = _hf_head(model, task, declared)
        prefix = f"heads.{task['name']}."
        renamed = {
            f"heads.{head.name}.{name[len(prefix) :]}" if name.startswith(prefix) else name: tensor
            for name, tensor in tensors.items()
        }
    heads = {part_of(name).removeprefix("heads.") for name in renamed if name.startswith("heads.")}
    # Leave out task heads other than the one that `task` describes.
    usable_heads = {name for name in heads if name not in HEADS or (head is not None and name == head.name)}
    model_class = declared.class_of_heads(usable_heads)
    required_heads = model_class.heads
    assert head is None or head.name in required_heads, f"{head.name} without its pooler"
    part_names = {"backbone", *(f"heads.{name}" for name in required_heads)}
    if not set(required_heads) & set(HEADS):
        part_names.add("heads.lm")
    lmtool_tensors = {name: tensor for name, tensor in renamed.items() if part_of(name) in part_names}
    hf_tensors = to_hf_names(model, lmtool_tensors)
    # Tensors that still have our names do not exist in transformers.
    lmtool_tensors = {name: tensor for name, tensor in lmtool_tensors.items() if name not in hf_tensors}
    hf_tensors = {name: tensor for name, tensor in hf_tensors.items() if not name.startswith(("heads.", "backbone."))}
    untied = declared.unties and declared.tied.output in hf_tensors
    if untied:
        hf_tensors = declared.tied.separate(hf_tensors)
    hf_tensors |= model_class.unread_tensors(model.hidden_size)
    left_out = {part_of(name) for name in renamed} - {part_of(name) for name in lmtool_tensors}
    # Thresholds and other tensors of a task's decision rule, which transformers does not have.
    decisions = {name: DECISIONS.get(name.rpartition(".")[2]) for name in tensors}
    left_out |= {f"{name} ({rule})" for name, rule in decisions.items() if rule is not None}
    config = {
        **declared.to_hf_config(model),
        "architectures": [model_class.name],
        "dtype": "float32",
        **({"tie_word_embeddings": False} if untied else {}),
        **special_ids(model, tokenizer),
    }
    if task is not None and {CLASSIFIER, TOKEN_CLASSIFIER, MULTIPLE_CHOICE} & set(required_heads):
        config |= labels_of(task)
    return Export(model_class.name, config, hf_tensors, lmtool_tensors, tuple(sorted(left_out)))


# The fields of SequenceForm in messages.
_PARTS_OF_HEAD = {
    "text_format": "the special tokens around texts",
    "pooling": "the pooling",
    "pooled": "the pooler",
    "bias": "the bias of the output layer",
    "dense": "the dense layer before the output layer",
}


def model_caveat(model: ModelConfig) -> str | None:
    """Returns why a model will not be exported although transformers has its family, and what to do instead; None if it
    will be, or if transformers does not have the family."""
    declared = _format_of(model)
    if declared is None or not isinstance(model, TransformerConfig):
        return None
    try:
        declared.to_hf_config(model)
    except UserError as error:
        hint = str(error.hint)
        return f"{error.message}; to export, {hint.partition(', or ')[2] or hint}"
    return None


def head_caveat(model: ModelConfig, task: JsonMapping) -> str | None:
    """Returns why a head of a task will not be exported although transformers has one, and the keys that change this;
    None if it will be, or if transformers has none for the family."""
    declared, head = _format_of(model), head_of_task(task)
    if declared is None or head is None or not any(head.name in entry.heads for entry in declared.classes):
        return None
    try:
        _hf_head(model, task, declared)
    except UserError as error:
        return f"{error.message}; to export it, set {str(error.hint).partition('finetune with ')[2]}"
    return None


def _format_of(model: ModelConfig) -> HFFormat | None:
    declared: HFFormat | None = getattr(builder_module(entry_of(model)), "HF_FORMAT", None)
    # llama_encoder is in the module of llama.
    return None if declared is None or declared.model != model.name else declared


def _hf_head(model: ModelConfig, task: Mapping[str, object], declared: HFFormat) -> TaskHead:
    """Raises UserError if the family has no such head in transformers, or one that differs (for example, in
    pooling)."""
    name, form, head = task["name"], sequence_form_of(model, task), head_of_task(task)
    if head is None or not any(head.name in entry.heads for entry in declared.classes):
        reason = f"transformers has no class for task.kind={task.get('kind')}"
        if head is not None:
            unsupported = declared.unsupported.items()
            reasons = (f"{hf_form}: {why}" for hf_form, why in unsupported if hf_form.endswith(head.suffix))
            reason = next(reasons, f"transformers has no class ...{head.suffix} for this family")
        raise UserError(
            f"heads.{name} cannot be exported for model={model.name}: {reason}",
            "use the run with lmtool: lmtool predict, or lmtool.load in Python",
        )
    if head.scores_tokens:
        return head
    hf_form = model.sequence_form("transformers")
    if form != hf_form:
        differences = [
            _PARTS_OF_HEAD[field.name]
            for field in fields(form)
            if getattr(form, field.name) != getattr(hf_form, field.name)
        ]
        raise UserError(
            f"heads.{name} does not fit transformers' ...{head.suffix} of model={model.name}, which differs in "
            f"{' and '.join(differences)}",
            f"use the run with lmtool, or finetune with task.head=transformers task.pooling={hf_form.pooling} and no "
            "task.head_layers",
        )
    return head


def special_ids(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the ids of special tokens under the keys of config.json."""
    ids = {f"{role}_token_id": tokenizer.roles[role] for role in ("pad", "bos", "eos") if role in tokenizer.roles}
    if isinstance(model, EncoderDecoderConfig):
        ids["decoder_start_token_id"] = tokenizer.role(model.start_role)
    return ids


def generation_keys(model: ModelConfig, tokenizer: Tokenizer) -> JsonObject:
    """Returns the content of generation_config.json.

    The embedding may have more rows than the vocabulary has entries. `vocab_size` in config.json has to be the number
    of rows, so that transformers can load them; generation_config.json therefore suppresses the rows without an entry.
    """
    keys: JsonObject = {**special_ids(model, tokenizer)}
    if tokenizer.vocab_size < model.vocab_size:
        keys["suppress_tokens"] = list(range(tokenizer.vocab_size, model.vocab_size))
    if isinstance(model, T5Config) and model.num_layers < model.layers_of_decoder:
        keys["use_cache"] = False  # transformers gives the cache of T5's decoder as many layers as the encoder has
    return keys


@dataclass(frozen=True)
class TokenizerSettings:
    """How AutoTokenizer should encode texts for an exported model. segments: whether to return token_type_ids.
    max_length: in tokens. split_special_tokens: whether special tokens in a text are treated as plain text. pads_left:
    whether shorter texts of a batch are padded on the left, so that the last token is a real one."""

    segments: bool
    max_length: int
    split_special_tokens: bool
    pads_left: bool

    def settings(self) -> JsonObject:
        """Returns the settings under the keys of tokenizer_config.json."""
        names = ["input_ids", *(["token_type_ids"] if self.segments else []), "attention_mask"]
        return {
            "model_max_length": self.max_length,
            # Without these names, a generic tokenizer class never returns token_type_ids; in older versions of
            # transformers it always does.
            "model_input_names": names,
            **({"split_special_tokens": True} if self.split_special_tokens else {}),
            **({"padding_side": "left"} if self.pads_left else {}),
        }


def write_export(
    export: Export,
    model: ModelConfig,
    tokenizer: Tokenizer,
    tokenizer_settings: TokenizerSettings,
    card: str,
    output: Path,
    compare: Callable[[Path], None],
) -> None:
    """Writes an exported folder, completely or not at all. card: text of README.md. compare: reads the finished draft
    of the folder, and raises CheckFailed if it is not what was exported. Raises UserError if the folder is not empty or
    cannot be written, or if transformers would encode texts for the model differently."""

    def fill(draft: Path) -> None:
        save_tensors(export.hf_tensors, draft / MODEL)
        write_json(draft / CONFIG, export.config)
        write_tokenizer_files(draft, tokenizer, tokenizer_settings, card)
        require_same_ids(draft, model, tokenizer)
        if model.architecture != "encoder":
            write_json(draft / GENERATION, generation_keys(model, tokenizer))
        compare(draft)

    write_folder_atomically(output, fill)


def write_tokenizer_files(draft: Path, tokenizer: Tokenizer, tokenizer_settings: TokenizerSettings, card: str) -> None:
    """Writes the files that AutoTokenizer reads, and README.md with the text `card`."""
    tokenizer.save(draft)
    settings = json.loads((draft / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(draft / "tokenizer_config.json", {**settings, **tokenizer_settings.settings()})
    (draft / "README.md").write_text(card, encoding="utf-8")


def require_same_ids(folder: Path, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError if transformers would encode texts differently: for some families, it ignores the settings in
    the folder and always uses the tokenizer class of the family."""
    kind = transformers_class(folder, Settings.read(folder))
    if not isinstance(kind, TokenizerClass):
        return
    try:
        different = different_ids(tokenizer, Tokenizer.load(folder))
        reason = f"gives other ids to {len(different)} of {len(ADVERSARIAL)} unusual strings" if different else None
    except UserError:
        reason = f"uses a {kind.model} vocabulary"
    if reason is not None:
        raise UserError(
            f"the tokenizer cannot be exported with model={model.name}: transformers uses {kind.names[0]}, "
            f"which {reason}; lmtool itself can use the run",
            f"train with the tokenizer of the paper (lmtool show recipe={model.name}), or give this run another one: "
            "lmtool import checkpoint=RUN tokenizer=FOLDER",
        )


def require_new(output: Path) -> None:
    """Raises UserError if `output` is a file or a folder with content."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output={output} exists and is not empty", "use a new folder")


def write_folder_atomically(output: Path, fill: Callable[[Path], None]) -> None:
    """Creates a folder with the files that `fill` writes, or nothing if `fill` fails. Raises UserError if the folder
    exists and is not empty, or cannot be written."""
    require_new(output)
    draft = draft_path(output)
    try:
        draft.mkdir(parents=True)
        fill(draft)
        if output.is_dir():
            output.rmdir()
        draft.rename(output)
    except OSError as error:
        raise UserError(f"output={output}: {error.strerror or error}", "use a writable folder") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_json(path: Path, content: object, ascii_only: bool = False) -> None:
    """Writes a JSON file. With `ascii_only`, other characters are escaped."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=ascii_only) + "\n", encoding="utf-8")


IMPORT_COMMAND = "import"
"""The `command` in the configuration of imported checkpoints."""


@dataclass(frozen=True)
class ImportedModel:
    """The content of an imported checkpoint.

    Attributes:
        tensors: The tensors under lmtool's names.
        source: A record of where the weights come from, for the `source` section.
        settings: The configuration of a Hugging Face folder (`HFFolder.saved_config` or `HFFolder.classifier_config`),
            of which the sections for task, length, generation and tokenizer are used.
        tuning: The `tuning` section of a tuned model, or None.
        base: The base of a tuned model, or None. `tensors` then lacks the tensors that are read from the base.
        files: The content of additional JSON files, by name.
    """

    tensors: Mapping[str, Tensor]
    model: ModelConfig
    tokenizer: Tokenizer | None
    source: Mapping[str, object]
    settings: Mapping[str, object] = field(default_factory=dict)
    tuning: Mapping[str, object] | None = None
    base: Base | None = None
    files: Mapping[str, object] = field(default_factory=dict)

    def config(self, output: Path) -> dict[str, object]:
        """Returns the content of config.json for a checkpoint in the folder `output`. Secrets in the source are masked,
        except in its revision, because a commit hash only looks like a secret."""
        source = {**masked_data(dict(self.source)), "revision": self.source.get("revision")}
        config: dict[str, object] = {"version": saved.VERSION, "command": IMPORT_COMMAND, "seed": 0, "source": source}
        config["model"] = json.loads(self.model.model_dump_json())
        config |= {name: self.settings[name] for name in ("task", "max_length", "generation") if name in self.settings}
        config |= {} if self.tuning is None else {"tuning": dict(self.tuning)}
        if self.tokenizer is not None:
            declared = cast(Mapping[str, object], self.settings.get("tokenizer", {}))
            config["tokenizer"] = {**declared, "name": "folder", "path": masked(str(output))}
        return config


def write_import(imported: ImportedModel, output: Path) -> None:
    """Writes an imported checkpoint, completely or not at all. Raises UserError if the folder is not empty or cannot be
    written."""
    base = {} if imported.base is None else {BASE: imported.base.to_plain()}
    files = {**base, **imported.files}
    write_checkpoint(imported.config(output), imported.tensors, imported.tokenizer, output, files)


def write_checkpoint(
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
    output: Path,
    files: Mapping[str, object],
) -> None:
    """Writes a checkpoint of step 0, completely or not at all. config: the content of config.json. tensors: under
    lmtool's names. files: the content of additional JSON files, by name. Raises UserError if the folder is not empty or
    cannot be written."""

    def fill(draft: Path) -> None:
        save_tensors(tensors, draft / MODEL)
        write_json(draft / CONFIG, config, ascii_only=True)
        (draft / STATE).write_text(json.dumps({"step": 0}) + "\n", encoding="utf-8")
        for name, content in files.items():
            write_json(draft / name, content, ascii_only=True)
        if tokenizer is not None:
            tokenizer.save(draft)
        write_manifest(draft, {"step": 0})

    write_folder_atomically(output, fill)
