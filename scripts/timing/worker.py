"""The timed processes: each runs one side on prepared examples, some steps at a time.

    python scripts/timing/worker.py prepare FOLDER SETTINGS   build the examples of both sides
    python scripts/timing/worker.py check FOLDER SETTINGS     one step of both from the same weights, without dropout,
                                                              or the results of both
    python scripts/timing/worker.py VARIANT FOLDER SETTINGS   run; SETTINGS is JSON

A worker loads everything, writes one JSON line `{"ready": ...}` and waits. For each line `{"steps": n}` on its standard
input, its training loop runs n more steps, and it answers with their seconds, tokens and its peak memory. Start-up is
not measured, and the sides can take turns. `{"steps": n, "count": true}` also counts how often the host waited for
the device. Both sides run their real loop: the Trainer pauses in `on_step_end`, lmtool's loop in its loader.

The name of a variant begins with its side: trainer, pipeline, transformers, lmtool, or products. `settings["variant"]`
has its options: rows (separate: texts; joined: rows of lmtool's running stream; group_texts: texts joined as run_mlm
does; task), padding (tokens; else to the longest of the batch), grouped (batches of like length), multiple (padding to
one of it), workers (processes that collate), flattened (packed without padding), compile, and of lmtool batch_tokens.
Variants of `settings["use"]` (a trained model: generate, embed or shots) share a process, and each line has the options
of one: texts (of which model or kind), at_once (in a step), new (tokens), beams, top_k (of sampling), loop (padded;
kept: logits only of candidates).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def side_of(name: str) -> Any:
    """The function of folder, settings and gate that runs a variant. Imports only its side."""
    if name == "products":
        from timing.gate import run_products

        return run_products
    if name.startswith("trainer"):
        from timing.trainer import run_trainer

        return run_trainer
    if name.startswith("transformers"):
        from timing.peers import run_peer

        return run_peer
    if name.startswith("lmtool_use"):
        from timing.uses import run_use

        return run_use
    from timing import ours

    return ours.run_prediction if name.startswith(("pipeline", "lmtool_prediction")) else ours.run_lmtool


def main() -> None:
    name, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    # Libraries may print to standard output, which is reserved for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if name.startswith("lmtool"):
        from lmtool.system.environment import ENVIRONMENT

        os.environ.update(ENVIRONMENT)  # as lmtool's command line does before it imports torch
    import torch

    from timing.gate import Gate

    torch.set_num_threads(settings["threads"])
    gate = Gate(sys.stdin, answers, settings["device"])
    if name in ("prepare", "check"):
        modules = {"prepare": "examples", "check": "check"} if settings.get("use") is None else {}
        job = getattr(importlib.import_module(f"timing.{modules.get(name, 'uses')}"), name)
        gate.say(job(folder, settings))
    else:
        side_of(name)(folder, settings, gate)


if __name__ == "__main__":
    main()
