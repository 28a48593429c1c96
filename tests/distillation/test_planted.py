"""A circuit that is known: who learns what its teacher does under interventions, and who learns what it says alone."""

from __future__ import annotations

import pytest

from tests.distillation.planted import INTERCHANGE, SOFT, measured, planted, texts, trained

STEPS = 600


def test_the_planted_teacher_is_right():
    batch = texts(200, 3)
    (predicted,) = planted().predict(batch).predicted.values()
    assert predicted.best().tolist() == batch.targets["label"].labels.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_interventions_teach_the_circuit_and_soft_targets_do_not(seed):
    """The same steps, texts and initial weights; both students predict as their teacher does."""
    by_soft, by_interchange = (measured(trained(terms, STEPS, seed)) for terms in (SOFT, INTERCHANGE))
    assert by_soft["fidelity"]["value"] > 0.95 and by_interchange["fidelity"]["value"] > 0.95
    assert by_interchange["interchange_accuracy"]["value"] > 0.95
    assert by_interchange["interchange_accuracy"]["changed"]["value"] > 0.95
    assert by_soft["interchange_accuracy"]["value"] < 0.9
    assert by_soft["interchange_accuracy"]["changed"]["value"] < 0.5
