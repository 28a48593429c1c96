"""A student that starts from layers of its teacher (Sanh et al. 2019, section 2, "Student initialization")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lmtool.errors import UserError
from lmtool.learners.base import BaseLearner
from lmtool.nn.configs import Side
from lmtool.nn.stack import Stack
from lmtool.types import part_of
from lmtool.weights.loading import load_into

_NONE = "give distill.initialize=none"


def start_from(student: BaseLearner, teacher: BaseLearner, origin: str, taken: Mapping[Side, tuple[int, ...]]) -> str:
    """Copy the embeddings of a teacher, these layers of its stacks (by side, one for each of the student's, counted
    from 1), their final norms, and the heads of the same names and shapes. Returns what the first screen says of it.

    What the student has alone (a table of segments, adapters) stays as it was drawn. UserError where the layers of the
    two are of different kinds, and where the teacher was tuned by added parameters, which no copy has.
    """
    if teacher.added:
        raise UserError(
            f"distill.initialize copies layers, and distill.teacher={origin} was tuned by parameters that were added "
            "to them",
            f"export it, which merges them, and give the folder as distill.teacher=; or {_NONE}",
        )
    own, its = student.state_dict(), teacher.state_dict()
    tensors = {name: tensor for name, tensor in own.items() if part_of(name) == "backbone"}
    sources = {name: name for name in tensors}
    for first, second in _layers(student, teacher, taken):
        sources |= {name: second + name.removeprefix(first) for name in tensors if name.startswith(first)}
    for name, source in sources.items():
        if source in its:
            tensors[name] = its[source]
    tensors |= {name: tensor for name, tensor in its.items() if name.startswith("heads.")}
    report = load_into(student, tensors, origin)
    layers = [", ".join(f"{own} = {its}" for own, its in enumerate(numbers, 1)) for numbers in taken.values()]
    heads = ", ".join(name for name in report.taken if name != "backbone")
    return f"embeddings; layers {'; '.join(layers)}" + (f"; {heads}" if heads else "")


def _layers(
    student: BaseLearner, teacher: BaseLearner, taken: Mapping[Side, tuple[int, ...]]
) -> Iterator[tuple[str, str]]:
    """What the names of a layer's tensors begin with, and of those that it is a copy of."""
    stacks = [
        {module.side: (name, module) for name, module in learner.named_modules() if isinstance(module, Stack)}
        for learner in (student, teacher)
    ]
    for side, numbers in taken.items():
        (first, own), (second, its) = (stacks_of[side] for stacks_of in stacks)
        pairs = zip(own.depth(), (list(its.depth())[number - 1] for number in numbers), strict=True)
        for layer, source in pairs:
            if type(layer) is not type(source):
                raise UserError(
                    f"distill.initialize: the student, model={student.backbone.config.name}, has layers of another "
                    f"kind than its teacher, model={teacher.backbone.config.name}",
                    _NONE,
                )
            places = [list(stack.layers).index(module) for stack, module in ((own, layer), (its, source))]
            yield f"{first}.layers.{places[0]}.", f"{second}.layers.{places[1]}."
