"""`lmtool inspect tokenizer`, `attention`, `positions` and `word`: output and HTML pages."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lmtool.cli import main as cli
from tests.commands.conftest import pretrain


def test_inspect_tokenizer_compares_tokenizers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "tokenizer", "text=the zebra, & <b>", "kinds=[wordpiece,character]", "vocab_size=300"]
    assert cli.main([*words, "data=text", "data.path=text.txt", "cache_dir=cache"]) == 0
    out, page = capsys.readouterr().out, Path("tokenizers.html").read_text()
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith((" wordpiece", " character"))}
    assert "[UNK]" in rows["wordpiece"] and "t h e ␣ " in rows["character"], out
    assert "&lt;b&gt;" in page and "<b>" not in page and 'class="wrong"' in page
    assert cli.main([*words, "kinds=[wordpice]"]) == 2
    assert "kinds" in capsys.readouterr().err


def check_tiles(page: str, names: list[str]) -> None:
    """The opacities of a tile are the square roots of weights, which sum to 1 in each row, or scores on a scale."""
    tokens = page.count("<span>")
    images = re.findall('src="data:image/png;base64,([^"]+)"', page)
    for name, image in zip(names, images, strict=True):
        opacity = np.asarray(Image.open(io.BytesIO(base64.b64decode(image))).convert("RGBA"))[:, :, 3] / 255
        assert opacity.shape == (tokens, tokens)
        if " " not in name:
            assert (opacity**2).sum(1) == pytest.approx(1, abs=0.05)
        else:
            assert opacity.min() == pytest.approx(1 / 255) and opacity.max() == 1


def test_inspect_attention_positions_and_word_write_pages(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("run", "objective.pairs=none", "max_steps=1", "model/positions=t5")
    capsys.readouterr()
    assert cli.main(["inspect", "attention", "runs/run", "The cat saw the dog."]) == 0
    out, page = capsys.readouterr().out, Path("attention.html").read_text()
    assert "layer.head" in out and "1.1 " in out
    tiles = re.findall('class="tile" data-name="([^"]+)"', page)
    assert tiles == ["1.1", "1.2", "1.1 content", "1.1 places"] and len(page) < 40_000
    check_tiles(page, tiles)
    assert cli.main(["inspect", "attention", "runs/run", f"text={'cat ' * 80}"]) == 2
    assert "use a shorter text" in capsys.readouterr().err
    learned = ["inspect", "positions", "kinds=[alibi,shaw,none]", "length=8", "checkpoint=[runs/run]"]
    assert cli.main(learned) == 0
    out, page = capsys.readouterr().out, Path("positions.html").read_text()
    assert all(name in out for name in ("alibi: 4 maps, scores ", "shaw: 1 map", "runs/run"))
    assert page.count("<svg") == 3
    assert cli.main(["inspect", "positions", "kinds=[rotry]"]) == 2
    assert "did you mean rotary?" in capsys.readouterr().err
    word = ["inspect", "word", "word=cat", "checkpoint=runs/run", "text=The cat saw the dog. | A dog saw the cat."]
    assert cli.main(word) == 0
    out, page = capsys.readouterr().out, Path("word.html").read_text()
    assert "cat in 2 sentences" in out and "0 (embedding)" in out and page.count("<svg") == 2
    assert cli.main([*word[:2], "word=cow", *word[3:]]) == 2
    assert "no 'cow' in 'The cat saw the dog.'" in capsys.readouterr().err
    assert cli.main([*word[:4], "text=The cat."]) == 2
    assert cli.main(["inspect", "attenton", "runs/run"]) == 2
    assert "lmtool inspect attention" in capsys.readouterr().err
