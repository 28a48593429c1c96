"""Tokenizing portions of text in parallel processes, one per core.

A child is a Python of its own that imports neither torch nor the program that started it, and is spoken to through its
standard input and output: whatever the parent holds (threads, a device) is not copied into it, and it ends with the
parent, killed or not. What a portion becomes does not depend on where it is tokenized.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import IO, Any, cast

import numpy as np

from lmtool.data.sentences import SentenceSplitter, split_sentences
from lmtool.errors import UserError
from lmtool.system.signals import STATUS
from lmtool.tokenizers.texts import FlatEncoder
from lmtool.tokenizers.tokenizer import Tokenizer

PORTION = 1_000_000
"""Characters tokenized at a time."""


class TextSize:
    """Words of a text, separated by white space, and its bytes in UTF-8; of a document that comes in parts, too."""

    def __init__(self) -> None:
        self.words = self.bytes = 0
        self._within_word = False

    def add(self, text: str, ends: bool) -> None:
        """A part of a document; ends: whether the document ends there."""
        continued = self._within_word and bool(text) and not text[0].isspace()
        self.words += len(text.split()) - continued
        self.bytes += len(text.encode("utf-8", "surrogatepass"))
        self._within_word = not ends and (not text[-1].isspace() if text else self._within_word)


@dataclass
class Portion:
    """pieces: of a complete document its text, of a part of a longer one the sentences that are over with it. ends:
    whether the document ends with the piece. characters: of all pieces. words, bytes: of those cut into sentences."""

    pieces: list[str | list[str]] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    characters: int = 0
    words: int = 0
    bytes: int = 0


def portions(parts: Iterator[tuple[str, bool]], size: int = PORTION) -> Iterator[Portion]:
    """Portions of `size` characters or more, of what `Source.parts` gives: the same each time."""
    portion, splitter, counted, started = Portion(), SentenceSplitter(), TextSize(), False
    for text, ends in parts:
        if ends and not started:
            portion.pieces.append(text)
        else:
            before = counted.words, counted.bytes
            counted.add(text, ends)
            portion.pieces.append(splitter.split(text, ends))
            portion.words += counted.words - before[0]
            portion.bytes += counted.bytes - before[1]
        started = not ends
        portion.ends.append(ends)
        portion.characters += len(text)
        if portion.characters >= size:
            yield portion
            portion = Portion()
    if portion.pieces:
        yield portion


_MOST = 16
"""Processes at most: more wait for the one that reads the text."""
_WORTH = 8_000_000
"""Characters that are worth starting processes for: a second or two of one core."""
_CHILD = """
import json, signal, sys
sys.path[:], ignored = json.loads(sys.argv[1])
for number in ignored:
    signal.signal(number, signal.SIG_IGN)
from lmtool.data.tokenizing import serve
serve()
"""
_ARRAYS = ("tokens", "sentence_lengths", "sentences", "ends")


class ChildDied(UserError):
    """A process that tokenizes ended before its work: killed, most likely for memory."""


@dataclass
class Tokenized:
    """A portion: its ids laid end to end, (T,) uint16 or uint32; the tokens of each sentence that has some, (S,) int64;
    how many of these each piece has, (P,) int64; which pieces end their document, (P,) bool; and its size."""

    tokens: np.ndarray
    sentence_lengths: np.ndarray
    sentences: np.ndarray
    ends: np.ndarray
    unknown: int
    characters: int
    words: int
    bytes: int


def dtype_of(tokenizer: Tokenizer) -> np.dtype[Any]:
    """What an id is stored as."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def tokenized(tokenizer: Tokenizer, encode: FlatEncoder, portion: Portion, dtype: np.dtype[Any]) -> Tokenized:
    """The ids of a portion and the boundaries of its sentences. encode: of the tokenizer, the same for all portions.
    dtype: of an id in the store."""
    size = TextSize()
    sentences: list[list[str]] = []
    for piece in portion.pieces:
        if isinstance(piece, str):
            size.add(piece, True)
            piece = split_sentences(piece)
        sentences.append(piece)
    tokens, lengths = encode([sentence for piece in sentences for sentence in piece])
    piece_of = np.repeat(np.arange(len(sentences)), [len(piece) for piece in sentences])
    kept = lengths > 0
    unknown = int((tokens == tokenizer.roles["unk"]).sum()) if "unk" in tokenizer.roles else 0
    return Tokenized(
        tokens.astype(dtype),
        lengths[kept],
        np.bincount(piece_of[kept], minlength=len(sentences)).astype(np.int64),
        np.array(portion.ends, dtype=bool),
        unknown,
        portion.characters,
        portion.words + size.words,
        portion.bytes + size.bytes,
    )


def workers_for(characters: int) -> int:
    """Processes for so much text; 1: this one alone. What tells the library of the tokenizers how many threads to take
    (`TOKENIZERS_PARALLELISM=false`, `RAYON_NUM_THREADS=N`) holds for processes too."""
    if characters < _WORTH or not sys.executable:
        return 1
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0", "off", "no", "f", "n"):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("RAYON_NUM_THREADS", "")
    return min(int(threads) if threads.isdigit() and int(threads) else cores, _MOST)


def tokenize(tokenizer: Tokenizer, portions: Iterable[Portion], workers: int) -> Generator[Tokenized]:
    """What portions become, in order. workers: processes; 1: this one. No more than two portions a process are
    held. ChildDied where one ends early; UserError of the tokenizer."""
    if workers <= 1:
        # As the children have it: a score of a vocabulary may be read with an error in its last digit.
        copy = Tokenizer.of_plain(tokenizer.to_plain())
        encode = FlatEncoder(copy)
        yield from (tokenized(copy, encode, portion, dtype_of(tokenizer)) for portion in portions)
        return
    with _Children(tokenizer, workers) as children:
        running: deque[Future[Tokenized]] = deque()
        for portion in portions:
            running.append(children.submit(portion))
            if len(running) > 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


class _Children:
    """Some processes, and a thread for each that hands it a portion and waits for what becomes of it."""

    def __init__(self, tokenizer: Tokenizer, count: int):
        self._given = {"tokenizer": tokenizer.to_plain(), "dtype": dtype_of(tokenizer).str}
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        for _ in range(count):
            self._idle.put(None)  # to be started
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokenizing")

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *_: object) -> None:
        # What was tokenized and not taken is not wanted. A thread may have been starting another one meanwhile.
        self._kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._kill()
        for child in self._all:
            child.wait()
            for stream in _pipes(child):
                with suppress(OSError):
                    stream.close()

    def _kill(self) -> None:
        for child in self._all:
            child.kill()

    def submit(self, portion: Portion) -> Future[Tokenized]:
        return self._threads.submit(self._exchange, portion)

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, json.dumps([sys.path, [*STATUS]])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            process_group=0,  # signals are for the parent, which ends them
        )
        self._all.append(child)
        with suppress(OSError):  # one that died at once is found when it is asked for something
            _send(_pipes(child)[0], self._given)
        return child

    def _exchange(self, portion: Portion) -> Tokenized:
        child = self._idle.get() or self._start()
        sink, source = _pipes(child)
        try:
            _send(sink, vars(portion))
            answer = _receive(source)
            heads = answer.pop("arrays", ())
            arrays: dict[str, Any] = {name: np.frombuffer(_read(source, size), dtype) for name, dtype, size in heads}
        except (OSError, EOFError, ValueError) as error:
            child.kill()
            raise ChildDied(
                f"a process that tokenizes ended early (exit status {child.wait()})",
                "the system may be out of memory: the same command continues where this one stopped; "
                "RAYON_NUM_THREADS=1 before it takes one process",
            ) from error
        finally:
            self._idle.put(child)
        if "error" in answer:
            raise UserError(*answer["error"])
        if "traceback" in answer:
            raise RuntimeError(f"a process that tokenizes failed:\n{answer['traceback']}")
        return Tokenized(**arrays, **answer)


def _pipes(child: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    """What a child reads and what it writes."""
    return cast(IO[bytes], child.stdin), cast(IO[bytes], child.stdout)


def _send(stream: IO[bytes], message: Mapping[str, object], arrays: Sequence[np.ndarray] = ()) -> None:
    """A message as one line of JSON, and arrays behind it."""
    stream.write(json.dumps(message).encode() + b"\n")
    for array in arrays:
        stream.write(array.tobytes())
    stream.flush()


def _receive(stream: IO[bytes]) -> dict[str, Any]:
    """The next message. EOFError where there is none."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return cast(dict[str, Any], json.loads(line))


def _read(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


def serve() -> None:
    """What a child does: tokenize what comes in, until nothing does."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing but answers goes to the pipe
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        given = _receive(source)
        tokenizer, dtype = Tokenizer.of_plain(given["tokenizer"]), np.dtype(given["dtype"])
        encode = FlatEncoder(tokenizer)
        while True:
            _send(sink, *_answer(tokenizer, encode, Portion(**_receive(source)), dtype))


def _answer(
    tokenizer: Tokenizer, encode: FlatEncoder, portion: Portion, dtype: np.dtype[Any]
) -> tuple[dict[str, object], list[np.ndarray]]:
    """What a portion becomes, or the error that was raised: its message, and the arrays behind it."""
    try:
        answer = vars(tokenized(tokenizer, encode, portion, dtype))
    except UserError as error:
        return {"error": [error.message, error.hint]}, []
    except Exception:
        import traceback

        return {"traceback": traceback.format_exc()}, []
    arrays = [answer[name] for name in _ARRAYS]
    heads = [(name, array.dtype.str, array.nbytes) for name, array in zip(_ARRAYS, arrays, strict=True)]
    counts = {name: value for name, value in answer.items() if name not in _ARRAYS}
    return {"arrays": heads, **counts}, arrays
