"""What goes with parallel=fsdp: every process must run the same layers in the same order, and no process has all of a
weight outside a forward. Each rule names the key that asks for something else, and the nearest that does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmtool.config.rules import rule
from lmtool.errors import Problem
from lmtool.schema.run import FinetuneConfig, PretrainConfig, RunConfig

_OTHERWISE = "or parallel=ddp, with which each process holds all weights"


@rule(RunConfig, "parallel", "precision")
def sharded_gradients_need_no_scaler(parallel: str, precision: str) -> Iterator[Problem]:
    """The scaler of fp16 judges the gradients of one process."""
    if parallel == "fsdp" and precision == "fp16":
        yield Problem(
            "precision",
            "precision=fp16 scales the loss by what the gradients of one process are; parallel=fsdp cuts them",
            f"give precision=bf16, {_OTHERWISE}",
        )


@rule(RunConfig, "parallel", "distill")
def sharded_students_run_alike(parallel: str, distill: Any) -> Iterator[Problem]:
    """Frozen teachers read what their student reads; other modes train several models, or run parts of one."""
    if parallel != "fsdp":
        return
    if distill.name not in ("none", "standard"):
        message = f"distill={distill.name} runs models, or parts of one, by themselves, which parallel=fsdp cannot"
        yield Problem("distill", message, f"give distill=soft, {_OTHERWISE}")
    interchange = getattr(distill, "terms", {}).get("interchange")
    if interchange is not None and interchange.weight > 0:
        message = "distill.terms.interchange computes some layers of some texts again, which parallel=fsdp cannot"
        yield Problem("distill.terms", message, f"give distill.terms.interchange=null, {_OTHERWISE}")


@rule(PretrainConfig, "parallel", "objective")
def sharded_runs_have_one_objective(parallel: str, objective: Any) -> Iterator[Problem]:
    """A batch of a mixture runs the model once for each member that is in it: that differs from process to process."""
    if parallel == "fsdp" and len(objective.parts()) > 1:
        yield _mixture("objective", [part.title for part in objective.parts()])


@rule(FinetuneConfig, "parallel", "task")
def sharded_runs_have_one_task(parallel: str, task: Any) -> Iterator[Problem]:
    """As with objectives; and texts that are written have lengths of their own."""
    if parallel != "fsdp":
        return
    if len(task.parts()) > 1:
        yield _mixture("task", [part.name for part in task.parts()])
    elif task.writes_text:
        message = f"task={task.name} is scored by what the model writes, text by text; parallel=fsdp runs all in step"
        yield Problem("task", message, f"give another task or head, {_OTHERWISE}")


@rule(FinetuneConfig, "parallel", "tuning", "forgetting")
def sharded_weights_are_not_compared(parallel: str, tuning: Any, forgetting: str | None) -> Iterator[Problem]:
    """What reads weights beside a forward needs all of them."""
    if parallel != "fsdp":
        return
    schemes = [scheme.name for scheme in tuning.schemes if scheme.name != "none"]
    if schemes:
        message = f"tuning with {schemes[0]} follows single weights from step to step, which parallel=fsdp cuts"
        yield Problem("tuning", message, f"give none in its place, {_OTHERWISE}")
    if tuning.name == "adapter_fusion":
        message = f"tuning={tuning.name} holds weights close to a start, which parallel=fsdp cuts"
        yield Problem("tuning", message, f"give tuning=adapter, {_OTHERWISE}")
    if forgetting is not None:
        message = "forgetting= compares weights before and after, which parallel=fsdp cuts"
        yield Problem("forgetting", message, f"give forgetting=null, {_OTHERWISE}")


def _mixture(key: str, members: list[str]) -> Problem:
    message = f"{key} mixes {', '.join(members)}, of which a batch has some; parallel=fsdp runs all processes in step"
    return Problem(key, message, f"give one {key}, {_OTHERWISE}")
