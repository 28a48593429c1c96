"""`lmtool evaluate`: scores a checkpoint on the data that it was trained for or on other data of the same kind, and
compares it with another checkpoint on the same rows. Several runs are grouped by setting, with means over seeds."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lmtool.config.base import JsonObject
from lmtool.config.saved import body, save
from lmtool.data.sources import open_source
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.evaluation import SplitEvaluations
from lmtool.learners.held_out import HeldOutSplits
from lmtool.reporting.console import Output
from lmtool.reporting.evaluations import (
    EVALUATION,
    print_curve,
    print_difference,
    print_evaluation,
    print_minimal_pairs,
    write_curve,
    write_evaluation,
)
from lmtool.reporting.seeds import (
    SeedScore,
    blocks_of_runs,
    metric_scores,
    print_seeds,
    refuse_other_rows,
    refuse_repetitions,
    scores_of_runs,
    unscored_job,
    with_scores,
    write_seeds,
)
from lmtool.reporting.sweep_groups import SeedGroup
from lmtool.resolver.commands import EvaluateConfig, EvaluateRunsConfig, FinetuneConfig, PretrainConfig
from lmtool.resolver.decoding import decode_config
from lmtool.resolver.verbs import TRAINING
from lmtool.runs.files import SCORED_ROWS, replace_text, rows_digest, to_json
from lmtool.runs.finding import kept_checkpoints, read_state, run_of_all_kept
from lmtool.runs.identity import require_own_folder
from lmtool.session.evaluation import (
    evaluate_prompted,
    evaluate_text,
    masked_prompts,
    require_unset,
)
from lmtool.session.labeled import LabeledData, data_to_score
from lmtool.session.requests import check_output, write_output
from lmtool.session.session import tokenized_split
from lmtool.session.trained import Trained, load_trained, read_trained
from lmtool.system.files import require_no_link, user_path
from lmtool.tasks.analysis import analysis, difference, with_early_exit
from lmtool.tasks.configs.minimal_pairs import MinimalPairsConfig
from lmtool.tasks.kinds.learner import TaskEvaluation
from lmtool.tasks.minimal_pairs import Pairs, PairScores, log_probabilities, read_pairs
from lmtool.tasks.mixture import AVERAGE, MixedEvaluation
from lmtool.tasks.ngrams import NgramModel
from lmtool.weights.folders import hf_folder
from lmtool.weights.saved_model import saved_config


def run(config: EvaluateRunsConfig) -> JsonObject:
    """Scores, prints, and writes predictions and a report if requested. Returns the metrics, the task's first, and for
    a task the digest of the scored rows. Of several runs: the means of the best setting."""
    check_output(config.output)
    if config.report is not None:
        folder = user_path(config.report)
        require_own_folder(folder, (EVALUATION,), "report", "report")
        require_no_link(folder / "plots")
    runs = config.checkpoint
    if len(runs) > 1:
        return _score_runs(config, runs)
    single = config.model_copy(update={"checkpoint": runs[0]})
    run_folder = run_of_all_kept(runs[0])
    if run_folder is not None:
        return _score_all_kept(single, run_folder)
    return _score(single, Output())[0]


def _score_runs(config: EvaluateConfig, runs: Sequence[str]) -> JsonObject:
    require_unset(config, ("output", "against", "lengths"), "several runs", "name one run")
    pairs = None
    if isinstance(config.task, MinimalPairsConfig):
        if config.task.ngrams is not None:
            raise UserError("task.ngrams= is the baseline of one run", "omit task.ngrams=, or name one run")
        pairs = read_pairs(config.task)
    for name in runs:
        if run_of_all_kept(name) is not None:
            raise UserError(f"{name} is a learning curve, which several runs do not have", "use RUN@AMOUNT, or one run")
    jobs = [unscored_job(number, name, _complete_config(name, config.offline)) for number, name in enumerate(runs)]
    refuse_repetitions(jobs)
    output, notes = Output(), list[str]()
    task = config.task.name if config.task is not None else None
    for number, name in enumerate(runs):
        output.stage(f"scoring {name}", number, len(runs))
        # The data are those of the first run; minimal pairs need none.
        changes = {"checkpoint": name, "report": None} | ({"data": None} if pairs is not None and number else {})
        printed = list[str]()
        metrics, _ = _score(config.model_copy(update=changes), Output(io.StringIO(), printed.append))
        notes += [f"{line} ({name})" for line in printed if line.startswith("warning:")]
        jobs[number] = with_scores(jobs[number], metrics, task)
    output.stage("scoring", len(runs), len(runs))
    refuse_other_rows(jobs)
    blocks = blocks_of_runs(jobs)
    scores = [
        score
        for block in blocks
        for group in block.groups
        for score in (metric_scores(group) if pairs is None else _pair_scores(group, pairs))
    ]
    title = task or "text"
    print_seeds(output, title, blocks, scores)
    if pairs is not None and (note := pairs.note()):
        output.line(note)
    for note in notes:
        output.line(note, "yellow")
    if config.report is not None:
        folder = user_path(config.report)
        write_seeds(folder, title, blocks, scores, task)
        output.line(f"{EVALUATION}, seeds.csv, seeds.html and plots: {folder}")
    best = blocks[0].best
    means: JsonObject = {score.name: score.mean for score in scores if score.group is best}
    return means if task is None else {**means, SCORED_ROWS: jobs[0].rows}


def _complete_config(checkpoint: str, offline: bool) -> JsonObject:
    data = saved_config(checkpoint, offline)
    verb = str(data.get("command"))
    if verb not in TRAINING:
        return data
    # What it started from is part of its setting, and may no longer exist.
    decoded = decode_config(verb, {**body(data), "checkpoint": "none"}, reads_checkpoint=False)
    return {**save(decoded, verb), "checkpoint": data.get("checkpoint")}


def _pair_scores(group: SeedGroup, pairs: Pairs) -> Iterator[SeedScore]:
    names = list(dict.fromkeys(pairs.paradigms))
    runs = [
        PairScores({name: scores[name] for name in names}, {}, {}, pairs.phenomena) for scores in scores_of_runs(group)
    ]
    means = {name: float(np.mean([scores.accuracies[name] for scores in runs])) for name in names}
    mean = PairScores(means, {}, {}, pairs.phenomena)

    def score(kind: str, name: str, paradigms: Sequence[str]) -> SeedScore:
        values = [float(np.mean([scores.accuracies[paradigm] for paradigm in paradigms])) for scores in runs]
        return SeedScore(group, kind, name, values, mean.interval(paradigms) if len(paradigms) > 1 else None)

    yield score("metric", "accuracy", names)
    for phenomenon, members in mean.by_phenomenon().items():
        yield score("phenomenon", phenomenon, members)
    for name in names:
        yield score("paradigm", name, [name])


def _score_all_kept(config: EvaluateConfig, run_folder: str) -> JsonObject:
    require_unset(
        config, ("output", "against"), "several checkpoints", "name one of them: checkpoint=RUN@STEP or RUN@AMOUNT"
    )
    kept, output, points = kept_checkpoints(run_folder), Output(), list[JsonObject]()
    metrics: JsonObject = {}
    for folder, names in kept.items():
        output.stage(f"scoring {', '.join(names)}", len(points), len(kept))
        single = config.model_copy(update={"checkpoint": str(folder), "report": None})
        metrics, intervals = _score(single, Output(io.StringIO()))
        state = read_state(folder)
        amounts = {"checkpoint": ", ".join(names), "step": state["step"], "tokens": state["tokens"]}
        amounts |= {"words": state.get("words"), "passes": state.get("epoch")}
        scores = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        points.append({**amounts, "metrics": scores, "intervals": intervals})
    output.stage("scoring", len(kept), len(kept))
    scored_on = config.task.name if config.task is not None else None
    print_curve(output, run_folder, scored_on, points)
    if config.report is not None:
        write_curve(user_path(config.report), run_folder, scored_on, points)
        output.line(f"{EVALUATION}, curve.csv and plots: {user_path(config.report)}")
    return metrics


def _score(config: EvaluateConfig, output: Output) -> tuple[JsonObject, JsonObject]:
    """Returns the metrics as `run`, and the intervals ("low" and "high") of those that have one."""
    trained = load_trained(config)
    if isinstance(config.task, MinimalPairsConfig):
        return _score_pairs(config, config.task, trained, output)
    if config.shots is not None or isinstance(trained.config, PretrainConfig):
        require_unset(config, ("exit", "exit_entropy"), f"{config.checkpoint} is scored without the head of a task")
    prompts = masked_prompts(config, trained)
    if config.shots is not None and prompts is None:
        return evaluate_prompted(config, trained, output)
    if prompts is not None:
        title = f"{prompts[0].config.name} from prompts alone"
        scores = _scores_of(title, *prompts, config.batch_tokens, trained)
    elif isinstance(trained.config, PretrainConfig):
        return evaluate_text(config, trained, trained.config, output)
    else:
        trained_for_task = f"{config.checkpoint} was trained for a task"
        require_unset(config, ("stride", "max_length", "lengths", "memory_length"), trained_for_task)
        require_unset(config, ("data",), trained_for_task, "set task.path=FILE to score it on other labeled rows")
        scores = _score_task(config, trained, output)
    other_scores = None
    if config.against is not None:
        other_trained = read_trained(config.against, config.offline, trained.precision)
        other_scores = _score_task(config, other_trained, output, config.against)
    if config.output is not None:
        write_output(config.output, scores.evaluations.records())
    details: JsonObject = {"checkpoint": config.checkpoint, "task": scores.title, "splits": {}}
    intervals: JsonObject = {}
    for split, evaluation in scores.splits().items():
        split_details = details["splits"][split] = analysis(evaluation)
        intervals = intervals or dict(split_details["metrics"])
        print_evaluation(
            output, f"{config.checkpoint} · {scores.title}", split, split_details, scores.baseline_of(split)
        )
        if "exits" in evaluation.details:
            split_details["exits"] = evaluation.details["exits"]
            exits = (f"{count:,} after layer {depth}" for depth, count in split_details["exits"].items() if count)
            output.line(f"{split}: rows by exit: {', '.join(exits)}")
        if other_scores is not None and split in other_scores.splits():
            differences = difference(evaluation, other_scores.splits()[split])
            split_details["difference"] = {"against": config.against, **differences}
            print_difference(output, config.checkpoint, str(config.against), evaluation.scores, differences)
    for split, mixed in scores.evaluations.splits.items():
        if isinstance(mixed, MixedEvaluation):
            output.line(f"{split}: {AVERAGE.name} {mixed.scores[AVERAGE.name]:.4f} of {', '.join(mixed.members)}")
    if config.report is not None:
        folder = user_path(config.report)
        write_output(str(folder / "predictions.jsonl"), scores.evaluations.records(), key="report")
        write_evaluation(folder, details)
        output.line(f"evaluation.json, predictions.jsonl and plots: {folder}")
    metrics = scores.evaluations.metrics()
    # A sweep's table shows the first, and compares scores on the same rows.
    digest = scores.evaluations.first.rows_digest
    return {scores.metric: metrics[scores.metric], **metrics, SCORED_ROWS: digest}, intervals


@dataclass(frozen=True)
class TaskScores:
    """The scores of a checkpoint on a task's splits. baseline: the scores from `BaseLearner.baseline`. metric: the
    metric that selects checkpoints."""

    title: str
    evaluations: SplitEvaluations
    baseline: JsonObject
    metric: str

    def splits(self) -> dict[str, TaskEvaluation]:
        """Returns the evaluation of each split; for a mixture, of each member in each split."""
        splits: dict[str, TaskEvaluation] = {}
        for split, evaluation in self.evaluations.splits.items():
            if isinstance(evaluation, MixedEvaluation):
                splits |= {f"{name} {split}": member for name, member in evaluation.members.items()}
            elif isinstance(evaluation, TaskEvaluation):
                splits[split] = evaluation
        return splits

    def baseline_of(self, split: str) -> JsonObject:
        """Returns the baseline of a split; for a mixture, the baseline of the member."""
        members: dict[str, JsonObject] = self.baseline.get("members", {})
        return members.get(split.partition(" ")[0], self.baseline)


def _score_task(config: EvaluateConfig, trained: Trained, output: Output, checkpoint: str | None = None) -> TaskScores:
    trained_config = trained.config
    if not isinstance(trained_config, FinetuneConfig):
        raise UserError(f"against={checkpoint} was not trained for a task", "use a checkpoint of lmtool finetune")
    if checkpoint is not None:
        config = config.model_copy(update={"checkpoint": checkpoint})
    task, heads = data_to_score(config, trained, trained_config)
    for note in [head.note for head in heads.values() if head.note]:
        output.line(f"labels: {note}")
    learner = trained.learner(task.config, heads)
    if checkpoint is None:
        learner = with_early_exit(learner, config.checkpoint, config.exit, config.exit_entropy)
    return _scores_of(task.config.name, task, learner, trained_config.max_length, config.batch_tokens, trained)


def _scores_of(
    title: str, task: LabeledData, learner: BaseLearner, max_length: int, batch_tokens: int, trained: Trained
) -> TaskScores:
    data = task.splits()
    held_out = HeldOutSplits(learner, data, max_length, batch_tokens, trained.config.seed)
    return TaskScores(title, held_out.score(trained.precision), held_out.baseline(data["train"]), learner.metric.name)


def _score_pairs(
    config: EvaluateConfig, task: MinimalPairsConfig, trained: Trained, output: Output
) -> tuple[JsonObject, JsonObject]:
    scored = f"{config.checkpoint} is scored on minimal pairs"
    without_text = ("exit", "exit_entropy", "shots", "stride", "max_length", "lengths", "memory_length")
    require_unset(config, without_text, scored)
    if not isinstance(trained.config, PretrainConfig) or config.data != trained.config.data:  # data=auto: the run's
        require_unset(config, ("data",), scored, "set task.path= to a file or a folder of pairs")
    pairs = read_pairs(task)

    def score(checkpoint: Trained, name: str) -> tuple[PairScores, np.ndarray]:
        if not isinstance(checkpoint.config, PretrainConfig):
            raise UserError(
                f"{name} was trained for a task, so it gives sentences no probability",
                "use a checkpoint of lmtool pretrain, or published weights with a head for words",
            )
        values_N2 = log_probabilities(checkpoint.learner(), pairs, task, config.batch_tokens)
        return PairScores.of(pairs, values_N2), values_N2

    scores, values_N2 = score(trained, config.checkpoint)
    details = scores.details()
    print_minimal_pairs(output, f"{config.checkpoint} · {task.name}", details)
    if note := pairs.note():
        output.line(note)
    if task.ngrams is not None:
        baseline = PairScores.of(pairs, _ngram_log_probabilities(config, task.ngrams, trained, pairs, output))
        details["ngrams"] = baseline.details()
        output.line(
            f"baseline: a {task.ngrams}-gram model of the same training text has accuracy {baseline.accuracy:.4f}"
        )
    if config.against is not None:
        other, _ = score(read_trained(config.against, config.offline, trained.precision), config.against)
        difference_of_means = scores.interval(list(scores.accuracies), other)
        details["difference"] = {"against": config.against, **difference_of_means}
        differences = {"accuracy": difference_of_means}
        print_difference(
            output, config.checkpoint, config.against, {"accuracy": scores.accuracy}, differences, "paradigms"
        )
    if config.output is not None:
        write_output(config.output, pairs.records(values_N2))
    if config.report is not None:
        folder = user_path(config.report)
        write_output(str(folder / "predictions.jsonl"), pairs.records(values_N2), key="report")
        replace_text(folder / EVALUATION, to_json({"checkpoint": config.checkpoint, "task": task.name, **details}))
        output.line(f"{EVALUATION} and predictions.jsonl: {folder}")
    metrics = {"accuracy": scores.accuracy, **scores.accuracies, SCORED_ROWS: rows_digest(pairs.scored_rows())}
    return metrics, {"accuracy": details["accuracy"]}


def _ngram_log_probabilities(
    config: EvaluateConfig, order: int, trained: Trained, pairs: Pairs, output: Output
) -> np.ndarray:
    """Returns (N, 2): the log-probabilities of pairs by an n-gram model of the run's training text."""
    pretraining = trained.config
    assert isinstance(pretraining, PretrainConfig)
    if hf_folder(config.checkpoint, config.offline) is not None or not pretraining.objective.reads_text:
        raise UserError(
            f"task.ngrams={order}: the training text of {config.checkpoint} is not known",
            "omit task.ngrams=, or use a run of lmtool pretrain on one text",
        )
    source = open_source(pretraining.data, config.cache_dir, offline=config.offline)
    train = tokenized_split(pretraining.data, source, "train", trained.tokenizer, config.cache_dir, output.stage, {})
    stores = [part.text for part in train.members.values()] if train.members else [train.text]
    texts = [store.document(number) for store in stores for number in range(len(store))]
    model = NgramModel(texts, order, trained.tokenizer.vocab_size)
    sides = [[trained.tokenizer.encode(sentence) for sentence in side] for side in (pairs.good, pairs.bad)]
    return np.stack([model.log_probabilities(sentences) for sentences in sides], axis=1)
