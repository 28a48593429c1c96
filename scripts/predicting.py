"""The processes that `scripts/benchmark.py` times on prediction: a classifier labels texts of natural length, as the
pipeline of transformers does and as `lmtool predict` does. Tokenising is part of it on both sides. Used by peers.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXTS = 128  # predicted in a step: what a file of them is to `lmtool predict`


def portions(folder: Path) -> Iterator[list[str]]:
    """The documents of the corpus, so many at a time, over and over."""
    lines = [line for line in (folder / "documents.txt").read_text(encoding="utf-8").splitlines() if line]
    cycle = itertools.cycle(lines)
    while True:
        yield list(itertools.islice(cycle, TEXTS))


def run_prediction(folder: Path, settings: dict[str, Any], gate: Any) -> None:
    """Predict until the gate closes. Both sides have a model of the same size with random weights."""
    from peers import peak_bytes

    from lmtool.tokenizers.tokenizer import Tokenizer

    imports_bytes = peak_bytes("cpu")
    tokenizer, longest = Tokenizer.load(folder / "tokenizer"), settings["max_length"]
    batch = settings["variant"].get("at_once")
    predict, parameters = (lmtool_predictor if batch is None else pipeline)(folder, settings, tokenizer)
    batch = batch or 1  # lmtool computes no padding
    gate.say({"ready": "prediction", "imports_bytes": imports_bytes, "parameters": parameters})
    for texts in portions(folder):
        if not gate.open():
            return
        assert predict(texts) == len(texts)
        lengths = [min(len(ids) + 2, longest) for ids in tokenizer.encode_batch(texts)]
        batches = (lengths[start : start + batch] for start in range(0, len(lengths), batch))
        slots = sum(max(group) * len(group) for group in batches)
        gate.count(tokens=sum(lengths), examples=len(texts), slots=slots)


def pipeline(folder: Path, settings: dict[str, Any], tokenizer: Any) -> tuple[Any, int]:
    """The pipeline over a model in the precision that is asked for, and its parameters."""
    import torch
    import transformers
    from peer_trainer import trainer_model

    model = trainer_model(settings, "classification").eval()
    if settings["precision"] == "bf16":
        model = model.to(torch.bfloat16)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder / "tokenizer"))
    theirs.model_max_length = settings["max_length"]
    pipe = transformers.pipeline(
        "text-classification", model=model, tokenizer=theirs, batch_size=settings["variant"]["at_once"]
    )
    return lambda texts: len(pipe(texts, truncation=True)), model.num_parameters()


def lmtool_predictor(folder: Path, settings: dict[str, Any], tokenizer: Any) -> tuple[Any, int]:
    """What `lmtool predict` does with the texts of a file."""
    from peer_examples import LABELS

    from lmtool.config.tables import build
    from lmtool.learners.base import Inference
    from lmtool.models.configs import BertConfig
    from lmtool.tasks.configs import ClassificationConfig
    from lmtool.training.precision import select_device, select_precision

    backbone = build(BertConfig(**settings["model"]), settings["seed"])
    learner = ClassificationConfig(name="bench", labels=LABELS).learner(backbone, tokenizer, settings["seed"]).eval()
    precision = select_precision(settings["precision"], select_device("cpu"))

    def predict(texts: list[str]) -> int:
        rows = learner.read_rows({"text": texts}, [("text", number) for number in range(len(texts))])
        answers = learner.answers(rows, Inference(settings["max_length"], 8192, precision))
        return len(list(answers.records))

    return predict, sum(parameter.numel() for parameter in learner.parameters())
