"""The screens of `lmtool evaluate`, from plain data."""

from __future__ import annotations

import io

import pytest

from lmtool.reporting.console import Output
from lmtool.reporting.evaluations import print_evaluation


@pytest.mark.parametrize(("prediction", "shown"), [("", "(empty)"), ([], "(empty)"), (["a", "b"], "a b"), ("a", "a")])
def test_an_empty_prediction_is_not_mistaken_for_the_text_after_it(prediction: object, shown: str) -> None:
    row = {"id": 0, "source": "the text", "gold": "c", "prediction": prediction, "loss": 2.5}
    evaluation = {"n": 1, "loss": 2.5, "metrics": {}, "hardest": [row], "warnings": []}
    stream = io.StringIO()
    print_evaluation(Output(stream), "run", "dev", evaluation, {"name": "empty text", "metrics": {}})
    assert f"loss 2.500  gold c  predicted {shown}  the text" in stream.getvalue()
