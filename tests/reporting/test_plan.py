from __future__ import annotations

import pytest

from lmtool.reporting.plan import ModelShape, flops_per_token, parameter_counts, plan, plan_rows

BERT = ModelShape(12, 768, 3072, 12, 30522, "encoder", max_positions=512, segments=2)
BERT_LARGE = ModelShape(24, 1024, 4096, 16, 30522, "encoder", max_positions=512, segments=2)
GPT2 = ModelShape(12, 768, 3072, 12, 50257, "decoder", max_positions=1024)
GPT2_MEDIUM = ModelShape(24, 1024, 4096, 16, 50257, "decoder", max_positions=1024)


@pytest.mark.parametrize(
    ("shape", "length", "fraction", "gigaflops"),
    [
        (BERT, 128, 0.15, 0.545),
        (BERT, 128, 1.0, 0.668),
        (BERT, 512, 0.15, 0.588),
        (BERT, 384, 0.0, 0.552),
        (BERT_LARGE, 512, 0.15, 1.99),
        (GPT2, 1024, 1.0, 0.798),
        (GPT2_MEDIUM, 1024, 1.0, 2.27),
    ],
)
def test_training_flops_of_a_token(shape, length, fraction, gigaflops):
    assert flops_per_token(shape, length, fraction) / 1e9 == pytest.approx(gigaflops, rel=3e-3)


def test_a_frozen_body_only_runs_forward():
    assert flops_per_token(BERT, 128, 0.0, body_trains=False) * 3 == flops_per_token(BERT, 128, 0.0)


def test_published_parameter_counts():
    assert sum(parameter_counts(BERT, outputs=2).values()) == 109_483_778
    assert sum(parameter_counts(BERT, masked_lm_head=True).values()) == 109_514_298
    assert sum(parameter_counts(GPT2).values()) == 124_439_808


def test_plan_adds_up():
    one = plan(BERT, steps=1000, tokens_per_step=4096, length=128, predicted_fraction=0.15, flops_per_second=1e12)
    assert one.tokens == 4_096_000
    assert one.flops == pytest.approx(4_096_000 * 0.5454e9, rel=1e-3)
    assert one.seconds == pytest.approx(one.flops / 1e12)
    assert one.memory_bytes["weights and optimizer"] == 16 * one.total_parameters
    assert one.disk_bytes == 12 * one.total_parameters
    assert dict(plan_rows(one))["time"].startswith("about 37 min")


def test_micro_batches_halves_and_frozen_parts_take_less_memory():
    sizes = {"steps": 10, "tokens_per_step": 4096, "length": 128, "predicted_fraction": 0.15}
    whole = plan(BERT, **sizes).memory_bytes["activations"]
    assert plan(BERT, **sizes, micro_batch_tokens=1024).memory_bytes["activations"] == pytest.approx(whole / 4)
    assert plan(BERT, **sizes, half=True).memory_bytes["activations"] < whole
    frozen = plan(BERT, **sizes, body_trains=False, trainable_parameters=1000)
    assert frozen.memory_bytes["activations"] == 0
    assert frozen.memory_bytes["weights and optimizer"] == 16 * 1000 + 4 * (frozen.total_parameters - 1000)


def test_without_a_rate_the_time_is_unknown():
    one = plan(GPT2, steps=1, tokens_per_step=1024, length=1024, predicted_fraction=1.0, parameters={"all": 7})
    assert one.seconds is None and one.total_parameters == 7
    assert dict(plan_rows(one))["time"] == "unknown: no rate was measured"


def test_an_architecture_the_plan_does_not_know():
    with pytest.raises(ValueError, match="decoder and encoder_decoder"):
        ModelShape(1, 8, 32, 1, 10, "both")  # type: ignore[arg-type]


def test_measured_rate_is_a_rate():
    from lmtool.reporting.rate import measure_rate

    assert 1e7 < measure_rate(32, 64, "bf16", "cpu", seconds=0.02) < 1e15
