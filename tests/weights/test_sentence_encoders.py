"""Sentence encoder folders: vectors match sentence-transformers, or the folder is refused by name."""

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


def load_reference(folder: Path) -> Any:
    """Load a folder with sentence-transformers, imported here because that takes seconds."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def make_encoder(
    family: str, folder: Path, *behind: tuple[str, dict[str, Any]], modes: Any = "mean", **keys: Any
) -> Any:
    """Write the folder of a sentence encoder with random weights.

    Args:
        behind: Class and arguments of each module after the pooling.

    Returns:
        The encoder, loaded by sentence-transformers.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    make(family, folder / "model")
    if family == "modernbert":  # the text format of its published tokenizer.json
        with_format(Tokenizer.load(folder / "model"), "bert").save(folder / "model")
    torch.manual_seed(3)
    first = modules.Transformer(str(folder / "model"), max_seq_length=30)
    pooling = modules.Pooling(36, modes, include_prompt=keys.pop("include_prompt", True))
    further = [getattr(modules, name)(**arguments) for name, arguments in behind]
    encoder = SentenceTransformer(modules=[first, pooling, *further], device="cpu", **keys)
    encoder.save(str(folder / "encoder"))
    if family == "t5":  # the library saves only the encoder, but reads both stacks
        shutil.copy(folder / "model/model.safetensors", folder / "encoder/model.safetensors")
    return load_reference(folder / "encoder")


def embed_texts(folder: Path) -> np.ndarray:
    vectors = lmtool.load(str(folder), offline=True).embed(TEXTS)
    assert isinstance(vectors, np.ndarray)
    return vectors


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | keys))


@pytest.mark.filterwarnings("ignore:.*texts are cut")
@pytest.mark.parametrize("modes", [*MODES, tuple(MODES)])
def test_pooling_modes_match_sentence_transformers(modes: Any, tmp_path: Path) -> None:
    theirs = make_encoder("bert", tmp_path, modes=modes).encode(TEXTS)
    np.testing.assert_allclose(embed_texts(tmp_path / "encoder"), theirs, rtol=0, atol=2e-5)


FAMILIES = ("bert", "roberta", "distilbert", "albert", "electra", "modernbert", "deberta_v3", "gpt", "llama", "t5")


@pytest.mark.filterwarnings("ignore:of the prompts", "ignore:.*texts are cut")
@pytest.mark.parametrize("family", slow_but({"bert", "t5"}, FAMILIES))
def test_modules_after_pooling_match_sentence_transformers(family: str, tmp_path: Path) -> None:
    prompts = {"query": "the dog: ", "passage": "sea: "}
    theirs = make_encoder(
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
    vectors = embed_texts(tmp_path / "encoder")
    assert vectors.shape == (len(TEXTS), 10)
    np.testing.assert_allclose(vectors, theirs.encode(TEXTS), rtol=0, atol=2e-5)
    assert np.abs(theirs.encode(TEXTS, prompt="") - vectors).max() > 1e-3


@pytest.mark.filterwarnings("ignore:.*texts are cut", "ignore:.*texts are truncated", "ignore:.*pads on the left")
@pytest.mark.parametrize("family", slow_but({"bert", "llama"}, FAMILIES[:-1]))
def test_left_padding_vectors_match_single_texts(family: str, tmp_path: Path) -> None:
    """lmtool warns if the library's vectors depend on the other texts of a batch."""
    make_encoder(family, tmp_path)
    change(tmp_path / "encoder/tokenizer_config.json", padding_side="left")
    theirs = load_reference(tmp_path / "encoder")
    assert theirs.tokenizer.padding_side == "left"
    alone = np.concatenate([theirs.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(embed_texts(tmp_path / "encoder"), alone, rtol=0, atol=2e-5)
    depends = np.abs(theirs.encode(TEXTS) - alone).max() > 1e-3
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        embed_texts(tmp_path / "encoder")
    assert depends == (family in ("bert", "distilbert", "albert", "electra", "gpt"))
    # RoBERTa's positions are limited, but do not count padding in transformers.
    assert any("pads on the left" in str(warning.message) for warning in said) == (depends or family == "roberta")


def test_embed_reports_pooling_modules_and_truncation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = make_encoder("bert", tmp_path, ("Normalize", {}), prompts={"query": "q: "})
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
    # With layers= or pooling=, no module follows the pooling.
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


def test_exported_run_matches_sentence_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without pooling settings: both take the mean of hidden states."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    pretrain("run", "objective=mlm", "max_steps=1")
    assert cli.main(["export", "checkpoint=runs/run", "output=folder"]) == 0
    texts = ["The happy cat saw the ship.", "A [MASK] king."]
    theirs = load_reference(Path("folder"))
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
def test_old_and_new_pooling_files_are_read(config: dict[str, Any], modes: tuple[str, ...], tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    (tmp_path / "encoder/1_Pooling/config.json").write_text(json.dumps(config))
    theirs = load_reference(tmp_path / "encoder")
    np.testing.assert_allclose(embed_texts(tmp_path / "encoder"), theirs.encode(TEXTS), rtol=0, atol=2e-5)
    assert theirs[1].pooling_mode in (modes, *modes[:1])
    (tmp_path / "encoder/modules.json").unlink()
    given = sentence_encoder(HFFolder("x", tmp_path / "encoder", HFConfig({})), True)
    assert given == SentenceEncoder("1_Pooling/config.json", modes)
    for name in ("max_tokens", "cls_token"):
        (tmp_path / "encoder/1_Pooling/config.json").write_text(json.dumps(flags(name)))
        fields = sentence_encoder(HFFolder("x", tmp_path / "encoder", HFConfig({})), True)
        assert fields is not None and fields.task_fields("x")["pooling"] in ("max", "first")


def test_unsupported_task_pooling_is_refused() -> None:
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
    make_encoder("bert", place, ("Dense", DENSE))
    return place / "encoder"


@pytest.mark.parametrize(("file", "content", "problem"), REFUSED)
def test_unsupported_modules_and_settings_are_refused(folder: Path, file: str, content: Any, problem: str) -> None:
    path = folder / file
    before = path.read_bytes()
    content = json.loads(before) | content if isinstance(content, dict) and file != "modules.json" else content
    path.write_text(json.dumps(content))
    try:
        with pytest.raises(UserError, match=problem) as caught:
            embed_texts(folder)
    finally:
        path.write_bytes(before)
    assert caught.value.hint and str(folder) in caught.value.message


def test_unsupported_text_formats_are_refused(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path, prompts={"query": "q: "}, default_prompt_name="query", include_prompt=False)
    folder = tmp_path / "encoder"
    with pytest.raises(UserError, match="1_Pooling/config.json has include_prompt=False"):
        embed_texts(folder)
    change(folder / "1_Pooling/config.json", include_prompt=True)
    assert embed_texts(folder).shape == (6, 36)
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    assert embed_texts(folder).shape == (6, 36)  # its tokenizer lowercases
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] |= {"lowercase": False, "strip_accents": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="do_lower_case=true is not in its tokenizer.json"):
        embed_texts(folder)
    change(folder / "sentence_bert_config.json", do_lower_case=False)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    with pytest.raises(UserError, match="tokenizer.json formats texts as"):
        embed_texts(folder)


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    make_encoder("bart", tmp_path)
    with pytest.raises(UserError, match="states come from the decoder of model=bart"):
        embed_texts(tmp_path / "encoder")


def test_folder_without_pooling_is_no_sentence_encoder(tmp_path: Path) -> None:
    empty = HFFolder(str(tmp_path), tmp_path, HFConfig({}))
    assert sentence_encoder(empty, True) is None
    (tmp_path / "modules.json").write_text(json.dumps([MODEL]))
    assert sentence_encoder(empty, True) is None
