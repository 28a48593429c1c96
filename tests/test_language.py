"""Words of names, messages and hints: standard terms, and hints that start with an action (docs/contributing.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.test_layers import PACKAGE, SOURCES, free_trees, nodes_of

__all__ = ["free_trees"]

# Words that names must not contain, because readers of transformers, PEFT, torch and Hydra do not know them, or because
# they are vague; docs/contributing.md has replacements.
AVOIDED = """
alike asked begun cleaning crossing doubts facts here inspected its misfit misfits mistake mistakes
panels said settled sight sound theirs told
"""

# First words of hints that do not start with text to type (KEY=VALUE, a flag, a command, a name in quotes).
VERBS = """
add change check choose convert copy correct did do download export fill finetune free give import install
keep list lower make merge move name number omit open pass pip profile prompt put quote raise read reduce
remove rename repeat replace report restore resume rm run save see separate set shorten split start sweep test
train type update upgrade use wait write
"""


def names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """The names that a module defines: classes, functions, parameters, and assigned variables."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        if isinstance(node, ast.FunctionDef):
            yield from ((argument.lineno, argument.arg) for argument in [*node.args.args, *node.args.kwonlyargs])
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from ((target.lineno, target.id) for target in targets if isinstance(target, ast.Name))


def words(name: str) -> list[str]:
    """The words of a name, without trailing shape letters."""
    name = re.sub(r"(?<=[a-z])_[A-Z][A-Z0-9]*$", "", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")


def test_words_splits_names_and_drops_shape_letters() -> None:
    assert words("x_TH") == ["x"] and words("TapPoint") == ["tap", "point"] and words("its_rows_N") == ["its", "rows"]


def test_names_contain_no_avoided_words() -> None:
    avoided = {*AVOIDED.split()}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in SOURCES
        for line, name in names(nodes_of(path))
        if not avoided.isdisjoint(words(name))
    ]
    assert not wrong, "\n".join(wrong)


def text_of(node: ast.expr) -> str | None:
    """The text of a literal, with `{}` for values of an f-string; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]
    return None


def errors() -> Iterator[tuple[str, str, str | None]]:
    """The position, message and hint of each user error, as far as they are literals."""
    for path in SOURCES:
        for node in nodes_of(path):
            called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and called in ("UserError", "Problem"):
                texts = [text_of(argument) for argument in node.args][called == "Problem" :]
                message, hint, *_ = [*texts, None, None]
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", message or "", hint


def test_hints_begin_with_a_verb_or_text_to_type() -> None:
    wrong = []
    for place, _, hint in errors():
        first = (hint or "use").split()[0].strip(",;:") if (hint or "use").split() else ""
        if first not in VERBS.split() and not re.match(r"""[`"'\-{]|lmtool$|[\w.{}/]+=""", first):
            wrong.append(f"{place}: {hint}")
    assert not wrong, "\n".join(wrong)


def test_messages_and_hints_are_no_fragments_and_have_no_period() -> None:
    """A message begins with its subject, not with a preposition, a pronoun or a relative clause."""
    fragment = re.compile(r"(of|is|are|has|which|whose|where|what|that|so|for|with|from|by|to) ")
    wrong = [
        f"{place}: {text}"
        for place, *texts in errors()
        for text in texts
        if text and (re.search(r"[a-z]\.$", text) or fragment.match(text))
    ]
    assert not wrong, "\n".join(wrong)


def repeated_sentences(text: str) -> set[str]:
    """Sentences, and clauses after a colon or semicolon, of more than 40 characters that occur more than once."""
    sentences = [part for part in re.split(r"(?<=[.:;])\s+", " ".join(text.split())) if len(part) > 40]
    return {sentence for sentence in sentences if sentences.count(sentence) > 1}


def test_docstrings_repeat_no_sentence() -> None:
    sentence = "The teacher's layer of each layer of the student."
    assert repeated_sentences(f"{sentence} {sentence}") == {sentence} and not repeated_sentences(sentence)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    wrong = [
        f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 1)}: {sentence}"
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, documented)
        for sentence in sorted(repeated_sentences(ast.get_docstring(node) or ""))
    ]
    assert not wrong, "\n".join(wrong)


def section_entries(docstring: str, section: str) -> set[str]:
    """The names that a section of a docstring (Args, Attributes) describes."""
    text = docstring.partition(f"{section}:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+(?:, \w+)*): ", text, re.MULTILINE)
    return {name for entry in entries for name in entry.split(", ")}


def described_parameters(docstring: str) -> set[str]:
    """The names that a docstring describes: the entries of `Args:`, and words before a colon at the start of a
    sentence."""
    prose = " ".join(docstring.partition("Args:\n")[0].split())
    return section_entries(docstring, "Args").union(re.findall(r"(?:^|[.;\"] )([a-z_][A-Za-z_0-9]*): ", prose))


def test_docstrings_describe_existing_parameters_only() -> None:
    docstring = "Sums. x: the terms. See y.\n\nArgs:\n    n, m: how many\n\nReturns:\n    z: no."
    assert described_parameters(docstring) == {"x", "n", "m"}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.name} has no parameter {name}"
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef)
        for name in sorted(
            described_parameters(ast.get_docstring(node) or "")
            - {child.arg for child in ast.walk(node.args) if isinstance(child, ast.arg)}
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_describe_existing_attributes_only() -> None:
    classes = [node for path in SOURCES for node in nodes_of(path) if isinstance(node, ast.ClassDef)]
    names_in_class = {
        node.name: {getattr(child, key, "") for child in ast.walk(node) for key in ("id", "attr", "arg", "name")}
        for node in classes
    }

    def attributes(node: ast.ClassDef) -> set[str]:
        bases = {child.id for base in node.bases for child in ast.walk(base) if isinstance(child, ast.Name)}
        above = (attributes(other) for other in classes if other.name in bases and other is not node)
        return names_in_class[node.name].union(*above)

    wrong = [
        f"{node.name} has no attribute {name}"
        for node in classes
        for name in sorted(section_entries(ast.get_docstring(node) or "", "Attributes") - attributes(node))
    ]
    assert section_entries("Sums.\n\nAttributes:\n    n, m: counts\n\nx: no", "Attributes") == {"n", "m"}
    assert not wrong, "\n".join(wrong)
