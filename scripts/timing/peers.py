"""A trained model in use, by transformers and sentence-transformers, until the gate closes. Imports nothing of lmtool.

A use (`settings["use"]`) is a function of the items of a step and of a variant's options. It returns a result for each
item, and the positions that the model computed, with padding:

generate: the new tokens of each prompt.
embed: the vector of each text.
shots: the log-probabilities of the candidates of each row, in nats.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from timing.gate import Gate, peak_bytes
from timing.trainer import NAMES

CLASSES = {
    "bert": ("BertModel", "BertConfig"),
    "gpt": ("GPT2LMHeadModel", "GPT2Config"),
    "t5": ("T5ForConditionalGeneration", "T5Config"),
    "bart": ("BartForConditionalGeneration", "BartConfig"),
}
# With the usual deviation of 0.02 most generated texts would be equal. The end of a text must not be forced.
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {"initializer_range": 0.2},
    "gpt": {"initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "bart": {"init_std": 0.2, "decoder_start_token_id": 2, "forced_eos_token_id": None},
}
BATCH = 16  # padded texts that are scored together

Item = Mapping[str, Any]
Use = Callable[[Sequence[Item], Mapping[str, Any]], tuple[Sequence[Any], int]]


def write_model(folder: Path, settings: dict[str, Any], family: str, vocab_size: int) -> None:
    """Writes a model with random weights, of the settings' sizes."""
    import transformers

    transformers.set_seed(settings["seed"])
    sizes = {**settings["model"], "vocab_size": vocab_size}
    fields = {theirs: sizes[ours] for theirs, ours in NAMES[family].items()}
    model, config = (getattr(transformers, name) for name in CLASSES[family])
    made = model(config(**fields, **SETTINGS[family]))
    if family == "t5":  # its embeddings, of deviation 1, also predict: each token would predict itself
        made.shared.weight.data.mul_(0.02)
    made.save_pretrained(folder)


def items_of_step(items: Sequence[Item], at_once: int, step: int) -> list[Item]:
    """The items of a step, which repeats them if they end."""
    return [items[number % len(items)] for number in range(step * at_once, (step + 1) * at_once)]


def amounts(settings: dict[str, Any], items: Sequence[Item], results: Sequence[Any], slots: int) -> dict[str, int]:
    """What a step has computed: `tokens` are new ones, or those that are read."""
    if settings["use"] == "generate":
        counted = {"tokens": sum(map(len, results))}
    elif settings["use"] == "embed":
        counted = {"tokens": sum(item["tokens"] for item in items), "texts": len(items)}
    else:
        tokens = sum(len(item["prompt"]) + len(text) - 1 for item in items for text in item["candidates"])
        counted = {"tokens": tokens, "candidates": sum(map(len, results))}
    return {**counted, "examples": len(items), "slots": slots or counted["tokens"]}


def read_items(folder: Path) -> dict[str, list[Item]]:
    return json.loads((folder / "items.json").read_text(encoding="utf-8"))


def serve(use: Use, folder: Path, settings: dict[str, Any], gate: Gate, imports_bytes: int) -> None:
    """Answers the steps of all variants of a side, whose options come with each turn, until the gate closes."""
    items, steps = read_items(folder), Counter[str]()
    gate.say({"ready": settings["use"], "imports_bytes": imports_bytes})
    while gate.open():
        options = gate.options
        selected = items_of_step(items[options["texts"]], options["at_once"], steps[key := json.dumps(options)])
        results, slots = use(selected, options)
        gate.count(**amounts(settings, selected, results, slots))
        steps[key] += 1


def run_peer(folder: Path, settings: dict[str, Any], gate: Gate) -> None:
    """Runs the side of transformers."""
    import transformers

    if settings["use"] == "embed":
        import sentence_transformers  # noqa: F401
    transformers.logging.set_verbosity_error()
    imports_bytes = peak_bytes("cpu")
    serve(USES[settings["use"]](folder, settings), folder, settings, gate, imports_bytes)


def padded(texts: Sequence[Sequence[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and mask, padded to the longest text."""
    longest = max(map(len, texts))
    rows, masks = [], []
    for text in texts:
        filler = [0] * (longest - len(text))
        rows.append([*filler, *text] if left else [*text, *filler])
        masks.append([*filler, *[1] * len(text)] if left else [*[1] * len(text), *filler])
    return torch.tensor(rows), torch.tensor(masks)


def generation(folder: Path, settings: dict[str, Any]) -> Use:
    """`generate` with its cache. A decoder's prompts are padded on the left, an encoder's on the right."""
    import transformers

    models = {
        family: getattr(transformers, CLASSES[family][0]).from_pretrained(folder / family).eval()
        for family in settings["texts"]
    }

    def generate(items: Sequence[Item], options: Mapping[str, Any]) -> tuple[list[list[int]], int]:
        continues, new = options["texts"] == "gpt", options["new"]
        ids, mask = padded([item["prompt"] for item in items], left=continues)
        sampling = {"do_sample": True, "top_k": options["top_k"]} if "top_k" in options else {"do_sample": False}
        found = models[options["texts"]].generate(
            input_ids=ids, attention_mask=mask, num_beams=options.get("beams", 1), max_new_tokens=new,
            min_new_tokens=new, pad_token_id=0, **sampling,
        )  # fmt: skip
        return found[:, ids.shape[1] if continues else 1 :].tolist(), 0

    return generate


def embedding(folder: Path, settings: dict[str, Any]) -> Use:
    """`SentenceTransformer.encode`, which sorts texts by length and pads batches of 32."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder / "encoder"), device="cpu")
    positions = Counter[str]()

    def count(module: Any, arguments: Any, named: Mapping[str, Any]) -> None:
        positions["all"] += named["input_ids"].numel()

    model[0].auto_model.register_forward_pre_hook(count, with_kwargs=True)

    def embed(items: Sequence[Item], options: Mapping[str, Any]) -> tuple[Sequence[Any], int]:
        positions.clear()
        return model.encode([item["text"] for item in items], show_progress_bar=False), positions["all"]

    return embed


@torch.no_grad()
def score_batch(
    model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], kept: bool
) -> tuple[list[float], int]:
    """The log-probability of each candidate after its prompt, and the positions. kept: computes logits only where they
    may predict a candidate, which needs padding on the left."""
    ids, mask = padded([[*prompt, *text[:-1]] for prompt, text in pairs], left=kept)
    options: dict[str, Any] = {}
    if kept:
        options = {
            "logits_to_keep": max(len(text) for _, text in pairs),
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        }
    log_probs = model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits.log_softmax(-1)
    scores = []
    for row, (prompt, text) in zip(log_probs, pairs, strict=True):
        end = len(row) if kept else len(prompt) + len(text) - 1
        places = torch.arange(end - len(text), end)
        scores.append(float(row[places, torch.tensor(text)].sum()))
    return scores, ids.numel()


def scoring(folder: Path, settings: dict[str, Any]) -> Use:
    """Reads each prompt with each candidate, in batches of similar length."""
    import transformers

    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "gpt").eval()

    def score(items: Sequence[Item], options: Mapping[str, Any]) -> tuple[list[list[float]], int]:
        pairs = [(item["prompt"], text) for item in items for text in item["candidates"]]
        order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
        scores, positions = [0.0] * len(pairs), 0
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            values, computed = score_batch(model, [pairs[number] for number in batch], options["loop"] == "kept")
            positions += computed
            for number, value in zip(batch, values, strict=True):
                scores[number] = value
        remaining = iter(scores)
        return [list(islice(remaining, len(item["candidates"]))) for item in items], positions

    return score


USES: dict[str, Callable[[Path, dict[str, Any]], Use]] = {
    "generate": generation,
    "embed": embedding,
    "shots": scoring,
}
