"""`task=mixture`: several task kinds in one run, scored and used separately; invalid mixtures are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lmtool.cli import main as cli
from tests.commands.conftest import BAD, GOOD, KEEP, TINY

SMALL = [*TINY, KEEP, "cache_dir=cache", "checkpoint=none"]
QUICK = ["model.initializer_std=0.1", "optimizer.lr=0.003", "batch_examples=16", "evaluate_every=50"]


def write_tasks() -> str:
    """Writes values and tags for the texts of rows/, and returns the members of a mixture."""
    for split, count in (("train", 48), ("dev", 20)):
        lines = Path(f"rows/{split}.tsv").read_text().splitlines()[1 : count + 1]
        texts, labels = zip(*(line.split("\t") for line in lines), strict=True)
        for folder in ("values", "tags"):
            Path(folder).mkdir(exist_ok=True)
        values = [f"{text}\t{int(label)}.0" for text, label in zip(texts, labels, strict=True)]
        Path(f"values/{split}.tsv").write_text("\n".join(["text\tlabel", *values]) + "\n")
        words = [text.removesuffix(".").split() for text in texts]
        tagged = [
            {"tokens": row, "tags": ["B-WORD" if word in GOOD + BAD else "O" for word in row]} for row in words[::2]
        ]
        Path(f"tags/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tagged))
    return "[sst2,{kind: regression, name: value, path: values},{name: wnut17, path: tags}]"


def mixture(name: str, *more: str, model: str = "bert_tiny", status: int = 0) -> Path:
    words = ["finetune", "task=mixture", f"task.members={write_tasks()}", "task.with.sst2.path=rows"]
    assert cli.main([*words, f"model={model}", *SMALL, f"name={name}", *more]) == status
    return Path("runs") / name


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_mixture_trains_scores_and_predicts_three_kinds(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = mixture("run", "task.sampling=uniform", "max_epochs=8", "log_every=1", *QUICK)
    result, rows = json.loads((run / "result.json").read_text()), rows_of(run / "metrics.jsonl")
    learned = [row for row in rows if row["split"] == "train"]
    for member in ("sst2", "value", "wnut17"):
        losses = [row[f"loss_{member}"] for row in learned if f"loss_{member}" in row]
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), member
    metrics, read = result["metrics"], result["mixture"]
    assert result["metric"] == "average" and result["task"] == "mixture"
    three = [metrics["sst2_accuracy"], metrics["value_pearson"], metrics["wnut17_f1"]]
    assert result["value"] == pytest.approx(sum(three) / 3)
    assert {"sst2_loss", "value_loss", "wnut17_loss", "value_mse"} <= metrics.keys()
    # Uniform sampling from 96, 48 and 24 rows: 56 of each per epoch.
    assert {name: own["examples"] for name, own in read.items()} == dict.fromkeys(read, 8 * 56)
    assert [own["planned"] for own in read.values()] == pytest.approx([1 / 3] * 3)
    metadata = json.loads((run / "facts.json").read_text())
    assert metadata["data"]["train"]["sst2_in_an_epoch"] == 56
    assert {name: own["metric"] for name, own in metadata["baseline"]["members"].items()} == {
        "sst2": "accuracy", "value": "pearson", "wnut17": "f1"
    }  # fmt: skip
    predicted = rows_of(run / "predictions.jsonl")
    assert [sum(row["task"] == name for row in predicted) for name in read] == [40, 20, 10]

    capsys.readouterr()
    use = ["checkpoint=runs/run", "device=cpu"]
    assert cli.main(["evaluate", *use, "cache_dir=cache", "output=all.jsonl"]) == 0
    assert f"dev: average {result['value']:.4f} of sst2, value, wnut17" in capsys.readouterr().out
    assert rows_of(Path("all.jsonl")) == predicted
    assert cli.main(["evaluate", *use, "cache_dir=cache", "task=sst2", "task.path=rows", "output=sst2.jsonl"]) == 0
    mine = [{**row, "task": "sst2"} for row in rows_of(Path("sst2.jsonl"))]
    assert mine == [row for row in predicted if row["task"] == "sst2"]
    assert cli.main(["predict", *use, "task=sst2", "input=rows/dev.tsv", "output=out.jsonl", "precision=fp32"]) == 0
    predictions = [row["prediction"] for row in rows_of(Path("out.jsonl"))]
    assert predictions == [row["prediction"] for row in mine]
    for words, message in ((["text=a"], "was trained for 3 tasks"), (["text=a", "task=stt2"], "no head for task=stt2")):
        assert cli.main(["predict", *use, *words]) == 2
        shown = capsys.readouterr().err
        assert message in shown and "task=sst2" in shown

    # A single task starts from its head in the mixture.
    single = ["finetune", "task=sst2", "task.path=rows", "checkpoint=runs/run", "cache_dir=cache", "device=cpu"]
    assert cli.main([*single, "max_steps=1", "name=single"]) == 0
    assert (
        "heads.sst2" in json.loads((Path("runs/single") / "facts.json").read_text())["model"]["weights"].split(";")[0]
    )


@pytest.mark.parametrize(
    "sampling", [["task.sampling=temperature"], ["task.sampling=annealed", "max_epochs=3", "batch_examples=60"]]
)
def test_task_mixture_resumes_bit_for_bit(place: Path, sampling: list[str]) -> None:
    more = ["max_steps=6", "checkpoint_every=2", "evaluate_every=2", *sampling]
    run = mixture("run", *more)
    last = run / "checkpoints/step_00000006/model.safetensors"
    whole, result = last.read_bytes(), json.loads((run / "result.json").read_text())
    for step in (4, 6):
        shutil.rmtree(run / f"checkpoints/step_0000000{step}")
    (run / "result.json").unlink()
    mixture("run", *more)
    assert last.read_bytes() == whole
    again = json.loads((run / "result.json").read_text())
    assert again["mixture"] == result["mixture"] and again["metrics"] == result["metrics"]


def test_annealed_sampling_needs_epochs_and_constant_losses(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture("run", "task.sampling=annealed", "max_steps=6", status=2)
    shown = capsys.readouterr().err
    assert "max_epochs is not set" in shown and "set max_epochs=25, or task.annealing_epochs=25" in shown
    mixture("run", "task.sampling=annealed", "max_epochs=2", "distill=self", status=2)
    assert "set task.sampling=temperature, or distill=none" in capsys.readouterr().err


def test_text_to_text_mixture_has_one_language_model(place: Path) -> None:
    """Text-to-text tasks share one language model and have no other head."""
    write_tasks()
    Path("pairs").mkdir()
    lines = ["source\ttarget", *(f"the {word}\t{word} the" for word in GOOD * 3)]
    for split in ("train", "dev"):
        Path(f"pairs/{split}.tsv").write_text("\n".join(lines) + "\n")
    members = "[sst2,{kind: regression, name: value, path: values},{kind: seq2seq, name: turn, path: pairs}]"
    words = ["finetune", "task=mixture", f"task.members={members}", "task.with.sst2.path=rows", "model=t5_tiny"]
    words += ["task.head=text_to_text", "task.with.turn.prefix=turn: ", "max_steps=3", "name=run", *SMALL]
    assert cli.main(words) == 0
    result = json.loads(Path("runs/run/result.json").read_text())
    metrics = result["metrics"]
    assert result["value"] == pytest.approx(
        (metrics["sst2_accuracy"] + metrics["value_pearson"] + metrics["turn_bleu"] / 100) / 3
    )
    taken = json.loads(Path("runs/run/facts.json").read_text())["model"]["parameters"]
    assert not [part for part in taken if part in ("heads.sst2", "heads.value", "heads.turn")]
    use = ["checkpoint=runs/run", "device=cpu"]
    assert cli.main(["predict", *use, "task=turn", "text=the cat"]) == 0
    assert cli.main(["generate", *use, "prompt=the cat"]) == 2, "the task is not set"


def test_mixture_sweep_trains_domain_loss_of_member(place: Path) -> None:
    """Members are composed in each job of a sweep, and a member may have domain texts of its own."""
    Path("other.tsv").write_text("sentence\nover there\nup here\n")
    write_tasks()
    members = "[sst2,{kind: regression, name: value, path: values}]"
    words = ["finetune", "-m", "task=mixture", f"task.members={members}", "task.sampling=uniform,capped", "name=both"]
    more = ["task.with.sst2.path=rows", "task.with.sst2.domain=dann", "task.with.sst2.domain.target=other.tsv"]
    assert cli.main([*words, *more, "model=bert_tiny", *SMALL, "max_steps=1"]) == 0
    for run, read in zip(sorted(Path("runs/both").glob("*_sampling-*")), (16, 21), strict=True):
        result = json.loads((run / "result.json").read_text())
        assert result["status"] == "done" and abs(result["mixture"]["sst2"]["examples"] - read) <= 6
        (row,) = [row for row in rows_of(run / "metrics.jsonl") if row["split"] == "train"]
        assert {"loss_sst2", "loss_value", "loss_sst2_sst2_domain"} <= row.keys()


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["task.members=[sst2,{kind: regression, name: value}]"], "the member value of task.members has no data",
         "set task.with.value.path=FOLDER"),
        (["task.members=[sst2,sst2]"], "sst2 is named twice", "give one of them another name, as a section: {kind:"),
        (["task.members=[sst2,cola]", "task.with.sst.path=rows"], "with.sst names no member", "mean task.with.sst2?"),
        (["task.members=[sst2,stsb]", "task.head=text_to_text"], "model=bert does not generate text", "model=t5"),
        (["task.members=[sst2,glue]"], "glue is a group of tasks", "lmtool show task"),
        (["task.members=[sst2,stb]"], "task.members: stb is not one of", "did you mean stsb?"),
        (["task.members=[sst2,{kind: regression, name: value, path: x, metric: mse}]"], "lower is better",
         "task.with.value.metric=pearson"),
        (["task.members=[sst2,xsum]"], "trains a decoder or an encoder-decoder", "model="),
        (["task.members=[sst2,cola]", "task.path=rows"], "task.path", "task.with.NAME.path="),
    ],
)  # fmt: skip
def test_invalid_task_mixture_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str, hint: str
) -> None:
    given = ["finetune", "task=mixture", *words, "model=bert_tiny", *SMALL]
    assert cli.main(given) == 2
    shown = capsys.readouterr().err
    assert error in shown and hint in shown and not Path("runs").exists()


def test_shipped_task_joins_pretraining_mixture(place: Path) -> None:
    words = ["pretrain", "objective=mixture", "objective.members=[mlm,sst2]", "objective.with.sst2.path=rows"]
    words += ["objective.with.mlm.probability=0.3", "model=bert_tiny", "data=text", "data.path=text.txt", *SMALL]
    assert cli.main([*words, "batch_tokens=256", "max_steps=2", "name=run"]) == 0
    result = json.loads(Path("runs/run/result.json").read_text())
    assert set(result["mixture"]) == {"mlm", "sst2"} and {"mlm_loss", "sst2_accuracy"} <= result["metrics"].keys()
    saved = (Path("runs/run") / "config.yaml").read_text()
    assert "probability: 0.3" in saved and "path: rows" in saved
    assert cli.main(["predict", "checkpoint=runs/run", "task=sst2", "text=a film", "device=cpu"]) == 0
