"""How a checkpoint embeds texts: their layout, length, layers and pooling."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from lmtool.data.formats import layout_difference
from lmtool.errors import UserError
from lmtool.learners.representations.vectors import Embedder, HiddenStates, Pooling, SentenceModules, depth_of
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.weights.folders import HFFolder, hf_folder, read_settings
from lmtool.weights.padded_model import LoadedCheckpoint
from lmtool.weights.saved_model import form_of, format_of
from lmtool.weights.sentence_encoders import SentenceEncoder, refused, sentence_encoder

Layers = int | Literal["last", "all", "mean"]


def layout_of(loaded: LoadedCheckpoint) -> str:
    """The name of the format in which texts are read: as in training on a task, else as transformers reads them."""
    model = loaded.config
    if loaded.task is not None:
        return format_of(model, loaded.task)
    return model.sequence_form(None if model.transformers_form is None else "transformers").text_format


def longest_of(loaded: LoadedCheckpoint) -> int:
    """Tokens of the longest text that is read at a time: of a task as in training, else what the model can."""
    longest, saved = loaded.model.parts.backbone.longest_text, loaded.saved
    return min(longest, int(saved["max_length"])) if loaded.task is not None and "max_length" in saved else longest


def pooling_of(loaded: LoadedCheckpoint) -> tuple[Pooling, str]:
    """The pooling that a checkpoint stands for, and why: its task's head reads it; else the mean."""
    if loaded.task is not None and "pooling" in loaded.task:
        return form_of(loaded.config, loaded.task).pooling, "as its task reads a text"
    return "mean", "the checkpoint names none"


def tokenizer_of(loaded: LoadedCheckpoint, checkpoint: str) -> Tokenizer:
    """Its tokenizer. UserError where it has none."""
    if loaded.tokenizer is None:
        raise UserError(f"checkpoint={checkpoint} has no tokenizer", "use a folder with tokenizer.json")
    return loaded.tokenizer


def embedder(
    loaded: LoadedCheckpoint,
    checkpoint: str,
    layers: Layers,
    pooling: Pooling | Literal["auto"],
    batch_tokens: int,
    precision: Precision,
    offline: bool = False,
) -> tuple[Embedder, str]:
    """What turns texts into vectors with this checkpoint, and a line that says how. UserError where it has no such
    layer or pooling."""
    tokenizer, depth = tokenizer_of(loaded, checkpoint), depth_of(loaded.model.parts.backbone)
    known = ("auto", *get_args(Pooling))
    if pooling not in known:
        raise UserError(f"pooling={pooling}: one of {', '.join(known)}", "pooling=mean")
    numbers = _numbers(layers, depth)
    states = HiddenStates(loaded.model.parts.backbone, precision, numbers)
    published = hf_folder(checkpoint, offline) if pooling == "auto" else None
    encoder = None if published is None else sentence_encoder(published, offline)
    if published is not None and encoder is not None and layers == "last":
        return _of_sentences(loaded, states, published, encoder, batch_tokens, offline)
    why, notes = "", list[str]()
    if encoder is not None:
        pooling, why = encoder.task_fields(checkpoint)["pooling"], f"the checkpoint's {encoder.file}"
        notes = [f"layers={layers} is read without {name}" for name in encoder.extra_steps]
    if pooling == "auto":
        pooling, why = pooling_of(loaded)
    layout, longest = layout_of(loaded), longest_of(loaded)
    stated = f"layers={layers} of {depth} · pooling={pooling}{f' ({why})' if why else ''}"
    embeds = Embedder(states, tokenizer, layout, pooling, layers == "mean", longest, batch_tokens)
    return replace(embeds, notes=tuple(notes)), stated


def _of_sentences(
    loaded: LoadedCheckpoint,
    states: HiddenStates,
    published: HFFolder,
    encoder: SentenceEncoder,
    batch_tokens: int,
    offline: bool,
) -> tuple[Embedder, str]:
    """What gives the vectors of a sentence encoder, reading texts as sentence-transformers does, and a line that says
    how. UserError, naming it, for what lmtool does not do."""
    tokenizer, layout, model = tokenizer_of(loaded, published.checkpoint), layout_of(loaded), loaded.config
    tokenizer = tokenizer.parsing(not read_settings(published.path).get("split_special_tokens"))
    problem = layout_difference(tokenizer, layout)
    if problem is not None:
        raise refused(published, f"tokenizer.json lays out texts as {problem}")
    if model.architecture == "encoder_decoder" and model.token_states != "inputs":
        raise refused(published, f"model={model.name} is read behind its decoder")
    if encoder.lowercases and tokenizer.cleaned("ÀB") != tokenizer.cleaned("àb"):
        raise refused(published, "do_lower_case=true is not in its tokenizer.json")
    modules = SentenceModules(encoder, published, states.width, offline).to(states.precision.device)
    longest = min(longest_of(loaded), encoder.max_length or longest_of(loaded))
    notes = [f"of the prompts {', '.join(encoder.prompts)} none is put before the texts"] if encoder.prompts else []
    stated = f"layers=last of {states.depth} · pooling={' + '.join(encoder.modes)} (the checkpoint's {encoder.file})"
    stated += "".join(f" · {name}" for name in encoder.extra_steps)
    # The modules pool; the name is for the caller that asks whether there is a vector a text.
    embeds = Embedder(states, tokenizer, layout, "mean", False, longest, batch_tokens, modules)
    return replace(embeds, prompt=encoder.prompt, notes=tuple(notes)), stated


def _numbers(layers: object, depth: int) -> tuple[int, ...]:
    """The layers that are read."""
    if layers == "last":
        return (depth,)
    if layers in ("all", "mean"):
        return tuple(range(0 if layers == "all" else 1, depth + 1))
    if not isinstance(layers, int) or isinstance(layers, bool) or not 0 <= layers <= depth:
        raise UserError(
            f"layers={layers}: the model has {depth} layers, counted from 1; 0 is its embedding",
            f"layers=last, all, mean, or a number up to {depth}",
        )
    return (layers,)
