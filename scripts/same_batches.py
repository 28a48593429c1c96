"""lmtool and transformers on the same batches without dropout in fp32: how far apart are the losses and the logits?

`published.py --exact` runs it. The order is lmtool's; tokens, padding and the loss are those of transformers' recipe,
and so are AdamW's groups. Both sides begin with the published weights and one new head, and have the same learning
rates. They are modes of evaluation that learn: nothing is dropped.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from peers_of_tasks import SequencePeer, moved, read_by, training_arguments
from rows import stop

from lmtool.config.tables import build
from lmtool.data.loader import PackedLoader
from lmtool.tasks.kinds.learner import TaskLearner
from lmtool.tasks.loading import TaskData
from lmtool.training.engine import Plain
from lmtool.training.optimizers import named_parameters, set_learning_rate
from lmtool.training.precision import FP32_CPU
from lmtool.training.step import apply_gradients, gradients

STEPS, BATCH = 20, 8
HELD_OUT = 50  # examples whose logits are compared at the end


def compare_steps(peer: SequencePeer, data: TaskData, learner: TaskLearner) -> dict[str, Any]:
    """The largest differences of the losses and of the final logits on held-out examples."""
    from transformers import Trainer

    config = peer.config
    require_same_features(peer, data, learner)
    model = peer.model()
    with torch.no_grad():
        head, own = getattr(model, peer.head), learner.heads[learner.term].output
        head.weight.copy_(own.weight)
        head.bias.copy_(own.bias)
    learner.eval()
    model.eval()

    splits, features = data.splits(), peer.features(data.train)
    loader = PackedLoader(learner.examples(splits["train"], config.max_length), config.seed, config.batch_examples)
    total = loader.steps_in_epoch(0) * (config.max_epochs or 1)
    optimizer, schedule = build(config.optimizer, learner.parameter_groups()), build(config.schedule)
    parameters = list(named_parameters(learner.parameter_groups()).values())
    with tempfile.TemporaryDirectory() as scratch:  # the Trainer says what decays
        settings = training_arguments(config, len(features), config.seed, scratch, cpu=True)
        their_optimizer = Trainer(model, settings).create_optimizer()
    losses: list[tuple[float, float]] = []
    for step, given in zip(range(1, STEPS + 1), loader.steps(), strict=False):
        rate = config.optimizer.lr * schedule(step, total)
        set_learning_rate(optimizer, rate)
        outcome = gradients(Plain(learner), given, step, config.seed, FP32_CPU.device, FP32_CPU)
        apply_gradients(optimizer, None, parameters, config.optimizer.clip_norm)

        (batch,) = given.batches
        loss = peer.loss(model, moved(peer.collate([features[number] for number in batch.examples.tolist()]), model))
        loss.backward()
        if config.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        for group in their_optimizer.param_groups:
            group["lr"] = rate
        their_optimizer.step()
        their_optimizer.zero_grad()
        losses.append((float(outcome.loss), float(loss.detach())))

    split, part = next((split, part) for split, part in splits.items() if split != "train")
    examples = learner.examples(part, config.max_length)
    rows = examples.plan(0).rows[:HELD_OUT]
    batch = examples.batch(rows, np.arange(len(rows)), 0)
    with torch.no_grad():
        ours = peer.comparable(learner.outputs(batch, 0), batch)
        theirs = peer.comparable(read_by(peer, model, peer.features(data.validation[split]), learner)(batch, 0), batch)
    return {
        "steps": len(losses),
        "first_loss": losses[0][0],
        "last_loss": losses[-1][0],
        "loss_difference": max(abs(first - second) for first, second in losses),
        "logits": ours.numel(),
        "largest_logit": float(ours.abs().max()),
        "logit_difference": float((ours - theirs).abs().max()),
        "losses": losses,
    }


def require_same_features(peer: SequencePeer, data: TaskData, learner: TaskLearner) -> None:
    """End where lmtool's examples have other tokens, segments or targets than the features of the other side."""
    segmented = getattr(peer.config.model, "segments", 1) > 1
    for split, part in data.splits().items():
        examples, features = learner.examples(part, peer.config.max_length), peer.features(learner.rows(part))
        plan = examples.plan(0)
        batch = examples.batch(plan.rows, plan.rows["row"].copy(), 0)
        lengths = list(batch.inputs.lengths)
        if len(lengths) != len(features):
            stop(f"{split} is {len(lengths)} examples in lmtool, {len(features)} in transformers", "report it")
        ours = {"input_ids": [values.tolist() for values in batch.inputs.tokens.split(lengths)]}
        if segmented and "segment" in batch.inputs.columns:
            ours["token_type_ids"] = [values.tolist() for values in batch.inputs.columns["segment"].split(lengths)]
        ours["targets"] = peer.targets(batch, learner.term)
        for name, values in ours.items():
            if name == "targets":
                theirs = [peer.target_of(feature) for feature in features]
            else:  # a tokenizer without segments puts everything into the first
                theirs = [feature.get(name) or [0] * len(feature["input_ids"]) for feature in features]
            differing = [row for row, pair in enumerate(zip(values, theirs, strict=True)) if pair[0] != pair[1]]
            if differing:
                print(values[differing[0]], theirs[differing[0]], sep="\n")
                row = part.rows[learner.term].ids[int(plan.rows["row"][differing[0]])]
                stop(f"{len(differing)} rows of {split} have other {name}: {row}", "report it")
        print(f"{split}: {len(features):,} examples, the same {sum(lengths):,} tokens on both sides")
