"""Key names of other tools: each entry of the table suggests a key that decodes, or a sentence that names existing
keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from lmtool.config import compose, messages, registry
from lmtool.config.compose import AcceptedOverrides
from lmtool.config.decode import merge
from lmtool.config.messages import known_keys, unknown_keys
from lmtool.errors import ConfigError, Problem
from lmtool.resolver.decoding import decode_config
from lmtool.resolver.verbs import VERBS, command_classes

BASES = {
    "pretrain": ["model=bert_tiny"],
    "finetune": ["task=pydocs", "model=bert_tiny"],
    "generate": ["checkpoint=x", "prompt=a"],
    "export": ["checkpoint=x", "output=y"],
    "predict": ["checkpoint=x", "text=a"],
}
"""A valid command line for each command."""
SAMPLES: dict[str, Any] = {
    "model_type": "bert", "arch": "bert", "task_name": "sst2", "optim": "adamw_torch", "criterion": "masked_lm",
    "lr_scheduler_type": "cosine", "lr_scheduler": "polynomial_decay", "accelerator": "gpu", "strategy": "ddp",
    "peft_type": "LORA", "method": "LORA", "metric_for_best_model": "accuracy", "target_modules": ["query", "value"],
    "adam_betas": [0.9, 0.98], "torch_compile": True, "use_rslora": True, "max_position_embeddings": 512,
    "n_positions": 512, "train_file": "rows.csv", "data_dir": "../rows", "dataset": "org/rows",
    **dict.fromkeys(("output_dir", "run_name", "logging_dir", "model_name_or_path", "tokenizer_name", "dataset_name",
                     "validation_file", "text_column_name", "label_column_name", "save_dir", "restore_file",
                     "default_root_dir", "ckpt_path", "model_path", "premise", "text_pair"), "some"),
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_ratio",
                     "label_smoothing_factor", "mlm_probability", "hidden_dropout_prob", "lora_dropout", "lr",
                     "attention_probs_dropout_prob", "layer_norm_eps", "initializer_range", "adam_eps", "dropout",
                     "attention_dropout"), 0.1),
}  # fmt: skip
"""Sample values by word; all other words get a whole number."""
FILES = ("train_file", "data_dir", "dataset")
"""Words whose values are files that lmtool reads."""


@cache
def base_of(verb: str) -> tuple[AcceptedOverrides, dict[str, Any], frozenset[str]]:
    """The accepted overrides of a command, the data of its sample command line, and all of its keys."""
    primary = VERBS[verb].primary
    assert primary is not None
    accepted = replace(compose.accepted_overrides(primary), verbatim=command_classes()[verb].verbatim)
    typed = compose.read_overrides(BASES[verb], accepted)
    return accepted, compose.compose(primary, typed), frozenset(known_keys(command_classes()[verb], {}))


option = cache(compose.option)


def problems_of(verb: str, words: Sequence[str]) -> list[Problem]:
    """The problems of overrides added to a command's sample line; missing values are not counted."""
    accepted, data, _ = base_of(verb)
    typed = compose.read_overrides(words, accepted)
    wrong = list(typed.problems)
    for choice in typed.choices:
        group, _, name = choice.partition("=")
        entry = registry.lookup(group, name)
        if (
            entry is not None and group not in registry.MULTI_SELECT_GROUPS
        ):  # other values are files, read when they are chosen
            data = {**data, group: {**option(group, name), registry.choices(command_classes()[verb])[group].key: name}}
    values, _ = compose.as_values([word for word in words if word.partition("=")[0] not in accepted.groups], accepted)
    try:
        decode_config(verb, merge(data, values), reads_checkpoint=False)
    except ConfigError as error:
        wrong += [problem for problem in error.problems if not problem.absent]
    return wrong


def forms_of(word: str) -> Iterator[tuple[str, Any]]:
    """Each suggestion for a word, with a value that triggers it."""
    forms = messages.KEY_FORMS[word]
    for form in forms if isinstance(forms, tuple) else (forms,):
        if isinstance(form, str):
            yield form, SAMPLES.get(word, 16)
        else:
            yield from ((of_value, value) for value, of_value in form.items())


def matches(meaning: messages.Meaning, form: str) -> bool:
    """Whether a meaning matches a suggestion's template."""
    pattern = re.sub(r"\\{\w*\\}", ".*", re.escape(form))
    return re.fullmatch(pattern, " ".join(meaning.words) or meaning.hint) is not None


# Several words share a suggestion; one of them is tested.
@pytest.mark.parametrize("word", {str(form): word for word, form in messages.KEY_FORMS.items()}.values())
def test_suggested_overrides_decode(word: str) -> None:
    for form, value in forms_of(word):
        # The first command that has the keys of this suggestion and not those of an earlier one.
        verb, meaning = next(
            (verb, meaning)
            for verb in BASES
            if (meaning := messages.meaning_elsewhere(word, value, base_of(verb)[2].__contains__))
            and matches(meaning, form)
        )
        with pytest.raises(ConfigError) as caught:
            decode_config(verb, {**base_of(verb)[1], word: value}, reads_checkpoint=False)
        hint = caught.value.hint or ""
        assert hint.startswith(f"did you mean {shlex.join(meaning.words)}?" if meaning.words else meaning.hint)
        # The hint names another component if that one has the key; the sample line's model may not fit it.
        chosen = re.findall(r"\? (\S+=\S+) has \S+$", hint)
        keys = {*meaning.keys}
        wrong = [] if word in FILES else problems_of(verb, [*chosen, *meaning.words])
        assert not [problem for problem in wrong if not chosen or problem.key in keys]


def test_suggested_sentences_name_existing_keys() -> None:
    known = {key for command in command_classes().values() for key in known_keys(command, {})}
    forms = [form for word in messages.KEY_FORMS for form, _ in forms_of(word)]
    assert {key.removesuffix(".KEY") for form in forms for key in messages.keys_in(form)} <= known


def test_aliases_are_not_keys_of_lmtool() -> None:
    top = {key for command in command_classes().values() for key in command.model_fields}
    assert not top & messages.KEY_FORMS.keys() and len(messages.KEY_FORMS) > 60


@pytest.mark.parametrize("key", messages.VALUE_FORMS)
def test_suggested_values_are_valid(key: str) -> None:
    verb = "finetune" if key.startswith("tuning") else "pretrain"
    accepted, _, _ = base_of(verb)
    for value in messages.VALUE_FORMS[key]:
        if key in accepted.groups:
            assert value in accepted.groups[key]
        else:
            lora = ["tuning=lora", "model=t5", "model.feedforward=gated_gelu"] if key.startswith("tuning") else []
            text = f"[{value}]" if lora else value
            assert not problems_of(verb, [*lora, f"{key}={text}"])


@pytest.mark.parametrize(
    ("verb", "typed", "hint"),
    [
        ("pretrain", {"per_device_train_batch_size": 32}, "did you mean batch_examples=32 batch_tokens=null?"),
        ("pretrain", {"trainer": {"max_epochs": 2}}, "did you mean max_epochs=2?"),
        ("pretrain", {"trainer": {"accelerator": "gpu"}}, "did you mean device=cuda?"),
        ("pretrain", {"trainer": {"precision": "bf16-mixed"}}, "did you mean precision=bf16?"),
        ("pretrain", {"optimizer": {"name": "adamw", "learning_rate": 1e-3}}, "did you mean optimizer.lr=0.001?"),
        ("pretrain", {"optim": "sgd"}, "did you mean optimizer? `lmtool show optimizer` says what it takes"),
        ("pretrain", {"report_to": ["wandb"]}, "did you mean logger=wandb?"),
        ("pretrain", {"train_file": "my.txt"}, "did you mean data=my.txt?"),
        ("finetune", {"train_file": "my.csv"}, "did you mean task=my.csv?"),
        ("finetune", {"model_name_or_path": "org/name"}, "did you mean checkpoint=hf://org/name?"),
        ("finetune", {"model_name_or_path": "./here"}, "did you mean checkpoint=./here?"),
        ("finetune", {"tuning": {"name": "full", "r": 4}}, "did you mean tuning=lora tuning.rank=4?"),
        (
            "finetune",
            {"target_modules": ["query", "value"]},
            "did you mean tuning=lora 'tuning.projections=[q_proj,v_proj]'?",
        ),
        ("generate", {"batch_size": 3}, "batch_tokens= is the size here: tokens in one forward, at most"),
        ("export", {"output_dir": "x"}, "did you mean output=x?"),
    ],
)
def test_suggestion_carries_the_value(verb: str, typed: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_config(verb, merge(base_of(verb)[1], typed), reads_checkpoint=False)
    assert [problem.hint for problem in caught.value.problems] == [hint]


def test_misspelled_key_keeps_its_value() -> None:
    base = base_of("pretrain")[1]
    hints = {
        "max_stps": "did you mean max_steps? `lmtool show max_steps` says what it takes",
        "modle": "did you mean model=bert_mini?",
    }
    typed = {"max_stps": "many", "modle": "bert_mini"}
    pretrain = command_classes()["pretrain"]
    problems = [problem for key in typed for problem in unknown_keys(key, typed[key], pretrain, base)]
    assert {problem.key: problem.hint for problem in problems} == hints
