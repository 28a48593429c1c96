"""What transformers' own tools say of texts and pairs after `export`, and what `lmtool predict` says, to 1e-5.

Checkpoints are of lmtool, and published classifiers that transformers made here with random weights.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoModelForSequenceClassification, AutoTokenizer, pipeline

import lmtool
from lmtool import cli
from tests.commands.conftest import BAD, GOOD, TINY, pretrain, sentence
from tests.weights.published_folders import CLASSIFIERS, make_classifier

# A family's pairs; texts may hold what looks like a special token.
STRANGE = ["", "[SEP] no [MASK] </s>", "<s> is a tag <|endoftext|>", "Ångström — 中文 😀", "a\tb  c"]


def run(*words: str, status: int = 0) -> None:
    assert cli.main([*words]) == status


def asked(strange: bool = True) -> list[tuple[str, str]]:
    """50 pairs of texts."""
    chance = random.Random(3)
    pairs = [(sentence(chance, GOOD + BAD), sentence(chance, GOOD + BAD)) for _ in range(50)]
    if strange:
        pairs[: len(STRANGE)] = [
            (f"{text} it", f"{other} so") for text, other in zip(STRANGE, reversed(STRANGE), strict=True)
        ]
    return pairs


def write_pairs(path: Path, pairs: list[tuple[str, str]], *names: str) -> None:
    lines = [json.dumps(dict(zip(names, pair, strict=False))) for pair in pairs]
    path.write_text("\n".join(lines) + "\n")


def write_task(folder: Path, label: Any) -> None:
    """A pair a line, with a label by its number."""
    folder.mkdir()
    chance = random.Random(1)
    for split, count in (("train", 64), ("dev", 24)):
        rows = [{"one": sentence(chance, GOOD), "two": sentence(chance, BAD), "label": label(i)} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def predicted(checkpoint: str, pairs: list[tuple[str, str]], *names: str) -> list[dict[str, Any]]:
    """What `lmtool predict` says of the pairs, or of their first texts."""
    write_pairs(Path("asked.jsonl"), pairs, *names)
    run("predict", f"checkpoint={checkpoint}", "input=asked.jsonl", "output=said.jsonl", "precision=fp32", "device=cpu")
    return [json.loads(line) for line in Path("said.jsonl").read_text().splitlines()]


def require_equal(folder: str, ours: list[dict[str, Any]], pairs: list[tuple[str, str]], paired: bool) -> None:
    """AutoTokenizer with the saved class, and the pipeline, say the same."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    columns = [list(column) for column in zip(*pairs, strict=True)][: 1 + paired]
    with torch.no_grad():
        logits = model(**tokenizer(*columns, padding=True, return_tensors="pt")).logits
    scores = [row["score"] for row in ours]
    if model.config.problem_type == "regression":
        assert torch.allclose(logits[:, 0], torch.tensor(scores), atol=1e-5)
    else:
        best = logits.softmax(-1).max(-1)
        assert torch.allclose(best.values, torch.tensor(scores), atol=1e-5)
        assert [model.config.id2label[one] for one in best.indices.tolist()] == [row["prediction"] for row in ours]
    texts = [{"text": one, "text_pair": two} if paired else one for one, two in pairs]
    piped = pipeline("text-classification", model=folder)(texts)
    assert [one["score"] for one in piped] == pytest.approx(scores, abs=1e-5)
    if model.config.problem_type != "regression":
        assert [one["label"] for one in piped] == [row["prediction"] for row in ours]
    assert torch.tensor(scores).std() > 1e-3  # the weights tell texts apart


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "classification") for family in ("bert", "albert", "electra", "roberta", "distilbert")),
        ("bert", "regression"),
    ],
)
def test_a_pair_task_of_a_run(family: str, kind: str, place: Path) -> None:
    write_task(
        place / "pairs", lambda number: ["left", "right"][number % 2] if kind == "classification" else number / 7
    )
    run(
        "finetune", f"model={family}_tiny", "checkpoint=none", "task=custom", f"task.kind={kind}", "task.path=pairs",
        "task.text=[one,two]", *TINY, "model.initializer_std=0.3", "max_length=200", "max_steps=2", "name=run",
        "cache_dir=cache",
    )  # fmt: skip
    run("export", "checkpoint=runs/run", "output=folder")
    pairs = asked()
    require_equal("folder", predicted("runs/run", pairs, "one", "two"), pairs, True)
    settings = json.loads(Path("folder/tokenizer_config.json").read_text())
    assert ("token_type_ids" in settings["model_input_names"]) == (family in ("bert", "albert", "electra"))
    assert settings["model_max_length"] == 200
    # The folder is used as it is, too.
    assert predicted("folder", pairs, "text", "pair")[0]["score"] == pytest.approx(
        predicted("runs/run", pairs, "one", "two")[0]["score"], abs=1e-6
    )


@pytest.mark.parametrize("objective", ["mlm_nsp", "mlm_sop"])
def test_a_head_over_pairs_of_a_run(objective: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"mlm_nsp": "bert_tiny", "mlm_sop": "albert_tiny"}[objective]
    pretrain("run", "max_steps=2", f"objective={objective}", "model.initializer_std=0.3", model=model)
    run("export", "checkpoint=runs/run", "output=folder")
    theirs = AutoModelForPreTraining.from_pretrained("folder").eval()
    rows = AutoTokenizer.from_pretrained("folder")(
        *map(list, zip(*asked(False), strict=True)), padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        given = theirs(**rows)
        loaded = lmtool.load("runs/run").model(**rows)
    logits = given.seq_relationship_logits if objective == "mlm_nsp" else given.sop_logits
    assert torch.allclose(loaded.pair_logits, logits, atol=1e-5)
    real = rows["attention_mask"].bool()
    assert torch.allclose(loaded.logits[real], given.prediction_logits[real], atol=1e-4)
    names = ["next", "random"] if objective == "mlm_nsp" else ["in order", "swapped"]
    for checkpoint in ("runs/run", "folder"):
        ours = predicted(checkpoint, asked(False), "text", "pair")
        best = logits.softmax(-1).max(-1)
        assert torch.allclose(best.values, torch.tensor([row["score"] for row in ours]), atol=1e-5)
        assert [names[one] for one in best.indices.tolist()] == [row["prediction"] for row in ours]
    capsys.readouterr()
    run("predict", "checkpoint=runs/run", "text=a", "pair=b", "device=cpu")
    assert capsys.readouterr().out.split("  ")[1] == "a | b\n"


PUBLISHED = [
    ("bert", 1), ("bert", 2), ("bert", 3), ("roberta", 3), ("distilbert", 1), ("albert", 3), ("electra", 2), ("gpt", 1),
    ("gpt", 3), ("gpt1", 2), ("bart", 1), ("bart", 3), ("t5", 2),
]  # fmt: skip


@pytest.mark.parametrize(("family", "count"), PUBLISHED)
def test_a_published_classifier(family: str, count: int, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Used straight from its folder, imported, and exported from both, with its labels."""
    names = {1: ["score"], 2: ["POSITIVE", "NEGATIVE"], 3: None}[count]
    make_classifier(family, place / "published", count, names)
    run("import", "checkpoint=published", "output=ours")
    run("export", "checkpoint=ours", "output=back")
    run("export", "checkpoint=published", "output=again")
    assert "inf" not in capsys.readouterr().out
    pairs = asked()
    if family in ("bart", "t5"):  # transformers reads a batch only where all texts have as many ends
        pairs = [pair for pair in pairs if "</s>" not in "".join(pair)]
    labels = names or [f"LABEL_{number}" for number in range(count)]
    for paired in (False, True):
        ours = predicted("published", pairs, *["text", "pair"][: 1 + paired])
        assert count == 1 or {row["prediction"] for row in ours} <= set(labels)
        assert predicted("ours", pairs, *["text", "pair"][: 1 + paired]) == ours
        # As it was given, too; its pipeline squeezes a single value where the file does not say regression.
        for folder in ("again" if paired else "back", *(["published"] if count > 1 else [])):
            require_equal(folder, ours, pairs, paired)
    config = json.loads(Path("back/config.json").read_text())
    assert list(config["id2label"].values()) == labels
    assert config["architectures"] == [CLASSIFIERS[family][0]]
    assert (config["problem_type"] == "regression") == (count == 1)
