"""Prompt-based finetuning through the commands: few-shot rows, exact resume, evaluation, prediction and export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import lmtool
from lmtool.cli import main as cli
from tests.commands.conftest import finetune, pretrain, working_in

PROMPT = (
    "task.head=prompt", "task.prompt.template='{sentence} The {label} house.'",
    "task.prompt.words={negative: awful, positive: lovely}", "task.shots_per_class=4", "checkpoint=runs/base",
    "seed=13", "max_steps=4", "checkpoint_every=2", "batch_examples=4",
)  # fmt: skip
LAST = Path("checkpoints") / "step_00000004"
METHODS = {
    "pet": ("task.auxiliary_mlm=0.1",),
    "lm_bff": ("task.demonstrations=3", "max_length=64"),
    "lora": ("tuning=lora", "task.demonstrations=2", "max_length=64", "task.auxiliary_mlm=0.1"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with labeled rows and a masked language model."""
    place = tmp_path_factory.mktemp("prompted")
    with working_in(place):
        pretrain("base", "max_steps=2", "max_length=64", "batch_tokens=512")
    return place


@pytest.mark.parametrize("way", METHODS)
def test_prompted_run_resumes_and_evaluates_identically(base, monkeypatch, way):
    monkeypatch.chdir(base)
    run, cut = finetune(way, *PROMPT, *METHODS[way]), Path("runs") / f"{way}_cut"
    shutil.copytree(run, cut)
    shutil.rmtree(cut / LAST)
    (cut / "result.json").unlink()
    finetune(cut.name, *PROMPT, *METHODS[way])
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (cut / LAST / name).read_bytes() == (run / LAST / name).read_bytes()
    result = json.loads((run / "result.json").read_text())
    assert result["few_shot"] == json.loads((cut / "result.json").read_text())["few_shot"]
    assert result["validation_examples"] == 8 and result["tests"]["full_dev"]["examples"] == 40
    common = [f"checkpoint={run}", "device=cpu", "precision=fp32"]
    assert cli.main(["evaluate", *common, f"output={way}.jsonl"]) == 0
    assert Path(f"{way}.jsonl").read_text() == (run / "predictions.jsonl").read_text()
    rows = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    assert cli.main(["predict", *common, f"text={rows[5]['sentence']}", f"output={way}_alone.jsonl"]) == 0
    (alone,) = map(json.loads, Path(f"{way}_alone.jsonl").read_text().splitlines())
    assert alone["prediction"] == rows[5]["prediction"] and alone["score"] == pytest.approx(rows[5]["score"], abs=1e-5)
    # Other rows of the task use the prompt too.
    assert cli.main(["evaluate", *common, "task=sst2", "task.path=rows", f"output={way}_dev.jsonl"]) == 0
    assert len(Path(f"{way}_dev.jsonl").read_text().splitlines()) == 40


def test_zero_shot_prompts_use_masked_language_model(base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    common = ["evaluate", "checkpoint=runs/base", "task=sst2", "task.path=rows", "cache_dir=cache", "device=cpu"]
    words = [word for word in PROMPT if word.startswith("task.prompt")]
    assert cli.main([*common, *words, "shots=0", "precision=fp32", "output=zero.jsonl"]) == 0
    assert "sst2 from prompts alone · dev · n = 40" in capsys.readouterr().out
    loaded, rows = lmtool.load("runs/base"), [json.loads(line) for line in Path("zero.jsonl").read_text().splitlines()]
    mask, tokens = loaded.tokenizer.roles["mask"], loaded.tokenizer(f"{rows[3]['sentence']} The [MASK] house.")
    logits = loaded.model(**tokens).logits[0, int((tokens["input_ids"][0] == mask).nonzero())]
    words = [loaded.tokenizer.encode(word)[0] for word in ("awful", "lovely")]
    fractions = logits[words].softmax(-1).tolist()
    assert list(rows[3]["probabilities"].values()) == pytest.approx(fractions, abs=1e-5)
    assert cli.main([*common, "shots=2"]) == 2
    assert "set shots=0 (classification tasks only)" in capsys.readouterr().err
    assert cli.main([*common, "shots=0", "normalisation=calibrated"]) == 2
    assert "normalisation=calibrated is supported for generative models only" in capsys.readouterr().err


def test_few_shot_rows_depend_only_on_seed(base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    few = ("task.shots_per_class=4", "max_steps=1", "checkpoint=runs/base", "max_length=64")
    drawn = {
        name: json.loads((finetune(name, *few, *more) / "result.json").read_text())["few_shot"]
        for name, more in {"first": ("seed=13",), "prompted": PROMPT[:3] + ("seed=13",), "other": ("seed=21",)}.items()
    }
    assert drawn["first"] == drawn["prompted"] and len(drawn["first"]["train_sha256"]) == 64
    assert drawn["first"]["train_sha256"] != drawn["other"]["train_sha256"]
    assert "4 rows of each class, and 4 for selection, seed 13" in capsys.readouterr().out


def test_prompted_run_is_exported_as_masked_language_model(base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    run = finetune("exported", *PROMPT)
    assert cli.main(["export", f"checkpoint={run}", "output=folder"]) == 0
    assert json.loads(Path("folder/config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    inspected = ["inspect", "finetune", "task=sst2", "task.path=rows", *PROMPT[:5], "cache_dir=cache", "n=1"]
    capsys.readouterr()
    assert cli.main(inspected) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the [MASK] house . [SEP]" in shown and "positive: lovely" in shown or "negative: awful" in shown
    unfit = [word for word in PROMPT if "words" not in word]
    finetune("refused", *unfit, "task.prompt.words={negative: unheard-of, positive: lovely}", status=2)
    refused = capsys.readouterr().err
    assert "'unheard-of', for negative, has" in refused and len(refused.strip().splitlines()) == 2
    finetune("blank", *[word for word in PROMPT if "checkpoint=" not in word], "model=bert_tiny", "checkpoint=none")
    assert "heads.masked_lm is new and predicts random words" in capsys.readouterr().out
