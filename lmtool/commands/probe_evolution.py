"""`lmtool probe target=evolution`: the mutual information of every layer with tokens, and the similarity of layers, for
one or several checkpoints that read the same tokens."""

from __future__ import annotations

from dataclasses import asdict
from itertools import combinations
from typing import NamedTuple

import numpy as np

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.formats import FormatTemplate, text_format
from lmtool.data.sources import open_source
from lmtool.data.store import open_store
from lmtool.errors import UserError
from lmtool.learners.representations.evolution import MaskedTargets, entropy, evolution, state_similarity
from lmtool.learners.representations.layers import (
    OFFSETS,
    TERM,
    LabeledStates,
    TokenTargets,
    collect_states,
    frequency_classes,
    windows_of,
)
from lmtool.learners.representations.reading import text_format_of, tokenizer_of
from lmtool.learners.representations.vectors import HiddenStates
from lmtool.reporting.console import Output
from lmtool.reporting.run_files import CheckpointEvolution, EvolutionResults, PairSimilarity
from lmtool.resolver.commands import ProbeConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.weights.padded_model import LoadedCheckpoint, load

# With fewer tokens for each type, cluster or dimension, unrelated data look related.
_TOKENS_EACH = 10


class _Reader(NamedTuple):
    checkpoint: str
    loaded: LoadedCheckpoint
    states: HiddenStates
    template: FormatTemplate


def compare_layers(config: ProbeConfig, precision: Precision, output: Output) -> EvolutionResults:
    """Measures every layer of the checkpoints of a configuration, and compares the checkpoints layer by layer.

    Raises UserError if there are too few tokens, or if the checkpoints do not read the same tokens.
    """
    if config.data is None:
        raise UserError(
            "target=evolution needs text, and the checkpoint's configuration names none",
            "set data=text data.path=FOLDER, or data=pydocs",
        )
    _require_tokens(config.examples, {"classes": config.classes, "clusters": config.clusters}, "examples=")
    readers, tokenizer = _readers(config, precision)
    widths = {f"dimensions of {reader.checkpoint}": reader.states.width for reader in readers}
    _require_tokens(config.examples, widths, "examples=")
    source = open_source(config.data, config.cache_dir, offline=config.offline)
    store = open_store(source, "validation", tokenizer, config.cache_dir, output.stage)
    capacity = min(
        min(config.max_length, reader.loaded.model.parts.backbone.longest_text) - reader.template.special_count
        for reader in readers
    )
    windows = windows_of(store, capacity)
    classes_V = frequency_classes(store, windows, tokenizer, config.classes)
    counts_V = np.bincount(store.tokens, minlength=len(classes_V))
    needed = {"types": int(classes_V.max()) + 1, "clusters": config.clusters, **widths}
    _require_tokens(int(counts_V[classes_V >= 0].sum()), needed, "the validation text has frequent tokens: ")

    def collect(reader: _Reader, target: str, mask: int | None = None) -> LabeledStates:
        targets = TokenTargets(store, windows, tokenizer, reader.template, OFFSETS[target], classes_V)
        examples = targets if mask is None else MaskedTargets(targets, mask, config.seed)
        return collect_states(reader.states, examples, TERM, "mean", config.examples, config.seed, config.batch_tokens)

    pairs = list(combinations(range(len(readers)), 2))
    total = sum(len(reader.states.layers) for reader in readers) + len(pairs)
    checkpoints, all_states = list[CheckpointEvolution](), list[LabeledStates]()
    with output.counting_bar("comparing layers", total) as progress:
        for reader in readers:
            predicts, read = _predicts(reader.loaded), collect(reader, "token")
            predicted = None
            if predicts == "next":
                predicted = collect(reader, "next")
            elif predicts == "masked":
                predicted = collect(reader, "token", tokenizer.role("mask"))
            rows = evolution(reader.states.layers, read, predicted, config.clusters, config.seed, progress)
            checkpoints.append(_checkpoint(reader, predicts, read, predicted, rows))
            all_states.append(read)
        similarities = list[PairSimilarity]()
        for first, second in pairs:
            similarities.append(_similarity(config, readers, all_states, first, second))
            progress()
    return {
        "types": needed["types"],
        "clusters": config.clusters,
        "texts": len(np.unique(all_states[0].groups_N)),
        "checkpoints": checkpoints,
        "pairs": similarities,
    }


def _require_tokens(tokens: int, counts: JsonMapping, name: str) -> None:
    for counted, count in counts.items():
        if tokens < _TOKENS_EACH * count:
            raise UserError(
                f"{name}{tokens:,} for {counted} = {count:,}: fewer than {_TOKENS_EACH} tokens each say nothing",
                "raise examples=, use more text, or lower classes= and clusters=",
            )


def _readers(config: ProbeConfig, precision: Precision) -> tuple[list[_Reader], Tokenizer]:
    readers, tokenizers = list[_Reader](), list[Tokenizer]()
    for checkpoint in config.checkpoint:
        loaded = load(checkpoint, str(precision.device), config.offline)
        tokenizer = tokenizer_of(loaded, checkpoint)
        if tokenizers and not tokenizer.same_encoding(tokenizers[0]):
            raise UserError(
                f"{checkpoint} and {config.checkpoint[0]} have different tokenizers: their states are not of the same "
                "tokens",
                "train the runs with one tokenizer: tokenizer=folder tokenizer.path=FOLDER",
            )
        tokenizers.append(tokenizer)
        template = FormatTemplate.of(text_format(text_format_of(loaded), tokenizer), 1)
        states = HiddenStates(loaded.model.parts.backbone, precision)
        readers.append(_Reader(checkpoint, loaded, states, template))
    return readers, tokenizers[0]


def _predicts(loaded: LoadedCheckpoint) -> str | None:
    """Returns which token a model predicts at a position: `next`, `masked`, or None, as an encoder of translations."""
    names = {name for name, _ in loaded.model.parts.heads.items()}
    if names & {"masked_lm", "enhanced_masked_lm"}:
        return "masked"
    return "next" if "lm" in names and loaded.config.architecture == "decoder" else None


def _checkpoint(
    reader: _Reader,
    predicts: str | None,
    read: LabeledStates,
    predicted: LabeledStates | None,
    layers: list[JsonObject],
) -> CheckpointEvolution:
    return {
        "checkpoint": reader.checkpoint,
        "model": reader.loaded.config.name,
        "predicts": predicts,
        "entropy": _entropy(read),
        "predicted_entropy": None if predicted is None else _entropy(predicted),
        "n": len(read),
        "predicted_n": 0 if predicted is None else len(predicted),
        "layers": layers,
    }


def _entropy(labeled: LabeledStates) -> float:
    return entropy(labeled.labels_N.cpu().numpy())


def _similarity(
    config: ProbeConfig, readers: list[_Reader], states: list[LabeledStates], first: int, second: int
) -> PairSimilarity:
    if not np.array_equal(states[first].groups_N, states[second].groups_N):
        raise RuntimeError("the checkpoints have read other tokens")
    indices = [
        {layer: index for index, layer in enumerate(readers[number].states.layers)} for number in (first, second)
    ]
    return {
        "first": readers[first].checkpoint,
        "second": readers[second].checkpoint,
        "layers": [
            {
                "layer": layer,
                "similarity": asdict(
                    state_similarity(
                        states[first].states_WNH[index],
                        states[second].states_WNH[indices[1][layer]],
                        states[first].groups_N,
                        config.seed,
                    )
                ),
            }
            for layer, index in indices[0].items()
            if layer in indices[1]
        ],
    }
