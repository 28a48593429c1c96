"""Compatibility with PEFT: imported adapters of PEFT give its logits or are refused by name, and adapters exported by
lmtool give their logits in PEFT. All models are tiny, with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import lmtool
from lmtool.cli import main as cli
from lmtool.config.registry import Choice, build
from lmtool.types import part_of
from lmtool.weights.base import Base, digest
from lmtool.weights.exporting import ImportedModel, write_import
from lmtool.weights.folders import hf_folder
from lmtool.weights.padded_model import load
from lmtool.weights.peft import adapter
from lmtool.weights.reading import read
from tests.breadth import slow_but
from tests.weights.published_folders import FAMILIES, make, make_classifier

peft = pytest.importorskip("peft")
CAUSAL, SEQ2SEQ = ("gpt", "gpt1", "llama", "qwen2"), ("t5", "bart", "transformer")
LABELS = ["no", "yes", "maybe"]


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def run(*words: str, status: int = 0) -> None:
    assert cli.main([*words]) == status


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a family's language model, or of its classifier with three labels; each is written once."""
    place = tmp_path_factory.mktemp("published")

    def folder(family: str, kind: str) -> Path:
        path = place / f"{family}-{kind}"
        if not path.exists() and kind == "labels":
            make_classifier(family, path, 3, LABELS)
        elif not path.exists():
            make(family, path)
        return path

    return folder


def opened(folder: Path, **more: Any) -> nn.Module:
    """The model of a published folder in transformers."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, **more).eval()


def task_type(family: str, kind: str) -> str | None:
    if kind == "labels":
        return "SEQ_CLS"
    return "CAUSAL_LM" if family in CAUSAL else "SEQ_2_SEQ_LM" if family in SEQ2SEQ else None


def rows(family: str, kind: str) -> dict[str, torch.Tensor]:
    """Two texts of nine tokens, with an end token, which classifiers of encoder-decoders read."""
    ids = torch.arange(2 * 9).reshape(2, 9) * 37 % 250 + 10
    if kind == "labels":
        ids[:, -1] = {"t5": 1, "bart": 2}.get(family, 200)
    more = {"decoder_input_ids": ids[:, :5].flip(1)} if family in SEQ2SEQ and kind != "labels" else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def logits_of(model: nn.Module, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        output = model(**given)
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    return next(
        getattr(output, name) for name in ("logits", "prediction_logits", "last_hidden_state") if name in output
    )


def are_close(ours: torch.Tensor, theirs: torch.Tensor, share: float = 2e-5) -> bool:
    """Whether logits differ by at most a fraction of the largest; without theirs at virtual tokens."""
    theirs = theirs[:, -ours.shape[1] :]
    return bool((ours - theirs).abs().max() <= share * theirs.abs().max())


def randomized(model: nn.Module) -> nn.Module:
    """The model with random values in its trainable parameters, so that the adapter has an effect."""
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


# By case: the family, the kind of model, the method of PEFT, its settings, and the error if lmtool refuses it.
LORA: dict[str, Any] = {"r": 2, "lora_alpha": 6}
SAVED: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "patterns": (
        "gpt", "text", "LoraConfig",
        {**LORA, "target_modules": r".*\.h\.(0|1)\.(attn\.c_attn|mlp\.c_(fc|proj))",
         "rank_pattern": {r"h\.\d+\.attn\.c_attn": 5, r"^transformer\.h\.1\.mlp\..*": 3},
         "alpha_pattern": {".*mlp.*": 24, "c_attn": 3}},
        "",
    ),
    "rslora with patterns": (
        "llama", "text", "LoraConfig",
        {**LORA, "use_rslora": True, "target_modules": ["q_proj", "down_proj"],
         "rank_pattern": {"layers.0.*": 4}, "alpha_pattern": {r"layers\.[1-9]\..*": 9}},
        "",
    ),
    "some layers": (
        "gpt", "text", "LoraConfig",
        {**LORA, "target_modules": ["c_attn"], "layers_to_transform": 1, "layers_pattern": "h"}, "",
    ),
    "without some modules": (
        "bert", "labels", "LoraConfig",
        {**LORA, "target_modules": ["query", "dense"], "exclude_modules": r".*layer\.1.*"}, "",
    ),
    "all linear modules": ("bert", "text", "LoraConfig", {**LORA, "target_modules": "all-linear"}, ""),
    "dora": (
        "gpt", "labels", "LoraConfig",
        {**LORA, "use_dora": True, "target_modules": ["c_attn", "c_fc"], "rank_pattern": {"c_fc": 4}}, "",
    ),
    "all biases": ("bert", "labels", "LoraConfig", {**LORA, "bias": "all"}, ""),
    "lora biases": ("qwen2", "labels", "LoraConfig", {**LORA, "bias": "lora_only"}, ""),
    "biases in B": ("bert", "labels", "LoraConfig", {**LORA, "lora_bias": True, "target_modules": ["query"]}, ""),
    "norm": ("bert", "labels", "LoraConfig", {**LORA, "modules_to_save": ["LayerNorm"]}, ""),
    "both embeddings": ("llama", "text", "LoraConfig", {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}, ""),
    "one embedding": (
        "llama", "text", "LoraConfig", {**LORA, "modules_to_save": ["embed_tokens"]}, "the token embedding was trained",
    ),
    "output layer": (
        "llama", "text", "LoraConfig", {**LORA, "target_modules": ["q_proj", "lm_head"]}, "lm_head, which is not",
    ),
    "embedding update": (
        "llama", "text", "LoraConfig", {**LORA, "target_modules": ["q_proj", "embed_tokens"]},
        "updates model.embed_tokens, an embedding",
    ),
    "only embedding update": (
        "gpt", "text", "LoraConfig", {**LORA, "target_modules": ["wte"]}, "updates transformer.wte, an embedding",
    ),
    "no bias to add to": (
        "llama", "labels", "LoraConfig", {**LORA, "lora_bias": True}, "q_proj has a bias, which the layer lacks",
    ),
    "pissa": ("bert", "labels", "LoraConfig", {**LORA, "init_lora_weights": "pissa"}, "weights=pissa changes"),
    "trained tokens": ("llama", "text", "LoraConfig", {**LORA, "trainable_token_indices": [1]}, "no trained tokens"),
    "ia3": ("t5", "text", "IA3Config", {"exclude_modules": ".*decoder.*"}, ""),
    "ia3 of other maps": ("bert", "labels", "IA3Config", {}, ""),
    "ia3 of joined maps": ("gpt", "labels", "IA3Config", {}, ""),
    "ia3 and biases apart": ("deberta", "labels", "IA3Config", {}, ""),
    "prompt": ("t5", "text", "PromptTuningConfig", {"num_virtual_tokens": 3, "num_transformer_submodules": 1}, ""),
    "p-tuning": ("llama", "text", "PromptEncoderConfig", {"num_virtual_tokens": 3}, ""),
    "prefix": ("llama", "text", "PrefixTuningConfig", {"num_virtual_tokens": 3}, ""),
    "mapped prefix": (
        "gpt", "text", "PrefixTuningConfig",
        {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 7}, "",
    ),
    "prompts on both sides": ("t5", "text", "PromptTuningConfig", {"num_virtual_tokens": 3}, "_submodules=2"),
    "prompts before a class token": ("bert", "labels", "PromptTuningConfig", {"num_virtual_tokens": 3}, "agree only"),
    "prompts beside scaled vectors": (
        "transformer", "text", "PromptTuningConfig", {"num_virtual_tokens": 3, "num_transformer_submodules": 1},
        "scales token embeddings",
    ),
    "another method": ("llama", "text", "LoHaConfig", {"target_modules": ["q_proj"]}, 'peft_type: given "LOHA"'),
}  # fmt: skip
EVERYWHERE: dict[str, Any] = {**LORA, "target_modules": "all-linear", "use_dora": True, "bias": "all"}
# PEFT saves DistilBERT's pre_classifier completely, like the classifier.
APART = {"distilbert": {"exclude_modules": ["pre_classifier", "classifier"]}}
SAVED |= {
    f"{family} {kind}": (
        family,
        kind,
        "LoraConfig",
        {**EVERYWHERE, **(APART.get(family, {}) if kind == "labels" else {})},
        "",
    )
    for family in FAMILIES
    for kind in ("text", "labels")
    if (family, kind) != ("transformer", "labels")
}
QUICK = [
    "patterns", "rslora with patterns", "all linear modules", "dora", "all biases", "biases in B", "both embeddings",
    "one embedding", "output layer", "only embedding update",
    "ia3 of joined maps", "ia3 and biases apart", "prompt", "p-tuning", "prefix",
    "prompts on both sides", "modernbert labels", "xlnet labels", "t5 labels",
]  # fmt: skip


@pytest.mark.parametrize("case", slow_but(QUICK, SAVED))
def test_peft_adapter_is_imported_or_refused(case, folders, capsys):
    family, kind, method, fields, refused = SAVED[case]
    folder, given = folders(family, kind), rows(family, kind)
    settings = getattr(peft, method)(task_type=task_type(family, kind), **fields)
    randomized(peft.get_peft_model(opened(folder), settings)).save_pretrained("adapter")
    run("import", "checkpoint=adapter", "output=ours", status=2 if refused else 0)
    error = capsys.readouterr().err
    if refused:
        assert refused in error and error.startswith("error: ") and error.count("\n") == 2, error
        return
    theirs = logits_of(peft.PeftModel.from_pretrained(opened(folder), "adapter").eval(), given)
    assert are_close(lmtool.load("ours").model(**given).logits, theirs)
    assert not are_close(logits_of(opened(folder), given), theirs, 1e-3), "the adapter has an effect"


def test_adapter_of_model_without_head_is_imported(folders):
    """Modules have no prefix in such a model; sentence encoders are tuned this way."""
    folder, given = folders("bert", "text"), rows("bert", "text")
    base = transformers.AutoModel.from_pretrained(folder)
    settings = peft.LoraConfig(
        task_type="FEATURE_EXTRACTION", bias="all", rank_pattern={"^encoder.layer.0.*": 3}, **LORA
    )
    tuned = randomized(peft.get_peft_model(base, settings))
    tuned.save_pretrained("adapter")
    run("import", "checkpoint=adapter", "output=ours")
    assert are_close(lmtool.load("ours").model(**given).hidden, logits_of(tuned, given))


@pytest.mark.parametrize(
    ("kind", "head"), [("TokenClassification", "TOKEN_CLS"), ("QuestionAnswering", "QUESTION_ANS")]
)
def test_adapter_with_token_head_is_imported(kind, head, folders):
    folder, given = folders("bert", "text"), rows("bert", "text")
    base = getattr(transformers, f"BertFor{kind}").from_pretrained(folder)
    tuned = randomized(peft.get_peft_model(base, peft.LoraConfig(task_type=head, **LORA)))
    tuned.save_pretrained("adapter")
    run("import", "checkpoint=adapter", "output=ours")
    assert are_close(lmtool.load("ours").model(**given).logits, logits_of(tuned, given))


@pytest.mark.parametrize("with_config", [False, True])
def test_adapter_as_checkpoint_hints_at_import(with_config, folders, capsys):
    base = opened(folders("bert", "labels"))
    peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", **LORA)).save_pretrained("adapter")
    if with_config:
        base.config.save_pretrained("adapter")
    run("predict", "checkpoint=adapter", "text=a", status=2)
    error = capsys.readouterr().err
    assert "checkpoint=adapter is a PEFT adapter" in error
    run(*error.partition("hint: lmtool ")[2].partition(",")[0].split())
    run("predict", "checkpoint=FOLDER", "text=a", "device=cpu", "precision=fp32")


@pytest.mark.parametrize(
    "labels", [{"id2label": ["no"]}, {"id2label": {"0": "no", "2": "yes"}}, {"id2label": {"x": 1}}]
)
def test_invalid_label_names_are_refused(labels, folders, capsys):
    settings = peft.LoraConfig(task_type="SEQ_CLS", **LORA)
    peft.get_peft_model(opened(folders("bert", "labels")), settings).save_pretrained("adapter")
    Path("adapter/labels.json").write_text(json.dumps(labels))
    run("import", "checkpoint=adapter", "output=ours", status=2)
    assert "does not number the labels 0, 1, ..." in capsys.readouterr().err


def test_unread_adapter_config_keys_are_listed(folders, capsys):
    settings = peft.LoraConfig(task_type="SEQ_CLS", **LORA)
    peft.get_peft_model(opened(folders("bert", "labels")), settings).save_pretrained("adapter")
    content = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps({**content, "use_next": None, "next_size": 4}))
    run("import", "checkpoint=adapter", "output=ours")
    assert "not read in adapter_config.json: next_size\n" in capsys.readouterr().out


TUNINGS: dict[str, dict[str, Any]] = {
    "lora": {"name": "lora", "rank": 3, "projections": ["q_proj", "v_proj", "fc_in"]},
    "rslora": {"name": "lora", "rank": 3, "rank_stabilised": True, "projections": ["v_proj", "fc_out"]},
    "dora": {"name": "lora", "rank": 2, "dora": True, "projections": ["q_proj", "v_proj", "fc_out"]},
    "lora biases": {"name": "lora", "rank": 2, "bias": "lora_only"},
    "all biases": {"name": "lora", "rank": 2, "bias": "all", "dora": True},
    "ia3": {"name": "ia3"},
    "prompt": {"name": "prompt", "length": 3},
    "p-tuning": {"name": "ptuning", "length": 3},
    "deep p-tuning": {"name": "ptuning", "length": 3, "deep": True},
    "prefix": {"name": "prefix", "length": 3, "inner_size": 5},
}
WITHOUT_BIASES = ("t5", "llama", "modernbert")
PROMPTS = ("prompt", "p-tuning", "deep p-tuning", "prefix")


def tuned_checkpoint(folder: Path, section: dict[str, Any], output: Path) -> None:
    """Writes a tuned checkpoint like a run: added and trained weights of a published model, with its head."""
    described, loaded = hf_folder(str(folder)), load(folder)
    method, parts = Choice("tuning").validate(section), loaded.model.parts
    parts.loss_weights = dict.fromkeys(["classifier"], 1.0) if parts.task else {}
    parts.tune(build(method), frozenset())
    randomized(parts)
    own = {name: parts.state_dict()[name] for name in parts.tuning.delta_names(parts)}
    held = {name: tensor for name, tensor in read(str(folder)).tensors.items() if name not in own}
    names = tuple(sorted({part_of(name) for name in held}))
    beside = Base(str(folder), str(folder), None, names, digest(held), loaded.tokenizer.fingerprint)
    classifier = described.classifier_config() if parts.task else None
    tuning = json.loads(method.model_dump_json())
    source = {"checkpoint": str(folder)}
    imported = ImportedModel(own, loaded.config, loaded.tokenizer, source, classifier or {}, tuning, beside)
    write_import(imported, output)


WRITTEN = [
    *(
        (family, "labels", name)
        for family in FAMILIES
        for name in TUNINGS
        if name not in PROMPTS and family != "transformer" and not ("biases" in name and family in WITHOUT_BIASES)
    ),
    *((family, "text", name) for family in (*CAUSAL, *SEQ2SEQ) for name in PROMPTS),
]
QUICK_EXPORTS = [
    ("distilbert", "labels", "lora"), ("deberta", "labels", "ia3"), ("gpt", "labels", "dora"),
    ("modernbert", "labels", "rslora"), ("gpt", "labels", "lora biases"), ("deberta", "labels", "all biases"),
    ("t5", "labels", "ia3"), ("qwen2", "labels", "ia3"), ("bart", "text", "prompt"), ("gpt", "text", "p-tuning"),
    ("llama", "text", "deep p-tuning"), ("qwen2", "text", "prefix"),
]  # fmt: skip
UNSUPPORTED = {
    **{("xlnet", name): "which is not a linear module" for name in TUNINGS},
    ("deberta", "ia3"): "after deberta.encoder.layer.0.attention.self.in_proj",
    **{("transformer", name): "scales token embeddings" for name in ("prompt", "p-tuning")},
    **{(family, name): "prefixes of generative decoders" for family in SEQ2SEQ for name in ("prefix", "deep p-tuning")},
    **{("gpt1", name): "has no cache of keys" for name in ("prefix", "deep p-tuning")},
}


@pytest.mark.parametrize(("family", "kind", "name"), slow_but(QUICK_EXPORTS, WRITTEN))
def test_exported_adapter_gives_same_logits_in_peft(family, kind, name, folders, capsys):
    """PEFT runs the README's code and gives the logits of lmtool, and the import of the adapter gives them again."""
    refused = UNSUPPORTED.get((family, name))
    folder, given = folders(family, kind), rows(family, kind)
    tuned_checkpoint(folder, TUNINGS[name], Path("tuned"))
    run("export", "checkpoint=tuned", "output=adapter", "format=peft", status=2 if refused else 0)
    said = capsys.readouterr()
    if refused:
        assert refused in said.err and "format=delta" in said.err
        return
    assert "opened with PEFT: logits differ by" in said.out
    ours = lmtool.load("tuned").model(**given).logits
    code = Path("adapter/README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert are_close(ours, logits_of(names["model"], given))
    assert not are_close(ours, logits_of(opened(folder), given), 1e-3), "the adapter has an effect"
    if kind == "labels":
        assert list(names["model"].config.id2label.values()) == LABELS
        labels = json.loads(Path("adapter/labels.json").read_text())
        theirs = transformers.AutoModelForSequenceClassification.from_pretrained("adapter", **labels).eval()
        # Without PEFT's class, transformers 5.23 ignores the magnitudes of DoRA in any adapter.
        assert are_close(ours, logits_of(theirs, given)) or TUNINGS[name].get("dora")
    run("import", "checkpoint=adapter", "output=back")
    again = lmtool.load("back")
    assert are_close(again.model(**given).logits, ours)
    assert kind == "text" or list(again.task["labels"]) == LABELS


def test_base_that_is_a_run_is_exported_by_readme_command(folders, capsys):
    """The adapter's README.md names the command that exports the base, and works after it."""
    given = rows("gpt", "text")
    run("import", f"checkpoint={folders('gpt', 'text')}", "output=first")
    tuned_checkpoint(Path("first"), TUNINGS["dora"], Path("tuned"))
    run("export", "checkpoint=tuned", "output=adapter", "format=peft")
    assert "the base is a run of lmtool: for transformers, run" in capsys.readouterr().out
    code = Path("adapter/README.md").read_text().split("```python\n")[1].split("```")[0]
    run(*code.partition("# before: lmtool ")[2].partition("\n")[0].split())
    names: dict[str, Any] = {}
    exec(code, names)
    assert are_close(lmtool.load("tuned").model(**given).logits, logits_of(names["model"], given))
    run("import", "checkpoint=adapter", "output=back")
    assert are_close(lmtool.load("back").model(**given).logits, logits_of(names["model"], given))


def test_export_without_peft_reports_missing_comparison(folders, capsys, monkeypatch):
    tuned_checkpoint(folders("bert", "labels"), TUNINGS["lora"], Path("tuned"))
    monkeypatch.setattr("lmtool.weights.conversion.tuned.find_spec", lambda package: None)
    run("export", "checkpoint=tuned", "output=adapter", "format=peft")
    assert "not compared with PEFT, which is not installed: pip install peft" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["another scale", "a lost head"])
def test_export_that_peft_reads_differently_is_refused(change, folders, capsys, monkeypatch):
    """The defect is the same in our export and import, so only PEFT can detect it."""
    tuned_checkpoint(folders("bert", "labels"), TUNINGS["lora"], Path("tuned"))
    real = adapter.save_tensors

    def damaged(tensors: Any, path: Path) -> None:
        ours = {name: tensor * 1.5 if "lora_B" in name else tensor for name, tensor in tensors.items()}
        lost = {name: tensor for name, tensor in tensors.items() if "classifier" not in name}
        real(ours if change == "another scale" else lost, path)

    monkeypatch.setattr(adapter, "save_tensors", damaged)
    monkeypatch.setattr("lmtool.weights.conversion.tuned._require_same", lambda *given: None)
    run("export", "checkpoint=tuned", "output=adapter", "format=peft", status=3)
    error = capsys.readouterr().err
    assert "PEFT" in error and "the folder was not written" in error
    assert not Path("adapter").exists() and not list(Path().glob(".tmp-*"))


@pytest.mark.parametrize(
    ("kind", "count"), [("multi_label_classification", 3), ("regression", 1), ("single_label_classification", 3)]
)
def test_classifier_kind_survives_peft_round_trip(kind, count, capsys):
    make_classifier("bert", Path("published"), count, LABELS[:count], problem_type=kind)
    tuned_checkpoint(Path("published"), TUNINGS["dora"], Path("tuned"))
    run("export", "checkpoint=tuned", "output=adapter", "format=peft")
    run("import", "checkpoint=adapter", "output=back")
    for checkpoint in ("published", "tuned", "back"):
        asked = ["text=a lovely dog", "device=cpu", "precision=fp32", f"output={checkpoint}.jsonl"]
        run("predict", f"checkpoint={checkpoint}", *asked)
    answers = [json.loads(Path(f"{name}.jsonl").read_text()) for name in ("published", "tuned", "back")]
    assert answers[1] == answers[2] and answers[0].keys() == answers[1].keys()
