"""lmtool.load in Python gives the results of the commands and the inputs of transformers."""

from __future__ import annotations

import csv
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import lmtool
from lmtool.cli import main as cli
from lmtool.errors import UserError
from tests.commands.conftest import TINY, finetune, place, pretrain, reports_on_request  # noqa: F401 fixtures

TEXTS = ["The happy cat saw the river.", "A stone.", "Near the ship, the queen saw the dark and bitter road."]
PAIRS = ["A bird.", "The kind child saw the house near the tree.", "The king."]


def test_package_has_py_typed_file() -> None:
    assert resources.files("lmtool").joinpath("py.typed").is_file()


def test_loaded_model_predicts_like_the_command(place: Path) -> None:  # noqa: F811
    pretrain("first")
    finetune("task", "checkpoint=runs/first", "max_steps=4", "max_epochs=null")
    loaded = lmtool.load("runs/task")
    records = loaded.predict(TEXTS)
    Path("asked.tsv").write_text("\n".join(["sentence", *TEXTS]) + "\n")
    words = ["predict", "checkpoint=runs/task", "input=asked.tsv", "output=said.csv", "device=cpu", "precision=fp32"]
    assert cli.main(words) == 0
    with open("said.csv") as file:
        said = list(csv.DictReader(file))
    assert [record["prediction"] for record in records] == [row["prediction"] for row in said]
    assert [record["score"] for record in records] == pytest.approx([float(row["score"]) for row in said], abs=1e-6)
    assert loaded.predict({"sentence": TEXTS}) == records and loaded.predict([]) == []
    logits = loaded.model(**loaded.tokenizer(TEXTS)).logits
    assert [record["score"] for record in records] == pytest.approx(logits.softmax(-1).amax(-1).tolist(), abs=1e-5)
    with torch.no_grad():
        loaded.model.parts.heads["sst2"].output.bias += torch.tensor([50.0, 0.0])
    assert [record["score"] for record in loaded.predict(TEXTS)] == pytest.approx([1.0] * 3)
    with pytest.raises(UserError, match="reads one text"):
        loaded.predict(TEXTS, PAIRS)
    vectors = loaded.embed(TEXTS)
    hidden = loaded.model(**loaded.tokenizer(TEXTS)).hidden
    np.testing.assert_allclose(vectors, hidden[:, 0].detach().numpy(), rtol=0, atol=1e-5)
    tokens = loaded.embed(TEXTS, PAIRS, layers="all", pooling="none")
    lengths = loaded.tokenizer(TEXTS, PAIRS)["attention_mask"].sum(1).tolist()
    assert [text.shape for text in tokens] == [(2, length, 32) for length in lengths]
    with pytest.raises(ValueError, match="3 of text and 1 of pair"):
        loaded.embed(TEXTS, "one")
    # A masked language model fills its mask token.
    first = lmtool.load("runs/first")
    mask = first.tokenizer.role("mask")
    assert (
        mask in first.tokenizer("a [MASK] cat")["input_ids"]
        and mask not in loaded.tokenizer("a [MASK] cat")["input_ids"]
    )
    assert len(first.predict("The [MASK] saw the cat.")[0]["masks"]) == 1


@pytest.mark.parametrize("model", ["bert_tiny", "distilbert_tiny", "roberta_tiny", "gpt_tiny"])
def test_tokenizer_inputs_equal_transformers(place: Path, model: str) -> None:  # noqa: F811
    pretrain("first", "max_steps=1", model=model)
    assert cli.main(["export", "checkpoint=runs/first", "output=exported"]) == 0
    for checkpoint in ("runs/first", "exported"):
        ours = lmtool.load(checkpoint).tokenizer
        theirs = transformers.AutoTokenizer.from_pretrained("exported")
        special = "" if model == "gpt_tiny" else theirs.mask_token
        texts = [f"{text} {special}" for text in TEXTS]
        for given, more in ((texts, {}), (texts[:1], {}), (TEXTS, {"max_length": 9})):
            cut = {**more, "truncation": True} if more else {}
            expected = theirs(given, padding=True, return_tensors="pt", **cut)
            got = ours(given, **more)
            assert list(got) == sorted(expected, key=list(got).index)
            for name, ids in got.items():
                real = expected["attention_mask"].bool()
                assert torch.equal(ids[real], expected[name][real]) and ids.shape == real.shape
        expected = theirs(TEXTS, PAIRS, padding=True, return_tensors="pt")
        for name, ids in ours(TEXTS, PAIRS).items():
            assert torch.equal(ids, expected[name])
