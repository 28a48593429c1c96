"""A teacher with a known circuit: interchange interventions transfer the circuit, soft targets only its predictions."""

from __future__ import annotations

import pytest

from tests.distillation.planted import INTERCHANGE, SOFT, measure_agreement, planted_teacher, texts, train_student

STEPS = 600


def test_planted_teacher_predicts_the_labels():
    batch = texts(200, 3)
    (predicted,) = planted_teacher().predict(batch).predicted.values()
    assert predicted.best().tolist() == batch.targets["label"].labels.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_interchange_transfers_circuit_and_soft_targets_do_not(seed):
    """Both students have the same steps, texts and initial weights, and both predict like their teacher."""
    by_soft, by_interchange = (measure_agreement(train_student(terms, STEPS, seed)) for terms in (SOFT, INTERCHANGE))
    assert by_soft["fidelity"]["value"] > 0.95 and by_interchange["fidelity"]["value"] > 0.95
    assert by_interchange["interchange_accuracy"]["value"] > 0.95
    assert by_interchange["interchange_accuracy"]["changed"]["value"] > 0.95
    assert by_soft["interchange_accuracy"]["value"] < 0.9
    assert by_soft["interchange_accuracy"]["changed"]["value"] < 0.5
