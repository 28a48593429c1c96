"""What a text costs as it gets longer: attention by blocks beside full attention, and beside transformers' BigBird.

    python scripts/long_texts.py --output rows.jsonl [--lengths 1024 2048 4096 8192] [--layers 1] [--hidden-size 256]

A model of these sizes, blocks of 64 and three random ones, without dropout, reads one text forward and backward. Every
measurement is a process of its own with one thread: processor seconds of the fastest of `--repeats` passes, and the
memory at its peak above that of the model before its first. Rows that the output has are not measured again. Prints
them with what each side takes as a multiple of `blocks`, and the exponent by which each grows between the lengths: 1
is linear, 2 quadratic. transformers runs in training mode, since in evaluation it has no random blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDES = ("blocks", "full", "transformers")
VOCABULARY = 1000
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, a row a measurement; is added to")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="tokens of the text")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--hidden-size", type=int, default=256, help="64 for each head")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("SIDE", "LENGTH"), help="measure in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one[0], int(options.one[1]), options)))
        return
    rows = [json.loads(line) for line in options.output.read_text().splitlines()] if options.output.exists() else []
    wanted = [
        {**sizes(options), "side": side, "length": length} for length in options.lengths for side in options.sides
    ]
    for row in wanted:
        if not any(row.items() <= other.items() for other in rows):
            rows.append(in_its_process(row["side"], row["length"]))
            with options.output.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    report([other for row in wanted for other in rows if row.items() <= other.items()])


def sizes(options: argparse.Namespace) -> Row:
    return {"layers": options.layers, "hidden_size": options.hidden_size}


def in_its_process(side: str, length: int) -> Row:
    command = [sys.executable, __file__, *sys.argv[1:], "--one", side, str(length)]
    given = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=given, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(side: str, length: int, options: argparse.Namespace) -> Row:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = of_transformers(length, options) if side == "transformers" else of_lmtool(side, length, options)
    step(64)  # what is loaded and made once
    before, seconds = resident(), []
    for _ in range(options.repeats):
        start = time.process_time()
        step(length)
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {**sizes(options), "side": side, "length": length, "seconds": min(seconds), "bytes": max(0, peak)}


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def of_lmtool(side: str, length: int, options: argparse.Namespace) -> Callable[[int], None]:
    import torch

    from lmtool.config.tables import build
    from lmtool.models.configs import BertConfig
    from lmtool.models.encoder_configs import BigbirdConfig
    from lmtool.types import Packed

    width = options.hidden_size
    family = BigbirdConfig if side == "blocks" else BertConfig
    model = build(
        family(
            vocab_size=VOCABULARY, num_layers=options.layers, hidden_size=width, num_heads=width // 64,
            feedforward_size=4 * width, max_positions=length, dropout=0.0, attention_dropout=0.0,
        ), 0,
    )  # fmt: skip

    def step(tokens: int) -> None:
        ids = torch.arange(tokens) % VOCABULARY
        model(Packed(ids, (tokens,), {"segment": torch.zeros_like(ids)})).sum().backward()

    return step


def of_transformers(length: int, options: argparse.Namespace) -> Callable[[int], None]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    width = options.hidden_size
    config = transformers.BigBirdConfig(
        vocab_size=VOCABULARY, num_hidden_layers=options.layers, hidden_size=width, num_attention_heads=width // 64,
        intermediate_size=4 * width, max_position_embeddings=length, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BigBirdModel(config, add_pooling_layer=False).train()

    def step(tokens: int) -> None:
        model.set_attention_type("block_sparse")  # a short text turns it off
        model(torch.arange(tokens)[None] % VOCABULARY).last_hidden_state.sum().backward()

    return step


def report(rows: list[Row]) -> None:
    """A line a measurement, and how each side grows."""
    blocks = {row["length"]: row for row in rows if row["side"] == "blocks"}
    print(f"{'tokens':>7}  {'side':<12}  {'seconds':>8}  {'of blocks':>9}  {'MB':>7}  {'of blocks':>9}")
    for row in rows:
        own = blocks.get(row["length"])
        fractions = [row[key] / own[key] if own and own[key] else math.nan for key in ("seconds", "bytes")]
        print(
            f"{row['length']:>7,}  {row['side']:<12}  {row['seconds']:>8.3f}  {fractions[0]:>9.2f}  "
            f"{row['bytes'] / 1e6:>7.0f}  {fractions[1]:>9.2f}"
        )
    for side in dict.fromkeys(row["side"] for row in rows):
        own = sorted((row for row in rows if row["side"] == side), key=lambda row: row["length"])
        if len(own) > 1:
            grown = ", ".join(f"{key} {exponent(own, key):.2f}" for key in ("seconds", "bytes"))
            print(f"{side} grows by a power of the length of: {grown}")


def exponent(rows: list[Row], key: str) -> float:
    """The slope of the logarithm over that of the length, by least squares."""
    points = [(math.log(row["length"]), math.log(max(row[key], 1e-9))) for row in rows]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


if __name__ == "__main__":
    main()
