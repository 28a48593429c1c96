"""Overrides are parsed and checked before Hydra reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmtool.config import compose
from lmtool.config.compose import AcceptedOverrides, as_values, read_overrides
from lmtool.sweeps.jobs import jobs_of

ACCEPTED = AcceptedOverrides(
    {"model": ("bert", "gpt"), "task": ("cola", "sst2"), "model/positions": ("learned",), "experiment": ("a",)},
    {"model": "bert", "task": None, "experiment": None},
    keys=frozenset({"seed", "checkpoint", "max_steps"}),
)


def test_values_are_forced_and_choices_kept() -> None:
    words = ["model=bert", "optimizer.lr=1e-3", "+x.y=1", "++z=2", "+experiment=a", "hydra/launcher=joblib"]
    typed = read_overrides(words, ACCEPTED, multirun=True)
    assert typed.choices == ["model=bert", "experiment=a"]
    assert typed.values == ["++optimizer.lr=1e-3", "++x.y=1", "++z=2"]
    assert typed.hydra == ["hydra/launcher=joblib"] and not typed.problems


def test_null_removes_a_choice() -> None:
    assert read_overrides(["model=null", "experiment=null"], ACCEPTED).choices == ["~model"]


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("model=brt", "model=brt is not one of bert, gpt", "model=bert"),
        ("model=[bert,gpt]", "takes one model", "-m model=bert,gpt"),
        ("task=sst2,cola", "has several values, but a run takes one", "-m task=sst2,cola"),
        ("seed=1,2", "several values", "-m sweeps over them"),
        (
            "data.path=a.txt,b.txt",
            "several values",
            "a list has brackets, a text quotes: [a.txt,b.txt] or ",
        ),
        ("data.path=it's", "special meaning", "it's"),
        ("data.path=a(b.csv", "special meaning", "'data.path=\"a(b.csv\"'"),
        ("data.path=[é", "special meaning", "'data.path=\"[é\"'"),
        ("é=1", "é=1: é is not a key", "ASCII letters, digits"),
        ("=3", "=3 has no key before =", "ASCII letters, digits"),
        ("hydra.foo=1", "hydra.foo=1: lmtool uses only these keys of Hydra", "omit it"),
        ("hydra.run.dir=", "hydra.run.dir=: lmtool uses only these keys of Hydra", "run_dir=FOLDER"),
        ("hydra.run.dir=x", "hydra.run.dir=x: lmtool uses only these keys of Hydra", "run_dir=FOLDER"),
        ("hydra/launcher=joblib", "with -m", "add -m"),
        ("~model", "cannot be removed", "lmtool list model"),
        ("~seed", "cannot be removed", "seed=VALUE"),
        ("seed", "not an override", "write seed=VALUE"),
        ("bert", "not an override", "write model=bert"),
        ("max_stps", "not an override", "write max_steps=VALUE"),
        ("max_epoch", "not an override", "write KEY=VALUE"),
        ("runs/first", "not an override", "write checkpoint=runs/first"),
        ("bert-base-cased", "not an override", "write checkpoint=hf://bert-base-cased"),
        ("org/name", "not an override", "write checkpoint=hf://org/name"),
        ("rows.csv", "not an override", "write task=rows.csv"),
        ("model=bert-base-cased", "is not one of", "did you mean checkpoint=hf://bert-base-cased?"),
        ("task=glue/sst2", "is not one of", "did you mean task=sst2, or task=custom"),
        ("model=glob(bert*)", "several options, but a run takes one", "-m 'model=glob(bert*)'"),
        ("seed=glob(*)", "seed=glob(*) is a pattern", "quote a text"),
        ("model/position=learned", "no group model/position", "model/positions=learned"),
        ("seed=[range(1,3),-1]", "a list or section cannot contain a sweep", "without brackets: -m seed=A,B"),
        ("seed={a: [1, interval(1,3)]}", "a list or section cannot contain a sweep", "write the values out"),
        ("data/x=learned", "no group data/x", "lmtool list"),
    ],
)
def test_invalid_override_has_message_and_hint(text: str, says: str, hint: str) -> None:
    (problem,) = read_overrides([text], ACCEPTED).problems
    assert says in problem.message and hint in (problem.hint or "")


def test_group_of_another_command_is_refused() -> None:
    accepted = AcceptedOverrides(ACCEPTED.groups, {"model": "bert"})
    accepted.primary["local"] = "default"  # an optional user file
    (problem,) = read_overrides(["task=sst2"], accepted).problems
    assert problem.message == "task=sst2: this command has no task"
    assert problem.hint == "use one of its groups: model"


def test_two_choices_of_a_group_are_refused() -> None:
    typed = read_overrides(["model=bert", "seed=1", "model=gpt"], ACCEPTED)
    (problem,) = typed.problems
    assert problem.message == "model=bert and model=gpt: a run takes one model"
    assert problem.hint is not None and "-m model=bert,gpt" in problem.hint
    assert not read_overrides(["model=bert", "model=bert"], ACCEPTED).problems


@pytest.mark.parametrize("multirun", [False, True])
def test_repeated_key_is_refused(multirun: bool) -> None:
    typed = read_overrides(["seed=1", "a.b=x", "++seed=2", "a.b=x"], ACCEPTED, multirun=multirun)
    (problem,) = typed.problems
    assert (problem.message, problem.hint) == ("seed=1 and seed=2: a key may be set only once", "keep one of them")
    (problem,) = read_overrides(["text=a", "text=b"], replace(ACCEPTED, verbatim=["text"])).problems
    assert problem.message == "text=a and text=b: a key may be set only once"


def test_alternative_keys_exclude_each_other() -> None:
    accepted = replace(ACCEPTED, alternatives=[("a.steps", "a.share")])
    (problem,) = read_overrides(["a.share=0.5", "a.steps=3"], accepted).problems
    assert problem.message == "a.steps=3 and a.share=0.5 exclude each other"
    assert not read_overrides(["a.share=null", "a.steps=3"], accepted).problems


def test_sweep_refuses_unknown_hydra_key() -> None:
    (problem,) = read_overrides(["hydra.foo=1", "seed=1,2"], ACCEPTED, multirun=True).problems
    assert problem.key == "hydra.foo" and "hydra/sweeper" in problem.message


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("data.path=café.txt", "café.txt"),
        ("data.path=/a=b.csv", "/a=b.csv"),
        ("data.path=~/texts", "~/texts"),
        ("data.path=R&D!.txt", "R&D!.txt"),
        ("data.path=テキスト/本.txt", "テキスト/本.txt"),
        ("data.path=xé xxé", "xé xxé"),
        ("data.path=[a.txt,'b c.txt',é.txt,3,null,true]", ["a.txt", "b c.txt", "é.txt", 3, None, True]),
        ("data.path={a: é, b: [1.5,ö]}", {"a": "é", "b": [1.5, "ö"]}),
        ("data.path=C:\\é\\", "C:\\é\\"),
        ("data.path='é'", "é"),
    ],
)
def test_values_outside_hydra_grammar_keep_their_value(typed: str, value: Any) -> None:
    """Both where lmtool reads overrides itself, and where Hydra composes a configuration from them."""
    data, problems = as_values([typed], ACCEPTED)
    assert not problems and data == {"data": {"path": value}}
    composed = compose.compose("pretrain", read_overrides(["data=text", typed], compose.accepted_overrides("pretrain")))
    assert composed["data"]["path"] == value


def test_sweep_values_outside_hydra_grammar_are_quoted() -> None:
    typed = read_overrides(["data.path=é.txt,b.txt", "seed=1,2"], ACCEPTED, multirun=True)
    assert typed.sweeps and not typed.problems
    assert [job.values for job in jobs_of(typed)][::2] == [
        ["++data.path='é.txt'", "++seed=1"],
        ["++data.path=b.txt", "++seed=1"],
    ]
    (problem,) = read_overrides(["data.path=é.txt,b.txt"], ACCEPTED).problems
    assert "has several values, but a run takes one" in problem.message


def test_every_choice_of_a_sweep_is_checked() -> None:
    typed = read_overrides(["task=sst2,colla", "seed=1,2"], ACCEPTED, multirun=True)
    assert [problem.hint for problem in typed.problems] == ["did you mean task=cola?"]


def test_glob_expands_to_matching_options() -> None:
    typed = read_overrides(["model=glob([b*,g*],exclude=*z)", "seed=1,2"], ACCEPTED, multirun=True)
    assert typed.choices == ["model=bert,gpt"] and typed.sweeps and not typed.problems
    assert [job.choices for job in jobs_of(typed)] == [["model=bert"], ["model=bert"], ["model=gpt"], ["model=gpt"]]
    for nothing in ("model=glob(x*)", "model=bert,glob(g*)", "model=[glob(*)]"):
        (problem,) = read_overrides([nothing], ACCEPTED, multirun=True).problems
        assert problem.message == f"{nothing} matches no option of model"


def test_verbatim_text_is_kept_unparsed() -> None:
    text = 'it\'s, "good" ${oc.env:HOME} [a] {b} \\ !'
    typed = read_overrides([f"text={text}"], replace(ACCEPTED, verbatim=["text"]))
    assert typed.verbatim == {"text": text} and not typed.problems
    (problem,) = read_overrides(["text=a", "text.part=b"], replace(ACCEPTED, verbatim=["text"])).problems
    assert problem.message == "text.part: text= is text here and has no keys"


def test_suggested_quoting_parses() -> None:
    import shlex

    for value in ("it's", "a(b.csv", 'say "no!"', "[è"):
        (problem,) = read_overrides([f"data.path={value}"], ACCEPTED).problems
        quoted = (problem.hint or "").removeprefix("quote it: ")
        (word,) = shlex.split(quoted)
        data, problems = as_values([word], ACCEPTED)
        assert not problems and data == {"data": {"path": value}}, quoted


def test_as_values_parses_values_and_refuses_groups() -> None:
    data, problems = as_values(["a.b=1e-3", "a.c=[x,y]", "d=null", "e='1'", "model=bert"], ACCEPTED)
    assert data == {"a": {"b": 1e-3, "c": ["x", "y"]}, "d": None, "e": "1"}
    assert [problem.key for problem in problems] == ["model"]


def test_jobs_are_every_combination_in_order() -> None:
    typed = read_overrides(["task=sst2,cola", "model=bert", "seed=1,2"], ACCEPTED, multirun=True)
    assert [(job.choices, job.values) for job in jobs_of(typed)] == [
        (["task=sst2", "model=bert"], ["++seed=1"]),
        (["task=sst2", "model=bert"], ["++seed=2"]),
        (["task=cola", "model=bert"], ["++seed=1"]),
        (["task=cola", "model=bert"], ["++seed=2"]),
    ]
