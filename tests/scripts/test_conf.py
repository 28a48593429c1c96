"""scripts/conf.py writes defaults and comments of base YAML files from the configuration classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from lmtool.config import groups
from lmtool.training.configs import AdamWConfig
from lmtool.tuning.configs.methods import LoraConfig

Script = Callable[[str], ModuleType]


def test_every_base_yaml_is_up_to_date(script: Script) -> None:
    files = list(script("conf").files())
    assert len(files) > 120
    assert [path.name for path, text in files if path.read_text(encoding="utf-8") != text] == [], "run `make conf`"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# peak learning rate", "# another comment"),
        ("weight_decay: 0.01 ", "weight_decay: 0.02 "),
        ("clip_norm: 1.0 ", "unknown: 1.0 "),
    ],
    ids=["comment", "value", "key"],
)
def test_changed_yaml_is_restored_from_class(script: Script, tmp_path: Path, old: str, new: str) -> None:
    shipped = (groups.conf_dir() / "optimizer" / "adamw.yaml").read_text(encoding="utf-8")
    path = tmp_path / "adamw.yaml"
    assert old in shipped
    path.write_text(shipped.replace(old, new), encoding="utf-8")
    text = script("conf").updated_text(path, AdamWConfig, AdamWConfig().model_dump(mode="json"))
    assert sorted(text.splitlines()) == sorted(shipped.splitlines())


def test_yaml_comment_is_first_sentence_of_description(script: Script, tmp_path: Path) -> None:
    path = tmp_path / "lora.yaml"
    path.write_text("# Purpose.\n# lmtool finetune\nname: lora\ndora: off\n", encoding="utf-8")
    text = script("conf").updated_text(path, LoraConfig, LoraConfig().model_dump(mode="json"))
    assert text.startswith("# Purpose.\n# lmtool finetune\nname: lora\ndora: off")  # spelling of the file is kept
    assert "(Liu et al. 2024)\n" in text
