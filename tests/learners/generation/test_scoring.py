"""Scores of candidates after prompts: batches over a shared prefix equal plain forward passes of each candidate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmtool.learners.generation.scoring import CandidateScorer
from lmtool.models.heads.lm import lm_head
from lmtool.types import Packed
from tests.objectives.objective_fixtures import backbone

SHARED = [7, 8, 9, 10, 11]
PROMPTS = [[20, 21, 22], [30], [40, 41, 42, 43, 44, 45], [50, 51]]
CANDIDATES = [
    [[60], [61]],
    [[60, 62, 63], [61], [64, 65]],
    [[70, 71, 72, 73]],
    [[60, 62], [60, 62, 63]],
]
START = 3


def built(family):
    model = backbone(family).eval()
    head = lm_head(model)
    model.initialize(head, 0, "heads.lm.")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model, head.eval()


@torch.no_grad()
def plain(model, head, prompt, text, prefix=False):
    """The log-probability of one text after one prompt."""
    if hasattr(model, "decoder"):
        outputs = Packed(torch.tensor([START, *text[:-1]]), (len(text),))
        hidden = model(Packed(torch.tensor(prompt), (len(prompt),)), None, outputs)
    else:
        ids = [*prompt, *text[:-1]]
        packed = Packed(torch.tensor(ids), (len(ids),), prefixes=(len(prompt),) if prefix else ())
        hidden = model(packed)[len(prompt) - 1 :]
    log_probs = head(hidden, model.embed.token.weight).log_softmax(-1)
    return sum(float(log_probs[at, token]) for at, token in enumerate(text))


@pytest.mark.parametrize(("family", "prefix"), [("gpt", False), ("gpt", True), ("bart", False), ("t5", False)])
@pytest.mark.parametrize("batch_tokens", [1, 40, 8192])
def test_batched_scores_match_plain_forward_passes(family, prefix, batch_tokens):
    model, head = built(family)
    start = None if family == "gpt" else START
    scorer = CandidateScorer(model, head, start, prefix, batch_tokens)
    for shared, prompts in ((SHARED, PROMPTS), ([], PROMPTS), (SHARED, [[], *PROMPTS[1:]])):
        scores = scorer.score(shared, prompts, CANDIDATES)
        for prompt, texts, row in zip(prompts, CANDIDATES, scores, strict=True):
            expected = [plain(model, head, [*shared, *prompt], text, prefix) for text in texts]
            np.testing.assert_allclose(row, expected, atol=2e-4)
    assert len({round(float(value), 3) for row in scores for value in row}) > 5
