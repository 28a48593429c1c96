"""How a checkpoint reads texts to be turned into vectors: their layout, length, layers and pooling."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lmtool.errors import UserError
from lmtool.representations.hidden import HiddenStates, depth_of
from lmtool.representations.vectors import Embedder, Pooling
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.training.precision import Precision
from lmtool.weights.folders import published_folder
from lmtool.weights.heads import form_of, format_of
from lmtool.weights.load import Loaded
from lmtool.weights.sentence_encoders import sentence_pooling

Layers = int | Literal["last", "all", "mean"]


def layout_of(loaded: Loaded) -> str:
    """The name of the format in which texts are read: as in training on a task, else as transformers reads them."""
    model = loaded.config
    if loaded.task is not None:
        return format_of(model, loaded.task)
    return model.sequence_form(None if model.transformers_form is None else "transformers").text_format


def longest_of(loaded: Loaded) -> int:
    """Tokens of the longest text that is read at a time: of a task as in training, else what the model can."""
    longest, saved = loaded.model.parts.backbone.longest_text, loaded.saved
    return min(longest, int(saved["max_length"])) if loaded.task is not None and "max_length" in saved else longest


def pooling_of(loaded: Loaded, checkpoint: str, offline: bool) -> tuple[Pooling, str]:
    """The pooling that a checkpoint stands for, and why: what a sentence encoder's folder says, or its task's head
    reads; else the mean."""
    published = published_folder(checkpoint, offline)
    stated = None if published is None else sentence_pooling(published, offline)
    if stated is not None:
        fields, file = stated
        return fields["pooling"], f"the checkpoint's {file}"
    if loaded.task is not None and "pooling" in loaded.task:
        return form_of(loaded.config, loaded.task).place, "as its task reads a text"
    return "mean", "the checkpoint names none"


def tokenizer_of(loaded: Loaded, checkpoint: str) -> Tokenizer:
    """Its tokenizer. UserError where it has none."""
    if loaded.tokenizer is None:
        raise UserError(f"checkpoint={checkpoint} has no tokenizer", "give a folder with tokenizer.json")
    return loaded.tokenizer


def embedder(
    loaded: Loaded,
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
    why = ""
    if pooling == "auto":
        pooling, why = pooling_of(loaded, checkpoint, offline)
    states = HiddenStates(loaded.model.parts.backbone, precision, numbers)
    layout, longest = layout_of(loaded), longest_of(loaded)
    stated = f"layers={layers} of {depth} · pooling={pooling}{f' ({why})' if why else ''}"
    return Embedder(states, tokenizer, layout, pooling, layers == "mean", longest, batch_tokens), stated


def _numbers(layers: Any, depth: int) -> tuple[int, ...]:
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
