"""Several processes as ranks of one group, started once for many tests, because each start costs an import."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lmtool.system.ranks import ADDRESS, LOCAL_RANK, PORT, RANK, SIZE
from lmtool.training.group import ALONE, process_group

PATIENCE = 60  # seconds
PROCESSES = multiprocessing.get_context("forkserver")
# Imported once for all processes of all tests, which share one server; DDP imports torch._dynamo on first use. No
# libraries that read the environment when they are imported, such as datasets, or that start threads.
COMMANDS = ("lmtool.commands.pretrain", "lmtool.commands.finetune")
PROCESSES.set_forkserver_preload(["torch._dynamo", "lmtool.weights.assemble", *COMMANDS])


class Ranks:
    """Processes of one group on this machine's CPU."""

    def __init__(self, pipes: list[Any]):
        self._pipes = pipes

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of function(group, *arguments) by rank; the function and its values must be picklable."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        for rank, (failure, _) in enumerate(answers):
            assert failure is None, f"rank {rank}: {failure}"
        return [answer for _, answer in answers]


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Result of function(group, *arguments) in this process, without other ranks."""
    return function(ALONE, *arguments)


@contextmanager
def started(size: int) -> Iterator[Ranks]:
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE)
    )  # as torchrun's agent does, without guessing a port
    pipes, children = [], []
    for rank in range(size):
        ours, theirs = PROCESSES.Pipe()
        child = PROCESSES.Process(target=_work, args=(theirs, rank, size, store.port), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    try:
        yield Ranks(pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for child in children:
            child.join(PATIENCE)
            if child.is_alive():
                child.kill()


def _work(pipe: Any, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    named = {RANK: rank, SIZE: size, LOCAL_RANK: rank, ADDRESS: "127.0.0.1", PORT: port}
    os.environ |= {name: str(value) for name, value in named.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with process_group(torch.device("cpu")) as group:
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((None, function(group, *arguments)))
            except Exception:
                pipe.send((traceback.format_exc(), None))
