"""Every YAML in conf/ composes, decodes and equals the defaults of its class, and every field is documented."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lmtool.commands.show import PRIMARY
from lmtool.config import compose, groups, registry, saved
from lmtool.config.base import Config
from lmtool.config.messages import section_class
from lmtool.resolver.decoding import decode_config
from lmtool.resolver.shorthands import with_sections
from lmtool.resolver.verbs import command_classes
from tests.breadth import slow_but

CONF = groups.conf_dir()
YAMLS = sorted(str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml"))
COMPONENTS = [
    (entry.group, entry.name)
    for group in registry.groups()
    for entry in registry.entries(group)
    if entry.config.__module__.startswith("lmtool.")
]


def compose_and_decode(verb: str, *typed: str) -> Any:
    primary = PRIMARY[verb]
    read = compose.read_overrides(typed, compose.accepted_overrides(primary))
    assert not read.problems
    return decode_config(verb, with_sections(compose.compose(primary, read)))


# Overrides that a command requires besides the tested choice.
NEEDS = {
    "pretrain": [],
    "finetune": ["model=bert_tiny", "task=pydocs"],
    "tokenizer": ["output=x"],
    "evaluate": ["checkpoint=none"],
    "predict": ["checkpoint=none", "text=a"],
    "embed": ["checkpoint=none", "text=a"],
    "probe": ["checkpoint=none", "target=token"],
    "generate": ["checkpoint=none", "prompt=a"],
    "check": [],
    "doctor": [],
    "inspect tokenizer": ["text=a"],
    "inspect positions": [],
    "inspect word": ["checkpoint=none", "word=a", "text=a"],
    "inspect attention": ["checkpoint=none", "text=a"],
    "export": ["checkpoint=none", "output=x"],
    "import": ["checkpoint=none", "output=x"],
}


# Models for objectives and tokenizers that do not fit an encoder, by the prefix of their names.
PARTNERS = {
    "objective": {
        "clm": "gpt_tiny", "prefix_lm": "gpt_tiny", "span_corruption": "t5_tiny", "denoising": "bart_tiny",
        "skip_gram": "word_vectors_tiny", "bilm": "elmo_tiny", "plm": "xlnet_tiny", "mntp": "gpt_tiny",
        "sequence_autoencoder": "lstm_tiny", "glove": "word_vectors_tiny",
    },
    "tokenizer": {"bpe": "gpt1_tiny", "bytebpe": "gpt_tiny", "sentencepiece": "t5_tiny", "spelled": "elmo_tiny"},
}  # fmt: skip


def cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """A command with overrides for each option of each group."""
    for group, verb in (
        ("model", "pretrain"),
        ("tokenizer", "pretrain"),
        ("data", "pretrain"),
        ("objective", "pretrain"),
        ("optimizer", "pretrain"),
        ("schedule", "pretrain"),
        ("experiment", "pretrain"),
        ("debug", "pretrain"),
        ("logger", "pretrain"),
        ("model/positions", "pretrain"),
        ("model", "finetune"),
        ("task", "finetune"),
        ("tuning", "finetune"),
        ("tuning/schedule", "finetune"),
        ("tuning/regularization", "finetune"),
        ("distill", "pretrain"),
        ("distill", "finetune"),
        ("debug", "finetune"),
        ("sweep", "its own"),
        ("data", "tokenizer"),
        ("tokenizer", "tokenizer"),
    ):
        for name in groups.options(group):
            verb = verb if group != "sweep" else command_of(name)
            if group == "model/positions" and name.startswith("tree_"):
                yield (
                    "finetune",
                    ("model=bert_tiny", "checkpoint=none", "task=ud_ewt", "task.heads=head", f"{group}={name}"),
                )
                continue
            if (group, name) == ("model", "auto") or (verb, name) in (("tokenizer", "auto"), ("tokenizer", "folder")):
                continue
            if group == "task" and name in ("blimp", "minimal_pairs"):
                continue  # scored without training: tests/tasks/test_minimal_pairs.py
            if (verb, group, name) == ("pretrain", "distill", "self"):
                continue  # early exits need a task
            partners = PARTNERS.get(group, {}) if verb == "pretrain" else {}
            model = [f"model={choice}" for start, choice in partners.items() if name.startswith(start)]
            needs = [choice for choice in NEEDS[verb] if not choice.startswith(f"{group}=")]
            if group == "task" and generates_text(name):
                needs = ["model=t5_tiny"]
            if (group, name) == ("distill", "sequence"):  # for tasks that generate text
                if verb == "pretrain":
                    continue
                needs = ["model=t5_tiny", "task=seq2seq", "task.path=x"]
            yield verb, (*needs, *model, f"{group}={name}", *required(group, name))


def command_of(sweep: str) -> str:
    """The command at the head of a sweep's YAML."""
    (command,) = re.findall(r"^# lmtool (\w+) -m ", (CONF / "sweep" / f"{sweep}.yaml").read_text(), re.MULTILINE)
    return str(command)


@cache
def yaml_of(group: str, name: str) -> Any:
    """The content of an option's YAML."""
    return saved.read_yaml(CONF / group / f"{name}.yaml")


def generates_text(task: str) -> bool:
    """Whether a task generates text, which an encoder cannot do."""
    fields = yaml_of("task", task)
    return "seq2seq" in (fields.get("kind"), *fields.get("defaults", ()))


def required(group: str, name: str) -> Iterator[str]:
    """Overrides for the required values of an option's YAML, and for those that the rules of a task demand."""
    if (group, name) == ("objective", "task"):
        yield "objective.task={kind: classification, path: x}"
        return
    if (group, name) == ("data", "task"):
        yield "data.task={kind: classification, path: x}"
        return
    if (group, name) == ("data", "mixture"):
        yield from ("data.members=[text,wikipedia]", "data.with.text.path=x")
        return
    if (group, name) == ("task", "mixture"):
        yield from ("task.members=[sst2,wnut17]", "task.with.wnut17.path=x")
        return
    if group == "objective" and name.startswith("mntp"):  # GPT-2's vocabulary has no mask
        yield "tokenizer.special_tokens=roberta"
    fields = yaml_of(group, name)
    for key, value in fields.items():
        if value == "???":
            yield f"{group}.{key}=x"
    if group == "sweep":  # one value per key makes a single run
        params = fields["hydra"]["sweeper"]["params"]
        yield from (f"{key}={str(values).split(',')[0]}" for key, values in params.items())
        return
    if (group, name) == ("tuning", "adapter_fusion"):
        shape = "placement: pfeiffer, bottleneck: 8, activation: relu, scale: 1.0, hidden_size: 128, num_layers: 2"
        yield f"tuning.adapters=[{{path: x, {shape}}},{{path: y, {shape}}}]"
    if group == "task" and not fields.get("hub") and not fields.get("embedded"):
        yield "task.path=x"


CASES = list(cases())


def is_repeated(verb: str, typed: tuple[str, ...]) -> bool:
    """Whether a `pretrain` case covers the same model, data or tokenizer."""
    return (verb == "finetune" and typed[-1].startswith("model=")) or verb == "tokenizer"


@pytest.mark.parametrize(
    ("verb", "typed"),
    slow_but([case for case in CASES if not is_repeated(*case)], CASES),
    ids=lambda argument: argument if isinstance(argument, str) else " ".join(argument),
)
def test_every_option_composes_and_decodes(verb: str, typed: tuple[str, ...]) -> None:
    config = compose_and_decode(verb, *typed)
    for section, choice in registry.choices(type(config)).items():
        assert getattr(getattr(config, section), choice.key) != "auto"


@pytest.mark.parametrize("name", groups.options("experiment"))
def test_experiments_accept_other_data(name: str) -> None:
    """Experiments set no key of a single data source, so `data=text` can be added."""
    assert compose_and_decode("pretrain", f"experiment={name}", "data=text", "data.path=x").data.name == "text"


def test_every_yaml_is_covered_by_a_case() -> None:
    covered = {text for _, typed in CASES for text in typed}
    primaries = {f"{name}.yaml" for name in PRIMARY.values()}
    options = {
        f"{Path(path).parent}={Path(path).stem}"
        for path in YAMLS
        # See tests/models/test_recipes.py, tests/tasks/test_adaptation.py and tests/distillation/test_standard.py.
        if path not in primaries and not path.startswith(("recipe/", "task/domain/", "distill/term/"))
    }
    # model=auto needs a checkpoint: see cli/test_main; minimal pairs are scored: see tasks/test_minimal_pairs.
    assert options - covered == {"model=auto", "task=blimp", "task=minimal_pairs"}
    assert primaries == {path for path in YAMLS if "/" not in path}


def default_values_of(entry: registry.Entry) -> dict[str, Any]:
    from lmtool.config.registry import default_values

    return OmegaConf.to_container(OmegaConf.create(default_values(entry.config)))  # type: ignore[return-value]


@pytest.mark.parametrize(("group", "name"), COMPONENTS, ids=lambda argument: argument)
def test_yaml_equals_class_defaults(group: str, name: str) -> None:
    entry = registry.lookup(group, name)
    path = groups.yaml_file(group, name)
    assert entry is not None and path is not None, "each component has a YAML"
    assert with_nested_choices(path) == default_values_of(entry)


def with_nested_choices(path: Path) -> dict[str, Any]:
    """The content of a YAML, with the nested choices of its defaults list."""
    written: Any = OmegaConf.to_container(OmegaConf.load(path))
    for item in written.pop("defaults", []):
        for group, name in item.items() if isinstance(item, dict) else ():
            written[group] = with_nested_choices(path.parent / group / f"{name}.yaml")
    return written


@pytest.mark.parametrize("verb", list(command_classes()))
def test_primary_yaml_has_the_keys_of_its_class(verb: str) -> None:
    written = OmegaConf.to_container(OmegaConf.load(CONF / f"{PRIMARY[verb]}.yaml"))
    assert isinstance(written, dict)
    chosen = {str(key) for item in written.pop("defaults", []) if isinstance(item, dict) for key in item}
    given = {str(key) for key in written} | {key for key in chosen if key in command_classes()[verb].model_fields}
    assert given == set(command_classes()[verb].model_fields) - {"plugins"}


@pytest.mark.parametrize("path", YAMLS)
def test_every_yaml_begins_with_purpose_and_command(path: str) -> None:
    lines = (CONF / path).read_text(encoding="utf-8").splitlines()
    comments = [
        line for line in itertools.takewhile(lambda line: line.startswith("#"), lines) if "@package" not in line
    ]
    assert groups.purpose(CONF / path) and any("lmtool " in line for line in comments)
    assert "_target_" not in "\n".join(lines)


def documented(config: type[Config]) -> Iterator[tuple[str, str | None]]:
    for name, field in config.model_fields.items():
        yield f"{config.__name__}.{name}", field.description
        below = section_class(field)
        if below is not None:
            yield from documented(below)


def test_every_config_field_is_documented() -> None:
    classes = {*command_classes().values(), *(registry.lookup(*config_class).config for config_class in COMPONENTS)}  # type: ignore[union-attr]
    missing = [name for config_class in classes for name, text in documented(config_class) if not text or len(text) < 4]
    assert not missing


def test_presets_only_change_values() -> None:
    """A preset names its base first and adds no key that the class lacks."""
    for path in YAMLS:
        written = OmegaConf.to_container(OmegaConf.load(CONF / path))
        assert isinstance(written, dict)
        first = str((written.get("defaults") or [""])[0])
        group, name = str(Path(path).parent), Path(path).stem
        if first in groups.options(group) and group not in ("experiment", "debug"):
            entry = registry.lookup(group, first)
            if entry is not None:
                assert set(written) - {"defaults"} <= set(entry.config.model_fields), path
                assert name != first
