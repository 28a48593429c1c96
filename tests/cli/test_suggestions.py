"""Hints for command lines in the style of other tools: they name the equivalent lmtool command or key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lmtool import __version__
from lmtool.cli import main
from lmtool.cli import main as cli
from lmtool.resolver import verbs
from lmtool.resolver.shorthands import CommandLine, expand_arguments
from tests.reporting.test_report import read_page

# Command lines, exit status, and text that the hint (or the output, for exit status 0) must contain.
ANSWERS = [
    ("train", 2, "did you mean lmtool pretrain or lmtool finetune?"),
    ("train model=bert", 2, "did you mean lmtool pretrain or lmtool finetune?"),
    ("eval runs/x", 2, "did you mean lmtool evaluate?"),
    ("ls", 2, "did you mean lmtool runs?"),
    ("--version", 0, f"lmtool {__version__}"),
    ("version", 2, "did you mean lmtool --version?"),
    ("help pretrain", 0, "max_steps: auto"),
    ("pretrain --model bert", 2, "write model=bert"),
    ("pretrain --model=bert", 2, "write model=bert"),
    ("pretrain --optimizer.lr 1e-3 seed=1", 2, "write optimizer.lr=1e-3"),
    ("finetune --learning-rate", 2, "did you mean optimizer.lr=VALUE?"),
    ("finetune --model_name_or_path x", 2, "did you mean checkpoint=hf://x?"),
    ("pretrain --fp16", 2, "did you mean precision=fp16?"),
    ("predict --batch-size 3", 2, "batch_tokens= is the size here"),
    ("export --output-dir x", 2, "did you mean output=x?"),
    ("pretrain --zebra x", 2, "`lmtool --help` prints the flags"),
    ("pretrain -cd conf", 2, "did you mean --config-dir conf?"),
    ("pretrain -cn tiny", 2, "experiment=tiny chooses a composed one"),
    ("pretrain --info", 2, "lmtool doctor"),
    ("pretrain --cfg job --resolve", 2, "omit it"),
    ("list models tuning/schedules datas", 0, "gradual_unfreezing"),
    ("list schedulers", 2, "did you mean lmtool list schedule?"),
    ("objectives", 2, "did you mean lmtool list objective?"),
    ("show learning_rate", 2, "did you mean lmtool show optimizer.lr?"),
    ("finetune task=sst2 offline=true", 2, "checkpoint=none model=bert_tiny"),
    ("finetune task=samsum offline=true", 2, "checkpoint=none model=t5_tiny"),
    ("finetune task=ner offline=true", 2, "task=bc5cdr, task=conll2003 or task=wnut17"),
    ("plan evaluate", 2, "lmtool plan pretrain"),
    ("resume runs/none", 2, "`lmtool runs` prints the existing runs"),
    ("report runs/none", 2, "`lmtool runs` prints the existing runs"),
    ("pretrain --plugin ./my.py", 2, "--plugin my, with PYTHONPATH=."),
    ("pretrain --plugin parts/my.py", 2, "--plugin my, with PYTHONPATH=parts"),
    ("pretrain --plugin ../other/my.py", 2, "--plugin my, with PYTHONPATH=../other"),
    ("pretrain hydra/launcher=joblib model=bert_tiny", 2, "add -m"),
    ("pretrain model=bert_tiny devices=2 --cfg job", 0, "devices: 2"),
    ("plan pretrain model=bert_tiny max_steps=3 device=cuda", 0, "on cuda, not on this machine"),
    ("pretrain data=my.txt model=bert_tiny --cfg job", 0, "path: my.txt"),
    ("finetune task=rows.csv model=bert_tiny --cfg job", 0, "label: label"),
    ("finetune task=semicolons.csv model=bert_tiny --cfg job", 0, "label: label"),
    ("finetune task=rows.csv task.text=review model=bert_tiny", 2, "name the column: task.text=[COLUMN]"),
    ("finetune task=rows.csv task.text=txt model=bert_tiny", 2, "did you mean task.text=[text]?"),
    ("inspect attentino", 2, "did you mean lmtool inspect attention?"),
    ("finetune task=rows.csv checkpoint=runs/first,none", 2, "-m sweeps over them"),
    ("evaluate runs/x", 2, "use a run (runs/NAME)"),
    ("evaluate runs/frist", 2, "did you mean runs/first?"),
    ("predict frist text", 2, "checkpoint=hf://frist"),
    ("predict first text", 2, "did you mean runs/first?"),
    ("finetune task=pydocs checkpoint=bert-base-uncased", 2, "checkpoint=hf://bert-base-uncased"),
    ("finetune task=pydocs checkpoint=google/electra", 2, "checkpoint=hf://google/electra"),
    ("finetune task=reviews.xlsx model=bert_tiny", 2, "save one sheet per CSV file"),
    ("finetune task=commas.tsv model=bert_tiny", 2, ".csv for commas or semicolons"),
    ("pretrain --config-dir recipes experiment=mine model=bert_tiny", 2, "add # @package _global_ as its first line"),
    ("runs no", 2, "start a first run"),
    ("runs runs", 0, "has no runs yet"),
]


@pytest.fixture
def folder_with_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "reviews.xlsx").write_bytes(b"PK\x03\x04")
    (tmp_path / "commas.tsv").write_text("text,label\ngood,pos\nbad,neg\n")
    rows = [("text", "label"), *((f"a {'fine' if row % 2 else 'sad'} film {row}", row % 2) for row in range(40))]
    for name, between in (("rows", ","), ("semicolons", ";")):
        (tmp_path / f"{name}.csv").write_text("".join(f"{text}{between}{label}\n" for text, label in rows))
    (tmp_path / "my.txt").write_text("A text of two lines.\nIt is short.\n")
    (tmp_path / "recipes" / "experiment").mkdir(parents=True)
    (tmp_path / "recipes" / "experiment" / "mine.yaml").write_text("max_steps: 3\n")
    return tmp_path


@pytest.mark.parametrize(("typed", "status", "answer"), ANSWERS, ids=[typed for typed, _, _ in ANSWERS])
def test_hint_names_equivalent_command(
    typed: str, status: int, answer: str, folder_with_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typed.split()) == status
    captured = capsys.readouterr()
    shown = captured.out if status == 0 else "\n".join(line for line in captured.err.splitlines() if "hint: " in line)
    assert answer in shown, captured.out + captured.err


# Refused command lines, and the same lines corrected by the hint.
CORRECTED = [
    ("pretrain bert", "pretrain model=bert"),
    ("plan bert", "plan model=bert"),
    ("finetune sst2", "finetune task=sst2"),
    ("finetune task=sst2 offline=true", "finetune task=sst2 offline=true model=bert_tiny checkpoint=none"),
    ("tokenizer my.txt", "tokenizer data=my.txt"),
    ("tokenizer data=my.txt", "tokenizer data=my.txt output=..."),
    ("finetune model=bert_tiny task=glue/sst2", "finetune model=bert_tiny task=sst2"),
    ("pretrain model=bert_tiny device=gpu", "pretrain model=bert_tiny device=cuda"),
    ("plan pretrain model=bert_tiny device=gpu", "plan pretrain model=bert_tiny device=cuda"),
    ("pretrain model=bert_tiny precision=float16", "pretrain model=bert_tiny precision=fp16"),
    ("pretrain data=./my.tx", "pretrain data=my.txt"),
    ("finetune task=./rows.cvs model=bert_tiny", "finetune task=rows.csv model=bert_tiny"),
    ("resume runs/frist", "resume runs/first"),
    ("report runs/frist", "report runs/first"),
    ("pretrain model=bert-base-uncased", "pretrain checkpoint=hf://bert-base-uncased"),
    ("pretrain model=gpt2", "pretrain model=gpt"),
    ("finetune task=rows.csv task.text=txt model=bert_tiny", "finetune task=rows.csv task.text=[text] model=bert_tiny"),
    ("pretrain optimizer=adamw_torch", "pretrain optimizer=adamw"),
    ("pretrain per_device_train_batch_size=32", "pretrain batch_examples=32 batch_tokens=null"),
    ("pretrain --lr 1e-4", "pretrain optimizer.lr=1e-4"),
    ("pretrain --num-hidden-layers=4", "pretrain model.num_layers=4"),
    ("pretrain model=glob(bert_t*)", "pretrain -m model=glob(bert_t*)"),
    ("generate checkpoint=none prompt=a top_k=5", "generate checkpoint=none prompt=a top_k=5 temperature=1.0"),
    (
        "pretrain model=electra_tiny objective=rtd objective.training=two_stage objective.sharing=gdes",
        "pretrain model=electra_tiny objective=rtd objective.training=two_stage objective.sharing=tied",
    ),
]


@pytest.mark.parametrize(("typed", "again"), CORRECTED, ids=[typed for typed, _ in CORRECTED])
def test_corrected_command_removes_error(
    typed: str, again: str, folder_with_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = [] if typed.split()[0] in ("resume", "report") else ["--cfg", "job"]
    assert cli.main([*typed.split(), *job]) == 2
    new = [word for word in again.split() if word not in typed.split()]
    refused, hint = next(
        (message, hint)
        for message, hint in errors_with_hints(capsys.readouterr().err)
        if all(word in hint or word.partition("=")[2] in hint.split("did you mean ")[-1] for word in new)
    )
    assert new and hint
    status = cli.main([*again.replace("...", "folder").split(), *job])
    after = capsys.readouterr().err
    assert status in (0, 2) and refused not in [message for message, _ in errors_with_hints(after)], after


def errors_with_hints(printed: str) -> list[tuple[str, str]]:
    """The printed errors with their hints."""
    errors: list[tuple[str, str]] = []
    for line in printed.splitlines():
        if line.startswith("error: "):
            errors.append((line, ""))
        elif line.startswith("hint: "):
            errors[-1] = (errors[-1][0], line)
    return errors


def test_suggested_commands_exist() -> None:
    named = {name for form in main._COMMANDS for name in re.findall(r"lmtool ([a-z]+)", form)}
    assert named <= verbs.VERBS.keys()
    assert not {*" ".join(main._COMMANDS.values()).split()} & verbs.VERBS.keys()
    assert not {*main.FLAG_FORMS} & {*main.FLAGS}


def test_positional_words_become_checkpoint_and_text(folder_with_runs: Path) -> None:
    line = expand_arguments(CommandLine("predict", ("runs/first", "a = b is text", "seed=1")))
    assert line.words == ("checkpoint=runs/first", "text=a = b is text", "seed=1")
    line = expand_arguments(CommandLine("generate", ("prompt=a", "runs/first")))
    assert line.words == ("prompt=a", "checkpoint=runs/first")


def test_runs_command_lists_runs_and_sweeps(folder_with_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, sweep = (folder_with_runs / "runs" / name for name in ("first", "second", "grid"))
    (first / "config.yaml").write_text(
        "command: finetune\nmodel: {name: bert}\ntask: {name: sst2}\ntuning: {name: lora}\n"
    )
    result = {"status": "done", "metric": "accuracy", "value": 0.75, "seconds": 61, "validation_examples": 48}
    (first / "result.json").write_text(json.dumps(result))
    (first / "facts.json").write_text(
        json.dumps({"baseline": {"name": "majority", "metric": "accuracy", "value": 0.5}})
    )
    second.mkdir()
    (second / "config.yaml").write_text("command: pretrain\nmodel: {name: gpt}\nobjective: {name: clm}\n")
    (second / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    for number, ended in enumerate(
        ({"exit_status": 0, "value": 1.0, "metric": "accuracy"}, {"exit_status": 1, "error": "x"})
    ):
        (sweep / str(number)).mkdir(parents=True)
        (sweep / str(number) / "job.json").write_text(json.dumps({"job": number, **ended}))
    (folder_with_runs / "runs" / "latest").symlink_to("second")
    assert cli.main(["runs"]) == 0
    lines = {line.split("  ")[0]: " ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert "finetune bert on sst2, lora accuracy 0.750 ± 0.062 0.500 done 1 min 1 s" in lines["first"]
    assert "pretrain gpt on clm stopped at step 7" in lines["second"] and "latest" not in lines
    assert "sweep 1 of 2 done, 1 failed" in lines["grid"]
    assert any(line.startswith("3 runs in runs, ") for line in lines)


def test_runs_command_writes_a_page_of_runs(folder_with_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = folder_with_runs / "runs"
    for name, loss in (("a b", 3.5), ("first", 4.5)):
        (runs / name).mkdir(exist_ok=True)
        (runs / name / "config.yaml").write_text("version: 1\ncommand: pretrain\nmodel: {name: <gpt>}\n")
        (runs / name / "result.json").write_text(json.dumps({"status": "done", "metric": "loss", "value": loss}))
    (runs / "a b" / "report.html").write_text("")
    (runs / "first" / "report.html").symlink_to(runs / "a b" / "report.html")
    (runs / "grid" / "0").mkdir(parents=True)
    (runs / "grid" / "0" / "job.json").write_text("{}")
    (runs / "latest").symlink_to("first")
    assert cli.main(["runs"]) == 0
    assert "page: runs/index.html" in capsys.readouterr().out
    text, page = (runs / "index.html").read_text(), read_page(runs / "index.html")
    rows = {row[0]: row for row in page.rows}
    assert rows.keys() == {"run", "a b", "first", "grid"}
    assert rows["a b"][2:5] == ["pretrain <gpt>", "loss", "3.500"]
    assert re.findall('href="([^"]+)"', text) == ["a%20b/report.html"], "links are not followed"
    assert sorted(re.findall('data-path="([^"]+)"', text)) == ["&#x27;runs/a b&#x27;", "runs/first"]
    (runs / "index.html").write_text("of the user")
    assert cli.main(["runs"]) == 0 and (runs / "index.html").read_text() == "of the user"
    assert "runs/index.html was not written" in capsys.readouterr().out
    (runs / "index.html").unlink()
    (runs / "index.html").symlink_to(folder_with_runs / "other.html")
    assert cli.main(["runs"]) == 0 and not (folder_with_runs / "other.html").exists()


def test_runs_command_writes_no_page_among_other_programs_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "config.yaml").write_text("lr: 1\n")
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert "lmtool wrote no config.yaml in the folder" in capsys.readouterr().out
    assert not (tmp_path / "index.html").exists()
