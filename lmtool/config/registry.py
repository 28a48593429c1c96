"""The registry of components: the table of groups and names, the YAML of each in `conf/`, and plugins.

A name is looked up in the table; a string from a configuration is never imported. SHIPPED lists the module of each
configuration class, which is imported when the component is looked up. The builder is a literal in the decorator of
the class, imported when the component is built. So decoding imports only the selected components, and never torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema

from lmtool.config import groups as yaml_groups
from lmtool.config import saved
from lmtool.config.base import Config, JsonObject
from lmtool.errors import UserError
from lmtool.system.terminal import shell_line

ConfigClass = TypeVar("ConfigClass", bound=type[Config])


@dataclass(frozen=True)
class Entry:
    """A component: its group and name, the class of its configuration, and `module:attribute` of its builder."""

    group: str
    name: str
    config: type[Config]
    builder: str


SHIPPED: Mapping[str, Mapping[str, str]] = {
    "data": {
        "lmtool.data.configs": "csv hub jsonl mixture parquet pydocs text",
        "lmtool.tasks.configs.mixture": "task",
    },
    "distill": {
        "lmtool.distillation.configs.base": "none",
        "lmtool.distillation.configs.modes": "codistillation self standard",
    },
    "distill/term": {
        "lmtool.distillation.configs.terms": "attention embeddings hard hidden interchange patience relations soft "
        "states",
    },
    "logger": {"lmtool.reporting.trackers.tensorboard": "tensorboard", "lmtool.reporting.trackers.wandb": "wandb"},
    "model": {
        "lmtool.models.configs": "bert gpt gpt1",
        "lmtool.models.decoder_configs": "llama llama_encoder qwen2 transformer_xl",
        "lmtool.models.encoder_configs": "albert bigbird deberta deberta_v3 distilbert electra modernbert roberta "
        "spanbert xlnet",
        "lmtool.models.encoder_decoder_configs": "bart t5 transformer",
        "lmtool.models.pretransformer_configs": "cnn elmo lstm rnn_attention word_vectors",
    },
    "model/positions": {
        "lmtool.nn.configs": "alibi concatenated learned none rotary shaw sinusoidal t5 tree_depth tree_distance",
    },
    "objective": {
        "lmtool.learners.configs": "mixture",
        "lmtool.objectives.configs": "bilm clm denoising glove mlm mntp plm prefix_lm rtd "
        "sequence_autoencoder skip_gram span span_corruption",
        "lmtool.tasks.configs.mixture": "task",
    },
    "optimizer": {"lmtool.training.configs": "adafactor adam adamw lamb muon stable_adamw"},
    "schedule": {"lmtool.training.configs": "constant cosine inverse_sqrt linear polynomial wsd"},
    "task": {
        "lmtool.tasks.configs.classification": "classification multiple_choice",
        "lmtool.tasks.configs.minimal_pairs": "minimal_pairs",
        "lmtool.tasks.configs.mixture": "glue mixture",
        "lmtool.tasks.configs.sequence": "multi_label regression",
        "lmtool.tasks.configs.texts": "extractive_qa seq2seq span_classification token_classification",
    },
    "task/domain": {"lmtool.tasks.configs.base": "coral dann"},
    "tokenizer": {
        "lmtool.tokenizers.configs": "bpe bytebpe character folder sentencepiece spelled word wordpiece",
    },
    "tuning": {
        "lmtool.tuning.configs.adapter": "adapter adapter_fusion",
        "lmtool.tuning.configs.methods": "bitfit full head ia3 last_n lora prefix prompt ptuning",
    },
    "tuning/regularization": {"lmtool.tuning.configs.base": "l2_sp mixout none"},
    "tuning/schedule": {"lmtool.tuning.configs.base": "gradual_unfreezing none"},
}
"""lmtool's own components: by group and module the names that it registers."""
MULTI_SELECT_GROUPS = frozenset({"logger"})
"""Groups of which a run may select several options, each with a section named after the option."""

_MODULES = {
    (group, name): module
    for group, modules in SHIPPED.items()
    for module, names in modules.items()
    for name in names.split()
}
_TABLES: dict[str, dict[str, Entry]] = {}
_ENTRIES: dict[type[Config], Entry] = {}


def component(group: str, name: str, builder: str) -> Callable[[ConfigClass], ConfigClass]:
    """Class decorator that registers a configuration class in the table of its group.

    `builder` is `package.module:NAME` or `package.module:CLASS.METHOD`; `build` calls it as `builder(config, ...)`.
    """

    def enter(config: ConfigClass) -> ConfigClass:
        table = _TABLES.setdefault(group, {})
        if config.__module__ != _MODULES.get((group, name), config.__module__):
            lookup(group, name)  # registers lmtool's own component first, so that a clash is found below
        if name in table and _origin(table[name].config) != _origin(config):
            origins = [".".join(_origin(owner)) for owner in (table[name].config, config)]
            raise UserError(
                f"{group}={name} is both {origins[0]} and {origins[1]}", "rename the component in the plugin"
            )
        table[name] = _ENTRIES[config] = Entry(group, name, config, builder)
        return config

    return enter


def _origin(config: type[Config]) -> tuple[str, str]:
    return config.__module__, config.__qualname__


def groups() -> tuple[str, ...]:
    """Returns the groups that have components, sorted."""
    return tuple(sorted({*SHIPPED, *_TABLES}))


def names(group: str) -> tuple[str, ...]:
    """Returns the names in a group, sorted."""
    shipped = (name for owner, name in _MODULES if owner == group)
    return tuple(sorted({*shipped, *_TABLES.get(group, {})}))


def entries(group: str) -> tuple[Entry, ...]:
    """Returns the components of a group, sorted by name."""
    return tuple(entry for name in names(group) if (entry := lookup(group, name)) is not None)


def lookup(group: str, name: str) -> Entry | None:
    """Returns the entry of a name, or None."""
    if name not in _TABLES.get(group, {}) and (group, name) in _MODULES:
        importlib.import_module(_MODULES[group, name])
    return _TABLES.get(group, {}).get(name)


def entry_of(config: Config) -> Entry:
    """Returns the entry of a decoded configuration."""
    return _ENTRIES[type(config)]


def imported(name: str) -> Any:
    """Imports the object of a "package.module:attribute" literal in lmtool's own code."""
    module, _, attribute = name.partition(":")
    return attrgetter(attribute)(importlib.import_module(module))


def builder_module(entry: Entry) -> Any:
    return importlib.import_module(entry.builder.partition(":")[0])


def build(config: Config, *arguments: object, **keywords: object) -> Any:
    return imported(entry_of(config).builder)(config, *arguments, **keywords)


class FieldMark(ABC):
    """A mark of a field, whose `validate` decodes the field's value."""

    @abstractmethod
    def validate(self, value: object) -> Any: ...

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        dumped = core_schema.plain_serializer_function_ser_schema(_dumped)
        return core_schema.no_info_plain_validator_function(self.validate, serialization=dumped)


def _dumped(value: Config | dict[str, Config] | None) -> JsonObject | None:
    if isinstance(value, dict):
        return {name: config.model_dump() for name, config in value.items()}
    return None if value is None else value.model_dump()


@dataclass(frozen=True)
class Choice(FieldMark):
    """Marks a field whose class is selected by a name: `model: Annotated[ModelConfig, Choice("model")]`.

    The name is the value of `key` inside the section. It is looked up when the section is validated, so components of
    plugins need no special treatment. The name stays in the section, so the class of every component declares the field
    `key`.
    `optional`: null is allowed.
    """

    group: str
    key: str = "name"
    optional: bool = False

    def validate(self, value: object) -> Config | None:
        """Returns the decoded section. Raises pydantic's errors, which the decoder turns into messages."""
        if isinstance(value, Config) or (value is None and self.optional):
            return value
        if not isinstance(value, dict) or not isinstance(value.get(self.key), str):
            raise PydanticCustomError("choice_missing", "missing {key}", {"key": self.key, "group": self.group})
        entry = lookup(self.group, value[self.key])
        if entry is None:
            raise PydanticCustomError(
                "choice_unknown", "{key}={given}", {"key": self.key, "given": value[self.key], "group": self.group}
            )
        # Validated as JSON, like the whole configuration: a list becomes a tuple, but "7" is not a number, nor 2.5 an
        # integer.
        return entry.config.model_validate_json(json.dumps(entry.config.filled(value)))


@dataclass(frozen=True)
class Several(FieldMark):
    """Marks a field that holds any number of components of a group by name:
    `terms: Annotated[dict[str, TermConfig], Several("distill/term")]`. A null value removes the component."""

    group: str

    def validate(self, value: object) -> dict[str, Config]:
        """Returns the decoded sections. Raises pydantic's errors, which the decoder turns into messages."""
        if not isinstance(value, dict):
            raise PydanticCustomError("several", "a section for each name")
        if all(isinstance(section, Config) for section in value.values()):
            return value
        fields: JsonObject = {entry.name: (entry.config | None, None) for entry in entries(self.group)}
        decoded = create_model("Sections", __base__=Config, **fields).model_validate_json(json.dumps(value))
        sections = {name: getattr(decoded, name) for name in value}
        return {name: section for name, section in sections.items() if section is not None}


def choice_of(field: FieldInfo) -> Choice | None:
    return next((mark for mark in field.metadata if isinstance(mark, Choice)), None)


def several_of(field: FieldInfo) -> Several | None:
    return next((mark for mark in field.metadata if isinstance(mark, Several)), None)


def choices(config: type[Config]) -> dict[str, Choice]:
    return {name: choice for name, field in config.model_fields.items() if (choice := choice_of(field)) is not None}


def chosen_class(value: object, choice: Choice) -> type[Config] | None:
    """Returns the configuration class that the data of a section selects, or None."""
    name = value.get(choice.key) if isinstance(value, dict) else None
    entry = lookup(choice.group, name) if isinstance(name, str) else None
    return None if entry is None else entry.config


ENTRY_POINTS = "lmtool.plugins"

_typed_plugins: tuple[str, ...] = ()


def typed_plugins() -> tuple[str, ...]:
    """Returns the modules that were given with --plugin and imported."""
    return _typed_plugins


def command_line(verb: str, *words: str, modules: Sequence[str] | None = None) -> str:
    """Returns an lmtool command line for the user, with the plugins that it needs. modules: the plugins to include;
    None means the plugins given with --plugin."""
    options = [part for module in (_typed_plugins if modules is None else modules) for part in ("--plugin", module)]
    return shell_line(["lmtool", verb, *options, *words])


@cache
def _installed_plugins() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=ENTRY_POINTS)


def load_plugins(modules: Sequence[str]) -> None:
    """Imports the plugins: those of installed packages, then the modules of --plugin (also from the working folder).

    Raises UserError if one cannot be imported.
    """
    plugins = [
        (point.module, f"the installed plugin {point.name} ({point.module})", "update or uninstall its package")
        for point in _installed_plugins()
    ]
    for module in modules:
        if "/" in module or module.startswith(".") or module.endswith(".py"):
            path = Path(module)
            hint = f"use --plugin {path.stem}, with PYTHONPATH={path.parent} for a module in another folder"
            raise UserError(f"--plugin {module} is a path, not the dotted name of a module", hint)
        hint = "use the dotted name of a module that Python can import from here, and fix any error in it"
        plugins.append((module, f"--plugin {module}", hint))
    if modules and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    for module, subject, hint in plugins:
        try:
            importlib.import_module(module)
        # A plugin can raise any exception; the error names the plugin.
        except Exception as error:
            raise UserError(f"{subject} cannot be imported: {type(error).__name__}: {error}", hint) from error
    global _typed_plugins
    _typed_plugins = tuple(modules)


def plugin_nodes(config_dirs: Sequence[Path] = ()) -> dict[tuple[str, str], tuple[Entry, JsonObject]]:
    """Returns the components without a YAML file, each with its default values, by (group, name). Only components of
    plugins have no YAML file."""
    options = yaml_groups.all_options(config_dirs)
    return {
        (group, name): (entry, default_values(entry.config))
        for group in sorted(_TABLES)
        for name, entry in sorted(_TABLES[group].items())
        if (group, name) not in _MODULES and name not in options.get(group, ())
    }


def all_options(config_dirs: Sequence[Path] = ()) -> dict[str, tuple[str, ...]]:
    """Returns the options of every group, including those of plugins, sorted."""
    options = yaml_groups.all_options(config_dirs)
    for group, name in plugin_nodes(config_dirs):
        options[group] = tuple(sorted({*options.get(group, ()), name}))
    return dict(sorted(options.items()))


def component_of(group: str, option: str, config_dirs: Sequence[Path] = ()) -> str:
    """Returns the component that an option of a group configures, according to the option's YAML."""
    for _ in range(10):  # presets may build on presets
        path = yaml_groups.yaml_file(group, option, config_dirs)
        content = {} if path is None else saved.read_yaml(path)
        parents = (item for item in content.get("defaults", []) if isinstance(item, str) and item != "_self_")
        parent = next(parents, None)
        if parent is None:
            return str(content.get("kind") or content.get("name") or option)
        option = parent
    return option


def default_values(config: type[Config]) -> JsonObject:
    """Returns the defaults of a configuration class as plain data; a required value is `???`."""
    data: JsonObject = {}
    for name, field in config.model_fields.items():
        value = "???" if field.is_required() else field.get_default(call_default_factory=True)
        value = value.model_dump(mode="json") if isinstance(value, Config) else value
        data[name] = list(value) if isinstance(value, tuple) else value
    return data
