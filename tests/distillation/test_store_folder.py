"""The folder of stored teacher outputs: reused where it matches, made again where it is damaged."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from lmtool.data.examples import Rows
from lmtool.distillation.store.folder import StoreLocation, open_or_make, require_free_space
from lmtool.errors import UserError
from lmtool.session.teacher_texts import replace_targets
from lmtool.system.files import Damaged
from lmtool.tasks.kinds.base import Prediction
from lmtool.tasks.kinds.text_to_text import TextToTextLearner

OF = {"teacher": "a" * 64, "data": {"task=x": {"train texts": "1", "train rows": 3}}, "max_length": 32}


def fill(folder):
    (folder / "values.bin").write_bytes(b"12345678")
    return {"rows": 3}


def test_store_is_made_once_and_again_where_damaged(tmp_path):
    location, warned = StoreLocation(None, str(tmp_path)), []
    made = open_or_make(location, OF, fill)
    found = open_or_make(location, OF, fill)
    assert (made.metadata["rows"], made.bytes) == (3, 8) and made.made and not found.made
    assert open_or_make(location, {**OF, "teacher": "b" * 64}, fill).folder != made.folder
    (made.folder / "values.bin").write_bytes(b"12345679")
    again = open_or_make(location, OF, fill, lambda *said: warned.append(said[0]))
    assert again.made and "is damaged" in warned[0]
    assert not list(tmp_path.glob("teachers/.*draft*"))


def test_mismatched_or_damaged_user_folder_is_refused(tmp_path):
    location = StoreLocation(str(tmp_path / "kept"), str(tmp_path))
    folder = open_or_make(location, OF, fill).folder
    data = {"task=x": {"train texts": "2", "train rows": 3}}
    with pytest.raises(
        UserError, match=r"another teacher; other data \(task=x\); max length 32 in the store, 16 in this run"
    ):
        open_or_make(location, {"teacher": "b" * 64, "data": data, "max_length": 16}, fill)
    (folder / "values.bin").write_bytes(b"1")
    with pytest.raises(Damaged):
        open_or_make(location, OF, fill)


@pytest.mark.parametrize("target", ["mine", "nowhere"])
def test_symlink_in_the_store_folder_is_not_followed(tmp_path, target):
    """The folder that a user names may be a link; a link inside it, of an untrusted store, is not followed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to("disk")
    (tmp_path / "disk" / "outputs").symlink_to(tmp_path / target)
    location = StoreLocation(str(tmp_path / "store" / "outputs"), str(tmp_path))
    if target == "mine":
        with pytest.raises(UserError, match="is an existing folder or file without stored"):
            open_or_make(location, OF, fill)
        (tmp_path / "disk" / "outputs").unlink()
        (tmp_path / "disk" / ".outputs.lock").unlink(missing_ok=True)
        (tmp_path / "disk" / ".outputs.lock").symlink_to(tmp_path / "mine" / "lock")
        with pytest.raises(UserError):
            open_or_make(location, OF, fill)
    else:
        assert open_or_make(location, OF, fill).folder == tmp_path / "disk" / "outputs"
        assert not (tmp_path / "disk" / "outputs").is_symlink()
    assert not [*(tmp_path / "mine").iterdir()] and not (tmp_path / "nowhere").exists()


def test_failed_pass_leaves_no_folder(tmp_path):
    def failing(folder):
        fill(folder)
        require_free_space(folder, 10**9, 1, 10**9)

    with pytest.raises(UserError, match="GB left"):
        open_or_make(StoreLocation(None, str(tmp_path)), OF, failing)
    assert not [path for path in (tmp_path / "teachers").iterdir() if path.is_dir()]


def test_teacher_texts_replace_labels(monkeypatch):
    student = TextToTextLearner.__new__(TextToTextLearner)
    parsed = {"bad": Prediction(0, 1.0), "good": Prediction(1, 1.0)}
    object.__setattr__(student, "kind", SimpleNamespace(parse=parsed.get))
    object.__setattr__(student, "config", SimpleNamespace(reads=("text",)))
    rows = Rows([0, 1, 2], {"text": ["a", "b", "c"]}, np.array([0, 0, 1]), [("x", line) for line in range(3)])
    replaced, metadata = replace_targets(student, rows, ["bad", "good", "neither"], keep_gold=False)
    assert replaced.labels.tolist() == [0, 1, 1]
    assert (metadata["rows"], metadata["other_than_gold"]) == (3, 1)
    assert metadata["warnings"] == [
        "the teacher's text is empty or not a label for 1 of 3 rows: their targets are kept"
    ]
    both, _ = replace_targets(student, rows, ["bad", "good", "neither"], keep_gold=True)
    assert both.columns["text"] == ["a", "b", "c", "b"] and both.labels.tolist() == [0, 0, 1, 1]
