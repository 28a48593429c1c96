"""Names of other tools' options and what they are called in lmtool. Imports the standard library only.

An unknown key is looked up here before similar spellings are searched. Its form is the override to type, with `{}` for
the value, or a sentence if lmtool has no such key. If a key has several forms, the first one whose keys the command has
is used. In a mapping, the form depends on the value. The comment above each group of names tells their source.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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

FORMS: dict[str, Form | tuple[Form, ...]] = {
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
VALUES: dict[str, dict[str, str]] = {
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
FLAGS: dict[str, str] = {
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


def meaning(key: str, value: object, has: Callable[[str], bool]) -> Meaning | None:
    """Returns the meaning of another tool's key in lmtool; None if it is not in the table.

    value: plain data; None: unknown. has: whether the command has a key. If the key is dotted, its last part is looked
    up. Its section must be that of lmtool's key (`tuning.r`), or one that the command does not have
    (`trainer.accelerator`).
    """
    section, _, last = key.rpartition(".")
    any_section = not section or not has(section.partition(".")[0])
    for form in _forms(FORMS.get(last, ()), value):
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
    return key.rpartition(".")[2] in FORMS


def of_value(key: str, value: object) -> str | None:
    """Returns lmtool's name for a value of another tool, or None."""
    return VALUES.get(key, {}).get(str(value).lower())


def _forms(forms: Form | tuple[Form, ...], value: object) -> Iterator[str]:
    """Yields the forms of a key with this value."""
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
    """Returns a word of a form with the value inserted, in lmtool's words."""
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
