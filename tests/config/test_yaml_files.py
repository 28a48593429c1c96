"""User YAML is read with limits on size and nesting, wherever a file can be named."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import pytest
import yaml

from lmtool.cli import main as cli
from lmtool.config import saved
from lmtool.errors import UserError

# A few hundred bytes that expand to 43 million values.
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "says", "line"),
    [
        (BOMB, "more than 20000 keys and values", 5),
        (f"top: &top {{<<: *top}}\n{BOMB}", "alias \\*top has no complete anchor before it", 1),
        ("a: *b\n", "no complete anchor", 1),
        ("[" * 100_000 + "]" * 100_000, "nested more than 50 deep", 1),
        ("".join(f"{' ' * depth}k:\n" for depth in range(1000)), "nested more than 50 deep", 51),
        ("a: [" + "1, " * 100_000 + "]", "more than 20000 keys", 1),
        ("#" * 1_000_001, "more than 1000000 bytes", 1),
    ],
)
def test_too_large_yaml_is_refused_quickly(text: str, says: str, line: int, tmp_path: Path) -> None:
    begun = time.process_time()
    with pytest.raises(saved.TooLarge, match=says):
        saved.load(text)
    assert time.process_time() - begun < 10
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"c.yaml:{line}: .*{says}"):
        saved.read_yaml(path)


def test_too_large_yaml_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("conf/model/mine.yaml")
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(200_000_000)
    cli.main(["pretrain", "--cfg", "job", "seed=no"])  # imports
    capsys.readouterr()
    tracemalloc.start()
    status = cli.main(["pretrain", "--config-dir", "conf", "model=mine"])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    error, hint = capsys.readouterr().err.splitlines()
    assert status == 2 and most < 100_000_000
    assert "mine.yaml:1: more than 1000000 bytes" in error and hint.startswith("hint: ")


def test_small_yaml_aliases_are_expanded() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: [*a, *a]}\n"
    assert saved.load(text) == yaml.safe_load(text)
    assert len(saved.load("a: [" + "x, " * 15_000 + "]")["a"]) == 15_000


@pytest.mark.parametrize(
    "words",
    [
        ["pretrain", "--config", "bomb.yaml"],
        ["pretrain", "--config-dir", "mine", "model=bomb"],
        ["pretrain", "-m", "seed=0,1", "--config-dir", "mine", "model=bomb"],
        ["plan", "pretrain", "--config-dir", "mine", "experiment=bomb"],
        ["resume", "runs/bomb"],
    ],
)
def test_alias_bomb_is_refused_quickly(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    places = ["bomb.yaml", "mine/model/bomb.yaml", "mine/experiment/bomb.yaml", "runs/bomb/config.yaml"]
    for place in map(Path, places):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(BOMB.replace("\n", "  # @package _global_\n", 1))
    for imports in (["pretrain", "--cfg", "job", "seed=no"], ["resume", "nowhere"]):
        cli.main(imports)
    capsys.readouterr()
    begun = time.process_time()
    assert cli.main(words) == 2
    assert time.process_time() - begun < 10
    err = capsys.readouterr().err
    assert ":5: more than 20000 keys and values" in err and "bomb" in err and "hint: " in err


def test_config_dir_with_special_characters_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("it's (one), a=b")
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "mine.yaml").write_text("defaults: [bert_tiny, _self_]\nnum_layers: 3\n")
    assert cli.main(["pretrain", "--config-dir", str(folder), "model=mine", "--cfg", "job"]) == 0
    assert "num_layers: 3" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["2020-13-01", "9" * 5000])
def test_yaml_values_that_cannot_be_parsed_are_refused(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "odd.yaml").write_text(f"# @package _global_\nseed: {value}\n")
    for words in (["--config", str(folder / "odd.yaml")], ["--config-dir", str(tmp_path), "experiment=odd"]):
        assert cli.main(["pretrain", *words]) == 2
        err = capsys.readouterr().err
        # Hydra has no dates and reads the value as text.
        no_date = value in err and words[0] == "--config-dir"
        assert no_date or err.startswith(f"error: {folder / 'odd.yaml'}: ")
        assert "Traceback" not in err


@pytest.mark.parametrize(
    "content",
    [
        b"seed: !!python/object/apply:os.system [x]\n", b"a: [1\n", b"a: \x1b[31m\n", b"\xff\xfe", b"a: 1\n---\na: 2\n",
        b"seed: 1\nseed: 2\n", b"!!binary |\n  AAAA\n", b"- 1\n", b"text\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("words", [[], ["-m", "seed=1,2"]])
def test_invalid_experiment_yaml_is_refused_with_hint(
    content: bytes, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment").mkdir()
    path = tmp_path / "experiment" / "mine.yaml"
    path.write_bytes(content)
    assert cli.main(["pretrain", "--config-dir", str(tmp_path), "experiment=mine", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}") and "\nhint: " in error


def test_deeply_nested_json_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    for depth in (100, 600, 100_000):
        path.write_text('{"a":' * depth + "1" + "}" * depth)
        assert cli.main(["pretrain", "--config", str(path)]) == 2
        assert "nested" in capsys.readouterr().err
