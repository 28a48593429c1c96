"""`lmtool embed`: output files and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from lmtool.cli import main as cli
from lmtool.commands import embed as command
from lmtool.learners.representations.vectors import Embedder, HiddenStates
from lmtool.types import Packed
from tests.commands.conftest import finetune, pretrain

pytest.importorskip("pyarrow.parquet")


def embed(*words: str) -> int:
    return cli.main(["embed", *words, "device=cpu", "precision=fp32"])


def test_embed_writes_pooled_and_token_vectors(place: Path, capsys: pytest.CaptureFixture) -> None:
    import pyarrow.parquet

    pretrain("first")
    Path("asked.txt").write_text("The happy cat.\n\nA river near the cold stone saw the ship.\n")
    assert embed("checkpoint=runs/first", "input=asked.txt", "output=pooled.npy") == 0
    assert "3 x 32 numbers: pooled.npy · layers=last of 1 · pooling=mean" in capsys.readouterr().out
    pooled = np.load("pooled.npy")
    assert pooled.shape == (3, 32) and pooled.dtype == np.float32
    assert embed("checkpoint=runs/first", "input=asked.txt", "output=tokens.parquet", "pooling=none", "layers=all") == 0
    tokens = pyarrow.parquet.read_table("tokens.parquet").to_pydict()
    assert list(tokens) == ["row", "position", "token", "layer_0", "layer_1"]
    assert tokens["token"][:2] == ["[CLS]", "the"] and sorted(set(tokens["row"])) == [0, 1, 2]
    for row in (0, 1, 2):  # row i is line i, also after the blank line
        own = [vector for vector, number in zip(tokens["layer_1"], tokens["row"], strict=True) if number == row]
        np.testing.assert_allclose(np.mean(own, axis=0), pooled[row], rtol=0, atol=1e-5)
    Path("last.txt").write_text("A river near the cold stone saw the ship.\n")
    assert embed("checkpoint=runs/first", "input=last.txt", "output=last.npy") == 0
    np.testing.assert_allclose(np.load("last.npy")[0], pooled[2], rtol=0, atol=1e-5)
    # A table with the columns of the checkpoint's task, pooled like its head.
    finetune("task", "checkpoint=runs/first", "max_steps=2", "max_epochs=null")
    assert embed("checkpoint=runs/task", "input=rows/dev.tsv", "output=task.parquet") == 0
    assert "pooling=first (as in its task)" in capsys.readouterr().out
    assert pyarrow.parquet.read_table("task.parquet").column_names == ["row", "sentence", "vector"]
    assert embed("checkpoint=runs/first", "text=the cat", "layers=all", "pooling=none") == 0
    assert "layer 1   " in capsys.readouterr().out.replace("-", " ")
    for words, message in (
        (["input=asked.txt", "output=a.txt"], "output=a.txt: the suffix must be .npy or .parquet"),
        (["input=asked.txt", "output=a.npy", "pooling=none"], "output=a.npy: a .npy array cannot hold the tokens"),
        (["input=rows/dev.tsv"], "no column text to read; there are sentence, label"),
        (["input=asked.txt", "layers=2"], "layers=2 is not a layer: the model has layers 1 to 1"),
        ([], "neither text= nor input= is set"),
    ):
        assert embed("checkpoint=runs/first", *words) == 2
        assert message in capsys.readouterr().err
    assert not list(Path().glob("a.*")) and not list(Path().glob(".tmp*"))


@pytest.mark.parametrize(
    ("suffix", "pooling", "partial"),
    [("npy", "mean", b"half a row"), ("parquet", "mean", b"\xff\1\0\0\0\0\0\0half"), ("parquet", "none", b"\1\0")],
)
def test_stopped_embedding_continues_after_its_finished_portions(
    place: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    pooling: str,
    partial: bytes,
) -> None:
    whole, out = Path(f"whole.{suffix}"), Path(f"out.{suffix}")
    pretrain("first")
    monkeypatch.setattr(Embedder, "portion", 3)
    Path("asked.txt").write_text("".join("The happy cat" + " saw" * number + ".\n" for number in range(8)))
    words = ["checkpoint=runs/first", "input=asked.txt", f"pooling={pooling}"]
    assert embed(*words, f"output={whole}") == 0
    read, reads = HiddenStates.read, []

    def stop_at_third(states: HiddenStates, inputs: Packed) -> Tensor:
        if len(reads) == 2:
            raise KeyboardInterrupt
        reads.append(inputs.lengths)
        return read(states, inputs)

    monkeypatch.setattr(HiddenStates, "read", stop_at_third)
    assert embed(*words, f"output={out}") == 130
    (unfinished,) = Path().glob(f"{out}.*.unfinished")
    assert not out.exists()
    with unfinished.open("ab") as file:
        file.write(partial)
    monkeypatch.setattr(HiddenStates, "read", read)
    capsys.readouterr()
    assert embed(*words, f"output={out}") == 0
    assert "continues after 6 of 8 texts" in capsys.readouterr().out
    assert out.read_bytes() == whole.read_bytes() and not unfinished.exists()


def test_damaged_unfinished_parquet_is_refused(
    place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain("first")
    Path("asked.txt").write_text("The cat.\nA king.\n")
    words = ["checkpoint=runs/first", "input=asked.txt", "output=out.parquet"]
    replacement_of = command.replacement_of
    monkeypatch.setattr(command, "replacement_of", lambda path: pytest.fail("stopped before the output"))
    with pytest.raises(pytest.fail.Exception):
        embed(*words)
    monkeypatch.setattr(command, "replacement_of", replacement_of)
    (unfinished,) = Path().glob("out.parquet.*.unfinished")
    content = unfinished.read_bytes()
    unfinished.write_bytes(content[:8] + b"?" * (len(content) - 8))
    capsys.readouterr()
    assert embed(*words) == 2
    assert f"{unfinished.resolve()} is damaged" in capsys.readouterr().err and not Path("out.parquet").exists()
