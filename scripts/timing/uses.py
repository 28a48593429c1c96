"""A trained model in use: prepares folders with random weights and what is asked of them, runs lmtool's side, and
checks that both sides give the same results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lmtool
from lmtool.config.registry import build
from lmtool.learners.generation.configs import GenerationConfig
from lmtool.learners.generation.scoring import CandidateScorer
from lmtool.learners.writing import Writer
from lmtool.session.trained import read_trained
from lmtool.tasks.prompting.few_shot import FewShot, demonstrations
from lmtool.tokenizers.configs import ByteBpeConfig, SentencePieceConfig, TokenizerConfig, WordPieceConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import FP32_CPU
from timing.examples import QUESTION_LENGTHS, corpus_words, cut, draw_lengths, labeled_rows, task_data, write_rows
from timing.gate import Gate, peak_bytes, product_rate
from timing.peers import USES, Item, Use, items_of_step, read_items, serve, write_model

TOKENIZERS: dict[str, TokenizerConfig] = {
    "bert": WordPieceConfig(),
    "gpt": ByteBpeConfig(),
    "t5": SentencePieceConfig(),
    "bart": ByteBpeConfig(special_tokens="roberta"),
}
ITEMS = 256
LENGTHS = {
    "questions": QUESTION_LENGTHS,
    "paragraphs": {"median": 100.0, "sigma": 0.25, "smallest": 40, "largest": 200},
}
SHOTS = 8
WORDS = {"0": "a good deal", "1": "not at all"}  # the candidates
CHECKED = 16
# Scores are sums of tens of nats in fp32.
TOLERANCES = {"generate": 0.0, "embed": 1e-5, "shots": 1e-3}
RESULTS = {"generate": "tokens", "embed": "vectors", "shots": "scores"}


def prepare(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Writes the trained folders, and the items for both sides. Returns their description and the machine's rate."""
    folder.mkdir(parents=True, exist_ok=True)
    makers = {"generate": generation_items, "embed": embedding_items, "shots": scoring_items}
    items, text = makers[settings["use"]](folder, settings)
    (folder / "items.json").write_text(json.dumps(items), encoding="utf-8")
    return {"text": text, "gflops": {"fp32": product_rate("fp32", settings["device"])}}


def write_folder(folder: Path, settings: dict[str, Any], family: str) -> tuple[Tokenizer, list[tuple[str, int]], str]:
    """Writes a folder as transformers does. Returns what `corpus_words` does."""
    size = settings["model"]["vocab_size"]
    tokenizer, words, text = corpus_words(folder, settings, TOKENIZERS[family], size)
    write_model(folder / family, settings, family, tokenizer.vocab_size)
    tokenizer.save(folder / family)
    return tokenizer, words, text


def writer_of(folder: Path) -> Writer:
    """The writer that `lmtool generate` and `lmtool evaluate shots=` use."""
    return read_trained(str(folder), True, FP32_CPU).learner().writer()


def generation_items(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, list[Item]], str]:
    """Prompts of 8 to 16 tokens in turn, special tokens included, for each family."""
    items, described = {}, []
    for family in settings["texts"]:
        _, words, text = write_folder(folder, settings, family)
        writer = writer_of(folder / family)
        special = len(writer.encode_with_template(np.zeros(2, dtype=np.int64))) - 2
        items[family] = [
            {"prompt": writer.encode_with_template(writer.encode(line)[: 8 + number % 9 - special]).tolist()}
            for number, line in enumerate(cut(words, [40] * ITEMS))
        ]
        described.append(f"{family}: {text}")
    return items, "; ".join(described)


def embedding_items(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, list[Item]], str]:
    """Questions and paragraphs, for a sentence encoder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    tokenizer, words, described = write_folder(folder, settings, "bert")
    longest = settings["model"]["max_positions"]
    encoder = modules.Transformer(str(folder / "bert"), max_seq_length=longest)
    pooling = modules.Pooling(settings["model"]["hidden_size"], "mean")
    SentenceTransformer(modules=[encoder, pooling, modules.Normalize()], device="cpu").save(str(folder / "encoder"))
    items: dict[str, list[Item]] = {}
    for seed, name in enumerate(settings["texts"]):
        lengths = draw_lengths(LENGTHS[name], ITEMS, settings["seed"] + seed) - 2  # [CLS] and [SEP]
        lines = list(cut(words, lengths.tolist()))
        counts = [len(ids) + 2 for ids in tokenizer.encode_batch(lines)]
        items[name] = [{"text": line, "tokens": count} for line, count in zip(lines, counts, strict=True)]
        described += f"; {name}: {len(lines)} of mean {np.mean(counts):.0f}, longest {max(counts)} tokens"
    return items, described


class RecordingScorer:
    """Records what `lmtool evaluate shots=` scores."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def score(self, shared: Any, prompts: Any, candidates: Any) -> list[Any]:
        for prompt, texts in zip(prompts, candidates, strict=True):
            self.items.append({
                "shared": len(shared), "prompt": [*shared, *prompt], "candidates": list(map(list, texts)),
            })  # fmt: skip
        return [np.zeros(len(texts)) for texts in candidates]


def scoring_items(folder: Path, settings: dict[str, Any]) -> tuple[dict[str, list[Item]], str]:
    """The prompts of labeled rows, each with the same examples, and their candidates."""
    _, words, described = write_folder(folder, settings, "gpt")
    write_rows(folder, labeled_rows(words, settings))
    data = task_data(folder, settings)
    config = data.config.model_copy(update={"prompt": data.config.prompt.model_copy(update={"words": WORDS})})
    kind, recorder = build(config), RecordingScorer()
    held_out = data.train.take(np.arange(len(data.train) - 2 * SHOTS))
    few_shot = FewShot(kind, writer_of(folder / "gpt"), settings["model"]["max_positions"])
    few_shot.scorer = recorder
    few_shot.evaluate(demonstrations(kind, data.train, [held_out], SHOTS, settings["seed"]), held_out)
    items = recorder.items
    lengths = [len(item["prompt"]) for item in items]
    described += (
        f"; {len(items)} prompts of mean {np.mean(lengths):.0f} tokens, of which {items[0]['shared']} are examples; "
        f"candidates of {' and '.join(str(len(text)) for text in items[0]['candidates'])} tokens"
    )
    return {"rows": items}, described


# --- lmtool's side ----------------------------------------------------------------------------------------------------


def generation(folder: Path, settings: dict[str, Any]) -> Use:
    writers = {family: writer_of(folder / family) for family in settings["texts"]}

    def generate(items: Sequence[Item], options: Mapping[str, Any]) -> tuple[list[list[int]], int]:
        sampling = {"temperature": 1.0, "top_k": options["top_k"]} if "top_k" in options else {}
        new, beams = options["new"], options.get("beams", 1)
        config = GenerationConfig(max_new_tokens=new, min_new_tokens=new, beams=beams, **sampling)
        return writers[options["texts"]].write([item["prompt"] for item in items], config, settings["seed"]), 0

    return generate


def embedding(folder: Path, settings: dict[str, Any]) -> Use:
    loaded = lmtool.load(folder / "encoder", offline=True)
    return lambda items, options: (loaded.embed([item["text"] for item in items]), 0)


def scoring(folder: Path, settings: dict[str, Any]) -> Use:
    model = writer_of(folder / "gpt").model
    scorer = CandidateScorer(model.backbone, model.head, model.start, model.bidirectional_prompt)

    def score(items: Sequence[Item], options: Mapping[str, Any]) -> tuple[list[Any], int]:
        shared = items[0]["shared"]
        prompts = [item["prompt"][shared:] for item in items]
        return scorer.score(items[0]["prompt"][:shared], prompts, [item["candidates"] for item in items]), 0

    return score


OWN_USES: dict[str, Callable[[Path, dict[str, Any]], Use]] = {
    "generate": generation,
    "embed": embedding,
    "shots": scoring,
}


def run_use(folder: Path, settings: dict[str, Any], gate: Gate) -> None:
    """Runs lmtool's side."""
    imports_bytes = peak_bytes("cpu")
    serve(OWN_USES[settings["use"]](folder, settings), folder, settings, gate, imports_bytes)


def check(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Compares the results of both sides for each of `settings["pairs"]`: the options of lmtool's variant and of its
    rival, with at least CHECKED items, as many at once as in the table."""
    name, items = settings["use"], read_items(folder)
    ours, theirs = OWN_USES[name](folder, settings), USES[name](folder, settings)
    compared = []
    for own, rival in settings["pairs"]:
        steps = max(1, CHECKED // own["at_once"])
        selected = [items_of_step(items[own["texts"]], own["at_once"], step) for step in range(steps)]
        results = [
            np.concatenate([np.asarray(use(step, options)[0], dtype=np.float64) for step in selected])
            for use, options in ((ours, own), (theirs, rival))
        ]
        compared.append({"results": RESULTS[name], "tolerance": TOLERANCES[name], **difference(name, *results)})
    return {"steps": compared}


def difference(use: str, own: np.ndarray, rival: np.ndarray) -> dict[str, Any]:
    """Returns the number of results, and how far they are apart: different tokens, or the largest difference of a
    number."""
    if use == "generate":
        return {"count": own.size, "apart": int((own != rival).sum())}
    return {"count": len(own) if use == "embed" else own.size, "apart": float(np.abs(own - rival).max())}
