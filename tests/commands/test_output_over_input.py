"""No command overwrites its input file with its output."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmtool.cli.main import main

ROWS = "text,label\ngood,a\nbad,b\nnice,a\nawful,b\n"
TASK = "task=custom task.kind=classification task.path=data"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, str]:
    """Files that commands read, by path, with their content."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    contents = dict.fromkeys((tmp_path / "rows.csv", tmp_path / "data/train.csv", tmp_path / "data/dev.csv"), ROWS)
    contents[tmp_path / "text.txt"] = "a text\n\nanother text\n"
    for path, content in contents.items():
        path.write_text(content)
    (tmp_path / "link.csv").symlink_to("rows.csv")
    return contents


@pytest.mark.parametrize(
    "words",
    [
        "predict checkpoint=nowhere input=rows.csv output=rows.csv",
        "predict checkpoint=nowhere input=./rows.csv output=link.csv",
        "embed checkpoint=nowhere input=text.txt output=text.txt",
        "generate checkpoint=nowhere input=text.txt output=text.txt",
        f"check {TASK} output=data/dev.csv",
        "check task=rows.csv output=rows.csv",
        "check data=text data.path=*.txt output=text.txt",
        "inspect pretrain model=bert_tiny data=text data.path=text.txt output=text.txt",
        f"inspect finetune model=bert_tiny checkpoint=none {TASK} output=data/train.csv",
    ],
)
def test_output_that_replaces_input_is_refused(words, files, capsys):
    assert main(words.split()) == 2
    assert " would replace a file that the command reads\n" in capsys.readouterr().err
    assert {path: path.read_text() for path in files} == files


def test_new_file_and_earlier_output_are_accepted(files, capsys):
    for _ in range(2):
        assert main(["check", "task=data", "task.kind=classification", "output=data/dev_findings.jsonl"]) in (0, 3)
        assert "would replace" not in capsys.readouterr().err
    Path("data/dev_findings.jsonl").unlink()
    assert {path: path.read_text() for path in files} == files
