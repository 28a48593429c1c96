"""Folders with contradictory files: the same ids as AutoTokenizer, or an error that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_published_folders import ADVERSARIAL, FAMILIES, TEXTS
from transformers import AutoTokenizer

from lmtool.errors import UserError
from lmtool.tokenizers.tokenizer import Tokenizer
from tests.breadth import slow_but

MODEL_TYPES = {
    "bert": "bert", "bert_cased": "bert", "electra": "electra", "distilbert": "distilbert", "gpt2": "gpt2",
    "roberta": "roberta", "bart": "bart", "gpt1": "openai-gpt", "t5": "t5", "albert": "albert",
    "bigbird": "big_bird", "xlnet": "xlnet", "qwen2": "qwen2",
}  # fmt: skip
STRINGS = [
    *(text for text in ADVERSARIAL if len(text) < 1000), *TEXTS[:4],
    "<e1> x <e2>y<e3> Foo <E1> <mask>  <mask> [MASK]. <img> a<img>b", "Café ÀÉ ĥello [NEW]new [new]",
    "newtoken NewToken newtokens", "  <e1>  <e2> ", "<extra_id_3>x <extra_id_104>",
]  # fmt: skip
MASK = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "rstrip": False, "normalized": False}
# Settings in tokenizer_config.json that add to or contradict the other files.
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "case": {"do_lower_case": False},
    "no_case": {"do_lower_case": True},
    "accents": {"strip_accents": True, "keep_accents": False},
    "no_accents": {"strip_accents": False, "keep_accents": True},
    "no_chinese": {"tokenize_chinese_chars": False},
    "prefix": {"add_prefix_space": True},
    "no_prefix": {"add_prefix_space": False},
    "few_sentinels": {"extra_ids": 5},
    "many_sentinels": {"extra_ids": 105},
    "mask": {"mask_token": MASK},
    "list_of_4": {"additional_special_tokens": ["<e1>", "<e2>"]},
    "list_of_5": {"extra_special_tokens": ["<e1>", "<e3>"], "image_token": "<img>"},
    "names_of_5": {"extra_special_tokens": {"picture": "<img>"}, "additional_special_tokens": ["<e1>"]},
    "no_role": {"bos_token": None, "pad_token": "<e1>"},
    "bert": {"tokenizer_class": "BertTokenizerFast", "do_lower_case": False},
    "bart": {"tokenizer_class": "BartTokenizer"},
    "plain": {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False, "add_prefix_space": True},
    "unknown": {"tokenizer_class": "RemBertTokenizerFast"},
}


def first_free(folder: Path) -> int:
    return Tokenizer.load(folder).vocab_size


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def change_settings(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_json(path, before | changes)


def remove_settings(folder: Path) -> None:
    """Without settings, only model_type names the class."""
    (folder / "tokenizer_config.json").unlink(missing_ok=True)


def class_in_config(folder: Path) -> None:
    remove_settings(folder)
    write_json(folder / "config.json", {"model_type": "bert", "tokenizer_class": "DistilBertTokenizer"})


def added_tokens(folder: Path) -> None:
    free = first_free(folder)
    special = {"mask_token": "<e2>", "additional_special_tokens": ["<e1>"]}
    write_json(folder / "special_tokens_map.json", special)
    write_json(folder / "added_tokens.json", {"<e1>": free, "newtoken": free + 1, "<e2>": free + 2})


def described_tokens(folder: Path) -> None:
    free = first_free(folder)
    plain = {"content": "[NEW]", "normalized": True, "single_word": True, "special": False}
    change_settings(
        folder,
        added_tokens_decoder={str(free): plain, str(free + 1): {"content": "<e1>", "lstrip": True, "special": True}},
    )
    write_json(folder / "special_tokens_map.json", {"mask_token": "<e3>"})  # ignored beside added_tokens_decoder


def mapped_tokens(folder: Path) -> None:
    mask = {"content": "<mask>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": True}
    write_json(folder / "special_tokens_map.json", {"mask_token": mask, "extra_special_tokens": ["<e3>", "<e1>"]})


FILES: dict[str, Callable[[Path], None]] = {
    "no_settings": remove_settings, "class_in_config": class_in_config, "added": added_tokens,
    "described": described_tokens, "mapped": mapped_tokens,
}  # fmt: skip


@pytest.fixture(scope="module", params=slow_but({"bert", "gpt2", "t5"}, FAMILIES))
def layouts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A family's folder before tokenizer.json existed, as saved by transformers, and as saved by lmtool."""
    make, reader = FAMILIES[request.param]
    root = tmp_path_factory.mktemp(request.param)
    folders = {name: root / name for name in ("old", "new", "ours")}
    folders["old"].mkdir()
    make(folders["old"])
    reader.from_pretrained(folders["old"]).save_pretrained(folders["new"])
    Tokenizer.load(folders["old"]).save(folders["ours"])
    for folder in folders.values():
        write_json(folder / "config.json", {"model_type": MODEL_TYPES[request.param]})
    return folders


@pytest.fixture(scope="module")
def strings() -> list[str]:
    """Several hundred strings, most of them words in several cases."""
    words = sorted({word for text in STRINGS for word in (*text.split(), text.upper(), text.lower())})
    return [*STRINGS, *words]


def differences(folder: Path, strings: list[str]) -> str | None:
    """The first difference between AutoTokenizer and lmtool; None if equal or if either refuses the folder."""
    expected = {}
    try:
        theirs = AutoTokenizer.from_pretrained(folder)
        for parse in (False, True):
            rows = theirs(strings, add_special_tokens=False, split_special_tokens=not parse)
            expected[parse] = rows["input_ids"]
    except Exception:  # transformers raises various errors; no reference then
        return None
    try:
        ours = Tokenizer.load(folder)
    except UserError as error:
        assert str(folder) in error.message and error.hint
        return None
    ours.save(folder / "again")
    for parse, ids_of_all in expected.items():
        for path in (folder, folder / "again"):
            given = Tokenizer.load(path, parse_special_tokens=parse).encode_batch(strings)
            for text, ids, wanted in zip(strings, given, ids_of_all, strict=True):
                if ids.tolist() != wanted:
                    return f"{path.name} parse={parse}: {text[:60]!r}: {ids.tolist()[:12]}, not {wanted[:12]}"
    special = set(theirs.all_special_ids)
    if not special <= ours.special_ids or Tokenizer.load(folder / "again").special_ids != ours.special_ids:
        return f"special: {sorted(ours.special_ids)}, not {sorted(special)}"
    roles = {role: getattr(theirs, f"{role}_token_id") for role in ours.roles}
    return None if ours.roles == roles else f"roles: {ours.roles}, not {roles}"


@pytest.mark.parametrize("layout", slow_but({"new"}, ["old", "new", "ours"]))
def test_contradictory_files_match_transformers(
    layouts: dict[str, Path], layout: str, tmp_path: Path, strings: list[str]
) -> None:
    wrong = {}
    for name in (*SETTINGS, *FILES):
        folder = tmp_path / name
        shutil.copytree(layouts[layout], folder)
        if name in FILES:
            FILES[name](folder)
        else:
            change_settings(folder, **SETTINGS[name])
        wrong[name] = differences(folder, strings)
    assert not any(wrong.values()), {name: difference for name, difference in wrong.items() if difference}


def test_consistent_folders_are_accepted(layouts: dict[str, Path], tmp_path: Path) -> None:
    """`differences` ignores folders that either refuses; folders with consistent settings must load in both."""
    for layout, folder in layouts.items():
        for name in ("nothing", "case", "accents", "prefix", "list_of_4", "list_of_5"):
            path = tmp_path / layout / name
            shutil.copytree(folder, path)
            change_settings(path, **SETTINGS[name])
            assert len(AutoTokenizer.from_pretrained(path)) == Tokenizer.load(path).vocab_size


def test_cased_bert_without_settings_is_lowercased(tmp_path: Path) -> None:
    """As in transformers, whose BertTokenizer overrides tokenizer.json."""
    make, reader = FAMILIES["bert_cased"]
    (tmp_path / "old").mkdir()
    make(tmp_path / "old")
    reader.from_pretrained(tmp_path / "old").save_pretrained(tmp_path)
    assert "T" in "".join(Tokenizer.load(tmp_path).pieces(Tokenizer.load(tmp_path).encode("The")))
    write_json(tmp_path / "config.json", {"model_type": "bert"})
    remove_settings(tmp_path)
    assert "T" not in "".join(Tokenizer.load(tmp_path).pieces(Tokenizer.load(tmp_path).encode("The")))
    (tmp_path / "config.json").unlink()  # without a class, tokenizer.json decides
    assert "T" in "".join(Tokenizer.load(tmp_path).pieces(Tokenizer.load(tmp_path).encode("The")))


def test_added_tokens_of_old_roberta_are_special(tmp_path: Path) -> None:
    make, _ = FAMILIES["roberta"]
    make(tmp_path)
    free = first_free(tmp_path)
    write_json(tmp_path / "added_tokens.json", {"<e1>": free, "<e2>": free + 1, "newtoken": free + 2})
    write_json(tmp_path / "special_tokens_map.json", {"additional_special_tokens": ["<e1>"]})
    change_settings(tmp_path, tokenizer_class="RobertaTokenizer", extra_special_tokens=["<e2>"])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    tokenizer.save(tmp_path / "again")
    assert {free + 1} < set(theirs.all_special_ids) <= tokenizer.special_ids
    assert free + 2 not in tokenizer.special_ids
    assert Tokenizer.load(tmp_path / "again").special_ids == tokenizer.special_ids


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"do_lower_case": "no"}, "do_lower_case='no' is not true or false"),
        ({"strip_accents": 1}, "strip_accents=1 is not true or false"),
        (
            {"tokenizer_class": "RemBertTokenizer"},
            "tokenizer_class='RemBertTokenizer'; lmtool supports",
        ),
        ({"tokenizer_class": "GPT2Tokenizer"}, "has no vocab.json and merges.txt, which GPT2Tokenizer needs"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "needs tokenizer.json, which"),
        ({"mask_token": 5}, "5 is not a token"),
        ({"mask_token": ""}, "mask_token='' is not a token"),
        ({"mask_token": "\ud800"}, "not a valid tokenizer file: 'utf-8' codec"),
        ({"unk_token": "<none>"}, "<none> is missing"),
        ({"extra_special_tokens": 5}, "5 is not a list of tokens"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "the added tokens have no ids"),
        ({"added_tokens_decoder": {"9999": {"content": "y"}}}, "y cannot have the id 9999"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    FAMILIES["bert"][0](tmp_path)
    change_settings(tmp_path, **settings)
    with pytest.raises(UserError) as caught:
        Tokenizer.load(tmp_path)
    assert problem in caught.value.message and str(tmp_path) in caught.value.message and caught.value.hint


def test_vocabulary_of_wrong_algorithm_is_refused(tmp_path: Path) -> None:
    make, reader = FAMILIES["gpt2"]
    make(tmp_path)
    reader.from_pretrained(tmp_path).save_pretrained(tmp_path)
    change_settings(tmp_path, tokenizer_class="BertTokenizer")
    with pytest.raises(UserError, match="a BPE vocabulary; the folder's class BertTokenizer needs"):
        Tokenizer.load(tmp_path)
