from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lmtool.data import store as store_module
from lmtool.data import tokenizing
from lmtool.data import vocabulary as vocabulary_module
from lmtool.data.store import open_store, release, writing
from lmtool.data.tokenizing import LONGEST_SENTENCE, SentenceSplitter, portions, split_sentences
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.errors import UserError
from lmtool.learners.baseline import token_counts
from lmtool.system.signals import STATUS
from lmtool.tokenizers.configs import WordPieceConfig
from lmtool.tokenizers.tokenizer import SAVED_FILES as TOKENIZER

from .data_fixtures import ListSource, bytebpe, documents, wordpiece


@pytest.fixture(scope="module")
def tokenizers():
    return {"wordpiece": wordpiece(), "bytebpe": bytebpe()}


SENTENCES = {
    "Mr. Smith went to St. Ives. He saw Dr. No! Did J. K. see him?": [
        "Mr. Smith went to St. Ives.",
        " He saw Dr. No!",
        " Did J. K. see him?",
    ],
    '"Stop." She did.\nThen (as they say.) It ended … So.': [
        '"Stop."',
        " She did.",
        "\nThen (as they say.)",
        " It ended …",
        " So.",
    ],
    "pi is 3.14 e.g. here. and v. small": ["pi is 3.14 e.g. here. and v. small"],
    "no stop\n\nnew block here": ["no stop", "\n\nnew block here"],
    "one line .\nand another .\n": ["one line .", "\nand another .\n"],
    "我是猫。你是狗！好": ["我是猫。", "你是狗！", "好"],
    "": [""],
    " \n ": [" \n "],
}


@pytest.mark.parametrize("text", SENTENCES)
def test_text_is_split_into_sentences(text):
    assert split_sentences(text) == SENTENCES[text]


def test_sentences_cover_the_text_and_have_limited_length():
    drawn = random.Random(1)
    for _ in range(200):
        text = "".join(drawn.choice("aB .!?\n\"'”。…é1\t") for _ in range(drawn.randrange(60)))
        assert "".join(split_sentences(text)) == text
        block = text.replace("\n", " ")  # without blank lines fewer rules apply, with the same result
        assert [m.span() for m in tokenizing._WITHIN_A_BLOCK.finditer(block)] == [
            m.span() for m in tokenizing._END.finditer(block)
        ]
    for long in ("word " * 5000, "x" * 35_000, "a\n" * 20_000):
        pieces = split_sentences(long)
        assert "".join(pieces) == long and max(map(len, pieces)) <= LONGEST_SENTENCE


def test_sentences_do_not_depend_on_parts():
    drawn, more = random.Random(2), 0
    for number in range(2000):
        letters = drawn.choice(["aB .!?\n\"'”。…é1\t」_(", "a. \n", "。」x "])
        text = "".join(drawn.choice(letters) for _ in range(drawn.randrange(1, 80)))
        if number % 50 == 0:  # longer than the limit of a sentence
            text = text.replace("a", "word " * 3000).replace("x", "x" * 12_000)
        splitter, sentences, start = SentenceSplitter(), [], 0
        while start < len(text):
            end = start + drawn.randrange(1, max(len(text) // 3, 2) + 1)
            sentences += splitter.split(text[start:end], end >= len(text))
            more += bool(sentences) and end < len(text)
            start = end
        assert sentences == split_sentences(text), repr(text[:200])
    assert more > 500


def test_store_does_not_depend_on_parts(tmp_path, tokenizers):
    texts = ["", *documents(30, 3), "\u200b" * 50, "The cat sat. " * 300, " ", *documents(5, 4)]
    whole = open_store(ListSource(texts, []), "train", tokenizers["wordpiece"], tmp_path)
    source = ListSource(texts, [], "in parts")
    source.parts = lambda split: ((text[at : at + 7], at + 7 >= len(text)) for text in texts for at in starts(text))
    parted = open_store(source, "train", tokenizers["wordpiece"], tmp_path)
    for name in ("tokens", "document_offsets", "sentence_offsets", "document_sentences"):
        assert np.array_equal(getattr(parted, name), getattr(whole, name)), name
    same = {"documents", "documents_without_tokens", "sentences", "tokens", "characters", "unknown_fraction"}
    assert {key: whole.metadata[key] for key in same} == {key: parted.metadata[key] for key in same}


def starts(text: str) -> range:
    return range(0, max(len(text), 1), 7)


def test_memory_does_not_grow_with_text(tmp_path, tokenizers, monkeypatch):
    """Memory does not grow with the text while a store is written, for many documents or a single one. If the tokens
    were kept, the larger text would need 1.47 times as much."""
    monkeypatch.setattr(store_module, "portions", partial(portions, size=3500))
    text, peaks = "The cat sat on the mat. " * 70, {}
    for count in (30, 120):
        for many in (True, False):
            source = ListSource([], [], f"{count} {many}")
            source.parts = lambda split, count=count, many=many: ((text, many or n == count - 1) for n in range(count))
            tracemalloc.start()
            open_store(source, "train", tokenizers["wordpiece"], tmp_path)
            peaks[count, many] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    for many in (True, False):
        assert peaks[120, many] < 1.2 * peaks[30, many], peaks


@pytest.mark.parametrize("name", ["wordpiece", "bytebpe"])
def test_store_contains_tokenizer_output(tmp_path, tokenizers, name):
    tokenizer = tokenizers[name]
    texts = ["", "The cat sat. The dog ran!\n\nA hill.", "\u200b", *documents(40, 3), "the cat " * 3000]
    store = open_store(ListSource(texts, ["x"]), "train", tokenizer, tmp_path)
    whole = [tokenizer.encode(text) for text in texts]
    kept = [ids for ids in whole if len(ids)]
    assert len(store) == len(kept) and store.tokens.dtype == np.uint16
    for number, ids in enumerate(kept):
        assert np.array_equal(store.document(number), ids)
    assert store.lengths.tolist() == [len(ids) for ids in kept]
    assert np.array_equal(store.sentence_offsets[store.document_sentences], store.document_offsets)
    assert (np.diff(store.sentence_offsets) > 0).all() and (np.diff(store.document_sentences) > 0).all()
    assert store.document_sentences[1] - store.document_sentences[0] == 3
    metadata = store.metadata
    assert metadata["documents_without_tokens"] == len(texts) - len(kept)
    assert metadata["documents"] == len(store) and metadata["sentences"] == len(store.sentence_offsets) - 1
    assert metadata["tokens"] == len(store.tokens)
    unknown = 0 if name == "bytebpe" else (store.tokens == tokenizer.role("unk")).sum()
    assert round(metadata["unknown_fraction"] * metadata["tokens"]) == unknown


def test_release_frees_mapped_pages(tmp_path, tokenizers):
    """Counting tokens maps the whole store, and mapped pages count as memory of the process until released."""
    small = open_store(ListSource(["The cat sat on the mat. "], []), "train", tokenizers["wordpiece"], tmp_path)
    np.tile(small.tokens, 300_000).tofile(tmp_path / "tokens")
    tokens = np.memmap(tmp_path / "tokens", small.tokens.dtype, mode="r").view(np.ndarray)
    assert type(tokens.base) is type(small.tokens.base)
    before = mapped_kilobytes()
    counts = np.bincount(tokens, minlength=200)
    assert mapped_kilobytes() - before > 0.8 * tokens.nbytes / 1024
    release(tokens)
    assert mapped_kilobytes() - before < 0.1 * tokens.nbytes / 1024
    assert np.array_equal(token_counts(tokens, 200), counts)
    assert mapped_kilobytes() - before < 0.1 * tokens.nbytes / 1024
    release(np.arange(3))  # an array without a file is accepted


def mapped_kilobytes() -> int:
    """Resident kilobytes of files that the process has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))


def test_existing_store_is_opened_without_reading_text(tmp_path, tokenizers):
    source = ListSource(documents(10), documents(3, 1))
    first = open_store(source, "train", tokenizers["wordpiece"], tmp_path)
    again = open_store(source, "train", tokenizers["wordpiece"], tmp_path)
    assert source.reads == 1 and again.metadata == first.metadata and np.array_equal(again.tokens, first.tokens)
    with pytest.raises(ValueError):
        again.tokens[0] = 1


def test_store_key_depends_on_split_tokenizer_and_text(tmp_path, tokenizers):
    source, other = ListSource(documents(10), documents(3, 1)), ListSource(documents(10), [], "other")
    stores = [
        open_store(source, "train", tokenizers["wordpiece"], tmp_path),
        open_store(source, "validation", tokenizers["wordpiece"], tmp_path),
        open_store(source, "train", tokenizers["bytebpe"], tmp_path),
        open_store(other, "train", tokenizers["wordpiece"], tmp_path),
    ]
    assert len({store.folder for store in stores}) == 4


def test_tokenizing_reports_progress(tmp_path, tokenizers):
    stages = []
    source = ListSource(documents(10), [])
    open_store(source, "train", tokenizers["wordpiece"], tmp_path, lambda *stage: stages.append(stage))
    *_, (stage, done, total, rate) = stages
    assert (stage, done, total) == ("tokenizing train", source.characters("train"), source.characters("train"))
    assert re.fullmatch(r"[\d.]+ MB/s, [\d,]+ tokens/s", rate)


FILES = ("tokens.bin", "document_offsets.bin", "sentence_offsets.bin", "document_sentences.bin", "manifest.json")


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zero_page(path):
    """Zeroes the second page of a file, or all of a smaller one."""
    content = bytearray(path.read_bytes())
    start = 4096 if len(content) > 4096 else 0
    end = min(start + 4096, len(content))
    assert any(content[start:end])
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "deleted": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "bit flip": flip_bit,
    "zeroed": zero_page,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damaged_store_is_rebuilt_and_reported(tmp_path, tokenizers, name, damage):
    source = ListSource(documents(300), [])
    intact = open_store(source, "train", tokenizers["wordpiece"], tmp_path)
    expected, path = np.array(intact.tokens), intact.folder / name
    DAMAGES[damage](path)
    messages = []
    store = open_store(source, "train", tokenizers["wordpiece"], tmp_path, lambda stage, *_: messages.append(stage))
    assert source.reads == 2 and np.array_equal(store.tokens, expected)  # read for each of the two stores
    assert messages[0].startswith(f"warning: {path} ") and messages[0].endswith("; building it again")
    folder, lock = sorted(store.folder.parent.iterdir())  # nothing is left of the damaged store
    assert folder == store.folder and lock.suffix == ".lock"
    messages.clear()
    open_store(source, "train", tokenizers["wordpiece"], tmp_path, lambda stage, *_: messages.append(stage))
    assert not messages and source.reads == 2


def test_store_of_another_key_is_rebuilt(tmp_path, tokenizers):
    source, other = ListSource(documents(30), []), ListSource(documents(30, 1), [], "other")
    first = open_store(source, "train", tokenizers["wordpiece"], tmp_path)
    second = open_store(other, "train", tokenizers["wordpiece"], tmp_path)
    expected = np.array(second.tokens)
    shutil.rmtree(second.folder)
    shutil.copytree(first.folder, second.folder)
    assert np.array_equal(open_store(other, "train", tokenizers["wordpiece"], tmp_path).tokens, expected)


def test_store_damaged_while_written_is_refused(tmp_path, tokenizers, monkeypatch):
    """The disk returns other bytes than were written."""
    written = store_module.write_manifest

    def write(folder, metadata):
        written(folder, metadata)
        flip_bit(folder / "tokens.bin")

    monkeypatch.setattr(store_module, "write_manifest", write)
    with pytest.raises(UserError, match=r"cache_dir=.*tokens\.bin is damaged") as caught:
        open_store(ListSource(documents(30), []), "train", tokenizers["wordpiece"], tmp_path)
    assert "set cache_dir=" in caught.value.hint


def test_damaged_vocabulary_is_retrained_and_reported(tmp_path):
    source = ListSource(documents(50), [])
    config = WordPieceConfig()
    messages = []

    def trained():
        return trained_tokenizer(config, source, 200, tmp_path, lambda stage, *_: messages.append(stage)).fingerprint

    expected = trained()
    (folder,) = (path for path in (tmp_path / "tokenizers").iterdir() if path.is_dir())
    assert {path.name for path in folder.iterdir()} == {*TOKENIZER, "manifest.json"}
    for name in (*TOKENIZER, "manifest.json"):
        for damage in DAMAGES.values():
            damage(folder / name)
            reads = source.reads
            assert trained() == expected and source.reads == reads + 1
            assert len(messages) == 1 and messages[0].startswith(f"warning: {folder / name} ")
            messages.clear()
            assert trained() == expected and source.reads == reads + 1 and not messages


def test_existing_cache_is_read_without_writing(tmp_path, monkeypatch):
    """A shared cache may be read-only."""
    source = ListSource(documents(50), [])

    def opened():
        tokenizer = trained_tokenizer(WordPieceConfig(), source, 200, tmp_path)
        return open_store(source, "train", tokenizer, tmp_path)

    tokens, reads = opened().tokens.copy(), source.reads

    def refused(*args, **kwargs):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(store_module, "hold_lock", refused)
    monkeypatch.setattr(Path, "mkdir", refused)
    assert np.array_equal(opened().tokens, tokens) and source.reads == reads


def test_vocabulary_is_trained_on_bounded_sample(tmp_path, monkeypatch):
    """The sample covers all parts of the text evenly, and is streamed."""
    seen, notes = [], []
    learn = vocabulary_module.build

    def build(config, texts, vocab_size):
        assert not isinstance(texts, list | tuple | str)
        return learn(config, (seen.append(text) or text for text in texts), vocab_size)

    monkeypatch.setattr(vocabulary_module, "build", build)
    monkeypatch.setattr(WordPieceConfig, "most_characters", 20_000)
    for count in (100, 4000):
        texts = [f"document {number} {text}" for number, text in enumerate(documents(count))]
        size = sum(map(len, texts))
        trained_tokenizer(
            WordPieceConfig(), ListSource(texts, [], f"{count}"), 200, tmp_path, lambda stage, *_: notes.append(stage)
        )
        if size <= 20_000:
            assert seen == texts and not notes
        else:
            assert 15_000 < sum(map(len, seen)) < 25_000 and "the vocabulary is trained on a sample" in notes[0]
            numbers = np.array([int(text.split()[1]) for text in seen])
            assert np.all(np.diff(numbers) > 0) and 0.4 < numbers.mean() / count < 0.6
        seen.clear()


def test_store_does_not_depend_on_process_count(tmp_path, tokenizers, monkeypatch):
    """Also for documents in parts, whose sentences depend on earlier parts."""
    texts = ["", *documents(400, 3), "\u200b" * 50, "The cat sat. A dog ran " * 700, " ", *documents(200, 4)]
    monkeypatch.setattr(store_module, "portions", partial(portions, size=2_000))
    stores = []
    for workers in (1, 2):
        source = ListSource(texts, [], f"{workers} processes")
        source.parts = lambda split: (
            (text[at : at + 70], at + 70 >= len(text)) for text in texts for at in pieces(text)
        )
        monkeypatch.setattr(store_module, "workers_for", lambda characters, workers=workers: workers)
        stores.append(open_store(source, "train", tokenizers["wordpiece"], tmp_path))
    differing = {"source", "seconds", "bytes_per_second", "tokens_per_second"}
    assert len({str({**store.metadata, **dict.fromkeys(differing)}) for store in stores}) == 1
    for file in store_module.FILES.values():
        assert len({(store.folder / file).read_bytes() for store in stores}) == 1, file
    assert stores[0].metadata["words"] == sum(len(text.split()) for text in texts)
    assert stores[0].metadata["bytes"] == sum(len(text.encode()) for text in texts)


def pieces(text: str) -> range:
    return range(0, max(len(text), 1), 70)


def test_dead_tokenizing_process_is_reported(tokenizers, monkeypatch):
    monkeypatch.setattr(tokenizing, "_CHILD", "raise SystemExit(3)")
    with pytest.raises(UserError, match=r"ended early \(exit status 3\)") as caught:
        list(tokenizing.tokenize(tokenizers["wordpiece"], portions(iter([("The cat sat.", True)])), 2))
    assert "run the same command again" in caught.value.hint


def test_tokenizing_processes_ignore_signals(tokenizers):
    """A batch system may send signals to every process of a job, and tokenizing processes ignore them."""
    with tokenizing._Children(tokenizers["wordpiece"], 1) as children:
        for _ in range(2):
            portion = next(portions(iter([("The cat sat.", True)])))
            assert len(children.submit(portion).result().tokens)
            for number in STATUS:
                children._all[0].send_signal(number)
        assert children._all[0].poll() is None


def test_process_count_depends_on_text_and_environment(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    assert (tokenizing.workers_for(1_000_000), tokenizing.workers_for(10**9)) == (1, 16)
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    assert tokenizing.workers_for(10**9) == 3
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert tokenizing.workers_for(10**9) == 1


KILLED = """
import sys, time; from functools import partial
from lmtool.data import store; from lmtool.data.tokenizing import portions
from lmtool.tokenizers.tokenizer import Tokenizer; from tests.data.data_fixtures import ListSource, documents
store.PORTIONS_PER_ROW, store.portions = 2, partial(portions, size=1000)
waits = lambda stage, done, *_: time.sleep(60 if done > 9000 else 0)
source = ListSource(documents(200), [])
store.open_store(source, "train", Tokenizer.load(sys.argv[1] + "/tokenizer"), sys.argv[1] + "/killed", waits)
"""


def test_killed_build_is_resumed(tmp_path, tokenizers, monkeypatch):
    """Finished, intact portions are kept; everything after a damaged one is tokenized again."""
    tokenizers["wordpiece"].save(tmp_path / "tokenizer")
    source, killed = ListSource(documents(200), []), tmp_path / "killed" / "stores"
    environment = {**os.environ, "PYTHONPATH": ":".join([str(Path(__file__).parents[2]), *sys.path])}
    building = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=environment)
    deadline = time.monotonic() + 60
    while len(rows := [line for path in killed.glob(".*.jsonl") for line in path.open()]) < 4:
        assert time.monotonic() < deadline and building.poll() is None
        time.sleep(0.02)
    building.send_signal(signal.SIGKILL)
    building.wait()
    monkeypatch.setattr(store_module, "portions", partial(portions, size=1000))
    expected = open_store(source, "train", tokenizers["wordpiece"], tmp_path)
    count = len(list(portions(source.parts("train"), 1000)))
    for damage, kept in ((None, 2 * len(rows)), ("document_offsets.bin", 0), ("journal", 2 * (len(rows) - 1))):
        place, tokenized, messages = tmp_path / f"{damage}", [], []
        shutil.copytree(killed.parent, place)
        (draft,) = (path for path in (place / "stores").glob(".*") if path.is_dir())
        if damage == "journal":
            journal = draft.with_name(f"{draft.name}.jsonl")
            journal.write_bytes(journal.read_bytes().removesuffix(b"}\n") + b" \n")
        elif damage is not None:
            zero_page(draft / damage)

        def record(*arguments, tokenized=tokenized, original=tokenizing.tokenize_portion):
            tokenized.append(arguments)
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(tokenizing, "tokenize_portion", record)
            store = open_store(
                source, "train", tokenizers["wordpiece"], place, lambda stage, *_, told=messages: told.append(stage)
            )
        assert len(tokenized) == count - kept, damage
        assert any("an earlier build was interrupted" in message for message in messages) == (kept > 0)
        assert not list((place / "stores").glob(".*"))
        for file in store_module.FILES.values():
            assert (store.folder / file).read_bytes() == (expected.folder / file).read_bytes(), (damage, file)
        assert (
            store.metadata["bytes"] == expected.metadata["bytes"]
            and store.metadata["words"] == expected.metadata["words"]
        )


def test_draft_of_killed_process_is_removed(tmp_path, tokenizers):
    source = ListSource(documents(5), [])
    folder = open_store(source, "train", tokenizers["wordpiece"], tmp_path).folder
    (folder / "manifest.json").unlink()
    (folder.parent / f".{folder.name}.draft").mkdir()
    open_store(source, "train", tokenizers["wordpiece"], tmp_path)
    assert not list(folder.parent.glob(".*"))


def test_text_without_tokens_is_refused_and_leaves_no_store(tmp_path, tokenizers):
    with pytest.raises(UserError, match="train text has no tokens"):
        open_store(ListSource(["\u200b", " "], []), "train", tokenizers["wordpiece"], tmp_path)
    assert [path.suffix for path in (tmp_path / "stores").iterdir()] == [".lock"]


def test_unwritable_cache_dir_is_refused(tmp_path, tokenizers):
    (tmp_path / "file").write_text("")
    for place, why in (("file", "is a file"), ("file/below", "Not a directory")):
        with pytest.raises(UserError, match=f"cache_dir=.*{place}: {why}") as caught:
            open_store(ListSource(documents(3), []), "train", tokenizers["wordpiece"], tmp_path / place)
        assert caught.value.hint.startswith("put cache_dir= in another folder")


def test_too_many_open_files_hints_at_ulimit(tmp_path):
    with pytest.raises(UserError, match="cache_dir=.*: Too many open files") as caught, writing(tmp_path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert caught.value.hint == "raise the limit on open files (ulimit -n)"


def test_full_disk_is_refused_with_hint(tmp_path, tokenizers, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.raises(UserError, match="cache_dir=.*: No space left on device") as caught:
        open_store(ListSource(documents(3), []), "train", tokenizers["wordpiece"], tmp_path)
    assert "free some space" in caught.value.hint
    assert [path.suffix for path in (tmp_path / "stores").iterdir()] == [".lock"]


@pytest.mark.parametrize("locks", [True, False])
def test_concurrent_processes_build_one_store(tmp_path, tokenizers, locks):
    """In a file system without locks each process reads the text, and the first complete store stays."""
    no_locks = "import fcntl\ndef flock(*_): raise OSError(37, 'No locks available')\nfcntl.flock = flock\n"
    tokenizers["wordpiece"].save(tmp_path / "tokenizer")
    source = """
class Source:
    fingerprint, reads = "list", 0
    def parts(self, split):
        self.reads += 1
        return ((text, True) for text in ["The cat sat. The dog ran."] * 5000)
    def characters(self, split):
        return 26 * 5000
"""
    code = (
        ("" if locks else no_locks)
        + source
        + (
            "import sys; from lmtool.data.store import open_store; from lmtool.tokenizers.tokenizer import Tokenizer;"
            "tokenizer = Tokenizer.load(sys.argv[1] + '/tokenizer'); source = Source();"
            "store = open_store(source, 'train', tokenizer, sys.argv[1]);"
            "print(source.reads, int(store.tokens.sum()))"
        )
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    answers = [process.communicate()[0].split() for process in running]
    assert sum(int(reads) for reads, _ in answers) == 1 or not locks
    assert len({tokens for _, tokens in answers}) == 1
    assert len([path for path in (tmp_path / "stores").iterdir() if path.suffix != ".lock"]) == 1
