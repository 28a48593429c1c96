"""Text divided into sentences and tokenized in parallel processes, one per core.

A child process is a new Python that imports neither torch nor the parent's main module, so it has no copy of the
parent's threads and device. It communicates over its standard input and output, so it ends with the parent, even if
that is killed. The result does not depend on the number of processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import IO, cast

import numpy as np

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.system.environment import available_cores
from lmtool.system.signals import STATUS
from lmtool.tokenizers.texts import FlatEncoder
from lmtool.tokenizers.tokenizer import Tokenizer

LONGEST_SENTENCE = 10_000
"""Maximum number of characters of a sentence."""
_CLOSING = r"[\"'”’»)\]]*"
# A sentence ends after . ! ? or … and closing quotes or brackets, if white space and anything but a lowercase letter
# follow, or the end of the line; after the full stops of Chinese and Japanese; and before a blank line.
_END = re.compile(
    rf"[.!?…]+{_CLOSING}(?=\s+[\"'“‘«(\[*_—-]*[^\sa-z\"'“‘«(\[*_—-]|[^\S\n]*\n)"
    r"|[。！？]+[」』”’]*(?!\s*$)"
    r"|\S(?=[^\S\n]*\n[^\S\n]*\n)"
)
# For text without a blank line, four times as fast: the last rule can start at any character.
_WITHIN_A_BLOCK = re.compile(_END.pattern.rpartition("|")[0])
_BLANK = re.compile(r"\n[^\S\n]*\n")
_TITLES = (
    "mr mrs ms dr st prof sr jr rev hon capt col gen lt sgt messrs mme mlle vs etc e.g i.e eg ie cf fig no vol ch pp "
    "ed eds al inc ltd co corp jan feb mar apr jun jul aug sep sept oct nov dec approx"
)
_ABBREVIATIONS = frozenset(_TITLES.split())
_WORD = re.compile(r"[\w.]+$")


def split_sentences(text: str) -> list[str]:
    """Returns the sentences of a text by a few rules, including the white space before each. Sentences of more than
    `LONGEST_SENTENCE` characters are split at white space."""
    pieces, start = _sentences(text, len(text))
    pieces.append(text[start:])
    if not pieces[-1].strip() and len(pieces) > 1:
        rest = pieces.pop()
        pieces[-1] += rest
    if max(map(len, pieces)) <= LONGEST_SENTENCE:
        return pieces
    return [part for piece in pieces for part in _split_long(piece)]


class SentenceSplitter:
    """`split_sentences` for a document in parts, of which only the incomplete last sentence is held."""

    def __init__(self) -> None:
        self._rest = ""

    def split(self, text: str, ends: bool) -> list[str]:
        """Returns the sentences that end in a part. ends: whether the document ends there."""
        text, self._rest = self._rest + text, ""
        if ends:
            return split_sentences(text)
        # No rule looks beyond a letter or a digit, so the sentences before the last one are final.
        final = next((index for index in range(len(text) - 1, -1, -1) if text[index].isalnum()), 0)
        pieces, start = _sentences(text, final)
        parts = [part for piece in pieces for part in _split_long(piece)]
        while final - start > LONGEST_SENTENCE:
            first = _split_long(text[start : start + LONGEST_SENTENCE + 1])[0]
            parts.append(first)
            start += len(first)
        self._rest = text[start:]
        return parts


def _sentences(text: str, end: int) -> tuple[list[str], int]:
    """The sentences that end up to a position, and the start of the next one."""
    pieces, start = [], 0
    for match in (_END if _BLANK.search(text) else _WITHIN_A_BLOCK).finditer(text):
        if match.end() > end:
            break
        if match.group() != "." or not _is_abbreviation(text, match.start()):
            pieces.append(text[start : match.end()])
            start = match.end()
    return pieces, start


def _is_abbreviation(text: str, dot: int) -> bool:
    """Whether the word before a full stop is a title, a common abbreviation or an initial."""
    word = _WORD.search(text[max(dot - 12, 0) : dot])
    if word is None:
        return False
    name = word.group()
    return name.lower() in _ABBREVIATIONS or (len(name) == 1 and name.isupper() and name != "I")


def _split_long(piece: str) -> list[str]:
    """Parts of at most LONGEST_SENTENCE characters, split before white space if possible."""
    parts = []
    while len(piece) > LONGEST_SENTENCE:
        window = piece[1 : LONGEST_SENTENCE + 1]
        space = max(window.rfind(character) for character in " \n\t")
        end = space + 1 if space >= 0 else LONGEST_SENTENCE
        parts.append(piece[:end])
        piece = piece[end:]
    return [*parts, piece] if piece else parts


PORTION = 1_000_000  # characters tokenized at a time


class TextSize:
    """The number of words, separated by white space, and of UTF-8 bytes of a text that is added in parts."""

    def __init__(self) -> None:
        self.words = self.bytes = 0
        self._within_word = False

    def add(self, text: str, ends: bool) -> None:
        """Adds a part of a document. ends: whether the document ends there."""
        continued = self._within_word and bool(text) and not text[0].isspace()
        self.words += len(text.split()) - continued
        self.bytes += len(text.encode("utf-8", "surrogatepass"))
        self._within_word = not ends and (not text[-1].isspace() if text else self._within_word)


@dataclass
class Portion:
    """Text to tokenize. pieces: texts of complete documents, or the sentences that end in a part of a longer document.
    ends: for each piece, whether the document ends there. characters: total of all pieces. words, bytes: totals of the
    pieces that are sentences."""

    pieces: list[str | list[str]] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    characters: int = 0
    words: int = 0
    bytes: int = 0


def portions(parts: Iterator[tuple[str, bool]], size: int = PORTION) -> Iterator[Portion]:
    """Yields the portions of at least `size` characters from the parts of `Source.parts`, the same each time."""
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


_MAX_WORKERS = 16  # processes; more of them would wait for the one that reads the text
_MIN_CHARACTERS = 8_000_000  # fewest that several processes tokenize; a second or two of one core
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
    """A child process ended early: killed, most likely because the system is out of memory."""


@dataclass
class Tokenized:
    """A tokenized portion. tokens: (T,) uint16 or uint32 concatenated ids. sentence_lengths: (S,) int64 tokens of each
    sentence that has tokens. sentences: (P,) int64 number of these sentences in each piece. ends: (P,) bool, whether
    the document ends with the piece. unknown: number of unknown tokens."""

    tokens: np.ndarray
    sentence_lengths: np.ndarray
    sentences: np.ndarray
    ends: np.ndarray
    unknown: int
    characters: int
    words: int
    bytes: int


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Returns the type of stored ids."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def tokenize_portion(tokenizer: Tokenizer, encode: FlatEncoder, portion: Portion, dtype: np.dtype) -> Tokenized:
    """Tokenizes a portion. encode: encoder of the tokenizer, for all portions. dtype: the type of stored ids."""
    size = TextSize()
    sentences: list[list[str]] = []
    for piece in portion.pieces:
        if isinstance(piece, str):
            size.add(piece, True)
            piece = split_sentences(piece)
        sentences.append(piece)
    tokens, lengths = encode([sentence for piece in sentences for sentence in piece])
    piece_of = np.repeat(np.arange(len(sentences)), [len(piece) for piece in sentences])
    has_tokens = lengths > 0
    unknown = int((tokens == tokenizer.roles["unk"]).sum()) if "unk" in tokenizer.roles else 0
    return Tokenized(
        tokens.astype(dtype),
        lengths[has_tokens],
        np.bincount(piece_of[has_tokens], minlength=len(sentences)).astype(np.int64),
        np.array(portion.ends, dtype=bool),
        unknown,
        portion.characters,
        portion.words + size.words,
        portion.bytes + size.bytes,
    )


def workers_for(characters: int) -> int:
    """Returns the number of processes for a text; 1: only this one. The variables for threads of the tokenizers library
    (`TOKENIZERS_PARALLELISM=false`, `RAYON_NUM_THREADS=N`) also limit processes."""
    if characters < _MIN_CHARACTERS or not sys.executable:
        return 1
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0", "off", "no", "f", "n"):
        return 1
    threads = os.environ.get("RAYON_NUM_THREADS", "")
    return min(int(threads) if threads.isdigit() and int(threads) else available_cores(), _MAX_WORKERS)


def tokenize(tokenizer: Tokenizer, portions: Iterable[Portion], workers: int) -> Generator[Tokenized]:
    """Tokenizes portions in order, of which at most two per process are held. workers: number of processes; 1: only
    this one. Raises ChildDied if a child process ends early, and UserError if the tokenizer fails on a text."""
    if workers <= 1:
        # A copy like that of a child process, because the last digit of scores may change when they are read.
        copy = Tokenizer.from_plain(tokenizer.to_plain())
        encode = FlatEncoder(copy)
        yield from (tokenize_portion(copy, encode, portion, dtype_of(tokenizer)) for portion in portions)
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
    """Child processes, each with a thread that sends it portions and waits for the results."""

    def __init__(self, tokenizer: Tokenizer, count: int):
        self._setup = {"tokenizer": tokenizer.to_plain(), "dtype": dtype_of(tokenizer).str}
        self._all: list[subprocess.Popen[bytes]] = []
        self._idle: SimpleQueue[subprocess.Popen[bytes] | None] = SimpleQueue()
        for _ in range(count):
            self._idle.put(None)  # a process that is started when it is needed
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokenizing")

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *_: object) -> None:
        # Once more after the threads have ended, because one of them may have been starting a process.
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
            process_group=0,  # so that only the parent receives signals
        )
        self._all.append(child)
        with suppress(OSError):  # `_exchange` reports a process that died at once
            _send(_pipes(child)[0], self._setup)
        return child

    def _exchange(self, portion: Portion) -> Tokenized:
        child = self._idle.get() or self._start()
        sink, source = _pipes(child)
        try:
            _send(sink, vars(portion))
            answer = _receive(source)
            layouts = answer.pop("arrays", ())
            arrays: JsonObject = {name: np.frombuffer(_read(source, size), dtype) for name, dtype, size in layouts}
        except (OSError, EOFError, ValueError) as error:
            child.kill()
            raise ChildDied(
                f"a tokenizing process ended early (exit status {child.wait()}); the system may be out of memory",
                "run the same command again to continue; put RAYON_NUM_THREADS=1 before it to use one process",
            ) from error
        finally:
            self._idle.put(child)
        if "error" in answer:
            raise UserError(*answer["error"])
        if "traceback" in answer:
            raise RuntimeError(f"a tokenizing process failed:\n{answer['traceback']}")
        return Tokenized(**arrays, **answer)


def _pipes(child: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    return cast(IO[bytes], child.stdin), cast(IO[bytes], child.stdout)


def _send(stream: IO[bytes], message: Mapping[str, object], arrays: Sequence[np.ndarray] = ()) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    for array in arrays:
        stream.write(array.tobytes())
    stream.flush()


def _receive(stream: IO[bytes]) -> JsonObject:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return cast(JsonObject, json.loads(line))


def _read(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


def serve() -> None:
    """Runs a child process: tokenizes portions until the input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # keep other output out of the pipe
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        setup = _receive(source)
        tokenizer, dtype = Tokenizer.from_plain(setup["tokenizer"]), np.dtype(setup["dtype"])
        encode = FlatEncoder(tokenizer)
        while True:
            _send(sink, *_answer(tokenizer, encode, Portion(**_receive(source)), dtype))


def _answer(
    tokenizer: Tokenizer, encode: FlatEncoder, portion: Portion, dtype: np.dtype
) -> tuple[dict[str, object], list[np.ndarray]]:
    try:
        answer = vars(tokenize_portion(tokenizer, encode, portion, dtype))
    except UserError as error:
        return {"error": [error.message, error.hint]}, []
    except Exception:
        import traceback

        return {"traceback": traceback.format_exc()}, []
    arrays = [answer[name] for name in _ARRAYS]
    layouts = [(name, array.dtype.str, array.nbytes) for name, array in zip(_ARRAYS, arrays, strict=True)]
    counts = {name: value for name, value in answer.items() if name not in _ARRAYS}
    return {"arrays": layouts, **counts}, arrays
