"""Plugins extend lmtool without editing it: tests/outside contains a package with models, objectives, tasks and tuning
methods, which these tests use like a user, from an empty folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.training.ranks import PROCESSES

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ROOT / "tests" / "outside"

RUN_ALL = """
import contextlib, io, json, shlex, sys
from lmtool.cli.main import main
from lmtool.reporting import report
report.write_report = lambda run, **state: run / "report.html"  # no plots: they take longer than the runs
sys.modules.get("lmtool.session.screens", report).write_report = report.write_report
answers = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if line.startswith("python "):
            exec(line.removeprefix("python "))
            status = 0
        else:
            status = main(shlex.split(line))
    answers.append([status, out.getvalue(), err.getvalue(), "torch" in sys.modules])
print(json.dumps(answers))
"""

# The prediction of a tuned checkpoint, with `lmtool.load` and without the command line.
LOADED = """
import lmtool, torch
from lmtool.data.formats import text_format
loaded = lmtool.load("runs/tuned")
encoded = loaded.tokenizer.encode_batch(["the cat ran"])[0]
ids, _ = text_format(loaded.config.text_format, loaded.tokenizer).join(encoded)
logits = loaded.model(torch.from_numpy(ids.astype("int64"))[None]).logits
print(["cat", "none"][int(logits.argmax())], float(logits.softmax(-1).max()))
"""


def cut_off(run: str, last: str) -> str:
    """A line that makes runs/cut a copy of the run, as if killed after its second to last checkpoint."""
    return (
        f"python import shutil; shutil.copytree('runs/{run}', 'runs/cut'); "
        f"shutil.rmtree('runs/cut/checkpoints/{last}'); __import__('os').unlink('runs/cut/result.json')"
    )


def run_all(lines: Sequence[str], cwd: str, path: Sequence[str], said: Connection) -> None:
    """Run the lines in a fork of a process that has imported lmtool and torch, which takes longer than the lines."""
    from lmtool.learners.metrics import intervals

    intervals.RESAMPLES = 1_000
    os.chdir(cwd)
    sys.path[:0] = ["", *path]
    sys.argv = ["-c", json.dumps(lines)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(RUN_ALL, {})
    said.send(printed.getvalue())


def lmtool(
    cwd: Path, *lines: str, path: Path | None = OUTSIDE, fresh: bool = False
) -> list[tuple[int, str, str, bool]]:
    """Exit status, output and errors of command lines in one process, and whether torch is imported after each. Lines
    that begin with `python` are Python code. fresh: use a process that has imported nothing."""
    where = [str(entry) for entry in (ROOT, path) if entry is not None]
    if fresh:
        done = subprocess.run(
            [sys.executable, "-c", RUN_ALL, json.dumps(lines)],
            cwd=cwd, env=os.environ | {"PYTHONPATH": os.pathsep.join(where), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        heard, said = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=run_all, args=(lines, str(cwd), where, said))
        process.start()
        said.close()
        printed = heard.recv()
        process.join()
    return [tuple(entry) for entry in json.loads(printed.splitlines()[-1])]


def test_plugin_components_are_listed_shown_composed_and_checked(tmp_path: Path) -> None:
    conf = shlex.quote(str(OUTSIDE / "conf"))
    answers = lmtool(
        tmp_path,
        "list model --plugin outsider",
        "show model=averager --plugin outsider",
        "show task.forgiveness --plugin outsider",
        "pretrain --plugin outsider model=averager model.pull=0.25 --cfg job",
        f"pretrain --plugin=outsider --config-dir {conf} model=averager_wide --cfg job",
        "pretrain --plugin outsider model=averager model.pul=1 objective.n=1",
        "pretrain --plugin outsider model=gpt_tiny objective=every_nth",
        "finetune --plugin outsider model=averager task=graded task.path=x tuning=vectors --cfg job",
        "pretrain --plugin outsider model=averagr",
        "pretrain model=averager --cfg job",
        fresh=True,
    )
    listed, shown, key, job, wide, errors, misfit, task, typo, without = answers
    assert not any(answer[3] for answer in answers), "no torch is needed for any of this"
    assert "averager Each token sees the mean of its document: no attention at all." in " ".join(listed[1].split())
    assert "pull: 0.5" in shown[1] and "Distance from which the loss is linear." in key[1]
    assert job[0] == 0 and "pull: 0.25" in job[1] and "n: 5" in job[1] and "name: constant" in job[1]
    assert "plugins:\n- outsider" in job[1]
    assert wide[0] == 0 and "hidden_size: 32" in wide[1] and "pull: 0.5" in wide[1]
    assert errors[0] == 2 and "did you mean model.pull=1?" in errors[2] and "objective.n: given 1" in errors[2]
    assert misfit[0] == 2 and "objective=every_nth trains an encoder" in misfit[2]
    assert task[0] == 0 and "forgiveness: 1.0" in task[1] and "lr: 0.02" in task[1] and "name: vectors" in task[1]
    assert typo[0] == 2 and "did you mean model=averager?" in typo[2]
    # The last line names no plugin, but this process has loaded it already; a new process has not.
    assert without[0] == 0
    ((status, _, error, _),) = lmtool(tmp_path, "pretrain model=averager --cfg job")
    assert status == 2 and "model=averager is not one of" in error
    assert list(tmp_path.iterdir()) == []


def test_plugin_model_objective_task_and_tuning_train(tmp_path: Path) -> None:
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "some", "dogs", "ran", "to", "their", "old", "house")
    lines = [
        " ".join(words[(line * 7 + place * place) % len(words)] for place in range(12)) + "." for line in range(300)
    ]
    (tmp_path / "text.txt").write_text("\n\n".join(lines))
    rows = "\n".join(f"{line}\t{len(set(line.split()))}.0" for line in lines[:80])
    (tmp_path / "rows.tsv").write_text("text\tlabel\n" + rows + "\n")
    common = "--plugin outsider cache_dir=cache device=cpu precision=fp32 max_steps=4 max_length=24 evaluate_every=2"
    score = "evaluate --plugin outsider checkpoint=runs/second"
    repeat = "finetune --plugin outsider --config runs/second/config.yaml"
    pretrained, finetuned, evaluated, report, repeated = lmtool(
        tmp_path,
        f"pretrain {common} model=averager data=text data.path=text.txt batch_tokens=256 name=first",
        f"finetune {common} task=graded task.path=rows.tsv tuning=vectors checkpoint=runs/first name=second",
        f"{score} device=cpu",
        "python from lmtool.reporting.report import repeat_commands; from lmtool.reporting.run_files import read_run; "
        "print(*repeat_commands(read_run('runs/second')), sep=chr(10))",
        f"{repeat} --cfg job",
    )
    # The commands that are printed at the end and in the report name the plugin.
    assert f" lmtool {score}\n" in finetuned[1] and f"lmtool {repeat}\n" in report[1] and repeated[0] == 0
    assert pretrained[0] == 0, pretrained[2]
    assert finetuned[0] == 0, finetuned[2]
    assert evaluated[0] == 0, evaluated[2]
    first = json.loads((tmp_path / "runs" / "first" / "result.json").read_text())
    second = json.loads((tmp_path / "runs" / "second" / "result.json").read_text())
    assert (first["model"], first["objective"], first["steps"]) == ("averager", "every_nth", 4)
    assert (second["task"], second["metric"]) == ("graded", "pearson")
    assert second["trainable_parameters"] < second["parameters"]
    # The saved run names its plugin and does not import it.
    ((status, _, error, _),) = lmtool(tmp_path, "evaluate checkpoint=runs/second")
    assert status == 2 and "--plugin outsider" in error and "Traceback" not in error


def test_plugin_with_two_models_and_windowed_tagging_task_train(tmp_path: Path) -> None:
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "some", "dogs", "ran", "to", "their", "old", "house")
    lines = np.random.default_rng(0).choice(words, (120, 30)).tolist()
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(line) + "." for line in lines))
    rows = [f"{' '.join(line)}\t{' '.join('D' if word in ('the', 'a') else 'O' for word in line)}" for line in lines]
    (tmp_path / "rows.tsv").write_text("\n".join(["words\ttags", *rows]) + "\n")
    common = "--plugin outsider cache_dir=cache device=cpu precision=fp32 max_length=16"
    pretrain = f"pretrain {common} model=bert_tiny objective=two_models data=text data.path=text.txt batch_tokens=256"
    finetune = f"finetune {common} task=tagging task.path=rows.tsv checkpoint=runs/pair batch_examples=8"
    answers = lmtool(
        tmp_path,
        f"{pretrain} max_steps=4 evaluate_every=2 name=pair",
        f"{finetune} max_steps=80 evaluate_every=40 optimizer.lr=2e-3 name=tags",
        "evaluate --plugin outsider checkpoint=runs/tags device=cpu precision=fp32 output=again.jsonl",
        "predict --plugin outsider checkpoint=runs/tags device=cpu precision=fp32 'text=the dogs sat on a mat'",
    )
    assert [answer[0] for answer in answers] == [0, 0, 0, 0], "\n".join(answer[2] for answer in answers)
    metrics = json.loads((tmp_path / "runs" / "pair" / "result.json").read_text())["metrics"]
    assert {"first_loss", "second_loss", "first_baseline"} <= metrics.keys()
    result = json.loads((tmp_path / "runs" / "tags" / "result.json").read_text())
    assert result["value"] > result["baseline"], "the tags are a function of the words"
    predictions = [json.loads(line) for line in (tmp_path / "runs" / "tags" / "predictions.jsonl").open()]
    # Texts of thirty words in windows of fourteen: every word has one tag after the windows are merged.
    assert predictions and all(len(row["words"]) == len(row["gold"]) == len(row["prediction"]) for row in predictions)
    assert (tmp_path / "again.jsonl").read_text().splitlines() == [json.dumps(row) for row in predictions]
    assert "'D'" in answers[3][1] and "'O'" in answers[3][1]


def test_non_transformer_plugin_pretrains_resumes_and_finetunes(tmp_path: Path) -> None:
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "some", "dogs", "ran", "to", "their", "old", "house")
    lines = [" ".join(words[(line + 3 * place) % 14] for place in range(20)) for line in range(200)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines))
    rows = [f"{line}\t{'odd' if number % 2 else 'even'}" for number, line in enumerate(lines)]
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    common = "--plugin outsider cache_dir=cache device=cpu precision=fp32 max_length=24"
    pretrain = f"pretrain {common} model=gated data=text data.path=text.txt batch_tokens=256"
    pretrain += " checkpoint_every=10 evaluate_every=20 keep_optimizer=all"
    finetune = f"finetune {common} task=classification task.path=rows.tsv checkpoint=runs/alone max_steps=10"
    answers = lmtool(
        tmp_path,
        f"{pretrain} max_steps=40 name=alone",
        cut_off("alone", "step_00000040"),
        f"{pretrain} max_steps=40 name=cut",
        f"{finetune} batch_examples=8 name=classes",
        "predict --plugin outsider checkpoint=runs/alone device=cpu precision=fp32 'text=the on'",
        f"plan pretrain {common} model=gated data=text data.path=text.txt batch_tokens=256 max_steps=40",
    )
    assert [answer[0] for answer in answers] == [0] * 6, "\n".join(answer[2] for answer in answers)
    weights = Path("checkpoints") / "step_00000040" / "model.safetensors"
    runs = tmp_path / "runs"
    assert (runs / "cut" / weights).read_bytes() == (runs / "alone" / weights).read_bytes()
    result = json.loads((tmp_path / "runs" / "alone" / "result.json").read_text())
    assert result["value"] < result["baseline"], "the next word is a function of the previous one"
    assert answers[4][1].startswith("the on") and len(answers[4][1].split()) > 3


def test_plugin_tuning_with_modules_and_virtual_tokens_round_trips(tmp_path: Path) -> None:
    words = ("the", "cat", "sat", "on", "a", "mat", "and", "some", "dogs", "ran", "to", "their", "old", "house")
    lines = [" ".join(row) for row in np.random.default_rng(0).choice(words, (160, 12)).tolist()]
    (tmp_path / "text.txt").write_text("\n\n".join(f"{line}. {line}." for line in lines))
    rows = [f"{line}\t{'cat' if 'cat' in line else 'none'}" for line in lines]
    (tmp_path / "rows.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    common = "--plugin outsider cache_dir=cache device=cpu precision=fp32 max_length=24"
    tune = f"finetune {common} task=classification task.path=rows.tsv checkpoint=runs/base tuning=prompted max_steps=20"
    tune += " batch_examples=8 checkpoint_every=10 evaluate_every=10 keep_optimizer=all"
    run, cut = tmp_path / "runs" / "tuned", tmp_path / "runs" / "cut"
    answers = lmtool(
        tmp_path,
        f"pretrain {common} model=bert_tiny objective=mlm data=text data.path=text.txt batch_tokens=256 max_steps=4 "
        "name=base",
        f"{tune} name=tuned",
        cut_off("tuned", "step_00000020"),
        f"{tune} name=cut",
        "evaluate --plugin outsider checkpoint=runs/tuned device=cpu precision=fp32 output=again.jsonl",
        "predict --plugin outsider checkpoint=runs/tuned device=cpu precision=fp32 "
        "'text=the cat ran' output=first.jsonl",
        f"plan {tune}",
        "python " + LOADED,
        "export --plugin outsider checkpoint=runs/tuned output=exported",
    )
    assert [answer[0] for answer in answers] == [0] * 8 + [2], "\n".join(answer[2] for answer in answers)
    assert "added backbone.embed.virtual.weight and 8 more tensors, which cannot be merged" in answers[8][2]
    assert not (tmp_path / "exported").exists()
    (row,) = map(json.loads, (tmp_path / "first.jsonl").read_text().splitlines())
    label, score = answers[7][1].split()
    assert label == row["prediction"] and float(score) == pytest.approx(row["score"], abs=1e-5)
    weights = Path("checkpoints") / "step_00000020" / "model.safetensors"
    assert (cut / weights).read_bytes() == (run / weights).read_bytes(), "resumed bit for bit"
    assert (tmp_path / "again.jsonl").read_text() == (run / "predictions.jsonl").read_text()
    tensors = load_file(run / weights)
    added = {name for name in tensors if "virtual" in name or "adapter" in name}
    assert "backbone.embed.virtual.weight" in added and len(added) == 1 + 2 * 4
    assert added == {name for name in tensors if name.startswith("backbone.")}, "frozen weights are in the base only"
    result = json.loads((run / "result.json").read_text())
    learned = sum(tensors[name].numel() for name in tensors if name in added or name.startswith("heads."))
    assert result["trainable_parameters"] == learned


def test_installed_plugin_is_found_by_entry_point(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "outsider-1.0.dist-info").mkdir(parents=True)
    (site / "outsider-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    (site / "outsider-1.0.dist-info" / "entry_points.txt").write_text("[lmtool.plugins]\nmine = outsider\n")
    (site / "outsider").symlink_to(OUTSIDE / "outsider")
    listed, job = lmtool(tmp_path, "list model", "pretrain model=averager --cfg job", path=site)
    assert "averager" in listed[1] and job[0] == 0
    (site / "outsider-1.0.dist-info" / "entry_points.txt").write_text("[lmtool.plugins]\nmine = gone\n")
    ((status, _, error, _),) = lmtool(tmp_path, "pretrain model=bert_tiny --cfg job", path=site)
    assert status == 2 and "installed plugin mine" in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("raise RuntimeError('broken')", "--plugin mine cannot be imported: RuntimeError: broken"),
        (
            "from hydra.core.config_store import ConfigStore\n"
            "ConfigStore.instance().store(group='model', name='bert', node={'name': 'bert'})\n",
            "a plugin registers model=bert, but lmtool has a YAML of that name",
        ),
    ],
)
def test_unusable_plugins_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(content)
    ((status, _, error, _),) = lmtool(tmp_path, "pretrain --plugin mine model=bert_tiny")
    assert status == 2 and message in error
