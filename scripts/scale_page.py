"""The numbers of scale.py as the tables and values of `docs/scale.md`, whose text is scale_page.md."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import scale

from lmtool.data.configs import TextConfig
from lmtool.reporting.text import count, duration, flops, percent, size
from lmtool.training.devices import DEVICES, NETWORK, UTILISATION

_WORDS = {"gpt_xl": "a decoder of 1.56 B parameters (`model=gpt_xl`, length 2048)", "bert": "BERT base, length 512"}


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def both(said: dict[str, Any], label: str, word: Any) -> list[str]:
    return [label, *(word(said[name]) for name in scale.RUNS)]


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def page(said: dict[str, Any]) -> str:
    """The whole text."""
    heads = ["", *(_WORDS[name] for name in scale.RUNS)]
    ordering, device = said["measured"]["ordering"], DEVICES[scale.DEVICE]
    low, high = (percent(share) for share in UTILISATION)
    rows_of = {
        "run": [
            both(said, "FLOPs per token", lambda own: flops(own["plan"].flops_per_token)),
            both(said, "total FLOPs", lambda own: f"{own['plan'].flops:.2e}"),
            both(said, "steps of 2,097,152 tokens", lambda own: count(own["plan"].steps)),
            both(said, "step time", lambda own: " to ".join(milliseconds(each) for each in own["plan"].step_seconds)),
            both(said, "days", lambda own: f"{own['low_days']:.2g} to {own['high_days']:.2g}"),
            both(said, "memory per GPU, ddp", lambda own: size(own["plan"].needed_bytes)),
            both(
                said, "weights, gradients and optimizer in it",
                lambda own: size(sum(own["plan"].memory_bytes[part] for part in ("weights", "gradients", "optimizer"))),
            ),
        ],
        "data": [
            both(said, "examples per epoch", lambda own: count(round(own["examples"]))),
            both(said, "token store, 2 bytes per token and 8 per document", lambda own: size(own["store"])),
            both(said, "reads per node, one example each", lambda own: f"{own['reads']:,.0f} per second"),
            both(said, "the same in bytes", lambda own: f"{size(own['reads'] * own['length'] * 2)}/s"),
            both(said, "time to plan an epoch, in every process", lambda own: duration(own["plan_seconds"])),
            both(said, "memory of the plan per process", lambda own: size(own["plan_stays"])),
            both(said, "peak memory while planning", lambda own: size(own["plan_most"])),
            both(said, "peak memory of the 8 processes of a node", lambda own: size(8 * own["plan_most"])),
            both(said, "tokens at which the plans of 8 processes fill 2 TB", lambda own: f"{own['lasts_tokens']:.1e}"),
            both(said, "time to order a step", lambda own: milliseconds(own["order_seconds"])),
            both(
                said, "origin of a step's examples, chi-square (chance: 0.91 to 1.09)",
                lambda own: f"{ordering[str(own['length'])]['chi_square']:.2f}",
            ),
            both(
                said, "largest of 64 shares / mean share, documents of any length",
                lambda own: f"{ordering[str(own['length'])]['spread']:.3f}",
            ),
        ],
        "faults": [
            both(said, "checkpoint", lambda own: size(own["plan"].checkpoint_bytes)),
            both(said, "written and hashed by one process", lambda own: duration(own["full_save"])),
            both(said, "if each process wrote its shard", lambda own: milliseconds(own["shard_save"])),
            both(said, "best interval, one writer", lambda own: duration(3600 * own["interval"])),
            both(said, "best interval, if all wrote", lambda own: duration(3600 * own["interval_sharded"])),
            both(said, "start of the run, and after each failure", lambda own: duration(own["start"])),
            both(said, "hashing of the store in it", lambda own: duration(own["store"] / scale.SHA256)),
            both(said, "time lost, one writer", lambda own: percent(own["lost"])),
            both(said, "time lost, if all wrote", lambda own: percent(own["lost_sharded"])),
            both(said, "time lost, one writer, ten times the failures", lambda own: percent(own["lost_ten"])),
        ],
        "traffic": [
            both(said, "gradients sent per GPU and step (ddp, fp32)", lambda own: size(own["gradient_bytes"])),
            both(said, f"at {size(NETWORK)}/s between nodes", lambda own: milliseconds(own["crossing_seconds"])),
            both(said, "fsdp: weights 2x, gradients 1x per forward pass", lambda own: milliseconds(own["sharded"])),
            both(said, "forward passes per GPU and step", lambda own: str(own["forwards"])),
            both(said, "messages of the loop over gloo", lambda own: milliseconds(own["message_seconds"])),
            both(
                said, "share of these messages in a step",
                lambda own: " to ".join(
                    percent(own["message_seconds"] / each) for each in reversed(own["plan"].step_seconds)
                ),
            ),
        ],
    }  # fmt: skip
    tables = {name: table(heads, rows) for name, rows in rows_of.items()}
    small, large = said["measured"]["planning"]
    held_out = TextConfig.model_fields["validation_fraction"].default
    assert all(own["distinct"] for own in ordering.values())
    values = {
        "gpus": str(scale.GPUS),
        "nodes": str(scale.NODES),
        "low": low,
        "high": high,
        "rate": flops(device.bf16 or 0),
        "small": count(small["tokens"]),
        "large": count(large["tokens"]),
        "write": size(scale.WRITE),
        "read": size(scale.READ),
        "sha256": size(scale.SHA256),
        "message": f"{1e6 * scale.MESSAGE:.0f}",
        "document": f"{scale.DOCUMENT:,}",
        "network": size(NETWORK),
        "words": " ".join(scale.RUNS["gpt_xl"]),
        "more_words": " ".join(scale.EXTRA["gpt_xl"]),
        "tokens": str(scale.TOKENS),
        "device": scale.DEVICE,
        "store": size(said["gpt_xl"]["store"]),
        "gpu_hours": count(round(said["gpu_hours"])),
        "failure_hours": count(round(said["failure_hours"])),
        "failures": f"{said['failures']:.2f}",
        "ten_failures": f"{10 * said['failures']:.1f}",
        "others": str(scale.GPUS - 1),
        "held_out": percent(held_out),
        "held_out_tokens": f"{held_out * scale.TOKENS:.0e}",
        "evaluation": percent(10 * held_out / 3),
        "hashing": duration(said["gpt_xl"]["store"] / scale.SHA256),
        "example_bytes": f"{said['grown']['most']:.0f}",
        "node_plan": size(8 * said["bert"]["plan_most"]),
        "message_share": percent(said["bert"]["message_seconds"] / said["bert"]["plan"].step_seconds[0]),
    }
    text = (scale.HERE / "scale_page.md").read_text(encoding="utf-8")
    return "\n\n".join(_wrapped(block) for block in text.format(**tables, **values).split("\n\n"))


def _wrapped(block: str) -> str:
    """A paragraph, or the items of a list, at the length of a line; headings and tables as they are."""
    if block.lstrip().startswith(("#", "|")):
        return block
    items = re.split(r"\n(?=- |\d+\. )", block.strip())
    ends = "\n" if block.endswith("\n") else ""
    wrapped = []
    for item in items:
        mark = re.match(r"(- |\d+\. )?", item)
        indent = " " * len(mark.group()) if mark else ""
        wrapped.append(
            textwrap.fill(
                " ".join(item.split()), 118, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
            )
        )
    return "\n".join(wrapped) + ends
