"""distill=codistillation: several models train on the same data and learn from each other's predictions.

Anil, Pereyra, Passos, Ormandi, Dahl, Hinton, "Large scale distributed neural network training through online
distillation", ICLR 2018, algorithm 1. After a burn-in, the loss of each model is its own loss plus its divergence from
the mean prediction of the other models, or of older copies of these models. Without burn-in and copies, the method is
deep mutual learning (Zhang, Xiang, Hospedales, Lu, "Deep Mutual Learning", CVPR 2018).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from lmtool.config.base import JsonObject
from lmtool.distillation.configs.modes import CodistillationConfig
from lmtool.distillation.configs.terms import SoftConfig
from lmtool.distillation.distilled import Distilled, with_prefixes
from lmtool.distillation.output_terms import Soft
from lmtool.distillation.recording import LearnerPair, StudentData, record
from lmtool.learners.base import BaseLearner
from lmtool.models.heads.predicted import AveragePrediction
from lmtool.types import Batch, ParameterGroup, StepOutput

_COPIES, _STUDENT_COPY = "copies", "student"
"""The name of the copies in `distill`, and the name of the student's copy among them."""


class Codistillation(Distilled):
    """Trains the run's model, the student, together with its peers on the sum of their losses.

    Gradients are clipped by their norm over all models together. In a checkpoint, the names of a peer's tensors start
    with `distill.peer_N.`, and the names of the copies' tensors start with `distill.copies.`.
    """

    config: CodistillationConfig

    def __init__(self, config: CodistillationConfig, student: BaseLearner, peers: Sequence[BaseLearner]):
        super().__init__(config, student)
        for number, peer in enumerate(peers, 1):
            self.distill[f"peer_{number}"] = peer
        self.soft = Soft(SoftConfig(weight=config.weight, temperature=1.0), LearnerPair(student))
        self.loss_weights: dict[str, float] = {}
        for name, learner in self.learners.items():
            self.loss_weights |= {_loss_name(name, term): weight for term, weight in learner.loss_weights.items()}
            for part, scale in self.soft.scales(learner.loss_weights).items():
                self.loss_weights[self._mutual_name(name, part)] = config.weight * scale
        self.step = 0
        if config.refresh_steps is not None:
            copies = {name or _STUDENT_COPY: _frozen_copy(learner) for name, learner in self.learners.items()}
            self.distill[_COPIES] = nn.ModuleDict(copies)

    @property
    def peers(self) -> dict[str, BaseLearner]:
        """The trained learners other than the student, by name."""
        return {name: cast(BaseLearner, peer) for name, peer in self.distill.items() if name != _COPIES}

    @property
    def learners(self) -> dict[str, BaseLearner]:
        """All trained learners by name; the name of the student is empty."""
        return {"": self.student, **self.peers}

    def _mutual_name(self, name: str, part: str) -> str:
        return _loss_name(name, "mutual" if not part or len(self.student.loss_weights) == 1 else f"mutual_{part}")

    # Methods that the training loop calls.

    def on_step(self, step: int) -> None:
        """Calls `on_step` of every learner, and updates the copies every refresh_steps steps after the burn-in."""
        self.step = step
        for learner in self.learners.values():
            learner.on_step(step)
        interval, steps_since_burn_in = self.config.refresh_steps, step - self.config.burn_in_steps - 1
        if interval is not None and steps_since_burn_in >= 0 and steps_since_burn_in % interval == 0:
            for name, learner in self.learners.items():
                self._copies[name].load_state_dict(learner.state_dict())

    @property
    def _copies(self) -> dict[str, BaseLearner]:
        copies = cast(nn.ModuleDict, self.distill[_COPIES])
        return {name: cast(BaseLearner, copies[name or _STUDENT_COPY]) for name in self.learners}

    def train(self, mode: bool = True) -> Codistillation:
        super().train(mode)
        if _COPIES in self.distill:
            self.distill[_COPIES].eval()  # copies never use dropout
        return self

    def counts(self, batch: Batch) -> dict[str, float]:
        """Counts the targets of each loss term, for the step that `on_step` was last called with."""
        counts: dict[str, float] = {}
        for name, learner in self.learners.items():
            counts |= {_loss_name(name, term): count for term, count in learner.counts(batch).items()}
            if self.step > self.config.burn_in_steps:
                counts |= {self._mutual_name(name, part): count for part, count in self.soft.counts(batch).items()}
        return counts

    def forward(self, batch: Batch, step: int) -> StepOutput:
        recorded = {name: record(learner, batch, step) for name, learner in self.learners.items()}
        sums: dict[str, Tensor] = {}
        for name, outputs in recorded.items():
            assert outputs.output is not None
            sums |= {_loss_name(name, term): total for term, total in outputs.output.sums.items()}
        if step <= self.config.burn_in_steps:
            return StepOutput(sums, self.loss_weights)
        teachers = recorded
        if self.config.refresh_steps is not None:
            with torch.no_grad():
                teachers = {name: record(learner, batch, step, losses=False) for name, learner in self._copies.items()}
        for name, outputs in recorded.items():
            peers = [teacher.predicted for teacher_name, teacher in teachers.items() if teacher_name != name]
            for term, predicted in outputs.predicted.items():
                mean = AveragePrediction.of([(1.0, predictions[term]) for predictions in peers], "probabilities")
                sums[self._mutual_name(name, term)] = self.soft.target_losses(predicted, mean)
        return StepOutput(sums, self.loss_weights)

    def penalties(self) -> dict[str, Tensor]:
        return {
            _loss_name(name, term): penalty
            for name, learner in self.learners.items()
            for term, penalty in learner.penalties().items()
        }

    def parameter_groups(self) -> list[ParameterGroup]:
        groups = self.student.parameter_groups()
        for name, peer in self.peers.items():
            groups += [with_prefixes(group, f"{name}_", f"distill.{name}.") for group in peer.parameter_groups()]
        return groups

    # Methods that the rest of a run calls.

    def prepare(self, student: StudentData) -> JsonObject:
        for peer in self.peers.values():
            for scheme in peer.schemes:
                scheme.set_steps_in_epoch(student.loader.steps_in_epoch)
        return {}

    def extra_models(self) -> Mapping[str, BaseLearner]:
        return {name.replace("_", " "): peer for name, peer in self.peers.items()}

    def metadata(self) -> JsonObject:
        interval = self.config.refresh_steps
        copies = {} if interval is None else {"copies": f"every {interval:,} steps"}
        return {"peers": len(self.peers), "burn-in": f"{self.config.burn_in_steps:,} steps", **copies}


def _loss_name(name: str, term: str) -> str:
    return f"{name}_{term}" if name else term


def _frozen_copy(learner: BaseLearner) -> BaseLearner:
    shared = {id(part): part for part in (learner.tokenizer, learner.config)}
    return copy.deepcopy(learner, shared).requires_grad_(False).eval()
