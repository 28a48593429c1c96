"""Few-shot prompting without training (Brown et al. 2020): answers are scored as continuations of the prompt, or
generated.

Shape letters: N rows, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from lmtool.data.examples import Rows
from lmtool.errors import UserError
from lmtool.learners.generation.scoring import CandidateScorer
from lmtool.learners.writing import Writer
from lmtool.random_streams import Permutation
from lmtool.tasks.configs.base import PromptedConfig
from lmtool.tasks.kinds.base import TaskKind
from lmtool.tasks.kinds.labels import location
from lmtool.tasks.kinds.predictions import Prediction
from lmtool.tasks.prompting.pattern import SEPARATOR, PromptTemplate
from lmtool.training.precision import FP32_CPU, Precision

# Epoch of the random stream "sample" that selects the demonstrations; no other use of the stream has this number.
_SAMPLING_EPOCH = 3


def demonstrations(kind: TaskKind, train: Rows, held_out: Sequence[Rows], shots: int, seed: int) -> Rows:
    """Returns a seeded sample of training rows, in the order of the prompt. Rows whose text also occurs in a held-out
    row are excluded. Raises UserError if too few remain."""
    if not shots:
        return train.take(np.zeros(0, dtype=np.int64))
    held_out_groups = {repr(group) for rows in held_out for group in kind.groups(rows)}
    eligible = np.array([row for row, group in enumerate(kind.groups(train)) if repr(group) not in held_out_groups])
    if len(eligible) < shots:
        raise UserError(
            f"shots={shots} is more than the {len(eligible)} training rows of task={kind.config.name}"
            + (" whose text is in no held-out row" if len(eligible) < len(train) else ""),
            f"set shots={len(eligible)} or less, or set task.path to a folder with more training rows",
        )
    return train.take(eligible[Permutation(len(eligible), seed, "sample", _SAMPLING_EPOCH)(np.arange(shots))])


def row_values(kind: TaskKind, rows: Rows) -> list[dict[str, str]]:
    """Returns the columns of each row as texts for a template."""
    columns = kind.prompt_columns(rows)
    return [dict(zip(columns, texts, strict=True)) for texts in zip(*columns.values(), strict=True)]


@dataclass(frozen=True)
class Question:
    """A prompt: the tokens before an answer. shown: the number of demonstrations in the prompt; if not all fit, the
    last ones are used. shared: the tokens of these demonstrations, the same for all rows. row_tokens: the tokens of
    the row."""

    shown: int
    shared: tuple[int, ...]
    row_tokens: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [*self.shared, *self.row_tokens]


class Prompts:
    """Builds prompts with demonstrations. longest: the maximum number of tokens in a prompt."""

    def __init__(self, kind: TaskKind, template: PromptTemplate, writer: Writer, demonstrations: Rows, longest: int):
        self.template, self.writer, self.longest = template, writer, longest
        answers = zip(kind.right_answers(demonstrations), row_values(kind, demonstrations), strict=True)
        self._texts = texts = [template.example(answer, values) for answer, values in answers]
        firsts = [tuple(writer.encode(text).tolist()) for text in texts]
        later = [tuple(writer.encode(SEPARATOR + text).tolist()) for text in texts]
        # By number of demonstrations: the tokens of the last ones.
        self._shared = [
            tuple(token for part in (*firsts[skipped : skipped + 1], *later[skipped + 1 :]) for token in part)
            for skipped in range(len(texts), -1, -1)
        ]
        probe = np.zeros(2, dtype=np.int64)
        self._special_count = len(writer.encode_with_template(probe)) - len(probe)
        # In an encoder-decoder, the decoder generates the answer, so it takes no room in the prompt.
        self._one_stack = writer.model.start is None

    @property
    def shots(self) -> int:
        return len(self._texts)

    def text(self, values: Mapping[str, str]) -> str:
        """Returns a prompt with all demonstrations, as text."""
        return SEPARATOR.join([*self._texts, self.template.before(values)])

    def question(self, values: Mapping[str, str], answer_length: int, place: tuple[str, int]) -> Question:
        """Returns the prompt of a row with as many demonstrations as fit. values: the columns of the row as texts.
        answer_length: the number of tokens of the longest answer, which must fit too. place: the file and line of the
        row. Raises UserError if the row does not fit even without demonstrations."""
        capacity = self.longest - (answer_length if self._one_stack else 0)
        first, later = self._row_tokens(values, ""), self._row_tokens(values, SEPARATOR) if self.shots else ()
        for shown in range(self.shots, -1, -1):
            row_tokens = later if shown else first
            if len(self._shared[shown]) + len(row_tokens) + self._special_count <= capacity:
                return self._with_special_tokens(shown, row_tokens)
        length, reserved = len(first) + self._special_count, answer_length if self._one_stack else 0
        answer_note = f", and its answer {reserved}" if reserved else ""
        text_length, longest_text = length + reserved, self.writer.model.backbone.longest_text
        length_hint = f"the model reads at most {longest_text} tokens: "
        if text_length <= longest_text:
            length_hint = f"set max_length={text_length} or more, "
        raise UserError(
            f"{location(place)}: the prompt needs {length} tokens even without demonstrations{answer_note}; the "
            f"limit is {self.longest}",
            f"{length_hint}use a shorter task.prompt.template=, or remove the row",
        )

    def with_demonstrations(self, values: Mapping[str, str], shown: int) -> Question:
        """Returns the prompt of a row with this many demonstrations."""
        return self._with_special_tokens(shown, self._row_tokens(values, SEPARATOR if shown else ""))

    def _row_tokens(self, values: Mapping[str, str], separator: str) -> tuple[int, ...]:
        text = separator + self.template.before(values)
        return tuple(self.writer.encode(text).tolist()) if text else ()

    def _with_special_tokens(self, shown: int, row_tokens: tuple[int, ...]) -> Question:
        """If the model adds any, `row_tokens` has all tokens, and `shared` is empty."""
        question = Question(shown, self._shared[shown], row_tokens)
        if question.tokens and not self._special_count:
            return question
        tokens = self.writer.encode_with_template(np.array(question.tokens, dtype=np.int64))
        return Question(shown, (), tuple(tokens.tolist()))


Normalisation = Literal["none", "length", "calibrated"]
# Content-free inputs (Zhao et al. 2021, section 5).
_CONTENT_FREE = ("N/A", "[MASK]", "")


@dataclass(frozen=True)
class PromptedEvaluation:
    """The evaluation of one split with one sample of demonstrations. rows: the predicted rows. shots: the number of
    demonstrations in the sample. shown: (N,) the number of them that fit into the prompt of each row. prompt: the
    prompt of the first row, as text."""

    rows: Rows
    predictions: Sequence[Prediction]
    scores: dict[str, float]
    shown: np.ndarray
    shots: int
    prompt: str


class FewShot:
    """Predicts rows from prompts.

    longest: the maximum number of tokens in a prompt. normalisation: how candidates are scored. none: by the sum of
    their tokens' log-probabilities. length: by the mean. calibrated: by the sum, minus the log-probability of the
    candidate after content-free inputs (contextual calibration, Zhao et al. 2021).
    """

    def __init__(
        self,
        kind: TaskKind,
        writer: Writer,
        longest: int,
        normalisation: Normalisation = "length",
        batch_tokens: int = 8192,
        precision: Precision = FP32_CPU,
    ):
        self.kind, self.writer, self.normalisation = kind, writer, normalisation
        self.longest = min(longest, writer.model.backbone.longest_text)
        self.batch_tokens, self.precision = batch_tokens, precision
        self.template = PromptTemplate(_prompt_template(kind))
        model = writer.model
        self.scorer = CandidateScorer(model.backbone, model.head, model.start, model.bidirectional_prompt, batch_tokens)

    def evaluate(self, demonstrations: Rows, rows: Rows, seed: int = 0) -> PromptedEvaluation:
        """Predicts labeled rows from prompts with these demonstrations. seed: seeds the sampling of generated
        answers."""
        rows = self.kind.predicted_rows(rows)
        prompts = Prompts(self.kind, self.template, self.writer, demonstrations, self.longest)
        candidates = self.kind.candidates(rows)
        with self.precision.autocast():
            if candidates is None:
                predictions, shown = self._generate(prompts, rows, seed)
            else:
                predictions, shown = self._choose(prompts, rows, candidates)
        scores = self.kind.metrics(rows, predictions)
        text = prompts.text(row_values(self.kind, rows)[0])
        return PromptedEvaluation(rows, predictions, scores, np.array(shown), prompts.shots, text)

    def _generate(self, prompts: Prompts, rows: Rows, seed: int) -> tuple[list[Prediction], list[int]]:
        settings, values = self.kind.config.text_generation, row_values(self.kind, rows)
        assert settings is not None
        questions = [
            prompts.question(texts, settings.max_new_tokens, place)
            for texts, place in zip(values, rows.origin, strict=True)
        ]
        tokens = [question.tokens for question in questions]
        writer = copy(self.writer)
        stops = [self.template.stop(texts) for texts in values]
        if all(stop == "\n" for stop in stops):
            writer.model = replace(writer.model, ends=(*writer.model.ends, *self._line_ends()))
        generated = writer.write(tokens, settings, seed, self.batch_tokens)
        predictions = [
            Prediction(writer.text(prompt, ids).lstrip(" ").split(stop)[0].strip(), float(len(ids)))
            for prompt, ids, stop in zip(tokens, generated, stops, strict=True)
        ]
        return predictions, [question.shown for question in questions]

    def _line_ends(self) -> list[int]:
        texts = [self.writer.encode(text).tolist() for text in ("\n", "\n\n")]
        decode = self.writer.tokenizer.decode
        return [ids[0] for ids in texts if len(ids) == 1 and "\n" in decode(ids, skip_special=False)]

    def _choose(
        self, prompts: Prompts, rows: Rows, candidates: Sequence[Sequence[str]]
    ) -> tuple[list[Prediction], list[int]]:
        values = row_values(self.kind, rows)
        answers = [
            [self._tokens(self.template.answer(answer, texts)) for answer in row]
            for row, texts in zip(candidates, values, strict=True)
        ]
        questions = [
            # The last token of an answer is predicted, but never read.
            prompts.question(texts, max(map(len, row)) - 1, place)
            for texts, row, place in zip(values, answers, rows.origin, strict=True)
        ]
        predictions: list[Prediction] = [Prediction(0, 0.0)] * len(rows)
        for shown in sorted({question.shown for question in questions}):
            group = [number for number, question in enumerate(questions) if question.shown == shown]
            sums = self._score([questions[number] for number in group], [answers[number] for number in group])
            prior = None
            if self.normalisation == "calibrated":
                prior = self._prior(prompts, shown, [candidates[number] for number in group])
            for index, number in enumerate(group):
                scores_C = sums[index]
                if self.normalisation == "length":
                    scores_C = scores_C / np.array(list(map(len, answers[number])))
                elif prior is not None:
                    scores_C = scores_C - np.log(prior[index])
                probabilities_C = _softmax(scores_C)
                best = int(scores_C.argmax())
                predictions[number] = Prediction(best, float(probabilities_C[best]), probabilities_C)
        return predictions, [question.shown for question in questions]

    def _score(self, questions: Sequence[Question], answers: Sequence[Sequence[tuple[int, ...]]]) -> list[np.ndarray]:
        return self.scorer.score(questions[0].shared, [question.row_tokens for question in questions], answers)

    def _prior(self, prompts: Prompts, shown: int, candidates: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Returns, for each row, (C,) the relative probabilities of its candidates after content-free inputs."""
        texts = list(dict.fromkeys(text for row in candidates for text in row))
        index = {text: number for number, text in enumerate(texts)}
        sums = []
        for content in _CONTENT_FREE:
            values = dict.fromkeys(self.kind.config.reads, content)
            answers = [self._tokens(self.template.answer(text, values)) for text in texts]
            question = prompts.with_demonstrations(values, shown)
            sums.append(self._score([question], [answers])[0])
        indices = [[index[text] for text in row] for row in candidates]
        return [np.mean([_softmax(scores[row]) for scores in sums], axis=0) for row in indices]

    def _tokens(self, text: str) -> tuple[int, ...]:
        tokens = tuple(self.writer.encode(text).tolist())
        if not tokens:
            raise UserError(
                f"task={self.kind.config.name}: the answer {text!r} has no tokens in this vocabulary",
                "set words for the classes: task.prompt.words={CLASS: WORD, ...}",
            )
        return tokens


def _prompt_template(kind: TaskKind) -> str:
    if not isinstance(kind.config, PromptedConfig):
        raise UserError(
            f"task={kind.config.name} is of kind {kind.config.kind}, which has no prompts",
            f"lmtool finetune task={kind.config.name} trains a model for it",
        )
    problem = kind.config.template_problem("task")
    if problem is not None:
        raise UserError(problem.message, problem.hint)
    return kind.config.template


def _softmax(scores_C: np.ndarray) -> np.ndarray:
    probabilities_C = np.exp(scores_C - scores_C.max())
    return probabilities_C / probabilities_C.sum()
