"""The methods paragraph: its sources, and its sentences from the files of a run."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import pytest
import yaml

from lmtool.commands import report
from lmtool.config.groups import conf_dir
from lmtool.config.registry import lookup, names
from lmtool.reporting import methods

# Shipped components without a published source.
_WITHOUT = {
    "distill": {"none"},
    "distill/term": {"hard"},
    "model/positions": {"concatenated", "none"},
    "schedule": {"constant", "polynomial"},
    "tokenizer": {"character", "folder", "spelled", "word"},
    "tuning": {"full", "head"},
    "tuning/regularization": {"none"},
    "tuning/schedule": {"none"},
    # The kinds of tasks, data of the user, of this machine or of a web site.
    "task": {"minimal_pairs", 
        "chunking", "classification", "custom", "extractive_qa", "multi_label", "multiple_choice", "ner", "pos",
        "pydocs", "regression", "seq2seq", "span_classification", "tatoeba", "token_classification",
    },
}  # fmt: skip
# Corpora of the hub without a paper.
_CORPORA_WITHOUT = {"vblagoje/cc_news", "wikimedia/wikipedia"}
_GROUPS = [group for group in methods.SOURCES if group not in ("task", "data")]


def sources(group: str, name: str) -> tuple[str, ...]:
    return methods.SOURCES[group].get(name, ("",))[1:]


@pytest.mark.parametrize("group", _GROUPS)
def test_every_component_has_a_source_or_is_known_to_have_none(group: str) -> None:
    assert {name for name in names(group) if not sources(group, name)} == _WITHOUT.get(group, set())
    assert set(methods.SOURCES[group]) <= set(names(group))


def test_every_task_and_corpus_has_a_source_or_is_known_to_have_none() -> None:
    tasks = {path.stem for path in (conf_dir() / "task").glob("*.yaml")}
    assert {name for name in tasks if not sources("task", name)} == _WITHOUT["task"]
    assert set(methods.SOURCES["task"]) <= tasks
    data = [yaml.safe_load(path.read_text()) for path in (conf_dir() / "data").glob("*.yaml")]
    hub = {section["hub"].partition(":")[0] for section in data if section.get("hub", "???") != "???"}
    assert {name for name in hub if not sources("data", name)} == _CORPORA_WITHOUT
    assert {name for name in methods.SOURCES["data"] if "/" in name} <= hub


def test_presets_exist_and_are_cited_in_their_yaml() -> None:
    for word, (_, *keys) in methods.PRESETS.items():
        group, _, name = word.partition("=")
        text = (conf_dir() / group / f"{name}.yaml").read_text()
        assert all(_names_source(text, key) for key in keys), word


def _names_source(text: str, key: str) -> bool:
    """Whether a text names the first author of an entry."""
    author = re.search(r"author = \{\{?([^,}]*?)\}?[,}]", methods.references()[key].replace("\\v{c}", "c"))
    assert author is not None, key
    surname = re.sub(r"\{\\\W(\w)\}", r"\1", author[1])
    plain = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return surname in plain.replace("\n# ", " ")


@pytest.mark.parametrize("group", [*_GROUPS, "task"])
def test_cited_authors_are_those_that_the_component_names(group: str) -> None:
    """The class or its YAML names the first author of each source."""
    missing: set[tuple[str, str]] = set()
    for name, (_, *keys) in methods.SOURCES[group].items():
        path = conf_dir() / group / f"{name}.yaml"
        text = path.read_text() if path.is_file() else ""
        if entry := lookup(group, name):
            text += str(entry.config.__doc__)
        # GLUE and SuperGLUE are named without their authors.
        missing |= {(name, key) for key in keys if not _names_source(text, key) and not key.endswith("glue")}
    assert not missing


def test_references_are_complete_and_all_cited() -> None:
    details = [reference for *_, reference in methods._DETAILS]
    tables = [keys for table in (*methods.SOURCES.values(), methods.PRESETS) for _, *keys in table.values()]
    used = {*details, "paszke2019pytorch", *(key for keys in tables for key in keys)}
    assert used == set(methods.references())
    for key, entry in methods.references().items():
        fields = dict(re.findall(r"^  (\w+) = \{(.*)\},?$", entry, re.MULTILINE))
        venue = {"booktitle", "journal", "institution", "howpublished"} & set(fields)
        assert fields["author"] and fields["title"] and (venue or key == "gokaslan2019openwebtext"), key
        assert re.match(r"[a-z]+(\d{4})", key)[1] == fields["year"], key  # type: ignore[index]
        assert entry.count("{") == entry.count("}") and "&" not in entry and entry.isascii(), key
    assert len(methods.references()) == methods.REFERENCES.read_text().count("\n@")


def write_run(folder: Path, config: dict[str, object], **files: object) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for name, content in {"result": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


_CONFIG: dict[str, object] = {
    "command": "finetune", "seed": 3, "max_length": 64, "batch_examples": 32,
    "model": {"name": "electra", "positions": {"name": "learned"}},
    "tokenizer": {"name": "wordpiece"},
    "task": {"name": "sst2", "loss": {"label_smoothing": 0.1, "focal_gamma": 0.0}, "demonstrations": 0},
    "tuning": {"name": "lora", "rank": 8, "dora": True, "schedule": {"name": "none"}},
    "distill": {"name": "standard", "teacher": "runs/my_teacher", "terms": {"soft": {"weight": 0.5}}},
    "optimizer": {"name": "adamw", "lr": 3e-5, "betas": [0.9, 0.999], "weight_decay": 0.01, "layer_decay": 0.8},
    "schedule": {"name": "cosine", "warmup_steps": None, "warmup_fraction": 0.1},
}  # fmt: skip


@pytest.mark.parametrize(("rule", "key"), [("linear", "goyal2017accurate"), ("sqrt", "hoffer2017train")])
def test_methods_say_how_the_rate_follows_the_batch(tmp_path: Path, rule: str, key: str) -> None:
    optimizer = {"name": "lamb", "lr": 0.002, "batch_scaling": {"rule": rule, "examples": 4096, "tokens": None}}
    run = write_run(tmp_path / "run", {**_CONFIG, "optimizer": optimizer})
    text = methods.write_methods(run)[0].read_text()
    assert "for 4,096 examples, scaled" in text and f"\\cite{{{key}}}" in text


def test_methods_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(
        tmp_path / "run",
        _CONFIG,
        result={"steps": 100, "tokens": 123456, "epochs": 2.0, "seconds": 90.0, "devices": 2, "parameters": 1000}
        | {"trainable_parameters": 20},
        facts={
            "model": {"layers": 2, "vocabulary": 30522, "precision": "bf16", "started_from": "hf://google/electra_x"},
            "data": {"train_rows": 67349},
        },
        environment={"accelerator": "NVIDIA H100", "packages": {"lmtool": "0.1.0", "torch": "2.9"}, "python": "3.11"},
    )
    assert report.main([str(run), "format=latex"]) == 0
    paths = [run / "methods.tex", run / "references.bib"]
    assert capsys.readouterr().out.splitlines() == list(map(str, paths))
    text, references = (path.read_text() for path in paths)
    for words in (
        "We finetuned ELECTRA~\\cite{clark2020electra} with learned positions~\\cite{gehring2017convolutional} "
        "(2 layers, 1,000 parameters), starting from the weights of \\texttt{hf://google/electra\\_x}.",
        "The task was SST-2~\\cite{socher2013sst,wang2019glue} (67,349 training examples) with label "
        "smoothing~\\cite{szegedy2016rethinking}.",
        "WordPiece~\\cite{devlin2019bert} (30,522 entries), up to 64 per sequence.",
        "LoRA~\\cite{hu2022lora} of rank 8 with weight decomposition (DoRA)~\\cite{liu2024dora}, which trains 20 "
        "parameters.",
        "knowledge distillation~\\cite{hinton2015distilling} from \\texttt{runs/my\\_teacher} with soft "
        "targets~\\cite{hinton2015distilling} (weight 0.5).",
        "AdamW~\\cite{loshchilov2019decoupled} (peak learning rate $3 \\times 10^{-5}$, $\\beta_1=0.9$, "
        "$\\beta_2=0.999$, weight decay 0.01); the schedule was cosine decay~\\cite{loshchilov2017sgdr} after a warmup "
        "over 10\\% of the steps with rates that decay by a factor of 0.8 per layer~\\cite{clark2020electra}.",
        "Training took 100 steps of 32 examples: 123,456 tokens and 2 epochs; the random seed was 3.",
        "It took 1 min 30 s and ran on 2 devices: NVIDIA H100 in bf16, with lmtool 0.1.0, PyTorch "
        "2.9~\\cite{paszke2019pytorch} and Python 3.11.",
    ):
        assert words in text
    keys = re.findall(r"^@\w+\{(\w+),", references, re.MULTILINE)
    cited = {key for group in re.findall(r"\\cite\{([^}]*)\}", text) for key in group.split(",")}
    assert set(keys) == cited and len(keys) == len(cited)


def test_methods_of_pretraining_name_members_and_texts(tmp_path: Path) -> None:
    config = {
        **{key: value for key, value in _CONFIG.items() if key not in ("task", "tuning", "distill")},
        "command": "pretrain",
        "objective": {"name": "mlm", "pairs": "sop", "masking": "static"},
        "data": {"name": "mixture", "members": [{"name": "hub", "hub": "allenai/c4:en"}, {"path": "50%_mine"}]},
        "model": {"name": "their_model"},
        "distill": {"name": "none"},
    }
    run = write_run(tmp_path / "run", config, environment={"arguments": ["lmtool", "pretrain", "model=ettin_17m"]})
    methods.write_methods(run)
    text = (run / "methods.tex").read_text()
    assert "We pretrained their model with sizes~\\cite{weller2025ettin}" in text  # a plugin's has no source
    assert (
        "The objective was masked language modeling~\\cite{devlin2019bert} with sentence-order "
        "prediction~\\cite{lan2020albert}, on C4~\\cite{raffel2020t5} and \\texttt{50\\%\\_mine}." in text
    )
    assert "The random seed was 3." in text and "tuning method" not in text and "distillation" not in text


def test_methods_of_a_job_name_the_seeds_of_its_setting(tmp_path: Path) -> None:
    for number, (rate, seed) in enumerate(((1, 7), (2, 7), (1, 8))):
        overrides = [f"optimizer.lr={rate}", f"seed={seed}"]
        run = write_run(tmp_path / f"{number}_x", _CONFIG, job={"job": number, "overrides": overrides})
    for name, seeds in ((run.name, "seeds were 7 and 8."), ("1_x", "seed was 7.")):
        assert f"The random {seeds}" in methods.write_methods(tmp_path / name)[0].read_text()


def test_methods_of_damaged_runs(tmp_path: Path) -> None:
    """Missing and damaged files leave gaps, not errors."""
    for number, config in enumerate(("[", "- a", "model: 3", "distill: {name: standard, terms: [1], teachers: x}")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.yaml").write_text(config)
        assert methods.write_methods(folder)[0].read_text().startswith("We pretrained")
