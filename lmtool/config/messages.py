"""The words of errors in a configuration: the key, its value, the allowed values, and what to type instead.

An unknown key is looked up among the names of other tools' options before similar spellings are searched.
"""

from __future__ import annotations

import json
import re
import shlex
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import yaml
from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lmtool.config import groups
from lmtool.config.base import Config, JsonObject, summary
from lmtool.config.registry import Choice, choice_of, choices, chosen_class, entries, names, several_of
from lmtool.config.registry import groups as components
from lmtool.errors import Problem, nearest, nearest_keys
from lmtool.system.secrets import masked

_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "null",
    list: "a list",
    tuple: "a list",
    dict: "a section",
}
"""Text of a type of values."""


def quoted(value: object) -> str:
    """Returns a value as the user would write it, with its type if that is ambiguous: `"7" (text)`."""
    # Masked before it is truncated: half a secret would not be recognized.
    text = masked(json.dumps(value, ensure_ascii=False, default=str))
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{text} ({_KINDS.get(type(value), type(value).__name__).removeprefix('a ')})"


def allowed_values(field: FieldInfo) -> str:
    """Returns what a field allows: `a number, above 0, or null`."""
    return _allowed(field.annotation, field.metadata)


def _allowed(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    for mark in metadata:
        if isinstance(mark, Choice):
            return f"a section whose {mark.key} is one of {', '.join(names(mark.group))}"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed(arguments[0], [*metadata, *arguments[1:]])
    if origin in (Union, types.UnionType):
        parts = [_allowed(part, () if part is types.NoneType else metadata) for part in arguments]
        return ("; or " if len(parts) > 2 else ", or ").join(parts)
    if origin is tuple:
        items = [part for part in arguments if part is not Ellipsis]
        length = "" if len(arguments) > len(items) else f" of {len(items)} values"
        return f"a list{length}{_bounds(metadata)}, each {_allowed(items[0])}" if items else "an empty list"
    if origin is Literal:
        text = one_of(arguments)
    elif origin is dict:
        text = "a section of values by name"
    elif isinstance(annotation, type) and issubclass(annotation, Config):
        text = f"a section of {', '.join(annotation.model_fields)}"
    else:
        text = _KINDS.get(annotation, str(getattr(annotation, "__name__", annotation)))
    return text + _bounds(metadata)


def one_of(options: Iterable[object]) -> str:
    """Returns `a, b or c`."""
    *most, last = ["null" if option is None else str(option) or '""' for option in options]
    return f"{', '.join(most)} or {last}" if most else last


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


def _bounds(metadata: Sequence[Any]) -> str:
    marks = [mark for item in metadata for mark in (item.metadata if isinstance(item, FieldInfo) else [item])]
    limits = ((form, getattr(mark, name, None)) for mark in marks for name, form in _LIMITS.items())
    return "".join(form.format(limit) for form, limit in limits if limit is not None)


def _literals(annotation: object) -> list[str]:
    """Returns the names that a field allows, also if it may be null or is a list of them; empty for other fields."""
    if annotation is bool:
        return ["true", "false"]
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return [str(argument) for argument in arguments]
    return [name for argument in arguments for name in _literals(argument)]


Form = str | Mapping[str, str]
ANY = "*"
"""In a mapping of forms: any value that is not listed."""

_RESUME = "the same command with the same name= resumes; so does `lmtool resume RUN`"
_ACCUMULATION = (
    "batch_examples= (or batch_tokens=) is a whole step's batch; micro_batch_tokens= limits the tokens of one forward, "
    "and gradients are accumulated"
)
_UPLOAD = "lmtool uploads nothing: `lmtool export RUN output=FOLDER` writes a folder for transformers"
_BY_STEPS = "intervals are in steps: evaluate_every=, checkpoint_every= and log_every="
_SPLITS = "name the files train.csv, dev.csv and test.csv, in one folder: task=FOLDER"
_FORWARD = "batch_tokens= is the size here: tokens in one forward, at most"
_BATCH = ("batch_examples={} batch_tokens=null", _FORWARD)
_LOGGERS = {
    "wandb": "logger=wandb",
    "tensorboard": "logger=tensorboard",
    "true": "logger=wandb",
    "none": "logger=null",
    ANY: "logger=wandb or logger=tensorboard report to a tracker; the run folder always has all metrics",
}

# Names of transformers.TrainingArguments and its example scripts (run_glue.py, run_mlm.py, run_clm.py), of BertConfig,
# GPT2Config, T5Config and GenerationConfig: huggingface.co/docs/transformers; of peft.LoraConfig and
# PromptTuningConfig: huggingface.co/docs/peft; of fairseq-train: fairseq.readthedocs.io; of lightning.Trainer:
# lightning.ai/docs/pytorch; and of small training scripts such as nanoGPT: github.com/karpathy/nanoGPT
FORMS: tuple[tuple[Form | tuple[Form, ...], str], ...] = (
    ("optimizer.lr={}", "learning_rate lr"),
    (_BATCH, "per_device_train_batch_size max_sentences batch_size train_batch_size"),
    (
        ("omit it: held-out rows are read in the batches of training, limited by micro_batch_tokens=", _FORWARD),
        "per_device_eval_batch_size",
    ),
    (_ACCUMULATION, "gradient_accumulation_steps auto_find_batch_size update_freq accumulate_grad_batches"),
    ("max_epochs={}", "num_train_epochs max_epoch epochs num_epochs"),
    ("optimizer.weight_decay={}", "weight_decay"),
    ("optimizer.betas=[{},0.999]", "adam_beta1"),
    ("optimizer.betas=[0.9,{}]", "adam_beta2"),
    ("optimizer.epsilon={}", "adam_epsilon adam_eps"),
    ("optimizer.clip_norm={}", "max_grad_norm clip_norm gradient_clip_val"),
    ("schedule={}", "lr_scheduler_type lr_scheduler"),
    ("optimizer={}", "optim"),
    ("schedule.warmup_fraction={}", "warmup_ratio"),
    ("schedule.warmup_steps={}", "warmup_steps num_warmup_steps warmup_updates"),
    ("checkpoint_every={}", "save_steps checkpointing_steps save_interval_updates"),
    ("evaluate_every={}", "eval_steps validate_interval_updates val_check_interval eval_interval"),
    ("log_every={}", "logging_steps log_interval log_every_n_steps"),
    (_BY_STEPS, "save_strategy eval_strategy evaluation_strategy logging_strategy check_val_every_n_epoch"),
    ("keep={}", "save_total_limit keep_interval_updates"),
    ("omit it: the best checkpoint is always saved, and checkpoint=RUN uses it", "load_best_model_at_end"),
    ("task.metric={}", "metric_for_best_model"),
    ("patience={}", "early_stopping_patience"),
    (("run_dir={}", "output={}"), "output_dir"),
    ("omit it: a run is never overwritten; name=NAME starts another one", "overwrite_output_dir"),
    (
        {"true": _RESUME, "false": _RESUME, ANY: "a run is resumed by `lmtool resume {}`"},
        "resume_from_checkpoint resume",
    ),
    ("name={}", "run_name"),
    (_LOGGERS, "report_to wandb"),
    ("logger=tensorboard logger.tensorboard.folder={}", "logging_dir"),
    ({"true": "precision=fp16", "false": "precision=fp32"}, "fp16"),
    ({"true": "precision=bf16", "false": "precision=fp32"}, "bf16"),
    ({"true": "device=cpu", "false": "device=auto"}, "use_cpu no_cuda"),
    ("compile={}", "torch_compile"),
    ("seed={}", "data_seed seed_everything"),
    (("task.loss.label_smoothing={}", "objective.label_smoothing={}"), "label_smoothing_factor"),
    ("omit it: batches are packed without padding", "group_by_length pad_to_max_length"),
    ("omit it: batches are made in the training process, in memory", "dataloader_num_workers num_workers"),
    ("devices=N trains on several devices, and parallel=fsdp shards the weights across them", "deepspeed"),
    ("omit it: torchrun sets it for each process, and devices=N starts processes without torchrun", "local_rank"),
    ("omit it: `lmtool pretrain` and `lmtool finetune` train", "do_train"),
    ("omit it: held-out rows are scored every evaluate_every= steps, and by `lmtool evaluate RUN`", "do_eval"),
    ("omit it: `lmtool predict RUN input=FILE` labels a file", "do_predict"),
    (_UPLOAD, "push_to_hub hub_model_id"),
    ("checkpoint={weights}", "model_name_or_path restore_file ckpt_path model_path"),
    ("set model=NAME, one of `lmtool list model`; model.KEY= changes its sizes", "config_name"),
    ("model={}", "model_type arch"),
    ("tokenizer=folder tokenizer.path={weights}", "tokenizer_name"),
    ("task={}", "task_name"),
    (("data=hub data.hub={}", "task=custom task.kind=classification task.hub={}"), "dataset_name"),
    (
        (
            "the subset follows the name: data.hub=org/name:SUBSET",
            "the subset follows the name: task.hub=org/name:SUBSET",
        ),
        "dataset_config_name",
    ),
    (("task={}", "data={}"), "train_file data_dir dataset"),
    (("data.validation={}", _SPLITS), "validation_file"),
    (_SPLITS, "test_file test dev dev_file eval_file valid"),
    (("task.text=[{}]", "data.text={}"), "text_column_name"),
    ("task.label={}", "label_column_name"),
    ("task.train_examples={}", "max_train_samples"),
    ("evaluate_rows={}", "max_eval_samples max_val_samples eval_samples limit_val_batches eval_iters"),
    ("max_length={}", "max_seq_length block_size tokens_per_sample seq_len sequence_length"),
    ("text={}", "question sentence1 premise"),
    ("pair={}", "context sentence2 hypothesis text_pair"),
    ("omit it: the development split is scored; task.path=FILE scores the rows of another file", "split"),
    ({"true": "tuning=lora", "false": "tuning=full", ANY: "tuning=lora"}, "lora use_lora peft"),
    ("objective.probability={}", "mlm_probability"),
    ({"true": "data.document=line", "false": "data.document=block"}, "line_by_line"),
    ("set data.validation_fraction=, the fraction that is held out: 0.05 for 5 percent", "validation_split_percentage"),
    ("omit it: lmtool runs no code of a checkpoint", "trust_remote_code"),
    ("max_steps={}", "max_train_steps max_update total_num_update max_iters num_steps"),
    ("model.num_layers={}", "num_hidden_layers n_layer"),
    ("model.hidden_size={}", "n_embd d_model"),
    ("model.num_heads={}", "num_attention_heads n_head"),
    ("model.feedforward_size={}", "intermediate_size d_ff"),
    ("model.max_positions={}", "max_position_embeddings n_positions"),
    ("model.dropout={}", "hidden_dropout_prob dropout"),
    ("model.attention_dropout={}", "attention_probs_dropout_prob attention_dropout"),
    ("model.norm_epsilon={}", "layer_norm_eps"),
    ("model.initializer_std={}", "initializer_range"),
    (("beams={}", "task.generation.beams={}"), "num_beams"),
    (("no_repeat_ngram={}", "task.generation.no_repeat_ngram={}"), "no_repeat_ngram_size"),
    ({"true": "temperature=1.0", "false": "temperature=0.0"}, "do_sample"),
    ("tuning=lora tuning.rank={}", "r lora_r"),
    ("tuning=lora tuning.alpha={}", "lora_alpha"),
    ("tuning=lora tuning.dropout={}", "lora_dropout"),
    ("tuning=lora tuning.projections=[{}]", "target_modules"),
    ("tuning=lora tuning.rank_stabilised={}", "use_rslora"),
    ("omit it: the task's head always learns", "modules_to_save"),
    ("tuning=prompt tuning.length={}", "num_virtual_tokens"),
    ("tuning={}", "peft_type method"),
    (
        {"true": "tuning=head", "false": "tuning=full", ANY: "tuning=head trains only the head, tuning=lora a part"},
        "freeze freeze_backbone freeze_encoder freeze_base_model",
    ),
    ("tokenizer.vocab_size={}", "vocabulary_size"),
    ("objective={}", "criterion"),
    ("optimizer.betas=[{}]", "adam_betas"),
    ("run_dir={}", "save_dir default_root_dir"),
    ("devices={}", "distributed_world_size gpus num_gpus"),
    ("device={}", "accelerator"),
    ("parallel={}", "strategy"),
    ("omit it: torchrun starts the processes on several machines, and each runs `lmtool pretrain ...`", "num_nodes"),
    ("debug=short", "fast_dev_run"),
    ("omit it: every random choice is a function of seed=", "deterministic"),
)
KEY_FORMS = {word: form for form, words in FORMS for word in words.split()}
"""By name in another tool: the override to type here, or a sentence; several if commands differ."""
VALUE_FORMS: dict[str, dict[str, str]] = {
    # torch.device; lightning's accelerators
    "device": {"cuda": "gpu", "cuda:0": "0", "cuda:1": "1"},
    # torch's dtypes; lightning.Trainer(precision=)
    "precision": {
        "fp16": "16 16-mixed 16-true half float16",
        "bf16": "bf16-mixed bf16-true bfloat16",
        "fp32": "32 32-true float32 full",
    },
    # transformers.training_args.OptimizerNames
    "optimizer": {"adamw": "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused"},
    # transformers.SchedulerType; fairseq's --lr-scheduler
    "schedule": {
        "constant": "constant_with_warmup",
        "cosine": "cosine_with_restarts",
        "polynomial": "polynomial_decay",
        "wsd": "warmup_stable_decay",
    },
    # lightning's and torch's strategies
    "parallel": {"fsdp": "fsdp2 deepspeed", "ddp": "ddp_find_unused_parameters_true"},
    # fairseq's --criterion
    "objective": {"mlm": "masked_lm", "clm": "cross_entropy causal_lm lm"},
    # fairseq's --arch; transformers' model_type
    "model": {
        "gpt": "gpt2 transformer_lm_gpt2_small",
        "gpt_medium": "gpt2-medium",
        "gpt_large": "gpt2-large",
        "gpt_xl": "gpt2-xl",
        "roberta": "roberta_base",
        "bert": "bert_base",
        "bart": "bart_base",
        "word_vectors": "word2vec skipgram skip_gram glove fasttext",
    },
    "model/positions": {"rotary": "rope", "learned": "absolute", "shaw": "relative", "none": "nope null"},
    # peft.PeftType
    "tuning": {
        "prompt": "prompt_tuning",
        "prefix": "prefix_tuning",
        "ptuning": "p_tuning",
        "lora": "lora",
        "ia3": "ia3",
        "full": "none",
    },
    # The modules that transformers' families call by these names
    "tuning.projections": {
        "q_proj": "query q",
        "k_proj": "key k",
        "v_proj": "value v",
        "out_proj": "o_proj o",
        "fc_in": "up_proj",
        "fc_gate": "gate_proj",
        "fc_out": "down_proj",
        "q_proj,k_proj,v_proj,out_proj,fc_in,fc_out": "all-linear",
    },
}
"""By key: lmtool's values, each with the names that other tools have for it."""
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
    def keys(self) -> tuple[str, ...]:
        return tuple(word.partition("=")[0] for word in self.words)


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
        if _OVERRIDES.fullmatch(form) is None:  # a sentence
            if any_section and (not keys or any(map(has, keys))):
                return Meaning((), form.replace("{}", as_typed(value)), True)
        elif (any_section or section in (keys[-1], keys[-1].rpartition(".")[0])) and all(map(has, keys)):
            words = tuple(_fill(word, value) for word in form.split(" "))
            return Meaning(words, f"did you mean {shlex.join(words)}?", True)
    return None


def of_value(key: str, value: object) -> str | None:
    """Returns lmtool's name for a value of another tool, or None."""
    forms = VALUE_FORMS.get(key, {}).items()
    return next((name for name, others in forms if str(value).lower() in others.split()), None)


def _forms_of(forms: Form | tuple[Form, ...], value: object) -> Iterator[str]:
    values = [as_typed(part).lower() for part in (value if isinstance(value, list) else [value])]
    for form in forms if isinstance(forms, tuple) else (forms,):
        if isinstance(form, str):
            yield form
        else:
            yield form[next((part for part in values if part in form), ANY if ANY in form else next(iter(form)))]


def keys_in(form: str) -> list[str]:
    return _KEY.findall(_COMMAND.sub("", form))


def _fill(word: str, value: object) -> str:
    key, parts = word.partition("=")[0], value if isinstance(value, list) else [value]
    text = ",".join(of_value(key, part) or as_typed(part) for part in parts)
    if isinstance(value, list) and word.endswith("={}"):
        text = f"[{text}]"
    # The name of a model in another tool: a folder if it exists, otherwise a model on the hub.
    is_path = text == "VALUE" or "://" in text or text[:1] in "./~" or Path(text).exists()
    return word.replace("{weights}", text if is_path else f"hf://{text}").replace("{}", text)


def as_typed(value: object) -> str:
    """Returns a plain value as on the command line."""
    if value is None:
        return "VALUE"
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


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
        yield from unknown_keys(key, value, command, data)
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
    named = next((name for name in keys_in(message) if name in keys), key)
    message = message if not key or message.startswith((f"{key}.", f"{key}=")) else f"{key}: {message}"
    return Problem(key, message, advice[0] if advice else f"`lmtool show {named}` explains it" if named else None)


def _not_allowed(key: str, field: FieldInfo, value: Any) -> Problem:
    options, list_key = _literals(field.annotation), key.split("[")[0]
    in_list, is_name = key != list_key, bool(options) and isinstance(value, str)
    close = of_value(list_key, value) or (nearest(value, options) if is_name else None)
    hint = (
        f"did you mean {close if in_list else f'{key}={close}'}?"
        if close
        else _correction(list_key, in_list, field, value)
    )
    hint = hint or f"{summary(field.description)} (`lmtool show {list_key}`)".strip()
    allowed = one_of(options) if is_name else allowed_values(field)
    return Problem(key, f"{key}: given {quoted(value)}; allowed: {allowed}", hint)


def _correction(key: str, in_list: bool, field: FieldInfo, value: Any) -> str | None:
    """Returns a hint with the same value in a form that the field takes, or None."""
    typed, number = as_typed(value), _number(value)
    ends = re.fullmatch(r"(\d{1,9})(?:\.\.|-)(\d{1,9})", typed)
    numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else range(0)
    if 1 < len(numbers) <= _LISTED and _takes(field, numbers[0]):
        return f"write {key}={','.join(map(str, numbers))} with -m, which runs each of them"
    if isinstance(value, bool | int | float) and _takes(field, [typed] if in_list else typed):
        reason = "; YAML reads a bare yes, no, on or off as true or false" if isinstance(value, bool) else ""
        text = f'["{typed}"]' if in_list else f'"{typed}"'
        return f"quote it: '{key}={text}'{reason}"
    if number is not None and _takes(field, number):
        return f"write {key}={_for_yaml(number)}"
    if value is not None and not isinstance(value, list | dict) and _takes(field, [value]):
        return "write " + shlex.quote(f"{key}=[{typed}]")
    return None


def _number(value: object) -> int | float | None:
    """Returns the number that a text stands for, or the integer that a float equals; None otherwise."""
    try:
        number = float(value) if isinstance(value, str | float) else None
    except ValueError:
        return None
    return int(number) if number is not None and number.is_integer() and abs(number) < 2**63 else number


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


def missing_values(command: type[Config], keys: list[str], data: JsonObject) -> Iterator[Problem]:
    fields = dict(fields_of(command, "", data))
    for key in keys:
        field = fields.get(key)
        choice = None if field is None else choice_of(field)
        if choice is None:
            about = f" ({summary(field.description)})" if field is not None and field.description else ""
            yield Problem(key, f"missing required value: {key}", f"set {key}=...{about}", absent=True)
            continue
        is_group = "." not in key or choice.group.replace("/", ".") == key
        override = (choice.group if "." in key else key) if is_group else f"{key}.{choice.key}"
        offered = (groups.options(choice.group) if is_group else ()) or names(choice.group)
        hint = f"set {override}=NAME; `lmtool list {choice.group}` prints them with a line each"
        yield Problem(key, f"missing required value: {override}, one of {listed(offered)}", hint, absent=True)


_HUB_OVERRIDES = {
    "model": "checkpoint=hf://{}",
    "data": "data=hub data.hub={}",
    "task": "task=custom task.kind=classification task.hub={}",
}
"""By group: the override for a name on the hub."""
_PATH_OVERRIDES = {
    "distill": "distill=soft distill.teacher={}",
    "model": "checkpoint={}",
    "tokenizer": "tokenizer=folder tokenizer.path={}",
}
"""By group: the override for a folder."""
_LISTED = 20
"""Maximum number of options that an error lists."""


def unknown_choice(group: str, key: str, name: str, offered: tuple[str, ...] | None = None) -> Problem:
    """Returns the problem of a name that its group does not have. key: the key as on the command line, or that of a
    list, whose members are typed without a key."""
    offered = names(group) if offered is None else offered
    prefix = "" if key.endswith(".members") else f"{key}="
    close = of_value(group, name) or nearest(re.split("[/:]", name)[-1], offered)
    suggestions = [f"{prefix}{close}"] if close else []
    if prefix and group in _PATH_OVERRIDES and groups.is_path_like(name):
        suggestions = [_PATH_OVERRIDES[group].format(name)]
    elif prefix and group in _HUB_OVERRIDES and ("/" in name or (group == "model" and "-" in name)):
        suggestions.append(_HUB_OVERRIDES[group].format(name))
    hint = f"did you mean {', or '.join(suggestions)}?" if suggestions else ""
    hint = hint or f"`lmtool list {group}` prints them with a line each"
    return Problem(key, f"{prefix or f'{key}: '}{name} is not one of {listed(offered)}", hint)


def listed(offered: Sequence[str]) -> str:
    """Returns the options as a list, or their number if there are many."""
    return ", ".join(offered) if len(offered) <= _LISTED else f"the {len(offered)} options"


def unknown_keys(key: str, value: object, command: type[Config], data: JsonObject) -> Iterator[Problem]:
    """Yields the problem of an unknown key, or of each key in an unknown section. Its hint: the meaning in other tools,
    otherwise the most similar keys. value: plain data; None: unknown."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from unknown_keys(f"{key}.{name}", item, command, data)
    else:
        meaning = meant_by(key, value, command, data)
        yield Problem(key, f"unknown key {key}", meaning.hint or _elsewhere(key, command), likely_keys=meaning.keys)


def meant_by(key: str, value: object, command: type[Config], data: JsonObject) -> Meaning:
    """Returns the overrides to type instead of an unknown key, and a hint. They have its meaning in other tools;
    otherwise, the most similar spelling. Both are empty if nothing is similar."""
    known = known_keys(command, data)
    for keys in (known, known_keys(command, {})) if key.rpartition(".")[2] in KEY_FORMS else ():
        if (meaning := meaning_elsewhere(key, value, keys.__contains__)) is not None:
            if value is not None and not all(_is_taken(word, command, data) for word in meaning.words):
                return replace(meaning, hint=_hint_without_value(meaning.keys[0]))
            # A key of another component than the selected one is named with that component.
            absent = [name for name in meaning.keys if name not in known and name.partition(".")[0] not in meaning.keys]
            holder = f" {_elsewhere(absent[0], command)}" if absent else ""
            return replace(meaning, hint=f"{meaning.hint}{holder}")
    near = nearest_keys(key, known)
    words = tuple(f"{name}=" for name in near)
    if not near or value is None:
        return Meaning(words, f"did you mean {' or '.join(near)}?" if near else "")
    typed = [f"{name}={as_typed(of_value(name, value) or value)}" for name in near]
    taken_words = [shlex.quote(word) for word in typed if _is_taken(word, command, data)]
    return Meaning(words, f"did you mean {' or '.join(taken_words)}?" if taken_words else _hint_without_value(near[0]))


def _hint_without_value(key: str) -> str:
    return f"did you mean {key}? `lmtool show {key}` says what it takes"


def _is_taken(word: str, command: type[Config], data: JsonObject) -> bool:
    """Whether a key allows the value of an override; a section allows the name of an option."""
    key, _, text = word.partition("=")
    fields = [field for known in (data, {}) for name, field in fields_of(command, "", known) if name == key and field]
    chosen = [mark.group for field in fields if (mark := choice_of(field) or several_of(field)) is not None]
    if chosen or key in command.overlays:
        group = chosen[0] if chosen else key
        is_file = group in ("data", "task") and groups.is_path_like(text)
        return is_file or text in ("null", *groups.options(group))
    return any(_takes(field, plain_value(text)) for field in fields)


def plain_value(text: str) -> Any:
    """Returns a typed value as plain data. YAML reads 1e-5 as text, but it is a number here."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    number = _number(value) if isinstance(value, str) else None
    return value if number is None else number


def _elsewhere(key: str, command: type[Config]) -> str:
    """Returns a hint: another component of the group that has the key, or else the command that lists the keys."""
    section, _, name = key.partition(".")
    choice = choices(command).get(section)
    if choice is not None:
        holders = [entry.name for entry in entries(choice.group) if name.partition(".")[0] in entry.config.model_fields]
        return (
            f"{section}={holders[0]} has {name}" if holders else f"`lmtool show {section}` prints the keys of {section}"
        )
    if section not in components():
        return "`lmtool list` prints the groups, `lmtool show KEY` explains a key"
    if section not in command.model_fields:
        return f"this command reads no {section}"
    return f"`lmtool list {section}` prints what it may hold, `lmtool show {section}` their keys"


def known_keys(command: type[Config], data: JsonObject) -> list[str]:
    """Returns every dotted key that is allowed with the components selected in `data`; for a section without a valid
    selection, the keys of all its components."""
    return list(dict.fromkeys([*command.overlays, *(key for key, _ in fields_of(command, "", data))]))


def fields_of(config: type[Config], above: str, value: object) -> Iterator[tuple[str, FieldInfo | None]]:
    """Yields the keys in a section with their fields; None for a key that only contains others."""
    for name, field in config.model_fields.items():
        yield f"{above}{name}", field
        inside = value.get(name) if isinstance(value, dict) else None
        for entry in entries(several.group) if (several := several_of(field)) is not None else ():
            yield f"{above}{name}.{entry.name}", None
            yield from fields_of(entry.config, f"{above}{name}.{entry.name}.", None)
        for config_class in _classes(field, inside):
            yield from fields_of(config_class, f"{above}{name}.", inside)


def _classes(field: FieldInfo, value: object) -> list[type[Config]]:
    choice = choice_of(field)
    config_class = chosen_class(value, choice) if choice else section_class(field)
    return [config_class] if config_class else [entry.config for entry in entries(choice.group)] if choice else []


def section_class(field: FieldInfo) -> type[Config] | None:
    """Returns the class of a field that is a section itself, also if null is allowed."""
    is_union = get_origin(field.annotation) in (Union, types.UnionType)
    kinds = get_args(field.annotation) if is_union else (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)), None)


def _locate(command: type[Config], data: JsonObject, loc: tuple[Any, ...]) -> tuple[str, FieldInfo | None, Any]:
    """Returns the dotted key of a pydantic location (which also contains tags of unions), its field and its value."""
    fields = dict(fields_of(command, "", data))
    key, value = "", cast(Any, data)
    for part in loc:
        inner = f"{key}.{part}" if key else str(part)
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            key, value = f"{key}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or inner in fields):
            key, value = inner, value.get(part)
        else:
            break
    return key, fields.get(key.partition("[")[0]), value
