"""Block-sparse attention in a run: exact resume, the drawing of `inspect`, and the warning for short texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lmtool.cli import main as cli
from tests.commands.conftest import merge_overrides, pretrain, tiny

MODEL = "bigbird_tiny"
# Texts of 15 tokens or more use blocks; dropout is random per token.
BLOCKS = ["model.block_size=2", "model.random_blocks=1", "model.dropout=0.1", "model.attention_dropout=0.1"]


def weights(run: Path) -> dict:
    return load_file(sorted((run / "checkpoints").glob("step_*"))[-1] / "model.safetensors")


@pytest.mark.usefixtures("place")
def test_block_sparse_run_resumes_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    more = [*BLOCKS, "schedule=constant", "checkpoint_every=1"]
    run = pretrain("part", *more, "max_steps=1", model=MODEL)
    path = json.loads((run / "facts.json").read_text())["model"]["attention"]
    assert "blocks of tokens with the blocks they attend to (in texts of more than 14 tokens)" in path
    assert "no text is long enough" not in capsys.readouterr().out
    resumed = weights(pretrain("part", *more, "max_steps=2", model=MODEL))
    assert "resumes from step 1" in capsys.readouterr().out
    unbroken = weights(pretrain("whole", *more, "max_steps=2", model=MODEL))
    assert resumed.keys() == unbroken.keys()
    assert all(tensor.equal(unbroken[name]) for name, tensor in resumed.items())


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("length", [14, 32])
def test_inspect_draws_attention_blocks(length: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "pretrain", f"model={MODEL}", *tiny(MODEL), *BLOCKS, "data=text", "data.path=text.txt"]
    words += ["cache_dir=cache", f"max_length={length}", "n=1", "tokens=100", "output=seen.jsonl"]
    assert cli.main(merge_overrides(words)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    (_, title), *lines = json.loads(Path("seen.jsonl").read_text())["drawing"]
    rows = [text for _, text in lines]
    assert all(line in printed for line in (title, *rows))
    warning = f"max_length={length}: no text is long enough for block-sparse attention"
    if length == 14:
        assert (title, rows) == ("7 of 2 tokens, dense", []) and warning in printed
    else:
        assert title.startswith("16 of 2 tokens;") and warning not in printed
        assert rows[0] == rows[-1] == "#" * 16
        assert all(row.count("+") == 3 and row.count("*") == 1 and row[0] == row[-1] == "#" for row in rows[2:-2])
