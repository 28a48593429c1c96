"""The screens of `lmtool evaluate`, from plain data."""

from __future__ import annotations

import io

import pytest

from lmtool.reporting.console import Output
from lmtool.reporting.evaluations import print_evaluation, print_probes
from lmtool.reporting.run_files import Accuracy, CheckpointProbes, LayerProbes


@pytest.mark.parametrize(("prediction", "shown"), [("", "(empty)"), ([], "(empty)"), (["a", "b"], "a b"), ("a", "a")])
def test_empty_prediction_is_shown_as_empty(prediction: object, shown: str) -> None:
    row = {"id": 0, "source": "the text", "gold": "c", "prediction": prediction, "loss": 2.5}
    evaluation = {"n": 1, "loss": 2.5, "metrics": {}, "hardest": [row], "warnings": []}
    stream = io.StringIO()
    print_evaluation(Output(stream), "run", "dev", evaluation, {"name": "empty text", "metrics": {}})
    assert f"loss 2.500  gold c  predicted {shown}  the text" in stream.getvalue()


def test_probe_with_perfect_accuracy_has_no_error() -> None:
    def accuracy(value: float, error: float) -> Accuracy:
        return {"accuracy": value, "standard_error": error}

    layers = [LayerProbes(layer=0, trained=accuracy(1.0, 0.0), random=accuracy(0.5, 0.25))]
    probes = CheckpointProbes(
        checkpoint="run", model="bert", layers=layers, majority=accuracy(0.25, 0.1), classes=2, examples=8, n=4
    )
    stream = io.StringIO()
    print_probes(Output(stream), "next", probes)
    row = next(line for line in stream.getvalue().splitlines() if line.startswith("0 (embedding)"))
    assert row.split() == ["0", "(embedding)", "1.0000", "0.5000", "±", "0.2500"]
