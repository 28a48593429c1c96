"""`lmtool inspect tokenizer`: compares the tokens of a text in several vocabularies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from lmtool.config.checkpoint import find
from lmtool.config.saved import JsonObject
from lmtool.config.tables import Choice
from lmtool.data.sources import open_source
from lmtool.data.vocabulary import trained_tokenizer
from lmtool.reporting.console import Output
from lmtool.reporting.looks import Tokenization, print_tokenizations, write_tokenizations
from lmtool.resolver.schema.use import InspectTokenizerConfig
from lmtool.tokenizers.configs import TokenizerConfig
from lmtool.tokenizers.folders import has_tokenizer
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.folders import hf_folder


def run(config: InspectTokenizerConfig) -> list[JsonObject]:
    """Tokenizes, prints and writes the page. Returns a row per vocabulary."""
    output = Output()
    tokenizations = [_tokenized(name, tokenizer, config.text) for name, tokenizer in _tokenizers(config, output)]
    print_tokenizations(output, config.text, tokenizations)
    path = Path(config.output).expanduser()
    write_tokenizations(path, config.text, tokenizations)
    output.line(f"page: {path}")
    return [tokenization.row for tokenization in tokenizations]


def _tokenizers(config: InspectTokenizerConfig, output: Output) -> Iterator[tuple[str, Tokenizer]]:
    """Tokenizers by name: each kind, trained on the same text, then those of checkpoints."""
    if config.kinds:
        source = open_source(config.data, config.cache_dir, output.stage, config.offline)
        for kind in config.kinds:
            section = cast(TokenizerConfig, Choice("tokenizer").validate({"name": kind}))
            yield kind, trained_tokenizer(section, source, config.vocab_size, config.cache_dir, output.stage)
    for checkpoint in config.checkpoint:
        folder = Path(checkpoint).expanduser()
        if not has_tokenizer(folder):
            published = hf_folder(checkpoint, config.offline)
            folder = find(checkpoint) if published is None else published.path
        yield checkpoint, Tokenizer.load(folder)


def _tokenized(name: str, tokenizer: Tokenizer, text: str) -> Tokenization:
    ids = tokenizer.encode(text).tolist()
    unknown = tokenizer.roles.get("unk")
    return Tokenization(
        name,
        tokenizer.vocab_size,
        tuple(tokenizer.readable(ids)),
        tuple(number for number, token in enumerate(ids) if token == unknown),
        tokenizer.decode(ids),
    )
