"""After `export`, transformers predicts the same as `lmtool predict` on texts and pairs, to 1e-5.

The checkpoints come from lmtool, or are classifiers that transformers creates with random weights.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaModel,
    pipeline,
)

import lmtool
from lmtool.cli import main as cli
from lmtool.config.registry import build
from lmtool.tokenizers.configs import ByteBpeConfig
from tests.breadth import slow_but
from tests.commands.conftest import BAD, GOOD, TINY, finetune, follow_card, merge_overrides, pretrain, sentence
from tests.weights.published_folders import CLASSIFIERS, make_classifier

# Texts that contain special tokens or unusual characters.
UNUSUAL_TEXTS = ["", "[SEP] no [MASK] </s>", "<s> is a tag <|endoftext|>", "Ångström — 中文 😀", "a\tb  c"]


def run(*words: str, status: int = 0) -> None:
    assert cli.main(merge_overrides(words)) == status


def text_pairs(strange: bool = True) -> list[tuple[str, str]]:
    """50 pairs of texts."""
    chance = random.Random(3)
    pairs = [(sentence(chance, GOOD + BAD), sentence(chance, GOOD + BAD)) for _ in range(50)]
    if strange:
        pairs[: len(UNUSUAL_TEXTS)] = [
            (f"{text} it", f"{other} so") for text, other in zip(UNUSUAL_TEXTS, reversed(UNUSUAL_TEXTS), strict=True)
        ]
    return pairs


def write_pairs(path: Path, pairs: list[tuple[str, str]], *names: str) -> None:
    lines = [json.dumps(dict(zip(names, pair, strict=False))) for pair in pairs]
    path.write_text("\n".join(lines) + "\n")


def write_task(folder: Path, label: Any) -> None:
    """Writes one pair per line, with the label of its number."""
    folder.mkdir()
    chance = random.Random(1)
    for split, count in (("train", 64), ("dev", 24)):
        rows = [{"one": sentence(chance, GOOD), "two": sentence(chance, BAD), "label": label(i)} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def predicted(checkpoint: str, pairs: list[tuple[str, str]], *names: str) -> list[dict[str, Any]]:
    """Predictions of `lmtool predict` for the pairs, or for their first texts."""
    write_pairs(Path("asked.jsonl"), pairs, *names)
    run("predict", f"checkpoint={checkpoint}", "input=asked.jsonl", "output=said.jsonl", "precision=fp32", "device=cpu")
    return [json.loads(line) for line in Path("said.jsonl").read_text().splitlines()]


def require_equal(folder: str, ours: list[dict[str, Any]], pairs: list[tuple[str, str]], paired: bool) -> None:
    """Checks that AutoTokenizer with the saved class, and the pipeline, predict the same."""
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
        assert [model.config.id2label[number] for number in best.indices.tolist()] == [
            row["prediction"] for row in ours
        ]
    texts = [{"text": first, "text_pair": two} if paired else first for first, two in pairs]
    piped = pipeline("text-classification", model=folder)(texts)
    assert [answer["score"] for answer in piped] == pytest.approx(scores, abs=1e-5)
    if model.config.problem_type != "regression":
        assert [answer["label"] for answer in piped] == [row["prediction"] for row in ours]
    assert torch.tensor(scores).std() > 1e-3  # predictions differ between texts


@pytest.mark.parametrize(
    ("family", "kind"),
    slow_but(
        {("bert", "regression"), ("roberta", "classification")},
        [
            *((family, "classification") for family in ("bert", "albert", "electra", "roberta", "distilbert")),
            ("bert", "regression"),
        ],
    ),
)
def test_pair_task_predicts_like_transformers(family: str, kind: str, place: Path) -> None:
    write_task(
        place / "pairs", lambda number: ["left", "right"][number % 2] if kind == "classification" else number / 7
    )
    run(
        "finetune", f"model={family}_tiny", "checkpoint=none", "task=custom", f"task.kind={kind}", "task.path=pairs",
        "task.text=[one,two]", *TINY, "model.initializer_std=0.3", "max_length=200", "max_steps=2", "name=run",
        "cache_dir=cache",
    )  # fmt: skip
    run("export", "checkpoint=runs/run", "output=folder")
    pairs = text_pairs()
    require_equal("folder", predicted("runs/run", pairs, "one", "two"), pairs, True)
    settings = json.loads(Path("folder/tokenizer_config.json").read_text())
    assert ("token_type_ids" in settings["model_input_names"]) == (family in ("bert", "albert", "electra"))
    assert settings["model_max_length"] == 200
    follow_card("folder")
    # The exported folder can be used directly.
    assert predicted("folder", pairs, "text", "pair")[0]["score"] == pytest.approx(
        predicted("runs/run", pairs, "one", "two")[0]["score"], abs=1e-6
    )


@pytest.mark.parametrize("objective", ["mlm_nsp", pytest.param("mlm_sop", marks=pytest.mark.slow)])
def test_pair_head_predicts_like_transformers(objective: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"mlm_nsp": "bert_tiny", "mlm_sop": "albert_tiny"}[objective]
    pretrain("run", "max_steps=2", f"objective={objective}", "model.initializer_std=0.3", model=model)
    run("export", "checkpoint=runs/run", "output=folder")
    theirs = AutoModelForPreTraining.from_pretrained("folder").eval()
    rows = AutoTokenizer.from_pretrained("folder")(
        *map(list, zip(*text_pairs(False), strict=True)), padding=True, return_tensors="pt"
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
        ours = predicted(checkpoint, text_pairs(False), "text", "pair")
        best = logits.softmax(-1).max(-1)
        assert torch.allclose(best.values, torch.tensor([row["score"] for row in ours]), atol=1e-5)
        assert [names[number] for number in best.indices.tolist()] == [row["prediction"] for row in ours]
    tokenizer = AutoTokenizer.from_pretrained("folder")
    texts = [text.replace(" saw ", f" {tokenizer.mask_token} ") for text, _ in text_pairs(False)]
    filled = pipeline("fill-mask", model="folder", top_k=400)(texts)
    for ours, theirs in zip(predicted("runs/run", [(text, "") for text in texts], "text"), filled, strict=True):
        # Embedding rows beyond the vocabulary belong to no token.
        scores = [guess["score"] for guess in theirs if guess["token"] < len(tokenizer)][:5]
        assert [share for _, share in ours["masks"][0]["guesses"]] == pytest.approx(scores, abs=1e-5)
    capsys.readouterr()
    run("predict", "checkpoint=runs/run", "text=a", "pair=b", "device=cpu")
    assert capsys.readouterr().out.split("  ")[1] == "a | b\n"


FAMILIES_AND_CLASSES = [
    ("bert", 3), ("roberta", 3), ("distilbert", 1), ("albert", 3), ("electra", 2), ("gpt", 3), ("gpt1", 2), ("bart", 3),
    ("t5", 2), *((family, count) for family in ("bert", "gpt", "bart") for count in (1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("family", "count"), slow_but({("bert", 3), ("distilbert", 1)}, FAMILIES_AND_CLASSES))
def test_published_classifier_predicts_like_transformers(
    family: str, count: int, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A published classifier is used from its folder, imported, and exported from both, with its labels."""
    names = {1: ["score"], 2: ["POSITIVE", "NEGATIVE"], 3: None}[count]
    make_classifier(family, place / "published", count, names)
    run("import", "checkpoint=published", "output=ours")
    run("export", "checkpoint=ours", "output=back")
    run("export", "checkpoint=published", "output=again")
    assert "inf" not in capsys.readouterr().out
    pairs = text_pairs()
    if family in ("bart", "t5"):  # transformers needs as many </s> in all texts of a batch
        pairs = [pair for pair in pairs if "</s>" not in "".join(pair)]
    labels = names or [f"LABEL_{number}" for number in range(count)]
    for paired in (False, True):
        ours = predicted("published", pairs, *["text", "pair"][: 1 + paired])
        assert count == 1 or {row["prediction"] for row in ours} <= set(labels)
        assert predicted("ours", pairs, *["text", "pair"][: 1 + paired]) == ours
        # The published folder too, except for single values, which its pipeline treats as classes.
        for folder in ("again" if paired else "back", *(["published"] if count > 1 else [])):
            require_equal(folder, ours, pairs, paired)
    config = json.loads(Path("back/config.json").read_text())
    assert list(config["id2label"].values()) == labels
    assert config["architectures"] == [CLASSIFIERS[family][0]]
    assert (config["problem_type"] == "regression") == (count == 1)


def evaluate(*words: str, status: int = 0) -> None:
    run("evaluate", "device=cpu", "precision=fp32", "cache_dir=cache", *words, status=status)


def write_three_classes(folder: Path, names: list[Any]) -> None:
    """Writes single texts of three classes, in columns text and label."""
    folder.mkdir()
    chance = random.Random(2)
    for split, count in (("train", 30), ("dev", 60)):
        rows = [{"text": sentence(chance, GOOD + BAD), "label": names[row % 3]} for row in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def accuracy_in_transformers(folder: str, data: str, numbers: dict[Any, int]) -> float:
    """The accuracy of transformers' model, with label numbers from its id2label."""
    rows = [json.loads(line) for line in Path(data, "dev.jsonl").read_text().splitlines()]
    model, tokenizer = (
        loader.from_pretrained(folder) for loader in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    with torch.no_grad():
        read = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
        best = model.eval()(**read).logits.argmax(-1).tolist()
    right = [number == numbers[row["label"]] for number, row in zip(best, rows, strict=True)]
    return sum(right) / len(right)


def test_evaluate_matches_classes_by_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The task has another order of classes than the checkpoint; data contain names or numbers of the task."""
    make_classifier("bert", place / "published", 3, ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"])
    names = ["entailment", "neutral", "contradiction"]
    write_three_classes(place / "named", names)
    write_three_classes(place / "numbered", [0, 1, 2])
    task = ["task=custom", "task.kind=classification"]
    labels = f"task.labels=[{','.join(names)}]"
    by_name = accuracy_in_transformers("published", "named", {"contradiction": 0, "neutral": 1, "entailment": 2})
    by_number = accuracy_in_transformers("published", "numbered", {0: 2, 1: 1, 2: 0})
    assert by_name != accuracy_in_transformers(
        "published", "named", {"contradiction": 2, "neutral": 1, "entailment": 0}
    )
    for words, accuracy in (
        ([*task, "task.path=named", labels], by_name),
        ([*task, "task.path=named"], by_name),
        (["task.path=named"], by_name),
        ([*task, "task.path=numbered", labels], by_number),
    ):
        capsys.readouterr()
        evaluate("checkpoint=published", *words)
        out = capsys.readouterr().out
        assert re.search(rf"^accuracy +{accuracy:.4f} ", out, re.MULTILINE)
        assert "ENTAILMENT = entailment" in out and "by number" not in out
    for words in (
        ["task.path=numbered"],
        [*task, "task.path=numbered"],
        [*task, "task.path=named", "task.labels=[a,b,c]"],
    ):
        evaluate("checkpoint=published", *words, status=2)
        error = capsys.readouterr().err
        assert (
            "predicts the classes CONTRADICTION, NEUTRAL, ENTAILMENT, but task=" in error
            or "label 'entailment'" in error
        )
    evaluate("checkpoint=published", status=2)
    assert "whose configuration names no data to score it on" in capsys.readouterr().err
    evaluate("checkpoint=published", "task=regression", "task.path=numbered", status=2)
    assert "task=regression has a number" in capsys.readouterr().err


def test_evaluate_matches_unnamed_classes_by_number(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_classifier("distilbert", place / "published", 3)
    write_three_classes(place / "named", ["b", "c", "a"])
    evaluate("checkpoint=published", "task=custom", "task.kind=classification", "task.path=named", "output=said.jsonl")
    out = capsys.readouterr().out
    accuracy = accuracy_in_transformers("published", "named", {"a": 0, "b": 1, "c": 2})
    assert re.search(rf"^accuracy +{accuracy:.4f} ", out, re.MULTILINE)
    assert "LABEL_0 = a, LABEL_1 = b, LABEL_2 = c (by number: the checkpoint does not name its classes)" in out
    assert {json.loads(line)["prediction"] for line in Path("said.jsonl").read_text().splitlines()} <= {"a", "b", "c"}


@pytest.mark.parametrize("family", slow_but({"gpt"}, ["bert", "gpt", "bart"]))
def test_published_classifier_is_finetuned_and_exported(
    family: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finetuning continues with the published head in the task's order of classes, and the result is exported."""
    make_classifier(family, place / "published", 2, ["POSITIVE", "NEGATIVE"])
    finetune("further", "checkpoint=published", "max_steps=1", "optimizer.lr=1e-20", "max_length=100")
    out = capsys.readouterr().out
    assert "heads.sst2" in out.split("loaded: ")[1].split(";")[0]
    assert "POSITIVE = positive" in out
    run("export", "checkpoint=runs/further", "output=folder")
    pairs = text_pairs()
    if family == "bart":
        pairs = [pair for pair in pairs if "</s>" not in pair[0]]
    theirs, again = (pipeline("text-classification", model=name) for name in ("published", "folder"))
    for answer, other in zip(
        theirs([pair[0] for pair in pairs[5:]]), again([pair[0] for pair in pairs[5:]]), strict=True
    ):
        assert answer["label"].lower() == other["label"] and answer["score"] == pytest.approx(other["score"], abs=1e-5)
    require_equal("folder", predicted("runs/further", pairs, "sentence"), pairs, False)
    # Other class names mean another task, whose head is new, as in the paper.
    finetune("other", "checkpoint=published", "max_steps=1", "task.labels=[bad,good]")
    assert "new: heads.sst2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "differing"),
    slow_but(
        [("t5", "the pooler")],
        [
            ("gpt", "the special tokens around texts and the bias of the output layer"),
            ("bart", "the pooler"),
            ("t5", "the pooler"),
        ],
    ),
)
def test_transformers_head_is_required_for_export(
    family: str, differing: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"model={family}_tiny",
        "checkpoint=none",
        *TINY,
        "max_steps=2",
        "model.initializer_std=0.3",
        "max_length=100",
    ]
    finetune("paper", *words)
    assert "to export it, set task.head=transformers task.pooling=" in capsys.readouterr().out
    run("export", "checkpoint=runs/paper", "output=paper", status=2)
    error = capsys.readouterr().err
    assert (
        f"heads.sst2 does not fit transformers' ...ForSequenceClassification of model={family}, which differs in "
        f"{differing}" in error
    )
    assert "task.head=transformers" in error and not Path("paper").exists()
    finetune("run", *words, "task.head=transformers", "model.feedforward_size=128")
    run("export", "checkpoint=runs/run", "output=folder")
    pairs = [pair for pair in text_pairs() if "</s>" not in pair[0]]
    require_equal("folder", predicted("runs/run", pairs, "sentence"), pairs, False)
    run("inspect", "finetune", "task=sst2", "task.path=rows", "checkpoint=folder", "n=1", "tokens=500")
    finetune("none", "model=transformer_tiny", "checkpoint=none", *TINY, "task.head=transformers", status=2)
    assert "transformers has no text classifier for model=transformer" in capsys.readouterr().err


def test_multiple_choice_without_choice_count_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_classifier("bert", place / "several", 3)
    # Multiple choice uses the same head, without the number of choices; files of 2019 name no class.
    path = place / "several/config.json"
    config = json.loads(path.read_text()) | {"problem_type": None, "architectures": ["BertForMultipleChoice"]}
    path.write_text(json.dumps(config))
    run("predict", "checkpoint=several", "text=a", status=2)
    assert "lacks the number of choices per row" in capsys.readouterr().err
    path.write_text(json.dumps({**config, "architectures": None}))
    run("predict", "checkpoint=several", "text=a", "device=cpu")
    assert "LABEL_" in capsys.readouterr().out


def test_exported_multiple_choice_predicts_the_same(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Export saves the number of choices per row, and the exported folder predicts the same."""
    chance, columns = random.Random(4), ["text", "choice1", "choice2", "choice3"]
    (place / "choices").mkdir()
    for split in ("train", "dev"):
        rows = [{name: sentence(chance, GOOD + BAD) for name in columns} | {"label": row % 3} for row in range(12)]
        (place / "choices" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    run(
        "finetune", "model=electra_tiny", "checkpoint=none", "task=custom", "task.kind=multiple_choice",
        "task.path=choices", f"task.text=[{','.join(columns)}]", "task.choices=3", *TINY, "model.initializer_std=0.3",
        "max_steps=1", "name=run", "cache_dir=cache",
    )  # fmt: skip
    run("export", "checkpoint=runs/run", "output=folder")
    assert "as ElectraForMultipleChoice" in capsys.readouterr().out
    said = []
    for checkpoint in ("runs/run", "folder"):
        words = ["input=choices/dev.jsonl", "output=said.jsonl", "precision=fp32", "device=cpu"]
        run("predict", f"checkpoint={checkpoint}", *words)
        said.append(Path("said.jsonl").read_text())
    assert said[0] == said[1] and "choice3" in said[0]


def test_model_without_lm_head_is_finetuned_only(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without language modeling head cannot predict words, but can be finetuned."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    LlamaModel(LlamaConfig(**sizes, vocab_size=400, max_position_embeddings=64)).save_pretrained("bare")
    build(ByteBpeConfig(), [Path("text.txt").read_text()], 400).save(Path("bare"))
    assert json.loads(Path("bare/config.json").read_text())["tie_word_embeddings"] is False
    run("predict", "checkpoint=bare", "text=a", "device=cpu", status=2)
    error = capsys.readouterr().err
    assert "has no language modeling head" in error and "hint: lmtool finetune task=NAME checkpoint=bare" in error
    finetune("run", "checkpoint=bare", "max_steps=1", "max_length=32", "device=cpu")
    assert "loaded: backbone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "file", "keys", "message"),
    [
        ("gpt", "config.json", {"pad_token_id": 40}, "pad_token_id=40, which is not a special token"),
        ("gpt", "tokenizer_config.json", {"add_bos_token": True}, "add_bos_token=true"),
        ("bart", "config.json", {"decoder_start_token_id": 0}, "decoder_start_token_id=0, but model=bart has 2"),
        ("bert", "tokenizer_config.json", {"model_input_names": ["input_ids"]}, "a pair are in one segment"),
        ("bert", "config.json", {"id2label": {"1": "a", "2": "b"}}, "does not number the labels"),
        ("bert", "config.json", {"id2label": {"0": "a", "1": "a"}}, "two or more names are needed"),
        ("bert", "config.json", {"id2label": {"0": "a", "1": "b", "2": "c"}}, "is (2, 36), the model has (3, 36)"),
    ],
)  # fmt: skip
def test_published_classifier_with_other_settings_is_refused(
    family: str, file: str, keys: dict[str, Any], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_classifier(family, place / "published")
    path = place / "published" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    run("predict", "checkpoint=published", "text=a", "device=cpu", status=2)
    error = capsys.readouterr().err
    assert message in error and "hint: " in error


def test_predict_refuses_texts_that_do_not_fit_the_task(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finetune("run", "model=bert_tiny", "checkpoint=none", *TINY, "max_steps=1")
    run("predict", "checkpoint=runs/run", "text=a", "pair=b", "device=cpu", status=2)
    assert "task=sst2 reads one text, sentence, but pair= is a second one" in capsys.readouterr().err
    run("predict", "checkpoint=runs/run", f"text={'a ' * 99}", "device=cpu")
    assert "warning: 1 of 1 texts are truncated to 32 tokens" in capsys.readouterr().out
    make_classifier("gpt", place / "gpt")
    write_pairs(Path("asked.jsonl"), [("a", ""), ("", "")], "text")
    run("predict", "checkpoint=gpt", "input=asked.jsonl", "device=cpu", status=2)
    assert "asked.jsonl:2: the text is empty" in capsys.readouterr().err
    pretrain("words", "objective=mlm", "max_steps=1")
    run("predict", "checkpoint=runs/words", "text=a", "pair=b", "device=cpu", status=2)
    assert "has no head over pairs of texts (next_sentence or sentence_order)" in capsys.readouterr().err


def test_gpt_without_pad_token_is_exported_with_one(place: Path) -> None:
    make_classifier("gpt", place / "published", 3)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = place / "published" / name
        path.write_text(
            json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "pad_token"})
        )
    run("export", "checkpoint=published", "output=folder")
    require_equal("folder", predicted("published", text_pairs(), "text"), text_pairs(), False)


def test_model_that_cannot_be_exported_is_said_before_training(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain("rotated", "model/positions=rotary", model="bert_tiny")
    said = " export    model.positions=rotary: BERT in transformers supports only learned; to export, train a new run"
    assert said in capsys.readouterr().out
    finetune("run", "checkpoint=runs/rotated", *TINY[:5])
    assert said in capsys.readouterr().out
    pretrain("learned", model="bert_tiny")
    assert "to export" not in capsys.readouterr().out


def test_task_without_head_of_its_own_has_no_export_note(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = ("task=seq2seq", "task.text=[sentence]", "task.label=label", "model=t5_tiny", "checkpoint=none")
    finetune("run", *task, *TINY, "max_steps=1")
    assert " export " not in capsys.readouterr().out
    run("export", "checkpoint=runs/run", "output=folder")
