"""Unread keys and files of a published folder are listed by every command, unless they have no effect."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import lmtool
from lmtool.cli import main as cli
from lmtool.errors import UserError
from lmtool.weights.reading import read
from tests.commands.conftest import write_rows
from tests.weights.published_folders import make

CONFIG, SETTINGS, GENERATION = "config.json", "tokenizer_config.json", "generation_config.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of four families, with the tokenizer_config.json of transformers."""
    place = tmp_path_factory.mktemp("originals")
    for family in ("bert", "gpt", "llama", "modernbert"):
        make(family, place / family)
    return place


@pytest.fixture
def place(originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(originals, tmp_path, dirs_exist_ok=True))


def change(path: Path, keys: dict[str, Any]) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | keys))


LISTED: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("bert", CONFIG, {"rope_scaling": {"factor": 2}, "surprise": 1}, "config.json: rope_scaling, surprise"),
    ("bert", CONFIG, {"num_beams": 4, "hidden_act": "gelu"}, None),  # BERT does not generate
    ("gpt", CONFIG, {"num_beams": 4, "max_length": 20}, None),  # transformers reads them in generation_config.json
    ("bert", SETTINGS, {"truncation_side": "left", "auto_map": {}}, "tokenizer_config.json: truncation_side, auto_map"),
    ("bert", SETTINGS, {"sp_model_kwargs": {"alpha": 0.1}, "remove_space": False}, "sp_model_kwargs, remove_space"),
    ("bert", SETTINGS, {"truncation_side": "right", "image_token": "<i>", "padding_side": "left"}, None),
    ("bert", SETTINGS, {"do_lower_case": True, "never_split": None, "model_max_length": 10**30}, None),
    ("bert", GENERATION, {"num_beams": 4}, None),
    ("gpt", GENERATION, {"num_beams": 4, "max_length": 20, "x": 1}, "generation_config.json: x, num_beams=4"),
    ("gpt", GENERATION, {"repetition_penalty": 1.2, "temperature": None}, "repetition_penalty=1.2"),
    ("gpt", GENERATION, {"eos_token_id": [0, 5], "use_cache": False}, "generation_config.json: eos_token_id=[0, 5]"),
    ("bert", CONFIG, {"eos_token_id": [0, 5]}, None),
    ("gpt", GENERATION, {"suppress_tokens": [328, 329], "eos_token_id": 0}, None),  # unused rows of the table
    ("gpt", GENERATION, {"suppress_tokens": [3]}, "suppress_tokens=[3]"),
]


@pytest.mark.parametrize(("family", "file", "keys", "line"), LISTED)
def test_unread_keys_are_listed_unless_without_effect(
    family: str, file: str, keys: dict[str, Any], line: str | None, place: Path
) -> None:
    before = read(family).ignored
    change(place / family / file, keys)
    lines = [new for new in read(family).ignored if new not in before]
    assert not before and len(lines) == (line is not None) and all(str(line) in new for new in lines)


def test_generation_keys_in_old_config_are_listed(place: Path) -> None:
    (place / "gpt" / GENERATION).unlink()
    change(place / "gpt" / CONFIG, {"num_beams": 4, "do_sample": False, "task_specific_params": {}})
    assert read("gpt").ignored == ("config.json: num_beams=4",)
    change(place / "gpt" / CONFIG, {"eos_token_id": [0, 5], "forced_bos_token_id": 3})
    assert read("gpt").ignored == ("config.json: eos_token_id=[0, 5], num_beams=4, forced_bos_token_id=3",)


def test_unknown_files_are_listed(place: Path) -> None:
    for name in ("README.md", "LICENSE.txt", "training_args.bin", "model.onnx", ".gitattributes", "tf_model.h5"):
        (place / "bert" / name).write_text("")
    (place / "bert/runs").mkdir()
    assert read("bert").ignored == ()
    for family in ("bert", "gpt"):
        for name in ("adapter_config.json", "modeling.py", "chat_template.jinja"):
            (place / family / name).write_text("raise SystemExit(9)")
    (place / "bert/2_Dense").mkdir()
    assert read("bert").ignored == ("files: 2_Dense, adapter_config.json, modeling.py",)
    assert read("gpt").ignored == ("files: adapter_config.json, chat_template.jinja, modeling.py",)
    for number in range(20):
        (place / "gpt" / f"other{number}").write_text("")
    assert read("gpt").ignored[0].endswith(" and 15 more")


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_type='linear', but model=llama supports only default",
        ),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "but model=llama supports only default"),
        ("modernbert", {"rope_scaling": {"factor": 2.0}}, "rope_scaling="),
        ("modernbert", {"rope_parameters": {"rope_type": "linear"}}, "but model=modernbert supports only null"),
    ],
)
def test_unsupported_rope_settings_are_refused(family: str, keys: dict[str, Any], message: str, place: Path) -> None:
    change(place / family / CONFIG, keys)
    with pytest.raises(UserError, match=message):
        read(family)


def test_unsupported_text_format_warns(place: Path) -> None:
    tokenizer = json.loads((place / "llama/tokenizer.json").read_text())
    end = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    pieces = [{"SpecialToken": {"id": end["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    layout = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {end["id"]: end}}
    (place / "llama/tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": layout}))
    with pytest.warns(
        UserWarning, match=r"does not read: tokenizer\.json: special tokens around texts, '<\|endoftext\|> a'"
    ):
        lmtool.load("llama")


def test_every_command_warns_once_of_unread_keys(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(place / "rows")
    for family in ("bert", "gpt"):
        change(place / family / CONFIG, {"surprise": 1})
    some = ["device=cpu", "precision=fp32"]
    for words in (
        ["import", "output=ours"],
        ["export", "output=back"],
        ["embed", "text=the dog", *some],
        ["predict", "text=the dog", *some],
        ["generate", "prompt=the dog", "max_new_tokens=2", *some],
        ["finetune", "task=sst2", "task.path=rows", "max_steps=1", "max_length=32", *some],
    ):
        family = "gpt" if words[0] in ("generate", "predict") else "bert"
        assert cli.main([words[0], f"checkpoint={family}", *words[1:]]) == 0, words
        said = capsys.readouterr().out
        assert (
            said.count(f"warning: checkpoint={family} has parts that lmtool does not read: config.json: surprise") == 1
        ), (words, said)
    with pytest.warns(UserWarning, match="checkpoint=bert has parts that lmtool does not read: config.json: surprise"):
        lmtool.load("bert")


def test_copy_of_sentence_encoder_warns_of_lost_pooling(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "bert/1_Pooling").mkdir()
    (place / "bert/1_Pooling/config.json").write_text('{"pooling_mode": "max"}')
    for words in (["import", "output=ours"], ["export", "output=back"]):
        assert cli.main([words[0], "checkpoint=bert", words[1]]) == 0
        said = capsys.readouterr().out
        assert "is a sentence encoder; the copy is its model without pooling=max: lmtool embed" in said
