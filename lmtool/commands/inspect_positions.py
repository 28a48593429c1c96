"""`lmtool inspect positions`: draws the effect of each kind of positions on the attention scores of equal words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import torch

from lmtool.config.nearest import nearest
from lmtool.config.saved import JsonObject
from lmtool.config.tables import Choice, build, names
from lmtool.errors import UserError
from lmtool.learners.representations.attention import position_scores
from lmtool.models.configs import TransformerConfig
from lmtool.models.encoder_decoder import EncoderDecoder
from lmtool.nn.configs import PositionsConfig
from lmtool.nn.positions import Position, PositionSizes
from lmtool.reporting.console import Output
from lmtool.reporting.looks import PositionMaps, print_position_maps, write_position_maps
from lmtool.resolver.schema.use import InspectPositionsConfig
from lmtool.training.precision import select_device
from lmtool.weights.padded_model import load

GROUP = "model/positions"


def run(config: InspectPositionsConfig) -> list[JsonObject]:
    """Prints the maps and writes the page. Returns the name and number of maps of each kind."""
    output = Output()
    maps = [*_new(config), *_of_checkpoints(config)]
    print_position_maps(output, maps)
    path = Path(config.output).expanduser()
    write_position_maps(path, maps)
    output.line(f"page: {path}")
    return [{"positions": each.name, "maps": len(each.scores)} for each in maps]


def _new(config: InspectPositionsConfig) -> Iterator[PositionMaps]:
    """The kinds in the configuration, with random weights."""
    known = names(GROUP)
    head, left = divmod(config.hidden_size, config.num_heads)
    if left or (head % 2 and "rotary" in config.kinds):
        raise UserError(
            f"hidden_size={config.hidden_size} is not {config.num_heads} heads of one even width",
            f"set hidden_size={16 * config.num_heads}",
        )
    sizes = PositionSizes(config.length, config.hidden_size, config.num_heads, head, config.causal)
    for kind in config.kinds:
        if kind not in known:
            close = nearest(kind, known)
            raise UserError(
                f"kinds: {kind} is not one of {', '.join(known)}",
                f"did you mean {close}?" if close else "lmtool list model/positions",
            )
        torch.manual_seed(0)
        section = cast(PositionsConfig, Choice(GROUP).validate({"name": kind}))
        position: Position = build(section, sizes)
        scores = position_scores(position, config.length, config.hidden_size, config.num_heads)
        if scores is not None:
            yield PositionMaps(kind, scores)


def _of_checkpoints(config: InspectPositionsConfig) -> Iterator[PositionMaps]:
    device = select_device(config.device)
    for checkpoint in config.checkpoint:
        loaded = load(checkpoint, str(device), config.offline)
        backbone = loaded.model.parts.backbone
        stack = backbone.encoder if isinstance(backbone, EncoderDecoder) else backbone
        position, model = getattr(getattr(stack, "embed", None), "position", None), loaded.config
        length = min(config.length, getattr(position, "max_positions", config.length))
        scores: np.ndarray | None = None
        if isinstance(position, Position) and isinstance(model, TransformerConfig):
            scores = position_scores(position.cpu(), length, model.hidden_size, model.num_heads)
        if scores is None:
            raise UserError(
                f"checkpoint={checkpoint}: the positions of model={model.name} cannot be drawn",
                f"use {', '.join(config.kinds) or 'learned, sinusoidal, rotary, t5, alibi or shaw'} positions",
            )
        yield PositionMaps(checkpoint, scores)
