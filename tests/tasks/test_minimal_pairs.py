"""Minimal pairs: log-probabilities beside plain loops over transformers, accuracies, and invalid tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from lmtool.cli import main as cli
from lmtool.session.trained import read_trained
from lmtool.tasks.minimal_pairs import Pairs, PairScores
from lmtool.training.precision import FP32_CPU
from lmtool.types import Packed
from tests.commands.conftest import TINY, tiny
from tests.distillation.runs import STEPS, assert_same, interrupt, saved
from tests.weights.published_folders import make

PAIRS = [
    ("The dog sleeps by the sea.", "The dog sleep by the sea."),
    ("She sells shells.", "Sells she shells unbelievably."),
    ("What a lovely film!", "What lovely a film!"),
    ("A fox jumps.", "A fox jumps."),
]


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pairs of two paradigms, in a file each."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name, rows in (("agreement", PAIRS[:2]), ("order", PAIRS[2:])):
        lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def differences(folder: Path, *words: str) -> list[float]:
    """The log-probability of the good sentence minus that of the bad one, as lmtool writes them."""
    Path("scores.jsonl").unlink(missing_ok=True)
    task = ["task=minimal_pairs", "task.path=pairs", "output=scores.jsonl", "device=cpu", "offline=true"]
    assert cli.main(["evaluate", f"checkpoint={folder}", *task, *words]) == 0
    rows = [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]
    assert [(row["good"], row["bad"]) for row in rows] == PAIRS
    return [row["log_probability_good"] - row["log_probability_bad"] for row in rows]


def expected(score) -> list[float]:
    return [score(good) - score(bad) for good, bad in PAIRS]


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("masking", ["token", "word"])
def test_pseudo_log_likelihood_equals_transformers(family: str, masking: str, pairs: Path) -> None:
    model = make(family, Path("model")).eval()
    tokenizer = AutoTokenizer.from_pretrained("model")

    @torch.no_grad()
    def score(sentence: str) -> float:
        encoded = tokenizer(sentence, return_tensors="pt")
        ids, words = encoded["input_ids"][0], encoded.word_ids()
        inner = range(1, len(ids) - 1)
        total = 0.0
        for place in inner:
            masked = ids.clone()
            masked[place] = tokenizer.mask_token_id
            for later in inner:
                if masking == "word" and later > place and words[later] == words[place]:
                    masked[later] = tokenizer.mask_token_id
            output = model(**{**encoded, "input_ids": masked[None]})
            logits = output.prediction_logits if family == "bert" else output.logits
            total += logits[0, place].log_softmax(-1)[ids[place]].item()
        return total

    assert np.allclose(differences(Path("model"), f"task.masking={masking}"), expected(score), atol=1e-5)


@pytest.mark.parametrize("masking", ["token", "word"])
def test_pseudo_log_likelihood_of_xlnet_equals_transformers(masking: str, pairs: Path) -> None:
    """Each token is the last of a factorization order: no token attends to it (`perm_mask`), and the query stream
    predicts it (`target_mapping`) from all the others, the special tokens among them. By word, no token attends to the
    later tokens of its word either."""
    model = make("xlnet", Path("model")).eval()
    tokenizer = AutoTokenizer.from_pretrained("model")

    @torch.no_grad()
    def score(sentence: str) -> float:
        ids = torch.tensor(tokenizer(sentence)["input_ids"])
        pieces = tokenizer.convert_ids_to_tokens(ids)
        assert pieces[-2:] == ["<sep>", "<cls>"]
        words = np.cumsum([piece.startswith("▁") for piece in pieces[:-2]])
        segments = torch.tensor([*[0] * (len(ids) - 1), 2])
        total = 0.0
        for place in range(len(ids) - 2):
            hidden = torch.zeros(1, len(ids), len(ids))
            hidden[:, :, place] = 1.0
            for later in range(place + 1, len(ids) - 2):
                if masking == "word" and words[later] == words[place]:
                    hidden[:, :, later] = 1.0
            target = torch.zeros(1, 1, len(ids))
            target[0, 0, place] = 1.0
            output = model(ids[None], perm_mask=hidden, target_mapping=target, token_type_ids=segments[None])
            total += output.logits[0, 0].log_softmax(-1)[ids[place]].item()
        return total

    assert np.allclose(differences(Path("model"), f"task.masking={masking}"), expected(score), atol=1e-5)


@pytest.mark.parametrize("first_token", ["scored", "skipped"])
def test_decoder_log_probability_equals_transformers(first_token: str, pairs: Path) -> None:
    model = make("gpt", Path("model")).eval()
    tokenizer = AutoTokenizer.from_pretrained("model")

    @torch.no_grad()
    def score(sentence: str) -> float:
        ids = tokenizer(sentence)["input_ids"]
        start = [tokenizer.eos_token_id] if first_token == "scored" else []
        tokens = torch.tensor([*start, *ids])
        logs = model(tokens[None]).logits[0].log_softmax(-1)
        return logs[:-1].gather(1, tokens[1:, None]).sum().item()

    assert np.allclose(differences(Path("model"), f"task.first_token={first_token}"), expected(score), atol=1e-5)


def test_encoder_decoder_fills_a_gap_with_the_sentence(pairs: Path) -> None:
    model = make("t5", Path("model")).eval()
    tokenizer = AutoTokenizer.from_pretrained("model")
    gap = tokenizer.convert_tokens_to_ids("<extra_id_0>")

    @torch.no_grad()
    def score(sentence: str) -> float:
        ids = tokenizer(sentence, add_special_tokens=False)["input_ids"]
        read = torch.tensor([[gap, tokenizer.eos_token_id]])
        start = model.config.decoder_start_token_id
        logs = (
            model(input_ids=read, decoder_input_ids=torch.tensor([[start, gap, *ids[:-1]]])).logits[0].log_softmax(-1)
        )
        return logs[1:].gather(1, torch.tensor(ids)[:, None]).sum().item()

    assert np.allclose(differences(Path("model")), expected(score), atol=1e-5)


def test_accuracy_is_mean_of_paradigms_and_ties_are_wrong() -> None:
    pairs = Pairs(list("abcdef"), list("ghijkl"), ["p", "p", "p", "p", "q", "q"], {"p": "one", "q": "one"}, [])
    values_N2 = np.array([[1, 0], [1, 0], [0, 1], [1, 1], [2, 0], [3, 0]], dtype=float)
    scores = PairScores.of(pairs, values_N2)
    assert scores.accuracies == {"p": 0.5, "q": 1.0} and scores.accuracy == 0.75
    assert scores.ties == {"p": 1, "q": 0} and scores.by_phenomenon() == {"one": ["p", "q"]}
    details = scores.details()
    assert details["pairs"] == 6 and details["accuracy"]["low"] == 0.5 and details["accuracy"]["high"] == 1.0
    flat = PairScores.of(pairs, np.zeros((6, 2)))
    assert flat.accuracy == 0.0 and scores.interval(["p", "q"], flat)["value"] == 0.75
    assert np.isnan(scores.interval(["p"])["low"])


def test_screen_and_report_name_paradigms_and_ties(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("gpt", Path("model"))
    task = ["task=blimp", "task.path=pairs", "device=cpu", "offline=true"]
    assert cli.main(["evaluate", "model", "model", *task, "report=out"]) == 0
    shown = capsys.readouterr().out
    assert "agreement" in shown and "mean of 2 paradigms with 4 pairs; chance is 0.5; 1 tie, counted as wrong" in shown
    assert "pairs of two equal sentences, always wrong: 1, the first in pairs/order.jsonl:2" in shown
    assert "model minus model, the same paradigms resampled for both" in shown
    details = json.loads(Path("out/evaluation.json").read_text())
    assert details["ties"] == 1 and details["difference"]["value"] == 0.0
    assert len(Path("out/predictions.jsonl").read_text().splitlines()) == 4


def test_ngram_baseline_learns_from_the_training_text_of_the_run(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("\n\n".join(["The dog sleeps by the sea.", "She sells shells."] * 30))
    text = ["data=text", "data.path=text.txt", "cache_dir=cache", "max_epochs=null"]
    assert cli.main(["pretrain", "model=gpt_tiny", *TINY, *text, "max_steps=1", "name=g"]) == 0
    capsys.readouterr()
    task = ["task=minimal_pairs", "task.path=pairs", "task.ngrams=3", "cache_dir=cache", "device=cpu"]
    assert cli.main(["evaluate", "checkpoint=runs/g", *task, "report=out"]) == 0
    assert "a 3-gram model of the same training text has accuracy 0.5000" in capsys.readouterr().out
    accuracies = json.loads(Path("out/evaluation.json").read_text())["ngrams"]["paradigms"]
    assert accuracies["agreement"]["value"] == 1.0  # the text has its good sentences


def test_sequence_autoencoder_is_refused(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("\n\n".join(["The dog sleeps by the sea.", "She sells shells."] * 30))
    text = ["data=text", "data.path=text.txt", "cache_dir=cache", "max_epochs=null", *tiny("lstm_tiny")]
    autoencoder = ["model=lstm_tiny", "objective=sequence_autoencoder", "name=a"]
    assert cli.main(["pretrain", *autoencoder, *text, "max_steps=1"]) == 0
    assert cli.main(["evaluate", "runs/a", "task=minimal_pairs", "task.path=pairs", "device=cpu"]) == 2
    assert "objective=sequence_autoencoder trains a model to repeat a text" in capsys.readouterr().err
    assert cli.main(["evaluate", "runs/a", "task=sst2", "task.path=pairs", "shots=0", "device=cpu"]) == 2
    assert "was trained to repeat them" in capsys.readouterr().err


def test_discriminator_of_electra_is_refused(pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("\n\n".join(["The dog sleeps by the sea.", "She sells shells."] * 30))
    text = ["data=text", "data.path=text.txt", "cache_dir=cache", "tokenizer.vocab_size=50", "max_epochs=null"]
    assert cli.main(["pretrain", "model=electra_tiny", *TINY, *text, "max_steps=1", "name=e"]) == 0
    assert cli.main(["evaluate", "runs/e", "task=minimal_pairs", "task.path=pairs", "device=cpu"]) == 2
    assert "objective=rtd trains a model on the words of a generator" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "words", "message"),
    [
        (['{"sentence_good": "A", "bad": "B"}'], [], "no column sentence_bad"),
        (['{"sentence_good": "A", "sentence_bad": " "}'], [], "pairs.jsonl:1: the column sentence_bad has no sentence"),
        (['{"sentence_good": "A", "sentence_bad": 3}'], [], "pairs.jsonl:1: the column sentence_bad has no sentence"),
        (['{"sentence_good": "%s", "sentence_bad": "A"}' % ("word " * 90)], [], "pairs.jsonl:1: the sentence has"),
        (['{"sentence_good": "A", "sentence_bad": "B"}'], ["data=text", "data.path=pairs.jsonl"], "does not apply"),
        (['{"sentence_good": "A", "sentence_bad": "B"}'], ["shots=2"], "shots=2 does not apply"),
        (['{"sentence_good": "A", "sentence_bad": "B"}'], ["task.ngrams=3"], "the training text of model is not known"),
        (['{"sentence_good": "A", "sentence_bad": "B"}'], ["task.train_examples=9"], "task.train_examples: given 9"),
    ],
)  # fmt: skip
def test_invalid_pairs_are_refused(
    lines: list[str], words: list[str], message: str, pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("gpt", Path("model"))
    Path("pairs.jsonl").write_text("\n".join(lines) + "\n")
    task = ["task=minimal_pairs", "task.path=pairs.jsonl", "device=cpu", "offline=true"]
    assert cli.main(["evaluate", "checkpoint=model", *task, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("family", "weight"), [("bert", "embeddings.LayerNorm"), ("gpt", "ln_f")])
def test_model_with_infinite_weights_is_not_scored(
    family: str, weight: str, pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(family, Path("model"))
    tensors = load_file("model/model.safetensors")
    for name in tensors:
        if weight in name:
            tensors[name][:] = float("inf")
    save_file(tensors, "model/model.safetensors", {"format": "pt"})
    task = ["task=minimal_pairs", "task.path=pairs", "device=cpu", "offline=true", "report=out"]
    assert cli.main(["evaluate", "checkpoint=model", *task]) == 4
    assert "not finite" in capsys.readouterr().err and not Path("out/evaluation.json").exists()


def test_minimal_pairs_are_not_learned(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["finetune", "task=blimp", "task.path=.", "checkpoint=none", "model=bert_tiny"]) == 2
    assert "minimal pairs are scored, not learned" in capsys.readouterr().err


def test_pretraining_scores_a_sample_of_pairs_at_each_evaluation(
    pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("\n\n".join(["The dog sleeps by the sea.", "She sells shells."] * 30))
    text = ["data=text", "data.path=text.txt", "cache_dir=cache", "max_epochs=null"]
    run = ["pretrain", "model=gpt_tiny", *TINY, *text, "max_steps=2", "evaluate_every=1"]
    assert cli.main([*run, "minimal_pairs=pairs", "name=scored"]) == 0
    assert "4 pairs of 2 paradigms" in capsys.readouterr().out
    rows = [json.loads(line) for line in Path("runs/scored/metrics.jsonl").read_text().splitlines()]
    scores = [row["minimal_pairs"] for row in rows if row["split"] == "validation"]
    task = ["task=minimal_pairs", "task.path=pairs", "device=cpu", "report=out"]
    assert cli.main(["evaluate", "checkpoint=runs/scored", *task]) == 0
    accuracy = json.loads(Path("out/evaluation.json").read_text())["accuracy"]["value"]
    assert len(scores) == 2 and scores[-1] == accuracy
    assert cli.main([*run, "name=plain"]) == 0
    weights = [Path(f"runs/{name}/checkpoints/step_00000002/model.safetensors") for name in ("scored", "plain")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    capsys.readouterr()
    assert cli.main([*run, "minimal_pairs=missing", "name=refused"]) == 2
    assert "minimal_pairs=missing" in capsys.readouterr().err and not Path("runs/refused").exists()
    electra = ["pretrain", "model=electra_tiny", *TINY, *text, "tokenizer.vocab_size=50", "max_steps=1"]
    assert cli.main([*electra, "minimal_pairs=pairs"]) == 2
    assert "objective=rtd trains a model on the words of a generator" in capsys.readouterr().err


def test_sample_has_equally_many_pairs_of_each_paradigm() -> None:
    good = [f"good {number}" for number in range(30)]
    bad = [f"bad {number}" for number in range(30)]
    pairs = Pairs(good, bad, ["p"] * 20 + ["q"] * 10, {}, [("file", row) for row in range(30)])
    sample = pairs.sample(8)
    assert [sample.paradigms.count(name) for name in "pq"] == [4, 4]
    assert all(
        text.removeprefix("good") == other.removeprefix("bad")
        for text, other in zip(sample.good, sample.bad, strict=True)
    )
    assert sample.good != good[:4] + good[20:24] and len(pairs.sample(100)) == 30


@pytest.mark.parametrize("objective", ["mntp", "mntp_hybrid"])
def test_both_readings_of_a_masked_decoder_and_its_resume(
    objective: str, pairs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read with masks, every token is masked in turn; mntp alone is read in no other way."""
    text = (f"The dog sleeps by the sea {number} times. She sells {number} shells." for number in range(300))
    Path("text.txt").write_text("\n\n".join(text))
    words = ["pretrain", "model=gpt_tiny", f"objective={objective}", "tokenizer.special_tokens=roberta", *TINY]
    words += ["data=text", "data.path=text.txt", "cache_dir=cache", *STEPS, "model.dropout=0.1", "batch_tokens=256"]

    def start(name: str, status: int = 0) -> Path:
        assert cli.main([*words, f"name={name}"]) == status
        return Path("runs") / name

    whole = start("whole")
    interrupt(monkeypatch, lambda status: start("cut", status))
    assert_same(saved(whole), saved(start("cut")))

    learner = read_trained(str(whole), True, FP32_CPU).learner()
    tokenizer = learner.tokenizer
    mask, end = tokenizer.role("mask"), tokenizer.role("eos")

    @torch.no_grad()
    def logs(tokens: list[int], prefix: int) -> torch.Tensor:
        packed = Packed(torch.tensor(tokens), (len(tokens),), prefixes=(prefix,))
        return (learner.backbone(packed) @ learner.table_VW.T).log_softmax(-1)

    def masked(sentence: str) -> float:
        ids, total = tokenizer.encode(sentence).tolist(), 0.0
        for place, label in enumerate(ids):
            tokens = [end, *ids[:place], mask, *ids[place + 1 :], end]
            total += logs(tokens, len(tokens))[place, label].item()  # the position before the mask
        return total

    def causal(sentence: str) -> float:
        ids = tokenizer.encode(sentence).tolist()
        return logs([end, *ids], 0)[:-1].gather(1, torch.tensor(ids)[:, None]).sum().item()

    if objective == "mntp":
        assert np.allclose(differences(whole), expected(masked), atol=1e-4)
        task = ["task=minimal_pairs", "task.path=pairs", "device=cpu", "task.reading=causal"]
        assert cli.main(["evaluate", f"checkpoint={whole}", *task]) == 2
        assert "a model trained with objective=mntp reads sentences in one way" in capsys.readouterr().err
    else:
        assert np.allclose(differences(whole, "task.reading=masked"), expected(masked), atol=1e-4)
        assert np.allclose(differences(whole), expected(causal), atol=1e-4)
