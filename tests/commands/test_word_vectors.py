"""Word vectors through the commands: import, export, frozen and trained vectors, `embed`, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lmtool
from lmtool.cli import main as cli
from tests.commands.conftest import BAD, GOOD, NOUNS, finetune

WORDS = ["the", "saw", "near", ".", "well-known", *NOUNS, *GOOD, *BAD]


@pytest.fixture
def vectors(place: Path) -> Path:
    """A file of vectors in which adjectives differ in the first number, imported into a folder."""
    values = torch.randn(len(WORDS), 6, generator=torch.Generator().manual_seed(0)) * 0.1
    for number, word in enumerate(WORDS):
        values[number, 0] = (word in GOOD) - float(word in BAD)
    lines = [" ".join([word, *map(str, row.tolist())]) for word, row in zip(WORDS, values, strict=True)]
    Path("glove.txt").write_text("\n".join([*lines, lines[0]]) + "\n")
    assert cli.main(["import", "checkpoint=glove.txt", "output=glove"]) == 0
    return Path("glove")


def test_vectors_file_is_imported_and_exported(vectors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", "checkpoint=glove.txt", "output=other"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "29 words of 6 numbers" in said and "1 line skipped, with words of earlier lines" in said
    assert "1 word that the tokenizer splits, such as well-known" in said and "no word has a capital letter" in said
    loaded = lmtool.load("glove")
    assert loaded.config.vocab_size == len(WORDS) + 5
    ids = torch.tensor([loaded.tokenizer.encode("The cat saw Zorro.").tolist()])
    hidden = loaded.model(ids).hidden[0]
    assert loaded.tokenizer.pieces(ids[0]) == ["the", "cat", "saw", "[UNK]", "."]
    assert not hidden[3].any() and hidden[1, 0] == 0 and hidden[1].any()
    assert cli.main(["export", "checkpoint=glove", "output=text", "format=vectors"]) == 0
    assert cli.main(["import", "checkpoint=text/vectors.txt", "output=again"]) == 0
    again = lmtool.load("again")
    assert torch.equal(
        again.model.parts.backbone.embed.token.weight, loaded.model.parts.backbone.embed.token.weight
    ) and again.tokenizer.pieces(range(34)) == loaded.tokenizer.pieces(range(34))


def test_head_tuning_freezes_vectors_and_full_trains_them(vectors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean word vector separates the two classes."""
    before = lmtool.load("glove").model.parts.backbone.embed.token.weight
    for tuning in ("head", "full"):
        run = finetune(tuning, "checkpoint=glove", f"tuning={tuning}", "max_epochs=8", "optimizer.lr=0.05")
        assert json.loads((run / "result.json").read_text())["value"] > 0.95
        after = lmtool.load(str(run)).model.parts.backbone.embed.token.weight
        assert torch.equal(before, after) == (tuning == "head")
    capsys.readouterr()
    assert cli.main(["embed", "checkpoint=glove", "text=The cat", "pooling=none"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["the", "cat"]


def test_cnn_uses_imported_vectors(vectors: Path) -> None:
    assert cli.main(["import", "checkpoint=glove", "model=cnn", "output=cnn"]) == 0
    table, model = (lmtool.load(name).model.parts.backbone.embed.token.weight for name in ("glove", "cnn"))
    assert torch.equal(table, model) and lmtool.load("cnn").config.embedding_size == 6
    for frozen in ("true", "false"):
        run = finetune(f"frozen_{frozen}", "checkpoint=cnn", "max_epochs=2", f"tuning.freeze_embeddings={frozen}")
        after = lmtool.load(str(run)).model.parts.backbone.embed.token.weight
        assert torch.equal(table, after) == (frozen == "true")
        assert json.loads((run / "result.json").read_text())["value"] > 0.9


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["finetune", "task=sst2", "task.path=rows", "checkpoint=glove.txt"], "a file", "lmtool import checkpoint="),
        (
            ["finetune", "task=sst2", "task.path=rows", "checkpoint=glove", "task.head=prompt"],
            "reads each word by itself",
            "task.head=paper",
        ),
        (["export", "checkpoint=glove", "output=out"], "has no counterpart in transformers", "format=vectors"),
        (
            ["pretrain", "model=word_vectors_tiny", "objective=mlm"],
            "mlm trains models that read context",
            "objective=auto",
        ),
        (["pretrain", "model=cnn_tiny", "objective=skip_gram"], "vectors of single tokens", "model=word_vectors"),
        (["pretrain", "model=cnn_tiny", "objective=clm"], "clm trains a decoder", "model=gpt"),
        (["import", "checkpoint=glove", "output=out", "model=bert"], "no token embedding with a separate", "model=cnn"),
        (
            ["import", "checkpoint=glove.txt", "output=out", "tokenizer=glove"],
            "a file of word vectors",
            "set checkpoint=",
        ),
    ],
)
def test_unsuitable_use_of_word_vectors_is_refused(
    vectors: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str, hint: str
) -> None:
    capsys.readouterr()
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert message in said and hint in said.partition("hint:")[2] and not Path("runs").exists()
