"""What makes a run fit that does not: overrides, each tried by planning the run with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lmtool.config.rules import broken
from lmtool.costs.plan_of_run import devices_of
from lmtool.reporting.plan import RunPlan
from lmtool.reporting.text import size
from lmtool.schema.run import RunConfig
from lmtool.training.configs import AdafactorConfig

# Devices that are tried.
_DEVICES = (2, 4, 8, 16, 32, 64, 128, 256)
_AGAIN = {"gradient_checkpointing": True}


def what_fits(config: RunConfig, planned: Callable[[RunConfig], RunPlan]) -> tuple[str, ...]:
    """Lines of overrides with which the run fits, what they cost and what it takes then: the least of each kind, and
    of the kinds that cost more than time only where no other does. planned: the plan of a configuration; empty where
    nothing that is tried fits."""
    lines = []
    for kinds in (_cheap(config), _dear(config)):
        for kind in kinds:
            for words, changes, costs in kind:
                other = config.model_copy(update=dict(changes))
                if _goes_together(other) and (plan := planned(other)).fits:
                    lines.append(f"{words}: {size(plan.needed_bytes)}{costs}")
                    break
        if lines:
            break
    return tuple(lines)


def _goes_together(config: RunConfig) -> bool:
    """Whether the rules over several keys let it be."""
    values = {key: getattr(config, key) for key in type(config).model_fields}
    return not list(broken(type(config), values, running=False))


Override = tuple[str, Mapping[str, Any], str]
"""Words, the values they set, what they cost."""


def _cheap(config: RunConfig) -> Iterator[Iterable[Override]]:
    """Smaller forwards, recomputed layers, both: from the least to the most of each kind."""
    smaller = list(_micro_batches(config))
    yield [(words, changes, ", the same result") for words, changes in smaller]
    if not config.gradient_checkpointing:
        yield [
            (
                f"gradient_checkpointing=true {words}".strip(),
                {**changes, **_AGAIN},
                ", the same result, a third more work",
            )
            for words, changes in [("", {}), *smaller]
        ]


def _dear(config: RunConfig) -> Iterator[Iterable[Override]]:
    """More devices, or an optimizer that keeps less, beside the smallest forwards."""
    words, least = [("", {}), *_micro_batches(config)][-1]
    words = f"gradient_checkpointing=true {words}".strip()
    yield [
        (
            f"devices={number} parallel=fsdp {words}",
            {**least, **_AGAIN, "devices": number, "parallel": "fsdp"},
            " a device",
        )
        for number in _DEVICES
        if number > devices_of(config)
    ]
    adafactor = {"optimizer": AdafactorConfig(lr=config.optimizer.lr)}
    yield [
        (
            f"optimizer=adafactor {words}",
            {**least, **_AGAIN, **adafactor},
            ", another optimizer with its own learning rates",
        )
    ]


def _micro_batches(config: RunConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Forwards of half the tokens, and half of that, down to one sequence."""
    tokens = config.micro_batch_tokens or config.batch_tokens or (config.batch_examples or 1) * config.max_length
    while (tokens := tokens // 2) >= config.max_length:
        yield f"micro_batch_tokens={tokens}", {"micro_batch_tokens": tokens}
