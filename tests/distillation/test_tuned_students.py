"""Distillation together with tuning methods: the contents of a checkpoint, and the commands that read it."""

from __future__ import annotations

import json

import pytest

from lmtool.cli import main as cli
from tests.breadth import slow_but
from tests.commands.conftest import finetune, pretrain, working_in
from tests.distillation.runs import STEPS, assert_same, interrupt, saved, weights

LORA = ["checkpoint=runs/base", "tuning=lora", "tuning.dropout=0.1"]


def tuned(name, *more, status=0):
    return finetune(name, *LORA, *STEPS, *more, status=status)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tuned")
    with working_in(place):
        pretrain("base", "model.num_layers=2", "max_steps=2")
        finetune("teacher", "checkpoint=runs/base", *STEPS)
        yield place


MODES = {
    "terms": ["distill=standard", "distill.teacher=runs/teacher", "distill.terms.soft.weight=1",
              "distill.terms.states.weight=1"],
    "peers": ["distill=codistillation", "distill.refresh_steps=2"],
    "exits": ["distill=self"],
}  # fmt: skip


@pytest.mark.parametrize("mode", slow_but({"terms"}, MODES))
def test_tuned_student_resumes_bitwise_and_omits_base_weights(folder, monkeypatch, mode, capsys):
    run = tuned(mode, *MODES[mode])
    interrupt(monkeypatch, lambda status: tuned(f"{mode}-cut", *MODES[mode], status=status))
    assert_same(saved(run), saved(tuned(f"{mode}-cut", *MODES[mode])))
    last = run / "checkpoints" / (run / "checkpoints/last").read_text().strip()
    base = json.loads((last / "base.json").read_text())
    assert base["parts"] == ["backbone", "heads.pooler"]
    own = {name for name in weights(run) if name.startswith("backbone.")}
    assert own and all("lora_" in name for name in own)
    beside = {name.split(".")[1] for name in weights(run) if name.startswith(("distill.", "heads.exit_"))}
    assert beside == {"terms": set(), "peers": {"peer_1", "copies"}, "exits": {"exit_1"}}[mode]
    assert cli.main(["evaluate", f"checkpoint={run}"]) == 0
    capsys.readouterr()
    if mode == "exits":
        assert cli.main(["predict", f"checkpoint={run}", "text=a cat", "exit=1"]) == 0
    assert cli.main(["export", f"checkpoint={run}", f"output=exported-{mode}"]) == 0
    shown = capsys.readouterr().out
    assert ("heads.exit_1" in shown) == (mode == "exits")
