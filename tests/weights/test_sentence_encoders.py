"""The pooling that the folder of a sentence encoder states."""

from __future__ import annotations

import json

import pytest

from lmtool.errors import UserError
from lmtool.models.published import PublishedConfig
from lmtool.weights.folders import PublishedFolder
from lmtool.weights.sentence_encoders import sentence_pooling


def stated(folder, config=None, modules=None, place="1_Pooling"):
    if config is not None:
        (folder / place).mkdir()
        (folder / place / "config.json").write_text(json.dumps(config))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    return sentence_pooling(PublishedFolder(str(folder), folder, PublishedConfig({})), True)


def flags(**given):
    return {"word_embedding_dimension": 4, **{f"pooling_mode_{name}": True for name in given}}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (flags(mean_tokens=1), {"pooling": "mean"}),
        (flags(max_tokens=1), {"pooling": "max"}),
        (flags(cls_token=1), {"pooling": "first", "head_layers": 1}),
        ({"pooling_mode": "lasttoken"}, {"pooling": "last"}),
    ],
)
def test_pooling_is_read(config, fields, tmp_path):
    assert stated(tmp_path, config) == (fields, "1_Pooling/config.json")


def test_modules_name_the_folder(tmp_path):
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "pool", "type": "sentence_transformers.models.Pooling"}]
    assert stated(tmp_path, flags(mean_tokens=1), modules, "pool") == ({"pooling": "mean"}, "pool/config.json")


def test_what_is_no_sentence_encoder_says_nothing(tmp_path):
    assert stated(tmp_path) is None
    assert stated(tmp_path, flags(mean_tokens=1), [{"path": "", "type": "x.Transformer"}]) is None


@pytest.mark.parametrize("config", [flags(mean_tokens=1, max_tokens=1), flags(mean_sqrt_len_tokens=1), {}])
def test_other_poolings_are_refused(config, tmp_path):
    with pytest.raises(UserError, match="1_Pooling/config.json pools by"):
        stated(tmp_path, config)


def test_a_path_outside_of_the_folder_is_refused(tmp_path):
    modules = [{"path": "../x", "type": "x.Pooling"}]
    with pytest.raises(UserError, match="no file name in its folder"):
        stated(tmp_path, None, modules)
