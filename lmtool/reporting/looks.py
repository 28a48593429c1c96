"""Screens and pages of `lmtool inspect tokenizer`, `attention`, `positions` and `word`."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from markupsafe import Markup

from lmtool.config.base import JsonObject
from lmtool.reporting import html
from lmtool.reporting.console import Output, print_table
from lmtool.reporting.text import number, percent, plain, tenths
from lmtool.system.terminal import counted, visible_space

if TYPE_CHECKING:
    import numpy as np

_SHADES = "·░▒▓█"
_COLORS = {"[░▒]+": "blue", "[▓█]+": "bold bright_blue", "·+": "dim"}
_TOKEN_CHARACTERS = 14


@dataclass(frozen=True)
class Tokenization:
    """The tokens of a text in one vocabulary. entries: size of the vocabulary. ranges: for each token, the start and
    end of its characters in the text, without white space. unknown: indices of unknown tokens. decoded: the text
    decoded from the tokens."""

    name: str
    entries: int
    pieces: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    unknown: tuple[int, ...]
    decoded: str

    @property
    def row(self) -> JsonObject:
        return {
            "vocabulary": self.name,
            "entries": self.entries,
            "pieces": list(self.pieces),
            "count": len(self.pieces),
            "unknown": len(self.unknown),
            "back": self.decoded,
        }


def print_tokenizations(output: Output, text: str, tokenizations: Sequence[Tokenization]) -> None:
    """Prints the tokens in each vocabulary, separated by spaces, with a summary below."""
    output.paragraph(f"{plain(text, 120)} · {counted(len(text), 'character')}", "bold")
    unknown = {tokenization.pieces[index] for tokenization in tokenizations for index in tokenization.unknown}
    colors = {rf"(?<!\S){re.escape(piece)}(?!\S)": "bold red" for piece in unknown}
    rows = []
    for tokenization in tokenizations:
        rows += [
            (tokenization.name, plain(" ".join(tokenization.pieces))),
            ("", f"{_summary(tokenization)} · round trip: {_round_trip(text, tokenization)}"),
        ]
    output.rows(rows, {r"[␣⏎⇥␍](×\d+)?": "dim", r"(?<!\S)##": "dim", r"^[\d,]+ pieces? .*": "dim", **colors})
    output.paragraph(_LEGEND, "dim")


_GRID_LEGEND = "Pieces stand below their letters. Bytes or other pieces of one letter share a cell, which names them."
_LEGEND = "Spaces separate pieces; ␣ is a space in the text, ⏎ a line end, ## continues a word."


def _summary(tokenization: Tokenization) -> str:
    unknown = f" · {len(tokenization.unknown):,} unknown" if tokenization.unknown else ""
    return f"{counted(len(tokenization.pieces), 'piece')} of {tokenization.entries:,} entries{unknown}"


def _round_trip(text: str, tokenization: Tokenization) -> str:
    def letters(text: str) -> str:
        return "".join(text.split()).lower()

    if tokenization.decoded == text:
        return "identical"
    same_letters = letters(tokenization.decoded) == letters(text)
    return "identical but for case and spaces" if same_letters else plain(tokenization.decoded, 60)


def write_tokenizations(path: Path, text: str, tokenizations: Sequence[Tokenization]) -> None:
    """Writes the page. Raises UserError if that fails."""
    rows = [(tokenization, _summary(tokenization), _round_trip(text, tokenization)) for tokenization in tokenizations]
    placed = [(tokenization.name, _place(text, tokenization)) for tokenization in tokenizations]
    lines = []
    for start, end in _lines(text, [span for _, spans in placed for span in spans]):
        rows_of_line = [
            (name, [_cut(span, start, end) for span in spans if span.start < end and span.end > start])
            for name, spans in placed
        ]
        letters = [visible_space(letter) if letter.isspace() else letter for letter in text[start:end]]
        lines.append((letters, rows_of_line))
    html.write_page(
        path,
        "tokenizers.html",
        "tokenizers",
        text=text,
        rows=rows,
        lines=lines,
        legend=_LEGEND,
        grid_legend=_GRID_LEGEND,
    )


# Maximum number of letters in a line of the grid, and of lines.
_LINE_LETTERS, _MAX_LINES = 48, 100


class _Span(NamedTuple):
    """A piece and its place in the text: from letter `start` up to letter `end`."""

    start: int
    end: int
    piece: str
    letters: str
    unknown: bool


def _place(text: str, tokenization: Tokenization) -> list[_Span]:
    """Returns the pieces with their places in the text. Pieces of the same letter, such as its bytes, share a place; a
    piece of white space has the white space before the next piece, and is left out if there is none."""
    spans: list[_Span] = []
    position = 0
    for index, (piece, (start, end)) in enumerate(zip(tokenization.pieces, tokenization.ranges, strict=True)):
        letters, is_unknown = _letters(piece), index in tokenization.unknown
        if not letters:
            start, end = position, position + len(text[position:end]) - len(text[position:end].lstrip())
        elif end <= position and spans:
            spans[-1] = spans[-1]._replace(piece=f"{spans[-1].piece} {piece}", letters=text[spans[-1].start : position])
            continue
        start = max(start, position)
        if end <= start:
            continue
        if is_unknown:
            letters = piece if 0.6 * len(piece) < end - start else "?"
        elif not letters or letters.lower() == text[start:end].lower() or end - start < len(letters):
            letters = text[start:end].strip() or piece
        spans.append(_Span(start, end, piece, letters, is_unknown))
        position = end
    return spans


def _letters(piece: str) -> str:
    if len(piece) > 2 and piece.startswith("##"):
        piece = piece[2:]
    return re.sub(r"</w>$|[␣⏎⇥␍]", "", piece)


def _lines(text: str, spans: Sequence[_Span]) -> Iterator[tuple[int, int]]:
    """Each line ends between two pieces of all vocabularies if it can, preferably at a space."""
    inside = {letter for span in spans for letter in range(span.start + 1, span.end)}
    start = 0
    for _ in range(_MAX_LINES):
        if start >= len(text):
            return
        end = min(start + _LINE_LETTERS, len(text))
        if end < len(text):
            candidates = [place for place in range(end, start, -1) if place not in inside]
            end = next((place for place in candidates if text[place - 1].isspace()), next(iter(candidates), end))
        yield start, end
        start = end


def _cut(span: _Span, start: int, end: int) -> _Span:
    first, last = max(span.start, start), min(span.end, end)
    return span._replace(start=first - start + 1, end=last - start + 1)


@dataclass(frozen=True)
class SentenceTree:
    """A sentence with its dependency tree. heads: the number of each word's head, from 1; 0 for the root. depths: the
    number of edges from the root to each word. distances: (M, M) number of edges between two words; None for positions
    that do not read them."""

    words: tuple[str, ...]
    heads: tuple[int, ...]
    depths: tuple[int, ...]
    distances: np.ndarray | None


@dataclass(frozen=True)
class PositionMaps:
    """Position scores of one kind. scores: (1, L, L), or (A, L, L) if heads differ. note: sentences about the kind, the
    score and the weights. tree: the sentence whose words have the positions, for positions in a tree."""

    name: str
    scores: np.ndarray
    note: str
    tree: SentenceTree | None = None


def print_position_maps(output: Output, maps: Sequence[PositionMaps]) -> None:
    """Prints the range of the scores of each kind, and the places of the words in a tree; the page has the maps."""
    for position_maps in maps:
        low, high = number(float(position_maps.scores.min())), number(float(position_maps.scores.max()))
        maps_text = counted(len(position_maps.scores), "map")
        output.paragraph(f"{plain(position_maps.name, 80)}: {maps_text}, scores {low} to {high}")
        if position_maps.tree is not None:
            _print_tree(output, position_maps.tree)


def _print_tree(output: Output, tree: SentenceTree) -> None:
    count, header = len(tree.words), ["", "word", "head", "depth"]
    rows: list[list[object]] = [
        [number, word, tree.words[head - 1] if head else "root", depth]
        for number, (word, head, depth) in enumerate(zip(tree.words, tree.heads, tree.depths, strict=True), 1)
    ]
    if tree.distances is not None:
        longest_word = max(map(len, tree.words))
        shown = min(count, max((output.columns - 2 * longest_word - 24) // 3, 1))
        header.append(f"edges to words 1 to {shown}")
        for row, distances in zip(rows, tree.distances[:, :shown].tolist(), strict=True):
            row.append(" ".join(f"{distance:>2}" for distance in distances))
    print_table(output, header, rows)


_MAPS_LEGEND = (
    "Rows: query positions. Columns: key positions. Color: the score, on the map's own scale. All words are the same, "
    "so scores differ by position only. Scores that depend on the distance alone are also drawn over the distance. "
    "Positions in a tree are those of the words of a sentence, a token each."
)


def _print_shades(output: Output, names: Sequence[str], weights_LL: np.ndarray) -> None:
    capacity = output.columns - max(map(len, names)) - 4
    count = min(len(names), capacity)
    cells = 2 if 2 * count <= capacity else 1
    shades = [
        "".join(_SHADES[min(int(weight * len(_SHADES)), len(_SHADES) - 1)] * cells for weight in row[:count])
        for row in weights_LL.tolist()
    ]
    output.rows(list(zip(names, shades, strict=True)), _COLORS)
    if count < len(names):
        output.line(f"columns 1 to {count} of {len(names)}; the page has all", "dim")


def write_position_maps(path: Path, maps: Sequence[PositionMaps]) -> None:
    """Writes the page. Raises UserError if that fails."""
    from lmtool.reporting import drawing, heat_maps

    def maps_of(scores_ALL: np.ndarray, words: Sequence[str]) -> tuple[str, str]:
        wide, narrow = (heat_maps.position_maps_figure(scores_ALL, per_row, words) for per_row in (4, 2))
        return drawing.svg(wide), drawing.svg(narrow)

    none, kinds = ("", ""), []
    for each in maps:
        figures = {"tree": none, "edges": none, "lines": none}
        words: Sequence[str] = ()
        if each.tree is not None:
            words = each.tree.words
            figures["tree"] = drawing.svgs(heat_maps.tree_figure(words, each.tree.heads, each.tree.depths))
            if each.tree.distances is not None:
                figures["edges"] = maps_of(each.tree.distances[None], words)
        elif lines := heat_maps.distances_figure(each.scores):
            figures["lines"] = drawing.svgs(lines)
        kinds.append({"name": each.name, "note": each.note, "maps": maps_of(each.scores, words), **figures})
    html.write_page(path, "positions.html", "positions", kinds=kinds, legend=_MAPS_LEGEND)


@dataclass(frozen=True)
class SimilarityByLayer:
    """The similarity of a word's vectors in several sentences, in one checkpoint.

    same: mean cosine of the word's vectors, by layer. other_words: mean cosine of different words, by layer. pairs:
    (W, S, S) cosines of the word's vectors in each pair of S sentences, for each of W layers.
    """

    name: str
    layers: tuple[int, ...]
    same: list[float]
    other_words: list[float]
    pairs: np.ndarray


def print_similarities(
    output: Output, word: str, sentences: Sequence[str], similarities: Sequence[SimilarityByLayer]
) -> None:
    """Prints a row per checkpoint and layer."""
    rows = [
        [similar.name if number == 0 else "", layer or "0 (embedding)", f"{similarity:.3f}", f"{other:.3f}"]
        for similar in similarities
        for number, (layer, similarity, other) in enumerate(
            zip(similar.layers, similar.same, similar.other_words, strict=True)
        )
    ]
    heading = f"{plain(word, 60)} in {counted(len(sentences), 'sentence')} · mean cosine of two vectors"
    print_table(output, ["checkpoint", "layer", "the same word", "different words"], rows, heading)


def write_similarities(
    path: Path, word: str, sentences: Sequence[str], similarities: Sequence[SimilarityByLayer]
) -> None:
    """Writes the page. Raises UserError if that fails."""
    from lmtool.reporting import drawing, heat_maps, plots

    html.write_page(
        path,
        "word.html",
        word,
        word=word,
        sentences=sentences,
        curves=drawing.svgs(plots.similarity_figure(similarities)),
        squares=[
            (similar.name, drawing.svg(heat_maps.pairs_figure(similar.pairs, similar.layers)))
            for similar in similarities
        ],
    )


class _Head(Protocol):
    @property
    def layer(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def fractions(self) -> Mapping[str, float]: ...
    @property
    def pattern(self) -> str: ...
    @property
    def entropy(self) -> float: ...


class _Attention(Protocol):
    @property
    def weights(self) -> np.ndarray: ...
    @property
    def terms(self) -> Mapping[str, np.ndarray]: ...


def _head_table(heads: Sequence[_Head]) -> tuple[list[str], list[list[str]]]:
    patterns = list(heads[0].fractions)
    rows = []
    for head in heads:
        fractions = [tenths(head.fractions[name]) for name in patterns]
        rows.append([f"{head.layer}.{head.number}", head.pattern, *fractions, tenths(head.entropy)])
    return ["layer.head", "pattern", *patterns, "entropy"], rows


def print_heads(
    output: Output, heads: Sequence[_Head], tokens: Sequence[str], maps: Sequence[tuple[_Head, np.ndarray]]
) -> None:
    """Prints each head's mean attention weight on each pattern, and some attention maps. tokens: the L tokens of the
    text. maps: the heads to draw, each with its (L, L) weights."""
    heading = f"{counted(len(tokens), 'token')} · uniform attention has {percent(1 / len(tokens))} on each"
    print_table(output, *_head_table(heads), heading)
    for head, weights in maps:
        output.line()
        output.paragraph(f"head {head.layer}.{head.number}, pattern: {head.pattern}", "bold")
        _print_shades(output, [plain(token, _TOKEN_CHARACTERS) for token in tokens], weights)
    if maps:
        legend = f"{_SHADES[0]}: no attention weight, {_SHADES[-1]}: most of it."
        output.paragraph(f"Rows: query tokens. Columns: key tokens. {legend}", "dim")


def write_heads(path: Path, name: str, heads: Sequence[_Head], tokens: Sequence[str], attention: _Attention) -> None:
    """Writes the page: a thumbnail of each head, one of each term of the scores of each layer's first head if there
    are several, and a table of the heads. Raises UserError if writing fails."""
    layers: dict[int, list[Thumbnail]] = {}
    for head in heads:
        weights_LL = attention.weights[head.layer - 1, head.number - 1]
        thumbnail = Thumbnail(f"{head.layer}.{head.number}", head.pattern, _png(weights_LL**0.5))
        layers.setdefault(head.layer, []).append(thumbnail)
    terms = [
        [_term_thumbnail(f"{layer}.1 {term}", maps_WALL[layer - 1, 0]) for term, maps_WALL in attention.terms.items()]
        for layer in layers
        if attention.terms
    ]
    values = {"tokens": tokens, "layers": list(layers.values()), "terms": terms, "patterns": _head_table(heads)}
    html.write_page(path, "attention.html", f"attention of {name}", name=name, **values)


@dataclass(frozen=True)
class Thumbnail:
    """A small map of one head, as an image of one pixel per pair of tokens.

    image: its address. The opacity of a pixel, between 0 and 1, is the square root of an attention weight; or, if `low`
    and `high` are given, it rises from 1/255 at a score of `low` to 1 at `high`, and is 0 where attention is masked.
    """

    name: str
    note: str
    image: Markup
    low: float | None = None
    high: float | None = None


def _term_thumbnail(name: str, scores_LL: np.ndarray) -> Thumbnail:
    import numpy as np

    low, high = float(np.nanmin(scores_LL)), float(np.nanmax(scores_LL))
    opacity_LL = np.nan_to_num((1 + 254 * (scores_LL - low) / ((high - low) or 1)) / 255)
    return Thumbnail(name, f"{number(low)} to {number(high)}", _png(opacity_LL), low, high)


def _png(opacity_LL: np.ndarray) -> Markup:
    """Returns a black PNG image, eight bits of gray and eight of opacity per pixel, as a data address."""
    import numpy as np

    height, width = opacity_LL.shape
    pixels = np.zeros((height, 1 + 2 * width), np.uint8)  # each row: its filter (0: none), then gray and opacity
    pixels[:, 2::2] = np.rint(255 * opacity_LL)

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 4, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels.tobytes(), 9)) + chunk(b"IEND", b"")
    return Markup("data:image/png;base64,") + base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode()
