"""`lmtool inspect tokenizer`, `attention`, `positions` and `word`: pages about a vocabulary, a checkpoint, or kinds of
positions. Each function prints, writes the page, and returns its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from lmtool.config.base import JsonObject
from lmtool.config.messages import of_value
from lmtool.config.registry import Choice, build, names
from lmtool.data.formats import text_format
from lmtool.data.sources import open_source
from lmtool.data.trees import ANCESTORS, NoTree, numbers_of_heads, paths_from_root
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.errors import UserError, nearest
from lmtool.learners.representations.attention import HeadPattern, attention_of, heads_of, position_scores
from lmtool.learners.representations.reading import max_length_of, text_format_of, tokenizer_of
from lmtool.learners.representations.vectors import HiddenStates, compare_word
from lmtool.models.configs import TransformerConfig
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.nn.configs import PositionsConfig
from lmtool.nn.positions import Learned, Position, PositionSizes, Rotary, TreeDistance, tree_distances
from lmtool.reporting.console import Output
from lmtool.reporting.looks import (
    PositionMaps,
    SentenceTree,
    SimilarityByLayer,
    Tokenization,
    print_heads,
    print_position_maps,
    print_similarities,
    print_tokenizations,
    write_heads,
    write_position_maps,
    write_similarities,
    write_tokenizations,
)
from lmtool.resolver.commands import (
    InspectAttentionConfig,
    InspectPositionsConfig,
    InspectTokenizerConfig,
    InspectWordConfig,
)
from lmtool.session.open_run import tokenizer_at
from lmtool.system.files import user_path
from lmtool.system.terminal import counted
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import select_device, select_precision
from lmtool.types import Packed
from lmtool.weights.padded_model import load

# --- lmtool inspect tokenizer ---------------------------------------------------------------------------------------


def tokenizer(config: InspectTokenizerConfig) -> list[JsonObject]:
    """Tokenizes, prints and writes the page. Returns a row per vocabulary."""
    output = Output()
    tokenizations = [_tokenize(name, tokenizer, config.text) for name, tokenizer in _tokenizers(config, output)]
    print_tokenizations(output, config.text, tokenizations)
    path = user_path(config.output)
    write_tokenizations(path, config.text, tokenizations)
    output.line(f"page: {path}")
    return [tokenization.row for tokenization in tokenizations]


def _tokenizers(config: InspectTokenizerConfig, output: Output) -> Iterator[tuple[str, Tokenizer]]:
    if config.kinds:
        source = open_source(config.data, config.cache_dir, output.stage, config.offline)
        for kind in config.kinds:
            section = cast(TokenizerConfig, Choice("tokenizer").validate({"name": kind}))
            yield kind, trained_tokenizer(section, source, config.vocab_size, config.cache_dir, output.stage)
    for checkpoint in config.checkpoint:
        yield checkpoint, tokenizer_at(checkpoint, config.offline)


def _tokenize(name: str, tokenizer: Tokenizer, text: str) -> Tokenization:
    ids_T, ranges_T2 = tokenizer.encode_aligned(text)
    ids, unknown = ids_T.tolist(), tokenizer.roles.get("unk")
    return Tokenization(
        name,
        tokenizer.vocab_size,
        tuple(tokenizer.readable(ids)),
        tuple((start, end) for start, end in ranges_T2.tolist()),
        tuple(number for number, token in enumerate(ids) if token == unknown),
        tokenizer.decode(ids),
    )


# --- lmtool inspect attention ---------------------------------------------------------------------------------------


MAX_TOKENS = 64
"""Maximum number of tokens that a page can show."""


def attention(config: InspectAttentionConfig) -> list[JsonObject]:
    """Reads the text, prints the heads and writes the page. Returns the pattern of each head."""
    output, precision = Output(), select_precision(config.precision, select_device(config.device))
    loaded = load(config.checkpoint, str(precision.device), config.offline)
    tokenizer, backbone = tokenizer_of(loaded, config.checkpoint), loaded.model.parts.backbone
    ids, columns = text_format(text_format_of(loaded), tokenizer).join(tokenizer.encode(config.text))
    longest = min(MAX_TOKENS, max_length_of(loaded))
    if len(ids) > longest:
        raise UserError(f"text= has {len(ids)} tokens, and at most {longest} can be drawn", "use a shorter text")
    tensors = {name: torch.from_numpy(np.asarray(column)) for name, column in columns.items()}
    inputs = Packed(torch.from_numpy(np.asarray(ids)), (len(ids),), tensors).to(precision.device)
    attention = attention_of(backbone.eval(), inputs, precision)
    special_L = np.isin(ids, sorted(tokenizer.special_ids))
    if special_L.all():
        raise UserError("text= has only special tokens", "use a sentence")
    heads, pieces = heads_of(attention.weights, special_L), tokenizer.readable(ids)
    maps = [(head, attention.weights[head.layer - 1, head.number - 1]) for head in _clearest(heads)[: config.shown]]
    print_heads(output, heads, pieces, maps)
    path = user_path(config.output)
    write_heads(path, config.checkpoint, heads, pieces, attention)
    output.line(f"page: {path}")
    return [{"layer": head.layer, "head": head.number, "mostly": head.pattern, **head.fractions} for head in heads]


def _clearest(heads: list[HeadPattern]) -> list[HeadPattern]:
    ranked = sorted((head for head in heads if head.pattern), key=lambda head: -head.fractions[head.pattern])
    earlier: Counter[str] = Counter()
    ranks = {}
    for head in ranked:
        ranks[head] = earlier[head.pattern]
        earlier[head.pattern] += 1
    return sorted(ranked, key=lambda head: ranks[head])


# --- lmtool inspect positions ---------------------------------------------------------------------------------------


GROUP = "model/positions"
EXAMPLE = "the old cat slept on the red mat", (3, 3, 4, 0, 8, 8, 8, 4)
"""A sentence for positions in a tree, and the head of each word."""


def positions(config: InspectPositionsConfig) -> list[JsonObject]:
    """Prints the maps and writes the page. Returns the name and number of maps of each kind."""
    output = Output()
    maps = [*_maps_of_kinds(config), *_maps_of_checkpoints(config)]
    if (config.text or config.heads) and all(position_maps.tree is None for position_maps in maps):
        raise UserError("text= and heads= are read only by positions in a tree", "omit them, or add kinds=[tree_depth]")
    print_position_maps(output, maps)
    path = user_path(config.output)
    write_position_maps(path, maps)
    output.line(f"page: {path}")
    return [{"positions": position_maps.name, "maps": len(position_maps.scores)} for position_maps in maps]


def _sentence(config: InspectPositionsConfig) -> tuple[SentenceTree, torch.Tensor]:
    """Returns the sentence that positions in a tree read, and (M, D): the path from the root to each of its words."""
    if (config.text is None) != (config.heads is None):
        missing = "text" if config.text is None else "heads"
        raise UserError(f"text= and heads= describe one sentence; {missing}= is missing", f"set {missing}= too")
    text, heads = EXAMPLE if config.text is None or config.heads is None else (config.text, config.heads)
    words = text.split()
    if not 0 < len(words) <= MAX_TOKENS:
        message = f"text= has {counted(len(words), 'word')}; 1 to {MAX_TOKENS} can be drawn"
        raise UserError(message, "use another sentence")
    try:
        paths_MD = torch.from_numpy(paths_from_root(numbers_of_heads(heads, len(words))))
    except NoTree as no_tree:
        hint = "correct heads=: one word has 0, all others lead to it"
        raise UserError(f"heads={list(heads)}: {no_tree}", hint) from no_tree
    depths_M = (paths_MD >= 0).sum(-1) - 1
    distances_MM = tree_distances(paths_MD[None], paths_MD[None])[0][0].numpy()
    return SentenceTree(tuple(words), heads, tuple(depths_M.tolist()), distances_MM), paths_MD


def _maps(
    name: str,
    section: PositionsConfig,
    position: Position,
    config: InspectPositionsConfig,
    model: TransformerConfig | None = None,
) -> PositionMaps | None:
    """Returns the maps of positions, which are on the CPU; None if they have none. name: the name of the maps. model:
    the configuration of a trained model; None for untrained positions of the command's sizes."""
    length, tree = config.length, None
    if section.reads_trees:
        tree, paths_MD = _sentence(config)
        length = len(tree.words)
        position.check(length)
        position = position.of_batch(Packed(torch.zeros(length, dtype=torch.int64), (length,), {ANCESTORS: paths_MD}))
        if not isinstance(position, TreeDistance):
            tree = replace(tree, distances=None)
    elif isinstance(position, Learned):
        length = min(length, position.max_positions)
    sizes = config if model is None else model
    scores = position_scores(position, length, sizes.hidden_size, sizes.num_heads)
    if scores is None:
        return None
    note = _position_note(section, position, sizes, "the random initial ones" if model is None else "trained")
    return PositionMaps(name, scores, note, tree)


def _maps_of_kinds(config: InspectPositionsConfig) -> Iterator[PositionMaps]:
    known = names(GROUP)
    head_width, remainder = divmod(config.hidden_size, config.num_heads)
    if remainder or (head_width % 2 and "rotary" in config.kinds):
        required = "a whole, even number" if "rotary" in config.kinds else "a whole number"
        raise UserError(
            f"hidden_size={config.hidden_size} / num_heads={config.num_heads}, the width of a head, must be {required}",
            f"set hidden_size={16 * config.num_heads}",
        )
    sizes = PositionSizes(config.length, config.hidden_size, config.num_heads, head_width, config.causal)
    for kind in config.kinds:
        if kind not in known:
            close = of_value(GROUP, kind) or nearest(kind, known)
            raise UserError(
                f"kinds: {kind} is not one of {', '.join(known)}",
                f"did you mean {close}?" if close else "lmtool list model/positions",
            )
        torch.manual_seed(0)
        section = cast(PositionsConfig, Choice(GROUP).validate({"name": kind}))
        kind_sizes = replace(sizes, max_positions=MAX_TOKENS) if section.reads_trees else sizes
        maps = _maps(kind, section, build(section, kind_sizes), config)
        if maps is not None:
            yield maps


def _position_note(
    section: PositionsConfig, position: Position, sizes: InspectPositionsConfig | TransformerConfig, weights: str
) -> str:
    score = (
        "the score of a query and a key that are all ones"
        if position.scores
        else "the mean cosine of the rotations"
        if isinstance(position, Rotary)
        else "the cosine of two position vectors"
    )
    kind = type(section).model_fields["name"].description
    learned = next(position.parameters(), None) is not None
    return (
        f"{kind} Drawn: {score}; hidden_size={sizes.hidden_size}, num_heads={sizes.num_heads}. "
        f"{f'Its weights are {weights}.' if learned else 'Nothing is learned.'}"
    )


def _maps_of_checkpoints(config: InspectPositionsConfig) -> Iterator[PositionMaps]:
    device = select_device(config.device)
    for checkpoint in config.checkpoint:
        loaded = load(checkpoint, str(device), config.offline)
        backbone = loaded.model.parts.backbone
        stack = backbone.encoder if isinstance(backbone, EncoderDecoder) else backbone
        position, model = getattr(getattr(stack, "embed", None), "position", None), loaded.config
        maps: PositionMaps | None = None
        if isinstance(position, Position) and isinstance(model, TransformerConfig):
            maps = _maps(checkpoint, model.positions, position.cpu(), config, model)
        if maps is None:
            raise UserError(
                f"checkpoint={checkpoint}: the positions of model={model.name} cannot be drawn",
                "use a checkpoint with learned, concatenated, sinusoidal, rotary, t5, alibi, shaw or tree positions",
            )
        yield maps


# --- lmtool inspect word --------------------------------------------------------------------------------------------


def word(config: InspectWordConfig) -> list[JsonObject]:
    """Reads the sentences, prints and writes the page. Returns a row per checkpoint and layer."""
    sentences = [sentence.strip() for sentence in config.text.split("|") if sentence.strip()]
    if len(sentences) < 2:
        raise UserError("text= has one sentence, but two or more are compared", 'set text="SENTENCE | SENTENCE"')
    output, precision = Output(), select_precision(config.precision, select_device(config.device))
    similarities = []
    for checkpoint in config.checkpoint:
        loaded = load(checkpoint, str(precision.device), config.offline)
        states = HiddenStates(loaded.model.parts.backbone.eval(), precision)
        tokenizer = tokenizer_of(loaded, checkpoint)
        similarity = compare_word(states, tokenizer, text_format_of(loaded), sentences, config.word)
        same_word, other_words = similarity.same_W.tolist(), similarity.others_W.tolist()
        similarities.append(
            SimilarityByLayer(checkpoint, similarity.layers, same_word, other_words, similarity.similarity_WSS)
        )
    print_similarities(output, config.word, sentences, similarities)
    path = user_path(config.output)
    write_similarities(path, config.word, sentences, similarities)
    output.line(f"page: {path}")
    return [
        {"checkpoint": by_layer.name, "layer": layer, "same": same, "others": other}
        for by_layer in similarities
        for layer, same, other in zip(by_layer.layers, by_layer.same, by_layer.other_words, strict=True)
    ]
