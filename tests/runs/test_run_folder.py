"""The run folder: names, the lock, the saved config, metric rows, results, and secrets."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmtool.config import saved
from lmtool.errors import UserError
from lmtool.reporting.report import write_report
from lmtool.runs import locks
from lmtool.runs.finding import run_folder
from lmtool.runs.identity import finished_result, select_folder
from lmtool.runs.locks import Lock, Owner
from lmtool.runs.run_folder import RunFolder
from lmtool.system import files
from lmtool.training.health import save_batch
from lmtool.training.loop import train
from tests.training.fakes import FakeLearner, FakeLoader, evaluator, open_run, settings


def test_run_names_are_fixed_or_numbered(tmp_path: Path) -> None:
    assert select_folder(tmp_path, "mine", None, "x") == tmp_path / "mine"
    assert select_folder(tmp_path, None, str(tmp_path / "there"), "x") == tmp_path / "there"
    assert not (tmp_path / "mine").exists()
    assert select_folder(tmp_path, None, None, "sst2-bert").name == "sst2-bert-0001"
    (tmp_path / "sst2-bert-0041").mkdir()
    assert select_folder(tmp_path, None, None, "sst2-bert").name == "sst2-bert-0042"
    assert select_folder(tmp_path, None, None, "a/../b c").name == "a-..-b-c-0001"


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "-rf", "a b", "", "x" * 101, "a\nb", "ä", "..", "a\0b"])
def test_unsafe_run_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="is not a valid name") as caught:
        select_folder(tmp_path, name, None, "x")
    assert caught.value.hint is not None and caught.value.hint.startswith("name=")


def run_in_processes(number: int, work: Any) -> list[int]:
    """Exit statuses of `number` child processes that start work at about the same time."""
    start = time.time() + 0.15
    children = []
    for index in range(number):
        child = os.fork()
        if child == 0:
            status = 99
            try:
                time.sleep(max(0.0, start - time.time()))
                status = work(index)
            finally:
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_concurrent_processes_get_different_folders(tmp_path: Path) -> None:
    def work(index: int) -> int:
        (select_folder(tmp_path, None, None, "run") / f"mine-{index}").touch()
        return 0

    assert run_in_processes(20, work) == [0] * 20
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run-{number:04d}" for number in range(1, 21)]
    assert all(len(list(path.iterdir())) == 1 for path in tmp_path.iterdir())


@pytest.mark.parametrize("stale", [False, True])
def test_one_of_fifty_processes_gets_the_lock(tmp_path: Path, stale: bool) -> None:
    if stale:
        dead = Owner(Owner.me().host, Owner.me().boot, 2**22 - 7, "1")
        (tmp_path / "LOCK").write_text(json.dumps(asdict(dead)))

    def work(index: int) -> int:
        try:
            Lock(tmp_path / "LOCK").acquire()
        except UserError:
            (tmp_path / f"lost-{index}").touch()
            return 2
        end = time.monotonic() + 120  # lives until all others have tried
        while len(list(tmp_path.glob("lost-*"))) < 49 and time.monotonic() < end:
            time.sleep(0.02)
        return 0

    statuses = run_in_processes(50, work)
    assert statuses.count(0) == 1 and statuses.count(2) == 49


def test_lock_is_taken_only_after_owner_exits(tmp_path: Path) -> None:
    first = Lock(tmp_path / "LOCK")
    first.acquire()
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
        Lock(tmp_path / "LOCK").acquire()
    first.release()
    first.release()
    assert not (tmp_path / "LOCK").exists()

    def work(index: int) -> int:
        Lock(tmp_path / "LOCK").acquire()
        return 0  # exits without releasing the lock

    assert run_in_processes(1, work) == [0] and (tmp_path / "LOCK").exists()
    again = Lock(tmp_path / "LOCK")
    again.acquire()
    again.release()


@pytest.mark.parametrize(
    "change, taken",
    [
        ({}, False),  # this process, which is alive
        ({"started": "1"}, True),  # the process id was reused
        ({"boot": "another"}, True),
        ({"host": "elsewhere"}, False),  # cannot be checked from here
        ({"host": "elsewhere", "boot": "another", "pid": 1}, False),
    ],
)
def test_stale_lock_is_taken_only_from_dead_owner(tmp_path: Path, change: dict[str, Any], taken: bool) -> None:
    (tmp_path / "LOCK").write_text(json.dumps({**asdict(Owner.me()), **change}))
    lock = Lock(tmp_path / "LOCK")
    if taken:
        lock.acquire()
        lock.release()
    else:
        with pytest.raises(UserError, match="in use by process") as caught:
            lock.acquire()
        assert ("rm " in str(caught.value.hint)) == ("host" in change)


def test_lock_works_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*arguments: Any) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    lock = Lock(tmp_path / "LOCK")
    lock.acquire()
    with pytest.raises(UserError, match="in use"):
        Lock(tmp_path / "LOCK").acquire()
    lock.release()
    Lock(tmp_path / "LOCK").acquire()


CONFIG = {
    "seed": 1,
    "device": "cpu",
    "max_steps": 10,
    "model": {"name": "bert", "sizes": [1, 2]},
    "optimizer": {"lr": 1e-05},
}


def config_with(**changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps({**CONFIG, **changes}))


def test_changed_config_in_existing_run_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", CONFIG):
        pass
    with open_run(tmp_path / "run", CONFIG):
        pass
    other = config_with(max_steps=20, optimizer={"lr": 0.001}, model={"name": "bert", "sizes": [1, 3]}, device="cuda")
    with pytest.raises(UserError) as caught:
        open_run(tmp_path / "run", other)
    assert caught.value.message.endswith(
        "another configuration: max_steps 10 -> 20; model.sizes [1, 2] -> [1, 3]; optimizer.lr 1e-05 -> 0.001"
    )
    assert not (tmp_path / "run/LOCK").exists()
    with pytest.raises(UserError, match=r"task\.kind \(absent\) -> \"x\""):
        open_run(tmp_path / "run", config_with(task={"kind": "x"}))


def test_device_and_logging_may_change_in_existing_run(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", CONFIG):
        pass
    with open_run(tmp_path / "run", config_with(device="cuda:1", log_every=3, cache_dir="/elsewhere", offline=True)):
        pass
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text()) == CONFIG


def test_config_text_must_equal_config_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the same"):
        RunFolder(tmp_path / "run", CONFIG, "seed: 2\n")
    assert not (tmp_path / "run/LOCK").exists()
    with RunFolder(tmp_path / "run", {"lr": 1e-5}, "# the rate\nlr: 1.0e-05  # low\n") as run:
        assert (run.path / "config.yaml").read_text().startswith("# the rate")


def test_config_that_no_command_would_read_again_is_refused(tmp_path: Path) -> None:
    config = {"command": "pretrain", "path": ["a.txt"] * saved.MAX_NODES}
    with pytest.raises(UserError, match=r"the configuration has more than 20000 keys and values"):
        RunFolder(tmp_path / "run", config, saved.to_yaml(config))
    assert not (tmp_path / "run").exists()


def test_user_error_before_training_removes_new_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError), open_run(tmp_path / "run") as run:
        run.write_environment(["lmtool"])
        raise UserError("no rows")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError), open_run(tmp_path / "run"):
        raise RuntimeError("ours")
    assert (tmp_path / "run/config.yaml").exists()
    with pytest.raises(UserError), open_run(tmp_path / "run"):
        raise UserError("no rows")
    assert (tmp_path / "run/config.yaml").exists()  # the folder existed before


def test_unwritable_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*: not a directory") as caught:
        open_run(tmp_path / "file" / "run")
    assert "\n" not in caught.value.message and caught.value.hint


def test_read_only_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdir(*arguments: Any, **keywords: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UserError, match="read-only file system") as caught:
        open_run(tmp_path / "run")
    assert caught.value.hint == "put run_dir= on a disk that can be written"
    with pytest.raises(UserError, match="read-only file system"):
        select_folder(tmp_path / "runs", None, None, "x")


def test_rows_drop_torn_line_and_later_steps(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        for step in range(1, 6):
            run.append({"step": step, "loss": 1 / 3, "none": float("nan")})
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "lo')
        assert [row["step"] for row in run.rows()] == [1, 2, 3, 4, 5]
        run.drop_rows_after(3)
        run.append({"step": 4})
        assert [row["step"] for row in run.rows()] == [1, 2, 3, 4]
        assert run.rows()[0] == {"step": 1, "loss": 1 / 3, "none": None}
        assert (run.path / "metrics.jsonl").read_text().endswith('{"step": 4}\n')


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff\xfe", b'{"loss": 1}', b'{"step": "x"}', b"[" * 100_000])
def test_invalid_metrics_line_is_refused(tmp_path: Path, line: bytes) -> None:
    with open_run(tmp_path / "run") as run:
        run.append({"step": 1})
        with (run.path / "metrics.jsonl").open("ab") as file:
            file.write(line + b"\n")
        with pytest.raises(UserError, match=r"metrics\.jsonl:2 is not a row with a step"):
            run.drop_rows_after(3)


def test_huge_metrics_line_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        with (run.path / "metrics.jsonl").open("wb") as file:
            file.truncate(8 << 30)
        with pytest.raises(UserError, match=r"metrics\.jsonl:1: the line is longer than 10000000 bytes") as caught:
            run.drop_rows_after(3)
        assert caught.value.hint


@pytest.mark.parametrize(
    ("make", "kind", "names"),
    [
        (Path.mkdir, "a folder", ("result.json", "predictions.jsonl", "log.txt")),
        (os.mkfifo, "no regular file", ("result.json", "predictions.jsonl", "log.txt")),
        (lambda path: path.symlink_to("nowhere"), "a link to nothing", ("result.json", "predictions.jsonl")),
        (lambda path: path.symlink_to("/dev/zero"), "no regular file", ("result.json", "predictions.jsonl")),
    ],
)
def test_invalid_output_path_is_refused_before_training(
    tmp_path: Path, make: Any, kind: str, names: tuple[str, ...]
) -> None:
    for name in names:
        path = tmp_path / f"run of {name}" / name
        path.parent.mkdir()
        make(path)
        with pytest.raises(UserError, match=f"{name} is {kind}; a run writes a file there") as caught:
            open_run(path.parent)
        assert caught.value.hint and os.path.lexists(path) and len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("name", ["LOCK", "log.txt", "checkpoints", "plots", "wandb"])
@pytest.mark.parametrize("target", ["file", "folder", "nowhere", "/dev/null"])
def test_link_in_run_folder_is_refused(tmp_path: Path, name: str, target: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / target)
    with pytest.raises(UserError, match=f"run/{name} is a link; a run writes only inside its own folder") as caught:
        open_run(tmp_path / "run")
    assert caught.value.hint is not None and f"rm {tmp_path / 'run' / name}" in caught.value.hint
    assert (tmp_path / "file").read_text() == "mine" and not [*(tmp_path / "folder").iterdir()]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name] and not (tmp_path / "nowhere").exists()


def _symbolic_link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _hard_link(path: Path, target: Path) -> None:
    path.hardlink_to(target)


class Interrupted(FakeLearner):
    def on_step(self, step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("link", [_symbolic_link, _hard_link])
def test_resumed_run_does_not_write_through_links(tmp_path: Path, link: Any) -> None:
    """A downloaded run may link names that a run writes, including guessed drafts, to the user's files. Resuming,
    finishing and reporting that run leave those files unchanged."""
    budget = settings(max_steps=4, evaluate_every=2)
    with open_run(tmp_path / "run") as run, pytest.raises(KeyboardInterrupt):
        train(Interrupted(), FakeLoader(), lambda step: {"loss": 1.0}, run, budget)
    folder, machine = tmp_path / "run", files.draft_path(tmp_path / "x").name.rpartition("-")[0][-8:]
    names = [
        "environment.json", "facts.json", "metrics.jsonl", "predictions.jsonl", "report.html", "result.json",
        "checkpoints/last", "checkpoints/best", "plots/loss.png", "diverged/step_00000003.json",
        *(f".tmp-{name}-{machine}-{os.getpid()}" for name in ("environment.json", "metrics.jsonl", "report.html")),
    ]  # fmt: skip
    names += ["LOCK", "log.txt"] if link is _hard_link else []
    own: dict[str, tuple[Path, bytes]] = {}
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        content = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        (folder / name).unlink(missing_ok=True)
        own[name] = tmp_path / f"own-{number}", content
        own[name][0].write_bytes(content)
        link(folder / name, own[name][0])
    with open_run(folder) as run:
        run.write_environment(["lmtool"])
        run.write_json("facts.json", {})
        run.log("resumes")
        train(FakeLearner(), FakeLoader(), lambda step: {"loss": 0.5}, run, budget)
        run.write_rows("predictions.jsonl", [{"prediction": 1}])
        run.write_result({"status": "done"})
        save_batch(folder, 3, next(iter(FakeLoader().steps(None))), {})
        write_report(folder)
    for name, (path, content) in own.items():
        assert path.read_bytes() == content, name
        assert not (folder / name).is_symlink() and path.stat().st_nlink == 1, name
    assert (folder / "log.txt").read_text().count("resumes") and len((folder / "metrics.jsonl").read_text()) > 100
    assert not [*folder.rglob(".tmp-*")] and not (folder / "LOCK").exists()


def test_link_created_during_run_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("mine")
    with open_run(tmp_path / "run") as run:
        run.append({"step": 1})
        for name in ("metrics.jsonl", "log.txt"):
            (run.path / name).unlink(missing_ok=True)
            (run.path / name).symlink_to(tmp_path / "own")
        run.append({"step": 2})
        with pytest.raises(OSError):
            run.sync()
        (run.path / "metrics.jsonl").unlink()
        run.sync()
        assert [row["step"] for row in run.rows()] == [2]
    assert (tmp_path / "own").read_text() == "mine"


def test_linked_run_folder_is_accepted(tmp_path: Path) -> None:
    """Users may link runs/, or one run, to another disk."""
    (tmp_path / "disk" / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs").symlink_to("disk/runs")
    (tmp_path / "disk" / "runs" / "two").symlink_to("one")
    with open_run(tmp_path / "runs" / "two") as run:
        run.log("here")
        run.announce()
    assert (tmp_path / "disk/runs/one/log.txt").is_file() and (tmp_path / "runs/latest").readlink() == Path("two")


@pytest.mark.parametrize("name", ["run", "link"])
@pytest.mark.parametrize("has_linked_config", [False, True])
def test_nonempty_folder_without_run_is_refused(tmp_path: Path, name: str, has_linked_config: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "link").symlink_to("run")
    (folder / "report.html").write_text("mine")
    if has_linked_config:  # another run's configuration does not make this folder a run
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        (folder / "config.yaml").symlink_to("../config.yaml")
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match=f"{name} is not empty and not a run of lmtool: it has ") as caught:
        open_run(tmp_path / name)
    assert caught.value.hint is not None and "set another name= or run_dir=" in caught.value.hint
    assert sorted(folder.iterdir()) == before and (folder / "report.html").read_text() == "mine"


@pytest.mark.parametrize("left", ["LOCK", ".tmp-config.yaml-0a1b2c3d-99999999", "submitted.json"])
def test_folder_of_run_killed_before_config_is_accepted(tmp_path: Path, left: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / left).write_text("")
    with open_run(tmp_path / "run") as run:
        assert (run.path / "config.yaml").is_file()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "is empty"),
        ("null", "is empty"),
        ("3", "is not a configuration of lmtool: it names no command"),
        ("- a", "is not a configuration of lmtool"),
        ("{seed: 1}", "is not a configuration of lmtool"),
        ("{command: finetune, since: 2020-01-01}", "is not plain data"),
    ],
)
def test_invalid_config_yaml_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(content)
    with pytest.raises(UserError, match=problem) as caught:
        open_run(tmp_path / "run", config_with(command="finetune"))
    assert caught.value.hint and (tmp_path / "run/config.yaml").read_text() == content
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_rows_are_written_after_full_disk_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = os.write, [False]

    def write(handle: int, content: bytes) -> int:
        return real(handle, content[: len(content) // 2] if full[0] else content)

    monkeypatch.setattr(os, "write", write)
    with open_run(tmp_path / "run") as run:
        run.append({"step": 1})
        full[0] = True
        run.append({"step": 2})
        assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n'
        with pytest.raises(OSError):
            run.sync()
        full[0] = False
        run.append({"step": 3})
        run.sync()
        assert [row["step"] for row in run.rows()] == [1, 2, 3]
        assert "cannot be written" in (run.path / "log.txt").read_text()


def test_run_with_done_result_is_finished(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as run:
        assert run.result() is None
        run.write_result({"status": "diverged"})
        assert run.result() is None
        run.write_result({"status": "done", "value": 0.5, "path": Path("x")})
        assert run.result() == finished_result(run.path) == {"status": "done", "value": 0.5, "path": "x"}
    assert finished_result(tmp_path / "nowhere") is None


SECRETS = ["hf_" + "aB3" * 11, "deadbeef" * 5, 'quo"te\\secret-ä', "wandb-key-12345"]


def test_run_folder_contains_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, secret in enumerate(SECRETS):
        monkeypatch.setenv(f"PLANTED_{number}_TOKEN", secret)

    learner = FakeLearner()
    with open_run(tmp_path / "run") as run:
        run.write_environment(["lmtool", *(f"x.token={secret}" for secret in SECRETS)], {"note": SECRETS[2]})
        run.log(f"asked {SECRETS[0]} and {SECRETS[2]}")
        run.write_json("facts.json", {SECRETS[1]: [SECRETS[3]]})
        train(learner, FakeLoader(), evaluator(learner), run, settings(max_steps=4))
        run.write_result({"status": "done", "note": SECRETS[2]})
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) > 8
    for path in written:
        content = path.read_bytes()
        for secret in SECRETS:
            assert secret.encode() not in content, path
            assert json.dumps(secret)[1:-1].encode() not in content, path
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["arguments"][1] == "x.token=***" and "PLANTED" not in json.dumps(environment)
    assert {"python", "system", "packages", "processor", "cores", "threads"} <= environment.keys()
    assert "torch" in environment["packages"]


def test_training_configs_import_no_torch() -> None:
    code = "import sys, lmtool.training.configs; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("group", ["optimizer", "schedule"])
def test_yaml_equals_config_class(group: str) -> None:
    from lmtool.config.registry import lookup

    folder = Path(__file__).parents[2] / "conf" / group
    names = [path.stem for path in folder.glob("*.yaml") if path.stem != "auto"]
    assert names
    for name in names:
        values = yaml.safe_load((folder / f"{name}.yaml").read_text())
        if "defaults" in values:  # a preset, decoded by another test
            assert values["defaults"][0] in names
            continue
        entry = lookup(group, name)
        assert entry is not None
        assert values == json.loads(entry.config().model_dump_json()), name


def test_latest_links_newest_run_but_no_sweep_job(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with RunFolder(tmp_path / name, CONFIG, yaml.safe_dump(CONFIG)) as run:
            run.announce()
    assert (tmp_path / "latest").readlink() == Path("second") and run_folder(tmp_path / "latest") == run.path
    with RunFolder(tmp_path / "0_seed-1", CONFIG, yaml.safe_dump(CONFIG)) as job:
        (job.path / "submitted.json").write_text("{}")
        job.announce()
    assert (tmp_path / "latest").readlink() == Path("second")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()  # a copy of runs/ in which the link became a folder
    with RunFolder(tmp_path / "second", CONFIG, yaml.safe_dump(CONFIG)) as run:
        run.announce()
    assert (tmp_path / "latest").is_dir() and not [*tmp_path.glob(".tmp-*")]


def test_linked_lock_is_refused_and_target_unchanged(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("the user's own")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "LOCK").symlink_to(target)
    with pytest.raises(UserError, match="LOCK"):
        Lock(tmp_path / "run" / "LOCK").acquire()
    assert target.read_text() == "the user's own"
