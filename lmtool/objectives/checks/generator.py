"""What a generator, as it is, writes in the masked places, beside its own probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lmtool.learners.inspection import Drawn
from lmtool.learners.tally import Tally
from lmtool.learners.targets import places_of
from lmtool.objectives.checks.masking import MaskedWindowsInspector


class GeneratorInspector(MaskedWindowsInspector):
    """Of a learner with weights, whose `sampled` and `original` give the text that its model reads, and the text as it
    was."""

    def fact(self, tally: Tally) -> str:
        share = tally.measured("replaced share of tokens")
        words = super().fact(tally).replace("the model reads", "it reads")
        if share is None:
            return words
        return f"{share:.1%} of the tokens that the model reads are replaced, by a generator for which {words}"

    def entries(self, drawn: Drawn) -> Iterator[dict[str, Any]]:
        """Further: `filled`, the text that the model reads; where it is to find the replaced tokens, these are its
        targets."""
        batch, host = drawn.batch, torch.device("cpu")
        filled = self.learner.sampled(batch.to(self.learner.device), drawn.epoch).filled.to(host)
        other_T = filled.tokens != self.learner.original(batch)
        made_in_step = [term for term, target in batch.targets.items() if target.labels is None]
        for number, entry in enumerate(super().entries(drawn)):
            start = batch.inputs.starts[number]
            replaced = (other_T & (batch.inputs.documents == number)).nonzero()[:, 0]
            places = [{"position": int(at) - start, "label": "replaced"} for at in replaced]
            targets = entry.pop("targets") | dict.fromkeys(made_in_step, places)
            yield {**entry, "filled": self.side(filled, range(number, number + 1)), "targets": targets}

    def check(self, tally: Tally, drawn: Drawn) -> None:
        super().check(tally, drawn)
        tally.remarks["replaced share of tokens"] = "masked share x the generator's probability of another token there"
        tally.remarks["surprise of a sample, nats"] = "entropy of the generator's probabilities"
        batch = drawn.batch.to(self.learner.device)
        sampled = self.learner.sampled(batch, drawn.epoch)
        other = (sampled.filled.tokens != self.learner.original(batch)).cpu().numpy()
        at = places_of(batch, "mlm").cpu().numpy()
        chances = sampled.other_M.cpu().numpy()
        variance = (chances * (1 - chances)).sum()
        tally.mean("replaced share of tokens", other.sum(), len(other), chances.sum(), variance, 1.0)
        tally.note("samples that are the original token", (~other[at]).sum(), len(at), is_share=True)
        tally.none("tokens replaced that were not masked", other.sum() - other[at].sum())
        surprise, entropy, variance = (
            float(values.sum()) for values in (sampled.surprise_M, sampled.entropy_M, sampled.variance_M)
        )
        tally.mean("surprise of a sample, nats", surprise, len(at), entropy, variance, sampled.bound)
