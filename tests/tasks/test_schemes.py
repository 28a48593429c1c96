"""Tagging schemes: detected and converted to BIO."""

from __future__ import annotations

import pytest

from lmtool.tasks.kinds.tokens import bio_labels, continuation_tags, scheme_of, to_bio


@pytest.mark.parametrize(
    ("scheme", "tags", "bio"),
    [
        ("iob1", "I-A I-A O I-A B-A I-A I-B", "B-A I-A O B-A B-A I-A B-B"),
        ("iobes", "B-A I-A E-A S-A O S-B B-B E-B", "B-A I-A I-A B-A O B-B B-B I-B"),
        ("iobes", "B-A I-A L-A U-A O U-B", "B-A I-A I-A B-A O B-B"),
        ("iobes", "E-A I-A E-A E-A", "B-A B-A I-A B-A"),
        ("bio", "B-A I-A O I-A I-B B-B", "B-A I-A O I-A I-B B-B"),
        ("none", "NOUN I-x", "NOUN I-x"),
    ],
)
def test_tags_are_converted_to_bio(scheme, tags, bio):
    assert to_bio(tags.split(), scheme) == bio.split()


@pytest.mark.parametrize(
    ("sentences", "scheme"),
    [
        (["I-A O", "I-A B-A"], "iob1"), (["I-A I-A O"], "iob1"), (["B-A I-A O I-A"], "bio"), (["B-A O"], "bio"),
        (["B-A E-A"], "iobes"), (["U-A O"], "iobes"), (["NOUN O"], "none"), (["O O"], "none"), (["-LRB- B-A"], "none"),
    ],
)  # fmt: skip
def test_scheme_is_detected(sentences, scheme):
    assert scheme_of([tags.split() for tags in sentences]) == scheme


def test_tag_of_other_scheme_is_refused():
    for scheme, tags in (("bio", ["O", "E-A"]), ("iob1", ["O", "S-A"]), ("iobes", ["O", "A"])):
        with pytest.raises(ValueError) as caught:
            to_bio(tags, scheme)
        assert caught.value.args == (1, tags[1])


def test_bio_labels_are_completed():
    assert bio_labels(["O", "I-b", "B-a"]) == ("O", "B-a", "I-a", "B-b", "I-b")
    assert continuation_tags(["B-a", "I-a", "O", "B-b"], "bio") == [1, 1, 2, 3]
    assert continuation_tags(["B-a", "I-a"], "none") == [0, 1]
