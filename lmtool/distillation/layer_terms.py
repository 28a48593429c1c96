"""Distillation terms that compare layers of the student and the teacher: their hidden states or self-attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtool.config.registry import entry_of
from lmtool.distillation.configs.base import TermConfig, shared_sides
from lmtool.distillation.configs.terms import RelationsConfig
from lmtool.distillation.output_terms import Term
from lmtool.distillation.recording import LearnerPair, RecordedStates, StudentOutputs, TeacherOutputs, member_batches
from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.nn.configs import Side
from lmtool.nn.initialization import materialize
from lmtool.nn.stack import Stack, Tap, TapPoint
from lmtool.nn.tiled import AttentionInputs, TileScores
from lmtool.types import Batch, Packed

PointPair = tuple[TapPoint, TapPoint]
"""A tap point in the student, and the tap point in the teacher whose states it learns."""


class LayerTerm(Term):
    """The base of terms that compare layers. A term is the sum, over pairs of layers, of a loss averaged over tokens.
    In an encoder-decoder, the tokens of the encoder and of the decoder have the same weight. Raises UserError if no
    layer of the student is trained, or if student and teacher turn out to read different texts."""

    compares_attention: ClassVar[bool] = False
    """Whether the term compares the inputs of self-attention instead of hidden states."""

    def __init__(self, config: TermConfig, pair: LearnerPair):
        super().__init__(config, pair)
        student = pair.student
        if student.is_feature_extractor and not any(name.startswith("backbone.") for name in student.trainable_names):
            raise UserError(
                "distill.terms compares the student's layers with the teacher's, but all of them are frozen",
                "set tuning=full, or use terms over predictions: distill=soft",
            )
        self.points = tuple(self.compared_points(pair))
        # False: the student's states of the current step; True: the teacher's.
        self._recorded: dict[bool, RecordedStates] = {}

    def compared_points(self, pair: LearnerPair) -> Iterator[PointPair]:
        """Yields the compared tap points, here those after the layers in the layer map."""
        for side, student_layer, teacher_layer in pair.layers or ():
            yield TapPoint(student_layer, side), TapPoint(teacher_layer, side)

    def tap(self, teacher: bool) -> Tap:
        points = [teacher_point if teacher else student_point for student_point, teacher_point in self.points]
        recorded = RecordedStates(attention=points) if self.compares_attention else RecordedStates(states=points)
        self._recorded[teacher] = recorded
        return recorded

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"": float(batch.tokens)}

    def sums(self, student: StudentOutputs, teacher: TeacherOutputs, step: int) -> dict[str, Tensor]:
        student_states, teacher_states = self._recorded.pop(False), self._recorded.pop(True)
        total = torch.zeros((), device=student.batch.inputs.tokens.device)
        compared_tokens: dict[Side, int] = {}
        for student_point, teacher_point in self.points:
            if student_states.token_counts(student_point) != teacher_states.token_counts(teacher_point):
                raise UserError(
                    "distill.terms: layers are compared token by token, but the student reads texts that its teacher "
                    "does not read, such as those of another domain",
                    "use terms over predictions: distill=soft",
                )
            pair = student_point, teacher_point
            loss, compared_tokens[student_point.side] = self.point_loss(
                student_states, teacher_states, pair, student.batch
            )
            total = total + loss
        # The training loop divides the sum by `counts`. A learner may have read each text several times, or only one
        # side of the batch, so the loss is scaled from the number of compared tokens to the number in `counts`.
        return {"": total * (self.counts(student.batch)[""] / max(sum(compared_tokens.values()), 1))}

    @abstractmethod
    def point_loss(
        self, student: RecordedStates, teacher: RecordedStates, pair: PointPair, batch: Batch
    ) -> tuple[Tensor, int]:
        """Returns the loss at a pair of tap points, summed over the compared tokens, and the number of these tokens."""


# Terms that compare self-attention: its scores (TinyBERT), or relations between tokens computed from the queries, keys
# and values (MiniLM, MiniLMv2). Scores are computed in tiles, to save memory.
# Shape letters: T tokens, A heads, D width of a head, R rows of a tile, L queries and K keys of a row.


Tiles = tuple[TileScores, TileScores]
"""The same tile of the student's and of the teacher's scores."""


class AttentionTerm(LayerTerm):
    """The base of terms that compare self-attention. Raises UserError if a tuning method adds virtual tokens or a
    prefix to the student's keys, which the teacher lacks."""

    compares_attention = True

    def __init__(self, config: TermConfig, pair: LearnerPair):
        super().__init__(config, pair)
        stacks = [module for module in pair.student.backbone.modules() if isinstance(module, Stack)]
        if pair.student.virtual_tokens or any(stack.ahead for stack in stacks):
            raise UserError(
                f"distill.terms.{entry_of(config).name}: the tuning method adds keys to the student's "
                "self-attention that the teacher does not have",
                "set tuning=full, or use terms over states: distill.terms.hidden.weight=1",
            )

    def point_loss(
        self, student: RecordedStates, teacher: RecordedStates, pair: PointPair, batch: Batch
    ) -> tuple[Tensor, int]:
        total, token_count = torch.zeros((), device=batch.inputs.tokens.device), 0
        for student_inputs, teacher_inputs in zip(
            student.attention_inputs[pair[0]], teacher.attention_inputs[pair[1]], strict=True
        ):
            for tiles in self.tiles(student_inputs, teacher_inputs):
                total = total + self.distance(*tiles)
            token_count += len(student_inputs.q_TAD)
        return total, token_count

    @abstractmethod
    def tiles(self, student: AttentionInputs, teacher: AttentionInputs) -> Iterator[Tiles]:
        """Yields the compared scores of all tokens, in tiles."""

    @abstractmethod
    def distance(self, student: TileScores, teacher: TileScores) -> Tensor:
        """Returns the loss of a tile, averaged over heads and summed over queries."""


class AttentionScores(AttentionTerm):
    """The squared error of the scores before the softmax, averaged over heads and attended tokens, and summed over
    tokens and layers: 1/h sum_i MSE(A_i student, A_i teacher) (Jiao et al. 2020, equation 8). The scores are compared
    before the softmax as in section 3.1, "the attention matrix is used as the fitting target instead of its softmax
    output", and in the authors' code."""

    def tiles(self, student: AttentionInputs, teacher: AttentionInputs) -> Iterator[Tiles]:
        return zip(student.scores(), teacher.scores(), strict=True)

    def distance(self, student: TileScores, teacher: TileScores) -> Tensor:
        squared_RALK = (student.scores_RALK - teacher.scores_RALK).square()
        if student.allow is None:
            means_RAL = squared_RALK.mean(-1)
        else:
            means_RAL = squared_RALK.masked_fill(~student.allow, 0.0).sum(-1) / student.allow.sum(-1).clamp(min=1)
        return _sum_over_queries(means_RAL, student)


class Relations(AttentionTerm):
    """KL(teacher || student) of distributions over tokens, averaged over heads, and summed over tokens, relations and
    layers.

    The relation "attention" is the attention distribution itself (Wang et al. 2020, MiniLM, equation 5). "values" is
    softmax(V V^T / sqrt(d)) of the value vectors V of width d (equation 7); "queries" and "keys" are computed likewise.
    With relation_heads, the vectors of all heads are joined and split into this number of heads (Wang et al. 2021,
    MiniLMv2, equation 2, with weights of 1). The papers compare a single layer: the student's last
    (distill.layers=last).
    """

    config: RelationsConfig

    def tiles(self, student: AttentionInputs, teacher: AttentionInputs) -> Iterator[Tiles]:
        for relation in self.config.relations:
            if relation == "attention":
                yield from zip(student.scores(), teacher.scores(), strict=True)
                continue
            scores = (inputs.relations(self._vectors(inputs, relation)) for inputs in (student, teacher))
            yield from zip(*scores, strict=True)

    def _vectors(self, inputs: AttentionInputs, relation: str) -> Tensor:
        x_TAD = {"queries": inputs.q_TAD, "keys": inputs.k_SAD, "values": inputs.v_SAD}[relation]
        heads = self.config.relation_heads
        return x_TAD if heads is None else x_TAD.flatten(-2).unflatten(-1, (heads, -1))

    def distance(self, student: TileScores, teacher: TileScores) -> Tensor:
        student_RALK, teacher_RALK = _log_probabilities(student), _log_probabilities(teacher)
        # Masked entries have log probabilities of -inf, and -inf - -inf is nan: they must count as zero.
        difference_RALK = teacher_RALK - student_RALK
        if student.allow is not None:
            difference_RALK = difference_RALK.masked_fill(~student.allow, 0.0)
        return _sum_over_queries((teacher_RALK.exp() * difference_RALK).sum(-1), student)


def _log_probabilities(tile: TileScores) -> Tensor:
    scores_RALK = tile.scores_RALK
    if tile.allow is not None:
        scores_RALK = scores_RALK.masked_fill(~tile.allow, -torch.inf)
    return scores_RALK.log_softmax(-1)


def _sum_over_queries(losses_RAL: Tensor, tile: TileScores) -> Tensor:
    """Averages over heads, and sums over the queries that are not padding of the tile."""
    return losses_RAL.mean(1).masked_fill(~tile.real_RL, 0.0).sum()


# Terms that compare the hidden states after the last layer (DistilBERT), after each layer of the layer map (TinyBERT,
# patient distillation), or after the embedding (TinyBERT). If the widths of the two models differ, a linear projection
# to the teacher's width is trained with the student.
# Shape letters: T tokens, R compared tokens, H hidden width.


class StateTerm(LayerTerm):
    """The base of terms that compare hidden states. projection: a linear map from the student's width to the teacher's,
    shared by all layers like TinyBERT's W_h; None if the widths are equal."""

    def __init__(self, config: TermConfig, pair: LearnerPair):
        super().__init__(config, pair)
        student = pair.student
        student_width, teacher_width = student.backbone.hidden_size, pair.frozen_teacher.learner.backbone.hidden_size
        self.projection: nn.Linear | None = None
        if student_width != teacher_width:
            projection = materialize(lambda: nn.Linear(student_width, teacher_width, bias=False))
            student.backbone.initialize(projection, student.seed, f"distill.{entry_of(config).name}.projection.")
            self.projection = projection.to(student.device)

    def point_loss(
        self, student: RecordedStates, teacher: RecordedStates, pair: PointPair, batch: Batch
    ) -> tuple[Tensor, int]:
        student_states, teacher_states = student.states[pair[0]], teacher.states[pair[1]]
        if not student_states:
            return torch.zeros(()), 0
        sides = [part.inputs if pair[0].side == "inputs" else part.outputs for part in member_batches(batch)]
        texts = [packed for packed in sides if packed is not None]  # one for each run of the stack
        x_RH, y_RH = self.select(student_states, texts), self.select(teacher_states, texts)
        if self.projection is not None:
            x_RH = self.projection(x_RH)
        return self.distance(x_RH.float(), y_RH.float(), pair), len(x_RH)

    def select(self, states: Sequence[Tensor], texts: Sequence[Packed]) -> Tensor:
        """Selects the compared states (R, H), here those of all tokens. states, texts: for each run of a stack, the
        states (T, H) and the packed texts."""
        return states[0] if len(states) == 1 else torch.cat(list(states))

    @abstractmethod
    def distance(self, x_RH: Tensor, y_RH: Tensor, pair: PointPair) -> Tensor:
        """Returns the distance of the student's states x from the teacher's states y, summed over R."""


class States(StateTerm):
    """1 - cos(h_student, h_teacher) of the last hidden states, after the final norm if the family has one, summed over
    tokens (Sanh et al. 2019, section 3, "cosine embedding loss"; the authors' code averages it over all tokens that are
    not padding, including special tokens)."""

    def __init__(self, config: TermConfig, pair: LearnerPair):
        super().__init__(config, pair)
        self._norms = {False: _final_norms(pair.student), True: _final_norms(pair.frozen_teacher.learner)}

    def compared_points(self, pair: LearnerPair) -> Iterator[PointPair]:
        student, teacher = pair.configs
        for side in shared_sides(student, teacher):
            yield TapPoint(student.depths[side], side), TapPoint(teacher.depths[side], side)

    def point_loss(
        self, student: RecordedStates, teacher: RecordedStates, pair: PointPair, batch: Batch
    ) -> tuple[Tensor, int]:
        for of_teacher, recorded in ((False, student), (True, teacher)):
            point = pair[of_teacher]
            norm = self._norms[of_teacher].get(point.side)
            if norm is not None:
                recorded.states[point] = [norm(x_TH) for x_TH in recorded.states[point]]
        return super().point_loss(student, teacher, pair, batch)

    def distance(self, x_RH: Tensor, y_RH: Tensor, pair: PointPair) -> Tensor:
        return (1 - F.cosine_similarity(x_RH, y_RH, dim=-1)).sum()


class Hidden(StateTerm):
    """The squared error of hidden states, averaged over the width, and summed over tokens and layers: MSE(H_student
    W_h, H_teacher) (Jiao et al. 2020, equation 9, summed over layers by equation 11 with weights of 1)."""

    def distance(self, x_RH: Tensor, y_RH: Tensor, pair: PointPair) -> Tensor:
        return (x_RH - y_RH).square().mean(-1).sum()


class Embedded(Hidden):
    """The squared error of the states after the embedding: MSE(E_student W_e, E_teacher) (Jiao et al. 2020, equation
    10)."""

    def compared_points(self, pair: LearnerPair) -> Iterator[PointPair]:
        for side in shared_sides(*pair.configs):
            yield TapPoint(0, side), TapPoint(0, side)


class Patience(StateTerm):
    """The squared distance of the normalized states of each text's class token, averaged over the width and the layers,
    and summed over texts.

    Equation 7 of Sun et al. 2019 sums over width and layers, but the authors' code averages over both, and their
    weights (10 to 1000) are for the averages. In a causal model the last token of a text takes the role of the class
    token.
    """

    def __init__(self, config: TermConfig, pair: LearnerPair):
        super().__init__(config, pair)
        self._uses_last_token = pair.student.backbone.config.summary == "last"

    def counts(self, batch: Batch) -> dict[str, float]:
        sides = [packed for packed in (batch.inputs, batch.outputs) if packed is not None]
        return {"": float(sum(length > 0 for packed in sides for length in packed.lengths))}

    def select(self, states: Sequence[Tensor], texts: Sequence[Packed]) -> Tensor:
        runs = zip(states, texts, strict=True)
        return torch.cat([x_TH.index_select(0, self._class_tokens(packed)) for x_TH, packed in runs])

    def _class_tokens(self, packed: Packed) -> Tensor:
        occupied = packed.segments.occupied
        return occupied.cu_lengths[1:].long() - 1 if self._uses_last_token else occupied.cu_lengths[:-1].long()

    def distance(self, x_RH: Tensor, y_RH: Tensor, pair: PointPair) -> Tensor:
        layers = sum(student_point.side == pair[0].side for student_point, _ in self.points)
        return (F.normalize(x_RH, dim=-1) - F.normalize(y_RH, dim=-1)).square().mean(-1).sum() / layers


def _final_norms(learner: BaseLearner) -> dict[str, nn.Module | None]:
    """A dict, so that a term does not register the norms, which belong to the learner, as submodules."""
    stacks = [module for module in learner.backbone.modules() if isinstance(module, Stack)]
    return {stack.side: stack.final_norm for stack in stacks}
