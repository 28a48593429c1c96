"""The examples that both sides of a comparison read: docstrings split at random lengths, converted to examples by
lmtool, and stored for the Trainer in lmtool's order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from lmtool.config.registry import build
from lmtool.data.configs import PydocsConfig, TextConfig
from lmtool.data.examples import SplitData
from lmtool.data.sources import documents
from lmtool.data.store import open_store
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.objectives.configs import MlmConfig
from lmtool.objectives.examples.language import CausalWindows
from lmtool.objectives.examples.masked import MaskedWindows
from lmtool.random_streams import Permutation
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tasks.configs.texts import ExtractiveQaConfig
from lmtool.tasks.kinds.extractive_qa import QuestionWindows
from lmtool.tasks.kinds.texts import InputFormat, SequenceExamples
from lmtool.tasks.loading import load_task
from lmtool.tokenizers.configs import ByteBpeConfig, TokenizerConfig, WordPieceConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from timing.gate import product_rate

LABELS = ("0", "1")
# Lengths in tokens, special ones included: lognormal, clipped. The documents, cut at `max_length`, then have a median
# of 46, and a mean of 62 where that is 128.
DOCUMENT_LENGTHS = {"median": 46.0, "sigma": 1.5, "smallest": 8}
QUESTION_LENGTHS = {"median": 11.0, "sigma": 0.35, "smallest": 5, "largest": 30}
LEAST_CONTEXT = 16


def cache_of(folder: Path) -> Path:
    """Returns the folder of the corpus, tokenizers and token stores, which the examples of several sizes share."""
    return folder.parent / "cache"


def task_data(folder: Path, settings: dict[str, Any]) -> Any:
    """Returns the rows as `task=custom` reads them."""
    path = str(folder / "rows")
    if settings["task"]["kind"] == "extractive_qa":
        config: Any = ExtractiveQaConfig(name="bench", path=path)
    else:
        config = ClassificationConfig(name="bench", path=path, labels=LABELS)
    return load_task(config, settings["seed"], cache_of(folder), offline=True)


def text_examples(folder: Path, settings: dict[str, Any], tokenizer: Any, joining: str) -> Any:
    """Returns the documents as `data=text` reads them, made into examples as `objective=mlm` or `clm` does. joining:
    `separate` or `joined`."""
    source = build(TextConfig(path=str(folder / "documents.txt"), document="line"), cache_of(folder))
    store, length = open_store(source, "train", tokenizer, cache_of(folder)), settings["max_length"]
    if settings["family"] == "gpt":
        return CausalWindows(tokenizer, store, length, joining, "train")
    data = SplitData("train", store, joining)
    return MaskedWindows(MlmConfig(), tokenizer, "bert", data, length, settings["seed"])


def task_examples(folder: Path, settings: dict[str, Any], tokenizer: Any) -> Any:
    """Returns the training examples of the task, without a model."""
    data, length = task_data(folder, settings), settings["task"]["max_length"]
    if settings["task"]["kind"] == "extractive_qa":
        input_format = InputFormat(tokenizer, "bert", length, stride=data.config.stride)
        return QuestionWindows(data.config, data.train, input_format, "train")
    return SequenceExamples(data.train, InputFormat(tokenizer, "bert", length), "bench", "train")


def draw_lengths(shape: Mapping[str, float], count: int, seed: int) -> Any:
    """Returns (count,) random lengths in tokens, including special tokens."""
    drawn = shape["median"] * numpy.exp(shape["sigma"] * numpy.random.default_rng(seed).standard_normal(count))
    return numpy.clip(numpy.rint(drawn), shape["smallest"], shape["largest"]).astype(int)


def cut(words: Sequence[tuple[str, int]], lengths: Sequence[int]) -> Iterator[str]:
    """Yields texts of consecutive words, each with at most as many tokens as the next of `lengths` says, until the
    words or the lengths end. Skips words longer than a text. words: each with its number of tokens."""
    index = 0
    for length in lengths:
        text: list[str] = []
        while index < len(words) and (words[index][1] <= length or not text):
            if words[index][1] <= length:
                text.append(words[index][0])
                length -= words[index][1]
            index += 1
        if text:
            yield " ".join(text)


def labeled_rows(words: Sequence[tuple[str, int]], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of the task: a text and a random class, or a question, a context and an answer of one to three
    words."""
    task, seed = settings["task"], settings["seed"]
    lengths, generator = draw_lengths(task["lengths"], settings["rows"], seed), numpy.random.default_rng(seed)
    if task["kind"] == "classification":
        texts = list(cut(words, (lengths - 2).tolist()))  # [CLS] and [SEP]
        labels = generator.integers(0, len(LABELS), len(texts))
        return [{"text": text, "label": LABELS[label]} for text, label in zip(texts, labels, strict=True)]
    question_lengths = numpy.minimum(
        draw_lengths(QUESTION_LENGTHS, len(lengths), seed + 1), lengths - 3 - LEAST_CONTEXT
    )
    pairs = zip(
        cut(words, question_lengths.tolist()), cut(words, (lengths - 3 - question_lengths).tolist()), strict=False
    )
    rows = []
    for number, (question, context) in enumerate(pairs):
        parts = context.split()
        first = int(generator.integers(0, len(parts)))
        answer = " ".join(parts[first : first + int(generator.integers(1, 4))])
        answers = {"text": [answer], "answer_start": [len(" ".join([*parts[:first], ""]))]}
        rows.append({"id": number, "question": question, "context": context, "answers": answers})
    return rows


def corpus_words(
    folder: Path, settings: dict[str, Any], tokenizer_config: TokenizerConfig, size: int
) -> tuple[Tokenizer, list[tuple[str, int]], str]:
    """Returns a tokenizer trained on the corpus, the words of the corpus, each with its number of tokens, and a
    description. size: maximum entries of the tokenizer."""
    source = build(PydocsConfig(max_bytes=settings["corpus_bytes"]), cache_of(folder))
    tokenizer = trained_tokenizer(tokenizer_config, source, size, cache_of(folder))
    all_words = [word for text in documents(source.parts("train")) for word in text.split()]
    unique_words = sorted(set(all_words))
    tokens = {word: len(ids) for word, ids in zip(unique_words, tokenizer.encode_batch(unique_words), strict=True)}
    words = [(word, tokens[word]) for word in all_words if tokens[word]]
    text = f"{source.metadata()['bytes'] / 1e6:.1f} MB of docstrings, {tokenizer.vocab_size:,} entries"
    return tokenizer, words, text


def write_texts(folder: Path, settings: dict[str, Any]) -> tuple[Any, str]:
    """Writes the documents, the labeled rows and a tokenizer trained on the corpus. Returns the tokenizer and a
    description of the corpus."""
    gpt, size = settings["family"] == "gpt", settings["model"]["vocab_size"]
    # The Trainer's collator needs a token for padding that GPT does not have.
    tokenizer_config, size = (ByteBpeConfig(), size - 1) if gpt else (WordPieceConfig(), size)
    tokenizer, words, text = corpus_words(folder, settings, tokenizer_config, size)
    tokenizer.save(folder / "tokenizer")
    shape = {**DOCUMENT_LENGTHS, "largest": settings["max_length"]}
    lengths = draw_lengths(shape, len(words), settings["seed"]) - 2  # [CLS] and [SEP]
    (folder / "documents.txt").write_text("\n".join(cut(words, lengths.tolist())), encoding="utf-8")
    if settings["task"] is not None:
        write_rows(folder, labeled_rows(words, settings))
    return tokenizer, text


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the rows of the task for `task_data`."""
    lines = [json.dumps(row) for row in rows]
    (folder / "rows").mkdir(exist_ok=True)
    for split, part in (("train", lines), ("dev", lines[:8])):
        (folder / "rows" / f"{split}.jsonl").write_text("\n".join(part), encoding="utf-8")


def arrays_of(name: str, examples: Any, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns an epoch of examples as arrays in lmtool's order, and their description."""
    plan = examples.plan(0)
    order = Permutation(len(plan), settings["seed"], "order", 0)(numpy.arange(len(plan)))
    arrays, lengths = {}, plan.lengths
    if name == "task" or settings["family"] == "gpt":
        batch = examples.batch(plan.rows[order], order, 0)
        tokens = batch.inputs.tokens.numpy()
        if name == "task":
            arrays["task_labels"] = batch.targets["bench"].labels.numpy()
            if settings["task"]["kind"] == "extractive_qa":
                arrays["task_segments"] = batch.inputs.columns["segment"].numpy()
    else:
        tokens = examples.assemble(plan.rows[order]).tokens  # not masked
    arrays |= {f"{name}_tokens": tokens, f"{name}_borders": numpy.concatenate([[0], numpy.cumsum(lengths[order])])}
    words = f"{name}: {len(plan):,} of mean {lengths.mean():.0f}, median {numpy.median(lengths):.0f}"
    return arrays, f"{words}, longest {lengths.max()} tokens"


def prepare(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Builds the examples with lmtool and stores them for the Trainer. Returns their description and the machine's
    rates."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, descriptions = write_texts(folder, settings)
    named = {name: text_examples(folder, settings, tokenizer, name) for name in settings["texts"]}
    if settings["task"] is not None:
        named["task"] = task_examples(folder, settings, tokenizer)
    arrays: dict[str, Any] = {"special_ids": numpy.array(sorted(tokenizer.special_ids))}
    for name, examples in named.items():
        example_arrays, description = arrays_of(name, examples, settings)
        arrays |= example_arrays
        descriptions += f"; {description}"
    numpy.savez(folder / "examples.npz", **arrays)
    kinds = ("fp32", "bf16") if settings["device"] == "cpu" else ("bf16",)
    return {"text": descriptions, "gflops": {kind: product_rate(kind, settings["device"]) for kind in kinds}}
