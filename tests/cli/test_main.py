"""The command line: help, errors, exit statuses. Commands themselves are not run here."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmtool.cli import help
from lmtool.cli import main as cli
from lmtool.commands import demo, show
from lmtool.config import compose, messages
from lmtool.config.messages import known_keys
from lmtool.errors import CheckFailed, Diverged, Stopped
from lmtool.resolver import verbs
from lmtool.resolver.verbs import command_classes
from lmtool.runs.identity import BUDGETS
from lmtool.system.files import write_manifest

ROOT = Path(cli.__file__).resolve().parents[2]
HEAVY = ("torch", "hydra", "omegaconf", "pydantic", "rich", "yaml", "numpy", "datasets")


def python(code: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120
    )


def test_help_imports_only_standard_library(tmp_path: Path) -> None:
    code = (
        "import sys; from lmtool.cli.main import main\n"
        "a, b, c = main([]), main(['--help']), main(['pretrain', '--help'])\n"
        f"print('loaded', [one for one in {HEAVY!r} if one in sys.modules], a, b, c)"
    )
    done = python(code, tmp_path)
    assert done.stdout.splitlines()[-1] == "loaded [] 0 0 0", done.stdout + done.stderr
    for verb in verbs.VERBS:
        assert f"  {verb} " in done.stdout and verbs.VERBS[verb].example in done.stdout
    assert "max_steps: auto" in done.stdout


@pytest.mark.parametrize("verb", list(verbs.VERBS))
def test_every_command_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--help"]) == 0
    assert verbs.VERBS[verb].example in capsys.readouterr().out


# Command lines and the text their errors must contain. All exit with status 2 and, with few exceptions, print a hint.
ERRORS: list[tuple[str, list[str]]] = [
    ("pretran", ["unknown command pretran", "did you mean lmtool pretrain?"]),
    ("model=bert", ["unknown command model=bert", "write a command first"]),
    ("pretrain --multirn", ["unknown flag --multirn", "did you mean --multirun?"]),
    ("pretrain --experimental-rerun x", ["unknown flag --experimental-rerun"]),
    ("pretrain --cfg all", ["--cfg job"]),
    ("pretrain --config", ["needs a value"]),
    ("pretrain --config nowhere.yaml", ["nowhere.yaml: No such file"]),
    ("pretrain --config-dir nowhere", ["--config-dir nowhere: no such folder", "with the structure of conf/"]),
    ("pretrain --plugin no.such.module", ["--plugin no.such.module cannot be imported"]),
    (f"pretrain optimizer.{'q' * 5000}=1", ["the key has more than 200 bytes", "more than 200 bytes"]),
    ("q" * 5000, ["unknown command qqq"]),
    (f"show {'q' * 5000}", ["unknown key qqq", "lmtool list"]),
    (f"pretrain optimizer.betas={'[' * 2000}{']' * 2000}", ["optimizer.betas: the value is nested too deeply"]),
    (f"pretrain optimizer.betas={'[' * 300}{']' * 300}", ["nested too deep"]),
    (f"pretrain optimizer.betas={'[' * 60}{']' * 60}", ["nested more than 50 deep"]),
    ("pretrain model.num_layers=100000", ["model.num_layers: given 100000", "at most 1000"]),
    ("pretrain model.vocab_size=2147483647", ["model.vocab_size: given 2147483647", "at most 10000000"]),
    ("tokenizer output=x tokenizer.vocab_size=2147483647", ["tokenizer.vocab_size: given 2147483647", "at most 1000"]),
    (f"pretrain seed={'9' * 30}", ["seed: the number has more than 64 bits"]),
    (f"pretrain seed={'9' * 5000}", ["seed: the value is too long for a number"]),
    ("pretrain name=latest", ["runs/latest is a link to the newest run", "lmtool resume runs/latest"]),
    ("pretrain run_dir=/dev/null", ["run_dir=/dev/null: /dev/null is a file, not a folder"]),
    ("pretrain run_dir=/dev/null/x", ["run_dir=/dev/null/x: /dev/null is a file, not a folder"]),
    (
        "export checkpoint=nowhere output=/dev/null",
        ["output=/dev/null: /dev/null is a file, not a folder"],
    ),
    ("tokenizer output=/dev/null tokenizer.vocab_size=300", ["/dev/null is a file, not a folder"]),
    ("predict checkpoint=nowhere text=a output=/dev", ["output=/dev is a folder", "output=/dev/predictions.jsonl"]),
    ("predict checkpoint=nowhere text=a output=no/x", ["output=no/x: there is no folder no", "mkdir -p no"]),
    ("predict checkpoint=nowhere text=a output=/dev/null", ["output=/dev/null is a device, not a file"]),
    ("finetune task=sst2 checkpoint=hf://../x", ["checkpoint=hf://../x is not a valid repository name"]),
    ("finetune task=sst2 checkpoint=hf://a--b/c", ["checkpoint=hf://a--b/c is not a valid repository name"]),
    ("predict text=a checkpoint=hf://a/b@../../c", ["../../c is not a branch, tag or commit"]),
    (
        "pretrain --plugin ./my.py",
        ["--plugin ./my.py is a path", "--plugin my, with PYTHONPATH=."],
    ),
    ("pretrain --plugin mine/my.py", ["--plugin my, with PYTHONPATH=mine"]),
    ("pretrain --plugin /mine/my.py", ["--plugin my, with PYTHONPATH=/mine"]),
    ("pretrain modle=bert", ["unknown key modle", "did you mean model=bert?"]),
    ("finetune task=wikitext", ["task=wikitext is not one of", "`lmtool list task`"]),
    ("pretrain model=bertt", ["model=bertt is not one of the ", "did you mean model=bert?"]),
    ("pretrain optimizer.lrr=1", ["unknown key optimizer.lrr", "did you mean optimizer.lr=1?"]),
    ("pretrain +optimizer.lrr=1", ["unknown key optimizer.lrr", "did you mean optimizer.lr=1?"]),
    ("pretrain optim.lr=1", ["unknown key optim.lr", "did you mean optimizer.lr=1?"]),
    ("pretrain command=finetune", ["unknown key command"]),
    ("pretrain version=1", ["unknown key version"]),
    ("pretrain lr=3", ["unknown key lr", "did you mean optimizer.lr=3?"]),
    ("pretrain optimizer.lr=abc", ['optimizer.lr: given "abc" (text); allowed: a number, above 0']),
    ("pretrain optimizer.lr=nan", ["optimizer.lr: given NaN"]),
    ("pretrain optimizer.lr=-1", ["optimizer.lr: given -1", "above 0"]),
    (
        "pretrain data=pydocs data.packages.x=0",
        ["data.packages.x=0: data.packages is a list without this item", "set the whole list: data.packages=[...]"],
    ),
    ("-m pretrain data=pydocs data.packages.x=0,1", ["data.packages.x=0: data.packages is a list without this item"]),
    ("pretrain phases.x=1", ["phases.x=1: phases is a list without this item", "set the whole list: phases=[...]"]),
    ("pretrain phases.x.y=1", ["phases is a list without this item", "set the whole list: phases=[...]"]),
    ("finetune task=custom task.text.9=a", ["task.text is a list without this item", "task.text=[...]"]),
    (
        "pretrain optimizer.betas=[0.9]",
        ["optimizer.betas: given [0.9] (list); allowed: a list of 2 values, each a number, at least 0, below 1"],
    ),
    (
        "pretrain optimizer.betas=[1,1]",
        ["optimizer.betas[0]: given 1 (whole number); allowed: a list of 2 values, each a number, at least 0"],
    ),
    (
        "pretrain optimizer.lr=1000",
        ["optimizer.lr: given 1000 (whole number)", "a number, above 0, at most 100"],
    ),
    ("pretrain model=t5_tiny optimizer.lr=1000", ["allowed: a number, above 0, at most 100"]),
    (
        "pretrain optimizer.epsilon=1e20",
        ["optimizer.epsilon: given 1e+20 (number)", "above 0, at most 1"],
    ),
    ("pretrain schedule.warmup_steps=5 schedule.warmup_fraction=0.5", ["exclude each other", "keep one of them"]),
    ("-m pretrain seed=1,2 schedule.warmup_steps=5 schedule.warmup_fraction=0.5", ["exclude each other"]),
    ("pretrain hydra.foo=1", ["hydra.foo=1: lmtool uses only these keys of Hydra"]),
    ("pretrain hydra.run.dir=", ["run_dir=FOLDER sets"]),
    ("pretrain seed=1 seed=2", ["seed=1 and seed=2: a key may be set only once"]),
    ("pretrain --config a --config b", ["--config is set twice"]),
    ("inspect pretrain n=1 n=2", ["n=2: n is set twice"]),
    ("pretrain max_steps='3'", ['max_steps: given "3" (text)', "hint: write max_steps=3"]),
    ("pretrain experimnt=bert_tiny", ["did you mean experiment=bert_tiny?"]),
    ("pretrain debgu=short", ["did you mean debug=short?"]),
    ("finetune modle=bert_tiny task=pydocs", ["unknown key modle\nhint: did you mean model=bert_tiny?\n"]),
    ("finetune chekpoint=runs/x task=pydocs", ["unknown key chekpoint\nhint: did you mean checkpoint=runs/x?\n"]),
    (
        "finetune task=pydocs checkpoint=none",
        ["model=auto: no model is set by the checkpoint", "or model=bert_tiny"],
    ),
    (
        "pretrain data=text data.path=café.txt modle=bert",
        ["error: unknown key modle\nhint: did you mean model=bert?\n"],
    ),
    ("pretrain model.hidden_size=-4", ["model.hidden_size: given -4", "at least"]),
    ("pretrain model.num_heads=7", ["model.hidden_size=768 is not a multiple of model.num_heads=7"]),
    ("pretrain max_steps=1e3", ["max_steps: given 1000.0", "write max_steps=1000"]),
    ("pretrain precision=fp15", ["auto, fp32, bf16 or fp16", "did you mean precision="]),
    ("pretrain device=gpu", ["device: given", "did you mean device=cuda?"]),
    ("pretrain name=my%run", ["name: given", "text that matches"]),
    ("pretrain data=text", ["missing required value: data.path", "set data.path="]),
    ("pretrain data=text data.path=it's", ["special meaning", "quote it"]),
    ("pretrain ~optimizer", ["~optimizer: a section cannot be removed"]),
    ("pretrain optimizer=null", ["missing required value: optimizer"]),
    ("pretrain ~seed", ["~seed: a value cannot be removed"]),
    ("pretrain objective=[mlm,clm]", ["takes one objective", "-m objective=mlm,clm"]),
    ("pretrain optimizer.lr=1e-3,1e-4", ["has several values, but a run takes one", "-m"]),
    (
        "pretrain model=gpt_tiny objective=mlm",
        ["objective=mlm trains an encoder; model=gpt", "set model=bert or objective=auto"],
    ),
    (
        "pretrain model=bart_tiny tokenizer=bytebpe",
        ["tokenizer=bytebpe has no cls token, which model=bart adds to its texts", "set tokenizer=auto"],
    ),
    (
        "finetune model=t5_tiny checkpoint=none task=sst2 task.path=x tokenizer=wordpiece",
        ["tokenizer=wordpiece has no eos token, which model=t5 adds to its texts"],
    ),
    ("pretrain model=bert_tiny objective=clm", ["set model=gpt or objective=auto"]),
    ("pretrain model=t5_tiny objective=span", ["set model=spanbert or objective=auto"]),
    ("pretrain model=bart_tiny objective=rtd", ["set model=electra or objective=auto"]),
    ("pretrain model=bert model=gpt", ["model=bert and model=gpt: a run takes one model"]),
    ("pretrain model=bert_base", ["did you mean model=bert?"]),
    ("pretrain batch_size=8", ["did you mean batch_examples=8 batch_tokens=null?"]),
    ("pretrain runs/first", ["runs/first is not an override", "checkpoint=runs/first"]),
    (
        "pretrain objective=mixture objective.members=[mlm,mlmm]",
        ["mlmm is not one of bilm, clm, denoising, glove, mixture, mlm,"],
    ),
    (
        "pretrain objective=mixture objective.members=[{whole_word:true}]",
        ["a section has no name, which must be one of"],
    ),
    (
        "pretrain objective=mixture objective.members=[mlm,mlm]",
        ["members=[mlm, mlm] repeats a name or has a mixture: name each objective once"],
    ),
    (
        "pretrain objective=mixture objective.members=[span,clm]",
        ["objective.members: objective=clm trains a decoder", "set objective=auto"],
    ),
    ("pretrain model=bert_tiny tokenizer=bytebpe", ["has no cls token", "set tokenizer=auto"]),
    ("pretrain model=roberta_tiny tokenizer=bytebpe", ["tokenizer=bytebpe has no cls token"]),
    ("pretrain model=gpt_tiny tokenizer=wordpiece", ["has no eos token", "set tokenizer=auto"]),
    (
        "pretrain model=electra_tiny objective.training=two_stage",
        ["objective.generator_steps=10000 leaves the model no step", "objective.generator_steps=5000"],
    ),
    ("finetune task=pydocs experiment=bert_tiny", ["experiment=bert_tiny sets objective, which this command"]),
    ("pretrain model=bert_tiny max_length=1024", ["max_length=1024 is more than model.max_positions=512"]),
    (
        "finetune model=bert_tiny task=sst2 task.validation=[train] task.test=[test,Train]",
        ["task.validation: train is the training split", "task.test: Train is the training split"],
    ),
    ("pretrain max_steps=null", ["missing budget: one"]),
    ("pretrain batch_examples=8", ["batch_examples=8 and batch_tokens=2048"]),
    ("pretrain task=sst2", ["this command has no task"]),
    ("pretrain checkpoint=runs/none", ["checkpoint=runs/none: no such folder"]),
    ("pretrain experiment=bert_tny", ["did you mean experiment=bert_tiny?"]),
    ("pretrain plugins=[os]", ["type --plugin os"]),
    ("finetune", ["missing required value: task", "`lmtool list task`", "model=auto"]),
    ("finetune task=sst2 offline=true", ["checkpoint=hf://google-bert/bert-base-uncased: config.json", "task.path="]),
    ("finetune task=[sst2,cola]", ["takes one task", "-m task=sst2,cola"]),
    ("finetune model=bert_tiny task=custom", ["missing required value: task.path"]),
    ("finetune model=bert_tiny task=sst2 task.labels=[true,false]", ["quote it"]),
    (
        "finetune model=bert_tiny task=sst2 task.loss.label_smoothin=0.1",
        ["task.loss.label_smoothing=0.1?"],
    ),
    ("finetune model=bert_tiny task=sst2 tuning=lore", ["tuning=lore is not one of", "did you mean tuning=lora?"]),
    ("-m finetune model=bert_tiny task=sst2,colla seed=1,2", ["did you mean task=cola?"]),
    ("-m pretrain seed=1,-2 max_stepss=3", ["seed: given -2", "did you mean max_steps=3?"]),
    ("-m predict checkpoint=x", ["does not sweep"]),
    ("evaluate", ["missing required value: checkpoint"]),
    ("predict checkpoint=nowhere text=a", ["checkpoint=nowhere: no such folder"]),
    ("tokenizer", ["missing required value: output"]),
    ("tokenizer output=x tokenizer=folder tokenizer.path=y", ["is trained already", "wordpiece"]),
    ("plan evaluate", ["plans pretrain or finetune"]),
    ("plan pretrain modle=bert", ["did you mean model=bert?"]),
    ("list tasc", ["there is no group tasc", "lmtool list task"]),
    ("show", ["show needs a key"]),
    ("show optimizer.lrr", ["unknown key optimizer.lrr", "lmtool show optimizer.lr"]),
    ("show model=bertt", ["did you mean model=bert?"]),
    ("show modle=bert", ["there is no group modle", "lmtool show model=bert"]),
]

RUN_ALL = """
import contextlib, io, json, shlex, sys
from lmtool.cli.main import main
answers = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(shlex.split(line.replace("'", "\\\\'")))
    answers.append([line, status, out.getvalue(), err.getvalue()])
print(json.dumps({"answers": answers, "torch": "torch" in sys.modules}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of every command line in ERRORS, run in an empty folder; one process imports lmtool once for all."""
    folder = tmp_path_factory.mktemp("empty")
    done = python(RUN_ALL, folder, json.dumps([line for line, _ in ERRORS]))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"left": [str(path) for path in folder.rglob("*")]}


def test_errors_import_no_torch_and_write_no_files(answers: dict[str, Any]) -> None:
    assert len(ERRORS) >= 40
    assert answers["torch"] is False and answers["left"] == []


@pytest.mark.parametrize("index", range(len(ERRORS)), ids=[line for line, _ in ERRORS])
def test_error_has_message_and_hint(index: int, answers: dict[str, Any]) -> None:
    line, status, out, error = answers["answers"][index]
    assert status == 2, error
    assert "Traceback" not in error + out and error.startswith("error: ") and out == ""
    assert all(text.startswith(("error: ", "hint: ")) for text in error.splitlines()), error
    for part in ERRORS[index][1]:
        assert part in error, error


def test_misspelled_task_is_not_reported_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["finetune", "taskk=sst2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown key taskk\nhint: did you mean task=sst2?\n") and "missing" not in error


def test_invalid_config_dir_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_conf").mkdir()
    assert cli.main(["pretrain", "--config-dir", str(tmp_path / "my_cnof")]) == 2
    assert f"did you mean --config-dir {tmp_path / 'my_conf'}?" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.main(["pretrain", "--config-dir", str(tmp_path / "file")]) == 2
    assert "file: a file, not a folder" in capsys.readouterr().err


def test_overlays_are_groups_without_config_section() -> None:
    for verb, command in command_classes().items():
        primary = verbs.VERBS[verb].primary
        assert primary is not None
        groups = set(compose.accepted_overrides(primary).primary) - {"_self_", "local"}
        assert groups - command.model_fields.keys() == set(command.overlays), verb


def test_all_errors_are_printed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "modle=bert", "seed=-1", "max_length=x"]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 3 and error.count("hint: ") == 3


def test_printed_config_can_be_reused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--cfg", "job", "pretrain", "model=bert_tiny", "seed=3"]) == 0
    first = capsys.readouterr().out
    (tmp_path / "c.yaml").write_text(first)
    assert cli.main(["pretrain", "--config", str(tmp_path / "c.yaml"), "--cfg=job"]) == 0
    assert capsys.readouterr().out == first
    assert cli.main(["pretrain", "--config", str(tmp_path / "c.yaml"), "seed=4", "optimizer.lr=0.5", "--cfg=job"]) == 0
    changed = capsys.readouterr().out
    assert "seed: 4" in changed and "lr: 0.5" in changed and "hidden_size: 128" in changed
    assert cli.main(["finetune", "--config", str(tmp_path / "c.yaml")]) == 2
    assert "lmtool pretrain --config" in capsys.readouterr().err
    assert cli.main(["pretrain", "--config", str(tmp_path / "c.yaml"), "model=gpt"]) == 2


@pytest.mark.parametrize(
    ("words", "budgets"),
    [
        ("pretrain", {"max_steps": 10_000}),
        ("pretrain max_tokens=100000000", {"max_tokens": 100_000_000}),
        ("pretrain max_minutes=5 max_epochs=2", {"max_epochs": 2.0, "max_minutes": 5.0}),
        ("pretrain max_tokens=null", {"max_steps": 10_000}),
        ("pretrain max_steps=7 max_tokens=9", {"max_steps": 7, "max_tokens": 9}),
        ("pretrain experiment=bert_tiny max_tokens=9", {"max_steps": 6000, "max_tokens": 9, "max_minutes": 9.0}),
        ("pretrain experiment=bert_tiny max_minutes=null", {"max_steps": 6000}),
        ("finetune task=sst2", {"max_epochs": 3.0}),
        ("finetune task=sst2 max_steps=1000", {"max_steps": 1000}),
        ("finetune task=sst2 debug=short", {"max_steps": 20}),
        ("finetune task=sst2 max_steps=9 max_epochs=2", {"max_steps": 9, "max_epochs": 2.0}),
    ],
)
def test_budget_override_replaces_default_budget(words: str, budgets: dict[str, float]) -> None:
    verb, *typed = words.split()
    config = cli.configuration(verb, cli.parse([*typed, "model=bert_tiny"]), running=False)
    assert {key: value for key in BUDGETS if (value := getattr(config, key)) is not None} == budgets


def test_saved_config_keeps_its_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--cfg", "job", "pretrain", "model=bert_tiny"]) == 0
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    again = cli.parse(["--config", str(tmp_path / "c.yaml"), "max_tokens=9"])
    config = cli.configuration("pretrain", again, running=False)
    assert (config.max_steps, config.max_tokens) == (10_000, 9)


def test_sweep_jobs_have_separate_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["finetune", "-m", "model=bert_tiny", "task=sst2", "max_steps=null,100", "--cfg", "job"]
    assert cli.main(words) == 0
    jobs = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [(job["max_steps"], job["max_epochs"]) for job in jobs] == [(None, 3.0), (100, None)]


def saved_checkpoint(folder: Path, *typed: str) -> Path:
    """A checkpoint's folder with a configuration and no weights."""
    from lmtool.config import saved

    arguments = cli.parse(typed)
    step = folder / "checkpoints" / "step_00000010"
    step.mkdir(parents=True)
    config = cli.configuration("pretrain", arguments, running=False)
    (step / "config.json").write_text(json.dumps(saved.save(config, "pretrain")))
    for name in ("model.safetensors", "state.json"):
        (step / name).write_text("{}")
    write_manifest(step, {"step": 10})
    return folder


def test_checkpoint_sets_model_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved_checkpoint(tmp_path / "run", "model=gpt_tiny", "model.num_layers=3", "tokenizer.minimum_count=5")
    typed = ["finetune", "task=pydocs", f"checkpoint={run}"]
    config = cli.configuration("finetune", cli.parse([*typed[1:], "model.dropout=0.0"]), running=False)
    assert (config.model.name, config.model.num_layers, config.model.dropout) == ("gpt", 3, 0.0)
    assert config.tokenizer.name == "bytebpe" and config.tokenizer.minimum_count == 5
    assert config.optimizer.lr == 3e-4 and config.schedule.warmup_fraction == 0.1
    assert cli.main([*typed, "model=bert_tiny"]) == 2
    assert "model.name=bert, but the checkpoint has model.name=gpt" in capsys.readouterr().err
    assert cli.main([*typed, "model=gpt_tiny", "--cfg", "job"]) == 2
    assert "model.num_layers=2, but the checkpoint has model.num_layers=3" in capsys.readouterr().err
    config = cli.configuration("evaluate", cli.parse([f"checkpoint={run}", "data.max_bytes=20000"]), running=False)
    assert config.task is None and config.data.name == "pydocs" and config.data.max_bytes == 20000


def test_checkpoint_none_in_sweep_copies_model_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved_checkpoint(tmp_path / "run", "model=gpt_tiny", "model.num_layers=3", "tokenizer.minimum_count=5")
    words = ["finetune", "-m", "task=pydocs", "--cfg", "job"]
    assert cli.main([*words, f"checkpoint={run},none"]) == 0
    pretrained, random = (yaml.safe_load(job) for job in capsys.readouterr().out.split("---\n"))
    assert pretrained["checkpoint"] == str(run) and random["checkpoint"] == "none"
    assert pretrained["model"] == random["model"] and random["model"]["num_layers"] == 3
    assert (random["tokenizer"]["name"], random["tokenizer"]["path"]) == ("folder", str(run))
    assert {key for key in random if random[key] != pretrained[key]} == {"checkpoint", "tokenizer"}
    assert cli.main([*words, f"checkpoint={run},other,none"]) == 2
    assert "but there are 2 others" in capsys.readouterr().err


def test_checkpoint_name_too_long_has_short_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "checkpoint=" + "x" * 5000, "task=sst2"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: checkpoint=xxx")
    assert "file name too long" in printed
    assert len(printed) < 300


@pytest.mark.parametrize(
    ("raised", "status", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Diverged("loss is nan", "lower optimizer.lr"), 4, "hint: lower optimizer.lr"),
        (CheckFailed("no"), 3, "error: no"),
        (Stopped("stopped at step 3", 143), 143, "stopped at step 3"),
        (ValueError("of ours"), 1, "please report it"),
    ],
)
def test_each_error_has_its_exit_status(
    raised: BaseException, status: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> None:
        raise raised

    monkeypatch.setattr(cli, "run", run)
    assert cli.main(["pretrain", "model=bert_tiny"]) == status
    error = capsys.readouterr().err
    assert says in error and ("Traceback" in error) == (status == 1)


def test_closed_terminal_keeps_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(cli, "run", run)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", Gone())
            assert cli.main(["pretrain", "model=bert_tiny"]) == 143
    finally:
        signal.signal(signal.SIGHUP, before)


def test_debug_prints_traceback_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "verysecretvalue")
    assert cli.main(["pretrain", "run_dr=verysecretvalue", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and "error: unknown key run_dr" in error and "verysecretvalue" not in error


def test_errors_hide_secrets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SOME_TOKEN", "verysecretvalue")
    assert cli.main(["pretrain", "seed=verysecretvalue"]) == 2
    assert "verysecretvalue" not in capsys.readouterr().err


def test_list_and_show_print_groups_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    assert "bert_tiny" in capsys.readouterr().out
    assert cli.main(["list", "model"]) == 0
    assert re.search(r"^  bert_tiny +BERT tiny", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["show", "optimizer.lr"]) == 0
    shown = capsys.readouterr().out
    assert "peak learning rate" in shown and "a number, above 0" in shown and "conf/optimizer/adamw.yaml:" in shown
    assert cli.main(["show", "max_steps"]) == 0
    shown = capsys.readouterr().out
    assert (
        "auto  (conf/pretrain.yaml:" in shown
        and "null  (conf/finetune.yaml:" in shown
        and "10000 if no other budget" in shown
    )
    assert cli.main(["show", "model=bert_tiny"]) == 0
    assert "num_layers: 2" in capsys.readouterr().out
    assert cli.main(["show", "model"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  model.num_layers +number of layers$", shown, re.MULTILINE), (
        "ALBERT's description is used for all models"
    )
    assert "model.name " not in shown
    assert cli.main(["list", "task"]) == 0
    assert re.search(r"^  mnli +MNLI: .* \(Williams et al\. 2018; GLUE\)\.$", capsys.readouterr().out, re.MULTILINE)


def test_show_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {key for command in command_classes().values() for key in known_keys(command, {})}
    assert all(messages.allowed_values(place.field) for place in show.all_fields())
    # One key of each nested section.
    nested = {key.rpartition(".")[0]: key for key in sorted(keys) if key.count(".") > 1}
    assert len(nested) > 8 and cli.main(["show", "task.validation", *nested.values()]) == 0
    assert "  takes:   an empty list" in capsys.readouterr().out


def test_config_dir_adds_user_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# Mine.\ndefaults: [bert_tiny, _self_]\nnum_layers: 3\n")
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "default.yaml").write_text("# @package _global_\nlog_every: 7\n")
    folder = ["--config-dir", str(tmp_path)]
    assert cli.main(["pretrain", "model=mine", *folder, "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "num_layers: 3" in shown and "hidden_size: 128" in shown and "log_every: 7" in shown
    assert cli.main(["list", *folder, "model"]) == 0
    assert re.search(r"^  mine +Mine\.", capsys.readouterr().out, re.MULTILINE)
    (tmp_path / "model" / "mine.yaml").write_text("num_layers: [")
    assert cli.main(["pretrain", "model=mine", *folder]) == 2
    assert "mine.yaml:" in capsys.readouterr().err
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [bret, _self_]\n")
    assert cli.main(["pretrain", "model=mine", *folder]) == 2
    assert "did you mean model=bert?" in capsys.readouterr().err


def test_resume_with_cfg_job_prints_config_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "run", lambda *_: pytest.fail("the run was trained"))
    assert cli.main(["pretrain", "model=bert_tiny", "seed=3", "--cfg", "job"]) == 0
    (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
    assert cli.main(["resume", str(tmp_path), "--cfg", "job"]) == 0
    assert "seed: 3" in capsys.readouterr().out


def test_deleted_working_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    # Python 3.13.0 cannot import socket from a deleted folder.
    code = "from lmtool.cli.main import main; import os; os.rmdir(os.getcwd()); raise SystemExit(main(['list']))"
    done = python(code, tmp_path / "gone")
    assert done.returncode == 2 and "error: the working folder has been deleted" in done.stderr, done.stderr


class PanicException(BaseException):
    """Stands for the exception that a panic in a Rust library raises."""


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (RuntimeError("can't start new thread"), "no further thread or process can be started", "ulimit -u"),
        (PanicException("ThreadPoolBuildError { kind: IOError }"), "no further thread or process", "ulimit -u"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "temporarily unavailable", "ulimit -u"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "temporary", "TMPDIR="),
    ],
)
def test_limits_of_the_machine_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, message: str, hint: str
) -> None:
    def fail(words: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_main", fail)
    assert cli.main(["list"]) in (1, 2)
    printed = capsys.readouterr().err
    assert message in printed and hint in printed and "Traceback" not in printed


def test_help_groups_every_command_once() -> None:
    grouped = [name for names in help.PARTS.values() for name in names]
    assert sorted(grouped) == sorted(verbs.VERBS)


@pytest.mark.parametrize(
    ("pretrained", "words"),
    [([0.5, 0.6, 0.55], "pretraining helps"), ([0.2, 0.1, 0.15], "hurts"), ([0.3, 0.4, 0.2], "no clear difference")],
)
def test_demo_says_what_its_scores_show(pretrained: list[float], words: str) -> None:
    assert words in demo.verdict(pretrained, [0.3, 0.31, 0.32])
