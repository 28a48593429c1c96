"""`lmtool import tokenizer=` gives a checkpoint another vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lmtool
from lmtool.cli import main as cli
from lmtool.runs.finding import verify
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.conversion.vocabularies import replacement
from tests.breadth import slow_but
from tests.commands.conftest import finetune, pretrain
from tests.weights.published_folders import FAMILIES, make

KINDS = {
    "bert_tiny": ["tokenizer=wordpiece"],
    "electra_tiny": ["tokenizer=wordpiece"],
    "gpt_tiny": ["tokenizer=bytebpe"],
    "t5_tiny": ["tokenizer=sentencepiece", "tokenizer.sentinels=30"],
}
TEXT = ["data=text", "data.path=text.txt", "cache_dir=cache"]


def run(*words: str, status: int = 0) -> None:
    assert cli.main([*words]) == status


def vocabulary(output: str, *words: str) -> None:
    run("tokenizer", *TEXT, f"output={output}", *words)


def replace_vocabulary(checkpoint: str, tokenizer: str, output: str = "replaced", *more: str) -> dict[str, Any]:
    words = [f"checkpoint={checkpoint}", f"tokenizer={tokenizer}", f"output={output}", "cache_dir=cache"]
    run("import", *words, *more)
    verify(Path(output))
    report: dict[str, Any] = json.loads(Path(output, "replaced.json").read_text())
    return report


def logits(checkpoint: str) -> torch.Tensor:
    loaded = lmtool.load(checkpoint)
    ids = torch.arange(24).reshape(2, 12) * 5 % loaded.config.vocab_size
    decoder = ids.flip(1) if loaded.config.architecture == "encoder_decoder" else None
    with torch.no_grad():
        output = loaded.model(ids, decoder_input_ids=decoder)
    assert output.logits is not None
    return output.logits


@pytest.mark.parametrize("family", slow_but(("bert",), FAMILIES))
def test_equal_vocabulary_keeps_logits(family: str, place: Path) -> None:
    """For every family, with tied and untied embeddings, and with or without rows beyond the vocabulary."""
    make(family, place / "published")
    report = replace_vocabulary("published", "published", "replaced", *TEXT[:2])
    assert torch.equal(logits("replaced"), logits("published"))
    assert report["new"] == report["dropped"] == 0 and report["kept"] == Tokenizer.load("published").vocab_size
    loss = report["bits_per_byte"]
    # A discriminator predicts no tokens, ten sentinels are too few for T5's length, and XLNet's objective samples the
    # order of prediction.
    assert (loss is None) == (family in ("electra", "t5", "xlnet")) and (
        loss is None or loss["before"] == loss["after"]
    )


@pytest.mark.parametrize("model", slow_but(("bert_tiny",), KINDS))
def test_new_vocabulary_reuses_embeddings_and_trains(
    model: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain("first", "max_steps=2", *KINDS[model], model=model)
    other = ["tokenizer.algorithm=bpe"] if model == "t5_tiny" else []
    vocabulary("vocabulary", *KINDS[model], *other, "tokenizer.vocab_size=320")
    report = replace_vocabulary("runs/first", "vocabulary")
    out = capsys.readouterr().out
    assert "remove different characters" not in out or model == "t5_tiny"
    assert f"{report['kept']} kept" in out and "before ·" in out and "validation text of data=text" in out
    before, after = lmtool.load("runs/first"), lmtool.load("replaced")
    old, new = Tokenizer.load("vocabulary"), after.tokenizer
    assert new is not None and new.fingerprint == old.fingerprint and before.tokenizer is not None
    mapping = replacement(before.tokenizer, new)
    theirs, ours = before.model.parts.state_dict(), after.model.parts.state_dict()
    tables = [name for name in ours if ours[name].shape != theirs[name].shape or name in report["tensors"]]
    assert set(tables) <= set(report["tensors"]) and "backbone.embed.token.weight" in tables
    for name, tensor in ours.items():
        if name not in tables:
            assert torch.equal(tensor, theirs[name]), name
            continue
        assert len(tensor) == new.vocab_size + len(theirs[name]) - before.tokenizer.vocab_size
        for number, ids in enumerate(mapping.sources):
            rows = theirs[name][torch.from_numpy(ids)]
            assert len(ids) != 1 or torch.equal(tensor[number], rows[0])
            assert len(ids) < 2 or torch.allclose(tensor[number], rows.mean(0), atol=1e-6)
    assert any(len(ids) > 1 for ids in mapping.sources) == (model == "t5_tiny")
    # The result is an ordinary checkpoint.
    run("evaluate", "checkpoint=replaced", "cache_dir=cache", "device=cpu")
    if model == "bert_tiny":
        pretrain("second", "model=auto", "checkpoint=replaced", "max_steps=1", "objective=mlm", model="auto")
        finetune("third", "checkpoint=replaced", "max_steps=1")
        vocabulary("words", "tokenizer=word", "tokenizer.vocab_size=99")
        assert replace_vocabulary("replaced", "words", "again")["dropped"] > 0
        assert "remove different characters" in capsys.readouterr().out


def test_impossible_replacement_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("bert", place / "bert")
    make("t5", place / "t5")
    finetune("tuned", "checkpoint=bert", "max_steps=1")
    vocabulary("words", "tokenizer=word", "tokenizer.special_tokens=gpt", "tokenizer.vocab_size=99")
    Path("damaged").mkdir()
    Path("damaged/tokenizer.json").write_text("{")
    Path("full").mkdir()
    Path("full/file").write_text("")
    vocabulary("larger", "tokenizer=bytebpe", "tokenizer.vocab_size=350")
    make("gpt", place / "gpt")
    for file in Path("larger").iterdir():
        Path("gpt", file.name).write_bytes(file.read_bytes())
    capsys.readouterr()
    for words, problem in (
        (
            ["checkpoint=gpt", "tokenizer=larger"],
            "checkpoint=gpt: the tokenizer has 350 tokens, but the embedding has 330 rows",
        ),
        (["checkpoint=runs/tuned", "tokenizer=words"], "checkpoint=runs/tuned was finetuned"),
        (["checkpoint=bert", "tokenizer=words"], "tokenizer=words: the tokenizer has no cls token"),
        (["checkpoint=t5", "tokenizer=words"], "has no sentinel token, which objective=span_corruption needs"),
        (["checkpoint=bert", "tokenizer=nowhere"], "tokenizer=nowhere: no such folder"),
        (["checkpoint=bert", "tokenizer=rows"], "tokenizer=rows: the folder has no tokenizer"),
        (["checkpoint=bert", "tokenizer=damaged"], "damaged/tokenizer.json:1:2: not JSON"),
        (["checkpoint=bert", "tokenizer=bert", "output=full"], "output=full exists and is not empty"),
        (["checkpoint=bert", *TEXT[:2]], "but tokenizer= is not set"),
        (["checkpoint=bert", "tokenizer=bert", "data=text", "data.path=none.txt"], "data.path"),
    ):
        output = [] if any(word.startswith("output=") for word in words) else ["output=out"]
        run("import", *words, *output, "cache_dir=cache", status=2)
        error = capsys.readouterr().err
        assert problem in error and error.startswith("error: ") and "hint: " in error and not Path("out").exists()
