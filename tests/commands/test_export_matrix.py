"""Every family with every kind of run: the export equals the run in transformers, or is refused in one line before
anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import lmtool
from lmtool.cli import main as cli
from tests.breadth import slow_but
from tests.commands.conftest import CONF, pretrain, tiny
from tests.commands.test_mixture import write_tasks
from tests.weights.test_transformers_classes import largest_difference, outputs_of

FAMILIES = sorted(path.stem.removesuffix("_tiny") for path in (CONF / "model").glob("*_tiny.yaml"))
KINDS = {
    "classification": ["task=classification", "task.text=[first,second]"],
    "paired": ["task=classification", "task.text=[first,second]", "task.head=transformers"],
    "regression": ["task=regression", "task.text=[first]", "task.label=value", "task.head=transformers"],
    "multi_label": ["task=multi_label", "task.text=[first]", "task.label=several", "task.head=transformers"],
    "tags": ["task=token_classification"],
    "questions": ["task=extractive_qa", "task.text=[second,first]", "task.stride=2", "task.question_tokens=8"],
    "spans": ["task=span_classification", "task.text=[first,span]"],
    "choices": [
        "task=multiple_choice", "task.text=[first,second,other]", "task.label=choice", "task.head=transformers",
    ],
    "mixture": ["task=mixture", "task.with.sst2.path=rows"],
    "generation": ["task=seq2seq", "task.text=[first]", "task.label=second", "task.target_tokens=8"],
    "pretraining": [],
}  # fmt: skip
QUICK = {
    ("llama_encoder", "classification"), ("llama_encoder", "tags"), ("bert", "spans"), ("electra", "mixture"),
    ("bigbird", "paired"), ("xlnet", "paired"),
}  # fmt: skip
CANNOT_LEARN = (
    "task=seq2seq trains a decoder or an encoder-decoder", "transformers has no text classifier for model=",
    "has no hidden state for each token",
)  # fmt: skip
TEXTS = ["The lovely cat saw the dark dog near the ship.", "A sad king."]


def write_inputs() -> str:
    """Writes rows for all kinds into two files, and returns the members of a mixture."""
    members = write_tasks()
    Path("all").mkdir()
    for split, count in (("train", 24), ("dev", 8)):
        rows = []
        for number, line in enumerate(Path(f"rows/{split}.tsv").read_text().splitlines()[1 : count + 1]):
            text, label = line.split("\t")
            start, subject = len("The "), text.split()[1]
            row = {"first": text, "second": "Who saw it?", "other": "It was.", "label": ["no", "yes"][int(label)]}
            row |= {"value": float(label), "several": "a,b" if number % 2 else "c", "choice": int(label)}
            row |= {"span": [start, start + len(subject)], "id": f"{split}{number}"}
            row |= {"answers": {"text": [subject], "answer_start": [start]}}
            rows.append(row | {"tokens": text.split(), "tags": ["O", "B-X"] + ["O"] * (len(text.split()) - 2)})
        Path(f"all/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return members


def train(family: str, kind: str, capsys: pytest.CaptureFixture[str], *start: str) -> None:
    """Trains runs/run for two steps; skips a kind that the family cannot learn. start: a model, or a checkpoint."""
    members, model = write_inputs(), f"{family}_tiny"
    # The feed-forward layer of GPT in transformers always has four times the hidden size.
    sizes = [word.replace("feedforward_size=64", "feedforward_size=128") for word in tiny(model)]
    sizes += ["model.random_plan=transformers"] if family == "bigbird" else []  # a published form of blocks
    if kind == "pretraining":
        pretrain("run", *sizes, "max_steps=2", model=model)
        return
    start = start or (f"model={model}", *sizes, "checkpoint=none")
    words = ["finetune", *start, "cache_dir=cache", "name=run", "max_steps=2", "batch_examples=8"]
    where = f"task.members={members}" if kind == "mixture" else "task.path=all"
    capsys.readouterr()
    status, error = cli.main([*words, where, *KINDS[kind]]), capsys.readouterr().err
    if status:
        assert status == 2 and any(reason in error for reason in CANNOT_LEARN), error
        pytest.skip(error)


def load_exported(name: str, folder: str) -> nn.Module:
    """The exported folder loaded with a class of transformers."""
    model, report = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    missing = report["missing_keys"]
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    # A model without a head has a pooler, which the run may lack; the screen reports this.
    assert not missing or (name.endswith("Model") and all(key.startswith("pooler.") for key in missing))
    return model


def require_equal(model: nn.Module, folder: str) -> None:
    """Checks that a padded batch of the folder's AutoTokenizer gives the run's logits or hidden states."""
    rows = dict(transformers.AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt"))
    loaded = lmtool.load("runs/run")
    if loaded.config.architecture == "encoder_decoder" and loaded.model.parts.task is None:
        rows["decoder_input_ids"] = rows["input_ids"][:, :3]
    with torch.no_grad():
        assert largest_difference(loaded.model(**rows), outputs_of(model.eval(), rows), rows) < 1e-5


@pytest.mark.parametrize(("family", "kind"), slow_but(QUICK, [(family, kind) for family in FAMILIES for kind in KINDS]))
def test_exported_run_equals_transformers_or_is_refused(
    family: str, kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(family, kind, capsys)
    capsys.readouterr()
    status = cli.main(["export", "checkpoint=runs/run", "output=out"])
    shown = capsys.readouterr().err.splitlines()
    if status == 0:
        (name,) = json.loads(Path("out/config.json").read_text())["architectures"]
        require_equal(load_exported(name, "out"), "out")
        return
    assert status == 2 and [line.partition(":")[0] for line in shown] == ["error", "hint"], shown
    assert not Path("out").exists() and not list(Path().glob(".tmp-*"))
    assert f"model={family}" in shown[0]


def test_span_classifier_loads_predicts_and_inspects(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("bert", "spans", capsys)
    loaded = lmtool.load("runs/run")
    assert not loaded.report.dropped and not loaded.report.new
    (record,) = loaded.predict({"first": ["The cat saw it."], "span": [[4, 7]]})
    assert record["prediction"] in ("no", "yes")
    output = loaded.model(**loaded.tokenizer(TEXTS))
    assert output.logits is None and output.hidden.shape[0] == 2, "logits need the spans"
    assert cli.main(["inspect", "attention", "checkpoint=runs/run", "text=The cat saw it.", "device=cpu"]) == 0


@pytest.mark.parametrize(("kind", "name"), [("mixture", "ElectraModel"), ("choices", "ElectraForMultipleChoice")])
def test_exported_adapter_opens_with_peft(
    kind: str, name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    pretrain("base", "objective=mlm", "max_steps=2", "model.initializer_std=0.1", model="electra_tiny")
    assert cli.main(["export", "checkpoint=runs/base", "output=base"]) == 0
    tuning = ["tuning=lora", "optimizer.lr=0.05", "max_length=32", "device=cpu", "precision=fp32"]
    train("electra", kind, capsys, "checkpoint=base", *tuning)
    assert cli.main(["export", "checkpoint=runs/run", "output=out", "format=peft"]) == 0
    assert f"for PEFT on {name}" in capsys.readouterr().out
    base = getattr(transformers, name).from_pretrained("base")
    require_equal(peft.PeftModel.from_pretrained(base, "out").get_base_model(), "out")
