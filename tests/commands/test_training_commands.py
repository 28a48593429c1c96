"""pretrain and finetune from the command line to the run folder, and the commands that use a run."""

from __future__ import annotations

import csv
import errno
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from lmtool.cli import main as cli
from lmtool.system.files import MANIFEST, Manifest, write_manifest
from lmtool.tokenizers.tokenizer import Tokenizer
from tests.commands.conftest import TINY, finetune, merge_overrides, pretrain


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("reports", "figures")
@pytest.mark.parametrize(("model", "objective"), [("bert_tiny", "mlm_nsp"), ("gpt_tiny", "clm")])
def test_pretraining_writes_complete_run_folder(place: Path, model: str, objective: str) -> None:
    folder = pretrain("first", f"objective={objective}", model=model)
    written = {path.name for path in folder.iterdir()}
    assert written >= {
        "config.yaml", "metrics.jsonl", "result.json", "checkpoints", "report.html", "log.txt", "environment.json",
        "facts.json", "samples.json", "plots",
    }  # fmt: skip
    result = json.loads((folder / "result.json").read_text())
    assert set(result) >= {
        "status", "command", "model", "objective", "metric", "value", "metrics", "steps", "tokens", "padding_fraction",
        "seconds", "tokens_per_second", "peak_memory_bytes", "parameters", "trainable_parameters", "seed",
    }  # fmt: skip
    assert (result["status"], result["steps"], result["metric"]) == ("done", 6, "loss")
    train = [row for row in rows(folder) if row["split"] == "train"]
    assert [row["step"] for row in train] == [1, 2, 3, 4, 5, 6]
    assert set(train[0]) >= {"loss", "learning_rate", "tokens", "tokens_per_second", "grad_norm"}
    last = folder / "checkpoints" / (folder / "checkpoints" / "last").read_text().strip()
    assert {path.name for path in last.iterdir()} >= {
        "model.safetensors", "optimizer.safetensors", "state.json", "config.json", "manifest.json", "tokenizer.json",
    }  # fmt: skip
    assert Path("runs/latest").readlink() == Path("first")
    assert json.loads((folder / "samples.json").read_text())


@pytest.mark.usefixtures("reports")
def test_finished_run_is_reported_and_changed_run_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pretrain("first")
    before = (folder / "metrics.jsonl").read_bytes()
    (folder / "report.html").unlink()
    pretrain("first")
    assert (folder / "report.html").is_file() and (folder / "metrics.jsonl").read_bytes() == before
    assert "runs/first is finished" in capsys.readouterr().out
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    del saved["phases"], saved["objective"]["short_window_probability"]  # like a configuration of an older version
    (folder / "config.yaml").write_text(yaml.safe_dump(saved, sort_keys=False))
    pretrain("first")
    assert "runs/first is finished" in capsys.readouterr().out
    pretrain("first", "optimizer.lr=0.5", status=2)
    message = capsys.readouterr().err
    assert "optimizer.lr" in message and "0.5" in message and "Traceback" not in message


def test_saved_config_repeats_the_run(place: Path) -> None:
    folder = pretrain("first")
    assert cli.main(["pretrain", "--config", str(folder / "config.yaml"), "name=again"]) == 0
    ours = [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows(folder)]
    again = [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows(Path("runs/again"))]
    assert ours == again


def test_micro_batches_match_full_batch(place: Path) -> None:
    whole, parts = pretrain("whole"), pretrain("parts", "micro_batch_tokens=64")
    for row, other in zip(rows(whole), rows(parts), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-4)


def test_gradient_checkpointing_matches_plain_run(place: Path) -> None:
    kept, again = pretrain("kept"), pretrain("again", "gradient_checkpointing=true")
    assert [row["loss"] for row in rows(kept)] == [row["loss"] for row in rows(again)]
    pretrain("again")  # the same run, already finished


def test_finetuned_run_is_evaluated_and_predicts(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = pretrain("first")
    folder = finetune("second", f"checkpoint={start}", "max_epochs=30", "optimizer.lr=1e-2")
    result = json.loads((folder / "result.json").read_text())
    assert (result["task"], result["metric"]) == ("sst2", "accuracy") and result["value"] > 0.9
    predictions = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert len(predictions) == 40 and set(predictions[0]) >= {"id", "sentence", "gold", "prediction", "score"}
    right = sum(row["gold"] == row["prediction"] for row in predictions) / len(predictions)
    assert right == pytest.approx(result["value"])
    screen = capsys.readouterr().out
    assert "loaded: backbone" in screen and "new: heads.sst2" in screen and "majority" in screen
    assert yaml.safe_load((folder / "config.yaml").read_text())["task"]["labels"] == ["negative", "positive"]

    assert cli.main(["evaluate", f"checkpoint={folder}", "output=scored.jsonl", "precision=fp32"]) == 0
    assert len(Path("scored.jsonl").read_text().splitlines()) == 40
    assert f"{result['value']:.4f}" in capsys.readouterr().out
    assert cli.main(["evaluate", str(folder), str(folder), "report=scores"]) == 0
    assert cli.main(["evaluate", str(folder), f"report={folder}"]) == 2  # would replace the run's predictions
    assert f"error: {folder} is not empty and not a report of lmtool: it has checkpoints" in capsys.readouterr().err
    assert cli.main(["evaluate", str(folder), str(folder), "report=scores"]) == 0  # an existing report is replaced
    screen = capsys.readouterr().out
    assert "n = 40" in screen and "+0.0000 to +0.0000  no" in screen  # compared with itself
    evaluation = json.loads(Path("scores/evaluation.json").read_text())["splits"]["dev"]
    assert evaluation["metrics"]["accuracy"]["low"] <= result["value"] <= evaluation["metrics"]["accuracy"]["high"]
    losses = [row["loss"] for row in evaluation["hardest"]]
    assert losses == sorted(losses, reverse=True) and losses[0] > evaluation["loss"]
    assert Path("scores/plots/dev_confusion.png").stat().st_size and Path("scores/plots/dev_calibration.png").is_file()
    assert cli.main(["evaluate", str(folder), str(start)]) == 2
    assert f"against={start} was not trained for a task" in capsys.readouterr().err
    assert cli.main(["evaluate", str(folder), "data=pydocs"]) == 2  # the task's rows are not used silently
    assert f"data=pydocs does not apply: checkpoint={folder} was trained for a task" in capsys.readouterr().err
    assert cli.main(["predict", f"checkpoint={folder}", "text=the lovely bright gentle cat", "precision=fp32"]) == 0
    assert capsys.readouterr().out.startswith("positive")
    Path("lines.txt").write_text("the cruel cold king\n\nthe kind warm queen\n")
    assert cli.main(["predict", f"checkpoint={folder}", "input=lines.txt", "output=out.jsonl"]) == 0
    written = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["sentence"] for row in written] == Path("lines.txt").read_text().splitlines()  # row i is line i
    assert [row["id"] for row in written] == [0, 1, 2]
    assert [row["prediction"] for row in written[::2]] == ["negative", "positive"]
    Path("in.csv").write_text(
        'note,sentence,label\n"a, b",the cruel cold king,negative\nc,the kind warm queen,negative\n'
    )
    capsys.readouterr()
    words = ["predict", f"checkpoint={folder}", "input=in.csv", "probabilities=true", "precision=fp32"]
    assert cli.main([*words, "output=out.csv"]) == 0
    said = capsys.readouterr().out
    assert "2 rows: out.csv; accuracy 0.500 on 2 labeled rows" in said and "has learned" not in said
    assert cli.main([*merge_overrides(words, ["input=rows/train.tsv"]), "output=known.csv"]) == 0
    assert "warning: the model was trained on rows of rows/train.tsv; lmtool evaluate" in capsys.readouterr().out
    with Path("out.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["note"], row["prediction"]) for row in table] == [("a, b", "negative"), ("c", "positive")]
    assert float(table[0]["probability_negative"]) + float(table[0]["probability_positive"]) == pytest.approx(
        1, abs=1e-6
    )
    assert cli.main([*words, "output=out.xlsx"]) == 2
    assert "files with the suffix .xlsx cannot be written" in capsys.readouterr().err


def test_class_probabilities_are_written_or_warned_about(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("many.csv").write_text("text,label,value\n" + "".join(f'cat {n},"{"ab"[n % 2]},c",{n}\n' for n in range(12)))
    words = ["task.path=many.csv", "model=bert_tiny", *TINY, "checkpoint=none", "max_steps=1"]
    folder = finetune("many", "task=multi_label", *words)
    asked = ["predict", f"checkpoint={folder}", "text=cat 3", "probabilities=true"]
    assert cli.main(asked) == 2
    assert "needs an output file" in capsys.readouterr().err
    assert cli.main([*asked, "output=out.csv"]) == 0
    with Path("out.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert all(0 < float(row[f"probability_{name}"]) < 1 for name in "abc")
    folder = finetune("value", "task=regression", "task.label=value", *words)
    assert cli.main([*merge_overrides(asked, [f"checkpoint={folder}"]), "output=value.csv"]) == 0
    assert "warning: probabilities=true: regression has no class probabilities" in capsys.readouterr().out


def test_head_tuning_keeps_backbone_weights(place: Path) -> None:
    from safetensors.numpy import load_file

    from lmtool.weights.reading import read

    start = pretrain("first")
    folder = finetune("head", f"checkpoint={start}", "tuning=head", "max_epochs=1")
    result = json.loads((folder / "result.json").read_text())
    assert result["trainable_parameters"] == 2 * 32 + 2  # only the head; the pooler comes from the checkpoint

    def weights(run: Path) -> dict:
        return load_file(run / "checkpoints" / (run / "checkpoints/best").read_text().strip() / "model.safetensors")

    assert weights(folder).keys() == {"heads.sst2.output.weight", "heads.sst2.output.bias"}  # the base has the rest
    before, after = weights(start), read(str(folder)).tensors
    frozen = [name for name in after if name.startswith(("backbone.", "heads.pooler."))]
    assert len(frozen) > 10 and all((before[name] == after[name].numpy()).all() for name in frozen)


def test_pretrained_runs_predict_and_evaluate(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    masked, causal = pretrain("masked"), pretrain("causal", model="gpt_tiny")
    capsys.readouterr()
    assert cli.main(["predict", f"checkpoint={masked}", "text=The kind [MASK] saw the [MASK]."]) == 0
    assert capsys.readouterr().out.count(";") == 1  # two masks with guesses
    assert cli.main(["predict", f"checkpoint={masked}", "text=no mask here"]) == 2
    assert "[MASK]" in capsys.readouterr().err
    assert cli.main(["predict", f"checkpoint={causal}", "text=The kind"]) == 0
    assert capsys.readouterr().out.startswith("The kind")
    for run in (masked, causal):
        assert cli.main(["evaluate", f"checkpoint={run}", "precision=fp32"]) == 0
        result = json.loads((run / "result.json").read_text())
        assert f"{result['value']:.4f}" in capsys.readouterr().out
    assert {"perplexity", "word_perplexity", "bits_per_byte"} <= result["metrics"].keys()
    (place / "other.txt").write_text((place / "text.txt").read_text())
    sliding = ["evaluate", str(causal), "data=wikitext", "data.path=other.txt", "stride=16"]
    assert cli.main(sliding) == 0
    printed = capsys.readouterr().out
    assert "all text of data.path=other.txt" in printed and "with 16 tokens of context or more" in printed
    for words, error in (
        (["evaluate", str(masked), "stride=16"], "stride=16 needs a causal language model"),
        (["evaluate", str(causal), "max_length=100000"], "max_length=100000 exceeds"),
        (["evaluate", str(causal), "output=empty.jsonl"], "output=empty.jsonl does not apply"),
    ):
        assert cli.main(words) == 2
        assert error in capsys.readouterr().err


def test_plan_counts_parameters_and_rows_without_training(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "pretrain", "model=bert"]) == 0
    assert "heads.pooler 590,592" in capsys.readouterr().out
    assert cli.main(["plan", "task=sst2", "task.path=rows", "model=bert_tiny", "checkpoint=none"]) == 0
    screen = capsys.readouterr().out
    assert "96 training rows" in screen and "heads.sst2 258" in screen
    assert not Path("runs").exists()


def test_failed_tokenizer_save_leaves_no_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(self: Tokenizer, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    words = ["tokenizer", "data=text", "data.path=text.txt", "tokenizer.vocab_size=300", "cache_dir=cache"]
    assert cli.main([*words, "output=first"]) == 0  # fills the cache
    monkeypatch.setattr(Tokenizer, "save", save)
    assert cli.main([*words, "output=new"]) == 2
    assert (
        "error: output=new cannot be written: No space left on device" in capsys.readouterr().err
        and not Path("new").exists()
    )


def test_checkpoint_with_forged_config_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest is valid, but the configuration was not written by lmtool; the error names the checkpoint."""
    folder = next(
        (finetune("forged", "checkpoint=none", "model=bert_tiny", "max_steps=1") / "checkpoints").glob("step_*")
    )
    for change, says in (
        ({"command": "rm"}, "its config.json has the command rm, which trains no model"),
        ({"max_length": 0}, "checkpoint=runs/forged: max_length: given 0"),
    ):
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, **change}))
        metadata = Manifest.read(folder).metadata
        (folder / MANIFEST).unlink()
        write_manifest(folder, metadata)
        assert cli.main(["predict", "checkpoint=runs/forged", "text=hello"]) == 2
        error = capsys.readouterr().err
        assert says in error and "checkpoint=runs/forged" in error and "hint: " in error
        (folder / "config.json").write_text(json.dumps(written))


@pytest.mark.parametrize("steps", [100, 101])
def test_plan_warns_about_warmup_as_long_as_run(place: Path, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "pretrain", "model=bert_tiny", *TINY, "data=text", "data.path=text.txt"]
    assert cli.main([*words, "schedule.warmup_steps=100", f"max_steps={steps}"]) == 0
    warning = "warning     schedule.warmup_steps=100: in a run of 100 steps the learning rate only rises"
    assert (warning in capsys.readouterr().out) == (steps == 100)


def test_run_shorter_than_its_decay_warns(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("short", "schedule=wsd", "schedule.warmup_steps=1", "schedule.decay_steps=500", "max_steps=2")
    screen = capsys.readouterr().out
    assert "warning: schedule.decay_steps=500: the run has only 1 step after the warm-up" in screen
    assert " ends      after 2 steps (max_steps)" in screen


@pytest.mark.usefixtures("reports")
def test_resume_and_report_accept_run_folders(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = pretrain("first"), pretrain("second", "seed=1")
    (first / "result.json").unlink()
    assert cli.main(["resume", str(first)]) == 0
    assert json.loads((first / "result.json").read_text())["steps"] == 6
    (first / "report.html").unlink()
    assert cli.main(["report", str(first)]) == 0 and (first / "report.html").is_file()
    assert cli.main(["report", str(first), str(second)]) == 0 and Path("runs/comparison.html").is_file()
    for command in ("resume", "report"):
        assert cli.main([command, "runs/latest"]) == 0
        assert str(first) in capsys.readouterr().out
    assert cli.main(["resume"]) == 2
    assert "error: resume: give one run folder" in capsys.readouterr().err
    for nothing in ("runs/nothing", "text.txt", "runs"):
        for command in ("resume", "report"):
            assert cli.main([command, nothing]) == 2
            assert nothing in capsys.readouterr().err


def test_trained_tokenizer_is_used_by_a_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokenizer", "data=text", "data.path=text.txt", "tokenizer.vocab_size=300", "output=vocabulary"]
    assert cli.main([*words, "cache_dir=cache"]) == 0
    shown = capsys.readouterr().out
    assert "vocabulary · 134 tokens of tokenizer.vocab_size=300: the text has no more" in shown
    assert "bytes a token · 0.00% of the tokens unknown" in shown
    assert cli.main([*words, "cache_dir=cache"]) == 2
    other = ["tokenizer", *merge_overrides(words[1:], ["output=few", "tokenizer=character", "tokenizer.vocab_size=20"])]
    assert cli.main([*other, "cache_dir=cache"]) == 0
    shown = capsys.readouterr().out
    assert "few · 20 tokens\n" in shown and "T h e ␣ [UNK] i n d" in shown
    folder = pretrain("first", "tokenizer=folder", "tokenizer.path=vocabulary")
    last = folder / "checkpoints" / (folder / "checkpoints" / "last").read_text().strip()
    assert (last / "tokenizer.json").read_bytes() == Path("vocabulary/tokenizer.json").read_bytes()


@pytest.mark.usefixtures("reports", "figures")
def test_secrets_of_environment_are_not_written_or_printed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secrets = {
        "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567", "HF_TOKEN": "hf_abcdefghijklmnop",
        "MY_PASSWORD": "correct-horse-battery", "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
    }  # fmt: skip
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    folder = pretrain("first", "cache_dir=${oc.env:MY_PASSWORD}", status=0)
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    shown = capsys.readouterr()
    for value in secrets.values():
        assert not any(value.encode() in text for text in texts)
        assert value not in shown.out + shown.err


def test_tiny_overrides_are_valid() -> None:
    """If a key of TINY were renamed, other tests could pass because of the wrong error."""
    assert cli.main(["pretrain", "model=bert_tiny", *TINY, "--cfg", "job"]) == 0


def test_evaluate_scores_language_model_on_few_shot_prompts(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, masked = pretrain("run", model="gpt_tiny"), pretrain("masked", "max_steps=2")
    task = ["task=sst2", "task.path=rows", "precision=fp32"]
    capsys.readouterr()
    before = {path: path.read_bytes() for path in run.rglob("*.safetensors")}
    ask = ["evaluate", f"checkpoint={run}", *task, "shots=2", "prompt_seeds=2", "max_length=200", "output=told.jsonl"]
    assert cli.main(ask) == 0
    printed = capsys.readouterr().out
    assert "2 shots · n = " in printed and "2 draws" in printed and "majority" in printed
    told = [json.loads(line) for line in Path("told.jsonl").read_text().splitlines()]
    assert {row["draw"] for row in told} == {0, 1} and all(
        row["prediction"] in ("negative", "positive") for row in told
    )
    accuracy = [np.mean([row["prediction"] == row["gold"] for row in told if row["draw"] == draw]) for draw in (0, 1)]
    assert f"{np.mean(accuracy):.4f}" in printed and f"{np.std(accuracy, ddof=1):.4f}" in printed
    assert before and before == {path: path.read_bytes() for path in run.rglob("*.safetensors")}
    assert cli.main([*ask[:-1], "output=again.jsonl", "report=scores"]) == 0
    assert Path("again.jsonl").read_bytes() == Path("told.jsonl").read_bytes()
    assert Path("scores/predictions.jsonl").read_bytes() == Path("told.jsonl").read_bytes()
    report = json.loads(Path("scores/evaluation.json").read_text())
    assert report["splits"]["dev"]["metrics"]["accuracy"]["draws"] == accuracy and report["shots"] == 2
    capsys.readouterr()
    refused = {
        "has no head for task=sst2": [f"checkpoint={run}", *task],
        "no task is set": [f"checkpoint={run}", "shots=1"],
        "fills masks": [f"checkpoint={masked}", *task, "shots=1"],
        "stride=8 does not apply": [f"checkpoint={run}", *task, "shots=1", "stride=8"],
        "without demonstrations": [f"checkpoint={run}", *task, "shots=1", "max_length=8"],
    }
    for message, words in refused.items():
        assert cli.main(["evaluate", *words]) == 2
        assert message in capsys.readouterr().err
    sums = iter("ab")
    monkeypatch.setattr("lmtool.session.evaluation._checksum", lambda module: next(sums))
    assert cli.main(ask) == 1
    assert "prompting changed the model's parameters" in capsys.readouterr().err
