"""Text data sets of the Hub, with a local folder of parquet files as data set: no network is needed."""

from __future__ import annotations

import json
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lmtool.config.registry import build
from lmtool.data import hub_source
from lmtool.data.configs import HubConfig
from lmtool.data.hub_source import HubSource, complete_shards, folder_of
from lmtool.data.sources import open_source
from lmtool.errors import UserError

from .data_fixtures import texts

ROWS = [f"row {number} says NA, «{number}» and\na second line" if number % 7 else None for number in range(60)]
TEXTS = [text for text in ROWS if text]


@pytest.fixture(autouse=True)
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("a connection was opened"))
    folder = Path("org/corpus/data")
    folder.mkdir(parents=True)
    for shard in range(3):
        rows = ROWS[shard * 20 : shard * 20 + 20]
        table = pyarrow.table({"text": rows, "n": list(range(20)), "title": ["a title"] * 20})
        pyarrow.parquet.write_table(table, folder / f"train-{shard:05}-of-00003.parquet", row_group_size=6)
    dev = pyarrow.table({"text": ["one held out", "two"], "n": [1, 2], "title": ["x", "y"]})
    pyarrow.parquet.write_table(dev, folder / "validation-00000-of-00001.parquet")


def source(offline: bool = False, progress: Any = None, **keys: Any) -> HubSource:
    return build(HubConfig(**{"hub": "org/corpus", **keys}), "cache", progress, offline=offline)


def all_texts(opened: HubSource) -> list[str]:
    return list(texts(opened.complete(), "validation"))


def assert_refused(match: str, **keys: Any) -> UserError:
    with pytest.raises(UserError, match=match) as caught:
        source(**keys)
    assert caught.value.hint and "\n" not in caught.value.message
    return caught.value


def test_rows_are_cached_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = HubConfig(hub="org/corpus", validation="validation")
    folders = [folder_of(both, split, "cache") for split in ("train", "validation")]
    assert [complete_shards(folder) for folder in folders] == [None, None]
    opened = source(validation="validation")
    assert all(complete_shards(folder) for folder in folders)
    assert all_texts(opened) == TEXTS and list(texts(opened, "validation")) == ["one held out", "two"]
    metadata = opened.metadata()
    assert metadata["source"] == "hub org/corpus" and metadata["rows_without_text"] == 9 and not metadata["held_out"]
    assert metadata["kept"] == "all of train, all of validation"
    with monkeypatch.context() as patched:
        patched.setattr(hub_source, "hub_access", lambda *_: pytest.fail("read again"))
        again = source(offline=True)
    assert all_texts(again) == TEXTS and len(list(texts(again, "validation"))) == 1
    joined = HubConfig(hub="org/corpus", text=("title", "text"))
    assert next(texts(open_source(joined, "cache").complete(), "validation")) == "a title"  # type: ignore[attr-defined]


def test_nested_column_is_read() -> None:
    Path("org/nested").mkdir()
    table = pyarrow.table({"meta": [{"text": "one", "n": 1}, {"text": "two", "n": 2}], "id": [1, 2]})
    pyarrow.parquet.write_table(table, "org/nested/train.parquet")
    assert all_texts(source(hub="org/nested", text="meta.text")) == ["one", "two"]
    assert_refused("no column mata.text; there are meta, id", hub="org/nested", text="mata.text")


def test_changed_data_set_changes_cache_folder() -> None:
    opened = source(max_bytes=10_000)
    Path("org/corpus/data/more.txt").write_text("not a part of it")
    kept = all_texts(opened)
    assert kept == TEXTS
    folder = folder_of(HubConfig(hub="org/corpus", max_bytes=10_000), "train", "cache")
    assert not folder.exists()  # the data set's files changed, and so did the cache key


def test_max_bytes_limits_cached_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = HubConfig.model_construct(**{**HubConfig(hub="org/corpus").model_dump(), "max_bytes": 900})
    opened = HubSource(config, "cache")
    kept = all_texts(opened)
    assert kept == TEXTS[: len(kept)] and 5 < len(kept) < 20
    assert opened.metadata()["kept"] == "the beginning of train"
    assert sum(path.stat().st_size for path in folder_of(config, "train", "cache").glob("*.jsonl")) <= 900


@pytest.mark.parametrize(("shard", "at"), [(1, 2), (300, 17), (1 << 20, 17), (1 << 20, 44)])
def test_interrupted_reading_resumes(monkeypatch: pytest.MonkeyPatch, shard: int, at: int) -> None:
    monkeypatch.setattr(hub_source, "SHARD", shard)
    monkeypatch.setattr(hub_source, "_REPORT", 1)
    seen: list[int] = []

    def stop(stage: str, done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source(progress=stop)
    assert complete_shards(folder_of(HubConfig(hub="org/corpus"), "train", "cache")) is None
    before = len(seen)
    opened = source(progress=lambda stage, done, total: seen.append(done) if stage.startswith("reading data") else None)
    assert all_texts(opened) == TEXTS and opened.metadata()["rows_without_text"] == 9
    assert len(seen) - before == len(ROWS) - at  # each row is read once


def test_killed_reading_resumes_after_last_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_source, "SHARD", 300)
    source()
    folder = folder_of(HubConfig(hub="org/corpus"), "train", "cache")
    progress = json.loads((folder / "progress.json").read_text())
    assert len(progress["shards"]) > 5
    (folder / "manifest.json").unlink()
    (folder / "draft").write_bytes(b'{"text": "half a li')
    assert all_texts(source()) == TEXTS and not (folder / "draft").exists()
    with (folder / "000001.jsonl").open("r+b") as file:
        file.seek(12)
        file.write(b"#")
    said: list[str] = []
    opened = source(progress=lambda stage, *_: said.append(stage))
    assert all_texts(opened) == TEXTS and any("building it again" in stage for stage in said)


def test_missing_network_is_refused_with_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    error = assert_refused(
        "data.hub=org/other: offline=true, but its split train is not in the cache", offline=True, hub="org/other"
    )
    assert "without offline=true" in error.hint and "data=parquet data.path=" in error.hint  # type: ignore[operator]
    monkeypatch.setattr(hub_source, "is_reachable", lambda _: False)
    assert "data=parquet" in str(assert_refused("data.hub=org/other cannot be read: no network", hub="org/other").hint)


def test_invalid_data_set_is_refused() -> None:
    assert assert_refused("no split trian; there are train, validation", split="trian").hint == "data.split=train"
    assert assert_refused("no split dev; there are", validation="dev").hint.startswith("data.validation=")  # type: ignore[union-attr]
    assert_refused("data.validation=train is also the training split", validation="train")
    assert (
        assert_refused("no column tekst; there are text, n, title", text="tekst").hint
        == "name the column: data.text=COLUMN"
    )
    assert_refused("data.hub=org/corpus train:1: n is a number, not text", text="n")
    assert "did you mean org/corpus?" in str(assert_refused("no such file or folder", hub="./org/corpsu").hint)
    assert_refused("cannot be read: .*'sub' not found", hub="org/corpus:sub")
    folder = Path("org/tables")
    folder.mkdir()
    (folder / "train.csv").write_text("text,n\nNA,1\nb,2,3\n")
    assert assert_refused(
        "is CSV, which the library datasets reads with silent errors", hub="org/tables"
    ).hint.startswith("use data=csv")  # type: ignore[union-attr]
    folder = Path("org/broken")
    folder.mkdir()
    (folder / "train.parquet").write_bytes(Path("org/corpus/data/train-00000-of-00003.parquet").read_bytes()[:500])
    assert_refused("data.hub=org/broken cannot be read", hub="org/broken")
    empty = Path("org/empty")
    empty.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["", None, " "]}), empty / "train.parquet")
    assert_refused("the split train has no text in text", hub="org/empty")


def test_data_set_script_is_not_run() -> None:
    folder = Path("org/scripted")
    folder.mkdir()
    (folder / "scripted.py").write_text("open('ran', 'w')\n")
    assert_refused("data.hub=org/scripted cannot be read: .*script", hub="org/scripted")
    assert not Path("ran").exists()


def test_first_complete_folder_stays_without_file_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    read_split, folder = HubSource._read_split, folder_of(HubConfig(hub="org/corpus"), "train", "cache")

    def read_after_another_process(self: HubSource, split: str, draft: Path) -> Any:
        read_split(self, split, folder)
        return read_split(self, split, draft)

    monkeypatch.setattr(hub_source, "hold_lock", lambda path: nullcontext(False))
    monkeypatch.setattr(HubSource, "_read_split", read_after_another_process)
    assert all_texts(source()) == TEXTS
    assert list(folder.parent.iterdir()) == [folder]
