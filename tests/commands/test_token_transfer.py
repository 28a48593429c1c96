"""Token classifiers exported to transformers and imported again give the same tags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForTokenClassification, AutoTokenizer

import lmtool
from lmtool.cli import main as cli
from tests.commands.conftest import TINY, finetune, follow_card

SIZES = [word for word in TINY if word.startswith("model.")]
WORDS = ["The", "happy", "cat", "saw", "Anna", "Berg", "near", "the", "ship."]
TAGS = ["O", "O", "O", "O", "B-PER", "I-PER", "O", "O", "O"]


def tags(folder: Path) -> None:
    folder.mkdir()
    text = "\n".join(f"{word}\t{tag}" for word, tag in zip(WORDS, TAGS, strict=True)) + "\n\n"
    for split, count in (("train", 12), ("dev", 4)):
        (folder / f"{split}.conll").write_text(text * count)


def tagger(name: str, model: str, *more: str) -> Path:
    return finetune(
        name, "task=ner", "task.path=tags", "checkpoint=none", f"model={model}", *SIZES, "max_steps=2", *more
    )


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_exported_tagger_gives_same_tags(family: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tags(place / "tags")
    more = ["model.feedforward_size=128"] if family == "gpt" else []
    run = tagger("run", f"{family}_tiny", *more)
    assert cli.main(["export", f"checkpoint={run}", "output=exported"]) == 0
    config = json.loads(Path("exported/config.json").read_text())
    assert config["architectures"][0].endswith("ForTokenClassification")
    assert [*config["id2label"].values()] == ["O", "B-PER", "I-PER"]
    theirs, ours = AutoModelForTokenClassification.from_pretrained("exported").eval(), lmtool.load(run)
    rows = AutoTokenizer.from_pretrained("exported")(
        ["The happy cat saw Anna Berg.", "A sad king."], padding=True, return_tensors="pt"
    )
    real = rows["attention_mask"].bool()
    with torch.no_grad():
        expected = theirs(**rows).logits
        given = ours.model(rows["input_ids"], rows["attention_mask"]).logits
    assert torch.allclose(given[real], expected[real], atol=1e-5)
    follow_card("exported")
    # The exported folder predicts, is scored and is finetuned, although it names no data.
    capsys.readouterr()
    for checkpoint in (run, "exported"):
        assert cli.main(["predict", f"checkpoint={checkpoint}", "text=Anna saw the ship", "device=cpu"]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first == second and "Anna" in first
    if family == "bert":
        assert cli.main(["evaluate", "checkpoint=exported", "task=ner", "task.path=tags", "device=cpu"]) == 0
        assert "recall" in capsys.readouterr().out
        assert cli.main(["import", "checkpoint=exported", "output=imported"]) == 0
        finetune("further", "task=ner", "task.path=tags", "checkpoint=exported", "max_steps=2")
        assert "heads.ner" in capsys.readouterr().out


def test_tagger_without_transformers_class_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tags(place / "tags")
    run = tagger("run", "gpt1_tiny")
    assert cli.main(["export", f"checkpoint={run}", "output=exported"]) == 2
    assert "transformers has no class ...ForTokenClassification" in capsys.readouterr().err
    assert not hasattr(transformers, "OpenAIGPTForTokenClassification")
    tagger_words = ["task=ner", "task.path=tags", "checkpoint=none", "model=transformer_tiny", "max_steps=2"]
    finetune("other", *tagger_words, status=2)
    assert "model=transformer has no hidden state for each token" in capsys.readouterr().err
