"""Codistillation: learners train on the same data and learn from each other.

Anil, Pereyra, Passos, Ormandi, Dahl, Hinton, "Large scale distributed neural network training through online
distillation", ICLR 2018, algorithm 1: after a burn-in each learner's loss is its own, plus the divergence from the mean
prediction of the others, or of older copies of them. Zhang, Xiang, Hospedales, Lu, "Deep Mutual Learning", CVPR 2018,
without burn-in and copies.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from lmtool.config.saved import JsonObject
from lmtool.distillation.configs import CodistillationConfig, SoftConfig
from lmtool.distillation.distilled import Distilled, renamed
from lmtool.distillation.recording import LearnerPair, StudentData, record
from lmtool.distillation.terms.outputs import Soft
from lmtool.learners.base import BaseLearner
from lmtool.models.heads.predicted import Averaged
from lmtool.types import Batch, ParameterGroup, StepOutput

_COPIES, _FIRST = "copies", "student"


class Codistillation(Distilled):
    """Trains the student and its peers on the sum of their losses. The student is the model that the run saves.
    Gradients are clipped by their global norm. In checkpoints, tensors of a peer start with `distill.peer_N.`, tensors
    of the copies with `distill.copies.`."""

    config: CodistillationConfig

    def __init__(self, config: CodistillationConfig, student: BaseLearner, peers: Sequence[BaseLearner]):
        super().__init__(config, student)
        for number, peer in enumerate(peers, 1):
            self.distill[f"peer_{number}"] = peer
        self.soft = Soft(SoftConfig(weight=config.weight, temperature=1.0), LearnerPair(student))
        self.weights: dict[str, float] = {}
        for name, learner in self.learners.items():
            self.weights |= {_title(name, term): weight for term, weight in learner.weights.items()}
            for part, scale in self.soft.scales(learner.weights).items():
                self.weights[self._mutual(name, part)] = config.weight * scale
        self.step = 0
        if config.refresh_steps is not None:
            copies = {name or _FIRST: _copied(learner) for name, learner in self.learners.items()}
            self.distill[_COPIES] = nn.ModuleDict(copies)

    @property
    def peers(self) -> dict[str, BaseLearner]:
        """The learners besides the student, by name."""
        return {name: cast(BaseLearner, peer) for name, peer in self.distill.items() if name != _COPIES}

    @property
    def learners(self) -> dict[str, BaseLearner]:
        """All trained learners by name; the student's name is empty."""
        return {"": self.student, **self.peers}

    def _mutual(self, name: str, part: str) -> str:
        """The name of the loss term with which a learner learns from the others."""
        return _title(name, "mutual" if not part or len(self.student.weights) == 1 else f"mutual_{part}")

    # The training loop's interface.

    def on_step(self, step: int) -> None:
        """Calls `on_step` of every learner, and refreshes the copies if a refresh is due."""
        self.step = step
        for learner in self.learners.values():
            learner.on_step(step)
        every, after = self.config.refresh_steps, step - self.config.burn_in_steps - 1
        if every is not None and after >= 0 and after % every == 0:
            for name, learner in self.learners.items():
                self._copies[name].load_state_dict(learner.state_dict())

    @property
    def _copies(self) -> dict[str, BaseLearner]:
        copies = cast(nn.ModuleDict, self.distill[_COPIES])
        return {name: cast(BaseLearner, copies[name or _FIRST]) for name in self.learners}

    def train(self, mode: bool = True) -> Codistillation:
        super().train(mode)
        if _COPIES in self.distill:
            self.distill[_COPIES].eval()
        return self

    def counts(self, batch: Batch) -> dict[str, float]:
        """The number of targets of each term, at the step last passed to `on_step`."""
        counts: dict[str, float] = {}
        for name, learner in self.learners.items():
            counts |= {_title(name, term): count for term, count in learner.counts(batch).items()}
            if self.step > self.config.burn_in_steps:
                counts |= {self._mutual(name, part): count for part, count in self.soft.counts(batch).items()}
        return counts

    def forward(self, batch: Batch, step: int) -> StepOutput:
        recorded = {name: record(learner, batch, step) for name, learner in self.learners.items()}
        sums: dict[str, Tensor] = {}
        for name, outputs in recorded.items():
            assert outputs.output is not None
            sums |= {_title(name, term): total for term, total in outputs.output.sums.items()}
        if step <= self.config.burn_in_steps:
            return StepOutput(sums, self.weights)
        teachers = recorded
        if self.config.refresh_steps is not None:
            with torch.no_grad():
                teachers = {name: record(copied, batch, step, losses=False) for name, copied in self._copies.items()}
        for name, outputs in recorded.items():
            peers = [peer.predicted for peer_name, peer in teachers.items() if peer_name != name]
            for term, predicted in outputs.predicted.items():
                mean = Averaged.of([(1.0, peer[term]) for peer in peers], "probabilities")
                sums[self._mutual(name, term)] = self.soft.target_losses(predicted, mean)
        return StepOutput(sums, self.weights)

    def penalties(self) -> dict[str, Tensor]:
        return {
            _title(name, term): penalty
            for name, learner in self.learners.items()
            for term, penalty in learner.penalties().items()
        }

    def parameter_groups(self) -> list[ParameterGroup]:
        groups = self.student.parameter_groups()
        for name, peer in self.peers.items():
            groups += [renamed(group, f"{name}_", f"distill.{name}.") for group in peer.parameter_groups()]
        return groups

    # The run's interface.

    def begin(self, student: StudentData) -> JsonObject:
        for peer in self.peers.values():
            peer.begin(student.loader.steps_in_epoch)
        return {}

    def extra_models(self) -> Mapping[str, BaseLearner]:
        return {name.replace("_", " "): peer for name, peer in self.peers.items()}

    def metadata(self) -> JsonObject:
        every = self.config.refresh_steps
        copies = {} if every is None else {"copies": f"every {every:,} steps"}
        return {"peers": len(self.peers), "burn-in": f"{self.config.burn_in_steps:,} steps", **copies}


def _title(name: str, term: str) -> str:
    """The name of a learner's term; the student's terms keep their names."""
    return f"{name}_{term}" if name else term


def _copied(learner: BaseLearner) -> BaseLearner:
    """A frozen copy of a learner."""
    shared = {id(part): part for part in (learner.tokenizer, learner.config)}
    return copy.deepcopy(learner, shared).requires_grad_(False).eval()
