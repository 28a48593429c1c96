"""Exported adapters in PEFT, and imported adapters of PEFT, compared with the PEFT library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import lmtool
from lmtool.cli import main as cli
from tests.breadth import slow_but
from tests.commands.conftest import finetune
from tests.weights.published_folders import make

peft = pytest.importorskip("peft")
TUNED = ("checkpoint=published", "max_steps=3", "optimizer.lr=0.05", "max_length=24")
TEXTS = ["The happy cat saw the ship.", "A sad king."]


def run(*words: str, status: int = 0) -> None:
    assert cli.main([*words]) == status


def theirs(architecture: str, folder: str, more: dict[str, Any]) -> torch.nn.Module:
    """An adapter on its base, loaded as a user of PEFT loads it."""
    base = getattr(transformers, architecture).from_pretrained("published", **more)
    return peft.PeftModel.from_pretrained(base, folder).eval()


def logits_of(model: torch.nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**rows).logits


def test_peft_export_with_unreadable_base_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama's question answering class names its backbone differently from all other Llama classes."""
    make("llama", place / "published")
    paragraphs = []
    for number in range(12):
        context = f"The happy cat saw ship {number}."
        answers = [{"text": "cat", "answer_start": context.index("cat")}]
        paragraphs.append({"context": context, "qas": [{"id": str(number), "question": "who?", "answers": answers}]})
    Path("asked.json").write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    run(
        "finetune", "checkpoint=published", "task=squad", "task.path=asked.json", "tuning=lora", "max_steps=1",
        "batch_examples=4", "max_length=40", "task.stride=4", "name=run", "cache_dir=cache", "device=cpu",
    )  # fmt: skip
    capsys.readouterr()
    run("export", "checkpoint=runs/run", "output=adapter", "format=peft", status=2)
    assert (
        "transformers does not load the backbone of published into LlamaForQuestionAnswering" in capsys.readouterr().err
    )
    _, report = transformers.AutoModelForQuestionAnswering.from_pretrained("published", output_loading_info=True)
    assert "transformer.embed_tokens.weight" in report["missing_keys"]
    run("export", "checkpoint=runs/run", "output=merged")
    assert "as LlamaForQuestionAnswering · largest differences" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "method"),
    slow_but([("gpt", "lora"), ("t5", "ia3")], [("bert", "lora"), ("gpt", "lora"), ("gpt", "ia3"), ("t5", "ia3")]),
)
def test_exported_adapter_matches_peft_and_is_imported(
    family: str, method: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT and the re-imported adapter give the logits of the run."""
    make(family, place / "published")
    more = ["tuning.projections=[q_proj,v_proj,fc_out]", "tuning.rank=3"] if method == "lora" else []
    finetune("run", *TUNED, f"tuning={method}", "task.head=transformers", *more)
    run("export", "checkpoint=runs/run", "output=adapter", "format=peft")
    assert "without the weights of published" in capsys.readouterr().out
    settings = json.loads(Path("adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "published" and settings["task_type"] == "SEQ_CLS"
    loaded = lmtool.load("runs/run")
    rows = loaded.tokenizer(TEXTS)
    expected = loaded.model(**rows).logits
    name = {"bert": "Bert", "gpt": "GPT2", "t5": "T5"}[family] + "ForSequenceClassification"
    labels = json.loads(Path("adapter/labels.json").read_text())
    assert labels["id2label"] == {"0": "negative", "1": "positive"}
    more = {"num_labels": labels["num_labels"], "pad_token_id": loaded.tokenizer.with_padding().roles["pad"]}
    assert torch.allclose(logits_of(theirs(name, "adapter", more), rows), expected, atol=1e-5)
    plain = getattr(transformers, name).from_pretrained("published", **more).eval()
    assert not torch.allclose(logits_of(plain, rows), expected, atol=1e-2), "the adapter has an effect"
    read = transformers.AutoTokenizer.from_pretrained("adapter")(TEXTS, padding=True, return_tensors="pt")
    assert {key: tensor.tolist() for key, tensor in read.items()} == {key: rows[key].tolist() for key in read}
    run("import", "checkpoint=adapter", "output=back")
    assert "names of labels" not in capsys.readouterr().out
    again = lmtool.load("back")
    assert again.saved["tuning"]["name"] == method and again.task["labels"] == ["negative", "positive"]
    assert torch.allclose(again.model(**rows).logits, expected, atol=1e-5)
    asked = ["device=cpu", "precision=fp32", "text=A lovely cat."]
    run("predict", "checkpoint=back", *asked, "output=back.jsonl")
    run("predict", "checkpoint=runs/run", *asked, "output=run.jsonl")
    scores = [json.loads(Path(f"{name}.jsonl").read_text())["score"] for name in ("back", "run")]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize(
    ("family", "method"),
    slow_but([("gpt", "prefix")], [("gpt", "prompt"), ("t5", "prompt"), ("gpt", "prefix"), ("gpt", "ptuning")]),
)
def test_exported_prompts_of_language_models_match_peft(
    family: str, method: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Virtual tokens and prefixes are exported without their training-time networks."""
    published = make(family, place / "published")
    lines = [f"the quick fox {number}\tthe lazy dog {number % 3}" for number in range(24)]
    for split in ("train", "dev"):
        Path("pairs").mkdir(exist_ok=True)
        Path(f"pairs/{split}.tsv").write_text("\n".join(["source\ttarget", *lines]) + "\n")
    words = ["task=seq2seq", "task.path=pairs", f"tuning={method}", "tuning.length=4", "task.target_tokens=12"]
    run("finetune", *words, *TUNED, "name=run", "device=cpu", "precision=fp32", "batch_examples=8")
    run("export", "checkpoint=runs/run", "output=adapter", "format=peft")
    ids = torch.arange(2 * 9).reshape(2, 9) * 37 % 290 + 10
    given = {"input_ids": ids} | ({} if family == "gpt" else {"decoder_input_ids": ids[:, :5].flip(1)})
    expected = lmtool.load("runs/run").model(**given).logits
    answers = logits_of(theirs(type(published).__name__, "adapter", {}), given)
    assert torch.allclose(answers[:, -expected.shape[1] :], expected, atol=1e-5)
    assert not torch.allclose(logits_of(published, given), expected, atol=1e-2)


def test_imported_language_model_adapter_is_used(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter without a task head predicts on the command line and in Python, and can be finetuned."""
    published = make("gpt", place / "published")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(type(published).from_pretrained("published"), settings).eval()
    tuned.save_pretrained("adapter")
    run("import", "checkpoint=adapter", "output=ours")
    loaded = lmtool.load("ours")
    ids = torch.arange(18).reshape(2, 9) * 37 % 290 + 10
    assert torch.allclose(loaded.model(ids).logits, logits_of(tuned, {"input_ids": ids}), atol=1e-4)
    run("predict", "checkpoint=ours", "text=the quick", "device=cpu", "precision=fp32", "output=ours.jsonl")
    (record,) = loaded.predict("the quick")
    assert record == json.loads(Path("ours.jsonl").read_text())
    run("export", "checkpoint=ours", "output=merged")
    assert lmtool.load("merged").predict("the quick") == [record]
    run("export", "checkpoint=ours", "output=again", "format=peft")
    finetune("on", "checkpoint=ours", "max_steps=1", "max_length=24")
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    for change, message in (
        ({"base_model_name_or_path": None}, "has no base_model_name_or_path"),
        ({"peft_type": "LOHA"}, 'peft_type: given "LOHA" (text); lmtool reads LORA, IA3'),
    ):
        Path("adapter/adapter_config.json").write_text(json.dumps({**config, **change}))
        capsys.readouterr()
        run("import", "checkpoint=adapter", "output=x", status=2)
        assert message in capsys.readouterr().err
    make("bert", place / "other")
    Path("adapter/adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "other"}))
    run("import", "checkpoint=adapter", "output=x", status=2)
    assert (
        "the adapter updates transformer.h.0.attn.c_proj, which is not a linear layer of its base"
        in capsys.readouterr().err
    )
