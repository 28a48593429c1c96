"""head=prompt with every tuning method: trained parameters, and positions of the prompt beside virtual tokens."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tuning_fixtures import SIZES, first_conflict, tuning_config

from lmtool.config.registry import build, lookup
from lmtool.data.examples import Rows, SplitData
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.tokenizers.configs import ByteBpeConfig, WordPieceConfig

TEXTS = ["it is so good", "it is so bad", "it is so yes", "it is so no"] * 4
METHODS = ("full", "last_n", "bitfit", "lora", "ia3", "adapter", "prompt", "prefix", "ptuning")
FIELDS = {"prompt": {"length": 3}, "prefix": {"length": 3}, "ptuning": {"length": 3}}
TOKENIZERS = {
    "bert": WordPieceConfig(minimum_count=1),
    "gpt": ByteBpeConfig(minimum_count=1),
    "t5": ByteBpeConfig(minimum_count=1, special_tokens="gpt2"),
}


@pytest.fixture(scope="module")
def tokenizers():
    return {family: build(config, TEXTS * 3, 300) for family, config in TOKENIZERS.items()}


@pytest.mark.parametrize(
    ("method", "family"),
    [*product(METHODS, ("bert", "gpt")), *product(("full", "lora", "adapter", "prompt", "prefix"), ("t5",))],
)
def test_prompt_head_trains_with_every_method(tokenizers, method, family):
    demonstrations = {"demonstrations": 2, "demonstration_rows": {"no": (("so bad",),), "yes": (("so good",),)}}
    task = ClassificationConfig(
        text=("text",), labels=("no", "yes"), head="prompt", prompt={"template": "{text} so {label}"},
        **(demonstrations if family != "t5" else {}),
    )  # fmt: skip
    model = lookup("model", family).config(**{**SIZES, "vocab_size": 310, "max_positions": 64})
    tuning = tuning_config(name=method, **FIELDS.get(method, {}))
    assert first_conflict(tuning, model, task) is None
    backbone, edits = build(model, 0), build(tuning)
    edits.prepare(backbone)
    learner = build(task).learner(backbone, tokenizers[family], 0)
    rows = Rows(list(range(4)), {"text": TEXTS[:4]}, torch.tensor([1, 0, 1, 0]).numpy(), [("rows", 1)] * 4)
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    learner.tune(edits, frozenset())
    learns = {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
    assert learns and (method in ("full", "bitfit") or not any(name.startswith("heads.") for name in learns))
    examples = learner.examples(SplitData("train", rows={task.name: rows}), 40)
    batch = examples.batch(examples.plan(0).rows, torch.arange(4).numpy(), 0)
    optimizer = torch.optim.Adam([parameter for parameter in learner.parameters() if parameter.requires_grad], 1e-2)
    for step in range(3):
        loss = learner.train()(batch, step).sums[task.name]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = learner.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name not in learns)
    moved = {name for name, parameter in learner.named_parameters() if parameter.grad is not None}
    assert moved <= learns and any(learner.get_parameter(name).grad.abs().max() > 0 for name in moved)
    # A text has the same outputs alone and in a batch.
    learner.eval()
    with torch.no_grad():
        whole = learner.outputs(batch, 0)
        alone = learner.outputs(examples.batch(examples.plan(0).rows[2:3], torch.arange(1).numpy(), 0), 0)
    first = 0 if family != "t5" else int((batch.targets[task.name].at < batch.outputs.starts[2]).sum())
    torch.testing.assert_close(
        whole[2:3] if family != "t5" else whole[first : first + len(alone)], alone, atol=1e-5, rtol=1e-4
    )


def test_head_tuning_is_refused_for_tied_label_words():
    task = ClassificationConfig(text=("text",), labels=("no", "yes"), head="prompt")
    models = {family: lookup("model", family).config(**SIZES) for family in ("bert", "gpt", "bart")}
    for family, model in models.items():
        assert (first_conflict(tuning_config(name="head"), model, task) is None) == (family == "bert")
    assert first_conflict(tuning_config(name="head", layers="scalar_mix"), models["bert"], task).key == "tuning.layers"
