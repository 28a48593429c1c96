"""What the training commands share: the run folder, the tokenizer, the weights to start from, the screens."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lmtool.commands.configs import PretrainConfig, RunConfig
from lmtool.commands.costs import shapes_of, works_of
from lmtool.commands.fitting import lacks_around, lacks_tokens
from lmtool.config import saved
from lmtool.config.checkpoint import find, read_state
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.nn.attention import attention_path
from lmtool.reporting.console import Output
from lmtool.reporting.plan import Plan, plan
from lmtool.reporting.progress import Progress
from lmtool.reporting.rate import measure_rate
from lmtool.reporting.report import write_report
from lmtool.reporting.screens import end_screen, start_screen
from lmtool.tasks.loading import TaskData
from lmtool.tasks.objective import read_tasks
from lmtool.tokenizers.configs import FolderConfig, TokenizerConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.checkpoints import read_weights
from lmtool.training.precision import Precision, choose_device, choose_precision
from lmtool.training.progress import TrainingResult, TrainingSettings
from lmtool.training.run_folder import RunFolder, choose_folder
from lmtool.weights.folders import published_folder, tokenizer_folder
from lmtool.weights.loading import LoadReport, by_part, load_into
from lmtool.weights.reading import read

RUNS = Path("runs")
EVALUATION_TOKENS = 8192  # in one forward without gradients
KEPT_CHECKPOINTS = 3  # two newest and the best
# Facts for the report alone: the first screen stays one screen.
_UNTOLD = frozenset(
    {
        "fingerprint", "split", "held_out", "padding_fraction", "steps_per_epoch", "store_tokens", "tokens", "files",
        "document", "random_next_fraction", "predicted_fraction", "truncated", "train_rows_available", "warnings",
    }
)  # fmt: skip


@dataclass
class Session:
    """One run under way: its folder, where it speaks, and in which number format it computes."""

    verb: str
    config: RunConfig
    run: RunFolder
    output: Output
    precision: Precision

    @property
    def checkpoint(self) -> Path | None:
        """The run's own checkpoint that it resumes from, where it has one: intact, and the same for all that is read
        from it. Damaged ones are reported when it is first asked for."""
        return self.run.resume_point(lambda text: self.output.line(f"warning: {text}", "yellow"))


@contextmanager
def session(verb: str, config: RunConfig, stem: str) -> Iterator[Session]:
    """Open the run's folder, locked; what is said goes to its log too.

    stem: what a run without a name is called, before its counter.
    """
    precision = choose_precision(config.precision, choose_device(config.device))
    others = RUNS.exists()
    try:
        folder = choose_folder(RUNS, config.name, config.run_dir, stem)
        data = saved.save(config, verb)
        with RunFolder(folder, data, saved.to_yaml(data)) as run:
            if run.result() is None:
                run.write_environment(sys.argv, {"device": str(precision.device)})
            yield Session(verb, config, run, Output(log=run.append_log), precision)
    except UserError:
        if not others:  # a mistake leaves no empty folder behind; one with runs in it stays
            with suppress(OSError):
                RUNS.rmdir()
        raise


def saved_tokenizer(session: Session) -> Tokenizer | None:
    """The tokenizer this run must go on with: of its own checkpoint, else of the one it starts from; else None."""
    if session.checkpoint is not None:
        return Tokenizer.load(session.checkpoint, session.config.tokenizer.parse_special_tokens)
    return starting_tokenizer(session.config)


def starting_tokenizer(config: RunConfig) -> Tokenizer | None:
    """The tokenizer of the checkpoint the weights start from, or else of the hub; None where neither is named."""
    origin = starts_from(config)
    if origin is None:
        return hub_tokenizer(config.tokenizer, config.offline)
    published = published_folder(origin, config.offline)
    folder = find(origin) if published is None else published.path
    return Tokenizer.load(folder, config.tokenizer.parse_special_tokens)


def hub_tokenizer(config: TokenizerConfig, offline: bool) -> Tokenizer | None:
    """The tokenizer of a `tokenizer.path=hf://...`; None for any other."""
    if not isinstance(config, FolderConfig) or "://" not in config.path:
        return None
    return Tokenizer.load(tokenizer_folder(config.path, offline), config.parse_special_tokens)


def starts_from(config: RunConfig) -> str | None:
    """The checkpoint the weights start from; None for random ones."""
    return None if config.checkpoint in (None, "none") else config.checkpoint


def with_tasks(config: PretrainConfig) -> tuple[PretrainConfig, dict[str, TaskData]]:
    """The configuration with the labels of the tasks among its objectives as found, for a checkpoint must know their
    names; and these tasks' data."""
    objective, read = read_tasks(config.objective, config.seed, config.cache_dir, config.offline)
    return config.model_copy(update={"objective": objective}), read


def require_fit(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Every token needs its row of the embedding, and a vocabulary that came with its files the special tokens that
    are asked for. UserError before any text is read with it."""
    model = config.model
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, model.vocab_size={model.vocab_size:,} has fewer rows",
            f"model.vocab_size={tokenizer.vocab_size}, or a smaller tokenizer.vocab_size=",
        )
    roles = {*tokenizer.roles, *(["sentinel"] if tokenizer.sentinels else [])}
    parts = config.objective.parts() if isinstance(config, PretrainConfig) else ()
    for problem in (lacks_around(model, roles), *(lacks_tokens(one, roles) for one in parts)):
        if problem is not None:
            have = ", ".join(sorted(roles)) or "none"
            raise UserError(
                f"the tokenizer {problem}; its special tokens are: {have}",
                "take a tokenizer that fits (tokenizer=auto, with checkpoint=none), or another objective",
            )


def start_weights(config: RunConfig, learner: nn.Module) -> LoadReport | None:
    """Load the weights the run starts from. None where they are random."""
    origin = starts_from(config)
    if origin is None:
        return None
    weights = read(origin, config.offline)
    return replace(load_into(learner, weights.tensors, origin), ignored=weights.ignored)


def settings_of(config: RunConfig, metric: str, greater_is_better: bool, flops_per_token: float) -> TrainingSettings:
    """The run-wide numbers as the loop takes them."""
    shared = set(TrainingSettings.__dataclass_fields__) & set(type(config).model_fields)
    return TrainingSettings(
        metric=metric,
        greater_is_better=greater_is_better,
        flops_per_token=flops_per_token,
        **{name: getattr(config, name) for name in shared},
    )


def parameters_by_part(learner: nn.Module) -> dict[str, int]:
    """Parameters of a learner by part ("backbone", "heads.pooler", ...), tied ones once."""
    return {
        part: sum(one.numel() for one in tensors.values())
        for part, tensors in by_part(dict(learner.named_parameters())).items()
    }


def plan_of(
    config: RunConfig, learner: nn.Module, facts: Mapping[str, Any], precision: Precision
) -> tuple[Plan, float]:
    """The plan of a run and the epochs it makes. facts: the training loader's. Measures the machine for about a third
    of a second."""
    steps_per_epoch, tokens = facts["steps_per_epoch"], facts["tokens_per_epoch"]
    model = config.model
    trained = {name: tuple(one.shape) for name, one in learner.named_parameters() if one.requires_grad}
    rate = measure_rate(model.hidden_size, model.feedforward_size, precision.name, str(precision.device))
    predicted = facts.get("predicted_fraction", 0.0)
    places = config.objective.places if isinstance(config, PretrainConfig) else {}
    # A task's encoder-decoder reads its text on both sides.
    works = list(works_of(learner, places, predicted, facts["mean_length"], predicted or 0.5))

    def of(steps: int) -> Plan:
        return plan(
            shapes_of(learner),
            works,
            steps=steps,
            tokens_per_step=tokens / steps_per_epoch,
            predicted_fraction=predicted,
            parameters=parameters_by_part(learner),
            trainable_parameters=sum(prod(shape) for shape in trained.values()),
            optimizer_values=sum(config.optimizer.state_size(*one) for one in trained.items()),
            micro_batch_tokens=config.micro_batch_tokens,
            half=precision.name != "fp32",
            body_trains=any(name.startswith("backbone.") for name in trained),
            checkpoints=KEPT_CHECKPOINTS,
            flops_per_second=rate,
        )

    one = of(1)
    limits = [config.max_steps or float("inf")]
    if config.max_epochs is not None:
        limits.append(config.max_epochs * steps_per_epoch)
    if config.max_tokens is not None:
        limits.append(config.max_tokens / one.tokens_per_step)
    if config.max_flops is not None:
        limits.append(config.max_flops / one.flops_per_step)
    if config.max_minutes is not None and one.seconds:
        limits.append(60 * config.max_minutes / one.seconds)
    steps = max(1, round(min(limits)))
    warmup = config.schedule.warmup_steps or 0
    notes = []
    if warmup >= steps:
        notes.append(f"schedule.warmup_steps={warmup:,}: in {steps:,} steps the learning rate only rises")
    return replace(of(steps), notes=tuple(notes)), steps / steps_per_epoch


def machine_facts(config: RunConfig, learner: nn.Module, precision: Precision) -> dict[str, str]:
    """Where the run computes and how: for the screen and the report."""
    prefixes = {False}
    if isinstance(config, PretrainConfig) and config.model.architecture == "decoder":
        prefixes = {part.prefixes for part in config.objective.parts()}
    return {
        "device": str(precision.device),
        "precision": f"{precision.name} ({precision.why})",
        "attention": attention_path(learner, precision.device, precision.dtype, prefixes),
        "dropout": "keyed by example and position" if precision.device.type == "cpu" else "seeded by step",
    }


def begin(
    session: Session,
    learner: nn.Module,
    *,
    choices: Mapping[str, Any],
    data: Mapping[str, Any],
    model: Mapping[str, Any],
    plan: Plan,
    epochs: float,
    baseline: Mapping[str, Any],
) -> None:
    """Write facts.json and show the screen that says what will happen."""
    config = session.config
    machine = machine_facts(config, learner, session.precision)
    state = {} if session.checkpoint is None else read_state(session.checkpoint)
    facts = {
        "data": dict(data),
        "model": {**model, "parameters": plan.parameters, **machine},
        "baseline": dict(baseline),
    }
    session.run.write_json("facts.json", facts)
    start_screen(
        session.output,
        command=session.verb,
        run_dir=str(session.run.path),
        choices=choices,
        data=_told(data),
        model=model,
        plan=plan,
        baseline=baseline,
        machine=machine,
        epochs=epochs,
        resumed_step=state.get("step"),
    )
    for warning in warnings_of(data):
        session.output.line(f"warning: {warning}", "yellow")
    threads, before = torch.get_num_threads(), state.get("threads")
    if before not in (None, threads) and session.precision.device.type == "cpu":
        session.output.line(
            f"warning: {before} threads before, {threads} now: sums are added in another order, and the run differs "
            f"from one that was never stopped by rounding; OMP_NUM_THREADS={before} keeps it the same",
            "yellow",
        )


def settled(
    session: Session, baseline: Mapping[str, Any], weights: Mapping[str, float], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """The baseline as the evaluation found it, in facts.json too: of labels that the model makes (which tokens are
    replaced) it is known only then."""
    found = {term: metrics.get(f"{term}_baseline") for term in weights}
    if any(value is None for value in found.values()):
        return dict(baseline)
    whole = {**baseline, "value": sum(weights[term] * (value or 0.0) for term, value in found.items())}
    path = session.run.path / "facts.json"
    session.run.write_json(path.name, {**json.loads(path.read_text(encoding="utf-8")), "baseline": whole})
    return whole


def _told(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts worth a place on the screen; counts of nothing are not."""
    kept = {name: value for name, value in facts.items() if name not in _UNTOLD and (value or value is False)}
    return {name: _told(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def warnings_of(facts: Mapping[str, Any]) -> Iterator[str]:
    """The warnings among facts, those of sections too."""
    yield from facts.get("warnings", ())
    for value in facts.values():
        if isinstance(value, Mapping):
            yield from warnings_of(value)


def listener(session: Session, metric: str, baseline: Mapping[str, Any]) -> Progress:
    """What shows the steps: a bar on a terminal, plain lines elsewhere."""
    return Progress(session.output, metric, session.config.log_every, baseline)


def model_facts(model: ModelConfig, tokenizer: Tokenizer, loaded: LoadReport | None) -> dict[str, Any]:
    """Facts of the model for screen and report."""
    return {
        "family": model.name,
        "layers": model.num_layers,
        "width": model.hidden_size,
        "heads": model.num_heads,
        "vocabulary": tokenizer.vocab_size,
        "weights": "random" if loaded is None else loaded.sentence(),
    }


def result_of(
    session: Session, training: TrainingResult, what: Mapping[str, Any], metric: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The contents of result.json. what: {"model", "task" or "objective"}."""
    numbers = asdict(replace(training, best=None, last=None))
    kept = (
        "status", "ended", "steps", "epochs", "tokens", "seconds", "tokens_per_second", "peak_memory_bytes",
        "parameters", "trainable_parameters", "best_step",
    )  # fmt: skip
    return {
        "status": training.status,
        "command": session.verb,
        **what,
        "metric": metric,
        "value": training.best_value,
        "metrics": training.metrics,
        **{name: numbers[name] for name in kept},
        "seed": session.config.seed,
        **more,
    }


def finish(
    session: Session, result: dict[str, Any], baseline: Mapping[str, Any], next_commands: Sequence[str]
) -> dict[str, Any]:
    """Write result.json and the report, and show the screen that says what happened."""
    session.run.write_result(result)
    report = write_report(session.run.path)
    end_screen(
        session.output,
        result=result,
        baseline=baseline,
        run_dir=str(session.run.path),
        report=str(report),
        next_commands=next_commands,
        examples=result.get("validation_examples"),
    )
    return result


def told_again(session: Session, result: dict[str, Any]) -> dict[str, Any]:
    """A finished run: write a missing report, tell its result, train nothing."""
    folder, output = session.run.path, session.output
    if not (folder / "report.html").is_file():
        write_report(folder)
    output.line(f"{folder} is finished: {result['metric']} {result['value']:.4g}; another name= starts anew")
    output.line(f" report   {folder / 'report.html'}")
    return result


def best_weights(session: Session, training: TrainingResult, learner: nn.Module) -> None:
    """Put the best checkpoint's weights into the learner, for the last evaluation and the examples."""
    if training.best is not None and training.best != training.last:
        learner.load_state_dict(read_weights(training.best))


def words(command: Sequence[str]) -> str:
    """A command line as a user would type it."""
    return " ".join(shlex.quote(word) for word in command)
