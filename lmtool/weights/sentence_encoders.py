"""Reads the configuration that sentence-transformers stores in a Hugging Face folder: `modules.json` and the files that
it names. A setting that lmtool cannot apply raises an error unless it has no effect. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.weights.folders import HFFolder, fetch_file, read_json_file, read_object, read_settings, tokenizer_length

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
TRANSFORMER_FILES = tuple(
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
"""Pooling modes, with the equivalent fields of a `task` section; None if tasks do not support the mode. The vectors of
several modes are concatenated in this order. "cls" reads the first token without a pooler."""
_FLAGS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
"""The Boolean key of each of the `MODES` in older files, without "pooling_mode_"."""
_ACTIVATIONS = {
    **{f"torch.nn.modules.activation.{name}": name for name in ("Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")},
    "torch.nn.modules.linear.Identity": "Identity",
}
"""The class of torch.nn for each activation that the file of a Dense module may name."""
# Keys of the Transformer module, each with the only value that is supported.
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
    """A linear layer with an activation. folder: subfolder with its files. activation: name of a class of torch.nn.
    residual: whether the input is added to the output."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool


@dataclass(frozen=True)
class Normalize:
    """A module that scales vectors to length 1. `folder` is the subfolder that modules.json names."""

    folder: str


@dataclass(frozen=True)
class SentenceEncoder:
    """A sentence encoder's settings.

    Attributes:
        file: Name of the file with the pooling settings.
        modes: Pooling modes, whose vectors are concatenated.
        modules: The modules after the pooling, in the order in which they are applied.
        prompt: The text that is prepended to every text.
        prompts: Names of other prompts, which lmtool does not apply.
        max_length: Maximum number of tokens of a text; None if no file sets it.
        dimensions: Number of leading dimensions of a vector that are retained; None means all.
        lowercases: Whether texts are lowercased before they are tokenized.
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
        """Descriptions of the steps other than pooling."""
        steps = [module.folder for module in self.modules]
        steps += [f"the prompt {self.prompt!r}"] if self.prompt else []
        return steps + ([f"truncate_dim={self.dimensions}"] if self.dimensions is not None else [])

    def task_fields(self, checkpoint: str) -> JsonObject:
        """Returns the fields of a `task` section for the same pooling. Raises UserError if tasks do not support this
        pooling."""
        fields = MODES[self.modes[0]] if len(self.modes) == 1 else None
        if fields is None:
            allowed = ", ".join(mode for mode, fields in MODES.items() if fields is not None)
            raise UserError(
                f"checkpoint={checkpoint}: {self.file} sets the pooling {' and '.join(self.modes)}; a task supports "
                f"{allowed}",
                "set task.pooling=mean, or another checkpoint",
            )
        return fields


class _Settings(JsonObject):
    """The content of a JSON file in a Hugging Face folder; empty if an optional file is missing."""

    def __init__(self, folder: HFFolder, name: str, offline: bool, required: bool = False):
        self.path = fetch_file(folder, name, offline, required)
        super().__init__({} if self.path is None else read_object(self.path))
        self.folder, self.name = folder, name

    def unsupported_value(self, key: str) -> UserError:
        return unsupported_error(self.folder, f"{self.name} has {key}={self[key]!r}")

    def require(self, neutral: Collection[str], **values: object) -> None:
        """neutral: keys that may have any value. values: the only supported value of each other key, apart from
        null."""
        for key, value in self.items():
            if key not in neutral and (key not in values or value not in (values[key], None)):
                raise self.unsupported_value(key)

    def get_typed(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise UserError(f"{self.path}: {key}={value!r} is not of type {kind.__name__}", "copy the file again")
        return value

    def get_positive(self, key: str) -> int | None:
        value = self.get_typed(key, int)
        if value is not None and (isinstance(value, bool) or value < 1):
            raise UserError(f"{self.path}: {key}={value!r} is not a positive integer", "copy the file again")
        return value


def sentence_encoder(folder: HFFolder, offline: bool) -> SentenceEncoder | None:
    """Reads the settings of a sentence encoder; None if the folder is not one. Raises UserError if a file cannot be
    read, or if lmtool does not support a setting."""
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
    texts, default = prompts.get_typed("prompts", dict, {}), prompts.get_typed("default_prompt_name", str)
    if not all(isinstance(text, str) for text in texts.values()) or (default is not None and default not in texts):
        raise prompts.unsupported_value("prompts" if default is None else "default_prompt_name")
    prompt = "" if default is None else texts[default]
    if prompt and not pooling.get_typed("include_prompt", bool, True):
        raise pooling.unsupported_value("include_prompt")
    files = (_Settings(folder, name, offline) for name in TRANSFORMER_FILES)
    transformer = next((file for file in files if file.path is not None), None)
    transformer = transformer or _Settings(folder, TRANSFORMER_FILES[0], offline)
    transformer.require((*_NEUTRAL, "max_seq_length", "do_lower_case"), **_SUPPORTED)
    return SentenceEncoder(
        pooling.name,
        modes,
        tuple(_module(folder, kind, subfolder, offline) for kind, subfolder in rest),
        prompt,
        tuple(name for name, text in texts.items() if text and name != default),
        transformer.get_positive("max_seq_length") or tokenizer_length(read_settings(folder.path)),
        prompts.get_positive("truncate_dim"),
        transformer.get_typed("do_lower_case", bool, False),
    )


def dense_file(folder: HFFolder, module: Dense, offline: bool) -> Path:
    """Returns the path of the weight file of a Dense module. Raises UserError if there is none."""
    path = fetch_file(folder, f"{module.folder}/model.safetensors", offline, required=False)
    path = path or fetch_file(folder, f"{module.folder}/pytorch_model.bin", offline)
    assert path is not None
    return path


def unsupported_error(folder: HFFolder, problem: str) -> UserError:
    """Returns the error for a setting of a sentence encoder that lmtool does not support."""
    return UserError(
        f"checkpoint={folder.checkpoint}: {problem}, which lmtool does not support",
        f"use another checkpoint, or a copy without {MODULES} to use the model's hidden states directly",
    )


def _modules(folder: HFFolder, offline: bool) -> list[tuple[str, str]] | None:
    """Returns the kind and the subfolder of each module after the Transformer, first the Pooling; None without
    modules.json."""
    path = fetch_file(folder, MODULES, offline, required=False)
    if path is None:
        return None
    modules = read_json_file(path)
    if not isinstance(modules, list):
        raise UserError(f"{path} is not a JSON list", "copy the folder again")
    pairs: list[tuple[str, str]] = []
    for number, module in enumerate(modules):
        class_name, subfolder = (module.get(key) if isinstance(module, dict) else None for key in ("type", "path"))
        if not isinstance(class_name, str) or not isinstance(subfolder, str):
            raise UserError(f"{path}: module {number} has no type or no path", "copy the folder again")
        kind = class_name.rpartition(".")[2] if class_name.startswith("sentence_transformers.") else class_name
        allowed_kinds = (("Transformer",), ("Pooling",), ("Dense", "Normalize"))[min(number, 2)]
        if kind not in allowed_kinds or module.get("kwargs"):
            supported = "supported: Transformer, Pooling, then any of Dense and Normalize"
            raise unsupported_error(folder, f"{MODULES} has {class_name} as module {number} ({supported})")
        pairs.append((kind, subfolder))
    if pairs and pairs[0][1] not in ("", "."):
        raise unsupported_error(folder, f"{MODULES} has the model in {pairs[0][1]}")
    return pairs[1:]


def _modes(pooling: _Settings) -> tuple[str, ...]:
    flags = {f"pooling_mode_{flag}": mode for flag, mode in zip(_FLAGS, MODES, strict=True)}
    modes = pooling.get("pooling_mode", [mode for flag, mode in flags.items() if pooling.get_typed(flag, bool, False)])
    modes = [modes] if isinstance(modes, str) else modes or ["mean"]
    if not isinstance(modes, list) or not all(isinstance(mode, str) and mode in MODES for mode in modes):
        raise pooling.unsupported_value("pooling_mode")
    pooling.require((*flags, "pooling_mode", "include_prompt", "word_embedding_dimension", "embedding_dimension"))
    return tuple(modes)


def _module(folder: HFFolder, kind: str, subfolder: str, offline: bool) -> Dense | Normalize:
    settings = _Settings(folder, f"{subfolder}/config.json", offline, required=kind == "Dense")
    names = dict.fromkeys(("module_input_name", "module_output_name"), "sentence_embedding")
    if kind == "Normalize":
        settings.require((), **names)
        return Normalize(subfolder)
    settings.require(("in_features", "out_features", "bias", "activation_function", "use_residual"), **names)
    activation = settings.get_typed("activation_function", str, "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS:
        raise settings.unsupported_value("activation_function")
    inputs, outputs = settings.get_positive("in_features"), settings.get_positive("out_features")
    if inputs is None or outputs is None:
        raise UserError(f"{settings.path}: in_features or out_features is missing", "copy the file again")
    bias, residual = settings.get_typed("bias", bool, True), settings.get_typed("use_residual", bool, False)
    return Dense(subfolder, inputs, outputs, bias, _ACTIVATIONS[activation], residual)
