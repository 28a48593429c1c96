"""The screens of `lmtool evaluate`, from plain data."""

from __future__ import annotations

import io

import pytest

from lmtool.reporting.console import Output
from lmtool.reporting.evaluations import print_evaluation, print_probes, print_text_scores
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


def test_scores_of_a_text_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    metrics: dict[str, float] = {"loss": 6.668, "standard_error": 0.0169, "word_perplexity": 2873377.1409}
    metrics |= {"clm_loss": 6.668, "clm_standard_error": 0.0169, "clm_accuracy": 0.04769, "clm_count": 17715}
    print_text_scores(Output(), "runs/gpt", metrics)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows == ["loss 6.6680 ± 0.0169", "word_perplexity 2.87 M", "clm_accuracy 0.0477", "clm_count 17,715"]
    several = {"loss": 7.0, "standard_error": 0.1, "mlm_loss": 6.3, "mlm_standard_error": 0.08, "nsp_loss": 0.7}
    print_text_scores(Output(), "runs/bert", several)
    assert "mlm_loss  6.3000 ± 0.0800" in capsys.readouterr().out
