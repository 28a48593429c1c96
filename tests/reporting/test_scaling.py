"""`report SWEEP fit=scaling` on planted sweeps: the law, the best sizes, predictions, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lmtool.commands import report
from lmtool.errors import UserError


def loss(n: float, d: float) -> float:
    return 1.69 + 406.4 / n**0.34 + 410.7 / d**0.28


def write_run(folder: Path, n: float, d: float, budget: float | None = None, **changed: object) -> None:
    """A finished run with N parameters, of which a tenth are embeddings."""
    folder.mkdir(parents=True)
    result = {
        "objective": "clm", "metric": "loss", "value": loss(n, d), "parameters": round(n), "tokens": round(d),
        "ended": "max_steps" if budget is None else "max_flops",
    } | changed  # fmt: skip
    embeddings = round(n / 10)
    blocks = {"embeddings": embeddings, "attention": round(n) - embeddings}
    vocabulary = changed.get("vocabulary", 2000)
    facts = {"data": {"fingerprint": "a"}, "model": {"blocks": blocks, "vocabulary": vocabulary}}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "facts.json").write_text(json.dumps(facts))
    (folder / "config.yaml").write_text(f"max_flops: {budget if budget is not None else 'null'}\n")
    number = int(folder.name) if folder.name.isdecimal() else 0
    record = {"job": number, "exit_status": 0, "overrides": [f"seed={number}"], "value": result["value"]}
    if number:
        (folder / "job.json").write_text(json.dumps(record | {"metric": "loss"}))


SIZES, BUDGETS = np.geomspace(3e7, 3e10, 7), (1e19, 1e20, 1e21)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    number = 0
    for budget in BUDGETS:
        for n in SIZES:
            number += 1
            write_run(tmp_path / "sweep" / str(number), n, budget / 6 / n, budget)
    return tmp_path / "sweep"


def test_law_and_best_sizes_of_a_planted_sweep(sweep: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(sweep.parent / "larger", 7e10, 1.4e12)
    assert report.main([str(sweep), "fit=scaling", f"predict={sweep.parent / 'larger'}"]) == 0
    said = capsys.readouterr().out
    details = json.loads((sweep / "scaling.json").read_text())
    law = details["laws"]["with embeddings"]
    planted = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
    assert {name: constant["value"] for name, constant in law.items()} == pytest.approx(planted, rel=0.02)
    # N without embeddings is 0.9 N: A becomes A * 0.9^alpha, and no other constant changes.
    other = details["laws"]["without embeddings"]
    assert other["A"]["value"] == pytest.approx(406.4 * 0.9**0.34, rel=0.02)
    for found in details["budgets"]["with embeddings"]:
        # The minimum of the law under 6 N D = C (Hoffmann et al. 2022, equation 4), a parabola is near it.
        factor = (0.34 * 406.4 / (0.28 * 410.7)) ** (1 / 0.62)
        assert found["best"]["parameters"] == pytest.approx(factor * (found["flops"] / 6) ** (0.28 / 0.62), rel=0.5)
    first, second = details["predictions"]
    assert first["loss"] == pytest.approx(loss(7e10, 1.4e12), rel=1e-3) and first["actual"] == loss(7e10, 1.4e12)
    assert second["way"] == "without embeddings" and "the run has" in said and "to the power" in said
    assert (sweep / "plots" / "scaling.png").stat().st_size > 5000
    assert report.main([str(sweep), "fit=scaling", "predict=7e10,1.4e12"]) == 0
    assert "the run has" not in capsys.readouterr().out
    assert len(json.loads((sweep / "scaling.json").read_text())["predictions"]) == 1


def test_budget_without_an_interior_minimum_has_no_best_size(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for number, n in enumerate(SIZES[3:], 1):
        for place, budget in enumerate((1e18, 1e19)):
            write_run(tmp_path / str(10 * place + number), n, budget / 6 / n, budget)
    for number in (50, 51):
        write_run(tmp_path / str(number), 1e8, 1e9 * number)
    assert report.main([str(tmp_path), "fit=scaling"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the loss has no minimum between the smallest and the largest model" in said
    assert "2 runs did not end with max_flops" in said and "to the power" not in said


@pytest.mark.parametrize(
    ("changed", "words", "message"),
    [
        ({"vocabulary": 900}, ["fit=scaling"], "has another vocabulary than the other runs"),
        ({"objective": "mlm"}, ["fit=scaling"], "has another objective"),
        ({"parameters": None}, ["fit=scaling"], "has no finite parameters, tokens and loss"),
        ({"metric": "accuracy"}, ["fit=scaling"], "has no loss of a language model"),
        ({}, ["fit=law"], "a scaling law is fitted to the folder of one sweep"),
        ({}, ["fit=scaling", "predict=1e6,many"], "is not PARAMETERS,TOKENS"),
        ({}, ["predict=1e6,1e7"], "a scaling law is fitted to the folder of one sweep"),
    ],
)
def test_runs_off_the_curve_are_refused(
    sweep: Path, changed: dict[str, object], words: list[str], message: str
) -> None:
    write_run(sweep / "90", 1e8, 1e10, **changed)
    with pytest.raises(UserError, match=message):
        report.main([str(sweep), *words])


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(1e7, 1e9), (2e7, 1e9), (4e7, 2e9), (8e7, 3e9), (1e8, 4e9)], "5 finished runs to fit, but the law has 5"),
        ([(1e7, 1e9 * number) for number in range(1, 8)], "has 1 model sizes, and the law needs at least 3"),
        ([(1e7 * number, 1e9) for number in range(1, 8)], "has 1 numbers of tokens"),
    ],
)
def test_too_few_points_are_refused(tmp_path: Path, points: list[tuple[float, float]], message: str) -> None:
    for number, (n, d) in enumerate(points, 1):
        write_run(tmp_path / str(number), n, d)
    with pytest.raises(UserError, match=message):
        report.main([str(tmp_path), "fit=scaling"])
