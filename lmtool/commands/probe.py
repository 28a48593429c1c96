"""`lmtool probe`: linear probes on every layer of a checkpoint, compared with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lmtool.config.base import JsonObject
from lmtool.config.registry import build
from lmtool.data.examples import Examples, SplitData
from lmtool.data.formats import FormatTemplate, text_format
from lmtool.data.sources import open_source
from lmtool.data.store import open_store
from lmtool.errors import UserError
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
from lmtool.reporting.evaluations import PROBES, print_probes, write_probes
from lmtool.reporting.run_files import CheckpointProbes
from lmtool.resolver.commands import ProbeConfig
from lmtool.runs.identity import require_own_folder
from lmtool.system.files import user_path
from lmtool.tasks.loading import TaskData, load_task
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision, select_device, select_precision
from lmtool.weights.padded_model import LoadedCheckpoint, load

# Index of the draw from the random stream "sample" that chooses the held-out windows; other draws are used elsewhere.
_HOLD_OUT = 8


def run(config: ProbeConfig) -> list[CheckpointProbes]:
    """Probes each checkpoint, prints its table, and writes probe.json, probe.png and probe.html."""
    require_own_folder(user_path(config.output), (PROBES,), "probe", "output")
    output, precision = Output(), select_precision(config.precision, select_device(config.device))
    task = _task(config)
    target = str(config.target) if task is None else task.config.name
    settings = {
        "data": (config.data and config.data.name) if task is None else task.metadata["source"],
        "pooling": config.pooling,
        "ridge": RIDGE,
        "iterations_at_most": ITERATIONS,
    }
    checkpoints = []
    for checkpoint in config.checkpoint:
        loaded = load(checkpoint, str(precision.device), config.offline)
        checkpoints.append(_CheckpointProbe(config, checkpoint, loaded, precision, task, output).scores())
        print_probes(output, target, checkpoints[-1])
    write_probes(user_path(config.output), target, checkpoints, settings)
    output.line(f"page: {user_path(config.output) / 'probe.html'}")
    return checkpoints


def _task(config: ProbeConfig) -> TaskData | None:
    """Returns the labeled data if a task is the target. Raises UserError if the target has no data."""
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


@dataclass(frozen=True)
class _CheckpointProbe:
    """Probes on one checkpoint."""

    config: ProbeConfig
    checkpoint: str
    loaded: LoadedCheckpoint
    precision: Precision
    task: TaskData | None
    output: Output

    def scores(self) -> CheckpointProbes:
        """Returns the accuracy of the probes on every layer, with the trained and with random weights."""
        config, loaded = self.config, self.loaded
        tokenizer = tokenizer_of(loaded, self.checkpoint)
        trained = loaded.model.parts.backbone
        random: Backbone = build(loaded.config, config.seed).to(self.precision.device).eval()
        layers = HiddenStates(trained, self.precision).layers
        total, scored = 2 * len(layers), 0
        with self.output.bar(f"probing {self.checkpoint}") as bar:

            def progress() -> None:
                nonlocal scored
                scored += 1
                bar(scored, total)

            bar(0, total)
            trained_scores, _, _, _ = self._probe_layers(trained, tokenizer, progress)
            random_scores, train_states, test_states, classes = self._probe_layers(random, tokenizer, progress)
        return {
            "checkpoint": self.checkpoint,
            "model": loaded.config.name,
            "majority": majority(train_states, test_states, classes),
            "classes": classes,
            "examples": len(train_states),
            "n": len(test_states),
            "layers": [
                {"layer": layer, "trained": trained_score, "random": random_score}
                for layer, trained_score, random_score in zip(layers, trained_scores, random_scores, strict=True)
            ],
        }

    def _probe_layers(
        self, backbone: Backbone, tokenizer: Tokenizer, progress: Callable[[], None]
    ) -> tuple[list[JsonObject], LabeledStates, LabeledStates, int]:
        """Returns the scores of the probes on each layer, the states that train and test the probes, and the number of
        classes."""
        config, states, reads_text = self.config, HiddenStates(backbone, self.precision), self.task is None
        train, held_out, term, classes = (
            self._text_examples(tokenizer) if reads_text else self._task_examples(backbone, tokenizer)
        )

        def collect(examples: Examples, limit: int) -> LabeledStates:
            return collect_states(states, examples, term, config.pooling, limit, config.seed, config.batch_tokens)

        train_states, test_states = collect(train, config.examples), collect(held_out, config.held_out)
        return score_layers(train_states, test_states, classes, progress), train_states, test_states, classes

    def _text_examples(self, tokenizer: Tokenizer) -> tuple[Examples, Examples, str, int]:
        """Splits the windows of the validation text: two thirds train the probe, one third tests it. Returns both
        parts, the loss term and the number of classes."""
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
        train_and_held_out = [
            TokenTargets(store, side, tokenizer, template, OFFSETS[str(config.target)], classes_V)
            for side in (train, held_out)
        ]
        return train_and_held_out[0], train_and_held_out[1], TERM, int(classes_V.max()) + 1

    def _task_examples(self, backbone: Backbone, tokenizer: Tokenizer) -> tuple[Examples, Examples, str, int]:
        """Returns the training rows of the task, the rows of its first development split, the loss term and the number
        of classes."""
        assert self.task is not None
        task = self.task.config
        learner = task.learner(backbone, tokenizer, self.config.seed)
        longest = min(self.config.max_length, backbone.longest_text)
        development = next(iter(self.task.validation.values()))
        # Named "probe", because a tagger predicts all pieces of a word in a split named "train"; a probe, only the
        # first.
        train, held_out = (
            learner.examples(SplitData("probe", rows={task.name: rows}), longest)
            for rows in (self.task.train, development)
        )
        labels = task.class_names or ()
        return train, held_out, learner.term, max(len(labels), 2)
