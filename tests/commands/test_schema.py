"""`lmtool show schema`: the schema accepts every shipped YAML, and refuses wrong keys and values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lmtool.cli import main as cli

CONF = Path(__file__).resolve().parents[2] / "conf"
FILES = sorted(path for path in CONF.rglob("*.yaml") if path.relative_to(CONF).parts[0] != "recipe")
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["show", "schema"]) == 0
    return json.loads(capsys.readouterr().out)


def matches(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def errors(value: Any, schema: dict[str, Any], root: dict[str, Any], key: str = "") -> Iterator[str]:
    """Yields the errors of a value, by JSON Schema keywords on types, names and choices."""
    if "$ref" in schema:
        yield from errors(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, key)
    kinds = schema.get("type", [])
    if kinds and not any(matches(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield f"{key}: {value!r} is not {kinds}"
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{key}: {value!r} is not allowed"
    if "anyOf" in schema and all(list(errors(value, option, root, key)) for option in schema["anyOf"]):
        yield f"{key}: {value!r} fits nothing"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{key}: {value!r} does not match"
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{key}: {value} is out of range"
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        for index, item in enumerate(value):
            yield from errors(item, (first[index : index + 1] or [schema.get("items", {})])[0], root, f"{key}.{index}")
    if isinstance(value, dict):
        for name, item in value.items():
            further = schema.get("additionalProperties", {})
            inner = schema.get("properties", {}).get(name, further)
            if inner is False:
                yield f"{key}.{name}: unknown key"
            else:
                yield from errors(item, {} if inner is True else inner, root, f"{key}.{name}")


def errors_in(path: Path, schema: dict[str, Any], group: str) -> list[str]:
    """The errors in a file of a group; experiments, sweeps and debug settings have the schema itself."""
    of_file = schema["$defs"].get(group.replace("/", "."), schema)
    return list(errors(OmegaConf.to_container(OmegaConf.load(path)), of_file, schema))


def test_schema_accepts_every_shipped_yaml(schema: dict[str, Any]) -> None:
    assert len(FILES) > 300
    for path in FILES:
        group = str(path.parent.relative_to(CONF))
        found = errors_in(path, schema, path.stem if group == "." else group)
        assert not found, (path, found)


@pytest.mark.parametrize(
    ("group", "text", "error"),
    [
        ("model", "defaults: [bert, _self_]\nnum_layer: 2", ".num_layer: unknown key"),
        ("model", "name: birt", ".name: 'birt' fits nothing"),
        ("optimizer", "lr: fast", ".lr: 'fast' is not number"),
        ("experiment", "model:\n  num_layers: two", ".model: {'num_layers': 'two'} fits nothing"),
        ("experiment", "precision: fp8", ".precision: 'fp8' is not allowed"),
        ("experiment", "max_step: 100", ".max_step: unknown key"),
    ],
)
def test_schema_refuses_wrong_key_or_value(
    group: str, text: str, error: str, schema: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert errors_in(tmp_path / "mine.yaml", schema, group) == [error]


def test_schema_accepts_saved_config(
    schema: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words in (["pretrain", "experiment=bert_tiny"], ["finetune", "task=pydocs", "checkpoint=none", "model=bert"]):
        assert cli.main([*words, "--cfg", "job"]) == 0
        (tmp_path / "config.yaml").write_text(capsys.readouterr().out)
        assert errors_in(tmp_path / "config.yaml", schema, "experiment") == []


def test_schema_contains_plugin_components(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = re.search(r"```python\n(from typing import Literal.*?)```", (CONF.parent / "README.md").read_text(), re.S)
    assert plugin is not None
    (tmp_path / "schema_plugin.py").write_text(plugin[1].replace("my_plugin:", "schema_plugin:"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.syspath_prepend(str(tmp_path))
        assert cli.main(["show", "--plugin", "schema_plugin", "schema"]) == 0
    assert '"const": "biases"' in capsys.readouterr().out
    from lmtool.config import registry

    registry._ENTRIES.pop(registry._TABLES["tuning"].pop("biases").config)  # not registered in other tests
