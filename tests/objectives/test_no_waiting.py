"""A training step never synchronizes host and device. The tests emulate CUDA with the meta device, which has no values
to read, and record copies that block."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import objective_fixtures
import pytest
import torch
import torch.utils._pytree as pytree
import torch.utils.flop_counter  # jagged tensors of the meta device name it without importing it, in torch 2.11
from objective_fixtures import backbone, rows_of, split, store
from test_learners import OBJECTIVES
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from lmtool.config.registry import build
from lmtool.models.heads import base
from lmtool.nn import kernels
from lmtool.nn.stack import attention_path
from lmtool.tasks.configs.classification import ClassificationConfig
from lmtool.training.engine import Plain
from lmtool.training.health import Health
from lmtool.training.optimizers import gradient_norm
from lmtool.training.precision import Precision
from lmtool.training.progress import Progress
from lmtool.training.step import gradients
from lmtool.types import Batch, Packed, Step, Target

META = torch.device("meta")


class Watch(TorchDispatchMode):
    """Counts operations and records those that block: copies from pageable memory to the device, and operations on
    tensors of both devices. (Reading a value of the meta device raises an error.)"""

    def __init__(self):
        super().__init__()
        self.waits, self.seen = [], Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket._qualified_op_name
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.ndim}
        copies = name == "aten::_to_copy" and torch.device(kwargs.get("device") or "cpu") == META and devices == {"cpu"}
        self.seen["copy" if copies else name] += 1
        # Nested tensors store their longest length in the shape of a host tensor.
        if (copies and not kwargs.get("non_blocking")) or (len(devices) > 1 and "nested" not in name):
            self.waits.append(name)
        return function(*args, **kwargs)


@pytest.fixture
def device(monkeypatch):
    """The meta device with CUDA's features: pinned memory, autocast (disabled) and flash attention."""
    autocast = torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda kind, **rest: autocast(kind, **rest) if kind == "cpu" else nullcontext()
    )
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr("torch.nested._internal.sdpa._select_sdp_backend", lambda *_: SDPBackend.FLASH_ATTENTION)
    monkeypatch.setattr(kernels, "has_flash", lambda device: True)
    monkeypatch.setitem(base._CHUNKS, "meta", base._CHUNKS["cuda"])
    return META


@pytest.fixture(scope="module")
def tokenizers():
    return objective_fixtures.tokenizers()


def watched_step(learner, batch, device):
    """The operations of a step without the optimizer, whose fused kernels do not support the meta device."""
    learner.bfloat16().to(device).train()
    precision = Precision("bf16", device, "")
    health = Health(precision, 1.0, Progress())
    with Watch() as watch:
        outcome = gradients(Plain(learner), Step([batch], {}, 0.0), 1, 0, precision)
        norm = gradient_norm(list(learner.parameters()), 1.0)
        health.watch(1, None, outcome.loss, norm, scaled=False)
    assert outcome.loss.device == device
    return watch


@pytest.mark.parametrize("name", OBJECTIVES)
def test_step_of_every_objective_does_not_block(name, tokenizers, device):
    family, config, documents = OBJECTIVES[name]
    tokens = tokenizers[family]
    learner = build(config, backbone(family), tokens, 3)
    batch = rows_of(learner.examples(split(store(tokens), documents), 32), 8)
    watch = watched_step(learner, batch, device)
    assert watch.waits == []
    # The kernel has no prefix masks; DeBERTa and XLNet add to all scores, T5 to those of self-attention only.
    flash = bool(watch.seen["torch_attn::_varlen_attn"])
    attends = family != "lstm"
    assert flash == (attends and name != "prefix_lm gpt" and family not in ("deberta", "xlnet"))
    words = attention_path(learner, device, torch.bfloat16, {name == "prefix_lm gpt"})
    assert ("variable-length flash" in words, "documents of similar length" in words) == (
        flash,
        attends and (family == "t5" or not flash),
    )


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_classification_step_does_not_block(family, tokenizers, device):
    config = ClassificationConfig(name="labels", path="nowhere", labels=("no", "yes"))
    learner = config.learner(backbone(family), tokenizers[family], 3)
    inputs = Packed(torch.arange(5, 25), (5, 12, 3))
    batch = Batch(inputs, {"labels": Target(torch.tensor([0, 1, 1]))}, torch.arange(3), torch.zeros(3))
    assert watched_step(learner, batch, device).waits == []


@pytest.mark.parametrize(("family", "objective"), [("bert", "span"), ("gpt", "clm"), ("bart", "denoising")])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_layers_share_copies_to_the_device(family, objective, dropout, tokenizers, device):
    """The number of copies (cumulative lengths, positions, tiles) does not depend on the number of layers."""
    _, config, documents = OBJECTIVES[objective]
    copies = []
    for layers in (1, 2):
        learner = build(config, backbone(family, num_layers=layers, attention_dropout=dropout), tokenizers[family], 3)
        batch = rows_of(learner.examples(split(store(tokenizers[family]), documents), 32), 8)
        watch = watched_step(learner, batch, device)
        assert watch.waits == []
        assert watch.seen["aten::_flash_attention_forward" if dropout else "torch_attn::_varlen_attn"] >= layers
        copies.append(watch.seen["copy"])
    assert copies[0] == copies[1] > 0
