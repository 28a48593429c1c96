"""Decodes PEFT's adapter_config.json.

Source: peft 0.21. The keys are in config.py of each method, the rules for target modules in tuners/tuners_utils.py, and
the rules for rank and scale in utils/other.py.

Keys with a wrong type and unsupported variants raise an error. Unknown keys are only listed (`unread_keys`), because
PEFT writes every field of a method, and each version of PEFT adds fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmtool.config import messages
from lmtool.errors import UserError
from lmtool.runs.finding import ADAPTER
from lmtool.system.terminal import counted

CONFIG, WEIGHTS = ADAPTER, "adapter_model.safetensors"
MERGE = "merge the adapter with PEFT (merge_and_unload), save the model, and import that"
DELTA = "format=delta exports the tuned weights for lmtool"
DISAGREE = "use the base that the adapter was trained on, or save the adapter again"
SAVE_AGAIN = "save the complete adapter again"
"""Hints: MERGE for an adapter that lmtool does not support, DELTA for a tuned model that PEFT does not support,
DISAGREE and SAVE_AGAIN for an adapter whose files do not match or are incomplete."""
TaskType = Literal["SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"]
Value = TypeVar("Value")
Positive = Annotated[float, Field(gt=0)]


class AdapterSettings(BaseModel):
    """The keys that all methods have in common, under the names that PEFT uses.

    Attributes:
        task_type: The kind of model that the adapter was trained on.
        base_model_name_or_path: Folder or hub name of the model that the adapter was trained on.
        revision: Branch, tag or commit of that model on the hub.
        modules_to_save: Names of modules that were trained completely and stored with the adapter.
        ensure_weight_tying: Whether layers that are tied in the base stay tied.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    unsupported_variants: ClassVar[Mapping[str, str]] = {}
    """The name of each variant that lmtool does not support, by the key that enables it."""
    training_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys that only initialization and training use. They do not change the outputs of a trained adapter."""

    peft_type: str
    task_type: TaskType | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    modules_to_save: list[str] | None = None
    ensure_weight_tying: bool = False

    @property
    def unread_keys(self) -> tuple[str, ...]:
        """Unknown keys that have a value other than false, 0 or empty."""
        neutral = {"auto_mapping", "inference_mode", "peft_version", *self.training_keys}
        return tuple(sorted(key for key, value in (self.model_extra or {}).items() if value and key not in neutral))


class TargetedSettings(AdapterSettings):
    """Keys of methods that edit single modules. `target_modules` and `exclude_modules` are lists of paths or suffixes
    of paths, or a regular expression for the whole path."""

    target_modules: list[str] | str
    exclude_modules: list[str] | str | None = None

    def targets(self, module: str) -> bool:
        """Returns whether the method edits the module with this path."""
        saved = self.modules_to_save or ()
        if any(_match(rf"(^|.*\.){name}($|\..*)", module) for name in saved):
            return False
        if self.exclude_modules and _is_listed(self.exclude_modules, module):
            return False
        return self.target_modules == "all-linear" or _is_listed(self.target_modules, module)


class Ia3Settings(TargetedSettings):
    """Keys of (IA)3. In modules that `feedforward_modules` names, the inputs are scaled instead of the outputs."""

    training_keys: ClassVar[frozenset[str]] = frozenset({"fan_in_fan_out", "init_ia3_weights"})

    feedforward_modules: list[str] | str = Field(default_factory=list)

    def scales_inputs(self, module: str) -> bool:
        """Returns whether the inputs of the module are scaled."""
        if isinstance(self.feedforward_modules, str):
            return _match(self.feedforward_modules, module, complete=True)
        return module.endswith(tuple(self.feedforward_modules))


_LORA_TRAINING_KEYS = """
fan_in_fan_out loftq_config eva_config corda_config lora_ga_config megatron_config megatron_core qalora_group_size
"""


class LoraSettings(TargetedSettings):
    """Keys of LoRA and DoRA."""

    unsupported_variants: ClassVar[Mapping[str, str]] = {
        "use_qalora": "QALoRA",
        "layer_replication": "replicated layers",
        "trainable_token_indices": "trained tokens",
        "target_parameters": "targets that are not modules",
        "alora_invocation_tokens": "activated LoRA",
        "use_bdlora": "block-diagonal LoRA",
        "arrow_config": "Arrow",
        "kasa_config": "KaSA",
        "velora_config": "VeLoRA",
        "monteclora_config": "MonteCLoRA",
    }
    training_keys: ClassVar[frozenset[str]] = frozenset(_LORA_TRAINING_KEYS.split())
    initializations: ClassVar[frozenset[str]] = frozenset({"gaussian", "eva", "orthogonal", "mica"})
    """Names of the initializations that do not change the weights of the base."""

    r: int = Field(8, ge=1)
    lora_alpha: Positive = 8.0
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    use_rslora: bool = False
    use_dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: bool = False
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] | None = None
    alpha_pattern: dict[str, Positive] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    def targets(self, module: str) -> bool:
        # As in PEFT, the layer number is read from the path of the module.
        layers = self.layers_to_transform
        if not super().targets(module) or layers is None or layers == [] or isinstance(self.target_modules, str):
            return super().targets(module)
        if module in self.target_modules:
            return True
        names = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        patterns = [rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\." for name in names or ()]
        patterns = patterns or [r".*?\.[^.]*\.(?P<layer>\d+)\."]
        match = next(filter(None, (_compile(pattern).match(module) for pattern in patterns)), None)
        return match is not None and int(match["layer"]) in ([layers] if isinstance(layers, int) else layers)

    def rank(self, module: str) -> int:
        """Returns the rank of the update of a module."""
        return _pattern_value(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        """Returns the factor of the update of a module: alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""
        rank = self.rank(module)
        alpha = _pattern_value(self.alpha_pattern or {}, module, self.lora_alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)


_PROMPT_TRAINING_KEYS = """
prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs encoder_reparameterization_type
encoder_hidden_size encoder_num_layers encoder_dropout prefix_projection init_weights num_attention_heads token_dim
num_layers
"""


class PromptSettings(AdapterSettings):
    """Keys of prompt tuning, p-tuning and prefix tuning.

    PEFT stores the output of a prompt encoder and not the encoder, so the keys of the encoder have no effect.
    `num_transformer_submodules` is 2 if both the encoder and the decoder have a prompt.
    """

    training_keys: ClassVar[frozenset[str]] = frozenset(_PROMPT_TRAINING_KEYS.split())

    num_virtual_tokens: int = Field(ge=1)
    num_transformer_submodules: int | None = None


SETTINGS: dict[str, type[AdapterSettings]] = {
    "LORA": LoraSettings,
    "IA3": Ia3Settings,
    "PROMPT_TUNING": PromptSettings,
    "P_TUNING": PromptSettings,
    "PREFIX_TUNING": PromptSettings,
}
"""The class that decodes the keys of a method, by `peft_type`."""


def settings_of(path: Path, content: Mapping[str, object]) -> AdapterSettings:
    """Decodes the content of adapter_config.json. Raises UserError if lmtool does not support the method or the
    variant, or if a key is missing or has a wrong type."""
    method = content.get("peft_type")
    if not isinstance(method, str) or method not in SETTINGS:
        value = messages.quoted(method)
        raise UserError(f"{path}: peft_type: given {value}; lmtool reads {', '.join(SETTINGS)}", MERGE)
    try:
        settings = SETTINGS[method].model_validate(dict(content))
    except ValidationError as error:
        first, other_keys = error.errors()[0], len({error["loc"][0] for error in error.errors()}) - 1
        key = str(first["loc"][0])
        problem = f"{key} is missing" if key not in content else f"{key}: given {messages.quoted(content[key])}"
        allowed = messages.allowed_values(SETTINGS[method].model_fields[key])
        others = f" (also wrong: {counted(other_keys, 'other key')})" if other_keys else ""
        raise UserError(
            f"{path}: {problem}; allowed: {allowed}{others}", "save the adapter again, or correct the file"
        ) from error
    for key, variant in settings.unsupported_variants.items():
        if content.get(key):
            raise UserError(f"{path}: {key}: given {messages.quoted(content[key])}; lmtool has no {variant}", MERGE)
    if isinstance(settings, LoraSettings):
        initialization = settings.init_lora_weights
        if isinstance(initialization, str) and initialization not in settings.initializations:
            raise UserError(
                f"{path}: init_lora_weights={initialization} changes the base's weights before training",
                "save the adapter with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), or "
                "merge it (merge_and_unload), save the model, and import that",
            )
    return settings


def _is_listed(names: Sequence[str] | str, module: str) -> bool:
    """`names` are module paths or suffixes of them, or a regular expression that must match the whole path."""
    if isinstance(names, str):
        return _match(names, module, complete=True)
    return module in names or module.endswith(tuple(f".{name}" for name in names))


def _pattern_value(pattern: Mapping[str, Value], module: str, default: Value) -> Value:
    return next((value for key, value in pattern.items() if _match(rf"(.*\.)?({key})$", module)), default)


def _match(pattern: str, module: str, complete: bool = False) -> bool:
    """Whether a regular expression matches the start of a module's path, or with `complete` the whole path."""
    compiled = _compile(pattern)
    return (compiled.fullmatch if complete else compiled.match)(module) is not None


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"{CONFIG}: {pattern!r} is not a regular expression: {error}",
            "save the adapter again, or correct the file",
        ) from error
