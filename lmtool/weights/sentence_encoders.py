"""How a published sentence encoder makes one vector of a text, by `modules.json` in its folder and the files that it
names, as sentence-transformers writes them. Everything is applied or refused by name. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtool.config.saved import JsonObject
from lmtool.errors import UserError
from lmtool.weights.folders import HFFolder, fetched, read_settings

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
READING = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlnet")
)
"""The names of the file that says how texts are read, the present one first."""
MODES: dict[str, JsonObject | None] = {
    "cls": {"pooling": "first", "head_layers": 1},
    "max": {"pooling": "max"},
    "mean": {"pooling": "mean"},
    "mean_sqrt_len_tokens": None,
    "weightedmean": None,
    "lasttoken": {"pooling": "last"},
}
"""Its pooling modes, in the order in which their vectors stand side by side, and what a task says for the same, if it
can. The first token is read as it is, without a pooler."""
# The flags of older files.
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
"""Those of a linear map, by the name in its file: classes of torch.nn."""
# Values without effect on one text's vector, and those that are all that lmtool does.
_OF_READING: JsonObject = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
    **dict.fromkeys(
        ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"), {}
    ),
}
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
    """A linear map of D inputs. place: its sub-folder. activation: a class of torch.nn. residual: whether its input is
    added."""

    place: str
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool


@dataclass(frozen=True)
class Normalize:
    """Vectors of length 1. place: its sub-folder."""

    place: str


@dataclass(frozen=True)
class SentenceEncoder:
    """file: that names the pooling. modes: of the pooling. behind: what is applied to its vector, in order. prompt:
    stands before every text. prompts: names of those that stand before some. max_length: of a text, in tokens; None
    where no file says it. dimensions: that are kept of a vector, None for all. lowercases: whether texts are lowercased
    first."""

    file: str
    modes: tuple[str, ...]
    behind: tuple[Dense | Normalize, ...] = ()
    prompt: str = ""
    prompts: tuple[str, ...] = ()
    max_length: int | None = None
    dimensions: int | None = None
    lowercases: bool = False

    @property
    def further(self) -> list[str]:
        """What it does beside pooling, in words."""
        parts = [module.place for module in self.behind]
        parts += [f"the prompt {self.prompt!r}"] if self.prompt else []
        return parts + ([f"truncate_dim={self.dimensions}"] if self.dimensions is not None else [])

    def task_fields(self, checkpoint: str) -> JsonObject:
        """The fields of a task that pool as it does. UserError where a task has no such pooling."""
        fields = MODES[self.modes[0]] if len(self.modes) == 1 else None
        if fields is None:
            known = ", ".join(mode for mode, fields in MODES.items() if fields is not None)
            raise UserError(
                f"checkpoint={checkpoint}: its {self.file} pools by {' and '.join(self.modes)}; a task has {known}",
                "give task.pooling=mean, or another checkpoint",
            )
        return fields


class _Settings(dict[str, Any]):
    """A JSON object of a folder, empty where the file is not there. name: of the file in the folder."""

    def __init__(self, folder: HFFolder, name: str, offline: bool, required: bool = False):
        path = fetched(folder, name, offline, required)
        super().__init__({} if path is None else _read(path, dict))
        self.folder, self.name, self.found = folder, name, path is not None

    def refused(self, key: str) -> UserError:
        return refused(self.folder, f"{self.name} has {key}={self[key]!r}")

    def require(self, neutral: Collection[str], **values: Any) -> None:
        """UserError for keys that are neither read, nor neutral, nor have the given value."""
        for key, value in self.items():
            if key not in neutral and (key not in values or value not in (values[key], None)):
                raise self.refused(key)

    def typed(self, key: str, kind: type, default: Any = None) -> Any:
        """A value that is left out, null, or of a type. UserError for another one."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise UserError(f"{self.folder.path / self.name}: {key}={value!r} is no {kind.__name__}", "copy it again")
        return value

    def size(self, key: str) -> int | None:
        """A number from 1 on; None where it is left out or null. UserError for anything else."""
        value = self.typed(key, int)
        if value is not None and (isinstance(value, bool) or value < 1):
            raise UserError(f"{self.folder.path / self.name}: {key}={value!r} is no size", "copy it again")
        return value


def sentence_encoder(folder: HFFolder, offline: bool) -> SentenceEncoder | None:
    """What a folder says; None where it is no sentence encoder's. UserError, naming it, for what lmtool does not do,
    and for files that cannot be read."""
    modules = _modules(folder, offline)
    if modules is None:
        pooling = _Settings(folder, "1_Pooling/config.json", offline)
        return SentenceEncoder(pooling.name, _modes(pooling)) if pooling.found else None
    if not modules:
        return None
    (_, place), *others = modules
    pooling = _Settings(folder, f"{place}/config.json", offline, required=True)
    modes, prompts = _modes(pooling), _Settings(folder, PROMPTS, offline)
    prompts.require((*_NEUTRAL, "prompts", "default_prompt_name", "truncate_dim"), model_type="SentenceTransformer")
    texts, default = prompts.typed("prompts", dict, {}), prompts.typed("default_prompt_name", str)
    if not all(isinstance(text, str) for text in texts.values()) or (default is not None and default not in texts):
        raise prompts.refused("prompts" if default is None else "default_prompt_name")
    prompt = "" if default is None else texts[default]
    if prompt and not pooling.typed("include_prompt", bool, True):
        raise pooling.refused("include_prompt")
    reading = next((file for name in READING if (file := _Settings(folder, name, offline)).found), None)
    reading = reading if reading is not None else _Settings(folder, READING[0], offline)
    reading.require((*_NEUTRAL, "max_seq_length", "do_lower_case"), **_OF_READING)
    return SentenceEncoder(
        pooling.name,
        modes,
        tuple(_module(folder, kind, place, offline) for kind, place in others),
        prompt,
        tuple(name for name, text in texts.items() if text and name != default),
        reading.size("max_seq_length") or _longest(folder),
        prompts.size("truncate_dim"),
        reading.typed("do_lower_case", bool, False),
    )


def dense_file(folder: HFFolder, module: Dense, offline: bool) -> Path:
    """The file with the weights of a linear map. UserError where there is none."""
    path = fetched(folder, f"{module.place}/model.safetensors", offline, required=False)
    path = path or fetched(folder, f"{module.place}/pytorch_model.bin", offline)
    assert path is not None
    return path


def refused(folder: HFFolder, problem: str) -> UserError:
    """The error of something in a sentence encoder's folder that lmtool does not do."""
    return UserError(
        f"checkpoint={folder.checkpoint}: its {problem}, which lmtool does not do",
        f"give another checkpoint, or a copy without {MODULES}: its hidden states are read as they are",
    )


def _modules(folder: HFFolder, offline: bool) -> list[tuple[str, str]] | None:
    """Kind and sub-folder of the modules behind the model, the pooling first; none where nothing is pooled. None where
    no file lists them."""
    path = fetched(folder, MODULES, offline, required=False)
    if path is None:
        return None
    modules = _read(path, list)
    pairs: list[tuple[str, str]] = []
    for number, module in enumerate(modules):
        named, place = (module.get(key) if isinstance(module, dict) else None for key in ("type", "path"))
        if not isinstance(named, str) or not isinstance(place, str):
            raise UserError(f"{path}: module {number} has no type and path", "copy the folder again")
        kind = named.rpartition(".")[2] if named.startswith("sentence_transformers.") else named
        if kind not in (("Transformer",), ("Pooling",), ("Dense", "Normalize"))[min(number, 2)] or module.get("kwargs"):
            known = "lmtool has Transformer, then Pooling, then any of Dense and Normalize"
            raise refused(folder, f"{MODULES} has {named} as module {number} ({known})")
        pairs.append((kind, place))
    if pairs and pairs[0][1] not in ("", "."):
        raise refused(folder, f"{MODULES} has the model in {pairs[0][1]}")
    return pairs[1:]


def _modes(pooling: _Settings) -> tuple[str, ...]:
    """The modes of a pooling."""
    flags = {f"pooling_mode_{flag}": mode for flag, mode in _FLAGS.items()}
    given = pooling.get("pooling_mode", [mode for flag, mode in flags.items() if pooling.typed(flag, bool, False)])
    modes = [given] if isinstance(given, str) else given or ["mean"]
    if not isinstance(modes, list) or not all(isinstance(mode, str) and mode in MODES for mode in modes):
        raise pooling.refused("pooling_mode")
    pooling.require((*flags, "pooling_mode", "include_prompt", "word_embedding_dimension", "embedding_dimension"))
    return tuple(modes)


def _module(folder: HFFolder, kind: str, place: str, offline: bool) -> Dense | Normalize:
    """A module behind the pooling."""
    settings = _Settings(folder, f"{place}/config.json", offline, required=kind == "Dense")
    names = dict.fromkeys(("module_input_name", "module_output_name"), "sentence_embedding")
    if kind == "Normalize":
        settings.require((), **names)
        return Normalize(place)
    settings.require(("in_features", "out_features", "bias", "activation_function", "use_residual"), **names)
    activation = settings.typed("activation_function", str, "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS:
        raise settings.refused("activation_function")
    inputs, outputs = settings.size("in_features"), settings.size("out_features")
    if inputs is None or outputs is None:
        raise UserError(f"{folder.path / settings.name}: it has no in_features and out_features", "copy it again")
    bias, residual = settings.typed("bias", bool, True), settings.typed("use_residual", bool, False)
    return Dense(place, inputs, outputs, bias, _ACTIVATIONS[activation], residual)


def _longest(folder: HFFolder) -> int | None:
    """The longest text that its tokenizer reads, in tokens; one without a limit has one of 10^30."""
    length = read_settings(folder.path).get("model_max_length")
    return int(length) if isinstance(length, int | float) and 1 <= length <= 10**9 else None


def _read(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise UserError(f"{path}: not JSON: {problem}", "copy the folder again") from problem
    if not isinstance(content, kind):
        raise UserError(f"{path}: no JSON {'list' if kind is list else 'object'}", "copy the folder again")
    return content
