"""How deep a parameter stands in a model, by its uniform name: the head, the layers from the top down, the embeddings.

Of several stacks the later one stands above the earlier: the decoder of an encoder-decoder above its encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from lmtool.types import ParameterGroup, part_of

HEAD, EMBEDDINGS = "head", "embeddings"
_PARTS = ("backbone", "heads", "objective")


def levels(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of parameters, in the order of their model, by the level they stand at, from the top down: "head" (all
    that is no backbone; maybe empty), "layer 2", "layer 1" (with several stacks "decoder layer 1", ...), "embeddings".

    What stands in a stack, but in no layer of it (its final norm), belongs to its top layer; in a backbone without
    layers to the head. Tables of positions and virtual tokens belong to the embeddings.
    """
    head: list[str] = []
    embeddings: list[str] = []
    beside: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        path = name.split(".")
        if part_of(name) != "backbone":
            head.append(name)
        elif "embed" in path:
            embeddings.append(name)
        elif "layers" in path:
            at = path.index("layers")
            stacks.setdefault(".".join(path[:at]), {}).setdefault(int(path[at + 1]), []).append(name)
        else:
            beside.append(name)
    for name in beside:
        layers = next((stacks[stack] for stack in reversed(stacks) if name.startswith(f"{stack}.")), {0: head})
        layers[max(layers)].append(name)
    ordered = {HEAD: head}
    for stack in reversed(stacks):
        title = f"{stack.rpartition('.')[2]} layer" if len(stacks) > 1 else "layer"
        ordered |= {f"{title} {number + 1}": stacks[stack][number] for number in sorted(stacks[stack], reverse=True)}
    return ordered | ({EMBEDDINGS: embeddings} if embeddings else {})


def by_model(names: Iterable[str]) -> dict[str, list[str]]:
    """Uniform names of parameters by what stands before them: "" for the names of one model."""
    models: dict[str, list[str]] = {}
    for name in names:
        path = name.split(".")
        at = next((number for number, piece in enumerate(path) if piece in _PARTS), 0)
        prefix = "".join(f"{piece}." for piece in path[:at])
        models.setdefault(prefix, []).append(name.removeprefix(prefix))
    return models


def layer_decayed(groups: Sequence[ParameterGroup], names: Iterable[str], decay: float) -> list[ParameterGroup]:
    """The groups, cut by level, with learning rates that fall from the top down: the head's as it is, each level's
    `decay` times that of the level above it.

    names: of all parameters, also of those that do not learn; where several models learn together, each has a prefix of
    its own before the uniform names, and levels of its own. ELECTRA's paper (Clark et al. 2020, table
    7) says no more than this; its code leaves a step out below the head, so that there the top layer has decay^2
    (`n_layers + 2 - depth` in run_finetuning.py). ULMFiT (Howard and Ruder 2018, section 3.2) has 1/2.6.
    """
    if decay == 1:
        return list(groups)
    depths = {
        f"{prefix}{name}": depth
        for prefix, own in by_model(names).items()
        for depth, members in enumerate(levels(own).values())
        for name in members
    }
    cut = []
    for group in groups:
        of_depth: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group.parameters:
            of_depth.setdefault(depths[name], []).append((name, parameter))
        cut += [
            replace(group, parameters=members, learning_rate_scale=group.learning_rate_scale * decay**depth)
            for depth, members in sorted(of_depth.items())
        ]
    return cut
