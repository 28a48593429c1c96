"""Every transformers class that `export` writes is opened by transformers, and every transformers class of a supported
family is read by lmtool or refused by name."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import lmtool
from lmtool.cli import main as cli
from lmtool.config.registry import Choice, build, builder_module, lookup
from lmtool.data.formats import with_format
from lmtool.errors import UserError
from lmtool.learners.model import ModelWithHeads
from lmtool.models import llama
from lmtool.models.base import Backbone
from lmtool.models.family import HFClass, token_classifier
from lmtool.models.heads.lm import ReplacedTokenHead, lm_head, masked_lm_head
from lmtool.models.heads.sequence import SequenceHead, pooler
from lmtool.weights.conversion.parity import parity
from lmtool.weights.exporting import ImportedModel, export_of, write_import
from lmtool.weights.task_heads import HEADS
from tests.breadth import slow_but
from tests.weights.published_folders import FAMILIES, ROWS, TEXTS, sample

LABELS = ["no", "yes", "Ångström"]
TASKS: dict[str, dict[str, Any]] = {
    "classifier": {"kind": "classification", "name": "stance", "labels": LABELS, "head": "transformers"},
    "token_classifier": {
        "kind": "token_classification", "name": "names", "labels": ["O", "B-A", "I-A"], "scheme": "bio",
    },
    "question_answering": {"kind": "extractive_qa", "name": "answers"},
    "multiple_choice": {"kind": "multiple_choice", "name": "endings", "head": "transformers", "choices": 2},
}  # fmt: skip
"""The task of each exported head."""
AUTO = {
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForQuestionAnsweringSimple": "AutoModelForQuestionAnswering",
    "ForMultipleChoice": "AutoModelForMultipleChoice",
    "ForPreTraining": "AutoModelForPreTraining",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
    "Model": "AutoModel",
}
"""The Auto class by the suffix of a class name."""


def module_of(family: str) -> Any:
    entry = lookup("model", family)
    assert entry is not None
    return builder_module(entry)


def config_of(family: str) -> Any:
    """The tiny model of a family as lmtool's configuration."""
    published = FAMILIES[family][0]().config.to_dict()
    return Choice("model").validate(module_of(family).HF_FORMAT.from_hf_config(published))


def classes_of(family: str) -> tuple[HFClass, ...]:
    classes: tuple[HFClass, ...] = module_of(family).HF_FORMAT.classes
    return classes


def with_noise(model: nn.Module) -> nn.Module:
    """Add noise to all parameters, so that biases and norms differ from each other."""
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def head_of(name: str, backbone: Backbone) -> nn.Module:
    if name == "masked_lm":
        return masked_lm_head(backbone)
    if name == "lm":
        return lm_head(backbone)
    if name == "pooler":
        return pooler(backbone)
    if name == "replaced_token":
        return ReplacedTokenHead(backbone.hidden_size, backbone.head_activation)
    return SequenceHead(backbone.hidden_size, 2)


def write_checkpoint(family: str, published: HFClass, folder: Path, **fields: Any) -> None:
    """Write an lmtool checkpoint with the heads of a transformers class: those of a task, or of pretraining.

    Args:
        fields: Changes of the tiny model's configuration.
    """
    torch.manual_seed(11)
    config, tokenizer = config_of(family).model_copy(update=fields), build(FAMILIES[family][1], TEXTS, ROWS)
    backbone, classifier = build(config, 3), None
    task = next((TASKS[head] for head in published.heads if head in HEADS), None)
    if task is not None:
        learner = Choice("task", "kind").validate(task).learner(backbone, tokenizer, 3)
        classifier = {"task": task, "max_length": 40, "tokenizer": {}}
    else:
        learner = ModelWithHeads(backbone, 3)
        for head in published.heads or (("lm",) if config.architecture != "encoder" else ()):
            learner.add_head(head, head_of(head, backbone))
    write_import(
        ImportedModel(with_noise(learner).state_dict(), config, tokenizer, {"checkpoint": "none"}, classifier or {}),
        folder,
    )


def rows_of(family: str, config: Any, generates: bool) -> dict[str, Tensor]:
    """Padded inputs for lmtool and transformers, without inputs that the class does not accept."""
    two_stacks = config.architecture == "encoder_decoder"
    ids, mask, decoder = sample(two_stacks)
    pad = FAMILIES[family][0]().config.pad_token_id
    tokenizer = build(FAMILIES[family][1], TEXTS, ROWS).with_padding()
    pad = tokenizer.roles.get("pad", pad or 0)
    if two_stacks:  # a task's text ends with its only end token
        end = tokenizer.role("eos")
        ids[ids == end] += 1
        ids[torch.arange(len(ids)), mask.sum(1) - 1] = end
    ids = ids.masked_fill(mask == 0, pad)
    if family == "xlnet":  # its summary is the last token of a row
        lengths = mask.sum(1).tolist()
        ids, mask = (
            torch.stack([row.roll(19 - length) for row, length in zip(rows, lengths, strict=True)])
            for rows in (ids, mask)
        )
    rows = {"input_ids": ids, "attention_mask": mask}
    if decoder is not None and generates:
        rows["decoder_input_ids"] = decoder
    if getattr(config, "segments", 0) > 1:
        rows["token_type_ids"] = (torch.arange(19) > 4).long() * mask
    return rows


def outputs_of(model: nn.Module, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of a transformers model by lmtool's names."""
    with torch.no_grad():
        if type(model).__name__.endswith("ForMultipleChoice"):
            return {"logits": model(**{name: values[:, None] for name, values in rows.items()}).logits}
        output = dict(model(**rows))
    if "start_logits" in output:
        return {"logits": torch.stack([output["start_logits"], output["end_logits"]], -1)}
    if type(model).__name__.endswith("ForNextSentencePrediction"):
        return {"pair_logits": output["logits"]}
    names = {
        "logits": "logits", "prediction_logits": "logits", "lm_logits": "logits", "sop_logits": "pair_logits",
        "seq_relationship_logits": "pair_logits", "last_hidden_state": "hidden",
    }  # fmt: skip
    return {names[key]: value for key, value in output.items() if key in names}


def largest_difference(ours: Any, theirs: dict[str, Tensor], rows: dict[str, Tensor]) -> float:
    """Largest difference at real tokens, as a fraction of the largest value."""
    real, worst = rows["attention_mask"].bool(), 0.0
    for name, values in theirs.items():
        mine = getattr(ours, name)
        assert mine is not None and mine.shape == values.shape, f"{name}: {mine if mine is None else mine.shape}"
        if mine.shape[:2] == real.shape and "decoder_input_ids" not in rows:
            mine, values = mine[real], values[real]
        assert torch.isfinite(mine).all() and mine.std() > 0
        worst = max(worst, float((mine - values).abs().max() / values.abs().max()))
    return worst


# A model without a head is declared twice, with and without its pooler.
EXPORTED = list(dict.fromkeys((family, published.name) for family in FAMILIES for published in classes_of(family)))


@pytest.mark.parametrize(
    ("family", "name"),
    slow_but(
        {
            ("llama", "LlamaForQuestionAnswering"), ("qwen2", "Qwen2ForTokenClassification"),
            ("modernbert", "ModernBertForTokenClassification"), ("modernbert", "ModernBertForQuestionAnswering"),
            ("bert", "BertForMultipleChoice"), ("electra", "ElectraForMultipleChoice"),
            ("gpt", "GPT2ForSequenceClassification"), ("xlnet", "XLNetForSequenceClassification"),
            ("bert", "BertForPreTraining"), ("roberta", "RobertaForMaskedLM"), ("electra", "ElectraForPreTraining"),
            ("llama", "LlamaForCausalLM"), ("bart", "BartForConditionalGeneration"), ("distilbert", "DistilBertModel"),
            ("t5", "T5ForSequenceClassification"),
        },
        EXPORTED,
    ),
)  # fmt: skip
def test_exported_class_matches_transformers(
    family: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = next(entry for entry in classes_of(family) if entry.name == name)
    write_checkpoint(family, published, tmp_path / "ours")
    capsys.readouterr()
    run_export(tmp_path)
    screen = capsys.readouterr().out
    assert f"opened by transformers {transformers.__version__} as {name}" in " ".join(screen.split())

    loader = getattr(transformers, next(AUTO[end] for end in AUTO if name.endswith(end)))
    theirs, report = loader.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert type(theirs).__name__ == name
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    # lmtool has no pooler with BigBird's activation, and the output says so.
    drawn = report["missing_keys"]
    assert bool(drawn) == (name == "BigBirdModel") and all(key.startswith("pooler.") for key in drawn)
    assert ("which initializes missing tensors" in screen) == bool(drawn)
    task = next((TASKS[head] for head in published.heads if head in HEADS), {})
    labels = task.get("labels")
    assert labels is None or list(theirs.config.id2label.values()) == labels
    loaded = lmtool.load(tmp_path / "ours")
    rows = rows_of(family, loaded.config, not task)
    assert largest_difference(loaded.model(**rows), outputs_of(theirs.eval(), rows), rows) < 1e-5


def run_export(place: Path, status: int = 0) -> None:
    """Export place/ours to place/theirs."""
    words = [f"checkpoint='{place / 'ours'}'", f"output='{place / 'theirs'}'", "offline=true"]
    assert cli.main(["export", *words]) == status


def test_wrong_weight_map_fails_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only transformers detects an error in both directions, because lmtool reads its own files back unchanged."""
    wrong = token_classifier("LlamaForTokenClassification", "classifier")
    declared = replace(llama.HF_FORMAT, classes=(wrong, *llama.HF_FORMAT.classes[1:]))
    declared = replace(declared, outside_prefixes=(*declared.outside_prefixes, "classifier."))
    monkeypatch.setattr(llama, "HF_FORMAT", declared)
    write_checkpoint("llama", wrong, tmp_path / "ours")
    capsys.readouterr()
    run_export(tmp_path, 3)
    captured = capsys.readouterr()
    screen = " ".join(captured.out.split())
    assert "missing keys none" in screen and "logits largest difference 0 " in screen
    assert "initializes missing tensors: score.bias, score.weight · unexpected classifier.bias" in screen
    assert "is not what was exported" in captured.err and "the folder was not written" in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_export_reports_missing_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of transformers fails the comparison; a missing library or class is only reported."""
    write_checkpoint("bert", classes_of("bert")[0], tmp_path / "ours")
    original = lmtool.load(tmp_path / "ours").model.parts
    tokenizer = build(FAMILIES["bert"][1], TEXTS, ROWS)
    (tmp_path / "config.json").write_text("{}")
    broken = parity(tmp_path, "BertForTokenClassification", original, tokenizer)
    assert not broken.same and "OSError" in broken.row()[1] and "\n" not in broken.row()[1]
    other = parity(tmp_path, "BertForNothing", original, tokenizer)
    assert other.same and other.row()[1] == f"lmtool only: transformers {transformers.__version__} has no such class"
    monkeypatch.setitem(sys.modules, "transformers", None)
    absent = parity(tmp_path, "BertForTokenClassification", original, tokenizer)
    assert absent.same and "lmtool only: not compared, transformers is not installed" in absent.row()[1]


@pytest.mark.parametrize(
    ("family", "kind", "reason"),
    [
        ("bert", "span_classification", "transformers has no class for task.kind=span_classification"),
        ("gpt", "multiple_choice", "transformers has no class ...ForMultipleChoice for this family"),
        ("bigbird", "multiple_choice", "BigBirdForMultipleChoice: its pooler has another activation"),
        ("bigbird", "extractive_qa", "BigBirdForQuestionAnswering: it has a feed-forward layer"),
        ("t5", "token_classification", "T5ForTokenClassification: it has the encoder alone"),
        ("bart", "token_classification", "transformers has no class ...ForTokenClassification for this family"),
    ],
)
def test_head_without_transformers_class_is_refused(family: str, kind: str, reason: str) -> None:
    tokenizer = build(FAMILIES[family][1], TEXTS, ROWS)
    with pytest.raises(UserError, match=f"heads.x cannot be exported for model={family}: {reason}"):
        export_of(config_of(family), {}, {"kind": kind, "name": "x"}, tokenizer)


@pytest.mark.parametrize(
    "name",
    slow_but({"ModernBertForSequenceClassification"}, [entry.name for entry in classes_of("modernbert")]),
)
def test_modernbert_mean_pooling_matches_transformers(name: str, tmp_path: Path) -> None:
    """classifier_pooling=mean, as in the published ModernBERTs, read and exported; token heads ignore it."""
    config = FAMILIES["modernbert"][0]().config
    config.classifier_pooling = "mean"
    torch.manual_seed(17)
    theirs = with_noise(getattr(transformers, name)(config))
    theirs.save_pretrained(tmp_path / "ours")
    with_format(build(FAMILIES["modernbert"][1], TEXTS, ROWS), "bert").save(tmp_path / "ours")
    loaded = lmtool.load(tmp_path / "ours")
    rows = rows_of("modernbert", loaded.config, False)
    assert largest_difference(loaded.model(**rows), outputs_of(theirs, rows), rows) < 1e-5
    if not name.endswith("MultipleChoice"):  # only lmtool's folders have the number of choices
        run_export(tmp_path)
        again = getattr(transformers, name).from_pretrained(tmp_path / "theirs").eval()
        assert largest_difference(loaded.model(**rows), outputs_of(again, rows), rows) < 1e-5


def test_untied_classifier_needs_no_output_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A classifier of an untied model is exported and read without the output table."""
    family, published = "llama", classes_of("llama")[1]
    write_checkpoint(family, published, tmp_path / "ours", tied=False)
    run_export(tmp_path)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["architectures"] == [published.name]
    loaded = lmtool.load(tmp_path / "theirs")
    assert (
        not loaded.config.tied
        and not loaded.report.new
        and loaded.model(torch.tensor([[40, 41]])).logits.shape[-1] == 3
    )


CLASSES: dict[str, tuple[str, str]] = {
    "bert": (
        "Bert",
        "ForMaskedLM ForMultipleChoice ForNextSentencePrediction ForPreTraining ForQuestionAnswering "
        "ForSequenceClassification ForTokenClassification LMHeadModel Model",
    ),
    "roberta": (
        "Roberta",
        "ForCausalLM ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification "
        "ForTokenClassification Model",
    ),
    "distilbert": (
        "DistilBert",
        "ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    ),
    "albert": (
        "Albert",
        "ForMaskedLM ForMultipleChoice ForPreTraining ForQuestionAnswering ForSequenceClassification "
        "ForTokenClassification Model",
    ),
    "electra": (
        "Electra",
        "ForCausalLM ForMaskedLM ForMultipleChoice ForPreTraining ForQuestionAnswering "
        "ForSequenceClassification ForTokenClassification Model",
    ),
    "gpt": (
        "GPT2",
        "DoubleHeadsModel ForQuestionAnswering ForSequenceClassification ForTokenClassification LMHeadModel Model",
    ),
    "gpt1": (
        "OpenAIGPT",
        "DoubleHeadsModel ForSequenceClassification LMHeadModel Model",
    ),
    "modernbert": (
        "ModernBert",
        "ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    ),
    "bigbird": (
        "BigBird",
        "ForCausalLM ForMaskedLM ForMultipleChoice ForPreTraining ForQuestionAnswering "
        "ForSequenceClassification ForTokenClassification Model",
    ),
    "deberta": (
        "Deberta",
        "ForMaskedLM ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    ),
    "deberta_v3": (
        "DebertaV2",
        "ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    ),
    "xlnet": (
        "XLNet",
        "ForMultipleChoice ForQuestionAnswering ForQuestionAnsweringSimple ForSequenceClassification "
        "ForTokenClassification LMHeadModel Model",
    ),
    "llama": (
        "Llama",
        "ForCausalLM ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    ),
    "qwen2": (
        "Qwen2",
        "ForCausalLM ForQuestionAnswering ForSequenceClassification ForTokenClassification Model",
    ),
    "t5": (
        "T5",
        "EncoderModel ForConditionalGeneration ForQuestionAnswering ForSequenceClassification "
        "ForTokenClassification Model",
    ),
    "transformer": (
        "Marian",
        "ForCausalLM MTModel Model",
    ),
    "bart": (
        "Bart",
        "ForCausalLM ForConditionalGeneration ForQuestionAnswering ForSequenceClassification Model",
    ),
}
"""Model classes of transformers for each family: common prefix and suffixes."""


def known_classes(family: str) -> list[str]:
    stem, ends = CLASSES[family]
    return [stem + end for end in ends.split()]


@pytest.mark.parametrize("family", FAMILIES)
def test_class_table_is_complete(family: str) -> None:
    """CLASSES equals the public models of the transformers module, and contains every declared class."""
    model = type(FAMILIES[family][0]())
    module = sys.modules[model.__module__]
    bases = [cls for cls in model.__mro__ if cls.__module__ == model.__module__]
    base = next(cls for cls in reversed(bases) if "PreTrained" in cls.__name__)
    models = {name for name in module.__all__ if issubclass(getattr(module, name), base)}
    models -= {name for name in models if name.endswith(("TrainedModel", "PretrainedModel", "PretrainedBartModel"))}
    assert models == set(known_classes(family))
    declared = module_of(family).HF_FORMAT
    assert {entry.name for entry in declared.classes} | set(declared.unsupported) <= models


HEADLESS = (
    "BigBirdForMultipleChoice", "BigBirdForQuestionAnswering", "XLNetForQuestionAnswering", "T5ForTokenClassification",
)  # fmt: skip
REFUSED = {
    **{name: f"names {name}, whose head lmtool does not support" for name in HEADLESS},
    "T5EncoderModel": "the weights contain no decoder; T5EncoderModel",
    "BartForCausalLM": "is_decoder=True",
    "MarianForCausalLM": "is_decoder=True",
}
"""Refused classes, and their error messages."""
DROPPED = {
    "GPT2DoubleHeadsModel": {"multiple_choice_head"},
    "OpenAIGPTDoubleHeadsModel": {"multiple_choice_head"},
    "BigBirdForPreTraining": {"bert", "cls"},  # its second head and pooler
    "BigBirdModel": {"pooler"},
    **{f"BigBirdFor{end}": {"bert"} for end in ("CausalLM", "MaskedLM")},
    **{f"BigBirdFor{end}Classification": {"bert"} for end in ("Sequence", "Token")},
}
"""Parts that lmtool drops and reports."""
VARIANTS = {"tied": {"num_labels": 3}, "one_label": {"num_labels": 1}, "untied": {"tie_word_embeddings": False}}
SAVED = [(family, name, variant) for family in FAMILIES for name in known_classes(family) for variant in VARIANTS]


@pytest.mark.parametrize(
    ("family", "name", "variant"),
    slow_but(
        {
            ("bert", "BertForTokenClassification", "one_label"), ("llama", "LlamaForTokenClassification", "tied"),
            ("qwen2", "Qwen2ForQuestionAnswering", "untied"), ("llama", "LlamaModel", "untied"),
            ("llama", "LlamaForSequenceClassification", "untied"), ("llama", "LlamaForCausalLM", "untied"),
            ("modernbert", "ModernBertForSequenceClassification", "untied"),
            ("modernbert", "ModernBertForTokenClassification", "one_label"),
            ("modernbert", "ModernBertForQuestionAnswering", "tied"), ("roberta", "RobertaForMultipleChoice", "tied"),
            ("electra", "ElectraForMultipleChoice", "tied"), ("xlnet", "XLNetForQuestionAnsweringSimple", "tied"),
            ("bert", "BertForNextSentencePrediction", "tied"), ("gpt", "GPT2DoubleHeadsModel", "tied"),
            ("bigbird", "BigBirdForMultipleChoice", "tied"), ("bigbird", "BigBirdForQuestionAnswering", "tied"),
            ("xlnet", "XLNetForQuestionAnswering", "tied"), ("t5", "T5ForTokenClassification", "tied"),
            ("gpt", "GPT2ForQuestionAnswering", "tied"), ("gpt", "GPT2ForTokenClassification", "tied"),
            ("bart", "BartForQuestionAnswering", "tied"), ("t5", "T5ForQuestionAnswering", "tied"),
            ("t5", "T5EncoderModel", "tied"), ("bart", "BartForCausalLM", "tied"), ("bart", "BartModel", "tied"),
        },
        SAVED,
    ),
)  # fmt: skip
def test_saved_class_is_loaded_or_refused(family: str, name: str, variant: str, tmp_path: Path) -> None:
    config = FAMILIES[family][0]().config
    labels = {"num_labels": 2} if "QuestionAnswering" in name else {}
    config.update({"architectures": None, **VARIANTS[variant], **labels})
    tokenizer = build(FAMILIES[family][1], TEXTS, ROWS)
    config.pad_token_id = tokenizer.with_padding().roles.get("pad", config.pad_token_id)
    torch.manual_seed(13)
    theirs = with_noise(getattr(transformers, name)(config))
    theirs.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    refused = REFUSED.get(name)
    if variant == "untied" and config.is_encoder_decoder:
        refused = refused or "lmtool supports only one token embedding"
    if refused is not None:
        with pytest.raises(UserError, match=refused):
            lmtool.load(tmp_path)
        return
    loaded = lmtool.load(tmp_path)
    constants = {"heads.lm"} if family == "bart" else set()  # zeros if absent from the file
    assert loaded.report.dropped.keys() == DROPPED.get(name, set()) and loaded.report.new.keys() <= constants
    generates = not any(name.endswith(head.suffix) for head in HEADS.values())
    rows = rows_of(family, loaded.config, generates)
    given = outputs_of(theirs, rows)
    if name == "BigBirdForPreTraining":
        del given["pair_logits"]
    if name == "MarianModel":  # Marian stores sines before cosines: reorder the channels
        order = torch.cat([torch.arange(0, 36, 2), torch.arange(1, 36, 2)])
        given["hidden"] = given["hidden"][..., order.argsort()]
    assert largest_difference(loaded.model(**rows), given, rows) < 1e-5
