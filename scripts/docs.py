"""Build the site of README.md, docs/ and the reference of every key and YAML: `make docs` writes build/docs.

    python scripts/docs.py

Sphinx searches without a network and without a server: open build/docs/index.html. A link that leads nowhere, and any
other warning, ends the build with exit status 1.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from common import ROOT

from lmtool.commands.show import PRIMARY, DocumentedField, about, all_fields
from lmtool.config import groups, messages
from lmtool.resolver.verbs import VERBS, command_classes

SOURCE, SITE = ROOT / "build" / "docs_source", ROOT / "build" / "docs"
GUIDE = (
    "recipes", "questions", "speed", "course", "course_answers", "extend", "scale", "architecture", "contributing",
)  # fmt: skip


def toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def keys(fields: list[DocumentedField], owner: str) -> Iterator[str]:
    """Yields the keys of a command or a component: what each is for, and its values."""
    for entry in (entry for entry in fields if entry.owner == owner):
        yield f"`{entry.key}`\n: {entry.field.description or 'name of the component'}\n"
        values = re.sub(r"([\\*_\[\]<`])", r"\\\1", messages.allowed_values(entry.field))
        yield f"  *{values}*\n"


def yaml(path: Path) -> str:
    return f"```yaml\n{path.read_text(encoding='utf-8').rstrip()}\n```\n"


def command_page(verb: str, fields: list[DocumentedField]) -> str:
    lines = [f"# lmtool {verb}\n", f"{VERBS[verb].about}\n", f"```bash\n{VERBS[verb].example}\n```\n", "## Keys\n"]
    return "\n".join(
        [*lines, *keys(fields, f"lmtool {verb}"), "## YAML\n", yaml(groups.conf_dir() / f"{PRIMARY[verb]}.yaml")]
    )


def group_page(group: str, fields: list[DocumentedField]) -> str:
    """Each option of a group: its purpose, its YAML, and the keys of its class if it is a component."""
    lines = [f"# {group}\n", f"`lmtool show {group}=NAME` prints one.\n"]
    for name in groups.options(group):
        path = groups.yaml_file(group, name)
        assert path is not None
        lines += [f"## {group}={name}\n", f"{about(group, name)}\n", yaml(path)]
        lines += keys(fields, f"{group}={name}")
    return "\n".join(lines)


def main() -> None:
    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE / "docs")
    for page in (SOURCE / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8").replace("../README.md", "../index.md")
        page.write_text(re.sub(r"^(#+ .*) \{#(\w+)\}$", r"(\2)=\n\1", text, flags=re.MULTILINE), encoding="utf-8")
    for name in ("CHANGELOG.md", "SECURITY.md"):
        shutil.copy(ROOT / name, SOURCE / name)
    fields = list(all_fields())
    commands = {f"commands/{PRIMARY[verb]}": command_page(verb, fields) for verb in command_classes()}
    options = {f"groups/{group.replace('/', '.')}": group_page(group, fields) for group in groups.all_options()}
    for folder in ("commands", "groups"):
        (SOURCE / folder).mkdir()
    for page, text in {**commands, **options}.items():
        (SOURCE / f"{page}.md").write_text(text, encoding="utf-8")
    index = [
        (ROOT / "README.md").read_text(encoding="utf-8"),
        toctree("Guide", [*(f"docs/{name}" for name in GUIDE), "CHANGELOG", "SECURITY"]),
        toctree("Commands", list(commands)),
        toctree("Groups", list(options)),
    ]
    (SOURCE / "index.md").write_text("\n".join(index), encoding="utf-8")
    strict = ["-q", "-E", "-W", "--keep-going", "-c", str(ROOT / "docs"), "-d", str(ROOT / "build" / "doctrees")]
    from sphinx.cmd.build import main as sphinx  # only `make docs` installs it

    if status := sphinx([*strict, str(SOURCE), str(SITE)]):
        sys.exit(status)
    for image in (ROOT / "docs").glob("*.svg"):
        shutil.copy(image, SITE / "docs" / image.name)
    print(f"open {SITE.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    main()
