"""`lmtool inspect word`: the similarity of a word's vectors in several sentences, in every layer of checkpoints."""

from __future__ import annotations

from pathlib import Path

from lmtool.config.saved import JsonObject
from lmtool.errors import UserError
from lmtool.learners.representations.reading import text_format_of, tokenizer_of
from lmtool.learners.representations.vectors import HiddenStates, word_vectors
from lmtool.reporting.console import Output
from lmtool.reporting.looks import Similar, print_similar, write_similar
from lmtool.resolver.schema.use import InspectWordConfig
from lmtool.training.precision import select_device, select_precision
from lmtool.weights.padded_model import load


def run(config: InspectWordConfig) -> list[JsonObject]:
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
        vectors = word_vectors(states, tokenizer, text_format_of(loaded), sentences, config.word)
        same, others = vectors.same_W.tolist(), vectors.others_W.tolist()
        similarities.append(Similar(checkpoint, vectors.layers, same, others, vectors.similarity_WSS))
    print_similar(output, config.word, sentences, similarities)
    path = Path(config.output).expanduser()
    write_similar(path, config.word, sentences, similarities)
    output.line(f"page: {path}")
    return [
        {"checkpoint": each.name, "layer": layer, "same": same, "others": other}
        for each in similarities
        for layer, same, other in zip(each.layers, each.same, each.other_words, strict=True)
    ]
