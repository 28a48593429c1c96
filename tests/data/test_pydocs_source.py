from __future__ import annotations

import re
import sysconfig
from collections import Counter

import pytest

from lmtool.data import docstrings, pydocs
from lmtool.data.configs import PydocsConfig
from lmtool.data.pydocs import PydocsSource, pydocs_rows
from lmtool.data.sources import Source
from lmtool.errors import UserError

from .data_fixtures import texts

# Two small packages of the standard library: a whole environment would take seconds.
SMALL = PydocsConfig(max_bytes=40_000, packages=("email", "asyncio"))

MODULE = '''"""The module's own words."""
raise SystemExit("imported")

class Thing:
    """A thing of
        two lines."""

    def method(self):
        """What the method does."""
        def inner():
            "Inside, with plain quotes."

if True:
    try:
        async def late():
            """Within if and try."""
    except ValueError:
        def never():
            """Within the handler."""

"""No docstring: an expression."""
'''


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An environment with a few fake packages."""
    library, site = tmp_path / "lib", tmp_path / "lib" / "site-packages"
    prose = "It tells about number {} in more words than one."
    files = {
        library / "standard.py": f'"""{prose.format(1)}"""',
        library / "test" / "test_it.py": f'"""{prose.format(2)}"""',
        site / "beta" / "__init__.py": f'"""{prose.format(3)}"""',
        site / "beta" / "sub.py": f'"""{prose.format(4)}"""\ndef f():\n    """Short."""\n',
        site / "beta" / "tests" / "a.py": f'"""{prose.format(5)}"""',
        site / "Alpha" / "__init__.py": f'"""{prose.format(6)}"""\ndef f():\n    """{prose.format(3)}"""\n',
        site / "gamma.py": f'"""{prose.format(7)}"""',
        site / "broken.py": '"""' + prose.format(8) + '"""\ndef (',
        site / "binary.py": b'"""\xff\xfe"""',
        site / "lmtool" / "__init__.py": f'"""{prose.format(9)}"""',
        site / "beta-1.0.dist-info" / "METADATA": "",
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    paths = {"stdlib": str(library), "purelib": str(site), "platlib": str(site)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    return site


def test_docstrings_are_in_source_order(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(MODULE)
    assert docstrings.docstrings(str(path)) == [
        (1, "The module's own words."),
        (5, "A thing of\ntwo lines."),
        (9, "What the method does."),
        (11, "Inside, with plain quotes."),
        (16, "Within if and try."),
        (19, "Within the handler."),
    ]
    for content in (b"def (", b'"""\xff', b"", b'"""a"""\n\0', b"# coding: nonsense\n'''a'''", b"(" * 5000 + b"'''"):
        path.write_bytes(content)
        assert docstrings.docstrings(str(path)) == []
    assert docstrings.docstrings(str(tmp_path / "none.py")) == []


def test_standard_library_precedes_sorted_packages(installed):
    source = PydocsSource(PydocsConfig())
    collected = [*texts(source, "train"), *texts(source, "validation")]
    numbers = [int(number) for text in collected for number in re.findall(r"number (\d+)", text)]
    assert sorted(numbers) == [1, 3, 4, 6, 7]  # no tests, no lmtool, nothing broken
    train = [int(number) for text in texts(source, "train") for number in re.findall(r"number (\d+)", text)]
    assert train == [number for number in (1, 6, 3, 4, 7) if number in train]
    assert docstrings.installed() == ["Alpha", "beta", "binary", "broken", "gamma"]
    assert "Short." not in " ".join(collected)
    metadata = source.metadata()
    assert metadata["documents"] + metadata["validation_documents"] == len(collected) and metadata["fingerprint"]


def test_repeated_docstrings_are_dropped(installed):
    source = PydocsSource(PydocsConfig(packages=("Alpha", "beta")))
    text = " ".join([*texts(source, "train"), *texts(source, "validation")])
    assert text.count("number 3 ") == 1


def test_max_bytes_limits_the_corpus():
    source = PydocsSource(SMALL)
    assert 35_000 < source.metadata()["bytes"] <= 40_000
    assert isinstance(source, Source) and source.count("validation") >= 1
    again = PydocsSource(SMALL)
    assert again.fingerprint == source.fingerprint
    assert list(texts(again, "train")) == list(texts(source, "train"))
    assert PydocsSource(SMALL.model_copy(update={"max_bytes": 30_000})).fingerprint != source.fingerprint


def test_second_run_reads_the_cache(tmp_path, monkeypatch):
    first = PydocsSource(SMALL, tmp_path)
    read = docstrings.read
    monkeypatch.setattr(docstrings, "read", lambda _: pytest.fail("read again"))
    second = PydocsSource(SMALL, tmp_path)
    assert second.fingerprint == first.fingerprint
    monkeypatch.setattr(docstrings, "read", read)
    (cached,) = (tmp_path / "pydocs").glob("*.json")
    whole = cached.read_text()
    for damaged in (whole[:1000], "", "[]", whole.replace(" the ", " teh ", 1)):
        cached.write_text(damaged)
        messages = []
        again = PydocsSource(SMALL, tmp_path, lambda stage, *_, messages=messages: messages.append(stage))
        assert again.fingerprint == first.fingerprint
        assert messages[0] == f"warning: {cached} is not as it was written; building it again"
        assert cached.read_text() == whole


def test_cache_depends_on_installed_versions(tmp_path, monkeypatch):
    PydocsSource(SMALL, tmp_path)
    monkeypatch.setattr(docstrings, "versions", lambda: ["other-2.0.dist-info"])
    PydocsSource(SMALL, tmp_path)
    assert len(list((tmp_path / "pydocs").glob("*.json"))) == 2


def test_unknown_or_empty_package_is_refused(installed):
    with pytest.raises(UserError, match="no sources of betta") as caught:
        PydocsSource(PydocsConfig(packages=("betta",)))
    assert caught.value.hint == "did you mean beta?"
    with pytest.raises(UserError, match="two modules with docstrings are required, and 1 was found"):
        PydocsSource(PydocsConfig(packages=("gamma",)))


def test_unwritable_cache_dir_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cache_dir="):
        PydocsSource(SMALL, tmp_path / "file")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder with rows of fewer files than usual, to save time."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pydocs, "_MODULES", (25, 50))
        pydocs_rows(folder, 0, 10, 15)
    return folder


def test_rows_are_balanced_and_disjoint(cache):
    splits = pydocs_rows(cache, seed=0, per_class_train=10, per_class_validation=15)
    sizes = {"train": 10, "dev": 15}
    counts = {}
    for split, (columns, origin) in splits.items():
        assert set(columns) == {"text", "label"} and len(columns["text"]) == len(columns["label"]) == len(origin)
        counts[split] = Counter(columns["label"])
        assert set(counts[split].values()) == {sizes[split]}
    assert counts["train"].keys() == counts["dev"].keys() and len(counts["train"]) == 8
    files = {split: {file for file, _ in origin} for split, (_, origin) in splits.items()}
    assert not files["train"] & files["dev"]
    texts = splits["train"][0]["text"] + splits["dev"][0]["text"]
    assert len(set(texts)) == len(texts)
    assert all(60 <= len(text) <= 400 and "\n" not in text for text in texts)
    for text in texts:
        assert not any(name in text.lower() for name in counts["train"]), text
    path, line = splits["train"][1][0]
    with open(path, encoding="utf-8") as file:
        assert any(mark in file.read().split("\n")[line - 1] for mark in ('"', "'"))


def test_rows_depend_only_on_seed(cache):
    first = pydocs_rows(cache, 1, 10, 15)
    assert pydocs_rows(cache, 1, 10, 15) == first
    assert pydocs_rows(cache, 2, 10, 15) != first


def test_package_names_are_masked():
    names, words = ["torch", "huggingface_hub"], {"linalg"}
    given = "PyTorch's torch.nn and np.array, np, linalg, e.g. 3.14 huggingface_hub_x HF_HUB_CACHE plain text. End."
    masked = pydocs._WORD.sub(lambda match: pydocs._mask_word(match.group(), names, words), given)
    assert masked == "_'s _ and _, _, _, e.g. 3.14 _ _ plain text. End."


def test_too_few_packages_are_refused(installed):
    with pytest.raises(UserError, match="task=pydocs: too few packages"):
        pydocs_rows()
