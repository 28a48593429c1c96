"""How fast a token store is built, and in how much memory, beside `datasets.map` with the same tokenizer.

    python scripts/store_rate.py TEXT... --bytes 100_000_000 --workers 1 2

TEXT are files or folders of text, repeated until there are as many bytes. Every build is a process of its own, in turns
with its peer; the memory is that of all its processes together, sampled every 50 ms: their proportional share (PSS), in
which a page that several of them have in common counts once. Their processor seconds say what a build costs where the
machine is shared. The rate of a build is of tokenizing; `in all` has reading and hashing the text before it, and for
the peer making its table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", nargs="+")
    parser.add_argument("--bytes", type=int, default=100_000_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokenizer", default="wordpiece", help="kind that is trained on the text; or a folder")
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--folder", help="where the corpus, the tokenizer and the stores are written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        size = corpus(options.text, folder / "corpus.txt", options.bytes)
        make_tokenizer(options.tokenizer, folder)
        print(f"{size / 1e6:,.1f} MB of text, tokenizer {options.tokenizer}, load {os.getloadavg()[0]:.1f} before")
        print(f"{'':24}{'MB/s':>8}{'tokens/s':>12}{'seconds':>10}{'in all':>10}{'processor':>11}{'peak MB':>10}")
        for workers in options.workers:
            for build in ("store", *([] if options.without_peer else ["datasets"])):
                show(build, workers, measured(build, workers, folder))


def corpus(places: list[str], path: Path, size: int) -> int:
    """Write `size` bytes or a document more: the text again and again, its documents numbered."""
    texts = [
        file for place in map(Path, places) for file in (sorted(place.rglob("*.txt")) if place.is_dir() else [place])
    ]
    written = number = 0
    with path.open("wb") as out:
        while written < size:
            before = written
            for file in texts:
                for block in file.read_bytes().replace(b"\r", b"").split(b"\n\n"):
                    if block.strip() and written < size:
                        written += out.write(b"%d. " % number + block.strip() + b"\n\n")
                        number += 1
            if written == before:
                raise SystemExit("there is no text")
    return written


def make_tokenizer(kind: str, folder: Path) -> None:
    """A saved tokenizer, trained on a part of the corpus where none is named."""
    sys.path.insert(0, str(ROOT))
    from lmtool.config.tables import Choice, build
    from lmtool.resolver.schema import run as configs  # noqa: F401  enters the kinds into the table
    from lmtool.tokenizers.tokenizer import Tokenizer

    if Path(kind).is_dir():
        Tokenizer.load(kind).save(folder / "tokenizer")
        return
    with (folder / "corpus.txt").open(encoding="utf-8") as file:
        text = file.read(3_000_000)
    config = Choice("tokenizer").validate({"name": kind, "vocab_size": VOCABULARY})
    assert config is not None
    build(config, [text], VOCABULARY).save(folder / "tokenizer")


def measured(build: str, workers: int, folder: Path) -> dict[str, Any]:
    """One build in a process of its own: its report, `processor` seconds and `peak` bytes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": str(workers), "HF_HUB_OFFLINE": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false"} if build == "datasets" else {}
    command = [sys.executable, __file__, f"--{build}", str(folder), str(workers)]
    before = os.times()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True, text=True)
    peak, done = [0], threading.Event()
    watching = threading.Thread(target=watch, args=(process.pid, peak, done))
    watching.start()
    output, _ = process.communicate()
    done.set()
    watching.join()
    if process.returncode:
        raise SystemExit(f"{build} with {workers} ended with {process.returncode}")
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {**json.loads(output.splitlines()[-1]), "processor": spent, "peak": peak[0]}


def watch(session: int, peak: list[int], done: threading.Event) -> None:
    while not done.wait(0.05):
        peak[0] = max(
            peak[0], sum(share(process) for process in Path("/proc").iterdir() if in_session(process, session))
        )


def in_session(process: Path, session: int) -> bool:
    """Whether a folder of /proc is of a process that the build started, or of the build."""
    if not process.name.isdigit():
        return False
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session
    except (OSError, IndexError):
        return False


def share(process: Path) -> int:
    """Bytes of a process, what it has in common with others by its share."""
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def show(build: str, workers: int, report: dict[str, Any]) -> None:
    name = "lmtool" if build == "store" else f"datasets.map num_proc={workers}"
    name = f"{name} · {workers}" if build == "store" else name
    rate, tokens = report["bytes"] / report["seconds"] / 1e6, report["tokens"] / report["seconds"]
    print(
        f"{name:24}{rate:8.2f}{tokens:12,.0f}{report['seconds']:10.1f}{report['in_all']:10.1f}"
        f"{report['processor']:11.1f}{report['peak'] / 1e6:10.0f}",
        flush=True,
    )


def store(folder: Path, workers: int) -> dict[str, Any]:
    """Ours: as `lmtool pretrain data=text` builds it."""
    began = time.perf_counter()
    from lmtool.data.configs import TextConfig
    from lmtool.data.store import open_store
    from lmtool.data.text import TextSource
    from lmtool.tokenizers.tokenizer import Tokenizer

    source = TextSource(TextConfig(path=str(folder / "corpus.txt"), validation_fraction=1e-6))
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        metadata = open_store(source, "train", Tokenizer.load(folder / "tokenizer"), cache).metadata
    return {**{key: metadata[key] for key in ("bytes", "tokens", "seconds")}, "in_all": time.perf_counter() - began}


def datasets_map(folder: Path, workers: int) -> dict[str, Any]:
    """The peer's: a table of documents, and its map over batches of a thousand."""
    began = time.perf_counter()
    import datasets
    import tokenizers

    datasets.disable_progress_bars()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))

    def encoded(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        batch = tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"input_ids": [encoding.ids for encoding in batch]}

    with tempfile.TemporaryDirectory(dir=folder) as cache:
        files = str(folder / "corpus.txt")
        table = datasets.load_dataset("text", data_files=files, split="train", sample_by="paragraph", cache_dir=cache)
        mapping = time.perf_counter()
        mapped = table.map(encoded, batched=True, num_proc=workers, remove_columns=["text"])
        seconds = time.perf_counter() - mapping
        in_all = time.perf_counter() - began
        tokens = sum(len(ids) for batch in mapped.iter(1000) for ids in batch["input_ids"])
        size = (folder / "corpus.txt").stat().st_size
    return {"bytes": size, "tokens": tokens, "seconds": seconds, "in_all": in_all}


if __name__ == "__main__":
    builds = {"--store": store, "--datasets": datasets_map}
    if len(sys.argv) == 4 and sys.argv[1] in builds:
        print(json.dumps(builds[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
