"""`lmtool plan` for local and other devices, overrides that make a run fit, and measured steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lmtool.cli import main as cli
from lmtool.costs import rate
from tests.commands.conftest import TINY

LARGE = ["plan", "pretrain", "model=gpt", "batch_tokens=131072", "max_length=1024"]


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(words) == 0
    return capsys.readouterr().out


def test_plan_for_other_device_uses_published_speed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed([*LARGE, "device=h200"], capsys)
    assert "bf16 on h200, as published" in out and "25% to 50% of the published 989 TFLOP/s in bf16" in out
    assert re.search(r"^time +\S.* to ", out, re.MULTILINE) and "yes: 141 GB available" in out
    assert "fp32 on t4" in printed([*LARGE, "device=t4"], capsys)  # the T4 has no bf16
    assert not Path("runs").exists()


def test_suggested_overrides_make_run_fit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan with each suggested override fits."""
    out = printed([*LARGE, "device=rtx4090"], capsys)
    assert "24 GB available" in out and re.search(r"^fits +no: ", out, re.MULTILINE)
    offers = re.findall(r"^would fit +([^:]*):", out, re.MULTILINE)
    assert len(offers) == 2 and offers[0].startswith("micro_batch_tokens=")
    for offer in offers:
        assert "yes: 24 GB" in printed([*LARGE, "device=rtx4090", *offer.split()], capsys)


def test_plan_suggests_gradient_checkpointing_if_needed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "pretrain", "model=gpt_xl", "batch_tokens=8192", "max_length=1024", "device=l4"]
    offers = re.findall(r"^would fit +([^:]*):", printed(words, capsys), re.MULTILINE)
    assert offers and "gradient_checkpointing=true" in offers[0]
    assert "no override that was tried" in printed(
        [*words[:2], "model=gpt_xl", "model.vocab_size=10000000", *words[3:]], capsys
    )


def test_suggested_overrides_respect_rules(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """parallel=fsdp supports one objective only, so it is not suggested for a mixture."""
    words = ["plan", "pretrain", "model=bert_large", "objective=mixture", "objective.members=[mlm,span]", "device=t4"]
    words += ["model.hidden_size=4096", "batch_tokens=512", "max_length=512"]
    out = printed(words, capsys)
    assert re.search(r"^fits +no: ", out, re.MULTILINE) and "fsdp" not in out
    assert "parallel=fsdp" in printed([*words[:3], *words[5:]], capsys)


def test_plan_for_cuda_without_cuda_suggests_device_name(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = printed([*LARGE, "device=cuda"], capsys)
    assert (
        "bf16 on cuda, not on this machine" in out and "set a published one: device=h100" in out and "fits" not in out
    )


def test_plan_divides_step_among_devices(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed([*LARGE, "device=h100", "devices=8"], capsys)
    assert ", 16,384 per device" in out and re.search(r"^memory .* per device", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "pretrain", "device=h1000"], "did you mean device=h100?"),
        (["plan", "pretrain", "measure=perhaps"], "allowed: true or false"),
        (["plan", "pretrain", "device=h100", "measure=true"], "steps can be measured only on a device of this machine"),
        (["plan", "pretrain", "device=h100", "device=a100"], "device is set twice"),
        (["pretrain", "device=h100"], "`lmtool plan` takes types too"),
        (["predict", "checkpoint=none", "device=t4"], "device=t4 is a type of device, not a device of this machine"),
    ],
)
def test_invalid_plan_is_refused(
    words: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err and not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ([], {"ends": "after 10,000 steps (max_steps)", "epochs": "13.7 over about 1.5 M tokens"}),
        (["experiment=bert_base"], {"tokens": "42.6 G", "epochs": "28,400 over about 1.5 M tokens"}),
        (
            ["data=text", "data.path=text.txt", "max_epochs=2", "max_tokens=100000"],
            {"steps": "9 of 2,048 tokens", "ends": "after 2 epochs (max_epochs) before max_tokens=100 k"},
        ),
    ],
)
def test_plan_estimates_epochs_from_bytes(
    words: list[str], rows: dict[str, str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "text.txt").write_text("y" * 4 * 9000)
    out = printed(["plan", "pretrain", "model=bert_tiny", *words], capsys)
    for name, text in rows.items():
        assert re.search(rf"^{name} +{re.escape(text)} *$", out, re.MULTILINE), out


def test_plan_estimates_lengths_of_rows_from_bytes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 40 bytes: 10 tokens, and 3 special ones.
    rows = "".join(f"{'word ' * 7}{number:5d}\t{number % 2}\n" for number in range(100))
    Path("short.tsv").write_text(f"text\tlabel\n{rows}")
    words = ["plan", "finetune", "task=short.tsv", "model=bert_tiny", "checkpoint=none", "max_epochs=3"]
    assert cli.main([*words, "max_length=64", "batch_examples=10"]) == 0
    printed = capsys.readouterr().out
    assert "90 training rows of about 13 tokens on average" in printed and "steps       27 of 130 tokens" in printed
    (memory,) = [line for line in printed.splitlines() if line.startswith("memory ")]
    # The memory is that of rows of max_length tokens.
    assert cli.main([*words, "max_length=13", "batch_examples=10"]) == 0
    assert memory not in capsys.readouterr().out


def test_plan_counts_shared_epoch_plan_per_machine(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """24 bytes per window of 128 tokens, for 36,000 tokens."""
    (place / "text.txt").write_text("y" * 4 * 36000)
    words = ["plan", "pretrain", "model=bert_tiny", "data=text", "data.path=text.txt", "max_length=128"]
    shared = "plan of an epoch about 6.75 kB per machine"
    assert shared in " ".join(printed([*words, "devices=2"], capsys).split())
    assert "plan of an epoch" not in printed(words, capsys)


def test_plan_needs_known_epoch_length(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "pretrain", "model=bert_tiny", "data=mixture", "data.members=[text,pydocs]", "max_epochs=2"]
    words += ["data.with.text.path=text.txt"]
    assert cli.main(words) == 2
    assert "max_epochs=2 cannot be planned" in capsys.readouterr().err
    out = printed([*words, "max_steps=50"], capsys)
    assert "after 50 steps (max_steps)" in out and "max_epochs=2 is ignored" in out and "\nepochs" not in out


def test_measured_plan_writes_no_run(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_rate(*_: object) -> float:
        return 1e9

    monkeypatch.setattr(rate, "measure_rate", no_rate)
    monkeypatch.setattr(rate, "measure_bandwidth", no_rate)
    before = sorted(Path(".").iterdir())
    text = ["data=text", "data.path=text.txt"]
    out = printed(["plan", "pretrain", *TINY, *text, "measure=true", "max_steps=1000"], capsys)
    assert "measured over 5 steps on cpu" in out and "measured: peak memory" in out and "text is not read" not in out
    assert [path for path in sorted(Path(".").iterdir()) if path not in before and path.name != "cache"] == []
