"""A hub on the loopback address that answers as Hugging Face's does, and commands that know no other: model and data
set information, revisions, trees, and files by commit with etags, redirects to large files, and ranges.

    hub.repository("models", "org/name").push({"config.json": b"{}"})
    hub.faults.append(Fault(r"/resolve/.*weights", status=500))
    answer = machine.run("finetune", "task=sst2")

A command runs in a process of its own, forked from one that has imported torch: the libraries read HF_ENDPOINT when
they are imported. What they ask for was taken from huggingface_hub 2.4 and datasets 5.2; `hub.requests` lists it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pty
import re
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.training.ranks import PROCESSES

LARGE = (".safetensors", ".parquet", ".bin", ".model")
"""Suffixes of the files that the hub stores by their hash and answers with a redirect."""
_SECONDS = 120  # for a command


@dataclass
class Fault:
    """What goes wrong with the next requests whose method and path match: `times` of them. status: an error, with its
    code (GatedRepo, ...). cut: the bytes after which the connection is closed. seconds: the wait before an answer.
    then: what happens on the hub meanwhile."""

    pattern: str
    status: int | None = None
    code: str = ""
    cut: int | None = None
    seconds: float = 0.0
    then: Callable[[], object] = lambda: None
    times: int = 1


@dataclass
class Request:
    """A request: its method, its path, its headers in lower case, and the status of the answer."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0


@dataclass
class Repository:
    """The commits of a repository, and the branches that name them. gated: only the token may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def push(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds a commit with these files alone, moves the branch to it, and returns it."""
        content = json.dumps([len(self.commits), *((name, _sha(data)) for name, data in sorted(files.items()))])
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits[commit], self.branches[branch] = dict(files), commit
        return commit

    def commit_of(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class Hub:
    """The server. token: the one that it knows."""

    token = "hf_loopbackSecretToken0123456789"

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        port = self._server.server_address[1]
        self.address, self.large = f"http://127.0.0.1:{port}", f"http://localhost:{port}/large"  # of another host
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def repository(self, kind: str, name: str) -> Repository:
        """The repository of a name, made if there is none. kind: models or datasets."""
        return self.repositories.setdefault((kind, name), Repository())

    def stop(self) -> None:
        """From now on nothing listens: there is no network."""
        self._server.shutdown()
        self._server.server_close()

    def asked(self, pattern: str) -> list[Request]:
        """The requests whose method and path match."""
        return [request for request in self.requests if re.search(pattern, f"{request.method} {request.path}")]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        url, hub = urlsplit(self.path), self.server.hub
        path = unquote(url.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.request_ = Request(self.command, path, {key.lower(): value for key, value in self.headers.items()})
        hub.requests.append(self.request_)
        fault = next(
            (one for one in hub.faults if one.times and re.search(one.pattern, f"{self.command} {path}")), None
        )
        self.cut = None
        if fault is not None:
            fault.times -= 1
            self.cut = fault.cut
            fault.then()
            time.sleep(fault.seconds)
            if fault.status is not None:
                return self._refuse(fault.status, fault.code)
        if match := re.fullmatch(r"/large/(\w+)/(.+)", path):
            content = next(
                data
                for repository in hub.repositories.values()
                for files in repository.commits.values()
                for data in files.values()
                if _sha(data) == match[1]
            )
            return self._send_file(match[2], content, {"ETag": f'"{match[1]}"'})
        if match := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(/.*)?)?", path
        ):
            return self._api(match[1], match[2], match[3], match[4], (match[5] or "").strip("/"), url.query, body)
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve("datasets" if match[1] else "models", match[2], match[3], match[4])
        return self._refuse(404, "")

    def _found(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit of a revision and its files; None after an answer that there is none."""
        hub = self.server.hub
        repository = hub.repositories.get((kind, name))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None:  # to strangers the hub does not say whether a repository exists
            self._refuse(404 if token == hub.token else 401, "RepoNotFound")
        elif repository.gated and token != hub.token:
            self._refuse(401, "GatedRepo")
        elif (commit := repository.commit_of(revision)) is None:
            self._refuse(404, "RevisionNotFound")
        else:
            return commit, repository.commits[commit]
        return None

    def _api(
        self, kind: str, name: str, what: str | None, revision: str | None, folder: str, query: str, body: str
    ) -> None:
        found = self._found(kind, name, revision or "main")
        if found is None:
            return
        commit, files = found
        if what == "paths-info":
            named = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
            paths = [path for path in files if path in named or any(path.startswith(f"{one}/") for one in named)]
            return self._send_json([_entry(path, files[path]) for path in paths])
        if what == "tree":
            inside = {path: data for path, data in files.items() if not folder or path.startswith(f"{folder}/")}
            if folder and not inside:
                return self._refuse(404, "EntryNotFound")
            depth = len(folder.split("/")) if folder else 0
            above = {"/".join(path.split("/")[: depth + 1]) for path in inside} - inside.keys()
            recursive = parse_qs(query).get("recursive", ["false"])[0].lower() == "true"
            entries = [_entry(path, data) for path, data in inside.items() if recursive or path.count("/") == depth]
            return self._send_json(
                [*entries, *({"type": "directory", "oid": commit, "size": 0, "path": one} for one in sorted(above))]
            )
        information = {
            "_id": "0", "id": name, "sha": commit, "private": False, "gated": False, "disabled": False, "tags": [],
            "downloads": 0, "likes": 0, "lastModified": "2024-01-01T00:00:00.000Z",
            "createdAt": "2024-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": path} for path in files],
        }  # fmt: skip
        return self._send_json(information)

    def _resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        found = self._found(kind, name, revision)
        if found is None:
            return
        commit, files = found
        if path not in files:
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
        content, headers = files[path], {"X-Repo-Commit": commit}
        if not path.endswith(LARGE):
            return self._send_file(path, content, {**headers, "ETag": f'"{_entry(path, content)["oid"]}"'})
        large = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{_sha(content)}"'}
        self._send(302, b"", {**headers, **large, "Location": f"{self.server.hub.large}/{_sha(content)}/{path}"})

    def _send_file(self, path: str, content: bytes, headers: dict[str, str]) -> None:
        name = path.rpartition("/")[2]
        headers = {
            **headers, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream",
            "Content-Disposition": f"inline; filename*=UTF-8''{name}; filename=\"{name}\";",
        }  # fmt: skip
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            return self._send(200, content, headers)
        start, end = int(match[1]), min(int(match[2] or len(content) - 1), len(content) - 1)
        if start >= len(content):
            return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        range_ = {"Content-Range": f"bytes {start}-{end}/{len(content)}"}
        self._send(206, content[start : end + 1], {**headers, **range_})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        headers = {**(headers or {}), "X-Error-Message": f"{code or status} of the loopback hub"}
        self._send(
            status, b"{}", {**headers, **({"X-Error-Code": code} if code else {}), "Content-Type": "application/json"}
        )

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.request_.status = status
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: self.cut])
            if self.cut is not None and self.cut < len(content):
                self.close_connection = True


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as the hub lists it."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    large = {"lfs": {"oid": _sha(content), "size": len(content), "pointerSize": 134}} if path.endswith(LARGE) else {}
    return {"type": "file", "oid": blob, "size": len(content), "path": path, **large}


# --- what is on it --------------------------------------------------------------------------------------------------


def weights(family: str, folder: Path) -> dict[str, bytes]:
    """The files of a tiny published model."""
    from tests.weights.published_folders import make  # with huggingface_hub, which a command imports for itself

    make(family, folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def data_set(
    subset: str, columns: Callable[[range], dict[str, Any]], rows: int = 48, start: int = 0
) -> dict[str, bytes]:
    """A data set as the hub has it: parquet files, which the README lists. columns: those of the rows of these numbers;
    a pair is a column of class numbers and the names of the classes."""
    files, lines = {}, ""
    for split, count in (("train", rows), ("validation", rows // 2)):
        values, features = {}, {}
        for name, column in columns(range(start, start + count)).items():
            values[name], names = column if isinstance(column, tuple) else (column, None)
            if names is not None:
                label = {"names": names, "_type": "ClassLabel"}
                features[name] = {"feature": label, "_type": "List"} if isinstance(values[name][0], list) else label
        table, buffer = pa.table(values), io.BytesIO()
        features |= {field.name: _feature(field.type) for field in table.schema if field.name not in features}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        pq.write_table(table.replace_schema_metadata(metadata), buffer)
        files[f"{subset}/{split}-00000-of-00001.parquet"] = buffer.getvalue()
        lines += f"  - split: {split}\n    path: {subset}/{split}-*\n"
    return {**files, "README.md": f"---\nconfigs:\n- config_name: {subset}\n  data_files:\n{lines}---\n".encode()}


def _feature(type_: pa.DataType) -> Any:
    """A column's type in the words of the library datasets."""
    if pa.types.is_struct(type_):
        return {field.name: _feature(field.type) for field in type_}
    if pa.types.is_list(type_):
        return {"feature": _feature(type_.value_type), "_type": "List"}
    return {"dtype": str(type_), "_type": "Value"}


def sst2(rows: int = 48, start: int = 0) -> dict[str, bytes]:
    """A tiny sst2."""

    def columns(numbers: range) -> dict[str, Any]:
        texts = [f"the {('sad', 'fine')[number % 2]} text {number} a b" for number in numbers]
        return {
            "sentence": texts,
            "label": ([number % 2 for number in numbers], ["negative", "positive"]),
            "idx": [*numbers],
        }

    return data_set("sst2", columns, rows, start)


def conll2003() -> dict[str, bytes]:
    """A tiny CoNLL-2003."""

    def columns(numbers: range) -> dict[str, Any]:
        tags = [[0, 1, number % 2] for number in numbers]
        return {
            "tokens": [["the", f"text{number}", "a"] for number in numbers],
            "ner_tags": (tags, ["O", "B-PER", "I-PER"]),
        }

    return data_set("default", columns)


def squad() -> dict[str, bytes]:
    """A tiny SQuAD."""

    def columns(numbers: range) -> dict[str, Any]:
        answers = [{"text": ["a text"], "answer_start": [3]} for _ in numbers]
        texts = {"context": ["is a text b" for _ in numbers], "question": [f"a {number}" for number in numbers]}
        return {"id": [str(number) for number in numbers], **texts, "answers": answers}

    return data_set("plain_text", columns)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The files of a tiny BERT and a tiny T5."""
    return {family: weights(family, tmp_path_factory.mktemp("published") / family) for family in ("bert", "t5")}


@pytest.fixture
def hub(published: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """A hub with the weights that finetuning starts from by default, and sst2, CoNLL-2003 and SQuAD."""
    server = Hub()
    server.repository("models", "google-bert/bert-base-uncased").push(published["bert"])
    server.repository("models", "google-t5/t5-base").push(published["t5"])
    for name, files in (("nyu-mll/glue", sst2()), ("lhoestq/conll2003", conll2003()), ("rajpurkar/squad", squad())):
        server.repository("datasets", name).push(files)
    yield server
    server.stop()


# --- who asks it ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a command printed, and how it ended."""

    status: int | None
    out: str
    err: str


class Machine:
    """A machine of its own: a home with empty caches, which knows no hub but the one on the loopback address."""

    def __init__(self, hub: Hub, root: Path):
        self.place = root / "work"
        self.variables = {
            "HF_ENDPOINT": hub.address,
            "HOME": str(root / "home"),
            "HF_HUB_ETAG_TIMEOUT": "2",
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
        }
        for folder in (self.place, root / "home"):
            folder.mkdir()

    def run(self, *words: str, terminal: bool = False, **variables: str) -> Answer:
        """Runs a command. terminal: whether its errors, and with them the bars of downloads, go to a terminal."""
        outputs = [self.place / name for name in ("stdout.txt", "stderr.txt")]
        process = PROCESSES.Process(target=_run, args=(words, str(self.place), self.variables | variables, terminal))
        process.start()
        process.join(_SECONDS)
        if process.exitcode is None:
            process.kill()
        return Answer(process.exitcode, *(path.read_text(errors="replace") for path in outputs))


def _run(words: tuple[str, ...], place: str, variables: dict[str, str], terminal: bool) -> None:
    assert not {"huggingface_hub", "datasets"} & sys.modules.keys(), "they have read the environment of another process"
    os.chdir(place)
    for name in [name for name in os.environ if name.startswith(("HF_", "XDG_")) or name.lower().endswith("_proxy")]:
        del os.environ[name]
    os.environ |= variables
    for stream, name in ((sys.stdout, "stdout.txt"), (sys.stderr, "stderr.txt")):
        stream.flush()
        target = os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        if terminal and stream is sys.stderr:
            target = _copied_terminal(target)
        os.dup2(target, stream.fileno())
    from lmtool.cli.main import main
    from tests.commands.conftest import skip_reports

    patch, sleep = pytest.MonkeyPatch(), time.sleep
    skip_reports(patch)
    patch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.02)))  # between retries: up to 8 s each
    sys.exit(main(list(words)))


def _copied_terminal(file: int) -> int:
    """A terminal whose content a thread copies into a file."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))  # type: ignore[attr-defined]

    def copy() -> None:
        while content := os.read(ours, 1 << 16):
            os.write(file, content)

    threading.Thread(target=copy, daemon=True).start()
    return theirs


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path)
