"""The words of errors in a configuration: the key, its value, the allowed values, and what to type instead.

An unknown key is looked up among the names of other tools' options before similar spellings are searched.
"""

from __future__ import annotations

import json
import re
import shlex
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lmtool.config import groups
from lmtool.config.base import Config, JsonObject, summary
from lmtool.config.registry import Choice, Several, choices, chosen_class, entries, lookup, names
from lmtool.config.registry import groups as components
from lmtool.errors import Problem, nearest, nearest_keys
from lmtool.system.secrets import masked

_KINDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "true or false"),
    types.NoneType: ("null", "nulls"),
}


def quoted(value: object) -> str:
    """Returns a value as the user would write it, with its type if that is ambiguous: `"7" (text)`."""
    # Masked before it is truncated: half a secret would not be recognized.
    text = masked(json.dumps(value, ensure_ascii=False, default=str))
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({kind_of_value(value)})"


def kind_of_value(value: object) -> str:
    """Returns the type of a plain value in one or two words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true/false"
    if isinstance(value, int):
        return "whole number"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list | tuple):
        return "list"
    return "section" if isinstance(value, dict) else type(value).__name__


def allowed_values(field: FieldInfo) -> str:
    """Returns what a field allows: `a number, above 0, or null`."""
    return _allowed_values(field.annotation, field.metadata)


def allowed_item(field: FieldInfo) -> str:
    """Returns what an item of a list may be; for other fields, what the field allows."""
    items = _items(field.annotation)
    return _allowed_values(items, []) if items is not None else allowed_values(field)


def _items(annotation: object) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (tuple, list):
        return arguments[0]
    if origin in (Union, types.UnionType, Annotated):
        return next((items for argument in arguments if (items := _items(argument)) is not None), None)
    return None


def _allowed_values(annotation: object, metadata: list[Any]) -> str:
    for mark in metadata:
        if isinstance(mark, Choice):
            return f"a section whose {mark.key} is one of {', '.join(names(mark.group))}"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed_values(arguments[0], [*metadata, *arguments[1:]])
    if origin in (Union, types.UnionType):
        parts = [_allowed_values(argument, metadata) for argument in arguments if argument is not type(None)]
        if type(None) in arguments:
            parts.append("null")
        return "; or ".join(parts) if len(parts) > 2 else ", or ".join(parts)
    return _plain(annotation, origin, arguments) + bounds(metadata)


def _plain(annotation: Any, origin: Any, arguments: tuple[Any, ...]) -> str:
    if origin is Literal:
        return one_of(arguments)
    if origin is tuple:
        items = [argument for argument in arguments if argument is not Ellipsis]
        if not items:
            return "an empty list"
        plural = f"a list of {_plural(items[0])}"
        return plural if len(arguments) != len(items) else f"a list of {len(items)} values: {_plural(items[0])}"
    if origin is dict:
        return f"a section of {_plural(arguments[1])} by name"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return f"a section of {', '.join(annotation.model_fields)}"
    return _KINDS.get(annotation, (annotation.__name__ if isinstance(annotation, type) else str(annotation), ""))[0]


def _plural(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return f"values out of {one_of(get_args(annotation))}"
    if get_origin(annotation) is Annotated:
        plain, *metadata = get_args(annotation)
        limits = bounds(metadata).removeprefix(", ")
        return f"{_plural(plain)}, each {limits}" if limits else _plural(plain)
    return _KINDS.get(annotation, ("", "values"))[1]


def one_of(options: Any) -> str:
    """Returns `a, b or c`."""
    texts = ["null" if option is None else str(option) or '""' for option in options]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


_LIMITS = {
    "ge": ", at least {}",
    "gt": ", above {}",
    "le": ", at most {}",
    "lt": ", below {}",
    "min_length": ", {} or longer",
    "max_length": ", {} at most",
    "pattern": " that matches {}",
    "multiple_of": ", a multiple of {}",
}
"""Text of a constraint by its attribute."""


def bounds(metadata: list[Any]) -> str:
    """Returns the bounds in the constraints of a field: `, at least 1, below 10`."""
    marks = [mark for item in metadata for mark in (item.metadata if isinstance(item, FieldInfo) else [item])]
    limits = ((form, getattr(mark, name, None)) for mark in marks for name, form in _LIMITS.items())
    return "".join(form.format(limit) for form, limit in limits if limit is not None)


def allowed_names(field: FieldInfo) -> tuple[str, ...]:
    """Returns the names that a field allows, also if it may be null or is a list of them; empty for other fields."""
    literals: list[str] = []

    def walk(annotation: object) -> None:
        if get_origin(annotation) is Literal:
            literals.extend(str(literal) for literal in get_args(annotation))
        elif annotation is bool:
            literals.extend(("true", "false"))
        else:
            for argument in get_args(annotation):
                walk(argument)

    walk(field.annotation)
    return tuple(literals)


Form = str | Mapping[str, str]
ANY = "*"
"""In a mapping of forms: any value that is not listed."""

_HELD_OUT = "omit it: held-out rows are scored every evaluate_every= steps, and by `lmtool evaluate RUN`"
_RESUME = "the same command with the same name= resumes; so does `lmtool resume RUN`"
_ACCUMULATION = (
    "batch_examples= (or batch_tokens=) is a whole step's batch; micro_batch_tokens= limits the tokens of one forward, "
    "and gradients are accumulated"
)
_UPLOAD = "lmtool uploads nothing: `lmtool export RUN output=FOLDER` writes a folder for transformers"
_BY_STEPS = "intervals are in steps: evaluate_every=, checkpoint_every= and log_every="
_NOT_NEEDED = "omit it: batches are packed without padding"
_NO_CODE = "omit it: lmtool runs no code of a checkpoint"
_WORKERS = "omit it: batches are made in the training process, in memory"
_SPLITS = "name the files train.csv, dev.csv and test.csv, in one folder: task=FOLDER"
_BATCH = ("batch_examples={} batch_tokens=null", "batch_tokens= is the size here: tokens in one forward, at most")
_FP16 = {"true": "precision=fp16", "false": "precision=fp32"}
_WEIGHTS = "checkpoint={weights}"
_LOGGERS = {
    "wandb": "logger=wandb",
    "tensorboard": "logger=tensorboard",
    "true": "logger=wandb",
    "none": "logger=null",
    ANY: "logger=wandb or logger=tensorboard report to a tracker; the run folder always has all metrics",
}

KEY_FORMS: dict[str, Form | tuple[Form, ...]] = {
    # transformers.TrainingArguments: huggingface.co/docs/transformers/main_classes/trainer
    "learning_rate": "optimizer.lr={}",
    "per_device_train_batch_size": _BATCH,
    "per_device_eval_batch_size": (
        "omit it: held-out rows are read in the batches of training, limited by micro_batch_tokens=",
        "batch_tokens= is the size here: tokens in one forward, at most",
    ),
    "gradient_accumulation_steps": _ACCUMULATION,
    "auto_find_batch_size": _ACCUMULATION,
    "num_train_epochs": "max_epochs={}",
    "weight_decay": "optimizer.weight_decay={}",
    "adam_beta1": "optimizer.betas=[{},0.999]",
    "adam_beta2": "optimizer.betas=[0.9,{}]",
    "adam_epsilon": "optimizer.epsilon={}",
    "max_grad_norm": "optimizer.clip_norm={}",
    "lr_scheduler_type": "schedule={}",
    "optim": "optimizer={}",
    "warmup_ratio": "schedule.warmup_fraction={}",
    "warmup_steps": "schedule.warmup_steps={}",
    "save_steps": "checkpoint_every={}",
    "eval_steps": "evaluate_every={}",
    "logging_steps": "log_every={}",
    "save_strategy": _BY_STEPS,
    "eval_strategy": _BY_STEPS,
    "evaluation_strategy": _BY_STEPS,
    "logging_strategy": _BY_STEPS,
    "save_total_limit": "keep={}",
    "load_best_model_at_end": "omit it: the best checkpoint is always saved, and checkpoint=RUN uses it",
    "metric_for_best_model": "task.metric={}",
    "early_stopping_patience": "patience={}",
    "output_dir": ("run_dir={}", "output={}"),
    "overwrite_output_dir": "omit it: a run is never overwritten; name=NAME starts another one",
    "resume_from_checkpoint": {"true": _RESUME, "false": _RESUME, ANY: "a run is resumed by `lmtool resume {}`"},
    "run_name": "name={}",
    "report_to": _LOGGERS,
    "logging_dir": "logger=tensorboard logger.tensorboard.folder={}",
    "fp16": _FP16,
    "bf16": {"true": "precision=bf16", "false": "precision=fp32"},
    "use_cpu": {"true": "device=cpu", "false": "device=auto"},
    "no_cuda": {"true": "device=cpu", "false": "device=auto"},
    "torch_compile": "compile={}",
    "data_seed": "seed={}",
    "label_smoothing_factor": ("task.loss.label_smoothing={}", "objective.label_smoothing={}"),
    "group_by_length": _NOT_NEEDED,
    "dataloader_num_workers": _WORKERS,
    "deepspeed": "devices=N trains on several devices, and parallel=fsdp shards the weights across them",
    "local_rank": "omit it: torchrun sets it for each process, and devices=N starts processes without torchrun",
    "do_train": "omit it: `lmtool pretrain` and `lmtool finetune` train",
    "do_eval": _HELD_OUT,
    "do_predict": "omit it: `lmtool predict RUN input=FILE` labels a file",
    "push_to_hub": _UPLOAD,
    "hub_model_id": _UPLOAD,
    # run_glue.py, run_mlm.py, run_clm.py: github.com/huggingface/transformers/tree/main/examples/pytorch
    "model_name_or_path": _WEIGHTS,
    "config_name": "set model=NAME, one of `lmtool list model`; model.KEY= changes its sizes",
    "model_type": "model={}",
    "tokenizer_name": "tokenizer=folder tokenizer.path={weights}",
    "task_name": "task={}",
    "dataset_name": ("data=hub data.hub={}", "task=custom task.kind=classification task.hub={}"),
    "dataset_config_name": (
        "the subset follows the name: data.hub=org/name:SUBSET",
        "the subset follows the name: task.hub=org/name:SUBSET",
    ),
    "train_file": ("task={}", "data={}"),
    "validation_file": ("data.validation={}", _SPLITS),
    "test_file": _SPLITS,
    "text_column_name": ("task.text=[{}]", "data.text={}"),
    "label_column_name": "task.label={}",
    "max_train_samples": "task.train_examples={}",
    "max_seq_length": "max_length={}",
    "block_size": "max_length={}",
    "mlm_probability": "objective.probability={}",
    "line_by_line": {"true": "data.document=line", "false": "data.document=block"},
    "validation_split_percentage": "set data.validation_fraction=, the fraction that is held out: 0.05 for 5 percent",
    "pad_to_max_length": _NOT_NEEDED,
    "trust_remote_code": _NO_CODE,
    "max_train_steps": "max_steps={}",
    "num_warmup_steps": "schedule.warmup_steps={}",
    "checkpointing_steps": "checkpoint_every={}",
    # transformers' BertConfig, GPT2Config and T5Config: huggingface.co/docs/transformers/model_doc
    "num_hidden_layers": "model.num_layers={}",
    "n_layer": "model.num_layers={}",
    "n_embd": "model.hidden_size={}",
    "d_model": "model.hidden_size={}",
    "num_attention_heads": "model.num_heads={}",
    "n_head": "model.num_heads={}",
    "intermediate_size": "model.feedforward_size={}",
    "d_ff": "model.feedforward_size={}",
    "max_position_embeddings": "model.max_positions={}",
    "n_positions": "model.max_positions={}",
    "hidden_dropout_prob": "model.dropout={}",
    "attention_probs_dropout_prob": "model.attention_dropout={}",
    "layer_norm_eps": "model.norm_epsilon={}",
    "initializer_range": "model.initializer_std={}",
    # transformers.GenerationConfig: huggingface.co/docs/transformers/main_classes/text_generation
    "num_beams": ("beams={}", "task.generation.beams={}"),
    "no_repeat_ngram_size": ("no_repeat_ngram={}", "task.generation.no_repeat_ngram={}"),
    "do_sample": {"true": "temperature=1.0", "false": "temperature=0.0"},
    # peft.LoraConfig and PromptTuningConfig: huggingface.co/docs/peft/package_reference
    "r": "tuning=lora tuning.rank={}",
    "lora_r": "tuning=lora tuning.rank={}",
    "lora_alpha": "tuning=lora tuning.alpha={}",
    "lora_dropout": "tuning=lora tuning.dropout={}",
    "target_modules": "tuning=lora tuning.projections=[{}]",
    "use_rslora": "tuning=lora tuning.rank_stabilised={}",
    "modules_to_save": "omit it: the task's head always learns",
    "num_virtual_tokens": "tuning=prompt tuning.length={}",
    "peft_type": "tuning={}",
    # fairseq-train: fairseq.readthedocs.io/en/latest/command_line_tools.html
    "lr": "optimizer.lr={}",
    "arch": "model={}",
    "criterion": "objective={}",
    "max_update": "max_steps={}",
    "max_epoch": "max_epochs={}",
    "update_freq": _ACCUMULATION,
    "clip_norm": "optimizer.clip_norm={}",
    "adam_betas": "optimizer.betas=[{}]",
    "adam_eps": "optimizer.epsilon={}",
    "lr_scheduler": "schedule={}",
    "warmup_updates": "schedule.warmup_steps={}",
    "total_num_update": "max_steps={}",
    "tokens_per_sample": "max_length={}",
    "max_sentences": _BATCH,
    "dropout": "model.dropout={}",
    "attention_dropout": "model.attention_dropout={}",
    "save_dir": "run_dir={}",
    "restore_file": _WEIGHTS,
    "save_interval_updates": "checkpoint_every={}",
    "validate_interval_updates": "evaluate_every={}",
    "keep_interval_updates": "keep={}",
    "log_interval": "log_every={}",
    "distributed_world_size": "devices={}",
    # lightning.Trainer and LightningCLI: lightning.ai/docs/pytorch/stable/common/trainer.html
    "seed_everything": "seed={}",
    "accelerator": "device={}",
    "strategy": "parallel={}",
    "num_nodes": "omit it: torchrun starts the processes on several machines, and each runs `lmtool pretrain ...`",
    "gradient_clip_val": "optimizer.clip_norm={}",
    "accumulate_grad_batches": _ACCUMULATION,
    "val_check_interval": "evaluate_every={}",
    "check_val_every_n_epoch": _BY_STEPS,
    "log_every_n_steps": "log_every={}",
    "default_root_dir": "run_dir={}",
    "fast_dev_run": "debug=short",
    "ckpt_path": _WEIGHTS,
    "deterministic": "omit it: every random choice is a function of seed=",
    # Small training scripts, such as nanoGPT: github.com/karpathy/nanoGPT
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "epochs": "max_epochs={}",
    "num_epochs": "max_epochs={}",
    "max_iters": "max_steps={}",
    "num_steps": "max_steps={}",
    "eval_interval": "evaluate_every={}",
    "gpus": "devices={}",
    "num_gpus": "devices={}",
    "num_workers": _WORKERS,
    "wandb": _LOGGERS,
    "model_path": _WEIGHTS,
    "data_dir": ("task={}", "data={}"),
    "dataset": ("task={}", "data={}"),
}
VALUE_FORMS: dict[str, dict[str, str]] = {
    # torch.device; lightning's accelerators
    "device": {"gpu": "cuda", "0": "cuda:0", "1": "cuda:1"},
    # torch's dtypes; lightning.Trainer(precision=)
    "precision": {
        "16": "fp16", "16-mixed": "fp16", "16-true": "fp16", "half": "fp16", "float16": "fp16",
        "bf16-mixed": "bf16", "bf16-true": "bf16", "bfloat16": "bf16",
        "32": "fp32", "32-true": "fp32", "float32": "fp32", "full": "fp32",
    },
    # transformers.training_args.OptimizerNames
    "optimizer": {
        "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    },
    # transformers.SchedulerType; fairseq's --lr-scheduler
    "schedule": {
        "constant_with_warmup": "constant", "cosine_with_restarts": "cosine", "polynomial_decay": "polynomial",
        "warmup_stable_decay": "wsd",
    },
    # lightning's and torch's strategies
    "parallel": {"fsdp2": "fsdp", "ddp_find_unused_parameters_true": "ddp", "deepspeed": "fsdp"},
    # fairseq's --criterion
    "objective": {"masked_lm": "mlm", "cross_entropy": "clm", "causal_lm": "clm", "lm": "clm"},
    # fairseq's --arch; transformers' model_type
    "model": {
        "gpt2": "gpt", "gpt2-medium": "gpt_medium", "gpt2-large": "gpt_large", "gpt2-xl": "gpt_xl",
        "transformer_lm_gpt2_small": "gpt", "roberta_base": "roberta", "bert_base": "bert", "bart_base": "bart",
    },
    # peft.PeftType
    "tuning": {
        "prompt_tuning": "prompt", "prefix_tuning": "prefix", "p_tuning": "ptuning", "lora": "lora", "ia3": "ia3",
        "none": "full",
    },
    # The modules that transformers' families call by these names
    "tuning.projections": {
        "query": "q_proj", "key": "k_proj", "value": "v_proj", "o_proj": "out_proj", "q": "q_proj", "k": "k_proj",
        "v": "v_proj", "o": "out_proj", "up_proj": "fc_in", "gate_proj": "fc_gate", "down_proj": "fc_out",
        "all-linear": "q_proj,k_proj,v_proj,out_proj,fc_in,fc_out",
    },
}  # fmt: skip
FLAG_FORMS: dict[str, str] = {
    # Hydra's: hydra.cc/docs/advanced/hydra-command-line-flags
    "-cn": "--config FILE reads a saved configuration; experiment={} chooses a composed one",
    "--config-name": "--config FILE reads a saved configuration; experiment={} chooses a composed one",
    "-cd": "did you mean --config-dir {}?",
    "-cp": "did you mean --config-dir {}? It adds a folder of YAML",
    "--config-path": "did you mean --config-dir {}? It adds a folder of YAML",
    "-c": "did you mean --cfg {}?",
    "--info": "`lmtool doctor` prints what is installed, --cfg job prints a configuration",
    "--resolve": "omit it: --cfg job prints resolved values",
    "-p": "omit it: --cfg job prints the complete configuration",
    "--package": "omit it: --cfg job prints the complete configuration",
    "-r": "omit it: `lmtool pretrain` already runs",
    "--run": "omit it: `lmtool pretrain` already runs",
    "--hydra-help": "lmtool --help",
    # Common flags
    "--plugins": "did you mean --plugin {}?",
    "-v": "lmtool --version; --debug shows tracebacks",
    "--verbose": "--debug shows tracebacks",
}
_COMMAND = re.compile(r"`[^`]*`")
_KEY = re.compile(r"([a-z][\w.]*)=")
_OVERRIDES = re.compile(r"[a-z][\w.]*=\S+( [a-z][\w.]*=\S+)*")


@dataclass(frozen=True)
class Meaning:
    """The meaning of an unknown key. words: overrides with the same meaning in lmtool; empty if there is no such key.
    hint: the hint for the user. of_another_tool: whether the key is another tool's, rather than a misspelling."""

    words: tuple[str, ...]
    hint: str
    of_another_tool: bool = False

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The keys with their values as on the command line."""
        return tuple((word.partition("=")[0], word.partition("=")[2]) for word in self.words)


def meaning_elsewhere(key: str, value: object, has: Callable[[str], bool]) -> Meaning | None:
    """Returns the meaning of another tool's key in lmtool; None if it is not in the table.

    value: plain data; None: unknown. has: whether the command has a key. If the key is dotted, its last part is looked
    up. Its section must be that of lmtool's key (`tuning.r`), or one that the command does not have
    (`trainer.accelerator`).
    """
    section, _, last = key.rpartition(".")
    any_section = not section or not has(section.partition(".")[0])
    for form in _forms_of(KEY_FORMS.get(last, ()), value):
        keys = keys_in(form)
        if not is_overrides(form):
            if any_section and (not keys or any(map(has, keys))):
                return Meaning((), form.replace("{}", as_typed(value)), True)
        elif (any_section or keys[-1].rpartition(".")[0] == section) and all(map(has, keys)):
            words = tuple(_fill(word, value) for word in form.split(" "))
            return Meaning(words, f"did you mean {shlex.join(words)}?", True)
    return None


def has_meaning(key: str) -> bool:
    """Whether a key, or its last part, is in the table."""
    return key.rpartition(".")[2] in KEY_FORMS


def of_value(key: str, value: object) -> str | None:
    """Returns lmtool's name for a value of another tool, or None."""
    return VALUE_FORMS.get(key, {}).get(str(value).lower())


def _forms_of(forms: Form | tuple[Form, ...], value: object) -> Iterator[str]:
    for form in forms if isinstance(forms, tuple) else (forms,):
        if isinstance(form, str):
            yield form
        else:
            matches = [
                part for part in (value if isinstance(value, list) else [value]) if as_typed(part).lower() in form
            ]
            yield form[as_typed(matches[0]).lower() if matches else ANY if ANY in form else next(iter(form))]


def is_overrides(form: str) -> bool:
    """Whether a form is a list of overrides, not a sentence."""
    return _OVERRIDES.fullmatch(form) is not None


def keys_in(form: str) -> list[str]:
    """Returns the keys that a form names, except those in the commands it mentions."""
    return _KEY.findall(_COMMAND.sub("", form))


def _fill(word: str, value: object) -> str:
    key = word.partition("=")[0]
    parts = value if isinstance(value, list) else [value]
    text = ",".join(of_value(key, part) or as_typed(part) for part in parts)
    if isinstance(value, list) and word.endswith("={}"):
        text = f"[{text}]"
    return word.replace("{weights}", _weights(text)).replace("{}", text)


def as_typed(value: object) -> str:
    """Returns a plain value as on the command line."""
    if value is None:
        return "VALUE"
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _weights(value: str) -> str:
    """Returns the value of `checkpoint=` for the name of a model in another tool: a folder if it exists, otherwise a
    model on the hub."""
    is_path = value == "VALUE" or "://" in value or value[:1] in "./~" or Path(value).exists()
    return value if is_path else f"hf://{value}"


_ABSENT = object()  # unlike None, no value of a key
Fields = Mapping[str, Sequence[FieldInfo | None]]
"""Fields by key, one for each component that has the key; None for a key that only contains others."""


def from_pydantic(command: type[Config], data: JsonObject, errors: list[Any]) -> list[Problem]:
    """Returns one problem per key. errors: `ValidationError.errors()` of decoding `data` as `command`."""
    problems: dict[str, Problem] = {}
    for error in errors:
        for problem in _problems_of(command, data, error):
            problems.setdefault(problem.key, problem)
    # Of a list, only the first wrong item is reported, and the list itself only if no item is wrong.
    first_in_list: dict[str, Problem] = {}
    for key, problem in sorted(problems.items(), key=lambda pair: "[" not in pair[0]):
        first_in_list.setdefault(key.split("[")[0], problem)
    return [problem for problem in problems.values() if problem in first_in_list.values()]


def _problems_of(command: type[Config], data: JsonObject, error: Any) -> Iterator[Problem]:
    key, field, value = _locate(command, data, error["loc"])
    context = error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        yield from _unknown(command, data, key, value)
    elif error["type"] == "missing" and isinstance(value, list) and field is not None:
        yield _not_allowed(key, field, value)  # a list that is too short
    elif error["type"] in ("missing", "choice_missing"):
        yield from missing_values(command, [key], data)
    elif error["type"] == "choice_unknown":
        yield unknown_choice(context["group"], f"{key}.{context['key']}", context["given"])
    elif error["type"] in ("value_error", "assertion_error"):
        yield _validator_problem(command, data, key, str(context.get("error", error["msg"])))
    elif field is None and error["type"].startswith("model_"):
        hint = f"write {key}.KEY=VALUE; `lmtool show {key}` prints the keys"
        yield Problem(key, f"{key}: given {quoted(value)}; this is a section of keys", hint)
    elif field is None:
        yield Problem(key, f"{key}: {error['msg']}")
    else:
        yield _not_allowed(key, field, value)


def _validator_problem(command: type[Config], data: JsonObject, key: str, text: str) -> Problem:
    """Returns an error of a section's validator with its keys as on the command line: `sharing=` becomes
    objective.sharing=."""
    keys = known_keys(command, data)

    def with_section(match: re.Match[str]) -> str:
        sections = (f"{key}.", f"{key.rpartition('.')[0]}.")
        return next((f"{section}{match[0]}" for section in sections if section + match[1] in keys), match[0])

    text = re.sub(r"(?<![\w.=])with\.(?=\w)", f"{key}.with.", re.sub(r"(?<![\w.=])([\w.]+)=", with_section, text))
    message, *advice = re.split("[;:] (?=set |use |omit |give |write |did you mean )", text, maxsplit=1)
    named_keys = [name for name in keys_in(message) if name in keys] or ([key] if key else [])
    message = message if not key or message.startswith((f"{key}.", f"{key}=")) else f"{key}: {message}"
    explained = f"`lmtool show {named_keys[0]}` explains it" if named_keys else None
    return Problem(key, message, advice[0] if advice else explained)


def _not_allowed(key: str, field: FieldInfo, value: Any) -> Problem:
    options = allowed_names(field)
    is_name = options and isinstance(value, str)
    allowed = one_of(options) if is_name else allowed_item(field) if "[" in key else allowed_values(field)
    close = of_value(key.split("[")[0], value) or (nearest(value, options) if is_name else None)
    hint = f"did you mean {close if '[' in key else f'{key}={close}'}?" if close else None
    if isinstance(value, bool) and "[" in key:
        list_key = key.split("[")[0]
        hint = f'YAML reads a bare yes, no, on or off as true or false: quote your labels, \'{list_key}=["yes","no"]\''
    elif isinstance(value, bool | int | float) and "text" in allowed:
        hint = f"quote it: '{key}=\"{value}\"'"
    elif (number := _number(value)) is not None and _takes(field, number):
        read_as_text = isinstance(value, str) and isinstance(yaml.safe_load(value), str)
        hint = f"YAML reads {value} as text: write {_for_yaml(number)}" if read_as_text else f"write {key}={number}"
    elif not isinstance(value, list | dict) and value is not None and _takes(field, [value]):
        hint = "write " + shlex.quote(f"{key}=[{as_typed(value)}]")
    hint = hint or f"{summary(field.description)} (`lmtool show {key.split('[')[0]}`)".strip()
    return Problem(key, f"{key}: given {quoted(value)}; allowed: {allowed}", hint)


def _number(value: object) -> int | float | None:
    """Returns the number that a text stands for, or the integer that a float equals; None otherwise."""
    if isinstance(value, bool) or not isinstance(value, str | float):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def _takes(field: FieldInfo, value: object) -> bool:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field], config=Config.model_config)  # type: ignore[arg-type]
        adapter.validate_json(json.dumps(value))
        return True
    except (ValidationError, PydanticUserError):  # also for sections, whose class has a configuration of its own
        return False


def _for_yaml(number: int | float) -> str:
    """Returns a number in the syntax of YAML 1.1, which reads 1e-5 as text."""
    displayed = repr(number)
    return displayed if "e" not in displayed or "." in displayed else displayed.replace("e", ".0e", 1)


def missing_values(command: type[Config], keys: list[str], data: JsonObject) -> list[Problem]:
    """Returns the problems of required keys without a value."""
    problems, sections = [], choices(command)
    for key in keys:
        if key in sections:
            offered = groups.options(sections[key].group) or names(sections[key].group)
            hint = f"set {key}=NAME; `lmtool list {sections[key].group}` prints them with a line each"
            problems.append(
                Problem(key, f"missing required value: {key}, one of {', '.join(offered)}", hint, absent=True)
            )
            continue
        field = _locate(command, data, tuple(key.split(".")))[1]
        choice = None if field is None else choice_of(field)
        if choice is not None:
            # A group within the section, or a key of it.
            override = choice.group if choice.group.replace("/", ".") == key else f"{key}.{choice.key}"
            hint = f"set {override}=NAME, one of {', '.join(names(choice.group))}"
            problems.append(
                Problem(
                    key,
                    f"missing required value: {key}.{choice.key}",
                    hint,
                    absent=True,
                )
            )
            continue
        about = f" ({summary(field.description)})" if field is not None and field.description else ""
        problems.append(Problem(key, f"missing required value: {key}", f"set {key}=...{about}", absent=True))
    return problems


def unknown_choice(group: str, key: str, name: str, offered: tuple[str, ...] | None = None) -> Problem:
    """Returns the problem of a name that its group does not have. key: the key as on the command line, or that of a
    list, whose members are typed without a key."""
    offered = names(group) if offered is None else offered
    prefix = "" if key.endswith(".members") else f"{key}="
    close = of_value(group, name) or _last_part(name, offered) or nearest(name, offered)
    hint = f"did you mean {prefix}{close}?" if close else f"`lmtool list {group}` prints them with a line each"
    other_groups = [other for other in groups.all_groups() if other != group and name in groups.options(other)]
    if other_groups and not close:
        hint = f"{name} is an option of {other_groups[0]}: `lmtool show {other_groups[0]}={name}` says how it is used"
    elif prefix and group in _HUB_OVERRIDES and (published := _HUB_OVERRIDES[group](name)) is not None:
        hint = f"{hint.removesuffix('?')}, or {published}?" if close else f"did you mean {published}?"
    return Problem(key, f"{prefix or f'{key}: '}{name} is not one of {', '.join(offered)}", hint)


def _last_part(name: str, offered: Sequence[str]) -> str | None:
    """Returns the option that is the last part of a longer name: `glue/sst2`."""
    last = re.split("[/:]", name)[-1]
    return last if last != name and last in offered else None


# For an unknown option that may be a name on the hub: the override to type, by the group of the option.
_HUB_OVERRIDES: dict[str, Callable[[str], str | None]] = {
    "model": lambda name: f"checkpoint=hf://{name}" if "-" in name or "/" in name else None,
    "data": lambda name: f"data=hub data.hub={name}" if "/" in name else None,
    "task": lambda name: f"task=custom task.kind=classification task.hub={name}" if "/" in name else None,
}


def _unknown(command: type[Config], data: JsonObject, key: str, value: object) -> Iterator[Problem]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _unknown(command, data, f"{key}.{name}", item)
        return
    yield unknown_key(key, value, command, data)


def unknown_key(key: str, value: object, command: type[Config], data: JsonObject) -> Problem:
    """Returns the problem of an unknown key, with a hint: its meaning in other tools, otherwise the most similar keys.
    value: plain data; None: unknown."""
    suggestions = meant_by(key, value, command, data)
    return Problem(
        key,
        f"unknown key {key}",
        suggestions.hint or _elsewhere(key, command),
        likely_keys=tuple(name for name, _ in suggestions.pairs),
    )


def meant_by(key: str, value: object, command: type[Config], data: JsonObject) -> Meaning:
    """Returns the overrides to type instead of an unknown key, and a hint. They have its meaning in other tools;
    otherwise, the most similar spelling among the keys that take the value. Both are empty if nothing is similar."""
    known = known_fields(command, data)
    if has_meaning(key):
        fields = {**known_fields(command, {}), **known}
        meaning = meaning_elsewhere(key, value, known.__contains__) or meaning_elsewhere(
            key, value, fields.__contains__
        )
        if meaning is not None:
            return replace(meaning, hint=_fitting_hint(meaning, value, command, known, fields))
    near = nearest_keys(key, list(known))
    values = {name: of_value(name, value) or value for name in near}
    suggestions = {name: shlex.quote(f"{name}={as_typed(values[name])}") for name in near}
    fitting = [suggestions[name] for name in near if any(_may_take(field, values[name]) for field in known[name])]
    hint = f"did you mean {' or '.join(fitting if value is not None else near)}?"
    if near and value is not None and not fitting:
        hint = f"did you mean {near[0]}? `lmtool show {near[0]}` says what it takes"
    return Meaning(tuple(f"{name}=" for name in near), hint if near else "")


def _fitting_hint(meaning: Meaning, value: object, command: type[Config], known: Container[str], fields: Fields) -> str:
    """Returns the hint of a meaning. It omits the value if the key does not take it, and names the component to select
    if the selected one does not have the key. known: keys of the selected components. fields: all fields by key."""
    selected = {name for name, _ in meaning.pairs if name in components()}
    for name, text in meaning.pairs:
        if value is not None and not _has_option(name, text) and not _takes_text(fields[name], text):
            command_words = f"list {name}" if name in groups.all_groups() else f"show {name}"
            return f"use {name}= instead; `lmtool {command_words}` says what it takes"
        if name not in known and name.partition(".")[0] not in selected:
            return f"{meaning.hint} {_elsewhere(name, command)}"
    return meaning.hint


def _may_take(field: FieldInfo | None, value: object) -> bool:
    """Whether a field allows a value; a section allows the name of an option."""
    choice = None if field is None else choice_of(field)
    if choice is not None:
        return isinstance(value, str) and _has_option(choice.group, value)
    return isinstance(value, str) if field is None else _takes(field, value)


def _has_option(group: str, name: str) -> bool:
    return name == "null" or name in groups.options(group) or (group in ("data", "task") and groups.is_path_like(name))


def takes(command: type[Config], key: str, value: object) -> bool:
    """Whether a field of this key allows a plain value."""
    return any(field is not None and _takes(field, value) for field in known_fields(command, {}).get(key, ()))


def _takes_text(fields: Sequence[FieldInfo | None], text: str) -> bool:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    number = _number(value) if isinstance(value, str) else None
    return any(field is not None and _takes(field, value if number is None else number) for field in fields)


def _elsewhere(key: str, command: type[Config]) -> str:
    """Returns a hint: another component of the group that has the key, or else the command that lists the keys."""
    section, _, name = key.partition(".")
    choice = choices(command).get(section)
    if choice is None and section in components() and section in command.model_fields:
        return f"`lmtool list {section}` prints what it may hold, `lmtool show {section}` their keys"
    if choice is None and section in components():
        return f"this command reads no {section}"
    if choice is None:
        return "`lmtool list` prints the groups, `lmtool show KEY` explains a key"
    holders = [entry.name for entry in entries(choice.group) if name.partition(".")[0] in entry.config.model_fields]
    if holders:
        return f"{section}={holders[0]} has {name}"
    return f"`lmtool show {section}` prints the keys of {section}"


def known_keys(command: type[Config], data: JsonObject) -> list[str]:
    """Returns every dotted key that is allowed with the components selected in `data`; for a section without a valid
    selection, the keys of all its components."""
    return list(known_fields(command, data))


def known_fields(command: type[Config], data: JsonObject) -> dict[str, list[FieldInfo | None]]:
    """Returns every key of `known_keys` with its fields, see `Fields`."""
    fields: dict[str, list[FieldInfo | None]] = {key: [None] for key in command.overlays}
    for key, field in _fields(command, "", data):
        fields.setdefault(key, []).append(field)
    return fields


def _fields(config: type[Config], above: str, value: object) -> Iterator[tuple[str, FieldInfo | None]]:
    for name, field in config.model_fields.items():
        yield f"{above}{name}", field
        inside = value.get(name) if isinstance(value, dict) else None
        for entry in entries(several.group) if (several := several_of(field)) is not None else ():
            yield f"{above}{name}.{entry.name}", None
            yield from _fields(entry.config, f"{above}{name}.{entry.name}.", None)
        for config_class in _classes(field, inside):
            yield from _fields(config_class, f"{above}{name}.", inside)


def _classes(field: FieldInfo, value: object) -> list[type[Config]]:
    """Returns the classes that a section may have; empty if the field is not a section."""
    choice = choice_of(field)
    config_class = chosen_class(value, choice) if choice else section_class(field)
    if config_class is None and choice is not None:
        return [entry.config for entry in entries(choice.group)]
    return [] if config_class is None else [config_class]


def choice_of(field: FieldInfo) -> Choice | None:
    """Returns the `Choice` of a field whose section is selected by a name, or None."""
    return next((mark for mark in field.metadata if isinstance(mark, Choice)), None)


def several_of(field: FieldInfo) -> Several | None:
    """Returns the `Several` of a field that holds components by name, or None."""
    return next((mark for mark in field.metadata if isinstance(mark, Several)), None)


def section_class(field: FieldInfo) -> type[Config] | None:
    """Returns the class of a field that is a section itself, also if null is allowed."""
    kinds = (
        get_args(field.annotation) if get_origin(field.annotation) in (Union, types.UnionType) else (field.annotation,)
    )
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Config):
            return kind
    return None


def _locate(command: type[Config], data: JsonObject, loc: tuple[Any, ...]) -> tuple[str, FieldInfo | None, Any]:
    """Returns the dotted key of a pydantic location (which also contains tags of unions), its field and its value."""
    key, field = "", None
    value: Any = data
    owner: type[Config] | None = command
    several: Several | None = None
    for part in loc:
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            key, value, owner = f"{key}[{part}]", value[part], None
        elif several is not None and isinstance(value, dict) and part in value:
            key, field, value = f"{key}.{part}", None, value[part]
            entry, several = lookup(several.group, str(part)), None
            owner = None if entry is None else entry.config
        elif isinstance(value, dict) and (part in value or (owner is not None and part in owner.model_fields)):
            key = f"{key}.{part}" if key else str(part)
            if owner is not None:
                field = owner.model_fields.get(part)
            value = value.get(part, _ABSENT)
            several = None if field is None else several_of(field)
            owner = None if field is None or owner is None else _class_below(field, value)
        elif part == loc[-1] and len(loc) == 1 or (owner is not None and part == loc[-1]):
            key = f"{key}.{part}" if key else str(part)
            field, value = None, _ABSENT
        else:
            break
    return key, field, None if value is _ABSENT else value


def _class_below(field: FieldInfo, value: object) -> type[Config] | None:
    """Returns the class of a section, or None if the field is not a section or its selection is not valid."""
    choice = choice_of(field)
    return chosen_class(value, choice) if choice else section_class(field)
