"""The decoder reports all errors at once in plain words, and resolves `auto`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmtool.config.base import Config
from lmtool.config.decode import decode
from lmtool.errors import ConfigError, Problem

from .fakes import DieselConfig, DriveConfig, SteamConfig


@pytest.fixture(autouse=True)
def hints_can_be_typed() -> None:
    """Disables the check of hints: the keys here belong to a fake command."""


def drive(**changes: Any) -> dict[str, Any]:
    good = {"road": "north", "engine": {"name": "steam"}, "wheels": {"name": "round"}, "paint": {"name": "colour"}}
    return good | changes


def problems_of(data: dict[str, Any], **how: Any) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        decode(DriveConfig, data, **how)
    return {problem.key: problem for problem in caught.value.problems}


def test_valid_config_is_frozen_and_typed() -> None:
    config = decode(DriveConfig, drive(stops=["a", "b"], minutes=3))
    assert isinstance(config.engine, SteamConfig) and config.stops == ("a", "b") and config.minutes == 3.0
    with pytest.raises(Exception, match="frozen"):
        config.seed = 2


def test_all_errors_are_reported_together() -> None:
    data = drive(
        road="???",
        seed=1000.0,
        mode="fsat",
        minutes=float("nan"),
        lights="yes",
        sedd=1,
        spokes=4,
        engine={"name": "steam", "pressure": "high", "boilers": 0, "presure": 1},
        wheels={"name": "round", "tread": {"deph": 2}},
        paint={"name": "color"},
    )
    problems = problems_of(data)
    assert set(problems) == {
        "road",
        "seed",
        "mode",
        "minutes",
        "lights",
        "sedd",
        "spokes",
        "engine.pressure",
        "engine.boilers",
        "engine.presure",
        "wheels.tread.deph",
        "paint.name",
    }
    assert problems["road"].message == "missing required value: road"
    assert problems["road"].hint == "set road=... (Road that is taken)"
    assert problems["seed"].hint == "write seed=1000"
    assert problems["mode"].message == 'mode: given "fsat" (text); allowed: fast or slow'
    assert problems["mode"].hint == "did you mean mode=fast?"
    assert problems["minutes"].message == "minutes: given NaN (number); allowed: a number, above 0, or null"
    assert "true or false" in problems["lights"].message
    assert problems["sedd"].hint == "did you mean seed=1?"
    assert problems["spokes"].hint == "did you mean wheels.spokes=4?"
    assert "a number, above 0, below 10" in problems["engine.pressure"].message
    assert "at least 1" in problems["engine.boilers"].message
    assert problems["engine.presure"].hint == "did you mean engine.pressure=1?"
    assert problems["wheels.tread.deph"].hint == "did you mean wheels.tread.depth=2?"
    assert problems["paint.name"].hint == "did you mean paint.name=colour?"


def test_boolean_labels_hint_suggests_quotes() -> None:
    problems = problems_of(drive(stops=[True, False]))
    assert list(problems) == ["stops[0]"] and "quote it" in (problems["stops[0]"].hint or "")


def test_number_read_as_text_by_yaml_is_refused() -> None:
    problems = problems_of(drive(engine={"name": "steam", "oil": "1e-4"}))
    assert problems["engine.oil"].hint == "write engine.oil=0.0001"


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("seed", "3", "write seed=3"),
        ("seed", "3.0", "write seed=3"),
        ("seed", "3.5", "Seed (`lmtool show seed`)"),
        ("seed", "-3", "Seed (`lmtool show seed`)"),
        ("seed", -3.0, "Seed (`lmtool show seed`)"),
        ("minutes", "1.5", "write minutes=1.5"),
        ("minutes", "0", "Minutes (`lmtool show minutes`)"),
        ("minutes", "1e-9", "write minutes=1.0e-09"),
    ],
)
def test_hinted_number_is_valid(key: str, value: Any, hint: str) -> None:
    assert problems_of(drive(**{key: value}))[key].hint == hint


def test_misspelled_key_is_not_also_missing() -> None:
    problems = problems_of(drive(road="???", raod="north"))
    assert list(problems) == ["raod"] and problems["raod"].hint == "did you mean road=north?"
    data = drive(engin="steam")
    del data["engine"]
    assert list(problems_of(data)) == ["engin"]
    # A value of the correctly spelled key is checked too.
    assert set(problems_of(drive(seed=-1, sedd=2))) == {"seed", "sedd"}


def test_unreadable_value_is_not_also_missing() -> None:
    problems = problems_of(drive(road="???"), earlier=[Problem("road", "road=it's: not readable")])
    assert [problem.message for problem in problems.values()] == ["road=it's: not readable"]


def test_missing_values_are_reported_last() -> None:
    assert list(problems_of(drive(road="???", engine={"name": "auto"}, minutes=-1.0))) == ["minutes", "engine", "road"]


def test_number_for_text_key_is_refused() -> None:
    assert problems_of(drive(road=7))["road"].hint == "quote it: 'road=\"7\"'"


def test_hint_names_component_that_has_the_key() -> None:
    assert (
        problems_of(drive(engine={"name": "steam", "cylinders": 4}))["engine.cylinders"].hint
        == "engine=diesel has cylinders"
    )


def test_deleted_sections_are_missing() -> None:
    data = drive()
    del data["engine"], data["road"]
    problems = problems_of(data)
    assert problems["engine"].message == "missing required value: engine, one of diesel, steam"
    assert problems["road"].message == "missing required value: road"


@pytest.mark.parametrize("value", [None, 3, [], "stem", {"pressure": 1.0}])
def test_invalid_section_is_refused(value: Any) -> None:
    problems = problems_of(drive(engine=value))
    assert any(key.split(".")[0] == "engine" for key in problems)


def test_date_value_hint_suggests_quotes() -> None:
    import datetime

    problems = problems_of(drive(road=datetime.date(2024, 1, 2)))
    assert problems["road"].hint == 'quote it: road: "2024-01-02"'


def test_auto_uses_parts_named_by_another_section() -> None:
    config = decode(DriveConfig, drive(wheels={"name": "auto", "tread": {"depth": 3.0}}, paint="auto"))
    assert config.wheels.spokes == 7 and config.wheels.tread.depth == 3.0 and config.paint.layers == 9
    data = drive(engine={"name": "diesel", "cylinders": 6}, paint={"name": "auto"})
    assert decode(DriveConfig, data).paint.layers == 6


def test_auto_without_source_is_reported_once() -> None:
    problems = problems_of(drive(engine={"name": "diesel"}, wheels={"name": "auto"}))
    assert problems["wheels"].hint == "set wheels=round"
    problems = problems_of(drive(engine={"name": "auto"}, wheels={"name": "auto"}))
    assert set(problems) == {"engine"}, "the wheels depend on the engine: one error, reported once"


def test_sections_that_depend_on_invalid_one_are_checked() -> None:
    data = drive(engine={"name": "steam", "boiler": 2}, wheels={"name": "auto", "spokes": 1})
    assert set(problems_of(data)) == {"engine.boiler", "wheels.spokes"}


def test_auto_uses_checkpoint_values() -> None:
    saved = {"engine": {"name": "steam", "pressure": 3.0, "boilers": 2, "oil": 0.5}}
    config = decode(DriveConfig, drive(engine={"name": "auto", "oil": 0.0}), checkpoint_config=saved)
    assert (config.engine.boilers, config.engine.pressure, config.engine.oil) == (2, 3.0, 0.0)


def test_auto_without_checkpoint_section_is_refused() -> None:
    problems = problems_of(drive(engine={"name": "auto"}), checkpoint_config={"wheels": {"name": "round"}})
    assert problems["engine"].message == "engine=auto: no engine is set by the checkpoint"
    assert problems_of(drive(engine={"name": "auto"}))["engine"].message.startswith(
        "engine=auto: no engine is set by the checkpoint"
    )


def test_override_that_contradicts_checkpoint_is_refused() -> None:
    saved = {"engine": {"name": "steam", "pressure": 3.0, "boilers": 2, "oil": 0.5}}
    problems = problems_of(drive(engine={"name": "steam", "pressure": 3.0, "boilers": 4}), checkpoint_config=saved)
    assert set(problems) == {"engine.boilers"}
    assert problems["engine.boilers"].message == "engine.boilers=4, but the checkpoint has engine.boilers=2"
    assert set(problems_of(drive(engine={"name": "auto", "boilers": 1}), checkpoint_config=saved)) == {"engine.boilers"}
    assert set(problems_of(drive(engine={"name": "diesel"}), checkpoint_config=saved)) == {"engine.name"}


def test_earlier_problems_suppress_dependent_errors() -> None:
    earlier = [Problem("checkpoint", "no such folder")]
    problems = problems_of(drive(engine={"name": "auto"}, seed=-1), earlier=earlier)
    assert set(problems) == {"checkpoint", "seed"}


@pytest.mark.parametrize("value", ["half \ud800", "\udcff", "a\0b"])
def test_text_that_cannot_be_encoded_is_refused(value: str) -> None:
    for data in (drive(road=value), drive(stops=["a", value])):
        (problem,) = problems_of(data).values()
        assert "cannot encode" in problem.message and problem.hint
    assert problems_of({**drive(), f"x{value}": 1})


def test_rules_receive_only_valid_values() -> None:
    def rules(command: type[Config], values: dict[str, Any]) -> Iterator[Problem]:
        if {"engine", "seed"} <= values.keys():
            assert isinstance(values["engine"], SteamConfig | DieselConfig)
            if values["seed"] == 7:
                yield Problem("seed", f"seed=7 and engine={values['engine'].name}")

    assert set(problems_of(drive(seed=7), rules=rules)) == {"seed"}
    assert set(problems_of(drive(seed=7, mode="x"), rules=rules)) == {"seed", "mode"}
    assert set(problems_of(drive(seed=7, engine={"name": "x"}), rules=rules)) == {"engine.name"}
    decode(DriveConfig, drive(), rules=rules)
