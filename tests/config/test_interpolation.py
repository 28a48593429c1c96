"""Interpolations are counted while they are resolved: exponential ones are refused at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lmtool.cli import main as cli
from lmtool.config import compose
from lmtool.errors import UserError

LEVELS = range(1, 41)
BOMBS = {
    "doubled": {"a0": "x", **{f"a{n}": f"${{a{n - 1}}}${{a{n - 1}}}" for n in LEVELS}},
    "relative": {"s": {"a0": "x", **{f"a{n}": f"${{.a{n - 1}}}/${{..s.a{n - 1}}}" for n in LEVELS}}},
    "lists": {"a0": ["x"] * 9, **{f"a{n}": [f"${{a{n - 1}}}"] * 9 for n in LEVELS}},
    "sections": {"a0": {"x": "y"}, **{f"a{n}": {"l": f"${{a{n - 1}}}", "r": f"${{a{n - 1}}}"} for n in LEVELS}},
    "resolver": {"a0": "x", **{f"a{n}": f"${{oc.select:a{n - 1}}}${{oc.select:'a{n - 1}'}}" for n in LEVELS}},
    "long text": {"a": "x" * 100_000, "b": "${a}" * 11},
}


def resolved(data: dict[str, Any]) -> dict[str, Any]:
    with compose.translated_errors():
        return compose.to_data(OmegaConf.create(data))


@pytest.mark.parametrize("name", BOMBS)
def test_exponential_interpolations_are_refused(name: str) -> None:
    begun = time.process_time()
    with pytest.raises(UserError, match="interpolations of this configuration expand to more than") as caught:
        resolved(BOMBS[name])
    assert time.process_time() - begun < 10 and caught.value.hint


def test_ordinary_interpolations_are_accepted() -> None:
    paths = {"sst2": "/data/sst2", "cola": "/data/cola"}
    task = {"name": "sst2", "path": "${paths.${task.name}}", "again": "${.path}/${..seed}"}
    data = resolved({"paths": paths, "task": task, "seed": 1, "here": "${oc.env:HOME}", "all": "${task.path}" * 50})
    assert data["task"]["again"] == "/data/sst2/1" and data["all"] == "/data/sst2" * 50
    assert resolved({"a0": "x"} | {f"a{n}": f"${{a{n - 1}}}" for n in range(1, 30)})["a29"] == "x"
    with pytest.raises(UserError):
        resolved({"a": "${b}", "b": "${a}"})
    config = OmegaConf.create({"a": 1, "b": "${a}"})
    assert {config.b for _ in range(2 * compose.MAX_REFERENCES)} == {1}  # what others resolve is not counted


@pytest.mark.parametrize("words", [[], ["-m", "seed=1,2"]])
def test_exponential_interpolation_in_config_dir_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    lines = "".join(f"a{n}: {value}\n" for n, value in enumerate(BOMBS["doubled"].values()))
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{lines}")
    cli.main(["pretrain", "--cfg", "job", "seed=no"])
    begun = time.process_time()
    typed = [
        "pretrain",
        "--config-dir",
        str(tmp_path),
        "model=bert_tiny",
        "experiment=mine",
        "data=text",
        "data.path=x",
    ]
    assert cli.main([*typed, *words]) == 2
    assert time.process_time() - begun < 10
    assert "interpolations of this configuration expand" in capsys.readouterr().err
