"""The jobs of a sweep grouped over their seeds, and what differs between the groups.

A group holds the jobs that differ in nothing but the seed. Scores of different tasks, objectives or metrics are never
put together: each is a block of its own. Differences are taken between jobs of the same seed (Student 1908: the mean of
the pairs' differences, its standard error, and the 95% interval of Student's t with one degree of freedom less than
pairs). Pairs that all differ by the same amount leave the error unknown: scores of few rows are whole numbers of rows,
and two of them are equal by chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmtool.errors import UserError
from lmtool.learners.metrics import mean_and_error, t_quantile
from lmtool.reporting.sweep_files import ReportedJob, SweepFiles
from lmtool.reporting.text import lower_is_better, plain

SEED = "seed"
# A sweep whose sampler draws values fills next to nothing of the grid that they span: then no cell is missing.
_GRID_SHARE = 0.5
# Relative rounding error of a score.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SeedGroup:
    """The jobs of one setting. settings: the keys that vary in its block, and their values (None: not given)."""

    settings: dict[str, str | None]
    jobs: list[ReportedJob]

    @property
    def scores(self) -> dict[tuple[str, int], float]:
        """The scores of the jobs that have one, by seed, and by place where a seed came twice."""
        scores: dict[tuple[str, int], float] = {}
        for job in self.jobs:
            if job.value is not None:
                occurrence = next(
                    occurrence for occurrence in itertools.count() if (job.seed, occurrence) not in scores
                )
                scores[job.seed, occurrence] = job.value
        return scores

    @property
    def n(self) -> int:
        return len(self.scores)

    @property
    def mean(self) -> float:
        """Not a number where no job has a score."""
        return mean_and_error(list(self.scores.values()))[0] if self.scores else math.nan

    @property
    def error(self) -> float | None:
        """The standard error of the mean over seeds; None below two."""
        return mean_and_error(list(self.scores.values()))[1] if self.scores else None

    @property
    def rows_error(self) -> float | None:
        """The standard error of one job's score, for its number of rows: the mean over the jobs."""
        errors = [job.standard_error for job in self.jobs if job.value is not None and job.standard_error is not None]
        return mean_and_error(errors)[0] if errors else None

    @property
    def label(self) -> str:
        """'optimizer.lr=0.001 batch_examples=16'; 'every job' where nothing varies but the seed."""
        words = [f"{key}={value}" for key, value in self.settings.items() if value is not None]
        return " ".join(words) or ("every job" if not self.settings else "nothing given")


@dataclass(frozen=True)
class Difference:
    """The mean of a group's scores less those of another, over the seeds that both have. error, low, high: its standard
    error and 95% interval, None of fewer than two pairs, and of pairs that all differ by the same amount. apart:
    whether 0 lies outside of the interval; None where that is not known."""

    value: float | None
    pairs: int
    error: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def apart(self) -> bool | None:
        if self.low is None or self.high is None:
            # However wide an interval around 0 is, 0 lies in it.
            return False if self.same_in_every_pair and self.value == 0 else None
        return self.low > 0 or self.high < 0

    @property
    def same_in_every_pair(self) -> bool:
        """Whether two pairs or more all differ by this amount."""
        return self.pairs > 1 and self.error is None


def difference(group: SeedGroup, other: SeedGroup) -> Difference:
    """The first's scores less the second's, paired by seed."""
    mine, theirs = group.scores, other.scores
    pairs = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    if not pairs:
        return Difference(None, 0)
    mean, error = mean_and_error(pairs)
    rounding = _ROUNDING * max(map(abs, (*mine.values(), *theirs.values())))
    mean = mean if abs(mean) > rounding else 0.0
    if error is None or error <= rounding:
        return Difference(mean, len(pairs))
    reach = t_quantile(len(pairs) - 1) * error
    return Difference(mean, len(pairs), error, mean - reach, mean + reach)


@dataclass
class Block:
    """What is compared with each other: one task or objective and one metric. keys: what varies, but for the seed.
    groups: best first, those without a score last. reference: what the differences are taken to. missing: settings of
    the grid that no job was asked for or started."""

    learns: str
    metric: str
    keys: list[str]
    groups: list[SeedGroup]
    reference: SeedGroup
    missing: list[dict[str, str]] = field(default_factory=list)

    @property
    def best(self) -> SeedGroup:
        return self.groups[0]

    @property
    def jobs(self) -> list[ReportedJob]:
        return [job for group in self.groups for job in group.jobs]

    def differences(self) -> list[tuple[SeedGroup, Difference]]:
        """Each other group with scores, and how it differs from the reference."""
        others = (group for group in self.groups if group is not self.reference and group.n)
        return [(group, difference(group, self.reference)) for group in others]


def blocks_of(sweep: SweepFiles, against: str | None = None) -> list[Block]:
    """The blocks of a sweep that have a score, in the order of their first jobs.

    against: what the differences are taken to, a job (its number or folder: the group that it is of) or a setting
    ('optimizer.lr=0.001'); None: the best of each block. UserError where that is not one group.
    """
    # A job whose files are damaged says nothing of what was varied.
    known = [job for job in sweep.jobs if job.overrides or job.value is not None]
    learnt = dict.fromkeys((job.learns, job.metric) for job in sweep.jobs if job.value is not None)
    blocks = []
    for learns, metric in learnt:
        metrics = (metric, None) if sum(other == learns for other, _ in learnt) == 1 else (metric,)
        jobs = [job for job in known if job.learns == learns and job.metric in metrics]
        blocks.append(_block(learns, str(metric), jobs))
    if against is not None:
        _refer(sweep, blocks, against)
    return blocks


def _block(learns: str, metric: str, jobs: Sequence[ReportedJob]) -> Block:
    keys = varied(jobs)
    grouped: dict[tuple[str | None, ...], list[ReportedJob]] = {}
    for job in jobs:
        grouped.setdefault(tuple(job.overrides.get(key) for key in keys), []).append(job)
    groups = [SeedGroup(dict(zip(keys, values, strict=True)), of_group) for values, of_group in grouped.items()]
    sign = 1 if lower_is_better(metric) else -1
    groups.sort(key=lambda group: (group.n == 0, sign * group.mean if group.n else 0.0))
    return Block(learns, metric, keys, groups, groups[0], list(_missing(keys, groups)))


def varied(jobs: Sequence[ReportedJob]) -> list[str]:
    """The keys whose values differ between jobs, but for the seed, in the order typed. A job of a group's `none` has no
    value of the keys below it."""
    values: dict[str, set[str | None]] = {}
    keys = dict.fromkeys(key for job in jobs for key in job.overrides)
    for key in keys:
        values[key] = {job.overrides.get(key) for job in jobs if not _is_none(job.overrides, key)}
    return [key for key in keys if key != SEED and len(values[key]) > 1]


def _is_none(settings: Mapping[str, str | None], key: str) -> bool:
    """Whether a key is one of a group of which none was chosen."""
    group, below, _ = key.partition(".")
    return bool(below) and settings.get(group) == "none"


def _missing(keys: Sequence[str], groups: Sequence[SeedGroup]) -> Iterator[dict[str, str]]:
    """The cells of the grid of the values that no group has; nothing where the settings are no grid."""
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


def _refer(sweep: SweepFiles, blocks: Sequence[Block], against: str) -> None:
    """Set the reference of the blocks that have what was named."""
    settings, hint = _settings(against), "against=3 names a job, against='optimizer.lr=0.001' a setting"
    some = False
    for block in blocks:
        if settings:
            matching = [group for group in block.groups if _fits(group, settings)]
        else:
            matching = [group for group in block.groups if any(_named(job, against) for job in group.jobs)]
        if len(matching) > 1:
            more = ", ".join(key for key in block.keys if key not in settings)
            raise UserError(f"against={against} fits {len(matching)} settings of the sweep", f"name {more} too")
        if matching and not matching[0].n:
            raise UserError(f"against={against}: none of its jobs has a score", "name another one")
        if matching:
            block.reference, some = matching[0], True
    if not some:
        raise UserError(f"against={against} is no job and no setting of {sweep.folder}", hint)


def _settings(against: str) -> dict[str, str]:
    """'a=1 b=2' or 'a=1,b=2' by key; nothing where a job is named."""
    words = against.replace(",", " ").split() if "=" in against else []
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _fits(group: SeedGroup, wanted: Mapping[str, str]) -> bool:
    return all(key in group.settings and same(group.settings[key], value) for key, value in wanted.items())


def same(first: str | None, second: str | None) -> bool:
    """Whether two values are the same, numbers however they are written (1e-3, 0.001)."""
    numbers = number_of(first), number_of(second)
    return first == second or (None not in numbers and numbers[0] == numbers[1])


def number_of(value: str | None) -> float | None:
    """The finite number that a value is written as, else None."""
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _named(job: ReportedJob, name: str) -> bool:
    stripped = name.rstrip("/")
    return stripped == str(job.number) or stripped in (str(job.folder), job.folder.name)


# Characters that begin a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def varied_keys(jobs: Sequence[ReportedJob]) -> list[str]:
    """All that varies, the seed last."""
    seeded = len({job.overrides.get(SEED) for job in jobs}) > 1
    return [*varied(jobs), *([SEED] if seeded else [])]


def csv_rows(sweep: SweepFiles) -> Iterator[dict[str, Any]]:
    """A row a job: its number, what varied, how it ended, its scores and sizes."""
    keys = varied_keys(sweep.jobs)
    metrics = list(dict.fromkeys(name for job in sweep.jobs for name in _scores(job)))
    sizes = ("steps", "tokens", "tokens_per_second", "parameters", "trainable_parameters", "peak_memory_bytes")
    for job in sweep.jobs:
        scores = _scores(job)
        row: dict[str, Any] = {"job": job.number, **{key: job.overrides.get(key) for key in keys}}
        row |= {"status": job.status, "reason": job.reason, "task": job.learns, "metric": job.metric}
        row |= {"value": job.value, "standard_error": job.standard_error}
        row |= {f"metrics.{name}": scores.get(name) for name in metrics}
        row |= {"seconds": job.seconds, **{name: job.result.get(name) for name in sizes}, "folder": str(job.folder)}
        yield {csv_cell(name): csv_cell(value) for name, value in row.items()}


def csv_cell(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: text that begins like one, and is no number, has a ' before it.
    Control characters are made visible."""
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


def _scores(job: ReportedJob) -> dict[str, Any]:
    """The metrics of result.json that are numbers."""
    metrics = job.result.get("metrics")
    known = metrics.items() if isinstance(metrics, dict) else ()
    return {str(name): value for name, value in known if isinstance(value, int | float)}
