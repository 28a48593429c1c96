"""Compute the needs of a run of 10^12 tokens on 64 GPUs: the tables of docs/scale.md, and the numbers in its text.

    python scripts/scale.py                               compute both from the plan and from scripts/scale.json: writes
                                                          the tables, and lists numbers that the text lacks
    python scripts/scale.py --measure scripts/scale.json  the planner, the order, the shares and one rank: minutes

Memory, FLOPs and time come from `lmtool plan`. The order of the examples and the fractions of the ranks are computed at
full size. Planning an epoch is measured in 8 processes at 10^9 and 4 * 10^9 tokens, and extrapolated. Single ranks of
64 run at full size, through torch's fake process group.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen, check_output
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import ROOT

from lmtool import random_streams
from lmtool.data.configs import TextConfig
from lmtool.data.loader import PackedLoader, assign
from lmtool.data.shared import UNSHARED, ArrayCache
from lmtool.data.store import TokenStore
from lmtool.objectives.examples.language import CausalWindows
from lmtool.reporting.text import count, duration, flops, percent, size
from lmtool.training.devices import DEVICES, NETWORK, NODE, UTILISATION

PAGE, MEASURED = ROOT / "docs" / "scale.md", ROOT / "scripts" / "scale.json"
TOKENS, GPUS, DEVICE = 10**12, 64, "h100"
NODES, WEEK = GPUS // NODE, 7 * 24.0
DOCUMENT = 1000  # tokens, mean: web text
# A step has two million tokens.
RUNS = {
    "gpt_xl": ["model=gpt_xl", "model.max_positions=2048", "max_length=2048", "batch_tokens=2097152"],
    "bert": ["model=bert", "max_length=512", "batch_tokens=2097152"],
}
EXTRA = {"gpt_xl": ["micro_batch_tokens=8192"], "bert": ["objective.pairs=none"]}
# Published: Grattafiori et al. 2024 (The Llama 3 Herd of Models), section 3.3.4, table 5: 419 unexpected interruptions
# in 54 days of 16,384 H100s.
GPU_HOURS_A_FAILURE = 16384 * 54 * 24 / 419
# Assumptions, which the page states: bytes a second of one process that writes to a shared disk, of a node that reads
# it, and of sha256 on one core; seconds of a message over TCP within a data center.
WRITE, READ, SHA256, MESSAGE = 1e9, 2e9, 1.2e9, 50e-6
# Bytes of memory that a host with 8 GPUs may use for plans of the data.
HOST = 2e12
# Ranks that run at full size, one at a time. With ddp, each would hold all of gpt_xl twice.
ALONE = {"gpt_xl fsdp": (0,), "bert fsdp": (0, GPUS - 1), "bert ddp": (1,)}
# Gathers over gloo in a step: the number of predictions; the clock and signals.
GATHERS = 2


def _learner(name: str) -> tuple[Any, Any]:
    """The configuration of a run, and its learner on the meta device."""
    import torch

    from lmtool.cli import main as cli
    from lmtool.weights.assemble import assemble

    words = [*RUNS[name], *EXTRA[name], f"devices={GPUS}", f"max_tokens={TOKENS}", "max_steps=null"]
    config = cli.configuration("pretrain", cli.parse(words), running=False)
    with torch.device("meta"):
        return config, assemble(config, None)[0]


def planned(name: str) -> Any:
    """The plan of a run on the published device, by what `lmtool plan` computes."""
    from lmtool.commands.plan import _assumed
    from lmtool.costs.plan_of_run import plan_of
    from lmtool.costs.rate import planned_device

    config, learner = _learner(name)
    place = planned_device(config, DEVICE)
    return plan_of(config, learner, _assumed(config, 0, config.objective.predicted_fraction), place)


# --- what is measured ------------------------------------------------------------------------------------------------


class _Tokenizer:
    """The part of a tokenizer that the planner of windows uses."""

    def role(self, name: str) -> int:
        return 0


def _store(folder: Path, tokens: int, cache: ArrayCache = UNSHARED) -> TokenStore:
    """A store of that many tokens: one id, broadcast, and offsets mapped from a file."""
    file, documents, none = folder / "offsets.npy", tokens // DOCUMENT, np.zeros(1, dtype=np.int64)
    if not file.exists():
        np.save(file, np.arange(documents + 1, dtype=np.int64) * DOCUMENT)
    offsets = np.load(file, mmap_mode="r").view(np.ndarray)
    ids = np.broadcast_to(np.uint16(7), (tokens,))
    return TokenStore(ids, offsets, none, none, {"tokens": tokens, "documents": documents}, folder, cache=cache)


def hold(folder: Path, tokens: int, length: int, processes: int) -> None:
    """One of the processes of a node: says that it is here, plans and says so, and holds the plan until it is told to
    end."""
    store = _store(folder, tokens, ArrayCache(folder / "plans", "0" * 64, processes))
    print("here", flush=True)
    sys.stdin.readline()
    began = time.process_time()
    loader = PackedLoader(CausalWindows(_Tokenizer(), store, length, "joined", "train"), 0, None, 2**21)  # type: ignore[arg-type]
    metadata = loader.metadata()
    first = next(loader.read(1))["start"]
    print(json.dumps([metadata["examples"], first[:8].tolist(), time.process_time() - began]), flush=True)
    sys.stdin.readline()


def node_memory(tokens: int, length: int, processes: int = NODE) -> dict[str, float]:
    """Bytes that the processes of a node hold together of a plan, beyond what they hold before it: at the end and at
    most, the proportional set size of each (a page that several processes map counts once), and CPU
    seconds of the one that plans."""

    def sizes() -> int:
        rollups = (Path(f"/proc/{child.pid}/smaps_rollup").read_text() for child in children)
        return sum(1024 * int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])
                   for rollup in rollups)  # fmt: skip

    with TemporaryDirectory() as name:
        _store(Path(name), tokens)
        command = [sys.executable, __file__, "--hold", name, str(tokens), str(length), str(processes)]
        children = [Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(processes)]
        assert all(child.stdout is not None and child.stdout.readline() == "here\n" for child in children)
        before, most = sizes(), 0
        for child in children:
            print(file=child.stdin, flush=True)
        with ThreadPoolExecutor(processes) as pool:
            answers = [pool.submit(child.stdout.readline) for child in children if child.stdout is not None]
            while not all(answer.done() for answer in answers):
                most = max(most, sizes())
                time.sleep(0.05)
        after, results = sizes(), [json.loads(answer.result()) for answer in answers]
        assert all(result[:2] == results[0][:2] for result in results)
        for child in children:
            child.communicate("\n")
    seconds = max(result[2] for result in results)
    return {"examples": results[0][0], "processes": processes, "seconds": seconds, "held": after - before,
            "most": max(most, after) - before}  # fmt: skip


def one_rank(name: str, parallel: str, rank: int) -> dict[str, Any]:
    """One of 64 processes of a run at its full size, alone, through torch's fake process group: bytes of the weights
    that it holds; calls and bytes of the collectives of one forward with its backward, and of a checkpoint; messages
    between the hosts in addition to the clock's. The weights are all the same number, and a batch has eight tokens."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lmtool.config.tables import build
    from lmtool.runs.checkpoints import gathered
    from lmtool.training import engine
    from lmtool.training.optimizers import state_tensors
    from lmtool.training.precision import FP32_CPU
    from lmtool.training.step import gradients
    from lmtool.types import Batch, Packed, Step, Target
    from tests.training.fake_ranks import SIZE, Everyone, Traffic, at_once

    assert SIZE == GPUS
    cpu, group = torch.device("cpu"), Everyone(rank)
    config, learner = _learner(name)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SIZE)
    if parallel == "fsdp":
        engine.shard(learner, cpu, group)  # type: ignore[arg-type]
    learner.to_empty(device=cpu)
    with torch.no_grad():
        for tensor in (*learner.parameters(), *learner.buffers()):
            tensor.fill_(0.01 if tensor.is_floating_point() else 0)
    tokens, at = torch.arange(8), torch.arange(7)
    batch = Batch(Packed(tokens, (8,)), {config.objective.name: Target(tokens[1:], at=at)}, tokens[:1], at[:1].int())
    engine._summed = at_once  # type: ignore[assignment]  # the fake group leaves the future of its work empty
    with Traffic() as step:
        gradients(engine.engine_for(learner, parallel, group), Step([batch], {}, 0.0), 1, 0, FP32_CPU)  # type: ignore[arg-type]
    answer = {"held": sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in learner.parameters()),
              "step": {call: [number, step.bytes[call]] for call, number in step.calls.items()},
              "messages": group.messages}  # fmt: skip
    if parallel == "fsdp":
        optimizer = build(config.optimizer, learner.parameter_groups())
        optimizer.step()
        named = dict(learner.named_parameters())
        with Traffic() as saving:
            for tensors in (learner.state_dict(keep_vars=True), state_tensors(optimizer, named)):
                gathered(tensors, keeps=False)
        answer["checkpoint"] = {call: [number, saving.bytes[call]] for call, number in saving.calls.items()}
    return answer


def in_process(name: str, parallel: str, rank: int) -> dict[str, Any]:
    """`one_rank` in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--rank", name, parallel, str(rank)]
    answer: dict[str, Any] = json.loads(check_output(command, text=True))
    return answer


def ordering(length: int, steps: int = 200) -> dict[str, float]:
    """The order of all examples of 10^12 tokens, computed where it is read: some steps of it. chi_square: of where in
    the text their examples come from, a degree of freedom (1 for chance). spread: largest share of tokens over the mean
    share of the processes, of documents of any length up to `length`, worst of the steps."""
    examples, batch = TOKENS // length, 2**21 // length
    order = random_streams.Permutation(examples, 0, "order", 0)
    began = time.perf_counter()
    first = np.random.default_rng(0).integers(0, examples // batch, steps)
    taken = [order(np.arange(step * batch, (step + 1) * batch)) for step in first]
    seconds = (time.perf_counter() - began) / (steps * batch)
    bins = np.bincount(np.concatenate(taken) * 1000 // examples, minlength=1000)
    expected = steps * batch / 1000
    worst = 0.0
    for number, rows in enumerate(taken[:20]):
        drawn = np.random.default_rng(number).integers(16, length + 1, len(rows))
        fractions = [int(drawn[own].sum()) for own in assign(drawn, GPUS)]
        assert sum(fractions) == drawn.sum()
        worst = max(worst, max(fractions) * GPUS / drawn.sum())
    return {
        "seconds_an_example": seconds,
        "distinct": float(len(np.unique(np.concatenate(taken))) == len(np.unique(first)) * batch),
        "chi_square": float(((bins - expected) ** 2 / expected).sum() / 999),
        "spread": worst,
    }


def measure() -> dict[str, Any]:
    """Runs all measurements, in some minutes and 3 GB."""
    block = bytes(1 << 26)
    began = time.perf_counter()
    hashlib.sha256(block).hexdigest()
    hashed = len(block) / (time.perf_counter() - began)
    return {
        "node": {str(length): [node_memory(tokens, length) for tokens in (10**9, 4 * 10**9)] for length in (2048, 512)},
        "ranks": {
            name: {str(rank): in_process(*name.split(), rank) for rank in ranks} for name, ranks in ALONE.items()
        },
        "ordering": {str(length): ordering(length) for length in (2048, 512)},
        "sha256": hashed,
    }


# --- what follows ----------------------------------------------------------------------------------------------------


def best_interval(save_seconds: float, failure_hours: float) -> float:
    """Hours between checkpoints that lose least: sqrt(2 C M) (Young 1974), with Daly's (2006) first correction."""
    save = save_seconds / 3600
    return math.sqrt(2 * save * failure_hours) * (1 + math.sqrt(save / (2 * failure_hours)) / 3) - save


def lost_share(interval: float, save_seconds: float, start_seconds: float, failure_hours: float) -> float:
    """Fraction of the time spent on checkpoints, repeated steps and starts."""
    return save_seconds / 3600 / interval + (interval / 2 + start_seconds / 3600) / failure_hours


def numbers(measured: dict[str, Any]) -> dict[str, Any]:
    """Every number of the page."""
    said: dict[str, Any] = {"failure_hours": GPU_HOURS_A_FAILURE / GPUS}
    for name, words in RUNS.items():
        length = int(next(word.split("=")[1] for word in words if word.startswith("max_length=")))
        plan = planned(name)
        examples = TOKENS / length
        low, high = plan.step_seconds
        small, large = measured["node"][str(length)]
        grown = {
            part: (large[part] - small[part]) / (large["examples"] - small["examples"])
            for part in ("seconds", "held", "most")
        }
        alone = measured["ranks"][f"{name} fsdp"]["0"]
        own = {
            "plan": plan, "length": length, "examples": examples, "low_days": plan.steps * low / 86400,
            "high_days": plan.steps * high / 86400, "low_rate": plan.tokens_per_step / high,
            "high_rate": plan.tokens_per_step / low,
            "plan_seconds": grown["seconds"] * examples, "plan_held": grown["held"] * examples,
            "plan_most": grown["most"] * examples, "alone": alone, "reads": plan.tokens_per_step / low / NODES / length,
            **measured["ordering"][str(length)],
            "order_seconds": measured["ordering"][str(length)]["seconds_an_example"] * plan.tokens_per_step / length,
            "store": 2 * TOKENS + 8 * TOKENS / DOCUMENT,
            "gradient_bytes": 2 * 4 * plan.trainable_parameters * (GPUS - 1) / GPUS,
            "full_save": plan.checkpoint_bytes * (1 / WRITE + 1 / SHA256),
            "shard_save": plan.checkpoint_bytes / GPUS * (1 / WRITE + 1 / SHA256),
        }  # fmt: skip
        own["crossing_seconds"] = own["gradient_bytes"] / NETWORK
        micro = next((int(word.split("=")[1]) for word in EXTRA[name] if word.startswith("micro_batch_tokens=")), None)
        own["forwards"] = 1 if micro is None else math.ceil(plan.tokens_per_step / GPUS / micro)
        own["crossing"] = sum(alone["step"][call][1] for call in ("_allgather_base_", "_reduce_scatter_base_"))
        own["sharded"] = own["forwards"] * own["crossing"] * (GPUS - 1) / GPUS / NETWORK
        own["message_seconds"] = GATHERS * (GPUS - 1) * MESSAGE
        # Every process holds the whole store against its hashes, plans, and reads the checkpoint.
        own["start"] = own["store"] / SHA256 + own["plan_seconds"] + plan.checkpoint_bytes * (1 / READ + 1 / SHA256)
        own["interval"] = best_interval(own["full_save"], said["failure_hours"])
        own["interval_sharded"] = best_interval(own["shard_save"], said["failure_hours"])
        between = said["failure_hours"]
        for key, hours, save in (
            ("lost", between, own["full_save"]),
            ("lost_ten", between / 10, own["full_save"]),
            ("lost_sharded", between, own["shard_save"]),
        ):
            own[key] = lost_share(best_interval(save, hours), save, own["start"], hours)
        own["lasts_examples"] = HOST / grown["most"]
        own["lasts_tokens"] = own["lasts_examples"] * length
        said[name] = own
    return said | {"measured": measured}


# --- the page ---------------------------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def calls(collective: Sequence[int]) -> str:
    return f"{size(collective[1])} in {count(collective[0])} messages"


def span(show: Callable[[float], str], ends: Any) -> str:
    return " to ".join(map(show, ends))


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "FLOPs a token": lambda own: flops(own["plan"].flops_per_token),
    "FLOPs in all": lambda own: f"{own['plan'].flops:.2e}",
    "steps of 2,097,152 tokens": lambda own: count(own["plan"].steps),
    "a step": lambda own: span(milliseconds, own["plan"].step_seconds),
    "days": lambda own: f"{own['low_days']:.2g} to {own['high_days']:.2g}",
    "memory of a GPU, ddp": lambda own: size(own["plan"].needed_bytes),
    "of that weights, gradients, optimizer": lambda own: size(
        sum(own["plan"].memory_bytes[part] for part in ("weights", "gradients", "optimizer"))
    ),
    "examples of an epoch": lambda own: count(round(own["examples"])),
    "token store, 2 bytes a token and 8 a document": lambda own: size(own["store"]),
    "reads of a node, of one example each": lambda own: f"{own['reads']:,.0f} a second",
    "the same in bytes": lambda own: f"{size(own['reads'] * own['length'] * 2)}/s",
    "planning an epoch, by one process of a node": lambda own: duration(own["plan_seconds"]),
    "what the 8 processes of a node map of the plan, together": lambda own: size(own["plan_held"]),
    "and hold at most while one of them plans": lambda own: size(own["plan_most"]),
    "tokens at which that fills 2 TB": lambda own: f"{own['lasts_tokens']:.1e}",
    "putting a step in order": lambda own: milliseconds(own["order_seconds"]),
    "where a step's examples come from, chi-square (chance: 0.91 to 1.09)": lambda own: f"{own['chi_square']:.2f}",
    "largest share of 64 over the mean, documents of any length": lambda own: f"{own['spread']:.3f}",
    "checkpoint": lambda own: size(own["plan"].checkpoint_bytes),
    "written and hashed by one process": lambda own: duration(own["full_save"]),
    "if each process wrote its share": lambda own: milliseconds(own["shard_save"]),
    "best interval, one writer": lambda own: duration(3600 * own["interval"]),
    "best interval, if all wrote": lambda own: duration(3600 * own["interval_sharded"]),
    "start of the run, and after each failure": lambda own: duration(own["start"]),
    "of that the hashes of the store": lambda own: duration(own["store"] / SHA256),
    "time lost, one writer": lambda own: percent(own["lost"]),
    "time lost, if all wrote": lambda own: percent(own["lost_sharded"]),
    "time lost, one writer, ten times the failures": lambda own: percent(own["lost_ten"]),
    "gradients a GPU sends in a step (ddp, fp32)": lambda own: size(own["gradient_bytes"]),
    f"at {size(NETWORK)}/s between nodes": lambda own: milliseconds(own["crossing_seconds"]),
    "fsdp: weights and gradients of all forwards of a step": lambda own: milliseconds(own["sharded"]),
    "forwards of a GPU in a step": lambda own: str(own["forwards"]),
    "messages of the loop over gloo": lambda own: milliseconds(own["message_seconds"]),
    "weights that rank 0 holds": lambda own: size(own["alone"]["held"]),
    "weights gathered in a forward and its backward": lambda own: calls(own["alone"]["step"]["_allgather_base_"]),
    "gradients summed, each rank has its rows": lambda own: calls(own["alone"]["step"]["_reduce_scatter_base_"]),
    "tensors gathered for a checkpoint": lambda own: calls(own["alone"]["checkpoint"]["all_gather_into_tensor"]),
    "their share of a step": lambda own: span(
        percent, (own["message_seconds"] / each for each in reversed(own["plan"].step_seconds))
    ),
}
"""Computes the cell of a run for each row of the page's tables."""


def phrases(said: dict[str, Any]) -> list[str]:
    """Phrases with numbers that the text must contain."""
    held_out, large = TextConfig.model_fields["validation_fraction"].default, said["measured"]["node"]["512"][1]
    gpt, bert, hours = said["gpt_xl"], said["bert"], said["failure_hours"]
    week, low_high = WEEK / hours, span(percent, UTILISATION)
    return [
        f"tokens on {GPUS} GPUs need", f"{NODES} nodes of 8 H100",
        f"at {low_high} of its {flops(DEVICES[DEVICE].bf16 or 0)}/s",
        f"at {count(10**9)} and {count(4 * 10**9)} tokens",
        f"writes {size(WRITE)}/s to a shared disk, a node reads {size(READ)}/s from it, sha256 takes {size(SHA256)}/s",
        f"a message {1e6 * MESSAGE:.0f} us, a document has {DOCUMENT:,} tokens", f"nodes have {size(NETWORK)}/s each",
        " ".join([*RUNS["gpt_xl"], *EXTRA["gpt_xl"], f"devices={GPUS}", f"max_tokens={TOKENS}"]),
        f"{size(gpt['store'])} of it", f"one in {count(round(GPU_HOURS_A_FAILURE))} GPU hours",
        f"one in {count(round(hours))} hours: {week:.2f} restarts a week", f"as many, {10 * week:.1f} a week",
        f"a ring of {GPUS - 1} hops", f"holds out {percent(held_out)} of the documents",
        f"{held_out * TOKENS:.0e} tokens here", f"is {percent(10 * held_out / 3)} of the training",
        f"opens it*, {duration(gpt['store'] / SHA256)} at each",
        f"that is {size(bert['plan_most'])} a node at most", f"{count(large['examples'])} examples",
        f"{size(large['held'])} together, {size(large['most'])} at most",
        *(f"rank {rank} {size(alone['held'])}" for rank, alone in said["measured"]["ranks"]["bert fsdp"].items()),
        f"sums its gradients in {said['measured']['ranks']['bert ddp']['1']['step']['allreduce_'][0]} messages "
        f"of together {size(said['measured']['ranks']['bert ddp']['1']['step']['allreduce_'][1])}",
        f"up to {percent(bert['message_seconds'] / bert['plan'].step_seconds[0])} of a step at {GPUS}",
    ]  # fmt: skip


def document(measured: dict[str, Any], text: str) -> tuple[str, list[str]]:
    """The page with its tables computed, and the phrases that its text lacks."""
    said = numbers(measured)
    assert all(own["distinct"] for own in measured["ordering"].values())
    lines, seen = text.split("\n"), set()
    for at, line in enumerate(lines):
        label = line.split(" | ")[0].removeprefix("| ")
        if label in ROWS:
            seen.add(label)
            lines[at] = f"| {' | '.join([label, *(ROWS[label](said[name]) for name in RUNS)])} |"
    words = " ".join(text.split())
    return "\n".join(lines), [part for part in (*(ROWS.keys() - seen), *phrases(said)) if part not in words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="run the measurements, and write them here")
    parser.add_argument("--hold", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold is not None:
        hold(Path(arguments.hold[0]), *map(int, arguments.hold[1:]))
        return
    if arguments.measure is not None:
        arguments.measure.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
        return
    if arguments.rank is not None:
        name, parallel, rank = arguments.rank
        print(json.dumps(one_rank(name, parallel, int(rank))))
        return
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    text, lacking = document(measured, PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    for phrase in lacking:
        print(f"{PAGE} lacks: {phrase}", file=sys.stderr)
    sys.exit(3 if lacking else 0)


if __name__ == "__main__":
    main()
