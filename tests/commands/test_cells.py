"""Every objective with every family: a legal pair trains; an illegal one is refused before any data is read, with an
override that makes it legal."""

from __future__ import annotations

import copy
import math
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtool.cli import main as cli
from lmtool.config import compose, groups, registry
from lmtool.config.registry import Choice, build
from lmtool.data.configs import FORMATS
from lmtool.data.examples import SplitData
from lmtool.data.formats import text_format
from lmtool.data.loader import PackedLoader
from lmtool.data.store import TokenStore, open_store
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.errors import USER_ERROR, ConfigError, UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.evaluation import TermScorer, evaluate
from lmtool.resolver.commands import PretrainConfig
from lmtool.resolver.decoding import decode_config
from lmtool.tasks.mixture import read_tasks, rows_of
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.engine import Plain
from lmtool.training.precision import select_precision
from lmtool.training.step import apply_gradients, gradients
from tests.breadth import slow_but
from tests.commands.conftest import merge_overrides, write_rows, write_text

CPU = torch.device("cpu")
OBJECTIVES = [name for name in groups.options("objective") if name != "auto"]
# A tiny model of each family, or of both versions of a family.
FAMILIES = {entry.name: (f"model={entry.name}_tiny",) for entry in registry.entries("model")}
MODELS = FAMILIES | {"t5 1.1": ("model=t5_tiny", "model.feedforward=gated_gelu", "model.tied=false")}
SIZES = {
    "num_layers": 1, "hidden_size": 16, "num_heads": 2, "feedforward_size": 24, "vocab_size": 400, "max_positions": 64,
}  # fmt: skip
# With smaller weights, positions change the scores of a network of width 4 by less than the optimizer's epsilon.
NARROW = {"head_size": 8, "embedding_size": 12, "initializer_std": 0.1}


@cache
def section(name: str, *typed: str) -> Any:
    """One section of the configuration that `lmtool pretrain` composes. YAML of one group sets no other section, so
    sections of models and objectives can be combined."""
    accepted = compose.accepted_overrides("pretrain")
    read = compose.read_overrides([*typed], accepted)
    assert not read.problems
    return compose.compose("pretrain", read)[name]


def decode(model: tuple[str, ...], objective: tuple[str, ...], more: tuple[str, ...] = ()) -> PretrainConfig:
    """The configuration of a pair with further overrides, as of a hint."""
    tokenizer: tuple[str, ...] = ()
    for word in more:
        if word.startswith("model="):
            model = (word,)
        elif word.startswith("objective="):
            objective = (word,)
        elif word.startswith("objective."):
            objective = tuple(merge_overrides(objective, (word,)))
        else:
            assert word.startswith(("tokenizer=", "tokenizer.")), word
            tokenizer = (*tokenizer, word) if word.startswith("tokenizer.") else (word,)
    sections = {name: section(name) for name in ("data", "optimizer", "schedule")}
    sections["tokenizer"] = section("tokenizer", *tokenizer)
    budget = {"max_steps": 2, "batch_tokens": 256, "max_length": 32, "device": "cpu", "precision": "fp32"}
    return decode_config(
        "pretrain",
        {**sections, **budget, "model": section("model", *model), "objective": section("objective", *objective)},
    )


def with_smallest_sizes(config: PretrainConfig) -> PretrainConfig:
    """The configuration with the smallest sizes of the family."""
    fields = type(config.model).model_fields
    sizes = {name: size for name, size in (SIZES | NARROW).items() if name in fields}
    return config.model_copy(update={"model": config.model.model_copy(update=sizes)})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cells")
    write_text(folder / "text.txt")
    write_rows(folder / "rows")
    yield folder
    stores.cache_clear()


@cache
def stores(place: Path, config: TokenizerConfig) -> tuple[Tokenizer, dict[str, TokenStore]]:
    """A tokenizer and its token stores, cached for all models that use the tokenizer."""
    source = build(Choice("data").validate({"name": "text", "path": str(place / "text.txt")}), str(place))
    tokenizer = trained_tokenizer(config, source, SIZES["vocab_size"], str(place))
    return tokenizer, {split: open_store(source, split, tokenizer, str(place)) for split in ("train", "validation")}


def assert_trains(config: PretrainConfig, place: Path) -> None:
    """Trains two steps, evaluates and draws samples. Every parameter has a gradient, except the start of a query stream
    that the objective does not use."""
    tokenizer, both = stores(place, config.tokenizer)
    objective, tasks = read_tasks(config.objective, 0, place, True)
    data = {split: SplitData(split, store, "joined", rows_of(tasks, split)) for split, store in both.items()}
    learner = objective.learner(build(config.model, 0), tokenizer, 0).train()
    examples = {split: learner.examples(part, 32) for split, part in data.items()}
    groups_ = learner.parameter_groups()
    optimizer, steps = build(config.optimizer, groups_), iter(PackedLoader(examples["train"], 0, None, 256).steps())
    asks = getattr(config.objective, "query_stream", False)
    named = {name: each for name, each in learner.named_parameters() if asks or not name.endswith(".query.weight")}
    precision = select_precision("fp32", CPU)
    # Parameters before a zero-initialized projection (rnn_attention's scores) move from the second step on.
    untouched, unmoved = set(named), set(named)
    for step in (1, 2):
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        outcome = gradients(Plain(learner), next(steps), step, 0, precision)
        assert math.isfinite(float(outcome.loss)) and set(outcome.terms) == set(learner.loss_weights)
        untouched &= {
            name for name, parameter in named.items() if parameter.grad is None or not parameter.grad.abs().sum() > 0
        }
        apply_gradients(optimizer, None, list(named.values()), config.optimizer.clip_norm)
        unmoved &= {name for name, parameter in named.items() if torch.equal(parameter, before[name])}
    assert not untouched and not unmoved
    batches = list(PackedLoader(examples["validation"], 0, None, 512, shuffle=False).epoch_batches())[:1]
    predictors = learner.predictors(data["train"], examples["train"])
    scored = evaluate(learner, TermScorer(learner, predictors), batches)
    assert math.isfinite(scored.loss) and set(scored.terms) == set(learner.loss_weights)
    learner.eval()
    assert len(learner.samples(batches[0], 1)) == (type(learner).samples is not BaseLearner.samples)


def assert_refused(error: ConfigError, *words: tuple[str, ...]) -> None:
    """Checks that the single problem names a chosen key, and that each override of its hint makes the words legal:
    those of the model, of the objective and possibly of the tokenizer."""
    assert len(error.problems) == 1
    problem = error.problems[0]
    assert problem.key.split(".")[0] in ("objective", "tokenizer")
    assert problem.hint is not None and problem.hint.startswith("set ")
    for hint in problem.hint.removeprefix("set ").split(" or "):
        decode(*words[:2], (*sum(words[2:], ()), *shlex.split(hint)))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("model", slow_but({"bert", "t5"}, MODELS))
def test_every_pair_trains_or_is_refused_with_hint(place: Path, model: str, objective: str) -> None:
    task = f"objective.task={{kind: classification, path: {place / 'rows'}, text: [sentence]}}"
    words = (f"objective={objective}", *([task] if objective == "task" else []))
    try:
        config = decode(MODELS[model], words)
    except ConfigError as error:
        assert_refused(error, MODELS[model], words)
    else:
        assert_trains(with_smallest_sizes(config), place)


TOKENIZERS = {
    "wordpiece": {},
    "bytebpe": {"special_tokens": "gpt2"},
    "bytebpe of roberta": {"special_tokens": "roberta"},
    "sentencepiece": {"special_tokens": "t5"},
    "sentencepiece without sentinels": {"special_tokens": "t5", "sentinels": 0},
    "sentencepiece of albert": {"special_tokens": "albert"},
}


@pytest.mark.parametrize("case", slow_but({"bytebpe of roberta", "sentencepiece"}, TOKENIZERS))
def test_tokenizer_without_required_tokens_is_refused(place: Path, case: str) -> None:
    """The configured special tokens are those of the trained vocabulary. The rules refuse a pair if and only if
    building formats or examples fails."""
    config: Any = Choice("tokenizer").validate({"name": case.split()[0], **TOKENIZERS[case]})
    tokenizer, both = stores(place, config)
    assert config.roles == {*tokenizer.roles, *(["sentinel"] if tokenizer.sentinels else [])}
    for model in FAMILIES.values():
        for objective in ("auto", "prefix_lm", "denoising"):
            pair = model, (f"objective={objective}",)
            try:
                decode(*pair)
            except ConfigError:
                continue
            given = decode(*pair)
            try:
                checked = decode_config("pretrain", {**given.model_dump(), "tokenizer": config.model_dump()})
            except ConfigError as error:
                assert_refused(error, *pair, (f"tokenizer={config.name}",))
                with pytest.raises(UserError, match="has no .* token|needs .* sentinel tokens"):
                    make_examples(with_smallest_sizes(given), tokenizer, both["train"])
            else:
                make_examples(with_smallest_sizes(checked), tokenizer, both["train"])


def make_examples(config: PretrainConfig, tokenizer: Tokenizer, store: TokenStore) -> None:
    with torch.device("meta"):
        learner = config.objective.learner(build(config.model, 0), tokenizer, 0)
    examples = learner.examples(SplitData("train", store), 32)
    assert examples.batch(examples.plan(0).rows[:2], np.arange(2), 0).tokens
    if config.model.architecture != "encoder":
        tokenizer.role("eos")  # the end of an answer


@pytest.mark.parametrize("name", FORMATS)
def test_formats_need_their_listed_roles(place: Path, name: str) -> None:
    tokenizer, _ = stores(place, Choice("tokenizer").validate({"name": "sentencepiece", "special_tokens": "albert"}))
    layout = text_format(name, tokenizer)
    _, columns = layout.join(np.array([9]), np.array([10, 11]))
    assert ("segment" in columns) == FORMATS[name].segments
    for role in FORMATS[name].roles:
        less = copy.copy(tokenizer)
        less.roles = {key: number for key, number in tokenizer.roles.items() if key != role}
        with pytest.raises(UserError, match=f"has no {role} token"):
            text_format(name, less)


@pytest.mark.parametrize(
    ("model", "members", "message"),
    [
        ("roberta_tiny", "[rtd,{name: mlm, pairs: nsp}]", "objective.with.mlm.pairs=nsp needs a model with segment"),
        ("gpt_tiny", "[mlm,{name: clm, label_smoothing: 0.1}]", "objective=mlm trains an encoder; model=gpt is a"),
        ("bart_tiny", "[span_corruption,denoising]", "has no sentinel token, which objective=span_corruption needs"),
        ("distilbert_tiny", "[span,mlm,rtd,clm]", "objective=clm trains a decoder; model=distilbert is an encoder"),
    ],
)
def test_member_that_cannot_train_the_model_is_refused(model: str, members: str, message: str) -> None:
    weights = ",".join("1.0" for _ in members.split("{")[0].split(","))
    words = ("objective=mixture", f"objective.members={members}", f"objective.weights=[{weights}]")
    with pytest.raises(ConfigError) as caught:
        decode((f"model={model}",), words)
    assert caught.value.problems[0].key == "objective.members" and message in caught.value.message
    assert_refused(caught.value, (f"model={model}",), words)


def test_pairs_need_format_with_segments() -> None:
    words = ("objective=mlm_nsp",)
    with pytest.raises(ConfigError, match="segment embeddings") as caught:
        decode(("model=roberta_tiny", "model.segments=2"), words)
    assert caught.value.hint == "set objective.pairs=none"


def test_unsuitable_tokenizer_folder_is_refused_early(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens of a tokenizer folder are known only after loading."""
    monkeypatch.chdir(place)
    tokenizer, _ = stores(place, Choice("tokenizer").validate({"name": "wordpiece"}))
    tokenizer.save(place / "vocabulary")
    words = ["pretrain", "tokenizer=folder", f"tokenizer.path={place / 'vocabulary'}", "data=text"]
    words += [f"data.path={place / 'text.txt'}", f"cache_dir={place / 'cache'}", f"run_dir={place / 'run'}"]
    for more, message in (
        (["model=gpt_tiny"], "has no eos token, which model=gpt adds to its texts"),
        (["model=t5_tiny"], "has no eos token, which model=t5 adds"),
        (["model=bart_tiny"], "has no eos token, which model=bart adds"),
    ):
        assert cli.main([*words, *more]) == USER_ERROR
        assert message in capsys.readouterr().err and not (place / "cache" / "stores").exists()
