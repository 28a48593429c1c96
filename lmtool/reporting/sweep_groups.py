"""Groups the jobs of a sweep over seeds, and computes differences between the groups.

The jobs of a group differ only in their seed. Scores of different tasks, objectives or metrics, or on different rows,
are never compared: each has a block. Differences are paired by seed (Student 1908: the mean difference of the pairs,
its standard error, and the 95% interval of Student's t, whose degrees of freedom are the number of pairs minus one).
The error is unknown if all pairs differ by the same amount: scores on few rows are multiples of one row, so that equal
differences occur by chance.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lmtool.errors import UserError
from lmtool.learners.metrics import mean_and_error, t_quantile
from lmtool.reporting.run_files import as_object
from lmtool.reporting.sweep_files import ReportedJob, SweepFiles
from lmtool.reporting.text import lower_is_better, plain

SEED = "seed"
# Values drawn by a sampler cover little of the grid that they span. Below this fraction, no cell counts as missing.
_GRID_SHARE = 0.5
# Settings that a hint names.
_MAX_CANDIDATES = 4
# Relative rounding error of a score.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SeedGroup:
    """The jobs of one setting. settings: values of the keys that vary in the block (None if not set)."""

    settings: dict[str, str | None]
    jobs: list[ReportedJob]

    @property
    def scores(self) -> dict[tuple[str, int], float]:
        """The jobs' scores by seed and a number that counts the jobs with the same seed from 0."""
        scores: dict[tuple[str, int], float] = {}
        for job in self.jobs:
            if job.value is not None:
                occurrence = next(number for number in itertools.count() if (job.seed, number) not in scores)
                scores[job.seed, occurrence] = job.value
        return scores

    @property
    def n(self) -> int:
        return len(self.scores)

    @property
    def mean(self) -> float:
        """The mean score; nan without scores."""
        return mean_and_error(list(self.scores.values()))[0] if self.scores else math.nan

    @property
    def error(self) -> float | None:
        """The standard error of the mean over seeds; None for fewer than two."""
        return mean_and_error(list(self.scores.values()))[1] if self.scores else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds; None for fewer than two."""
        return deviation_of(list(self.scores.values()))

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean over seeds (Student's t); None for fewer than two."""
        if self.error is None:
            return None
        half_width = t_quantile(self.n - 1) * self.error
        return self.mean - half_width, self.mean + half_width

    @property
    def rows_error(self) -> float | None:
        """The standard error of a job's score over rows, averaged over jobs."""
        errors = [job.standard_error for job in self.jobs if job.value is not None and job.standard_error is not None]
        return mean_and_error(errors)[0] if errors else None

    @property
    def label(self) -> str:
        """'optimizer.lr=0.001 batch_examples=16'; 'every job' where nothing varies but the seed."""
        words = [f"{key}={value}" for key, value in self.settings.items() if value is not None]
        return " ".join(words) or ("every job" if not self.settings else "nothing given")


def deviation_of(values: Sequence[float]) -> float | None:
    """Returns the sample standard deviation; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Difference:
    """The mean difference of two groups' scores over their common seeds.

    value: the mean difference; None without pairs. error, low, high: standard error and 95% interval; None for fewer
    than two pairs, or if all pairs differ by the same amount.
    """

    value: float | None
    pairs: int
    error: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def significant(self) -> bool | None:
        """Whether the interval excludes 0; None if unknown."""
        if self.low is None or self.high is None:
            # Any interval around 0 contains 0.
            return False if self.same_in_every_pair and self.value == 0 else None
        return self.low > 0 or self.high < 0

    @property
    def same_in_every_pair(self) -> bool:
        """Whether at least two pairs all differ by this amount."""
        return self.pairs > 1 and self.error is None


def difference(group: SeedGroup, other: SeedGroup) -> Difference:
    """Returns the scores of `group` minus those of `other`, paired by seed."""
    group_scores, other_scores = group.scores, other.scores
    pairs = [group_scores[seed] - other_scores[seed] for seed in group_scores if seed in other_scores]
    if not pairs:
        return Difference(None, 0)
    mean, error = mean_and_error(pairs)
    rounding = _ROUNDING * max(map(abs, (*group_scores.values(), *other_scores.values())))
    mean = mean if abs(mean) > rounding else 0.0
    if error is None or error <= rounding:
        return Difference(mean, len(pairs))
    half_width = t_quantile(len(pairs) - 1) * error
    return Difference(mean, len(pairs), error, mean - half_width, mean + half_width)


@dataclass
class Block:
    """The comparable groups: one task or objective, one metric, and for each seed the same rows.

    task: the task or objective; with the settings of this block if others were scored on other rows. keys: the varying
    keys except the seed. groups: best first, groups without a score last. reference: the group that
    others are compared with. missing: settings of the grid without a job. rows_known: whether it is known that the
    jobs were scored on the same rows; otherwise there are no differences. has_other_rows: whether there are blocks of
    the same task on other rows.
    """

    task: str
    metric: str
    keys: list[str]
    groups: list[SeedGroup]
    reference: SeedGroup
    missing: list[dict[str, str]] = field(default_factory=list)
    rows_known: bool = True
    has_other_rows: bool = False

    @property
    def best(self) -> SeedGroup:
        return self.groups[0]

    @property
    def jobs(self) -> list[ReportedJob]:
        return [job for group in self.groups for job in group.jobs]

    def contrasts(self) -> list[tuple[SeedGroup, Difference]]:
        """Returns the difference of each other group with scores from the reference; [] if the rows are unknown."""
        if not self.rows_known:
            return []
        other_groups = (group for group in self.groups if group is not self.reference and group.n)
        return [(group, difference(group, self.reference)) for group in other_groups]


def blocks_of(sweep: SweepFiles, against: str | None = None) -> list[Block]:
    """Returns the blocks of a sweep that have a score, in the order of their first jobs. against: the reference group,
    named by a job in it (number or folder) or by values that no other group has ('optimizer.lr=0.001', 'lr=0.001');
    None for the best group of each block. Raises UserError if `against` does not match exactly one group."""
    # Damaged jobs have no overrides.
    usable = [job for job in sweep.jobs if job.overrides or job.value is not None]
    tasks = dict.fromkeys((job.task, job.metric) for job in sweep.jobs if job.value is not None)
    blocks = []
    for task, metric in tasks:
        metrics = (metric, None) if sum(other == task for other, _ in tasks) == 1 else (metric,)
        jobs = [job for job in usable if job.task == task and job.metric in metrics]
        parts = _on_the_same_rows(jobs)
        for part in parts:
            others = [job for other in parts if other is not part for job in other]
            blocks.append(_block(task, str(metric), part, others))
    if against is not None:
        _set_reference(sweep, blocks, against)
    return blocks


def _groups(jobs: Sequence[ReportedJob]) -> tuple[list[str], list[SeedGroup]]:
    keys = varying_keys(jobs)
    grouped: dict[tuple[str | None, ...], list[ReportedJob]] = {}
    for job in jobs:
        grouped.setdefault(tuple(job.overrides.get(key) for key in keys), []).append(job)
    return keys, [SeedGroup(dict(zip(keys, values, strict=True)), group_jobs) for values, group_jobs in grouped.items()]


def _on_the_same_rows(jobs: Sequence[ReportedJob]) -> list[list[ReportedJob]]:
    """Divides jobs into parts whose settings were scored on the same rows for each common seed; without a common seed,
    on any rows in common. Settings with unknown rows are a part of their own. Jobs of settings without a score are
    left out, unless there is one part."""
    _, groups = _groups(jobs)
    parts: list[tuple[dict[str, str | None], list[SeedGroup]]] = []
    for group in sorted(groups, key=lambda group: -group.n):
        scored = [job for job in group.jobs if job.value is not None]
        rows: dict[str, str | None] = {job.seed: job.rows for job in scored}
        if None in rows.values():
            rows = {"": None}
        if scored:
            part = next((part for part in parts if _agree(part[0], rows)), None)
            if part is None:
                parts.append(part := ({}, []))
            part[0].update(rows)
            part[1].append(group)
    if len(parts) < 2:
        return [list(jobs)]
    positions = {id(job): position for position, job in enumerate(jobs)}
    divided = [[job for group in part for job in group.jobs] for _, part in parts]
    divided = [sorted(part, key=lambda job: positions[id(job)]) for part in divided]
    return sorted(divided, key=lambda part: positions[id(part[0])])


def _agree(rows: Mapping[str, str | None], other: Mapping[str, str | None]) -> bool:
    common = rows.keys() & other.keys()
    return all(rows[seed] == other[seed] for seed in common) if common else bool({*rows.values()} & {*other.values()})


def _own_settings(jobs: Sequence[ReportedJob], others: Sequence[ReportedJob]) -> str:
    first = jobs[0].overrides
    common = [key for key in first if key != SEED and all(job.overrides.get(key) == first[key] for job in jobs)]
    own = [f"{key}={first[key]}" for key in common if all(job.overrides.get(key) != first[key] for job in others)]
    rows = next(job.rows for job in jobs if job.value is not None)
    return " ".join(own) or ("unknown rows" if rows is None else f"rows {rows[:8]}")


def _block(task: str, metric: str, jobs: Sequence[ReportedJob], others: Sequence[ReportedJob]) -> Block:
    keys, groups = _groups(jobs)
    sign = 1 if lower_is_better(metric) else -1
    groups.sort(key=lambda group: (group.n == 0, sign * group.mean if group.n else 0.0))
    name = f"{task}, {_own_settings(jobs, others)}" if others else task
    rows_known = all(job.rows is not None for job in jobs if job.value is not None)
    return Block(name, metric, keys, groups, groups[0], list(_missing(keys, groups)), rows_known, bool(others))


def varying_keys(jobs: Sequence[ReportedJob]) -> list[str]:
    """Returns the keys that vary between jobs, except the seed, in the order typed. Jobs with GROUP=none do not count
    for the keys of that group."""
    values: dict[str, set[str | None]] = {}
    for key in dict.fromkeys(key for job in jobs for key in job.overrides):
        values[key] = {job.overrides.get(key) for job in jobs if not _is_none(job.overrides, key)}
    return [key for key in values if key != SEED and len(values[key]) > 1]


def _is_none(settings: Mapping[str, str | None], key: str) -> bool:
    group, key_in_group, _ = key.partition(".")
    return bool(key_in_group) and settings.get(group) == "none"


def _missing(keys: Sequence[str], groups: Sequence[SeedGroup]) -> Iterator[dict[str, str]]:
    values = [list(dict.fromkeys(group.settings[key] for group in groups)) for key in keys]
    cells = math.prod(map(len, values))
    if len(groups) == cells or len(groups) < _GRID_SHARE * cells:
        return
    present = {tuple(group.settings.values()) for group in groups}
    for cell in itertools.product(*values):
        settings = dict(zip(keys, cell, strict=True))
        possible = all((value is None) == _is_none(settings, key) for key, value in settings.items())
        if cell not in present and possible:
            yield {key: value for key, value in settings.items() if value is not None}


def _set_reference(sweep: SweepFiles, blocks: Sequence[Block], against: str) -> None:
    settings = _settings(against)
    matched = False
    for block in blocks:
        matching = [group for group in block.groups if _matches(group, settings, against)]
        if len(matching) > 1:  # a setting that has these keys alone is named completely
            matching = [group for group in matching if len(_set_keys(group)) == len(settings)] or matching
        if len(matching) > 1:
            named = [shlex.join([f"against={group.label}"]) for group in matching]
            more = f" and {len(named) - _MAX_CANDIDATES} more" if len(named) > _MAX_CANDIDATES else ""
            raise UserError(
                f"against={against} matches {len(matching)} settings of the sweep",
                f"use one of {', '.join(named[:_MAX_CANDIDATES])}{more}",
            )
        if matching and not matching[0].n:
            raise UserError(f"no job of against={against} has a score", "name another job or setting")
        if matching:
            block.reference, matched = matching[0], True
    if not matched:
        raise UserError(
            f"against={against} is neither a job nor a setting of {sweep.folder}",
            "use the number of a job (against=3) or the values of a setting that no other has (against=lr=0.001)",
        )


def _settings(against: str) -> dict[str, str]:
    """Parses 'a=1 b=2' or 'a=1,b=[x,y]'; {} if a job is named."""
    words = re.split(r"[\s,]+(?=[\w./@+-]+=)", against.strip()) if "=" in against else []
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _matches(group: SeedGroup, settings: Mapping[str, str], against: str) -> bool:
    """Whether a group has these values, or the named job. A key may be its last part: lr for optimizer.lr."""
    if settings:
        return all(
            any(equal_values(group.settings[name], value) for name in _keys_named(key, group.settings))
            for key, value in settings.items()
        )
    name = against.rstrip("/")
    return any(name in (str(job.number), str(job.folder), job.folder.name) for job in group.jobs)


def _keys_named(key: str, keys: Collection[str]) -> list[str]:
    return [key] if key in keys else [name for name in keys if name.endswith(f".{key}")]


def _set_keys(group: SeedGroup) -> list[str]:
    return [key for key, value in group.settings.items() if value is not None]


def equal_values(first: str | None, second: str | None) -> bool:
    """Whether two values are equal, as numbers (1e-3, 0.001) or as text."""
    numbers = number_of(first), number_of(second)
    return first == second or (None not in numbers and numbers[0] == numbers[1])


def number_of(value: str | None) -> float | None:
    """Returns the value as a finite number, or None."""
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


CsvValue: TypeAlias = str | int | float | None
# First characters of formulas in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def varying_keys_and_seed(jobs: Sequence[ReportedJob]) -> list[str]:
    """Returns the keys that vary, the seed last."""
    seeded = len({job.overrides.get(SEED) for job in jobs}) > 1
    return [*varying_keys(jobs), *([SEED] if seeded else [])]


def csv_rows(sweep: SweepFiles) -> Iterator[dict[str, CsvValue]]:
    """Yields one row per job: number, varying keys, status, scores and sizes."""
    keys = varying_keys_and_seed(sweep.jobs)
    metrics = list(dict.fromkeys(name for job in sweep.jobs for name in _scores(job)))
    sizes = (
        "flops", "steps", "tokens", "words", "epochs", "tokens_per_second", "parameters", "trainable_parameters",
        "peak_memory_bytes",
    )  # fmt: skip
    for job in sweep.jobs:
        scores = _scores(job)
        row: dict[str, object] = {"job": job.number, **{key: job.overrides.get(key) for key in keys}}
        row |= {"status": job.status, "reason": job.reason, "task": job.task, "metric": job.metric}
        row |= {"value": job.value, "standard_error": job.standard_error}
        row |= {f"metrics.{name}": scores.get(name) for name in metrics}
        row |= {"seconds": job.seconds, **{name: job.result.get(name) for name in sizes}, "folder": str(job.folder)}
        yield {str(csv_cell(name)): csv_cell(value) for name, value in row.items()}


def csv_cell(value: object) -> CsvValue:
    """Returns a cell that no spreadsheet takes for a formula: text that starts like one gets a leading '. Control
    characters are escaped."""
    if value is None or isinstance(value, int | float):
        return value
    text = plain(value)
    if not text.startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _scores(job: ReportedJob) -> dict[str, float]:
    metrics = as_object(job.result.get("metrics"))
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}
