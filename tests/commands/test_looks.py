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
from lmtool.commands import inspections
from lmtool.config.registry import build
from lmtool.reporting import looks
from lmtool.tokenizers.configs import ByteBpeConfig, WordConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from tests.commands.conftest import pretrain

pytestmark = pytest.mark.usefixtures("figures")


def test_inspect_tokenizer_compares_tokenizers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "tokenizer", "text=the zebra, & <b>", "kinds=[wordpiece,character]", "vocab_size=300"]
    assert cli.main([*words, "data=text", "data.path=text.txt", "cache_dir=cache"]) == 0
    out, page = capsys.readouterr().out, Path("tokenizers.html").read_text()
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith((" wordpiece", " character"))}
    assert "[UNK]" in rows["wordpiece"] and "t h e ␣ " in rows["character"], out
    assert "<b>" not in page and 'class="wrong"' in page
    first_line = page[page.index('<div class="pieces">') :]
    letters = re.findall("<span>(.+?)</span>", first_line[: first_line.index("wordpiece")])
    pieces = re.findall('grid-column: (\\d+) / (\\d+)" title="([^"]+)"', first_line.partition("character</span>")[2])
    assert len(letters) > 3 and all(int(end) == int(start) + 1 for start, end, _ in pieces)
    below = [letters[int(start) - 1] for start, _, piece in pieces if piece in "thezbra"]
    assert below == [*"theebrab"], "every piece stands below its letter, and z is unknown"
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
    sections = dict(re.findall("<h2>(.*?)</h2>(.*?)</section>", page, re.DOTALL))
    notes = {name: section for name, section in sections.items() if "<svg" in section}
    assert notes.keys() == {"alibi", "shaw", "runs/run"}
    assert "Nothing is learned." in notes["alibi"] and "hidden_size=64, num_heads=4" in notes["alibi"]
    assert "Its weights are the random initial ones." in notes["shaw"] and "hidden_size=32" in notes["runs/run"]
    assert "Its weights are trained." in notes["runs/run"]
    steepest = re.findall("key position minus query position -4\nhead 1 (.*)\nhead 2 (.*)\n", notes["alibi"])
    assert steepest == [("-1.000", "-0.250")] * 2, "the heads share the axis of a plot, so that slopes can be compared"
    assert cli.main(["inspect", "positions", "kinds=[rotry]"]) == 2
    assert "did you mean rotary?" in capsys.readouterr().err
    word = ["inspect", "word", "word=cat", "checkpoint=runs/run", "text=The cat saw the dog. | A dog saw the cat."]
    assert cli.main(word) == 0
    out, page = capsys.readouterr().out, Path("word.html").read_text()
    assert "cat in 2 sentences" in out and "0 (embedding)" in out and "<h1>cat in 2 sentences</h1>" in page
    assert all(f">{name}</text>" in page for name in ("mean cosine", "run, different words", "layer (0: embedding)"))
    assert cli.main([*word[:2], "word=cow", *word[3:]]) == 2
    assert "no 'cow' in 'The cat saw the dog.'" in capsys.readouterr().err
    assert cli.main([*word[:4], "text=The cat."]) == 2
    assert cli.main(["inspect", "attenton", "runs/run"]) == 2
    assert "lmtool inspect attention" in capsys.readouterr().err


def place(text: str, *pieces: tuple[str, int, int], unknown: tuple[int, ...] = ()) -> list[tuple[str, str, str]]:
    names, ranges = tuple(piece for piece, *_ in pieces), tuple((start, end) for _, start, end in pieces)
    spans = looks._place(text, looks.Tokenization("x", 9, names, ranges, unknown, text))
    return [(span.piece, text[span.start : span.end], span.letters) for span in spans]


def test_pieces_stand_below_their_letters() -> None:
    assert place("Unhappy", ("un", 0, 2), ("##happy", 2, 7)) == [("un", "Un", "Un"), ("##happy", "happy", "happy")]
    spaced = place("a  b", ("a", 0, 1), ("␣", 2, 2), ("␣b", 3, 4))
    assert spaced == [("a", "a", "a"), ("␣", " ", "␣"), ("␣b", "b", "b")]
    assert place("a", ("␣", 0, 1), ("a", 0, 1)) == [("a", "a", "a")], "a mark before the text has no letters"
    of_the = place("of [x", ("of</w>", 0, 2), ("<unk>", 3, 4), ("x</w>", 4, 5), unknown=(1,))
    assert of_the == [("of</w>", "of", "of"), ("<unk>", "[", "?"), ("x</w>", "x", "x")]
    assert place("naïve", ("n", 0, 1), ("##ai", 1, 3), ("##ve", 3, 5))[1] == ("##ai", "aï", "ai")
    split = place("ïve", ("<C3>", 0, 1), ("<AF>", 0, 1), ("ve", 1, 3))
    assert split == [("<C3> <AF>", "ï", "ï"), ("ve", "ve", "ve")], "the bytes of a letter share its cell"
    assert place("ïve", ("<C3>", 0, 1), ("<AF>76", 0, 2), ("e", 2, 3))[1] == ("<AF>76", "v", "v")
    assert place("", ("[UNK]", 0, 0), unknown=(0,)) == []


def test_word_after_an_unknown_one_stands_below_itself() -> None:
    text = "antidisestablishmentarianism is naïve"
    words = build(WordConfig(minimum_count=1), ["this is what it is"] * 8, 64)
    assert place_of(words, text) == [("[UNK]", text[:28]), ("is", "is"), ("[UNK]", "naïve")]
    numbers = build(ByteBpeConfig(minimum_count=1), ["this is what it is"] * 8, 330)
    assert ("<C3> <AF>", "ï") in place_of(numbers, text)


def place_of(tokenizer: Tokenizer, text: str) -> list[tuple[str, str]]:
    spans = looks._place(text, inspections._tokenize("x", tokenizer, text))
    return [(span.piece, text[span.start : span.end]) for span in spans]


def test_lines_of_pieces_end_between_pieces() -> None:
    text = "word " * 30
    spans = [looks._Span(start, start + 4, "word", "word", False) for start in range(0, len(text), 5)]
    lines = list(looks._lines(text, spans))
    assert [start for start, _ in lines] == [0, 45, 90, 135] and lines[-1][1] == len(text)
    assert list(looks._lines("x" * 60, [])) == [(0, 48), (48, 60)]


def test_inspect_positions_draws_the_tree_of_a_sentence(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "positions", "kinds=[tree_depth,tree_distance,alibi]", "length=8"]
    assert cli.main([*words, "text=fish eat small worms", "heads=[2,0,4,2]"]) == 0
    out, page = capsys.readouterr().out, Path("positions.html").read_text()
    _, depth, distance = re.split("tree_(?:depth|distance): 1 map, ", out)
    rows = [["1", "fish", "eat", "1"], ["2", "eat", "root", "0"], ["3", "small", "worms", "2"],
            ["4", "worms", "eat", "1"]]  # fmt: skip
    edges = [[0, 1, 3, 2], [1, 0, 2, 1], [3, 2, 0, 1], [2, 1, 1, 0]]
    assert [line.split() for line in depth.splitlines() if line.strip()[:1].isdigit()] == rows
    assert [line.split() for line in distance.splitlines() if line.strip()[:1].isdigit()] == [
        [*row, *map(str, numbers)] for row, numbers in zip(rows, edges, strict=True)
    ]
    sections = dict(re.findall("<h2>(.*?)</h2>(.*?)</section>", page, re.DOTALL))
    # In each map the words are at both axes, in the tree once; each figure has a version for narrow pages.
    figures = {name: section.count(">small</text>") for name, section in sections.items()}
    assert figures == {"tree_depth": 2 * (1 + 2), "tree_distance": 2 * (1 + 2 + 2), "alibi": 0}
    assert cli.main(words) == 0
    assert "cat" in capsys.readouterr().out, "without a sentence, an example is drawn"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["text=a b"], "heads= is missing"),
        (["heads=[2,0]"], "text= is missing"),
        (["text=a b", "heads=[2,1]"], "heads=[2, 1]: word 1 depends on itself"),
        (["text=a b", "heads=[0]"], "2 words and 1 heads"),
        (["text=a b", "heads=[2,0]", "kinds=[alibi]"], "are read only by positions in a tree"),
        (["text=" + "a " * 65, f"heads=[{','.join(map(str, range(65)))}]"], "text= has 65 words; 1 to 64 can be drawn"),
    ],
)
def test_sentences_without_a_tree_are_not_drawn(
    place: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [] if words[-1].startswith("kinds") else ["kinds=[tree_depth]"]
    assert cli.main(["inspect", "positions", *kinds, *words]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
