"""Companions of a run: objects whose hooks `fit` calls before, during and after training, for everything that is not
the training loop itself, such as provenance, predictions, forgetting or distillation.

The classes are in the order in which they take part. A new capability is a new companion, never a parameter of `fit`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.data.phases import PhasedLoader
from lmtool.distillation.distilled import Distilled
from lmtool.learners.base import BaseLearner
from lmtool.learners.baseline import headline_errors
from lmtool.learners.held_out import HeldOutSplits, evaluation_tokens
from lmtool.learners.mixed_examples import MixedExamples
from lmtool.models.heads.features import layer_mix
from lmtool.resolver.commands import FinetuneConfig, PretrainConfig
from lmtool.runs.files import SCORED_ROWS, to_json
from lmtool.runs.finding import DATA, MODEL
from lmtool.session.forgetting import compare_with_start, score_start
from lmtool.session.provenance import (
    LINEAGE,
    TEACHERS,
    lineage_line,
    lineage_of,
    require_same_teachers,
    teacher_digests,
)
from lmtool.session.session import Session, phase_rows
from lmtool.system.files import write_bytes
from lmtool.system.secrets import masked
from lmtool.system.terminal import counted
from lmtool.tasks.configs.minimal_pairs import MinimalPairsConfig
from lmtool.tasks.minimal_pairs import PairScores, log_probabilities, read_pairs
from lmtool.training.progress import TrainingResult
from lmtool.weights.base import BASE, Base

SAMPLED_PAIRS = 500  # minimal pairs at each evaluation: a standard error of at most 0.022
SAMPLES = 6
"""Number of generated examples in samples.json, for a learner that does not predict rows."""


class Companion:
    """The base of all companions, in which every hook does nothing.

    excluded: the names of tensors that the run's checkpoints leave out because of this companion.
    """

    excluded: frozenset[str] = frozenset()

    def identity(self) -> Mapping[str, str]:
        """Returns digests that must be equal in all processes, by their names in error messages."""
        return {}

    def before(self, session: Session) -> Mapping[str, JsonMapping]:
        """Called before training. Returns metadata for the first screen and facts.json, by section ("data", "model" or
        "run"). Raises UserError if a resumed run differs from its checkpoint."""
        return {}

    def scores(self) -> Mapping[str, float]:
        """Called at each evaluation. Returns scores besides those of the held-out splits, by name."""
        return {}

    def on_update(self, step: int) -> None:
        """Called after each update of the weights, with the number of the step, counted from 1."""

    def write(self, folder: Path) -> None:
        """Called when a checkpoint is saved. May add files to its folder."""

    def after(self, session: Session, training: TrainingResult) -> JsonMapping:
        """Called after training, when the learner has the best checkpoint's weights. Returns rows of result.json."""
        return {}


class DataProvenance(Companion):
    """Saves the tokenizer and the hashes of the data in every checkpoint."""

    def __init__(self, session: Session):
        self.tokenizer, self.contents = session.tokenizer, session.contents

    def identity(self) -> Mapping[str, str]:
        return {
            f"{origin} {key}": str(value) for origin, hashes in self.contents.items() for key, value in hashes.items()
        }

    def write(self, folder: Path) -> None:
        self.tokenizer.save(folder)
        write_bytes(folder / DATA, to_json(self.contents).encode())


class TunedBase(Companion):
    """Excludes the tensors of a tuned run's starting checkpoint from the run's checkpoints, and records its origin."""

    def __init__(self, base: Base):
        self.base = base
        self.excluded = frozenset(base.names)

    def write(self, folder: Path) -> None:
        write_bytes(folder / BASE, to_json(self.base.to_plain()).encode())

    def after(self, session: Session, training: TrainingResult) -> JsonMapping:
        folder = training.best or training.last
        sizes = {} if folder is None else {"delta_bytes": (folder / MODEL).stat().st_size}
        return {"base": masked(self.base.checkpoint), **sizes}


class Lineage(Companion):
    """Records the checkpoints that the run descends from, oldest first."""

    def __init__(self, session: Session):
        self.checkpoints = list(lineage_of(session.run))

    def before(self, session: Session) -> Mapping[str, JsonMapping]:
        if not self.checkpoints:
            return {}
        config, line = session.config, lineage_line(self.checkpoints)
        if isinstance(config, FinetuneConfig) and config.checkpoint == config.task.default_checkpoint:
            line += f", the default for task={config.task.name}: checkpoint= or model= changes it"
        return {"model": {"started_from": line}, "run": {"lineage": self.checkpoints}}

    def write(self, folder: Path) -> None:
        if self.checkpoints:
            write_bytes(folder / LINEAGE, to_json({"checkpoints": self.checkpoints}).encode())

    def after(self, session: Session, training: TrainingResult) -> JsonMapping:
        return {"lineage": self.checkpoints} if self.checkpoints else {}


class MixtureFractions(Companion):
    """Reports how many examples were read from each member of a mixture."""

    def after(self, session: Session, training: TrainingResult) -> JsonMapping:
        examples = [phase.examples for phase in session.phases if isinstance(phase.examples, MixedExamples)]
        if len(examples) < len(session.phases) or len({tuple(mixed.members) for mixed in examples}) > 1:
            return {}  # no mixture, or phases with different members
        last = examples[-1]
        counts, planned = dict.fromkeys(last.members, 0), dict.fromkeys(last.members, 0.0)
        for epoch, rows in enumerate(session.loader.rows_read(training.steps)):
            fractions = last.fractions_in(epoch)
            for (name, count), fraction in zip(last.member_counts(rows).items(), fractions, strict=True):
                counts[name] += count
                planned[name] += fraction * len(rows)
        total = sum(counts.values())
        return {
            "mixture": {
                name: {"examples": count, "share": count / total, "planned": planned[name] / total}
                for name, count in counts.items()
            }
        }


class Phases(Companion):
    """Reports the steps of each phase of the run."""

    def after(self, session: Session, training: TrainingResult) -> JsonMapping:
        loader = session.loader
        if not isinstance(loader, PhasedLoader):
            return {}
        return {"phases": phase_rows(session.plan, loader, training.steps)}


class LayerMix(Companion):
    """Reports the learned layer weights of a head that reads a weighted mix of all layers."""

    def after(self, session: Session, training: TrainingResult) -> JsonMapping:
        return layer_mix(session.learner)


class PredictionsFile(Companion):
    """Writes predictions.jsonl for a learner that predicts labeled rows, otherwise samples.json."""

    def after(self, session: Session, training: TrainingResult) -> JsonMapping:
        run, learner, held_out = session.run, session.learner, session.held_out
        if not learner.config.reads_labeled_rows:
            learner.eval()
            batch = next(iter(held_out.first.loader.epoch_batches())).to(run.precision.device)
            with torch.no_grad():
                run.folder.write_json("samples.json", learner.samples(batch, SAMPLES))
            return {}
        final = held_out.final_score(run.precision, run.group)
        run.folder.write_rows("predictions.jsonl", final.records())
        for warning in final.warnings:
            run.output.warn(warning)
        classes = final.first.details.get("classes")
        selection_examples, validation_examples = next(iter(held_out.samples.values())).scored
        rows: JsonObject = {"validation_examples": validation_examples, "selection_examples": selection_examples}
        rows |= {SCORED_ROWS: final.first.rows_digest, "warnings": final.warnings}
        return rows if classes is None else {**rows, "classes": classes}


class MinimalPairs(Companion):
    """Scores a sample of minimal pairs at each evaluation."""

    def __init__(self, path: str, session: Session):
        self.config = MinimalPairsConfig(path=path)
        self.pairs = read_pairs(self.config, "minimal_pairs").sample(SAMPLED_PAIRS)
        self.learner, self.tokens = session.learner, evaluation_tokens(session.config)

    def before(self, session: Session) -> Mapping[str, JsonMapping]:
        first = self.pairs.take([0])
        log_probabilities(self.learner.eval(), first, self.config, self.tokens)  # raises what would fail later
        paradigms = counted(len(set(self.pairs.paradigms)), "paradigm")
        return {"data": {"minimal_pairs": f"{counted(len(self.pairs), 'pair')} of {paradigms}"}}

    def scores(self) -> Mapping[str, float]:
        values_N2 = log_probabilities(self.learner, self.pairs, self.config, self.tokens)
        return {"minimal_pairs": PairScores.of(self.pairs, values_N2).accuracy}


class LabeledTests(Companion):
    """Scores the best checkpoint once on the labeled test splits, which are never used to select a checkpoint."""

    def after(self, session: Session, training: TrainingResult) -> JsonMapping:
        config, run = session.config, session.run
        splits = HeldOutSplits(
            session.learner, session.tests, config.max_length, evaluation_tokens(config), config.seed
        )
        evaluations = splits.score(run.precision, group=run.group).splits
        return {
            "tests": {
                split: {"examples": sum(map(len, splits.splits[split].data.rows.values())), **evaluation.metrics()}
                for split, evaluation in evaluations.items()
            }
        }


class Forgetting(Companion):
    """Measures forgetting: the pretraining loss on held-out text before and after training, and how far the weights
    moved."""

    def before(self, session: Session) -> Mapping[str, JsonMapping]:
        config, run = session.config, session.run
        assert isinstance(config, FinetuneConfig)
        self.start = score_start(config, session.learner, run.precision, run.output.stage)
        return {"data": {"forgetting": self.start.summary}}

    def after(self, session: Session, training: TrainingResult) -> JsonMapping:
        return {"forgetting": compare_with_start(self.start, session.learner)}


class Distillation(Companion):
    """Prepares the teachers of a distilled run, and reports the scores of student and teachers and their agreement.

    Every checkpoint contains digests of the teachers' tensors, because a resumed run must have the same teachers.
    """

    def __init__(self, distilled: Distilled):
        self.distilled, self.digests = distilled, teacher_digests(distilled)

    def identity(self) -> Mapping[str, str]:
        return {f"teacher {name}": digest for name, digest in self.digests.items()}

    def before(self, session: Session) -> Mapping[str, JsonMapping]:
        require_same_teachers(session.run, self.digests)
        summary = self.distilled.prepare(session.student_data)
        return {"data": {"distillation": {**self.distilled.metadata(), **summary}}}

    def write(self, folder: Path) -> None:
        if self.digests:
            write_bytes(folder / TEACHERS, to_json(self.digests).encode())

    def after(self, session: Session, training: TrainingResult) -> JsonMapping:
        precision = session.run.precision
        teachers = {f"teacher {teacher.origin}": teacher.learner for teacher in self.distilled.teachers}
        learners = {"student": session.learner, **self.distilled.extra_models(), **teachers}
        models = [measurements(name, learner, session) for name, learner in reversed(learners.items())]
        if self.digests != teacher_digests(self.distilled):
            raise RuntimeError(f"training has changed the weights of a frozen teacher: {', '.join(self.digests)}")
        results = self.distilled.results(session.held_out.first.sample(), precision)
        return {"distillation": {"models": models, "teachers": self.digests, **results}}


def companions_of(session: Session) -> Sequence[Companion]:
    """Returns the companions of a run, in the order in which their hooks are called."""
    forgetting = isinstance(session.config, FinetuneConfig) and session.config.forgetting is not None
    pairs = session.config.minimal_pairs if isinstance(session.config, PretrainConfig) else None
    return (
        DataProvenance(session),
        *([] if session.base is None else [TunedBase(session.base)]),
        *(Lineage(session), MixtureFractions(), Phases(), LayerMix(), PredictionsFile()),
        *([] if pairs is None else [MinimalPairs(pairs, session)]),
        *([LabeledTests()] if session.tests else []),
        *([Forgetting()] if forgetting else []),
        *([] if session.distilled is None else [Distillation(session.distilled)]),
    )


def measurements(name: str, learner: BaseLearner, session: Session) -> JsonObject:
    """Returns the score of one of the models of a distilled run on the first held-out split with its standard error,
    the number of parameters, the bytes of the weights (without a generator's), and the tokens per second of the
    evaluation. name: "student", or that of a teacher or peer."""
    config, first = session.config, session.held_out.first
    max_length = min(config.max_length, learner.backbone.config.max_positions)
    splits = HeldOutSplits(learner, {first.data.split: first.data}, max_length, evaluation_tokens(config), config.seed)
    learner.eval()
    start = time.perf_counter()
    metrics = splits.score(session.run.precision).first.metrics()
    seconds = time.perf_counter() - start
    errors = headline_errors(learner.metric, learner.loss_weights, metrics)
    weights = [*learner.backbone.parameters(), *learner.heads.parameters()]
    return {
        "name": name,
        "score": metrics[learner.metric.name],
        **errors,
        "parameters": sum(tensor.numel() for tensor in weights),
        "weight_bytes": sum(tensor.nbytes for tensor in weights),
        "tokens_per_second": splits.first.loader.metadata()["tokens_per_epoch"] / max(seconds, 1e-9),
    }
