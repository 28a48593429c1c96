"""Weights and data from a Hub: real downloads from a server on the loopback address, and their failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.hub import Answer, Fault, Hub, Machine
from tests.hub import hub as hub
from tests.hub import machine as machine
from tests.hub import published as published
from tests.hub import sst2 as sst2

BERT, T5 = "google-bert/bert-base-uncased", "google-t5/t5-base"
SIZES = ["device=cpu", "precision=fp32", "max_steps=1", "max_length=24", "batch_examples=8"]
SST2 = ["finetune", "task=sst2", *SIZES]
FETCH = ["fetch", *SST2]
WEIGHTS = r"GET /large/"


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def assert_succeeded(answer: Answer) -> Answer:
    assert answer.status == 0, answer.out + answer.err
    return answer


def assert_refused(answer: Answer) -> str:
    assert answer.status == 2, answer.out + answer.err
    assert "Traceback" not in answer.err
    return answer.err[answer.err.index("error: ") :]


def test_shortest_finetune_runs_and_then_works_offline(hub: Hub, machine: Machine) -> None:
    answer = assert_succeeded(machine.run(*SST2, "name=first", terminal=True))
    assert f"started from hf://{BERT}, the default for task=sst2: checkpoint= or model= changes it" in answer.out
    assert "loaded: backbone" in answer.out and "new: heads.sst2" in answer.out
    assert "model.safetensors: 100%" in answer.err, "the progress bar of the download"
    # No request is repeated, not even for a file that the repository lacks.
    asked = [f"{request.method} {request.path}" for request in hub.asked(BERT)]
    assert len(asked) == len(set(asked))
    hub.stop()
    again = assert_succeeded(machine.run(*SST2, "name=second"))
    assert not again.err
    first, second = (read(machine.place / f"runs/{name}/result.json") for name in ("first", "second"))
    assert first["metrics"] == second["metrics"]
    assert f"checkpoint: hf://{BERT}" in (machine.place / "runs/first/config.yaml").read_text()


def test_text_to_text_task_starts_from_t5(machine: Machine) -> None:
    answer = assert_succeeded(machine.run(*SST2, "task.head=text_to_text", "tuning=adapter"))
    assert "model=t5 task=sst2 tuning=adapter" in answer.out and f"started from hf://{T5}, the default" in answer.out


@pytest.mark.parametrize(
    "words", slow_but(["task=squad"], ["task=squad", "task=conll2003", "task=glue task.members=[sst2]"])
)
def test_other_tasks_run_with_defaults(words: str, machine: Machine) -> None:
    answer = assert_succeeded(machine.run("finetune", *words.split(), *SIZES))
    assert f"started from hf://{BERT}, the default for task=" in answer.out


def test_missing_network_reports_all_sources_at_once(hub: Hub, machine: Machine) -> None:
    hub.stop()
    error = assert_refused(machine.run(*SST2))
    assert error.count("error: ") == 2 and error.count("there is no network") == 2
    assert f"checkpoint=hf://{BERT}: config.json" in error and "task=sst2: the data set nyu-mll/glue:sst2" in error
    assert "checkpoint=none model=bert_tiny" in error and "task.path=FOLDER" in error and "task=pydocs" in error
    assert not list(machine.place.glob("runs"))


def test_sweep_jobs_use_one_revision_of_a_moving_branch(
    hub: Hub, machine: Machine, published: dict[str, dict[str, bytes]]
) -> None:
    model, rows = hub.repository("models", BERT), hub.repository("datasets", "nyu-mll/glue")
    commit = model.branches["main"]

    def move() -> None:
        model.push(published["bert"] | {"README.md": b"moved"})
        rows.push(sst2(rows=64, start=1000))

    # The weights are the last request of the first job.
    hub.faults.append(Fault(rf"HEAD /{BERT}/resolve/.*/model.safetensors", then=move))
    assert_succeeded(machine.run("-m", *SST2, "tuning=prompt", "tuning.length=4", "seed=1,2", "name=sweep"))
    assert model.branches["main"] != commit
    jobs = [read(path) for path in machine.place.glob("runs/sweep/*/facts.json")]
    assert [job["lineage"][0]["revision"] for job in jobs] == 2 * [f"hf://{BERT}@{commit}"]
    assert len({job["data"]["fingerprint"] for job in jobs}) == 1


def test_pinned_revision_is_downloaded(hub: Hub, machine: Machine, published: dict[str, dict[str, bytes]]) -> None:
    model = hub.repository("models", BERT)
    pinned = model.push(published["bert"] | {"README.md": b"tagged"}, branch="v1")
    for revision in ("v1", pinned):
        assert_succeeded(machine.run(*FETCH, f"checkpoint=hf://{BERT}@{revision}"))
    assert {request.path.split("/")[4] for request in hub.asked(BERT)} == {"v1", pinned}
    assert "a@b" not in assert_refused(machine.run(*FETCH, f"checkpoint=hf://{BERT}@v2"))


def test_gated_repository_needs_token_that_stays_secret(hub: Hub, machine: Machine) -> None:
    hub.repository("models", BERT).gated = True
    error = assert_refused(machine.run(*SST2))
    assert "gated" in error and "HF_TOKEN" in error
    answer = assert_succeeded(machine.run(*SST2, "name=run", HF_TOKEN=hub.token))
    files = [path for path in machine.place.parent.rglob("*") if path.is_file()]
    assert len(files) > 20 and not [path for path in files if hub.token.encode() in path.read_bytes()]
    assert hub.token not in answer.out + answer.err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([f"checkpoint=hf://{BERT}x"], f"checkpoint=hf://{BERT}x: the hub has no repository"),
        ([f"checkpoint=hf://{BERT}@v9"], f"{BERT}@v9: {BERT} has no branch, tag or commit v9"),
        (["task.hub=nyu-mll/glu"], "task.hub=nyu-mll/glu"),
    ],
)  # fmt: skip
def test_missing_repository_or_revision_is_named(words: list[str], answer: str, machine: Machine) -> None:
    error = assert_refused(machine.run(*FETCH, *words))
    assert answer in error


def test_server_error_is_retried(hub: Hub, machine: Machine) -> None:
    faults = [Fault(pattern, status=500) for pattern in ("HEAD .*/config.json", WEIGHTS, "HEAD .*/README.md")]
    hub.faults += faults
    assert_succeeded(machine.run(*FETCH))
    assert not any(fault.times for fault in faults)


def test_interrupted_download_continues(hub: Hub, machine: Machine) -> None:
    hub.faults.append(Fault(WEIGHTS, cut=100_000))
    assert_succeeded(machine.run(*FETCH))
    first, second = hub.asked(f"{WEIGHTS}.*safetensors")
    # The library continues where its file on disk ends; it starts over if the connection ended in the first chunk.
    assert first.status == 200 and second.status == (206 if "range" in second.headers else 200)


def test_repeatedly_interrupted_download_is_refused(hub: Hub, machine: Machine) -> None:
    cut = Fault(f"{WEIGHTS}.*safetensors", cut=10_000, times=99)
    hub.faults.append(cut)
    error = assert_refused(machine.run(*FETCH))
    assert f"checkpoint=hf://{BERT}: model.safetensors: " in error and "run the command again" in error
    cut.times = 0
    assert_succeeded(machine.run(*FETCH))


def test_slow_server_is_retried(hub: Hub, machine: Machine) -> None:
    faults = [Fault(pattern, seconds=2) for pattern in ("HEAD .*/config.json", WEIGHTS, "HEAD .*/README.md")]
    hub.faults += faults
    assert_succeeded(machine.run(*FETCH, HF_HUB_ETAG_TIMEOUT="1", HF_HUB_DOWNLOAD_TIMEOUT="1"))
    assert not any(fault.times for fault in faults)
