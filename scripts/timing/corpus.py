"""Memory and time of `lmtool pretrain` from a text file to its first step: vocabulary, token store, plan, step. The
memory should not depend on the length of the text."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy

from timing.turns import TimingError

WORDS, BATCH = 20_000, 1000
COMMAND = (
    "model=bert_tiny", "data=text", "tokenizer.vocab_size=2000", "objective.pairs=none", "max_steps=1",
    "batch_tokens=512", "batch_examples=null", "device=cpu", "offline=true",
)  # fmt: skip


def random_documents(size: int, seed: int = 0) -> Iterator[str]:
    """Yields documents of 20 to 200 random words with Zipf frequencies, separated by blank lines, until they have
    `size` characters."""
    generator = numpy.random.default_rng(seed)
    letters = numpy.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = numpy.array(["".join(generator.choice(letters, length)) for length in generator.integers(2, 10, WORDS)])
    cumulative = numpy.cumsum(1 / numpy.arange(1, WORDS + 1))
    while size > 0:
        lengths = generator.integers(20, 201, BATCH)
        words_of_batch = words[numpy.searchsorted(cumulative, generator.random(lengths.sum()) * cumulative[-1])]
        for document in numpy.split(words_of_batch, numpy.cumsum(lengths)[:-1]):
            text = " ".join(document) + "\n\n"
            size -= len(text)
            yield text
            if size <= 0:
                return


def run_pretraining(folder: Path, megabytes: int) -> dict[str, Any]:
    """Returns the seconds and the peak resident bytes of the largest process, with an empty cache. Raises TimingError
    if it ends with an error."""
    text, log = folder / "text.txt", folder / "log.txt"
    with text.open("w") as file:
        file.writelines(random_documents(megabytes * 1_000_000))
    command = [sys.executable, "-m", "lmtool", "pretrain", *COMMAND]
    command += [f"data.path={text}", f"cache_dir={folder / 'cache'}", f"run_dir={folder / 'run'}"]
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = (log.read_text().strip().splitlines() or ["no output"])[-1]
        raise TimingError(f"lmtool pretrain ended with status {process.returncode}: {last}", "correct the error", 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return {"megabytes": megabytes, "seconds": time.monotonic() - started, "peak_bytes": usage.ru_maxrss * unit}


def measure_corpora(sizes: Sequence[int]) -> Iterator[str]:
    """Yields the lines of a table, one for each size in megabytes of text."""
    yield "text MB  seconds  peak MB"
    for size in sizes:
        with TemporaryDirectory() as folder:
            row = run_pretraining(Path(folder), size)
        yield f"{row['megabytes']:7,}  {row['seconds']:7.1f}  {row['peak_bytes'] / 1e6:7.0f}"
