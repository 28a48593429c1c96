"""`lmtool fetch`, then `offline=true`: everything that a run reads is local, and no connection is opened. The Hub is
a folder behind the two library functions that lmtool calls."""

from __future__ import annotations

import shutil
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lmtool.cli import main as cli
from lmtool.commands import fetch
from lmtool.errors import UserError
from tests.commands.test_transfer_commands import make

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TASK = ["task=sst2", "cache_dir=cache", "device=cpu", "precision=fp32", "max_length=32", "max_steps=1"]


class Hub:
    """A fake Hub with its files and the requests it got. up: whether it answers."""

    def __init__(self, place: Path):
        self.there, self.cache = place / "there", place / "hub"
        self.asked: list[str] = []
        self.up = True

    def download(self, repository: str, name: str, revision: str) -> str:
        from huggingface_hub.errors import EntryNotFoundError

        assert self.up
        self.asked.append(name)
        if not (self.there / name).is_file():
            raise EntryNotFoundError(name)
        folder = self.cache / f"models--{repository.replace('/', '--')}"
        for made in (folder / "refs", folder / "snapshots" / COMMIT):
            made.mkdir(parents=True, exist_ok=True)
        (folder / "refs/main").write_text(COMMIT)
        return shutil.copy(self.there / name, folder / "snapshots" / COMMIT / name)

    def load_dataset(self, name: str, subset: str | None, cache_dir: str) -> dict[str, Any]:
        folder = Path(cache_dir) / name.replace("/", "___") / str(subset)
        if not folder.is_dir():
            if sys.modules["datasets"].config.HF_HUB_OFFLINE:
                raise ConnectionError("not in the cache")
            self.asked.append(f"{name}:{subset}")
            folder.mkdir(parents=True)
            (folder / "rows.arrow").write_bytes(b"x" * 1232)
            (folder / "dataset_info.json").write_text("{}")
        return {"train": rows(32), "validation": rows(16)}


class Split(dict[str, list[Any]]):
    column_names = ("sentence", "label")
    features = types.MappingProxyType(
        {"sentence": None, "label": types.SimpleNamespace(names=["negative", "positive"])}
    )

    def __len__(self) -> int:
        return len(self["label"])


def rows(count: int) -> Split:
    return Split(
        sentence=[f"text {number} a b" for number in range(count)], label=[number % 2 for number in range(count)]
    )


@pytest.fixture
def hub(place: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.cache))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.download)
    for module in ("lmtool.weights.folders", "lmtool.data.hub_source"):
        monkeypatch.setattr(f"{module}.is_reachable", lambda *address: hub.up)
    library = types.SimpleNamespace(
        config=types.SimpleNamespace(HF_HUB_OFFLINE=False),
        exceptions=types.SimpleNamespace(DatasetsError=ConnectionError),
        load_dataset=hub.load_dataset,
    )
    monkeypatch.setitem(sys.modules, "datasets", library)

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return hub


def state_of(screen: str, what: str) -> str:
    (line,) = [line for line in screen.splitlines() if line.startswith(what)]
    return line.removeprefix(what).strip()


def test_fetched_sources_are_read_offline(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    make("bert", hub.there)
    words = ["finetune", *TASK, "batch_examples=16", "checkpoint=hf://some/bert"]
    assert cli.main(["fetch", *words]) == 0
    screen = capsys.readouterr().out
    assert state_of(screen, "checkpoint=hf://some/bert").startswith("fetched  ")
    assert state_of(screen, "task=sst2 (nyu-mll/glue:sst2)") == "fetched  1.23 kB"
    assert f"lmtool {' '.join(words)} offline=true" in screen and not Path("runs").exists()
    assert "model.safetensors" in hub.asked and "nyu-mll/glue:sst2" in hub.asked
    hub.up = False
    assert cli.main(["fetch", *words]) == 0
    screen = capsys.readouterr().out
    assert screen.count("was there") == 2 and "fetching" not in screen
    assert cli.main(["fetch", *words, "offline=true"]) == 0
    assert cli.main([*words, "offline=true", "name=a"]) == 0


def test_missing_sources_are_named(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fetch", "finetune", "task=mixture", "task.members=[sst2,cola]", "checkpoint=none", "model=bert_tiny"]
    words += ["cache_dir=cache"]
    (Path("cache") / "hub/nyu-mll___glue/sst2").mkdir(parents=True)
    hub.up = False
    for offline, reason in (
        ("offline=false", "no network"),
        ("offline=true", "offline=true, and it is not in the cache"),
    ):
        assert cli.main([*words, offline]) == 2
        captured = capsys.readouterr()
        assert state_of(captured.out, "task=sst2 (nyu-mll/glue:sst2)") == "was there"
        assert state_of(captured.out, "task=cola (nyu-mll/glue:cola)") == "missing"
        assert (
            f"task=cola: task.hub=nyu-mll/glue:cola cannot be read: {reason} (missing: 1 of 2 sources)" in captured.err
        )
        assert ("fetching task=cola" in captured.out) == (offline == "offline=false")


def test_texts_of_all_phases_are_fetched_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cached data set of the Hub is not read again, and local text needs no fetching."""
    kept: list[str] = []

    def read(data: Any, cache_dir: str, progress: Any, offline: bool) -> None:
        if offline:
            raise UserError(f"{data.hub} is not in the cache")
        kept.append(data.hub)

    monkeypatch.setattr(fetch, "open_source", read)
    monkeypatch.setattr(fetch, "folder_of", lambda data, split, cache_dir: Path(data.hub))
    monkeypatch.setattr(fetch, "complete_shards", lambda folder: [] if str(folder) in kept else None)
    words = ["fetch", "pretrain", "model=bert_tiny", "data=hub", "data.hub=org/one", "cache_dir=cache"]
    words += ["phases=[{share: 0.5, data.hub: org/two}, {share: 0.5}]"]
    assert cli.main(words) == 0
    screen = capsys.readouterr().out
    assert kept == ["org/two", "org/one"] and screen.count(" fetched") == 2
    assert cli.main(words) == 0
    assert kept == ["org/two", "org/one"] and capsys.readouterr().out.count(" was there") == 2


@pytest.mark.parametrize(
    "words",
    [
        ["fetch", "pretrain", "model=bert_tiny"],
        ["fetch", "task=sst2", "task.path=rows", "checkpoint=none", "model=bert_tiny"],
    ],
)
def test_local_runs_need_no_fetching(hub: Hub, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert "nothing to fetch" in capsys.readouterr().out and not hub.asked


@pytest.mark.slow
def test_tokenizers_teachers_and_bases_are_fetched(hub: Hub, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The base of a tuned run, the weights of a teacher, and a tokenizer of another repository are fetched."""
    make("bert", hub.there)
    words = [*TASK, "task.path=rows", "batch_examples=16", "checkpoint=hf://some/bert"]
    assert cli.main(["finetune", *words, "name=tuned", "tuning=lora"]) == 0
    shutil.rmtree(hub.cache)
    again = ["task=sst2", "task.path=rows", "cache_dir=cache"]
    assert cli.main(["fetch", "finetune", *again, "checkpoint=runs/tuned"]) == 0
    assert state_of(capsys.readouterr().out, "checkpoint=runs/tuned").startswith("fetched")
    assert (hub.cache / "models--some--bert/snapshots" / COMMIT / "model.safetensors").is_file()
    shutil.rmtree(hub.cache)
    more = ["checkpoint=none", "model=bert_tiny", "distill=soft", "distill.teacher=hf://some/bert"]
    more += ["tokenizer=folder", "tokenizer.path=hf://some/bert", "model.vocab_size=330", "max_length=40"]
    assert cli.main(["fetch", "pretrain", *more[1:], "data=text", "data.path=text.txt"]) == 0
    screen = capsys.readouterr().out
    assert state_of(screen, "distill.teacher=hf://some/bert").startswith("fetched")
    assert state_of(screen, "tokenizer.path=hf://some/bert").startswith("was there")  # same repository


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fetch", "evaluate"], "fetches for pretrain or finetune"),
        (["fetch", "pretrian"], "lmtool fetch pretrain"),
        (
            ["fetch", "finetune", "task=sst2", "checkpoint=hf://a/b/c"],
            "not an address of the form hf://org/name@revision",
        ),
    ],
)
def test_invalid_fetch_is_refused(hub: Hub, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err and not hub.asked
