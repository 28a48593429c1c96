"""What the adapter_config.json of a folder of PEFT says, with the meaning that its library gives it: of peft 0.21 the
config.py of each method, which modules are meant in tuners/tuners_utils.py, which rank and scale in utils/other.py.

A key of another type is refused, and so is by its name a variant that lmtool does not compute. A key that is not known
here is listed (`unread`): the library writes every field of a method, and has new ones with each version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmtool.config import words
from lmtool.config.checkpoint import ADAPTER
from lmtool.errors import UserError

CONFIG = ADAPTER
MERGE = "merge it with PEFT (merge_and_unload), save the model, and import that"
"""What to do with an adapter that lmtool cannot read."""
TaskType = Literal["SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION"]
"""What PEFT calls the uses of a model."""
Value = TypeVar("Value")
Positive = Annotated[float, Field(gt=0)]


class AdapterSettings(BaseModel):
    """What all methods have. base_model_name_or_path, revision: of the model that the adapter was trained on.
    task_type: what that is used for. ensure_weight_tying: whether tables that are one in the base stay one."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    refused: ClassVar[Mapping[str, str]] = {}
    """Variants that lmtool does not compute: what they are, by the key that asks for them."""
    training: ClassVar[frozenset[str]] = frozenset()
    """Keys that say how the adapter began or was trained, and change no number that it gives."""

    peft_type: str
    task_type: TaskType | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    modules_to_save: list[str] | None = None
    ensure_weight_tying: bool = False

    @property
    def unread(self) -> tuple[str, ...]:
        """The keys that have a value and that nothing here reads."""
        known = {"auto_mapping", "inference_mode", "peft_version", *self.training}
        return tuple(sorted(key for key, value in (self.model_extra or {}).items() if value and key not in known))


class TargetedSettings(AdapterSettings):
    """Of a method that edits modules. target_modules: their names, the ends of these, or a regular expression."""

    target_modules: list[str] | str
    exclude_modules: list[str] | str | None = None

    def targets(self, module: str) -> bool:
        """Whether the method edits a module of this path."""
        saved = self.modules_to_save or ()
        if any(_match(rf"(^|.*\.){name}($|\..*)", module) for name in saved):
            return False
        if self.exclude_modules and _named(self.exclude_modules, module):
            return False
        return self.target_modules == "all-linear" or _named(self.target_modules, module)


class Ia3Settings(TargetedSettings):
    """(IA)3. feedforward_modules: those whose inputs are scaled, not their outputs."""

    training: ClassVar[frozenset[str]] = frozenset({"fan_in_fan_out", "init_ia3_weights"})

    feedforward_modules: list[str] | str = Field(default_factory=list)

    def scales_inputs(self, module: str) -> bool:
        """Whether the inputs of a module are scaled."""
        if isinstance(self.feedforward_modules, str):
            return _match(self.feedforward_modules, module, complete=True)
        return module.endswith(tuple(self.feedforward_modules))


class LoraSettings(TargetedSettings):
    """LoRA."""

    refused: ClassVar[Mapping[str, str]] = {
        "use_qalora": "QALoRA", "layer_replication": "replicated layers", "trainable_token_indices": "trained tokens",
        "target_parameters": "targets that are no maps", "alora_invocation_tokens": "activated LoRA",
        "use_bdlora": "block-diagonal LoRA", "arrow_config": "Arrow", "kasa_config": "KaSA",
        "velora_config": "VeLoRA", "monteclora_config": "MonteCLoRA",
    }  # fmt: skip
    training: ClassVar[frozenset[str]] = frozenset(
        {
            "fan_in_fan_out", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config",
            "megatron_core", "qalora_group_size",
        }
    )  # fmt: skip
    beginnings: ClassVar[frozenset[str]] = frozenset({"gaussian", "eva", "orthogonal", "mica"})
    """Of the initial values those that leave the weights of the base as they are."""

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
        chosen = self.layers_to_transform
        if not super().targets(module) or chosen is None or chosen == [] or isinstance(self.target_modules, str):
            return super().targets(module)
        if module in self.target_modules:
            return True
        stacks = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        patterns = [rf"(?:^|.*?\.){stack}\.(?P<layer>\d+)\." for stack in stacks or ()]
        patterns = patterns or [r".*?\.[^.]*\.(?P<layer>\d+)\."]
        match = next(filter(None, (_compiled(pattern).match(module) for pattern in patterns)), None)
        return match is not None and int(match["layer"]) in ([chosen] if isinstance(chosen, int) else chosen)

    def rank(self, module: str) -> int:
        """Of a module's update."""
        return _of(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        """What a module's update is multiplied with."""
        rank = self.rank(module)
        return _of(self.alpha_pattern or {}, module, self.lora_alpha) / (rank**0.5 if self.use_rslora else rank)


class PromptSettings(AdapterSettings):
    """Soft prompts, p-tuning and prefixes, whose tensor is what their encoder computes: its shape says the sizes that
    the file repeats. num_transformer_submodules: 2 where an encoder-decoder has them on both sides."""

    training: ClassVar[frozenset[str]] = frozenset(
        {
            "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs",
            "encoder_reparameterization_type", "encoder_hidden_size", "encoder_num_layers", "encoder_dropout",
            "prefix_projection", "init_weights", "num_attention_heads", "token_dim", "num_layers",
        }
    )  # fmt: skip

    num_virtual_tokens: int = Field(ge=1)
    num_transformer_submodules: int | None = None


SETTINGS: dict[str, type[AdapterSettings]] = {
    "LORA": LoraSettings,
    "IA3": Ia3Settings,
    "PROMPT_TUNING": PromptSettings,
    "P_TUNING": PromptSettings,
    "PREFIX_TUNING": PromptSettings,
}
"""By PEFT's type."""


def settings_of(path: Path, content: Mapping[str, object]) -> AdapterSettings:
    """What an adapter_config.json says. path: of the file. UserError for a method or a variant that lmtool does not
    have, and where a key is missing or of another type."""
    method = content.get("peft_type")
    if not isinstance(method, str) or method not in SETTINGS:
        value = words.quoted(method)
        raise UserError(f"{path}: peft_type: given {value}; lmtool reads {', '.join(SETTINGS)}", MERGE)
    try:
        settings = SETTINGS[method].model_validate(dict(content))
    except ValidationError as error:
        first, further = error.errors()[0], len({error["loc"][0] for error in error.errors()}) - 1
        key = str(first["loc"][0])
        reason = "it is missing" if key not in content else f"given {words.quoted(content[key])}"
        allowed = words.allowed(SETTINGS[method].model_fields[key])
        more = f" (and {further} more)" if further else ""
        raise UserError(
            f"{path}: {key}: {reason}; allowed: {allowed}{more}", "save the adapter again, or correct what it says"
        ) from error
    for key, variant in settings.refused.items():
        if content.get(key):
            raise UserError(f"{path}: {key}: given {words.quoted(content[key])}; lmtool has no {variant}", MERGE)
    if isinstance(settings, LoraSettings):
        start = settings.init_lora_weights
        if isinstance(start, str) and start not in settings.beginnings:
            raise UserError(
                f"{path}: init_lora_weights={start} changes the weights of the base before training",
                "save it with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), or merge it "
                "(merge_and_unload), save the model, and import that",
            )
    return settings


def _named(names: Sequence[str] | str, module: str) -> bool:
    """Whether a list names a path or an end of it, or a regular expression all of it."""
    if isinstance(names, str):
        return _match(names, module, complete=True)
    return module in names or module.endswith(tuple(f".{name}" for name in names))


def _of(pattern: Mapping[str, Value], module: str, default: Value) -> Value:
    """What a pattern says of a module: the first of its regular expressions that is its path or an end of it."""
    return next((value for key, value in pattern.items() if _match(rf"(.*\.)?({key})$", module)), default)


def _match(pattern: str, module: str, complete: bool = False) -> bool:
    compiled = _compiled(pattern)
    return (compiled.fullmatch if complete else compiled.match)(module) is not None


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"{CONFIG}: {pattern!r} is no regular expression: {error}", "save the adapter again, or correct it"
        ) from error
