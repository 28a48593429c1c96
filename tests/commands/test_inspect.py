"""`lmtool inspect`: examples as the model reads them, statistics, exit statuses."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmtool.cli import main as cli
from lmtool.data.formats import PackedArrays, truncate_texts
from lmtool.objectives import checks
from lmtool.objectives.corruption.noises import corrupt_spans, delete, mask_each, poisson_probabilities, rotate
from lmtool.objectives.examples.pairs import _PairPlanner
from lmtool.objectives.examples.windows import windows
from lmtool.reporting.text import cells
from lmtool.types import Packed
from tests.commands.conftest import TINY, pretrain, tiny

DATA = ["data=text", "data.path=text.txt", "cache_dir=cache"]
CASES = {
    "mlm_nsp": ("bert_tiny", {"mlm", "nsp"}),
    "span": ("bert_tiny", {"mlm", "sbo"}),
    "rtd": ("bert_tiny", {"mlm", "rtd"}),
    "clm": ("gpt_tiny", {"clm"}),
    "prefix_lm": ("gpt_tiny", {"prefix_lm"}),
    "mntp_hybrid": ("gpt_tiny", {"clm", "mntp"}),
    "span_corruption": ("t5_tiny", {"span_corruption"}),
    "denoising": ("bart_tiny", {"denoising"}),
    "rtd_all_tokens_mlm": ("electra_tiny", {"mlm", "all_tokens_mlm"}),
}


def inspect(*words: str) -> int:
    return cli.main(["inspect", *words, *TINY, "tokens=4000"])


def test_inspect_shows_that_a_sequence_autoencoder_reads_and_writes_a_text(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=lstm_tiny", "objective=sequence_autoencoder", *DATA, *tiny("lstm_tiny"), "tokens=4000", "n=2"]
    assert cli.main(["inspect", "pretrain", *words, "output=seen.jsonl"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "checks hold: " in printed and "DOES NOT HOLD" not in printed
    for example in map(json.loads, Path("seen.jsonl").read_text().splitlines()):
        ids = example["input"]["ids"]
        assert ids[: len(ids) // 2] == ids[len(ids) // 2 + 1 :] and len(ids) <= 32


@pytest.mark.parametrize("objective", CASES)
def test_inspect_pretrain_checks_every_objective(
    place: Path, capsys: pytest.CaptureFixture[str], objective: str
) -> None:
    model, terms = CASES[objective]
    words = [f"model={model}", f"objective={objective}", *DATA, "n=2", "output=seen.jsonl"]
    words += ["tokenizer.special_tokens=roberta"] if objective == "mntp_hybrid" else []
    assert inspect("pretrain", *words) == 0
    printed = capsys.readouterr().out
    assert "example 0" in printed and "DOES NOT HOLD" not in printed
    # Causal language modeling corrupts nothing, so it has no confidence interval.
    words = " ".join(printed.split())
    assert "checks hold: " in words and "zero, as required: " in words
    assert ("(together 99.9% sure)" in words) == (objective != "clm")
    examples = [json.loads(line) for line in Path("seen.jsonl").read_text().splitlines()]
    assert len(examples) == 2
    if objective == "mlm_nsp":
        assert all(len(example["boundaries"]) == 1 for example in examples), "the boundary of the pair is shown"
    for example in examples:
        assert set(example["targets"]) == terms and example["text"]
        sides = [example["input"], *([example["output"]] if "output" in example else [])]
        assert all(len(side["pieces"]) == len(side["ids"]) <= 32 for side in sides)
        side = sides[-1]
        for places in example["targets"].values():
            if isinstance(places, list):
                assert all(0 <= place["position"] < len(side["ids"]) and place["label"] for place in places)
    if objective == "span":
        boundaries = [place["borders"] for example in examples for place in example["targets"]["sbo"]]
        assert boundaries and all(first < last for first, last in boundaries)
    assert not Path("runs").exists()


def test_random_second_segments_are_those_of_the_warning(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first documents have two sentences and the others one, so that a sample differs from the whole epoch."""
    lines = [f"The cat number {n} sat down. It was glad." if n < 150 else f"The dog {n} ran." for n in range(800)]
    Path("text.txt").write_text("\n".join(lines) + "\n")
    assert inspect("pretrain", "model=bert_tiny", "objective=mlm_nsp", *DATA, "data.document=line", "n=1") == 0
    printed = " ".join(capsys.readouterr().out.split())
    (finding,) = re.findall(r"the second text of ([\d.]+)% of the pairs is a random one", printed)
    (row,) = re.findall(r"random second segments of an epoch ([\d.]+)%", printed)
    (warned,) = re.findall(r"([\d.]+)% of the second segments are random", printed)
    assert finding == row and float(warned) == pytest.approx(float(row), abs=0.5)


def test_inspect_finetune_shows_example(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["task=sst2", "task.path=rows", "model=bert_tiny", "checkpoint=none", "cache_dir=cache"]
    assert inspect(*words, "n=1", "output=seen.jsonl") == 0
    (example,) = map(json.loads, Path("seen.jsonl").read_text().splitlines())
    assert example["text"].startswith("The ") and example["targets"]["sst2"] in ("negative", "positive", "0", "1")
    printed = capsys.readouterr().out
    assert "truncated fraction" in printed and "tokens on average; " in printed


def test_inspect_finetune_tells_splits_apart(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The development rows of the fixture are like its training rows; those that begin with a planted word are not."""
    run = pretrain("base", "max_steps=2")
    words = ["task=sst2", "task.path=rows", f"checkpoint={run}", "cache_dir=cache", "n=0", "device=cpu"]
    assert inspect(*words, "states=20") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "told apart" in printed and "most telling words" not in printed
    assert f"states · {run}" in printed and "A-distance" in printed
    lines = (place / "rows/dev.tsv").read_text().splitlines()
    (place / "rows/dev.tsv").write_text("\n".join([lines[0], *(f"Planted {line}" for line in lines[1:])]) + "\n")
    assert inspect(*words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1.000 [0.912, 1.000]" in printed and "dev: planted" in printed and "A-distance" not in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "pretrain", "model=bert_tiny", "states=50"], "states=50 compares the rows of a task's splits"),
        (
            ["inspect", "finetune", "task=sst2", "task.path=rows", "checkpoint=none", "model=bert_tiny", "states=50"],
            "states=50 compares hidden states of trained weights",
        ),
        (
            ["inspect", "finetune", "task=sst2", "task.path=rows", "checkpoint=runs/base", "states=5"],
            "states=5 is too few rows to compare",
        ),
    ],
)
def test_states_that_cannot_be_compared_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    pretrain("base", "max_steps=1")
    capsys.readouterr()
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out


def changed(name: str, **fields: Any) -> Callable[..., Any]:
    """The function of this name, called with a changed configuration."""
    module, _, function = name.rpartition(".")
    real = getattr(importlib.import_module(module), function)
    return lambda config, *rest: real(config.model_copy(update=fields), *rest)


OBJECTIVES = "lmtool.objectives"
CORRUPTION, EXAMPLES = f"{OBJECTIVES}.corruption", f"{OBJECTIVES}.examples"
# The replaced function and its replacement, the objective that breaks, and the statistic that detects it.
DEFECTS: dict[str, tuple[str, Callable[..., Any], list[str], str]] = {
    "budget": (
        f"{CORRUPTION}.masking.budget", lambda eligible, _: np.minimum(eligible, 2), ["objective=mlm"],
        "examples with a wrong number of predicted tokens",
    ),
    "mask share": (
        f"{CORRUPTION}.masking.replace_tokens", changed(f"{CORRUPTION}.masking.replace_tokens", mask=0.6),
        ["objective=mlm"], "predicted tokens replaced by [MASK]",
    ),
    "random share": (
        f"{CORRUPTION}.masking.replace_tokens", changed(f"{CORRUPTION}.masking.replace_tokens", random=0.0),
        ["objective=mlm"], "predicted tokens replaced by another token",
    ),
    "bernoulli share": (
        f"{EXAMPLES}.masked.mask_tokens", changed(f"{CORRUPTION}.masking.mask_tokens", probability=0.2),
        ["objective=mlm", "objective.select=bernoulli"], "predicted fraction of text",
    ),
    "whole words": (
        f"{EXAMPLES}.masked.mask_tokens", changed(f"{CORRUPTION}.masking.mask_tokens", whole_word=False),
        ["objective=mlm_whole_word", "tokenizer.vocab_size=60"], "words partly predicted",
    ),
    "text": (
        f"{EXAMPLES}.masked.windows", lambda *rest: windows(*rest)[::2], ["objective=mlm"],
        "fraction of text in no example",
    ),
    "padding": (
        "lmtool.data.formats.PackedArrays.packed", lambda whole, *_: padded(whole), ["objective=mlm"],
        "padding fraction",
    ),
    "truncation": (
        f"{EXAMPLES}.pairs.truncate_texts", lambda lengths, limit, rule: truncate_texts(lengths, limit - 3, rule),
        ["objective=mlm_nsp"], "pairs truncated although they fit",
    ),
    "nsp balance": (
        f"{EXAMPLES}.pairs._PairPlanner._uniform",
        lambda self, active, number, which: UNIFORM(self, active, number, which) ** 3, ["objective=mlm_nsp"],
        "random second segments where there is a choice",
    ),
    "sop balance": (
        f"{EXAMPLES}.pairs._PairPlanner._uniform",
        lambda self, active, number, which: UNIFORM(self, active, number, which) ** 3, ["objective=mlm_sop"],
        "pairs that are swapped",
    ),
    "span lengths": (
        f"{CORRUPTION}.masking.length_probabilities",
        changed(f"{CORRUPTION}.masking.length_probabilities", geometric=0.4),
        ["objective=span"], "words of a span, as sampled",
    ),
    "replaced": (
        f"{OBJECTIVES}.rtd.GeneratedTextLearner.fill_masks",
        lambda self, batch, *_: replace(batch.inputs, tokens=self.original(batch)), ["objective=rtd"],
        "replaced fraction of tokens",
    ),
    "split": (
        f"{EXAMPLES}.language.prefix_lengths", lambda lengths, *_: np.ones_like(lengths, dtype=np.int64),
        ["objective=prefix_lm", "model=gpt_tiny"], "position of the split",
    ),
    "sentinel order": (
        f"{EXAMPLES}.denoising.corrupt_spans",
        lambda config, sentinels, *rest: corrupt_spans(config, sentinels[1:], *rest),
        ["objective=span_corruption", "model=t5_tiny"], "sentinels out of order in the inputs",
    ),
    "spans cut": (
        f"{EXAMPLES}.denoising.corrupt_spans", changed(f"{CORRUPTION}.noises.corrupt_spans", density=0.3),
        ["objective=span_corruption", "model=t5_tiny"], "corrupted fraction of text",
    ),
    "poisson": (
        f"{CORRUPTION}.noises.poisson_probabilities", lambda mean: poisson_probabilities(mean * 1.5),
        ["objective=denoising", "model=bart_tiny"], "words of a span, as sampled",
    ),
    "permutation": (
        f"{EXAMPLES}.denoising.permute_sentences", lambda texts, *_: texts,
        ["objective=denoising_permutation", "model=bart_tiny"], "first sentences that stay first",
    ),
    "rotation": (
        f"{EXAMPLES}.denoising.rotate", lambda texts, share: rotate(texts, share / 2),
        ["objective=denoising_rotation", "model=bart_tiny"], "texts that are not rotated",
    ),
    "deletion": (
        f"{EXAMPLES}.denoising.delete", lambda texts, share: delete(texts, share * 2),
        ["objective=denoising_deletion", "model=bart_tiny"], "deleted fraction of tokens",
    ),
    "random masks": (
        f"{EXAMPLES}.denoising.mask_each", lambda *rest: mask_each(*rest[:3], 0.5),
        ["objective=denoising_masking", "objective.random=0.1", "model=bart_tiny"], "masked tokens that are a random",
    ),
}  # fmt: skip
UNIFORM = _PairPlanner._uniform


def padded(whole: PackedArrays) -> Packed:
    """A batch whose last token is padding."""
    return Packed(torch.from_numpy(np.append(whole.tokens[:-1], 0)), tuple(whole.lengths.tolist()))


@pytest.fixture(scope="module", autouse=True)
def definitions() -> None:
    """Imports the checks before a test replaces a function that they use."""
    for module in pkgutil.iter_modules(checks.__path__, f"{checks.__name__}."):
        importlib.import_module(module.name)


@pytest.mark.parametrize("case", DEFECTS)
def test_deviation_from_definition_exits_with_3(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    where, broken, words, name = DEFECTS[case]
    model = [] if any(word.startswith("model=") for word in words) else ["model=bert_tiny"]
    monkeypatch.setattr(where, broken)
    assert inspect("pretrain", *model, *words, *DATA, "n=0") == 3
    captured = capsys.readouterr()
    assert "DOES NOT HOLD" in captured.out
    assert "statistics do not match their expected values: " in captured.err and name in captured.err


def test_inspect_fills_masks_with_generator_of_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = pretrain("filled", "objective=rtd")
    assert inspect("pretrain", "objective=rtd", f"checkpoint={run}", *DATA, "n=2", "output=seen.jsonl") == 0
    printed = capsys.readouterr().out
    assert "weights of the generator: loaded: backbone" in printed and "new: nothing" in printed
    assert "replaced fraction of tokens: defined as masked fraction x" in printed
    for example in map(json.loads, Path("seen.jsonl").read_text().splitlines()):
        original = {place["position"]: place["label"] for place in example["targets"]["mlm"]}
        replaced = {place["position"] for place in example["targets"]["rtd"]}
        shown, filled = example["input"]["pieces"], example["filled"]["pieces"]
        assert replaced == {at for at, piece in original.items() if filled[at] != piece}
        assert all(filled[at] == piece for at, piece in enumerate(shown) if at not in original)


def test_inspect_shows_boundaries_of_documents_and_pairs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("pretrain", "model=bart_tiny", *DATA, "n=4", "output=seen.jsonl") == 0
    assert " ‖ " in capsys.readouterr().out
    examples = [json.loads(line) for line in Path("seen.jsonl").read_text().splitlines()]
    boundaries = [example["text"][at - 1] for example in examples for at in example["boundaries"]]
    assert boundaries and set(boundaries) == {"\n"}
    assert inspect("pretrain", "model=bert_tiny", "objective=mlm_nsp", *DATA, "n=2", "output=seen.jsonl") == 0
    assert all(len(json.loads(line)["boundaries"]) == 1 for line in Path("seen.jsonl").read_text().splitlines())


def test_inspect_shows_members_of_mixture_separately(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=bert_tiny", "objective=mixture", "objective.members=[mlm,rtd]", "objective.weights=[3,1]"]
    assert inspect("pretrain", *words, *DATA, "n=1", "output=seen.jsonl") == 0
    printed = capsys.readouterr().out
    assert "rtd: replaced fraction of tokens" in printed
    assert re.search(r"fraction of mlm +75\.0%", printed) and re.search(r"fraction of rtd +25\.0%", printed)
    mlm, rtd = map(json.loads, Path("seen.jsonl").read_text().splitlines())
    assert (mlm["member"], rtd["member"]) == ("mlm", "rtd")
    assert "filled" not in mlm and "filled" in rtd  # masks are filled by the generator


def test_inspect_accepts_experiments(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=electra_small", *DATA]
    assert inspect(*words, "n=1") == 0
    assert "pretrain · rtd · model=electra" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_inspect_wraps_and_indents_lines(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert inspect("pretrain", "model=gpt_tiny", *DATA, "n=1", "output=seen.html") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(cells(line) <= columns for line in lines)
    first = next(number for number, line in enumerate(lines) if line.startswith(" input"))
    after = next(number for number, line in enumerate(lines) if line.startswith(" clm"))
    assert all(line.startswith(" " * 8) for line in lines[first + 1 : after])
    assert "␣" in lines[first] and "Ġ" not in "".join(lines) and any("␣ a space" in line for line in lines)
    page = Path("seen.html").read_text()
    assert "every token is predicted from the tokens before it" in page and "␣ a space" in page and "<table" in page


def test_brief_prints_summary_and_check_result(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("pretrain", "model=bert_tiny", *DATA, "brief=true") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "…" not in line]
    assert lines[0] == "pretrain · mlm · model=bert" and "of the tokens are predicted" in lines[1]
    assert lines[-1].startswith("all ") and lines[-1].endswith(" checks hold") and len(lines) < 6


@pytest.mark.parametrize(
    "words", [["brief=perhaps"], ["n=some"], ["tokens=0"], ["predict"], ["n=1", "output=none/there.jsonl"]]
)
def test_invalid_inspect_exits_with_2(place: Path, words: list[str]) -> None:
    assert cli.main(["inspect", *words, "model=bert_tiny", *TINY, *DATA]) == 2


@pytest.mark.parametrize("output", ["pipe", "pipe.html", "/dev/null"])
def test_pipe_or_device_as_output_is_refused(
    output: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pipe", "pipe.html"):
        os.mkfifo(name)
    ends = [os.open(name, os.O_RDWR) for name in ("pipe", "pipe.html")]  # opened so that nothing waits for a reader
    monkeypatch.setattr("lmtool.commands.inspect.run", lambda *_: pytest.fail("the command ran"))
    assert inspect("pretrain", "model=bert_tiny", *DATA, f"output={output}") == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert f"output={output} is a {'pipe' if 'pipe' in output else 'device'}, not a file" in error
    assert hint.startswith("hint: set another output=")
    for end in ends:
        os.close(end)


def test_inspect_help_lists_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "--help"]) == 0
    assert "output=FILE" in capsys.readouterr().out
