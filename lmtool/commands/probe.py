"""`lmtool probe`: linear probes on every layer of a checkpoint, compared with random weights; with
target=evolution, the information and the similarity of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.config.registry import build
from lmtool.data.examples import Examples, SplitData
from lmtool.data.formats import FormatTemplate, text_format
from lmtool.data.sources import open_source
from lmtool.data.store import open_store
from lmtool.errors import UserError
from lmtool.learners.representations.evolution import MaskedTargets, entropy, evolution, state_similarity
from lmtool.learners.representations.layers import (
    ITERATIONS,
    OFFSETS,
    RIDGE,
    TERM,
    LabeledStates,
    TokenTargets,
    collect_states,
    frequency_classes,
    majority,
    score_layers,
    windows_of,
)
from lmtool.learners.representations.reading import text_format_of, tokenizer_of
from lmtool.learners.representations.vectors import HiddenStates
from lmtool.models.base import Backbone
from lmtool.random_streams import Permutation
from lmtool.reporting.console import Output
from lmtool.reporting.evaluations import PROBES, print_evolution, print_probes, write_evolution, write_probes
from lmtool.reporting.run_files import CheckpointEvolution, CheckpointProbes, EvolutionResults, PairSimilarity
from lmtool.resolver.commands import ProbeConfig
from lmtool.runs.identity import require_own_folder
from lmtool.system.files import user_path
from lmtool.tasks.loading import TaskData, load_task
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision, select_device, select_precision
from lmtool.weights.padded_model import LoadedCheckpoint, load

# Number of the draw in the random stream "sample" that selects the held-out windows.
_HOLD_OUT = 8


def run(config: ProbeConfig) -> list[CheckpointProbes] | EvolutionResults:
    """Probes each checkpoint, prints its table, and writes probe.json, probe.png and probe.html."""
    require_own_folder(user_path(config.output), (PROBES,), "probe", "output")
    output, precision = Output(), select_precision(config.precision, select_device(config.device))
    if config.target == "evolution":
        results = compare_layers(config, precision, output)
        print_evolution(output, results)
        write_evolution(user_path(config.output), results, {"examples": config.examples, "seed": config.seed})
        output.line(f"page: {user_path(config.output) / 'probe.html'}")
        return results
    task = _task(config)
    if task is None:
        assert config.data is not None
        target, data = str(config.target), config.data.name
    else:
        target, data = task.config.name, task.metadata["source"]
    settings = {"data": data, "pooling": config.pooling, "ridge": RIDGE, "iterations_at_most": ITERATIONS}
    checkpoints = []
    for checkpoint in config.checkpoint:
        loaded = load(checkpoint, str(precision.device), config.offline)
        checkpoints.append(_CheckpointProbe(config, checkpoint, loaded, precision, task, output).scores())
        print_probes(output, target, checkpoints[-1])
    write_probes(user_path(config.output), target, checkpoints, settings)
    output.line(f"page: {user_path(config.output) / 'probe.html'}")
    return checkpoints


def _task(config: ProbeConfig) -> TaskData | None:
    if config.target == "task":
        if config.task is None:
            raise UserError("target=task needs a task", "set task=NAME; `lmtool list task` lists the tasks")
        return load_task(config.task, config.seed, config.cache_dir, config.offline)
    if config.data is None:
        raise UserError(
            f"target={config.target} needs text, and the checkpoint's configuration names none",
            "set data=text data.path=FOLDER, or data=pydocs",
        )
    return None


class _ProbeData(NamedTuple):
    train: Examples
    held_out: Examples
    term: str
    classes: int


class _LayerScores(NamedTuple):
    layers: list[JsonObject]
    train: LabeledStates
    held_out: LabeledStates
    classes: int


@dataclass(frozen=True)
class _CheckpointProbe:
    config: ProbeConfig
    checkpoint: str
    loaded: LoadedCheckpoint
    precision: Precision
    task: TaskData | None
    output: Output

    def scores(self) -> CheckpointProbes:
        config, loaded = self.config, self.loaded
        tokenizer = tokenizer_of(loaded, self.checkpoint)
        trained = loaded.model.parts.backbone
        random: Backbone = build(loaded.config, config.seed).to(self.precision.device).eval()
        layers = HiddenStates(trained, self.precision).layers
        with self.output.counting_bar(f"probing {self.checkpoint}", 2 * len(layers)) as progress:
            trained_layers = self._probe_layers(trained, tokenizer, progress).layers
            scores = self._probe_layers(random, tokenizer, progress)  # with the same examples and classes
        return {
            "checkpoint": self.checkpoint,
            "model": loaded.config.name,
            "majority": majority(scores.train, scores.held_out, scores.classes),
            "classes": scores.classes,
            "examples": len(scores.train),
            "n": len(scores.held_out),
            "layers": [
                {"layer": layer, "trained": trained_score, "random": random_score}
                for layer, trained_score, random_score in zip(layers, trained_layers, scores.layers, strict=True)
            ],
        }

    def _probe_layers(self, backbone: Backbone, tokenizer: Tokenizer, progress: Callable[[], None]) -> _LayerScores:
        config, states = self.config, HiddenStates(backbone, self.precision)
        data = self._text_data(tokenizer) if self.task is None else self._task_data(backbone, tokenizer)

        def collect(examples: Examples, limit: int) -> LabeledStates:
            return collect_states(states, examples, data.term, config.pooling, limit, config.seed, config.batch_tokens)

        train, held_out = collect(data.train, config.examples), collect(data.held_out, config.held_out)
        return _LayerScores(score_layers(train, held_out, data.classes, progress), train, held_out, data.classes)

    def _text_data(self, tokenizer: Tokenizer) -> _ProbeData:
        """Splits the windows of the validation text: two thirds train the probe, one third tests it."""
        config = self.config
        assert config.data is not None
        source = open_source(config.data, config.cache_dir, offline=config.offline)
        store = open_store(source, "validation", tokenizer, config.cache_dir, self.output.stage)
        template = FormatTemplate.of(text_format(text_format_of(self.loaded), tokenizer), 1)
        capacity = min(config.max_length, self.loaded.model.parts.backbone.longest_text) - template.special_count
        windows = windows_of(store, capacity)
        if len(windows) < 3:
            raise UserError(
                f"the validation text has {len(windows)} windows of {capacity} tokens; a probe needs at least 3",
                "use more text, or a smaller max_length=",
            )
        order = Permutation(len(windows), config.seed, "sample", _HOLD_OUT)(np.arange(len(windows)))
        third = len(windows) // 3
        held_out, train = windows[np.sort(order[:third])], windows[np.sort(order[third:])]
        classes_V = frequency_classes(store, train, tokenizer, config.classes)

        def targets(side: np.ndarray) -> TokenTargets:
            return TokenTargets(store, side, tokenizer, template, OFFSETS[str(config.target)], classes_V)

        return _ProbeData(targets(train), targets(held_out), TERM, int(classes_V.max()) + 1)

    def _task_data(self, backbone: Backbone, tokenizer: Tokenizer) -> _ProbeData:
        assert self.task is not None
        task = self.task.config
        learner = task.learner(backbone, tokenizer, self.config.seed)
        longest = min(self.config.max_length, backbone.longest_text)
        development = next(iter(self.task.validation.values()))
        # The split is not named "train", in which a tagger may label every piece of a word instead of the first.
        train, held_out = (
            learner.examples(SplitData("probe", rows={task.name: rows}), longest)
            for rows in (self.task.train, development)
        )
        classes = max(len(task.class_names or ()), 2)  # a probe has two outputs even if the data have one class
        return _ProbeData(train, held_out, learner.term, classes)


# --- lmtool probe target=evolution ------------------------------------------------------------------------------------

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
