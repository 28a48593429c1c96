"""Sweeps on Hydra's basic launcher, with a fake command that only writes a result."""

from __future__ import annotations

import importlib
import json
import math
import pickle
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from lmtool.cli import main as cli
from lmtool.errors import Diverged, Stopped, UserError
from lmtool.reporting.console import Output
from lmtool.sweeps import jobs, plugins, table
from lmtool.sweeps.folders import folder_name
from lmtool.sweeps.job import perform
from lmtool.sweeps.jobs import Launch


@pytest.fixture
def run_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Verbs and configurations of the fake command's calls, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    calls: list[Any] = []

    def run(verb: str, config: Any) -> dict[str, Any]:
        calls.append((verb, config))
        if config.seed == 2:
            raise Diverged("the loss is nan at step 3", "lower optimizer.lr")
        if config.seed == 3:
            raise ValueError("a fault of ours")
        if config.seed == 4:
            raise Stopped("stopped at step 1", 130)
        result = {"metric": "accuracy", "value": 0.5 + config.seed / 10, "status": "done"}
        folder = Path(config.run_dir)
        (folder / "result.json").write_text(json.dumps(result))
        return result

    monkeypatch.setattr(cli, "run", run)
    return calls


def test_sweep_continues_after_failed_job(run_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["finetune", "model=bert_tiny", "task=sst2,cola", "task.path=rows", "seed=0,2,1", "-m"]
    assert cli.main(typed) == 4
    assert [(config.task.name, config.seed) for _, config in run_calls] == [
        ("sst2", 0), ("sst2", 2), ("sst2", 1), ("cola", 0), ("cola", 2), ("cola", 1)
    ]  # fmt: skip
    folder = Path("runs/finetune-sweep-0001")
    places = ["0_task-sst2_seed-0", "1_task-sst2_seed-2", "2_task-sst2_seed-1"]
    assert [config.run_dir for _, config in run_calls[:3]] == [str(folder / place) for place in places]
    assert all(config.name is None for _, config in run_calls)
    assert (run_calls[1][1].task.name, run_calls[1][1].seed) == ("sst2", 2)
    record = json.loads((folder / places[1] / "job.json").read_text())
    assert record["exit_status"] == 4 and record["error"] == "the loss is nan at step 3"
    # Hydra writes nothing into a job's folder.
    assert {path.name for path in (folder / places[0]).iterdir()} == {"job.json", "result.json", "submitted.json"}
    shown = capsys.readouterr()
    ends = [line for line in shown.out.splitlines() if line.startswith("job ") and " of 6" in line]
    assert [line.split(":")[0] for line in ends[:3]] == ["job 0 done", "job 1 failed", "job 2 done"]
    assert "finetune-sweep-0001: 4 of 6 jobs done, 2 failed" in shown.out
    assert "accuracy 0.550 ± 0.050 (mean and standard error, n = 2) on sst2" in shown.out, shown.out
    assert "the loss is nan at step 3" in shown.out and "hint: lower optimizer.lr" in shown.err
    assert (folder / "sweep.html").is_file() and len((folder / "sweep.csv").read_text().splitlines()) == 7
    assert cli.main(typed[:4] + ["seed=1", "-m"]) == 0 and Path("runs/finetune-sweep-0002").is_dir()


def test_only_first_job_prints_its_screens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run(verb: str, config: Any) -> dict[str, Any]:
        with open(f"{config.run_dir}/log.txt", "w") as log:
            output = Output(log=lambda line: log.write(line + "\n"))
            output.rows([("plan", f"10 steps of seed {config.seed}")])
            output.line(f"warning: seed {config.seed} is odd" if config.seed % 2 else "no warning")
        return {"metric": "accuracy", "value": 0.5}

    monkeypatch.setattr(cli, "run", run)
    cli.main(["finetune", "model=bert_tiny", "task=sst2", "task.path=rows", "seed=1,2,3", "-m"])
    printed = capsys.readouterr().out
    assert "10 steps of seed 1" in printed and "seed 1 is odd" in printed
    assert "10 steps of seed 2" not in printed and "no warning" not in printed
    assert "job 1: seed=2\n" in printed and "warning: seed 3 is odd" in printed
    logs = [path.read_text() for path in sorted(Path("runs").glob("*/*/log.txt"))]
    assert [f"10 steps of seed {seed}" in log for seed, log in zip((1, 2, 3), logs, strict=True)] == [True] * 3


def test_worst_job_status_is_exit_status(run_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=3,2,1"]) == 1
    assert len(run_calls) == 3
    assert "ValueError: a fault of ours" in capsys.readouterr().err


def test_interrupt_ends_sweep(run_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=1,4,0"]) == 130
    assert [config.seed for _, config in run_calls] == [1, 4]
    assert "stopped at step 1" in capsys.readouterr().out


def test_error_in_any_configuration_stops_before_first_job(
    run_calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pretrain", "-m", "model=bert_tiny,gpt_tiny", "objective=mlm", "max_length=64,1024"]) == 2
    assert run_calls == [] and not Path("runs").exists()
    error = capsys.readouterr().err
    assert error.count("objective=mlm trains an encoder") == 1 and error.count("max_length=1024 is more") == 1


@pytest.fixture
def no_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "show", lambda folder: [])


@pytest.mark.usefixtures("no_summary")
def test_named_sweep_runs_missing_and_failed_jobs(run_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["pretrain", "-m", "model=bert_tiny", "name=mine"]
    assert cli.main([*typed, "seed=0,2"]) == 4
    again = capsys.readouterr().out
    assert "to resume it: lmtool pretrain -m model=bert_tiny seed=0,2 name=mine" in again
    assert cli.main([*typed, "seed=2,1,0"]) == 4  # a grown grid, in another order
    assert [config.run_dir.removeprefix("runs/mine/") for _, config in run_calls] == [
        "0_seed-0", "1_seed-2", "1_seed-2", "2_seed-1"
    ]  # fmt: skip
    shown = capsys.readouterr().out
    assert "job 0 (0_seed-0): already done, skipped" in shown
    assert "job 1 (1_seed-2): runs again after an error: the loss is nan at step 3" in shown
    assert json.loads(Path("runs/mine/0_seed-0/job.json").read_text())["skipped"] is True
    assert not list(Path("runs").glob("pretrain-sweep-*"))
    # A job folder keeps the values of its first run.
    assert cli.main([*typed, "seed=0,1", "optimizer.lr=1e-3"]) == 2
    assert "optimizer.lr (not typed) -> 1e-3" in capsys.readouterr().err
    assert len(run_calls) == 4 and len(list(Path("runs/mine").glob("*/"))) == 3


@pytest.mark.parametrize("content", [None, "", "{", '{"overrides": 3}'])
def test_job_with_damaged_submitted_file_is_skipped(
    run_calls: list[Any], content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["pretrain", "-m", "model=bert_tiny", "name=mine"]
    assert cli.main([*typed, "seed=0,1"]) == 0
    file = next(Path("runs/mine").glob("1_*/submitted.json"))
    file.unlink()
    if content is not None:
        file.write_text(content)
    capsys.readouterr()
    assert cli.main([*typed, "seed=0,1,5"]) == 0
    shown = capsys.readouterr()
    problem = "missing" if content is None else "damaged"
    assert f"warning: {file} is {problem}; the job is recognized by job.json" in shown.err
    assert "mine: 3 of 3 jobs done" in shown.out
    assert [config.seed for _, config in run_calls] == [0, 1, 5] and len(list(Path("runs/mine").glob("*/"))) == 3


@pytest.mark.usefixtures("no_summary")
def test_grid_grows_by_another_key(run_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["pretrain", "-m", "model=bert_tiny", "name=mine", "seed=0,1"]
    assert cli.main([*typed, "optimizer.lr=1e-3"]) == 0
    assert cli.main([*typed, "optimizer.lr=1e-3,1e-4"]) == 0
    names = [config.run_dir.removeprefix("runs/mine/") for _, config in run_calls]
    assert names == ["0_seed-0", "1_seed-1", "2_seed-0_lr-0.0001", "3_seed-1_lr-0.0001"]
    capsys.readouterr()
    assert cli.main([*typed, "optimizer.lr=1e-3", "max_steps=7"]) == 2
    assert "runs/mine holds a sweep with other values: max_steps (not typed) -> 7" in capsys.readouterr().err
    submitted = Path("runs/mine/0_seed-0/submitted.json")
    record = json.loads(submitted.read_text())
    record["config"]["max_length"] = 7  # as after a change of a YAML or of lmtool's defaults
    submitted.write_text(json.dumps(record))
    assert cli.main([*typed, "optimizer.lr=1e-3"]) == 2
    assert "runs/mine/0_seed-0 holds a job of another configuration: max_length 7 -> " in capsys.readouterr().err


def test_long_overrides_give_valid_folder_names() -> None:
    varied = {"optimizer.lr": "1e-4", "data.path": "/a/b=c,d/" + "long" * 60, "model.things": "[1,2]"}
    name = folder_name(3, varied)
    assert name.startswith("3_lr-1e-4_path-a-b-c-d-longlong") and len(name) == 120
    assert folder_name(0, {}) == "0" and folder_name(7, {"text": "ß?"}) == "7_text"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["name=a,b"], "name=a,b: a sweep has one name"),
        (["run_dir=x"], "run_dir=x: each job of a sweep has a separate folder"),
        *(
            pytest.param([word], message, marks=pytest.mark.slow)
            for word, message in [
                ("name=../x", "is not a valid name"),
                ("hydra.sweep.subdir=x", "hydra.sweep.subdir=x: folders of jobs are named after the varied keys"),
                ("hydra/launcher=jobli", "hydra/launcher=jobli is not one of basic, joblib"),
            ]
        ),
        (["hydra/launcher=joblib", "hydra.launcher.n_job=2"], "n_job"),
        (["hydra.sweeper.max_batch_size=0"], "hydra.sweeper.max_batch_size=0 is not a positive integer"),
        (["hydra.sweeper.params.seed=1"], "this key is for sweep values in YAML"),
        (["hydra/sweeper=optuna", "hydra.sweeper.custom_search_space=os.system"], "never imports a name"),
        pytest.param(
            ["hydra/launcher=submitit_local", "hydra.launcher.nodes=2"], "only one node", marks=pytest.mark.slow
        ),
    ],
)
def test_invalid_sweep_settings_are_refused(
    words: list[str], message: str, run_calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=0,1", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and error.count("error:") == 1, error
    assert run_calls == [] and list(Path().iterdir()) == []


def test_missing_launcher_package_suggests_install(
    run_calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imported = importlib.import_module

    def no_module(name: str) -> ModuleType:
        if name.startswith("hydra_plugins"):
            raise ModuleNotFoundError(name)
        return imported(name)

    monkeypatch.setattr(plugins.importlib, "import_module", no_module)
    monkeypatch.setattr(plugins, "_registered", lambda group: {"basic"})
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=0,1", "hydra/launcher=joblib"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: hydra/launcher=joblib is not installed", "hint: pip install 'lmtool[sweeps]'"
    ]  # fmt: skip


def test_cfg_job_prints_configurations_of_all_jobs(run_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=0,1", "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 0" in shown and "seed: 1" in shown and run_calls == [] and not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (["hydra.sweeper.max_batch_size=1"], [1, 2, 3]),
        (["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=2", "hydra.sweeper.sampler.seed=1"], 2),
        (["hydra/sweeper=optuna", "hydra.sweeper.storage=sqlite:///here.db", "hydra.sweep.dir=there"], 2),
    ],
)
def test_cfg_job_works_with_every_sweeper(
    words: list[str], seeds: list[int] | int, run_calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=1,2,3", *words, "--cfg", "job"]) == 0
    printed = [config["seed"] for config in yaml.safe_load_all(capsys.readouterr().out)]
    assert printed == seeds if isinstance(seeds, list) else len(printed) == seeds and set(printed) <= {1, 2, 3}
    assert run_calls == [] and list(Path().iterdir()) == []


@pytest.mark.usefixtures("no_summary")
def test_max_batch_size_limits_launched_jobs(run_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, launch = [], Launch._launch
    monkeypatch.setattr(Launch, "_launch", lambda self, left: sizes.append(len(left)) or launch(self, left))
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=5,6,7", "hydra.sweeper.max_batch_size=2"]) == 0
    assert sizes == [2, 1] and [config.seed for _, config in run_calls] == [5, 6, 7]


def test_secrets_in_sweep_files_are_masked(run_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "plantedsecret")
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=0,1", "cache_dir=/tmp/plantedsecret"]) == 0
    for file in Path("runs").rglob("*"):
        assert file.is_dir() or "plantedsecret" not in file.read_text(), file


def test_sweeper_receives_metric_of_each_job(run_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra._internal.callbacks import Callbacks

    returned: list[float] = []
    monkeypatch.setattr(
        Callbacks, "on_job_end", lambda self, config, job_return: returned.append(job_return.return_value)
    )
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=0,2,1"]) == 4
    assert returned[0] == 0.5 and math.isnan(returned[1]) and returned[2] == 0.6


def test_unwritable_sweep_folder_is_refused(run_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").write_text("a file")
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=0,1"]) == 2
    assert "error: cannot create the sweep's folder runs" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["2_seed-5", "0_seed-0/job.log"])
def test_links_in_sweep_folder_are_refused(run_calls: list[Any], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep folder itself may be a link; entries in it, as in an unpacked archive, may not."""
    Path("disk/mine").mkdir(parents=True)
    Path("own").mkdir()
    Path("runs").symlink_to("disk")
    typed = ["finetune", "model=bert_tiny", "task=sst2", "task.path=rows", "-m", "name=mine"]
    assert cli.main([*typed, "seed=0,1"]) == 0
    Path("runs/mine", name).symlink_to(Path("own").resolve())
    assert cli.main([*typed, "seed=0,1,5"]) == 2
    assert f"error: runs/mine/{name}: a link is in its place" in capsys.readouterr().err
    assert not [*Path("own").iterdir()]


@pytest.mark.parametrize(("where", "folder"), [("name=mine", "runs/mine"), ("hydra.sweep.dir=mine", "mine")])
def test_nonempty_folder_without_sweep_is_refused(
    run_calls: list[Any], where: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(folder).mkdir(parents=True)
    Path(folder, "sweep.html").write_text("mine")
    assert cli.main(["finetune", "model=bert_tiny", "task=sst2", "task.path=rows", "-m", "seed=0,1", where]) == 2
    assert f"error: {folder} is not empty and not a sweep of lmtool: it has sweep.html" in capsys.readouterr().err
    assert [path.name for path in Path(folder).iterdir()] == ["sweep.html"] and not run_calls


def test_user_error_in_job_exits_with_2(run_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise UserError("no such file", "set data.path=")

    monkeypatch.setattr(cli, "run", run)
    assert cli.main(["pretrain", "-m", "model=bert_tiny", "seed=0,1"]) == 2


def test_unknown_launcher_creates_no_folder(run_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "-m", "seed=0,1", "hydra/launcher=nowhere"]) == 2
    assert "hydra/launcher=nowhere is not one of" in capsys.readouterr().err
    assert not list(Path().glob("runs/*"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("hydra: {launcher: {_target_: os.system}}", "hydra.launcher._target_"),
        ("hydra: {sweeper: {params: {seed: '0,1'}, _target_: os.system}}", "hydra.sweeper._target_"),
        ("hydra: {callbacks: {mine: {_target_: pathlib.Path.touch}}}", "hydra.callbacks.mine._target_"),
        ("hydra: {job: {chdir: true}}", "hydra.job.chdir"),
        ("mine: [{_target_: os.system}]", "mine._target_"),
        ("hydra: {launcher: {n_jobs: 2}}", "hydra.launcher.n_jobs"),
        ("hydra: true", "hydra"),
        ("defaults: [{override /hydra/launcher: joblib}]", "hydra/launcher"),
    ],
)
@pytest.mark.parametrize("words", [["-m", "seed=0,1"], ["--cfg", "job"]])
def test_hydra_settings_in_yaml_are_refused(
    section: str, message: str, words: list[str], run_calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("mine/experiment")
    folder.mkdir(parents=True)
    (folder / "odd.yaml").write_text(f"# @package _global_\n{section}\n")
    assert cli.main(["pretrain", "model=bert_tiny", *words, "--config-dir", "mine", "experiment=odd"]) == 2
    error = capsys.readouterr().err
    assert f"odd.yaml: {message} cannot be set in YAML" in error and "hint: remove it" in error
    assert run_calls == [] and [path.name for path in Path().iterdir()] == ["mine"]


def test_typed_target_class_is_not_imported(run_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "-m", "model=bert_tiny", "seed=0,1"]
    for key in ("hydra.launcher._target_", "hydra.sweeper._target_"):
        assert cli.main([*words, f"{key}=os.system"]) == 2
        assert f"{key}=os.system: lmtool never imports a name from a configuration" in capsys.readouterr().err
    assert run_calls == [] and list(Path().iterdir()) == []


def test_job_function_is_picklable() -> None:
    job = partial(perform, partial(cli.run_job, "pretrain", ("outsider",)))
    again = pickle.loads(pickle.dumps(job))
    assert again.args[0].args == ("pretrain", ("outsider",)) and again.args[0].func is cli.run_job


def test_basic_sweeper_refuses_intervals(run_calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "-m", "optimizer.lr=interval(1e-5,1e-2)"]) == 2
    assert "error: optimizer.lr=interval(1e-5,1e-2): the plain sweeper" in capsys.readouterr().err
    assert cli.main(["pretrain", "-m", "seed=range(5,7)", "model=bert_tiny"]) == 0
    assert [config.seed for _, config in run_calls] == [5, 6]


@pytest.mark.parametrize(
    ("typed", "location", "resumed"),
    [
        (["seed=0,1"], None, "lmtool pretrain seed=0,1 name=here"),
        (["seed=0,1", "name=here"], "here", "lmtool pretrain seed=0,1 name=here"),
        (["seed=0,1", "name='here'"], "here", "lmtool pretrain seed=0,1 name=here"),
        (["seed=0,1", "hydra.sweep.dir=there"], "there", "lmtool pretrain seed=0,1 hydra.sweep.dir=there"),
    ],
)
def test_resume_command_names_sweep(typed: list[str], location: str | None, resumed: str) -> None:
    request: Any = SimpleNamespace(typed=typed, verb="pretrain")
    assert jobs._resume_command(request, Path("runs/here"), location) == resumed
