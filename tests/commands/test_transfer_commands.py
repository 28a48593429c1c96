"""`export`, `import` and `checkpoint=` with published folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import lmtool
from lmtool.cli import main as cli
from lmtool.runs.finding import verify
from lmtool.tokenizers.tokenizer import Tokenizer
from tests.breadth import slow_but
from tests.commands.conftest import finetune, follow_card, pretrain
from tests.weights.published_folders import FAMILIES, logits_of, make, sample


def run(*words: str, status: int = 0) -> None:
    assert cli.main([*words]) == status


def equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is not None and right is not None and torch.equal(left, right)


@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_preserve_weights_and_logits(
    family: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A published folder is imported and exported again, with the same weights and logits."""
    theirs = make(family, place / "published")
    run("import", "checkpoint=published", "output=ours")
    verify(place / "ours")
    run("export", "checkpoint=ours", "output=back")
    out = capsys.readouterr().out
    # Every BigBird class has a pooler, which a masked language model does not use; export writes zeros.
    pooler = family == "bigbird"
    assert out.count("missing keys  none") == 2 and out.count("unused keys   none") == (0 if pooler else 2)
    assert "0 of 24 adversarial strings" in out
    again = type(theirs).from_pretrained(place / "back").eval()
    ids, mask, decoder = sample(lmtool.load("ours").config.architecture == "encoder_decoder")
    weights, published = again.state_dict(), theirs.state_dict()
    differing = {
        name for name in weights.keys() | published.keys() if not equal(weights.get(name), published.get(name))
    }
    assert all(pooler and ".pooler." in name for name in differing), differing
    # The last bit of a product depends on the address of the mapped file. The pair heads of BERT and ALBERT, whose
    # logits are not compared, are transferred too.
    torch.testing.assert_close(
        logits_of(again, ids, mask, decoder), logits_of(theirs, ids, mask, decoder), rtol=1e-6, atol=1e-6
    )
    config = json.loads((place / "back/config.json").read_text())
    assert config["architectures"] == [type(theirs).__name__]
    writes = family in ("gpt", "gpt1", "llama", "qwen2", "t5", "bart", "transformer")
    assert (place / "back/generation_config.json").is_file() == writes
    assert "published" in (place / "back/README.md").read_text()
    follow_card("back")


def test_rows_beyond_vocabulary_are_never_generated(place: Path) -> None:
    """The embedding has rows beyond the vocabulary, and transformers samples them unless the export forbids it."""
    published, texts = make("gpt1", place / "published"), []
    run("export", "checkpoint=published", "output=folder")
    again, entries = AutoModelForCausalLM.from_pretrained("folder"), len(AutoTokenizer.from_pretrained("folder"))
    assert entries < again.config.vocab_size == len(again.get_input_embeddings().weight)
    for model in (published, again):
        torch.manual_seed(1)
        texts.append(model.generate(torch.tensor([[5, 6]] * 20), do_sample=True, max_new_tokens=10, top_k=0))
    assert (texts[0] >= entries).any() and not (texts[1] >= entries).any()


def test_exported_runs_give_same_logits(place: Path) -> None:
    pretrain("words", "objective=mlm", "max_steps=2")
    finetune("labels", "checkpoint=runs/words", "max_steps=2")
    run("export", "checkpoint=runs/words", "output=words")
    run("export", "checkpoint=runs/labels", "output=labels")
    for folder, reader in (("words", AutoModelForMaskedLM), ("labels", AutoModelForSequenceClassification)):
        theirs, ours = reader.from_pretrained(folder).eval(), lmtool.load(f"runs/{folder}")
        rows = AutoTokenizer.from_pretrained(folder)(
            ["The happy cat saw the ship.", "A sad king."], padding=True, return_tensors="pt"
        )
        with torch.no_grad():
            expected = theirs(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
            given = ours.model(rows["input_ids"], rows["attention_mask"]).logits
        real = rows["attention_mask"].bool() if folder == "words" else ...
        assert torch.allclose(given[real], expected[real], atol=1e-5)
    assert "runs/words" in Path("labels/README.md").read_text()
    assert len(json.loads(Path("labels/config.json").read_text())["id2label"]) == 2
    run("export", "checkpoint=runs/words", "output=words", status=2)


def test_published_folder_is_finetuned_and_pretrained_further(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("bert", place / "published")
    finetune("run", "checkpoint=published", "max_steps=2", "offline=true")
    out = capsys.readouterr().out
    assert "loaded: backbone" in out and "dropped: heads.masked_lm" in out and "new: heads.sst2" in out
    finetune("other", "checkpoint=published", "model=gpt_tiny", "max_steps=2", status=2)
    assert "model.name=gpt, but the checkpoint has model.name=bert" in capsys.readouterr().err
    folder = pretrain_on("published", place)
    assert json.loads((folder / "result.json").read_text())["steps"] == 2
    run("export", f"checkpoint={folder}", "output=further")
    assert AutoModel.from_pretrained("further").config.vocab_size == 330


def pretrain_on(checkpoint: str, place: Path) -> Path:
    run(
        "pretrain", "model=auto", f"checkpoint={checkpoint}", "data=text", "data.path=text.txt", "cache_dir=cache",
        "name=further", "objective=mlm", "batch_tokens=256", "max_steps=2", "max_length=32", "device=cpu",
        "precision=fp32",
    )  # fmt: skip
    return Path("runs/further")


def test_published_weights_predict_and_evaluate(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for family, text in (("bert", "the quick [MASK] fox"), ("gpt", "the quick")):
        make(family, place / family)
        run("import", f"checkpoint={family}", f"output=our_{family}")
        for checkpoint in (family, f"our_{family}"):
            run("predict", f"checkpoint={checkpoint}", f"text={text}", "device=cpu", f"output={checkpoint}.jsonl")
            assert json.loads(Path(f"{checkpoint}.jsonl").read_text())["text"] == text
            run(
                "evaluate",
                f"checkpoint={checkpoint}",
                "data=text",
                "data.path=text.txt",
                "cache_dir=cache",
                "device=cpu",
            )
    make("electra", place / "electra")
    capsys.readouterr()
    run("predict", "checkpoint=electra", "text=a [MASK]", status=2)
    assert "checkpoint=electra has no language modeling head" in capsys.readouterr().err


def test_hub_tokenizer_is_read_from_cache_and_copied(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer is read from the cache, and the run keeps a copy."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))
    commit = "0123456789abcdef0123456789abcdef01234567"
    make("bert", place / "hub/models--some--bert/snapshots" / commit)
    theirs = Tokenizer.load(place / "hub/models--some--bert/snapshots" / commit)
    (place / "hub/models--some--bert/refs").mkdir()
    (place / "hub/models--some--bert/refs/main").write_text(commit)
    wanted = ["tokenizer=folder", "tokenizer.path=hf://some/bert", "offline=true"]
    folder = pretrain("words", *wanted, "objective=mlm", "max_steps=1")
    (place / "hub").rename(place / "gone")
    pretrain("words", *wanted, "objective=mlm", "max_steps=1")
    assert lmtool.load(str(folder)).tokenizer.fingerprint == theirs.fingerprint
    capsys.readouterr()
    pretrain("other", *wanted, "objective=mlm", "max_steps=1", status=2)
    captured = capsys.readouterr()
    assert "tokenizer.path=hf://some/bert: tokenizer.json of some/bert@main is not in the hub's cache" in captured.err
    assert "use a local folder" in captured.err and "reading" not in captured.out and not Path("runs/other").exists()
    pretrain("other", "tokenizer=folder", "tokenizer.path=no", "objective=mlm", "max_steps=1", status=2)
    assert "tokenizer.path=no: no such folder" in capsys.readouterr().err


def test_invalid_export_and_import_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("bert", place / "published")
    for words, message in (
        (("export", "checkpoint=nowhere", "output=x"), "checkpoint=nowhere: no such folder"),
        (
            ("export", "checkpoint=hf://no/where", "output=x", "offline=true"),
            "not in the hub's cache, and offline=true",
        ),
        (("import", "checkpoint=runs", "output=x"), "checkpoint=runs"),
    ):
        run(*words, status=2)
        assert message in capsys.readouterr().err
    (place / "published/config.json").write_text('{"model_type": "bert", "hidden_act": "swish"}')
    finetune("run", "checkpoint=published", "max_steps=2", status=2)
    assert "hidden_act='swish', but model=bert supports only gelu" in capsys.readouterr().err


@pytest.mark.parametrize(
    "family",
    slow_but({"bert", "gpt", "t5", "bart"}, ["bert", "roberta", "albert", "electra", "gpt", "gpt1", "t5", "bart"]),
)
def test_exported_pretrained_family_gives_same_logits(family: str, place: Path) -> None:
    """A model trained with its default objective gives the same logits in transformers."""
    # GPT's published files allow only a feed-forward size of four times the hidden size.
    pretrain("run", "max_steps=2", "model.feedforward_size=128", model=f"{family}_tiny")
    run("export", "checkpoint=runs/run", "output=exported")
    config = json.loads(Path("exported/config.json").read_text())
    theirs = getattr(transformers, config["architectures"][0]).from_pretrained("exported").eval()
    ours = lmtool.load("runs/run")
    ids, mask, decoder = sample(ours.config.architecture == "encoder_decoder")
    ids, decoder = ids % 200 + 10, None if decoder is None else decoder % 200 + 10
    expected = logits_of(theirs, ids, mask, decoder)
    with torch.no_grad():
        given = ours.model(ids, mask, decoder).logits
    real = mask.bool() if decoder is None else torch.ones_like(decoder, dtype=torch.bool)
    assert torch.allclose(given[real], expected[real], atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained("exported")
    assert len(tokenizer) == ours.tokenizer.vocab_size
    for text in ("The happy cat saw the ship.", "  A SAD Café,\tnear\n[MASK] 中文 <|endoftext|>!"):
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ids == ours.tokenizer.encode(text).tolist()
