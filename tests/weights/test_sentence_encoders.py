"""Folders of sentence encoders: the vectors of sentence-transformers, or a refusal that names what is in the way."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lmtool
from lmtool.cli import main as cli
from lmtool.data.formats import with_format
from lmtool.errors import UserError
from lmtool.models.published import HFConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.folders import HFFolder
from lmtool.weights.sentence_encoders import MODES, SentenceEncoder, sentence_encoder
from tests.breadth import slow_but
from tests.commands.conftest import pretrain, write_text
from tests.weights.published_folders import make

TEXTS = [
    "the quick brown fox", "  Two  spaces [SEP] and [MASK]s", "dog", "What a lovely film, what an awful film! " * 9,
    "Ångström naïve 中文 😀\n", "sea",
]  # fmt: skip
DENSE = {"in_features": 36, "out_features": 20}
TWENTY = {"in_features": 20, "use_residual": True}


def loaded(folder: Path) -> Any:
    """What the library reads of a folder. It is imported here: that takes seconds."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def published(family: str, folder: Path, *behind: tuple[str, dict[str, Any]], modes: Any = "mean", **keys: Any) -> Any:
    """Write the folder of a sentence encoder with random weights, and give the encoder. behind: class and arguments of
    each module behind the pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    make(family, folder / "model")
    if family == "modernbert":  # as its published tokenizer.json lays out texts
        with_format(Tokenizer.load(folder / "model"), "bert").save(folder / "model")
    torch.manual_seed(3)
    first = modules.Transformer(str(folder / "model"), max_seq_length=30)
    pooling = modules.Pooling(36, modes, include_prompt=keys.pop("include_prompt", True))
    further = [getattr(modules, name)(**arguments) for name, arguments in behind]
    encoder = SentenceTransformer(modules=[first, pooling, *further], device="cpu", **keys)
    encoder.save(str(folder / "encoder"))
    if family == "t5":  # the library writes the encoder alone, and reads it of both
        shutil.copy(folder / "model/model.safetensors", folder / "encoder/model.safetensors")
    return loaded(folder / "encoder")


def embedded(folder: Path) -> np.ndarray:
    vectors = lmtool.load(str(folder), offline=True).embed(TEXTS)
    assert isinstance(vectors, np.ndarray)
    return vectors


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | keys))


@pytest.mark.filterwarnings("ignore:.*texts are cut")
@pytest.mark.parametrize("modes", [*MODES, tuple(MODES)])
def test_every_pooling_gives_the_vectors_of_the_library(modes: Any, tmp_path: Path) -> None:
    theirs = published("bert", tmp_path, modes=modes).encode(TEXTS)
    np.testing.assert_allclose(embedded(tmp_path / "encoder"), theirs, rtol=0, atol=2e-5)


FAMILIES = ("bert", "roberta", "distilbert", "albert", "electra", "modernbert", "deberta_v3", "gpt", "llama", "t5")


@pytest.mark.filterwarnings("ignore:of the prompts", "ignore:.*texts are cut")
@pytest.mark.parametrize("family", slow_but({"bert", "t5"}, FAMILIES))
def test_what_stands_behind_the_pooling_is_applied(family: str, tmp_path: Path) -> None:
    prompts = {"query": "the dog: ", "passage": "sea: "}
    theirs = published(
        family,
        tmp_path,
        ("Dense", DENSE | {"activation_function": nn.GELU()}),
        ("Normalize", {}),
        ("Dense", {**TWENTY, "out_features": 20, "bias": False, "activation_function": nn.Identity()}),
        ("Dense", {**TWENTY, "out_features": 12}),
        ("Normalize", {}),
        modes="lasttoken" if family in ("gpt", "llama") else "mean",
        prompts=prompts,
        default_prompt_name="query",
        truncate_dim=10,
    )
    vectors = embedded(tmp_path / "encoder")
    assert vectors.shape == (len(TEXTS), 10)
    np.testing.assert_allclose(vectors, theirs.encode(TEXTS), rtol=0, atol=2e-5)
    assert np.abs(theirs.encode(TEXTS, prompt="") - vectors).max() > 1e-3


@pytest.mark.filterwarnings("ignore:.*texts are cut", "ignore:.*texts are truncated", "ignore:.*pads on the left")
@pytest.mark.parametrize("family", slow_but({"bert", "llama"}, FAMILIES[:-1]))
def test_of_a_tokenizer_that_pads_on_the_left_the_vector_is_that_of_the_text_alone(family: str, tmp_path: Path) -> None:
    """The command warns where the library's vectors depend on the other texts of a batch."""
    published(family, tmp_path)
    change(tmp_path / "encoder/tokenizer_config.json", padding_side="left")
    theirs = loaded(tmp_path / "encoder")
    assert theirs.tokenizer.padding_side == "left"
    alone = np.concatenate([theirs.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(embedded(tmp_path / "encoder"), alone, rtol=0, atol=2e-5)
    depends = np.abs(theirs.encode(TEXTS) - alone).max() > 1e-3
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        embedded(tmp_path / "encoder")
    assert depends == (family in ("bert", "distilbert", "albert", "electra", "gpt"))
    # RoBERTa's positions are limited, but in transformers they do not count the padding.
    assert any("pads on the left" in str(warning.message) for warning in said) == (depends or family == "roberta")


def test_norms_are_one_and_the_command_says_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = published("bert", tmp_path, ("Normalize", {}), prompts={"query": "q: "})
    Path("asked.txt").write_text("\n".join(text.strip() for text in TEXTS))
    words = ["embed", "checkpoint=encoder", "input=asked.txt", "device=cpu", "precision=fp32"]
    assert cli.main([*words, "output=vectors.npy"]) == 0
    said = capsys.readouterr().out
    assert "pooling=mean (the checkpoint's 1_Pooling/config.json) · 2_Normalize" in said
    assert "warning: the prompts query are not used" in said
    assert "1 of 6 texts are truncated to 30 tokens" in said
    vectors = np.load("vectors.npy")
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(vectors, theirs.encode([text.strip() for text in TEXTS]), rtol=0, atol=2e-5)
    # As it was asked for, and of several layers, there is nothing behind the pooling.
    assert cli.main([*words, "output=all.npy", "layers=all"]) == 0
    assert "warning: layers=all omits 2_Normalize" in capsys.readouterr().out
    assert cli.main([*words, "output=plain.npy", "pooling=mean"]) == 0
    assert np.linalg.norm(np.load("plain.npy"), axis=1).min() > 2
    words = ["task=custom", "task.kind=classification", "task.path=rows", "max_steps=1", "device=cpu"]
    Path("rows").mkdir()
    for split in ("train", "dev"):
        Path(f"rows/{split}.tsv").write_text("text\tlabel\n" + "the dog\ta\nthe sea\tb\n" * 9)
    assert cli.main(["finetune", *words, "checkpoint=encoder", "max_length=30"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "mean (the checkpoint's 1_Pooling/config.json, without 2_Normalize)" in said


def test_an_exported_run_has_the_same_vectors_in_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is no sentence encoder: both take the mean of its hidden states."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    pretrain("run", "objective=mlm", "max_steps=1")
    assert cli.main(["export", "checkpoint=runs/run", "output=folder"]) == 0
    texts = ["The happy cat saw the ship.", "A [MASK] king."]
    theirs = loaded(Path("folder"))
    for checkpoint in ("runs/run", "folder"):
        ours = lmtool.load(checkpoint).embed(texts[:1])
        np.testing.assert_allclose(ours, theirs.encode(texts[:1]), rtol=0, atol=1e-5)


def flags(*names: str) -> dict[str, Any]:
    return {"word_embedding_dimension": 36, **{f"pooling_mode_{name}": True for name in names}}


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        (flags("mean_tokens"), ("mean",)),
        (flags("cls_token"), ("cls",)),
        (flags("mean_sqrt_len_tokens"), ("mean_sqrt_len_tokens",)),
        (flags("lasttoken", "weightedmean_tokens", "max_tokens"), ("max", "weightedmean", "lasttoken")),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 36}, ("lasttoken",)),
        (flags(), ("mean",)),
    ],
)
def test_files_of_old_and_new_versions(config: dict[str, Any], modes: tuple[str, ...], tmp_path: Path) -> None:
    published("bert", tmp_path)
    (tmp_path / "encoder/1_Pooling/config.json").write_text(json.dumps(config))
    theirs = loaded(tmp_path / "encoder")
    np.testing.assert_allclose(embedded(tmp_path / "encoder"), theirs.encode(TEXTS), rtol=0, atol=2e-5)
    assert theirs[1].pooling_mode in (modes, *modes[:1])
    (tmp_path / "encoder/modules.json").unlink()
    given = sentence_encoder(HFFolder("x", tmp_path / "encoder", HFConfig({})), True)
    assert given == SentenceEncoder("1_Pooling/config.json", modes)
    for name in ("max_tokens", "cls_token"):
        (tmp_path / "encoder/1_Pooling/config.json").write_text(json.dumps(flags(name)))
        fields = sentence_encoder(HFFolder("x", tmp_path / "encoder", HFConfig({})), True)
        assert fields is not None and fields.task_fields("x")["pooling"] in ("max", "first")


def test_a_task_has_not_every_pooling() -> None:
    for modes in (("mean", "max"), ("weightedmean",)):
        with pytest.raises(UserError, match="1_Pooling/config.json sets the pooling"):
            SentenceEncoder("1_Pooling/config.json", modes).task_fields("x")


MODEL = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOL = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
REFUSED: list[tuple[str, Any, str]] = [
    ("modules.json", [MODEL, POOL, {"path": "2_LSTM", "type": "sentence_transformers.models.LSTM"}], "models.LSTM as"),
    ("modules.json", [MODEL, POOL, {"path": "2_X", "type": "custom.Normalize"}], "custom.Normalize as module 2"),
    ("modules.json", [POOL, MODEL], "Pooling as module 0"),
    ("modules.json", [MODEL, {**POOL, "kwargs": ["task"]}], "Pooling as module 1"),
    ("modules.json", [{**MODEL, "path": "0_Transformer"}, POOL], "the model in 0_Transformer"),
    ("modules.json", [MODEL, {**POOL, "path": "../x"}], "is not a file in the folder"),
    ("modules.json", [MODEL, 5], "module 1 has no type or no path"),
    ("modules.json", {}, "is not a JSON list"),
    ("1_Pooling/config.json", {"pooling_mode": "median"}, "pooling_mode='median'"),
    ("1_Pooling/config.json", {"pooling_mode": "mean", "surprise": 1}, "surprise=1"),
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": "yes"}, "pooling_mode_max_tokens='yes' is not of type bool"),
    ("2_Dense/config.json", {"activation_function": "os.system"}, "activation_function='os.system'"),
    ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name='token_embeddings'"),
    ("2_Dense/config.json", {"out_features": 21}, "are needed for 36 inputs"),
    ("2_Dense/config.json", {"in_features": 0}, "in_features=0 is not a positive integer"),
    ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type='SparseEncoder'"),
    ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name='x'"),
    ("config_sentence_transformers.json", {"prompts": {"x": 5}}, "prompts="),
    ("config_sentence_transformers.json", {"surprise": 5}, "surprise=5"),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task='fill-mask'"),
    ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "processing_kwargs="),
    ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length='long' is not of type int"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("encoder")
    published("bert", place, ("Dense", DENSE))
    return place / "encoder"


@pytest.mark.parametrize(("file", "content", "problem"), REFUSED)
def test_what_lmtool_does_not_do_is_refused_by_name(folder: Path, file: str, content: Any, problem: str) -> None:
    path = folder / file
    before = path.read_bytes()
    content = json.loads(before) | content if isinstance(content, dict) and file != "modules.json" else content
    path.write_text(json.dumps(content))
    try:
        with pytest.raises(UserError, match=problem) as caught:
            embedded(folder)
    finally:
        path.write_bytes(before)
    assert caught.value.hint and str(folder) in caught.value.message


def test_how_texts_are_read_is_refused_where_it_is_another_way(tmp_path: Path) -> None:
    published("bert", tmp_path, prompts={"query": "q: "}, default_prompt_name="query", include_prompt=False)
    folder = tmp_path / "encoder"
    with pytest.raises(UserError, match="1_Pooling/config.json has include_prompt=False"):
        embedded(folder)
    change(folder / "1_Pooling/config.json", include_prompt=True)
    assert embedded(folder).shape == (6, 36)
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    assert embedded(folder).shape == (6, 36)  # its tokenizer does that
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] |= {"lowercase": False, "strip_accents": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="do_lower_case=true is not in its tokenizer.json"):
        embedded(folder)
    change(folder / "sentence_bert_config.json", do_lower_case=False)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    with pytest.raises(UserError, match="tokenizer.json formats texts as"):
        embedded(folder)


def test_what_reads_behind_a_decoder_is_refused(tmp_path: Path) -> None:
    published("bart", tmp_path)
    with pytest.raises(UserError, match="states come from the decoder of model=bart"):
        embedded(tmp_path / "encoder")


def test_what_is_no_sentence_encoder_says_nothing(tmp_path: Path) -> None:
    empty = HFFolder(str(tmp_path), tmp_path, HFConfig({}))
    assert sentence_encoder(empty, True) is None
    (tmp_path / "modules.json").write_text(json.dumps([MODEL]))
    assert sentence_encoder(empty, True) is None
