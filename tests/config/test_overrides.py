"""What is typed, before Hydra sees it."""

from __future__ import annotations

import pytest

from lmtool.config.overrides import Offers, as_values, read
from lmtool.sweeps.jobs import jobs_of

OFFERS = Offers(
    {"model": ("bert", "gpt"), "task": ("cola", "sst2"), "model/positions": ("learned",), "experiment": ("a",)},
    {"model": "bert", "task": None, "experiment": None},
)


def test_values_are_forced_and_choices_stay() -> None:
    typed = read(["model=bert", "optimizer.lr=1e-3", "+x.y=1", "++z=2", "+experiment=a", "hydra.verbose=true"], OFFERS)
    assert typed.choices == ["model=bert", "experiment=a"]
    assert typed.values == ["++optimizer.lr=1e-3", "++x.y=1", "++z=2"]
    assert typed.hydra == ["hydra.verbose=true"] and not typed.problems


def test_null_takes_a_choice_away() -> None:
    assert read(["model=null", "experiment=null"], OFFERS).choices == ["~model"]


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("model=brt", "model=brt is not one of bert, gpt", "model=bert"),
        ("model=[bert,gpt]", "takes one model", "-m model=bert,gpt"),
        ("task=sst2,cola", "several choices", "-m task=sst2,cola"),
        ("seed=1,2", "several values", "seed=[1,2]"),
        ("data.path=it's", "meaning of its own", "it's"),
        ("data.path=/a=b.csv", "meaning of its own", "'data.path=\"/a=b.csv\"'"),
        ("~model", "cannot be taken away", "lmtool list model"),
        ("~seed", "cannot be taken away", "seed=VALUE"),
        ("seed", "no override", "seed=VALUE"),
        ("runs/first", "no override", "checkpoint=runs/first"),
        ("model/position=learned", "no group model/position", "model/positions=learned"),
        ("data/x=learned", "no group data/x", "lmtool list"),
    ],
)
def test_what_cannot_be_used(text: str, says: str, hint: str) -> None:
    (problem,) = read([text], OFFERS).problems
    assert says in problem.message and hint in (problem.hint or "")


def test_a_group_of_another_command() -> None:
    offers = Offers(OFFERS.groups, {"model": "bert"})
    offers.primary["local"] = "default"  # an optional file of the user's
    (problem,) = read(["task=sst2"], offers).problems
    assert problem.message == "task=sst2: this command has no task"
    assert problem.hint == "its groups are model"


def test_two_choices_of_a_group() -> None:
    typed = read(["model=bert", "seed=1", "model=gpt"], OFFERS)
    (problem,) = typed.problems
    assert problem.message == "model=bert and model=gpt: a run takes one model"
    assert problem.hint is not None and "-m model=bert,gpt" in problem.hint
    assert not read(["model=bert", "model=bert", "seed=1", "seed=2"], OFFERS).problems


def test_every_option_of_a_sweep_is_checked() -> None:
    typed = read(["task=sst2,colla", "seed=1,2"], OFFERS, multirun=True)
    assert [one.hint for one in typed.problems] == ["did you mean task=cola?"]


def test_verbatim_text_means_nothing_to_hydra() -> None:
    text = 'it\'s, "good" ${oc.env:HOME} [a] {b} \\ !'
    typed = read([f"text={text}"], OFFERS, verbatim=["text"])
    assert typed.verbatim == {"text": text} and not typed.problems


def test_the_suggested_quoting_is_legal() -> None:
    import shlex

    for value in ("it's", "/a=b.csv", "a!b", 'say "no!"', "è"):
        (problem,) = read([f"data.path={value}"], OFFERS).problems
        quoted = (problem.hint or "").removeprefix("quote it: ")
        (word,) = shlex.split(quoted)
        data, problems = as_values([word], OFFERS)
        assert not problems and data == {"data": {"path": value}}, quoted


def test_plain_values_beside_a_saved_configuration() -> None:
    data, problems = as_values(["a.b=1e-3", "a.c=[x,y]", "d=null", "e='1'", "model=bert"], OFFERS)
    assert data == {"a": {"b": 1e-3, "c": ["x", "y"]}, "d": None, "e": "1"}
    assert [one.key for one in problems] == ["model"]


def test_jobs_are_every_combination_in_order() -> None:
    typed = read(["task=sst2,cola", "model=bert", "seed=1,2"], OFFERS, multirun=True)
    assert [(one.choices, one.values) for one in jobs_of(typed)] == [
        (["task=sst2", "model=bert"], ["++seed=1"]),
        (["task=sst2", "model=bert"], ["++seed=2"]),
        (["task=cola", "model=bert"], ["++seed=1"]),
        (["task=cola", "model=bert"], ["++seed=2"]),
    ]
