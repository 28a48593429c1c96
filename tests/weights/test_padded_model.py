"""lmtool.load on published folders of every family: logits match transformers at every real token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import lmtool
from lmtool.config.registry import build
from lmtool.errors import UserError
from lmtool.objectives.configs import MlmConfig
from lmtool.weights.assemble import load_into
from lmtool.weights.reading import GENERATION, read
from tests.objectives.objective_fixtures import tokenizer
from tests.weights.published_folders import FAMILIES, ROWS, TEXTS, logits_of, make, make_classifier, sample


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(family: str, tmp_path: Path) -> None:
    theirs = make(family, tmp_path)
    loaded = lmtool.load(str(tmp_path), offline=True)
    assert loaded.config.name == family and not loaded.report.new
    # transformers always writes these keys for BART and Marian.
    forced = {
        "bart": (f"{GENERATION}: forced_eos_token_id=2",),
        "transformer": (f"{GENERATION}: forced_eos_token_id=0",),
    }
    assert loaded.report.ignored == forced.get(family, ())
    ids, mask, decoder = sample(loaded.config.architecture == "encoder_decoder")
    expected = logits_of(theirs, ids, mask, decoder)
    with torch.no_grad():
        output = loaded.model(ids, mask, decoder)
    real = mask.bool() if decoder is None else torch.ones_like(decoder, dtype=torch.bool)
    assert output.logits.shape == expected.shape and output.hidden.shape[:2] == real.shape
    scale = float(expected[real].abs().max())
    assert (output.logits - expected)[real].abs().max() < 1e-5 * scale
    if decoder is None:
        assert not output.hidden[~real].any()
    tokens = loaded.tokenizer.encode(TEXTS[0])
    assert len(tokens) and loaded.tokenizer.vocab_size <= ROWS


def test_left_padding_gives_same_logits(tmp_path: Path) -> None:
    make("gpt", tmp_path)
    model = lmtool.load(tmp_path).model
    ids, mask, _ = sample(False)
    right = model(ids, mask).logits
    ids, mask, right = ids[1:], mask[1:], right[1:]  # the first row is full
    left = model(ids.roll(8, 1), mask.roll(8, 1)).logits
    assert torch.allclose(left.roll(-8, 1)[mask.bool()], right[mask.bool()], atol=1e-5)
    assert model(ids).logits.shape == (2, 19, ROWS)


def test_invalid_shapes_and_masks_are_refused(tmp_path: Path) -> None:
    make("bert", tmp_path)
    model = lmtool.load(str(tmp_path)).model
    ids, mask, _ = sample(False)
    for wrong in ((ids[0], None, None), (ids, mask[:, :4], None), (ids, mask, ids)):
        with pytest.raises(ValueError):
            model(*wrong)
    holes = mask.clone()
    holes[0, 3] = 0
    with pytest.raises(ValueError, match="row 0 has a gap"):
        model(ids, holes)


def test_classifier_logits_match_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=90, num_hidden_layers=2, hidden_size=36, num_attention_heads=3, intermediate_size=52, num_labels=5
    )
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    loaded = lmtool.load(str(tmp_path))
    ids, mask, _ = sample(False)
    ids = ids % 90
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask).logits
        assert torch.allclose(loaded.model(ids, mask).logits, expected, atol=1e-6)
    assert loaded.tokenizer is None


@pytest.mark.parametrize("family", ["bert", "albert", "electra"])
def test_segment_logits_match_transformers(family: str, tmp_path: Path) -> None:
    theirs, (ids, mask, _) = make(family, tmp_path), sample(False)
    segments = (torch.arange(19)[None] >= torch.tensor([7, 4, 19])[:, None]).long()
    model = lmtool.load(str(tmp_path)).model
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask, token_type_ids=segments)
        given = model(input_ids=ids, attention_mask=mask, token_type_ids=segments)
        first = model(ids, mask)
    logits = expected.prediction_logits if hasattr(expected, "prediction_logits") else expected.logits
    real = mask.bool()
    assert torch.allclose(given.logits[real], logits[real], atol=1e-5 * float(logits.abs().max()))
    assert not torch.allclose(first.logits[real], logits[real], atol=1e-3)
    over_pairs = {"bert": "seq_relationship_logits", "albert": "sop_logits", "electra": ""}[family]
    assert (given.pair_logits is not None) == bool(over_pairs)
    if over_pairs:
        assert torch.allclose(given.pair_logits, expected[over_pairs], atol=1e-5)
    for wrong, message in (
        (segments[:, :4], "have the shape"),
        (segments * 2, "are 0 to 2, but the model has 2 segments"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, mask, token_type_ids=wrong)


def test_model_without_segments_accepts_only_zeros(tmp_path: Path) -> None:
    make("distilbert", tmp_path)
    model, (ids, mask, _) = lmtool.load(str(tmp_path)).model, sample(False)
    assert torch.equal(model(ids, mask, token_type_ids=torch.zeros_like(ids)).logits, model(ids, mask).logits)
    with pytest.raises(ValueError, match="the model has 1 segment,"):
        model(ids, mask, token_type_ids=torch.ones_like(ids))


@pytest.mark.parametrize("family", ["gpt", "bart", "t5"])
def test_decoder_classifier_logits_match_transformers(family: str, tmp_path: Path) -> None:
    theirs = make_classifier(family, tmp_path, 3)
    loaded, (ids, mask, _) = lmtool.load(str(tmp_path)), sample(False)
    if family != "gpt":
        ids = ids.masked_scatter(
            mask.sum(1)[:, None] - 1 == torch.arange(19), torch.full((3,), theirs.config.eos_token_id)
        )
    ids = ids.masked_fill(mask == 0, theirs.config.pad_token_id)
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask).logits
        assert torch.allclose(loaded.model(ids, mask).logits, expected, atol=1e-5)


def test_encoder_without_head_has_no_logits(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=90, num_hidden_layers=1, hidden_size=36, num_attention_heads=3, intermediate_size=52
    )
    theirs = transformers.BertModel(config).eval()
    theirs.save_pretrained(tmp_path)
    ids, mask, _ = sample(False)
    with torch.no_grad():
        output = lmtool.load(str(tmp_path)).model(ids % 90, mask)
        expected = theirs(input_ids=ids % 90, attention_mask=mask).last_hidden_state
    assert output.logits is None
    assert torch.allclose(output.hidden[mask.bool()], expected[mask.bool()], atol=1e-5)


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make("bert", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for gone, message in (
        ("bert.encoder.layer.1.output.dense.weight", "backbone.layers.1.ffn.fc_out.weight is missing"),
        ("cls.predictions.transform.dense.bias", "heads.masked_lm.dense.bias is missing"),
    ):
        save_file({name: tensor for name, tensor in whole.items() if name != gone}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            lmtool.load(str(tmp_path))


def test_importing_lmtool_does_not_import_torch() -> None:
    code = "import sys, lmtool; assert 'torch' not in sys.modules; lmtool.load; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        lmtool.unknown  # noqa: B018


@pytest.mark.parametrize("family", ["deberta", "deberta_v3"])
def test_deberta_mask_decoder_is_loaded_only_for_mlm(family: str, tmp_path: Path) -> None:
    """lmtool.load drops the mask decoder's positions and head, because the plain head reads other states. An objective
    with enhanced_decoder=true starts from both, except for DeBERTa v3, which was trained to detect replaced tokens."""
    make(family, tmp_path)
    tensors, head = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        own = name.removeprefix("cls.predictions.").removeprefix("transform.")
        if own != name and not own.startswith("decoder."):
            head[own.replace("LayerNorm", "norm")] = tensor
            tensors[f"lm_predictions.lm_head.{own}"] = tensor
        elif own == name:
            tensors[name] = tensor
    config = lmtool.load(tmp_path).config
    head["absolute.weight"] = torch.randn(config.max_positions, config.hidden_size)
    tensors["deberta.embeddings.position_embeddings.weight"] = head["absolute.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    report, part = lmtool.load(tmp_path).report, "heads.enhanced_masked_lm"
    assert list(report.loaded) == ["backbone"] and not report.new
    parts = {"deberta": {part}, "deberta_v3": {"mask_decoder", "lm_predictions"}}[family]
    assert report.dropped.keys() == parts and sum(report.dropped.values()) == sum(map(torch.numel, head.values()))
    learner = build(MlmConfig(enhanced_decoder=True), build(config, 0), tokenizer("wordpiece"), 3)
    report = load_into(learner, read(str(tmp_path), offline=True).tensors, "the folder")
    assert set(report.loaded) == {"backbone", *({part} & parts)} and set(report.new) == {part} - parts
    own = learner.get_submodule(part).state_dict()
    assert own.keys() == head.keys() and len(head) == 6
    assert torch.equal(own["dense.weight"], head["dense.weight"]) == (part in parts)
    assert part not in parts or all(torch.equal(own[name], head[name]) for name in head)
