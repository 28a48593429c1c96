"""The sentence-transformers configuration of a Hugging Face folder: `modules.json` and the files that it names. Every
setting is applied, has no effect, or is refused by name. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.config.saved import JsonObject
from lmtool.errors import UserError
from lmtool.weights.folders import HFFolder, fetched, read_json_file, read_object, read_settings, tokenizer_length

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
READING = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlnet")
)
"""Names of the file with the Transformer module's settings, the current name first."""
MODES: dict[str, JsonObject | None] = {
    "cls": {"pooling": "first", "head_layers": 1},
    "max": {"pooling": "max"},
    "mean": {"pooling": "mean"},
    "mean_sqrt_len_tokens": None,
    "weightedmean": None,
    "lasttoken": {"pooling": "last"},
}
"""Pooling modes, in the order in which their vectors are concatenated, with the equivalent fields of a `task` section;
None if a task lacks the mode. The first token is used without a pooler."""
# Boolean keys of older files.
_FLAGS = dict(
    zip(
        ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"),
        MODES,
        strict=True,
    )
)
_ACTIVATIONS = {
    **{f"torch.nn.modules.activation.{name}": name for name in ("Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")},
    "torch.nn.modules.linear.Identity": "Identity",
}
"""Activations of a Dense module: classes of torch.nn by their name in the file."""
# The only supported values of these keys.
_SUPPORTED: JsonObject = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
    **dict.fromkeys(
        ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"), {}
    ),
}
# Keys without effect on the vector of a text.
_NEUTRAL = (
    "unpad_inputs",
    "query_length",
    "document_length",
    "query_expansion",
    "__version__",
    "requirements",
    "similarity_fn_name",
)


@dataclass(frozen=True)
class Dense:
    """A linear module. folder: its subfolder. activation: a class of torch.nn. residual: whether its input is added."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool


@dataclass(frozen=True)
class Normalize:
    """Scales vectors to length 1. folder: its subfolder."""

    folder: str


@dataclass(frozen=True)
class SentenceEncoder:
    """A sentence encoder's settings.

    Attributes:
        file: The file with the pooling settings.
        modes: Pooling modes; their vectors are concatenated.
        modules: Modules applied after the pooling, in order.
        prompt: Prepended to every text.
        prompts: Names of other prompts, which are not applied.
        max_length: Maximum number of tokens; None if no file sets it.
        dimensions: Number of leading dimensions that are used; None for all.
        lowercases: Whether texts are lowercased first.
    """

    file: str
    modes: tuple[str, ...]
    modules: tuple[Dense | Normalize, ...] = ()
    prompt: str = ""
    prompts: tuple[str, ...] = ()
    max_length: int | None = None
    dimensions: int | None = None
    lowercases: bool = False

    @property
    def extra_steps(self) -> list[str]:
        """Descriptions of the steps besides pooling."""
        steps = [module.folder for module in self.modules]
        steps += [f"the prompt {self.prompt!r}"] if self.prompt else []
        return steps + ([f"truncate_dim={self.dimensions}"] if self.dimensions is not None else [])

    def task_fields(self, checkpoint: str) -> JsonObject:
        """The fields of a `task` section for the same pooling. UserError if a task lacks it."""
        fields = MODES[self.modes[0]] if len(self.modes) == 1 else None
        if fields is None:
            allowed = ", ".join(mode for mode, fields in MODES.items() if fields is not None)
            raise UserError(
                f"checkpoint={checkpoint}: its {self.file} pools by {' and '.join(self.modes)}; a task supports "
                f"{allowed}",
                "set task.pooling=mean, or another checkpoint",
            )
        return fields


class _Settings(JsonObject):
    """A JSON file of a folder; empty if the file is missing. name: the file's path in the folder."""

    def __init__(self, folder: HFFolder, name: str, offline: bool, required: bool = False):
        self.path = fetched(folder, name, offline, required)
        super().__init__({} if self.path is None else read_object(folder.checkpoint, self.path))
        self.folder, self.name = folder, name

    def refused(self, key: str) -> UserError:
        return refused(self.folder, f"{self.name} has {key}={self[key]!r}")

    def require(self, neutral: Collection[str], **values: object) -> None:
        """Raise UserError for keys that are not neutral, unless they have the value here or null."""
        for key, value in self.items():
            if key not in neutral and (key not in values or value not in (values[key], None)):
                raise self.refused(key)

    def typed(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of a type; the default if it is missing or null. UserError for another type."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise UserError(f"{self.path}: {key}={value!r} is not of type {kind.__name__}", "copy it again")
        return value

    def size(self, key: str) -> int | None:
        """A positive integer; None if it is missing or null. UserError for anything else."""
        value = self.typed(key, int)
        if value is not None and (isinstance(value, bool) or value < 1):
            raise UserError(f"{self.path}: {key}={value!r} is not a positive integer", "copy it again")
        return value


def sentence_encoder(folder: HFFolder, offline: bool) -> SentenceEncoder | None:
    """The settings of a sentence encoder's folder; None for any other folder. UserError for an unsupported setting, and
    for unreadable files."""
    modules = _modules(folder, offline)
    if modules is None:
        pooling = _Settings(folder, "1_Pooling/config.json", offline)
        return SentenceEncoder(pooling.name, _modes(pooling)) if pooling.path is not None else None
    if not modules:
        return None
    (_, pooling_folder), *rest = modules
    pooling = _Settings(folder, f"{pooling_folder}/config.json", offline, required=True)
    modes, prompts = _modes(pooling), _Settings(folder, PROMPTS, offline)
    prompts.require((*_NEUTRAL, "prompts", "default_prompt_name", "truncate_dim"), model_type="SentenceTransformer")
    texts, default = prompts.typed("prompts", dict, {}), prompts.typed("default_prompt_name", str)
    if not all(isinstance(text, str) for text in texts.values()) or (default is not None and default not in texts):
        raise prompts.refused("prompts" if default is None else "default_prompt_name")
    prompt = "" if default is None else texts[default]
    if prompt and not pooling.typed("include_prompt", bool, True):
        raise pooling.refused("include_prompt")
    files = (_Settings(folder, name, offline) for name in READING)
    reading = next((file for file in files if file.path is not None), None) or _Settings(folder, READING[0], offline)
    reading.require((*_NEUTRAL, "max_seq_length", "do_lower_case"), **_SUPPORTED)
    return SentenceEncoder(
        pooling.name,
        modes,
        tuple(_module(folder, kind, subfolder, offline) for kind, subfolder in rest),
        prompt,
        tuple(name for name, text in texts.items() if text and name != default),
        reading.size("max_seq_length") or tokenizer_length(read_settings(folder.path)),
        prompts.size("truncate_dim"),
        reading.typed("do_lower_case", bool, False),
    )


def dense_file(folder: HFFolder, module: Dense, offline: bool) -> Path:
    """The weight file of a Dense module. UserError if there is none."""
    path = fetched(folder, f"{module.folder}/model.safetensors", offline, required=False)
    path = path or fetched(folder, f"{module.folder}/pytorch_model.bin", offline)
    assert path is not None
    return path


def refused(folder: HFFolder, problem: str) -> UserError:
    """The error for a setting of a sentence encoder that lmtool does not support."""
    return UserError(
        f"checkpoint={folder.checkpoint}: its {problem}, which lmtool does not support",
        f"use another checkpoint, or a copy without {MODULES} to use its hidden states directly",
    )


def _modules(folder: HFFolder, offline: bool) -> list[tuple[str, str]] | None:
    """Kind and subfolder of the modules after the Transformer, the pooling first; empty without pooling. None without
    modules.json."""
    path = fetched(folder, MODULES, offline, required=False)
    if path is None:
        return None
    modules = read_json_file(folder.checkpoint, path)
    if not isinstance(modules, list):
        raise UserError(f"{path}: not a JSON list", "copy the folder again")
    pairs: list[tuple[str, str]] = []
    for number, module in enumerate(modules):
        class_name, subfolder = (module.get(key) if isinstance(module, dict) else None for key in ("type", "path"))
        if not isinstance(class_name, str) or not isinstance(subfolder, str):
            raise UserError(f"{path}: module {number} has no type and path", "copy the folder again")
        kind = class_name.rpartition(".")[2] if class_name.startswith("sentence_transformers.") else class_name
        if kind not in (("Transformer",), ("Pooling",), ("Dense", "Normalize"))[min(number, 2)] or module.get("kwargs"):
            supported = "supported: Transformer, Pooling, then any of Dense and Normalize"
            raise refused(folder, f"{MODULES} has {class_name} as module {number} ({supported})")
        pairs.append((kind, subfolder))
    if pairs and pairs[0][1] not in ("", "."):
        raise refused(folder, f"{MODULES} has the model in {pairs[0][1]}")
    return pairs[1:]


def _modes(pooling: _Settings) -> tuple[str, ...]:
    """The pooling modes in a Pooling module's settings."""
    flags = {f"pooling_mode_{flag}": mode for flag, mode in _FLAGS.items()}
    modes = pooling.get("pooling_mode", [mode for flag, mode in flags.items() if pooling.typed(flag, bool, False)])
    modes = [modes] if isinstance(modes, str) else modes or ["mean"]
    if not isinstance(modes, list) or not all(isinstance(mode, str) and mode in MODES for mode in modes):
        raise pooling.refused("pooling_mode")
    pooling.require((*flags, "pooling_mode", "include_prompt", "word_embedding_dimension", "embedding_dimension"))
    return tuple(modes)


def _module(folder: HFFolder, kind: str, subfolder: str, offline: bool) -> Dense | Normalize:
    """A module after the pooling."""
    settings = _Settings(folder, f"{subfolder}/config.json", offline, required=kind == "Dense")
    names = dict.fromkeys(("module_input_name", "module_output_name"), "sentence_embedding")
    if kind == "Normalize":
        settings.require((), **names)
        return Normalize(subfolder)
    settings.require(("in_features", "out_features", "bias", "activation_function", "use_residual"), **names)
    activation = settings.typed("activation_function", str, "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS:
        raise settings.refused("activation_function")
    inputs, outputs = settings.size("in_features"), settings.size("out_features")
    if inputs is None or outputs is None:
        raise UserError(f"{settings.path}: in_features or out_features is missing", "copy it again")
    bias, residual = settings.typed("bias", bool, True), settings.typed("use_residual", bool, False)
    return Dense(subfolder, inputs, outputs, bias, _ACTIVATIONS[activation], residual)
