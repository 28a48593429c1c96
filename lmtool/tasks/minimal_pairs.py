"""Minimal pairs: log-probabilities of two sentences by a language model, and accuracies by paradigm.

A decoder gives the sum of the log-probabilities of a sentence's tokens; a masked language model (one that predicts a
masked token from the position before it, too) the pseudo-log-likelihood, the sum over tokens that are masked in turn
(Salazar et al. 2020, "Masked Language Model Scoring"; by word: Kauf and Ivanova 2023, "A Better Way to Do Masked
Language Model Scoring"); an encoder-decoder that of the sentence as the filling of a gap. Sums are in fp32 and have no
length normalization. A tie is wrong.

Shape letters: N pairs, L tokens of a sentence, M masked positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NoReturn

import numpy as np
import torch

from lmtool.config.base import JsonObject
from lmtool.data.compressed import stem_of, suffix_of
from lmtool.data.formats import text_format
from lmtool.data.rows import no_column
from lmtool.errors import NotFinite, UserError
from lmtool.learners.base import BaseLearner
from lmtool.learners.generation.scoring import CandidateScorer
from lmtool.learners.metrics import interval, resample_count, resampled_rows
from lmtool.learners.writing import AnswerWriter, Writer
from lmtool.objectives.filling import MaskFiller
from lmtool.objectives.mntp import MaskedNextTokens
from lmtool.system.files import user_path
from lmtool.tasks.configs.minimal_pairs import MinimalPairsConfig
from lmtool.tasks.files import read_file, suffixes
from lmtool.tasks.kinds.labels import location
from lmtool.types import Packed


def refuse_training(config: MinimalPairsConfig) -> NoReturn:
    """Takes the place of a task's kind for minimal pairs, and refuses them."""
    problem = next(iter(config.conflicts("task")))
    raise UserError(problem.message, problem.hint)


@dataclass(frozen=True)
class Pairs:
    """Minimal pairs in the order of their files. paradigms: the paradigm of each pair. phenomena: the phenomenon of
    each paradigm, by name; empty without phenomena. origin: (file, line) of each pair."""

    good: list[str]
    bad: list[str]
    paradigms: list[str]
    phenomena: dict[str, str]
    origin: list[tuple[str, int]]

    def __len__(self) -> int:
        return len(self.good)

    def take(self, rows: Sequence[int]) -> Pairs:
        """Returns the pairs with these numbers."""
        good, bad, paradigms = ([values[row] for row in rows] for values in (self.good, self.bad, self.paradigms))
        return Pairs(good, bad, paradigms, self.phenomena, [self.origin[row] for row in rows])

    def sample(self, count: int) -> Pairs:
        """Returns about `count` pairs, equally many of each paradigm: those whose texts have the smallest hashes."""
        by_paradigm: dict[str, list[int]] = {}
        for row in sorted(
            range(len(self)), key=lambda row: sha256(f"{self.good[row]}\n{self.bad[row]}".encode()).digest()
        ):
            by_paradigm.setdefault(self.paradigms[row], []).append(row)
        size = max(1, count // len(by_paradigm))
        return self.take(sorted(row for rows in by_paradigm.values() for row in rows[:size]))

    def note(self) -> str | None:
        """Describes the pairs of two equal sentences, which no model tells apart; None if there are none."""
        equal = [place for good, bad, place in zip(self.good, self.bad, self.origin, strict=True) if good == bad]
        return (
            f"pairs of two equal sentences, always wrong: {len(equal)}, the first in {location(equal[0])}"
            if equal
            else None
        )

    def scored_rows(self) -> Iterator[list[object]]:
        """Yields for each pair the list of its texts and its paradigm."""
        for good, bad, paradigm in zip(self.good, self.bad, self.paradigms, strict=True):
            yield [[good, bad], paradigm]

    def records(self, log_probabilities_N2: np.ndarray) -> Iterator[JsonObject]:
        """Yields each pair with its log-probabilities."""
        columns = zip(self.paradigms, self.good, self.bad, log_probabilities_N2.tolist(), strict=True)
        for paradigm, good, bad, (good_value, bad_value) in columns:
            yield {
                "paradigm": paradigm,
                "good": good,
                "bad": bad,
                "log_probability_good": good_value,
                "log_probability_bad": bad_value,
                "correct": good_value > bad_value,
            }


def read_pairs(config: MinimalPairsConfig, key: str = "task.path") -> Pairs:
    """Reads the pairs of config.path. key: the key that errors name. Raises UserError if there are none, or for a row
    without two sentences."""
    if config.path is None:
        raise UserError(
            f"task={config.name} has no data by default",
            "set task.path= to a file with columns of good and bad sentences, or to a folder of such files",
        )
    path = user_path(config.path)
    if not path.exists():
        raise UserError(f"{key}={config.path} does not exist", f"set {key}= to a folder or a file of pairs")
    files = [path]
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.is_file() and suffix_of(file) in suffixes(config)]
    pairs = Pairs([], [], [], {}, [])
    for file in files:
        table = read_file(file, config)
        columns = config.with_aliases(table.columns)
        for name in config.text:
            if name not in columns:
                raise no_column(f"task={config.name}: {file}", name, list(columns), "task.text", listed=True)
        paradigms = [str(value) for value in columns.get(config.label, [stem_of(file)] * len(table))]
        for sentences, name in zip((pairs.good, pairs.bad), config.text, strict=True):
            for value, place in zip(columns[name], table.origin, strict=True):
                if not isinstance(value, str) or not value.strip():
                    raise UserError(
                        f"{location(place)}: the column {name} has no sentence", "remove the row, or fill it in"
                    )
                sentences.append(value)
        if config.phenomenon in columns:
            pairs.phenomena.update(zip(paradigms, map(str, columns[config.phenomenon]), strict=True))
        pairs.paradigms.extend(paradigms)
        pairs.origin.extend(table.origin)
    if not len(pairs):
        raise UserError(
            f"{key}={config.path} has no pairs", f"name files of these types: {', '.join(suffixes(config))}"
        )
    return pairs


@torch.no_grad()
def log_probabilities(learner: BaseLearner, pairs: Pairs, config: MinimalPairsConfig, batch_tokens: int) -> np.ndarray:
    """Returns (N, 2) float64: the log-probabilities of the good and the bad sentences, in nats; of a decoder without
    the tokens that both begin with. Raises UserError if the model does not predict words or a sentence is too long, and
    NotFinite."""
    longest = learner.backbone.longest_text
    if learner.config.makes_inputs:
        raise UserError(
            f"task={config.name}: objective={learner.config.name} trains a model on the words of a generator, and only "
            "the generator was trained to give words a probability at a mask",
            "use a model that was trained with objective=mlm, or a decoder",
        )
    if learner.config.member_configs()[0].rewrites_texts:
        raise UserError(
            f"task={config.name}: objective={learner.config.member_configs()[0].name} trains a model to repeat a text, "
            "and not to give sentences a probability",
            "use a model that was trained with objective=clm",
        )
    reads_both = isinstance(learner, MaskedNextTokens) and learner.config.causal > 0
    if config.reading is not None and not reads_both:
        raise UserError(
            f"task.reading={config.reading}: a model trained with objective={learner.config.name} reads sentences in "
            "one way",
            "set task.reading=null, or use a model that was trained with objective=mntp_hybrid",
        )
    if isinstance(learner, MaskFiller) and (not reads_both or config.reading == "masked"):
        longest = learner.longest_filled
        copies = _masked_copies(learner, [*pairs.good, *pairs.bad], pairs.origin * 2, config.masking == "word", longest)
        sums = _pseudo_log_likelihoods(learner, copies, 2 * len(pairs), batch_tokens)
        return np.stack([sums[: len(pairs)], sums[len(pairs) :]], axis=1)
    writer = learner.writer()
    model = writer.model
    scorer = CandidateScorer(model.backbone, model.head, model.start, False, batch_tokens)
    # Published decoders start texts with a bos token if they have one. Models of both readings are trained on documents
    # after an eos token, though a vocabulary with a mask usually has a bos token too.
    start_roles = ("eos",) if reads_both else ("bos", "eos")
    prompts, answers = [], []
    for good, bad, place in zip(pairs.good, pairs.bad, pairs.origin, strict=True):
        before, sentences = _prompted(writer, [good, bad], config, start_roles)
        for sentence in sentences:
            _require_fit(len(before) + len(sentence), longest, place)
        shared = _shared_length(sentences, 0 if before else 1) if model.start is None else 0
        prompts += [[*before, *sentence[:shared]] for sentence in sentences]
        answers += [sentence[shared:] for sentence in sentences]
    sums_N2 = np.zeros((len(pairs), 2))
    # Equal prompts of a pair are read once. A sentence of one token that is not predicted has the sum 0.
    rows_by_prompt: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if answer:
            rows_by_prompt.setdefault((row // 2, tuple(prompt)), []).append(row)
    candidates = [[answers[row] for row in rows] for rows in rows_by_prompt.values()]
    scores = scorer.score((), [prompt for _, prompt in rows_by_prompt], candidates)
    for rows, values in zip(rows_by_prompt.values(), scores, strict=True):
        for row, value in zip(rows, values, strict=True):
            sums_N2[row // 2, row % 2] = value
    return sums_N2


def _prompted(
    writer: Writer, sentences: Sequence[str], config: MinimalPairsConfig, start_roles: Sequence[str]
) -> tuple[list[int], list[list[int]]]:
    """Returns the tokens before the sentences of a pair, and the tokens of each sentence that are predicted."""
    tokenizer, encoded = writer.tokenizer, [writer.tokenizer.encode(sentence).tolist() for sentence in sentences]
    if isinstance(writer, AnswerWriter):
        gap = next(iter(writer.gap_id_by_text.values()), None)
        if gap is None:
            raise UserError(
                f"task={config.name}: model={writer.model.backbone.config.name} was trained for texts without gaps, so "
                "it gives a sentence no probability",
                "use a decoder, a masked language model, or a T5 or BART",
            )
        before = writer.encode_with_template(np.array([gap])).tolist()
        in_answer = [gap] if gap in tokenizer.sentinels else _special_tokens_before(writer)
        return before, [[*in_answer, *ids] for ids in encoded]
    before = _special_tokens_before(writer)
    if not before and config.first_token == "scored":
        roles = tokenizer.roles
        before = [roles[role] for role in start_roles if role in roles][:1]
    return before, encoded


def _special_tokens_before(writer: Writer) -> list[int]:
    probe = np.zeros(2, dtype=np.int64)
    tokens = text_format(writer.model.backbone.config.text_format, writer.tokenizer).join(probe)[0].tolist()
    return tokens[: _start_of(probe, tokens)]


def _start_of(ids_L: np.ndarray, tokens: Sequence[int]) -> int:
    ids = ids_L.tolist()
    return next(start for start in range(len(tokens)) if list(tokens[start : start + len(ids)]) == ids)


def _shared_length(sentences: Sequence[Sequence[int]], least: int) -> int:
    """Returns how many first tokens the sentences share, so that each has one more; at least `least`."""
    first, second = sentences
    most = min(len(first), len(second)) - 1
    length = 0
    while length < most and first[length] == second[length]:
        length += 1
    return max(length, least)


def _require_fit(length: int, longest: int, place: tuple[str, int]) -> None:
    if length > longest:
        raise UserError(
            f"{location(place)}: the sentence has {length} tokens, the model reads {longest}",
            "shorten it, or remove it",
        )


@dataclass(frozen=True)
class _MaskedCopy:
    """A copy of a sentence with one token to predict: its position in the copy, and the token."""

    sentence: int
    tokens: np.ndarray
    columns: dict[str, np.ndarray]
    position: int
    label: int


def _pseudo_log_likelihoods(
    learner: MaskFiller, copies: Iterator[_MaskedCopy], count: int, batch_tokens: int
) -> np.ndarray:
    """Returns (N,) float64: for each of `count` sentences, the sum of the log-probabilities of its masked tokens."""
    sums_N = np.zeros(count)
    batch: list[_MaskedCopy] = []
    size = 0
    for copy in copies:
        if batch and size + len(copy.tokens) > batch_tokens:
            _add_scores(learner, batch, sums_N)
            batch, size = [], 0
        batch.append(copy)
        size += len(copy.tokens)
    if batch:
        _add_scores(learner, batch, sums_N)
    return sums_N


def _masked_copies(
    learner: MaskFiller, sentences: Sequence[str], origin: Sequence[tuple[str, int]], by_word: bool, longest: int
) -> Iterator[_MaskedCopy]:
    tokenizer = learner.tokenizer
    mask, format_ = tokenizer.role("mask"), text_format(learner.backbone.config.text_format, tokenizer)
    for number, (sentence, place) in enumerate(zip(sentences, origin, strict=True)):
        ids_L = tokenizer.encode(sentence)
        tokens, columns = format_.join(ids_L)
        _require_fit(len(tokens), longest, place)
        start = _start_of(ids_L, tokens.tolist())
        words_L = np.cumsum(tokenizer.starts_word[ids_L]) if by_word else np.arange(len(ids_L))
        for index, label in enumerate(ids_L.tolist()):
            copy = tokens.copy()
            copy[start + index : start + len(ids_L)][words_L[index:] == words_L[index]] = mask
            yield _MaskedCopy(number, copy, columns, start + index, label)


def _add_scores(learner: MaskFiller, batch: Sequence[_MaskedCopy], sums_N: np.ndarray) -> None:
    device = learner.backbone.embed.token.weight.device
    lengths = tuple(len(copy.tokens) for copy in batch)
    columns = {
        name: torch.from_numpy(np.concatenate([copy.columns[name] for copy in batch])) for name in batch[0].columns
    }
    packed = Packed(torch.from_numpy(np.concatenate([copy.tokens for copy in batch])), lengths, columns).to(device)
    starts = np.cumsum((0, *lengths[:-1]))
    positions_M = torch.from_numpy(starts + np.array([copy.position for copy in batch])).to(device)
    labels_M = torch.tensor([copy.label for copy in batch], device=device)
    logits_MV = learner.logits_at(packed, positions_M).float()
    scores_M = logits_MV.gather(1, labels_M[:, None])[:, 0] - logits_MV.logsumexp(-1)
    if not bool(torch.isfinite(scores_M).all()):
        raise NotFinite("predictions")
    np.add.at(sums_N, [copy.sentence for copy in batch], scores_M.double().cpu().numpy())


@dataclass(frozen=True)
class PairScores:
    """The accuracies of a model on minimal pairs: by paradigm, the accuracy, the number of pairs, and the number of
    pairs with two equal probabilities (ties), which count as wrong. phenomena: the phenomenon of each paradigm; empty
    without phenomena."""

    accuracies: dict[str, float]
    counts: dict[str, int]
    ties: dict[str, int]
    phenomena: dict[str, str]

    @classmethod
    def of(cls, pairs: Pairs, log_probabilities_N2: np.ndarray) -> PairScores:
        good_N, bad_N = log_probabilities_N2.T
        paradigms = np.array(pairs.paradigms)
        names = list(dict.fromkeys(pairs.paradigms))
        rows = {name: paradigms == name for name in names}
        return cls(
            {name: float((good_N > bad_N)[rows[name]].mean()) for name in names},
            {name: int(rows[name].sum()) for name in names},
            {name: int((good_N == bad_N)[rows[name]].sum()) for name in names},
            pairs.phenomena,
        )

    @property
    def accuracy(self) -> float:
        """The unweighted mean over paradigms."""
        return float(np.mean(list(self.accuracies.values())))

    def by_phenomenon(self) -> dict[str, list[str]]:
        """Returns the paradigms of each phenomenon."""
        groups: dict[str, list[str]] = {}
        for name in self.accuracies:
            if name in self.phenomena:
                groups.setdefault(self.phenomena[name], []).append(name)
        return groups

    def interval(self, paradigms: Sequence[str], against: PairScores | None = None) -> JsonObject:
        """Returns the mean accuracy over paradigms as `value`, with the ends `low` and `high` of its 95% interval.

        The interval resamples paradigms: the pairs of one come from one template. With a single paradigm, it is NaN.
        against: another model, whose accuracies are subtracted.
        """
        values = np.array([self.accuracies[name] for name in paradigms])
        if against is not None:
            values = values - np.array([against.accuracies[name] for name in paradigms])
        if len(values) < 2:
            return {"value": float(values.mean()), "low": float("nan"), "high": float("nan")}
        resamples = resampled_rows(len(values), resample_count(len(values), ["accuracy"]))
        means = [float(values[rows].mean()) for rows in resamples]
        return {"value": float(values.mean()), **interval(means)._asdict()}

    def details(self) -> JsonObject:
        """Returns plain data for the screen and evaluation.json."""
        names = list(self.accuracies)
        return {
            "accuracy": self.interval(names),
            "pairs": sum(self.counts.values()),
            "ties": sum(self.ties.values()),
            "phenomena": {
                phenomenon: {**self.interval(members), "paradigms": len(members)}
                for phenomenon, members in self.by_phenomenon().items()
            },
            "paradigms": {
                name: {"value": self.accuracies[name], "pairs": self.counts[name], "ties": self.ties[name]}
                for name in names
            },
        }
