"""Compute what a run of 10^12 tokens on 64 GPUs needs: the tables of docs/scale.md, and the numbers in its text.

    python scripts/scale.py                               fills in the tables from `lmtool plan` and the measurements in
                                                          scripts/scale.json, and lists numbers that the text lacks
    python scripts/scale.py --measure scripts/scale.json  measures again, which takes some minutes and 3 GB of memory

Memory, FLOPs and time come from `lmtool plan`. The order of the examples and the fraction of each rank are computed at
full size. Planning an epoch is measured in 8 processes at 10^9 and 4 * 10^9 tokens, and extrapolated linearly. Single
ranks of the 64 run at full size, through torch's fake process group.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
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
from lmtool.training.devices import DEVICES, NETWORK, NODE, UTILIZATION

PAGE, MEASUREMENTS = ROOT / "docs" / "scale.md", ROOT / "scripts" / "scale.json"
TOKENS, GPUS, DEVICE = 10**12, 64, "h100"
NODES, WEEK_HOURS = GPUS // NODE, 7 * 24.0
DOCUMENT_TOKENS = 1000  # mean tokens of a document of web text
# The two runs of the page, with steps of two million tokens.
RUNS = {
    "gpt_xl": ["model=gpt_xl", "model.max_positions=2048", "max_length=2048", "batch_tokens=2097152"],
    "bert": ["model=bert", "max_length=512", "batch_tokens=2097152"],
}
# Overrides of each run that its heading on the page does not name.
EXTRA_OVERRIDES = {"gpt_xl": ["micro_batch_tokens=8192"], "bert": ["objective.pairs=none"]}
# From Grattafiori et al. 2024 (The Llama 3 Herd of Models), section 3.3.4, table 5: 419 unexpected interruptions
# in 54 days of 16,384 H100s.
GPU_HOURS_A_FAILURE = 16384 * 54 * 24 / 419
# Assumptions, which the page states. Bytes per second: one process writes to a shared disk, one node reads from it, one
# core computes sha256. Seconds: a message over TCP within a data center.
WRITE_RATE, READ_RATE, SHA256_RATE, MESSAGE_SECONDS = 1e9, 2e9, 1.2e9, 50e-6
# Bytes of memory that a host with 8 GPUs may use for plans of the data.
HOST_BYTES = 2e12
# Ranks that are measured at full size, one at a time, by run and strategy. gpt_xl with ddp is omitted: the rank would
# hold the whole model twice.
MEASURED_RANKS = {"gpt_xl fsdp": (0,), "bert fsdp": (0, GPUS - 1), "bert ddp": (1,)}
# Gathers over gloo in each step: one of the number of predictions, one of the clock and signals.
GATHERS = 2


def _meta_learner(name: str) -> tuple[Any, Any]:
    """Returns the configuration of a run, and its learner on the meta device."""
    import torch

    from lmtool.cli import main as cli
    from lmtool.weights.assemble import assemble

    arguments = [*RUNS[name], *EXTRA_OVERRIDES[name], f"devices={GPUS}", f"max_tokens={TOKENS}", "max_steps=null"]
    config = cli.configuration("pretrain", cli.parse(arguments), running=False)
    with torch.device("meta"):
        return config, assemble(config, None)[0]


def run_plan(name: str) -> Any:
    """Returns the plan of a run on GPUs of type DEVICE, as `lmtool plan` computes it."""
    from lmtool.commands.plan import _assumed_metadata
    from lmtool.costs.plan import plan_of
    from lmtool.costs.rate import planned_device

    config, learner = _meta_learner(name)
    device = planned_device(config, DEVICE)
    metadata = _assumed_metadata(config, 0, float(config.max_length), config.objective.predicted_fraction)
    return plan_of(config, learner, metadata, device)


# --- measurements ----------------------------------------------------------------------------------------------------


class _Tokenizer:
    """Stands in for a tokenizer: CausalWindows only asks for the ids of special tokens."""

    def role(self, name: str) -> int:
        return 0


def _store(folder: Path, tokens: int, cache: ArrayCache = UNSHARED) -> TokenStore:
    """Returns a token store of the given size that needs little memory: a single id, broadcast, and memory-mapped
    offsets of documents of equal length."""
    file, documents, empty = folder / "offsets.npy", tokens // DOCUMENT_TOKENS, np.zeros(1, dtype=np.int64)
    if not file.exists():
        np.save(file, np.arange(documents + 1, dtype=np.int64) * DOCUMENT_TOKENS)
    offsets = np.load(file, mmap_mode="r").view(np.ndarray)
    ids = np.broadcast_to(np.uint16(7), (tokens,))
    return TokenStore(ids, offsets, empty, empty, {"tokens": tokens, "documents": documents}, folder, cache=cache)


def hold_plan(folder: Path, tokens: int, length: int, processes: int) -> None:
    """Plans an epoch in one of the processes of a node, for `node_memory`.

    Prints "ready" and waits for a line on standard input; then plans, and prints the number of examples, the starts of
    the first ones and the CPU seconds as JSON. Keeps the plan in memory until standard input gets another line.
    """
    store = _store(folder, tokens, ArrayCache(folder / "plans", "0" * 64, processes))
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.process_time()
    loader = PackedLoader(CausalWindows(_Tokenizer(), store, length, "joined", "train"), 0, None, 2**21)  # type: ignore[arg-type]
    metadata = loader.metadata()
    first = next(loader.rows_read(1))["start"]
    print(json.dumps([metadata["examples"], first[:8].tolist(), time.process_time() - started]), flush=True)
    sys.stdin.readline()


def node_memory(tokens: int, length: int, processes: int = NODE) -> dict[str, float]:
    """Measures the memory and the time that planning an epoch takes on one node.

    Args:
        tokens: the size of the token store
        length: tokens per example
        processes: processes of the node, each of which needs the plan

    Returns:
        the number of examples and of processes; the CPU seconds of the process that plans; "held" and "most": bytes
        that planning adds to the memory of all processes, at the end and at the maximum. Bytes are proportional set
        sizes, so that a page that several processes map counts once.
    """

    def resident_bytes() -> int:
        rollups = (Path(f"/proc/{child.pid}/smaps_rollup").read_text() for child in children)
        return sum(1024 * int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])
                   for rollup in rollups)  # fmt: skip

    with TemporaryDirectory() as name:
        _store(Path(name), tokens)
        command = [sys.executable, __file__, "--hold", name, str(tokens), str(length), str(processes)]
        children = [Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(processes)]
        assert all(child.stdout is not None and child.stdout.readline() == "ready\n" for child in children)
        before, most = resident_bytes(), 0
        for child in children:
            print(file=child.stdin, flush=True)
        with ThreadPoolExecutor(processes) as pool:
            answers = [pool.submit(child.stdout.readline) for child in children if child.stdout is not None]
            while not all(answer.done() for answer in answers):
                most = max(most, resident_bytes())
                time.sleep(0.05)
        after, results = resident_bytes(), [json.loads(answer.result()) for answer in answers]
        assert all(result[:2] == results[0][:2] for result in results)
        for child in children:
            child.communicate("\n")
    seconds = max(result[2] for result in results)
    return {"examples": results[0][0], "processes": processes, "seconds": seconds, "held": after - before,
            "most": max(most, after) - before}  # fmt: skip


def one_rank(name: str, parallel: str, rank: int) -> dict[str, Any]:
    """Runs one of the 64 ranks of a run at full size, with torch's fake process group in place of the other ranks.

    All weights are the same number, and the batch has eight tokens.

    Returns:
        "held": bytes of the weights on this rank; "step": calls and bytes of each collective in one forward and
        backward pass; "messages": messages between hosts, without the clock's; "checkpoint" (fsdp only): calls and
        bytes of each collective that gathers a checkpoint
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lmtool.config.registry import build
    from lmtool.training import engine
    from lmtool.training.optimizers import state_tensors
    from lmtool.training.precision import FP32_CPU
    from lmtool.training.sharding import gather_tensors
    from lmtool.training.step import gradients
    from lmtool.types import Batch, Packed, Step, Target
    from tests.training.fake_ranks import SIZE, Everyone, Traffic, at_once

    assert SIZE == GPUS
    cpu, group = torch.device("cpu"), Everyone(rank)
    config, learner = _meta_learner(name)
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
                gather_tensors(tensors, writes=False)
        answer["checkpoint"] = {call: [number, saving.bytes[call]] for call, number in saving.calls.items()}
    return answer


def in_process(name: str, parallel: str, rank: int) -> dict[str, Any]:
    """Calls `one_rank` in a new process, which can initialize a process group of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--rank", name, parallel, str(rank)]
    answer: dict[str, Any] = json.loads(check_output(command, text=True))
    return answer


def ordering(length: int, steps: int = 200) -> dict[str, float]:
    """Examines some steps of the order of all examples of 10^12 tokens. length: tokens per example. steps: number of
    steps, sampled from the whole order. Returns "seconds_an_example": time to compute the order; "distinct": 1.0 if no
    example occurs twice; "chi_square": of the positions in the text from which the examples come, per degree of freedom
    (1 for a random order); "spread": tokens of the rank with the most tokens over the mean of the ranks, for texts of
    random lengths up to `length`, in the worst of 20 steps."""
    examples, batch = TOKENS // length, 2**21 // length
    order = random_streams.Permutation(examples, 0, "order", 0)
    started = time.perf_counter()
    first = np.random.default_rng(0).integers(0, examples // batch, steps)
    batches = [order(np.arange(step * batch, (step + 1) * batch)) for step in first]
    seconds = (time.perf_counter() - started) / (steps * batch)
    bins = np.bincount(np.concatenate(batches) * 1000 // examples, minlength=1000)
    expected = steps * batch / 1000
    worst = 0.0
    for number, rows in enumerate(batches[:20]):
        lengths = np.random.default_rng(number).integers(16, length + 1, len(rows))
        tokens_of_ranks = [int(lengths[indices].sum()) for indices in assign(lengths, GPUS)]
        assert sum(tokens_of_ranks) == lengths.sum()
        worst = max(worst, max(tokens_of_ranks) * GPUS / lengths.sum())
    return {
        "seconds_an_example": seconds,
        "distinct": float(len(np.unique(np.concatenate(batches))) == len(np.unique(first)) * batch),
        "chi_square": float(((bins - expected) ** 2 / expected).sum() / 999),
        "spread": worst,
    }


def measure() -> dict[str, Any]:
    """Runs all measurements. "sha256": bytes that one core of this machine hashes per second."""
    block = bytes(1 << 26)
    started = time.perf_counter()
    hashlib.sha256(block).hexdigest()
    hashed = len(block) / (time.perf_counter() - started)
    return {
        "node": {str(length): [node_memory(tokens, length) for tokens in (10**9, 4 * 10**9)] for length in (2048, 512)},
        "ranks": {
            name: {str(rank): in_process(*name.split(), rank) for rank in ranks}
            for name, ranks in MEASURED_RANKS.items()
        },
        "ordering": {str(length): ordering(length) for length in (2048, 512)},
        "sha256": hashed,
    }


# --- computed from the plan and the measurements ---------------------------------------------------------------------


def best_interval(save_seconds: float, failure_hours: float) -> float:
    """Returns the hours between checkpoints that lose the least time: sqrt(2 C M) for a checkpoint that takes C and a
    failure every M hours (Young 1974), with the first correction of Daly (2006)."""
    save = save_seconds / 3600
    return math.sqrt(2 * save * failure_hours) * (1 + math.sqrt(save / (2 * failure_hours)) / 3) - save


def lost_share(interval: float, save_seconds: float, start_seconds: float, failure_hours: float) -> float:
    """Returns the fraction of the time that is spent on saving checkpoints, repeating steps and restarting."""
    return save_seconds / 3600 / interval + (interval / 2 + start_seconds / 3600) / failure_hours


def numbers(measured: dict[str, Any]) -> dict[str, Any]:
    """Computes every number of the page. Each run's numbers are a dictionary under its name."""
    result: dict[str, Any] = {"failure_hours": GPU_HOURS_A_FAILURE / GPUS}
    for name, arguments in RUNS.items():
        length = int(next(word.split("=")[1] for word in arguments if word.startswith("max_length=")))
        plan = run_plan(name)
        examples = TOKENS / length
        low, high = plan.step_seconds
        small, large = measured["node"][str(length)]
        per_example = {
            key: (large[key] - small[key]) / (large["examples"] - small["examples"])
            for key in ("seconds", "held", "most")
        }
        one_rank = measured["ranks"][f"{name} fsdp"]["0"]
        run = {
            "plan": plan, "length": length, "examples": examples, "low_days": plan.steps * low / 86400,
            "high_days": plan.steps * high / 86400,
            "plan_seconds": per_example["seconds"] * examples, "plan_held": per_example["held"] * examples,
            "plan_most": per_example["most"] * examples, "one_rank": one_rank,
            "reads": plan.tokens_per_step / low / NODES / length,
            **measured["ordering"][str(length)],
            "order_seconds": measured["ordering"][str(length)]["seconds_an_example"] * plan.tokens_per_step / length,
            "store": 2 * TOKENS + 8 * TOKENS / DOCUMENT_TOKENS,
            "gradient_bytes": 2 * 4 * plan.trainable_parameters * (GPUS - 1) / GPUS,
            "full_save": plan.checkpoint_bytes * (1 / WRITE_RATE + 1 / SHA256_RATE),
            "shard_save": plan.checkpoint_bytes / GPUS * (1 / WRITE_RATE + 1 / SHA256_RATE),
        }  # fmt: skip
        run["crossing_seconds"] = run["gradient_bytes"] / NETWORK
        extra = EXTRA_OVERRIDES[name]
        micro = next((int(word.split("=")[1]) for word in extra if word.startswith("micro_batch_tokens=")), None)
        run["forwards"] = 1 if micro is None else math.ceil(plan.tokens_per_step / GPUS / micro)
        run["crossing"] = sum(one_rank["step"][call][1] for call in ("_allgather_base_", "_reduce_scatter_base_"))
        run["sharded"] = run["forwards"] * run["crossing"] * (GPUS - 1) / GPUS / NETWORK
        run["message_seconds"] = GATHERS * (GPUS - 1) * MESSAGE_SECONDS
        # At a start, every process verifies the hashes of the whole store, plans, and reads the checkpoint.
        checkpoint_seconds = plan.checkpoint_bytes * (1 / READ_RATE + 1 / SHA256_RATE)
        run["start"] = run["store"] / SHA256_RATE + run["plan_seconds"] + checkpoint_seconds
        failure_hours = result["failure_hours"]
        run["interval"] = best_interval(run["full_save"], failure_hours)
        run["interval_sharded"] = best_interval(run["shard_save"], failure_hours)
        for key, hours, save in (
            ("lost", failure_hours, run["full_save"]),
            ("lost_ten", failure_hours / 10, run["full_save"]),
            ("lost_sharded", failure_hours, run["shard_save"]),
        ):
            run[key] = lost_share(best_interval(save, hours), save, run["start"], hours)
        run["lasts_tokens"] = HOST_BYTES / per_example["most"] * length
        result[name] = run
    return result | {"measured": measured}


# --- the page ---------------------------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def format_calls(collective: Sequence[int]) -> str:
    """Formats the calls and the bytes of a collective."""
    return f"{size(collective[1])} in {count(collective[0])} messages"


def format_range(format_value: Callable[[float], str], ends: Iterable[float]) -> str:
    return " to ".join(map(format_value, ends))


ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "FLOPs per token": lambda run: flops(run["plan"].flops_per_token),
    "total FLOPs": lambda run: f"{run['plan'].flops:.2e}",
    "steps of 2,097,152 tokens": lambda run: count(run["plan"].steps),
    "time per step": lambda run: format_range(milliseconds, run["plan"].step_seconds),
    "days of training": lambda run: f"{run['low_days']:.2g} to {run['high_days']:.2g}",
    "memory per GPU, ddp": lambda run: size(run["plan"].needed_bytes),
    "of which weights, gradients, optimizer": lambda run: size(
        sum(run["plan"].memory_bytes[part] for part in ("weights", "gradients", "optimizer"))
    ),
    "examples per epoch": lambda run: count(round(run["examples"])),
    "token store, 2 bytes per token and 8 per document": lambda run: size(run["store"]),
    "reads per node, one example each": lambda run: f"{run['reads']:,.0f} a second",
    "bytes read per node": lambda run: f"{size(run['reads'] * run['length'] * 2)}/s",
    "planning an epoch, in one process per node": lambda run: duration(run["plan_seconds"]),
    "memory of the plan, mapped by all 8 processes of a node": lambda run: size(run["plan_held"]),
    "peak memory of the node while one process plans": lambda run: size(run["plan_most"]),
    "tokens at which this peak is 2 TB": lambda run: f"{run['lasts_tokens']:.1e}",
    "computing the order of a step": lambda run: milliseconds(run["order_seconds"]),
    "positions in the text of a step's examples, chi-square (0.91 to 1.09 if uniform)": lambda run: (
        f"{run['chi_square']:.2f}"
    ),
    "tokens of the busiest of 64 processes over the mean": lambda run: f"{run['spread']:.3f}",
    "checkpoint": lambda run: size(run["plan"].checkpoint_bytes),
    "written and hashed by one process": lambda run: duration(run["full_save"]),
    "if each process wrote its own part": lambda run: milliseconds(run["shard_save"]),
    "best interval, one writer": lambda run: duration(3600 * run["interval"]),
    "best interval, all write": lambda run: duration(3600 * run["interval_sharded"]),
    "start of the run, also after a failure": lambda run: duration(run["start"]),
    "of which hashing the store": lambda run: duration(run["store"] / SHA256_RATE),
    "time lost, one writer": lambda run: percent(run["lost"]),
    "time lost, all write": lambda run: percent(run["lost_sharded"]),
    "time lost, one writer, ten times the failures": lambda run: percent(run["lost_ten"]),
    "gradients that a GPU sends per step (ddp, fp32)": lambda run: size(run["gradient_bytes"]),
    f"at {size(NETWORK)}/s between nodes": lambda run: milliseconds(run["crossing_seconds"]),
    "fsdp: weights and gradients of all forward passes of a step": lambda run: milliseconds(run["sharded"]),
    "forward passes of a GPU per step": lambda run: str(run["forwards"]),
    "messages of the training loop (gloo)": lambda run: milliseconds(run["message_seconds"]),
    "weights that rank 0 holds": lambda run: size(run["one_rank"]["held"]),
    "weights gathered in a forward and backward pass": lambda run: format_calls(
        run["one_rank"]["step"]["_allgather_base_"]
    ),
    "gradients summed, each rank receives its rows": lambda run: format_calls(
        run["one_rank"]["step"]["_reduce_scatter_base_"]
    ),
    "tensors gathered for a checkpoint": lambda run: format_calls(
        run["one_rank"]["checkpoint"]["all_gather_into_tensor"]
    ),
    "their fraction of a step": lambda run: format_range(
        percent, (run["message_seconds"] / each for each in reversed(run["plan"].step_seconds))
    ),
}
"""For each row of the page's tables, by its label, the function that formats the numbers of a run."""


def phrases(results: dict[str, Any]) -> list[str]:
    """Returns the phrases with numbers that the text of the page must contain."""
    held_out, large = TextConfig.model_fields["validation_fraction"].default, results["measured"]["node"]["512"][1]
    gpt, bert, hours = results["gpt_xl"], results["bert"], results["failure_hours"]
    week, low_high = WEEK_HOURS / hours, format_range(percent, UTILIZATION)
    return [
        f"tokens on {GPUS} GPUs needs", f"{NODES} nodes of 8 H100",
        f"at {low_high} of its {flops(DEVICES[DEVICE].bf16 or 0)}/s",
        f"at {count(10**9)} and {count(4 * 10**9)} tokens",
        f"writes {size(WRITE_RATE)}/s to a shared disk, a node reads {size(READ_RATE)}/s from it, "
        f"sha256 takes {size(SHA256_RATE)}/s",
        f"a message takes {1e6 * MESSAGE_SECONDS:.0f} us, a document has {DOCUMENT_TOKENS:,} tokens",
        f"nodes have {size(NETWORK)}/s each",
        " ".join([*RUNS["gpt_xl"], *EXTRA_OVERRIDES["gpt_xl"], f"devices={GPUS}", f"max_tokens={TOKENS}"]),
        f"on each node ({size(gpt['store'])})", f"one in {count(round(GPU_HOURS_A_FAILURE))} GPU hours",
        f"one in {count(round(hours))} hours: {week:.2f} restarts per week",
        f"as many failures, {10 * week:.1f} per week",
        f"a ring of {GPUS - 1} hops", f"holds out {percent(held_out)} of the documents",
        f"{held_out * TOKENS:.0e} tokens here", f"{percent(10 * held_out / 3)} of the training time",
        f"opens it*, {duration(gpt['store'] / SHA256_RATE)} at each",
        f"up to {size(bert['plan_most'])} per node", f"{count(large['examples'])} examples",
        f"{size(large['held'])} together, {size(large['most'])} at the peak",
        *(
            f"rank {rank} holds {size(answer['held'])}"
            for rank, answer in results["measured"]["ranks"]["bert fsdp"].items()
        ),
        f"sums its gradients in {results['measured']['ranks']['bert ddp']['1']['step']['allreduce_'][0]} messages "
        f"with {size(results['measured']['ranks']['bert ddp']['1']['step']['allreduce_'][1])}",
        f"up to {percent(bert['message_seconds'] / bert['plan'].step_seconds[0])} of a step at {GPUS}",
    ]  # fmt: skip


def updated_page(measured: dict[str, Any], text: str) -> tuple[str, list[str]]:
    """Returns the page with its tables computed, and the labels of tables and the phrases that it lacks."""
    results = numbers(measured)
    assert all(order["distinct"] for order in measured["ordering"].values())
    lines, found_labels = text.split("\n"), set()
    for index, line in enumerate(lines):
        label = line.split(" | ")[0].removeprefix("| ")
        if label in ROWS:
            found_labels.add(label)
            lines[index] = f"| {' | '.join([label, *(ROWS[label](results[name]) for name in RUNS)])} |"
    words = " ".join(text.split())
    return "\n".join(lines), [
        phrase for phrase in (*(ROWS.keys() - found_labels), *phrases(results)) if phrase not in words
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, help="run the measurements, and write them to this file")
    parser.add_argument("--hold", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold is not None:
        hold_plan(Path(arguments.hold[0]), *map(int, arguments.hold[1:]))
        return
    if arguments.measure is not None:
        arguments.measure.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
        return
    if arguments.rank is not None:
        name, parallel, rank = arguments.rank
        print(json.dumps(one_rank(name, parallel, int(rank))))
        return
    measured = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))
    text, missing_phrases = updated_page(measured, PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
    for phrase in missing_phrases:
        print(f"{PAGE} lacks: {phrase}", file=sys.stderr)
    sys.exit(3 if missing_phrases else 0)


if __name__ == "__main__":
    main()
