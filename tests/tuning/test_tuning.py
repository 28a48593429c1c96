"""Parameters that full and head tuning train, and the YAML of each method."""

from __future__ import annotations

import json

import pytest
import yaml
from torch import nn

from lmtool.config.registry import build, lookup, names


def learner():
    model = nn.Module()
    model.backbone = nn.Linear(2, 2)
    model.heads = nn.ModuleDict({"pooler": nn.Linear(2, 2), "sst2": nn.Linear(2, 2)})
    return model


def learning(model):
    return {
        name.removesuffix(".weight")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2
    }


def method(name):
    return build(lookup("tuning", name).config())


@pytest.mark.parametrize(
    ("name", "new", "expected"),
    [
        ("full", None, {"backbone", "heads.pooler", "heads.sst2"}),
        ("head", None, {"heads.pooler", "heads.sst2"}),
        ("head", {"heads.sst2", "heads.pooler"}, {"heads.pooler", "heads.sst2"}),
        ("head", {"heads.sst2"}, {"heads.sst2"}),
        ("head", set(), {"heads.sst2"}),
    ],
)
def test_method_sets_trainable_parts(name, new, expected):
    model = learner()
    method(name).edit(model, 0, new)
    assert learning(model) == expected


def test_later_method_replaces_earlier():
    model = learner()
    method("head").edit(model, 0)
    method("full").edit(model, 0)
    assert learning(model) == {"backbone", "heads.pooler", "heads.sst2"}


def test_every_method_has_yaml_with_defaults(request):
    shipped = [name for name in names("tuning") if lookup("tuning", name).builder.startswith("lmtool.")]
    assert shipped
    for name in shipped:
        data = yaml.safe_load((request.config.rootpath / "conf" / "tuning" / f"{name}.yaml").read_text())
        data |= {key: {"name": choice} for item in data.pop("defaults", ())[:-1] for key, choice in item.items()}
        config = lookup("tuning", name).config
        assert config.model_validate_json(json.dumps(data)) == config()
