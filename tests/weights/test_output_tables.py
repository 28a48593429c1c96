"""Published checkpoints with untied output tables: logits match transformers after import and export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import lmtool
from lmtool.cli import main as cli
from lmtool.errors import UserError
from lmtool.models.heads.lm import LMHead
from tests.breadth import slow_but
from tests.weights.published_folders import FAMILIES, TEXTS, logits_of, make, sample

Tensors = dict[str, Tensor]
# Names of the token table, the output table, copies of the token table, and the output bias with its copy.
NAMES: dict[str, tuple[str, str, tuple[str, ...], tuple[str, str] | None]] = {
    "bert": (
        "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", (),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
    "roberta": (
        "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight", (),
        ("lm_head.bias", "lm_head.decoder.bias"),
    ),
    "albert": (
        "albert.embeddings.word_embeddings.weight", "predictions.decoder.weight", (),
        ("predictions.bias", "predictions.decoder.bias"),
    ),
    "distilbert": ("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight", (), None),
    "electra": ("electra.embeddings.word_embeddings.weight", "generator_lm_head.weight", (), None),
    "gpt": ("transformer.wte.weight", "lm_head.weight", (), None),
    "gpt1": ("transformer.tokens_embed.weight", "lm_head.weight", (), None),
    "modernbert": ("model.embeddings.tok_embeddings.weight", "decoder.weight", (), None),
    "bigbird": (
        "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", (),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
    "deberta": (
        "deberta.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", (),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
    "deberta_v3": (
        "deberta.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", (),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
    "xlnet": ("transformer.word_embedding.weight", "lm_loss.weight", (), None),
    "llama": ("model.embed_tokens.weight", "lm_head.weight", (), None),
    "qwen2": ("model.embed_tokens.weight", "lm_head.weight", (), None),
    "t5": ("shared.weight", "lm_head.weight", ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), None),
    "bart": (
        "model.shared.weight", "lm_head.weight",
        ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"), None,
    ),
    "transformer": (
        "model.shared.weight", "lm_head.weight",
        ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"), None,
    ),
}  # fmt: skip
assert NAMES.keys() == FAMILIES.keys()


@pytest.fixture(scope="module", params=slow_but({"bert", "electra", "gpt", "t5", "bart"}, NAMES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def original(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, type]:
    """A family's tied folder, saved by transformers, and its class."""
    folder = tmp_path_factory.mktemp(family)
    theirs = make(family, folder)
    if family == "electra":  # the discriminator does not predict tokens
        config = transformers.ElectraConfig(**{**theirs.config.to_dict(), "hidden_size": 36})
        theirs = transformers.ElectraForMaskedLM(config)
        theirs.save_pretrained(folder)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    theirs.save_pretrained(folder)
    return folder, type(theirs)


def copy_with_changes(original: Path, folder: Path, change: Callable[[Tensors], object], **config: Any) -> Path:
    """A copy of the folder with other tensors and other keys in config.json."""
    folder.mkdir()
    for path in original.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(original / "model.safetensors")
    change(tensors)
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def noise(tensor: Tensor, seed: int = 0) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * tensor.std()


def assert_same_logits(folder: Path, reader: type) -> lmtool.Loaded:
    """Assert that lmtool's logits match transformers' up to rounding."""
    theirs, ours = reader.from_pretrained(folder).eval(), lmtool.load(str(folder), offline=True)
    ids, mask, decoder = sample(ours.config.architecture == "encoder_decoder")
    expected = logits_of(theirs, ids, mask, decoder)
    with torch.no_grad():
        given = ours.model(ids, mask, decoder).logits
    real = mask.bool() if decoder is None else torch.ones_like(decoder, dtype=torch.bool)
    assert given is not None and not ours.report.new
    assert (given - expected)[real].abs().max() < 1e-5 * float(expected[real].abs().max())
    return ours


def head_of(loaded: lmtool.Loaded) -> LMHead:
    heads = loaded.model.parts.heads
    return heads["masked_lm"] if "masked_lm" in heads else heads["lm"]


def changes(family: str) -> dict[str, tuple[Callable[[Tensors], object], dict[str, Any]]]:
    token, output, tables, bias = NAMES[family]

    def differ(tensors: Tensors) -> None:
        tensors[output] = noise(tensors[token])

    def equal(tensors: Tensors) -> None:
        tensors[output] = tensors[token]

    def instead(tensors: Tensors) -> None:
        tensors[output] = tensors.pop(token)

    def another(tensors: Tensors) -> None:
        tensors[tables[0] if tables else output] = tensors.pop(token)

    def apart(tensors: Tensors) -> None:
        differ(tensors)
        for name in tables:
            tensors[name] = tensors[token]
        if bias is not None:
            tensors[bias[1]] = noise(tensors[bias[0]], 1)

    def apart_and_equal(tensors: Tensors) -> None:
        apart(tensors)
        equal(tensors)

    cases: dict[str, tuple[Callable[[Tensors], object], dict[str, Any]]] = {
        "tied": (lambda tensors: None, {}),
        "differ": (differ, {}),
        "equal": (equal, {}),
        "instead": (instead, {}),
        "another": (another, {}),
        "apart": (apart, {"tie_word_embeddings": False}),
        "apart and equal": (apart_and_equal, {"tie_word_embeddings": False}),
    }
    if bias is not None:
        cases["bias differs"] = (lambda tensors: tensors.update({bias[1]: noise(tensors[bias[0]], 1)}), {})
        cases["bias instead"] = (lambda tensors: tensors.update({bias[1]: tensors.pop(bias[0])}), {})
    if family == "t5":
        for key in ("tie_word_embeddings", "scale_decoder_outputs"):
            cases[f"{key}, no table"] = (lambda tensors: None, {key: False})
            cases[f"{key}, a table"] = (differ, {key: False})
            cases[f"{key}, the same table"] = (equal, {key: False})
        cases["both"] = (differ, {"tie_word_embeddings": False, "scale_decoder_outputs": True})
    return cases


OWN = ("differ", "apart", "tie_word_embeddings, a table", "scale_decoder_outputs, a table", "both")


def test_output_table_logits_match_transformers(family: str, original: tuple[Path, type], tmp_path: Path) -> None:
    for name, (change, config) in changes(family).items():
        folder = copy_with_changes(original[0], tmp_path / name, change, **config)
        loaded = assert_same_logits(folder, original[1])
        if name in OWN:
            head = head_of(loaded)
            assert head.output is not None
            assert not torch.equal(head.output.weight, loaded.model.parts.backbone.embed.token.weight), name


def test_output_tables_survive_import_and_export(
    family: str, original: tuple[Path, type], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = changes(family)
    for name in ("differ", "apart", "tie_word_embeddings, no table", "both"):
        if name not in cases:
            continue
        folder, work = (
            copy_with_changes(original[0], tmp_path / name, cases[name][0], **cases[name][1]),
            tmp_path / f"{name} 2",
        )
        assert cli.main(["import", f"checkpoint='{folder}'", f"output='{work / 'ours'}'"]) == 0
        assert cli.main(["export", f"checkpoint='{work / 'ours'}'", f"output='{work / 'back'}'"]) == 0
        screen = capsys.readouterr().out
        # transformers' masked language model has BigBird's pooler, which it does not use and lmtool does not read.
        folders_without_unused_keys = 0 if family == "bigbird" else 2
        assert screen.count("missing keys  none") == 2
        assert screen.count("unused keys   none") == folders_without_unused_keys
        theirs = [original[1].from_pretrained(path).eval() for path in (folder, work / "back")]
        rows = sample(lmtool.load(str(work / "ours")).config.architecture == "encoder_decoder")
        expected, given = (logits_of(published, *rows) for published in theirs)
        torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6, msg=name)
        assert_same_logits(work / "back", original[1])


def test_missing_untied_output_table_is_refused(family: str, original: tuple[Path, type], tmp_path: Path) -> None:
    """With tie_word_embeddings=false, transformers would initialize the missing table."""
    if family == "t5":
        return  # the key has another meaning in T5
    with pytest.raises(UserError, match="tie_word_embeddings=false in config.json, but the weights have no"):
        lmtool.load(copy_with_changes(original[0], tmp_path / "x", lambda tensors: None, tie_word_embeddings=False))


def test_contradictory_token_tables_are_refused(family: str, original: tuple[Path, type], tmp_path: Path) -> None:
    token, output, tables, _ = NAMES[family]
    for name in tables:
        folder = copy_with_changes(
            original[0], tmp_path / name, lambda tensors, name=name: tensors.update({name: noise(tensors[token])})
        )
        with pytest.raises(UserError, match=f"checkpoint=.*: {name} .* differs from {token} "):
            lmtool.load(folder)
    folder = copy_with_changes(
        original[0], tmp_path / "x", lambda tensors: tensors.update({output: tensors[token][:-1]})
    )
    with pytest.raises(UserError, match=f"{output} .* differs from {token} "):
        lmtool.load(folder)


@pytest.mark.parametrize("untied", slow_but({"gpt"}, ["bert", "gpt", "bart"]))
def test_pretraining_updates_separate_output_table(
    untied: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pretrain and evaluate from a checkpoint with a separate output table."""
    token, output = NAMES[untied][:2]
    make(untied, tmp_path / "tied")
    copy_with_changes(
        tmp_path / "tied", tmp_path / "own", lambda tensors: tensors.update({output: noise(tensors[token])})
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS * 20))
    words = [
        "pretrain", "checkpoint=own", "data=text", "data.path=text.txt", "name=one", "batch_tokens=256",
        "max_length=32", "device=cpu", "precision=fp32", f"cache_dir={tmp_path / 'cache'}",
    ]  # fmt: skip
    model = {"bert": "mlm", "gpt": "clm", "bart": "denoising"}[untied]
    assert cli.main([*words, "model=auto", f"objective={model}", "max_steps=2"]) == 0
    table = lmtool.load("runs/one").model.parts.heads
    start = load_file("own/model.safetensors")[output]
    weight = next(module.output.weight for module in table.values() if isinstance(module, LMHead))
    assert 0 < (weight - start).abs().max() < 0.1
    assert cli.main(["evaluate", "checkpoint=runs/one", f"cache_dir={tmp_path / 'cache'}"]) == 0
