"""Memory and time of commands that read large files: `pretrain` from a text to its first step (vocabulary, token
store, plan, step), and `predict` and `embed` of one text per line. The memory should not depend on the size of the
file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy

from timing.turns import TimingError

WORDS, BATCH = 20_000, 1000
DOCUMENT = "\n\n"
RUN = ("max_steps=1", "batch_tokens=512", "batch_examples=null", "device=cpu", "offline=true")
PRETRAIN = (
    "pretrain", "model=bert_tiny", "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2",
    "data=text", "tokenizer.vocab_size=2000", "objective.pairs=none", *RUN,
)  # fmt: skip
USE = ("device=cpu", "offline=true")


def random_documents(size: int, end: str, seed: int = 0) -> Iterator[str]:
    """Yields documents of 20 to 200 random words with Zipf frequencies, followed by `end`, until they have `size`
    characters."""
    generator = numpy.random.default_rng(seed)
    letters = numpy.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = numpy.array(["".join(generator.choice(letters, length)) for length in generator.integers(2, 10, WORDS)])
    cumulative = numpy.cumsum(1 / numpy.arange(1, WORDS + 1))
    while size > 0:
        lengths = generator.integers(20, 201, BATCH)
        words_of_batch = words[numpy.searchsorted(cumulative, generator.random(lengths.sum()) * cumulative[-1])]
        for document in numpy.split(words_of_batch, numpy.cumsum(lengths)[:-1]):
            text = f"{' '.join(document)}{end}"
            size -= len(text)
            yield text
            if size <= 0:
                return


def write_text(path: Path, megabytes: int, end: str) -> Path:
    with path.open("w") as file:
        file.writelines(random_documents(megabytes * 1_000_000, end))
    return path


def run_command(folder: Path, *words: str) -> tuple[float, float]:
    """Runs a command of lmtool. Returns its seconds, and the peak resident megabytes of its largest process. Raises
    TimingError if it ends with an error."""
    log = folder / "log.txt"
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "lmtool", *words], stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = (log.read_text().strip().splitlines() or ["no output"])[-1]
        raise TimingError(f"lmtool {words[0]} ended with status {process.returncode}: {last}", "correct the error", 1)
    return time.monotonic() - started, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def places(folder: Path, run: str) -> tuple[str, str]:
    return f"cache_dir={folder / 'cache'}", f"run_dir={folder / run}"


def train(folder: Path) -> Path:
    """Returns the folder of a classifier with a step of pretraining and one of finetuning."""
    run_command(folder, *PRETRAIN, f"data.path={write_text(folder / 'small.txt', 1, DOCUMENT)}", *places(folder, "own"))
    rows = "".join(f"{number % 2},{text}" for number, text in enumerate(random_documents(40_000, "\n")))
    (folder / "labels.csv").write_text(f"label,text\n{rows}")
    paths = (f"task={folder / 'labels.csv'}", f"checkpoint={folder / 'own'}")
    run_command(folder, "finetune", *RUN, *paths, *places(folder, "classifier"))
    return folder / "classifier"


def measure_corpora(sizes: Sequence[int]) -> Iterator[str]:
    """Yields the lines of a table, three for each size in megabytes of text."""
    yield "text MB  command   seconds  peak MB"
    with TemporaryDirectory() as name:
        folder = Path(name)
        use = (f"checkpoint={train(folder)}", f"input={folder / 'lines.txt'}", f"cache_dir={folder / 'cache'}", *USE)
        for size in sizes:
            text = write_text(folder / "text.txt", size, DOCUMENT)
            write_text(folder / "lines.txt", size, "\n")
            commands = {
                "pretrain": (*PRETRAIN, f"data.path={text}", *places(folder, f"run_{size}")),
                "predict": ("predict", *use, f"output={folder / f'labels_{size}.jsonl'}"),
                "embed": ("embed", *use, f"output={folder / f'vectors_{size}.npy'}"),
            }
            for command, words in commands.items():
                seconds, peak = run_command(folder, *words)
                yield f"{size:7,}  {command:8}  {seconds:7.1f}  {peak:7.0f}"
