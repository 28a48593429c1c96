"""Builds the embedder of a checkpoint: text format, maximum length, layers and pooling."""

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
from lmtool.weights.saved_model import sequence_form_of, task_text_format
from lmtool.weights.sentence_encoders import SentenceEncoder, sentence_encoder, unsupported_error

Layers = int | Literal["last", "all", "mean"]


def text_format_of(loaded: LoadedCheckpoint) -> str:
    """Returns the name of a checkpoint's text format: the format of its task, or without a task the format that
    transformers uses."""
    model = loaded.config
    if loaded.task is not None:
        return task_text_format(model, loaded.task)
    return model.sequence_form(None if model.transformers_form is None else "transformers").text_format


def max_length_of(loaded: LoadedCheckpoint) -> int:
    """Returns the maximum number of tokens of a text: as in the training of the checkpoint's task, or without a task
    the maximum of the model."""
    longest, saved = loaded.model.parts.backbone.longest_text, loaded.saved
    return min(longest, int(saved["max_length"])) if loaded.task is not None and "max_length" in saved else longest


def pooling_of(loaded: LoadedCheckpoint) -> tuple[Pooling, str]:
    """Returns the pooling of a checkpoint's task, or the mean if there is none; and the reason as text."""
    if loaded.task is not None and "pooling" in loaded.task:
        return sequence_form_of(loaded.config, loaded.task).pooling, "as in its task"
    return "mean", "the checkpoint names none"


def tokenizer_of(loaded: LoadedCheckpoint, checkpoint: str) -> Tokenizer:
    """Returns the tokenizer of a checkpoint. Raises UserError if it has none. checkpoint: its name, for the message."""
    if loaded.tokenizer is None:
        raise UserError(f"checkpoint={checkpoint} has no tokenizer", "use a checkpoint whose folder has tokenizer.json")
    return loaded.tokenizer


def embedder_of(
    loaded: LoadedCheckpoint,
    checkpoint: str,
    layers: Layers,
    pooling: Pooling | Literal["auto"],
    batch_tokens: int,
    precision: Precision,
    offline: bool = False,
) -> tuple[Embedder, str]:
    """Builds the embedder of a checkpoint; also returns a line of text that describes it.

    checkpoint: as the user named it. layers: the number of a layer (0 is the embedding), the last layer, all layers, or
    the mean of all layers. pooling: how the states of a text's tokens become one vector; auto means as the checkpoint
    prescribes. batch_tokens: maximum tokens of a forward. Raises UserError if the layer or the pooling is invalid.
    """
    tokenizer, depth = tokenizer_of(loaded, checkpoint), depth_of(loaded.model.parts.backbone)
    allowed = ("auto", *get_args(Pooling))
    if pooling not in allowed:
        raise UserError(f"pooling={pooling} is not one of {', '.join(allowed)}", "set pooling=mean")
    states = HiddenStates(loaded.model.parts.backbone, precision, _layer_numbers(layers, depth))
    published = hf_folder(checkpoint, offline) if pooling == "auto" else None
    encoder = None if published is None else sentence_encoder(published, offline)
    if published is not None and encoder is not None and layers == "last":
        return _sentence_embedder(loaded, states, published, encoder, batch_tokens, offline)
    reason, notes = "", list[str]()
    if encoder is not None:
        pooling, reason = encoder.task_fields(checkpoint)["pooling"], f"the checkpoint's {encoder.file}"
        # The modules of a sentence encoder apply to its last layer only.
        notes = [f"layers={layers} omits {name}" for name in encoder.extra_steps]
    if pooling == "auto":
        pooling, reason = pooling_of(loaded)
    format_name, longest = text_format_of(loaded), max_length_of(loaded)
    description = f"layers={layers} of {depth} · pooling={pooling}{f' ({reason})' if reason else ''}"
    embedder = Embedder(states, tokenizer, format_name, pooling, layers == "mean", longest, batch_tokens)
    return replace(embedder, notes=tuple(notes)), description


def _sentence_embedder(
    loaded: LoadedCheckpoint,
    states: HiddenStates,
    published: HFFolder,
    encoder: SentenceEncoder,
    batch_tokens: int,
    offline: bool,
) -> tuple[Embedder, str]:
    tokenizer, format_name = tokenizer_of(loaded, published.checkpoint), text_format_of(loaded)
    model = loaded.config
    settings = read_settings(published.path)
    tokenizer = tokenizer.with_parsing(not settings.get("split_special_tokens"))
    problem = layout_difference(tokenizer, format_name)
    if problem is not None:
        raise unsupported_error(published, f"tokenizer.json formats texts as {problem}")
    if model.architecture == "encoder_decoder" and model.token_states != "inputs":
        raise unsupported_error(published, f"states come from the decoder of model={model.name}")
    if encoder.lowercases and tokenizer.normalize("ÀB") != tokenizer.normalize("àb"):
        raise unsupported_error(published, "do_lower_case=true is not in its tokenizer.json")
    modules = SentenceModules(encoder, published, states.width, offline).to(states.precision.device)
    longest = min(max_length_of(loaded), encoder.max_length or max_length_of(loaded))
    notes = [f"the prompts {', '.join(encoder.prompts)} are not used"] if encoder.prompts else []
    if settings.get("padding_side") == "left" and model.has_limited_positions:
        notes.append(
            "its tokenizer pads on the left, which may shift the positions of a text: sentence-transformers then gives "
            "a text that it pads in a batch another vector; lmtool gives the vector of the text alone"
        )
    description = (
        f"layers=last of {states.depth} · pooling={' + '.join(encoder.modes)} (the checkpoint's {encoder.file})"
    )
    description += "".join(f" · {name}" for name in encoder.extra_steps)
    # The modules do the pooling; "mean" only says that there is one vector per text.
    embedder = Embedder(states, tokenizer, format_name, "mean", False, longest, batch_tokens, modules)
    return replace(embedder, prompt=encoder.prompt, notes=tuple(notes)), description


def _layer_numbers(layers: object, depth: int) -> tuple[int, ...]:
    if layers == "last":
        return (depth,)
    if layers in ("all", "mean"):
        return tuple(range(0 if layers == "all" else 1, depth + 1))
    if not isinstance(layers, int) or isinstance(layers, bool) or not 0 <= layers <= depth:
        raise UserError(
            f"layers={layers} is not a layer: the model has layers 1 to {depth}, and 0 is its embedding",
            f"set layers=last, all, mean, or a number up to {depth}",
        )
    return (layers,)
