"""docs/architecture.md: its drawing and its lists of modules are generated from the code.

`python -m tests.test_architecture` updates the page; the test compares.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from tests.test_layers import PACKAGE, SOURCES, imports, inside, package_of, tree_of

ROOT = PACKAGE.parent
PAGE = ROOT / "docs" / "architecture.md"
WIDTH, SCREEN = 120, 40


def packages_below() -> dict[str, set[str]]:
    """The packages that each package imports."""
    below: dict[str, set[str]] = {}
    for path in SOURCES:
        package = package_of(path)
        targets = (inside(name) for name, _ in imports(path))
        others = {package_of(target) for target in targets if target not in (None, PACKAGE / "__init__.py")}
        below.setdefault(package, set()).update(others - {package})
    return {package: others for package, others in below.items() if not package.startswith("__")}


def about(package: str) -> str:
    """The first sentence of a package's docstring."""
    folder = PACKAGE / package
    text = ast.get_docstring(tree_of(folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py"))) or ""
    return re.split(r"\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0]


def drawing() -> str:
    """The packages from the highest to the lowest layer: a package imports only those with a smaller number."""
    below = packages_below()

    @cache
    def layer(package: str) -> int:
        return 1 + max(map(layer, below[package]), default=0)

    width = max(map(len, below))
    return "\n".join(
        f"{layer(package):>2}  {package:<{width}}  {about(package)}"
        for package in sorted(below, key=lambda package: (-layer(package), package))
    )


def acting_modules(words: list[str]) -> list[str]:
    """Run a command and return the modules with functions that receive its configuration (as words, plain data or
    decoded; complete or a section), in the order of their first calls."""
    from lmtool.cli import main as cli
    from lmtool.config.base import Config

    def is_configuration(value: Any) -> bool:
        if isinstance(value, list):
            return any(isinstance(item, str) and item == words[-1] for item in value)
        return isinstance(value, Config) or (type(value) is dict and {"model", "optimizer"} <= value.keys())

    modules: dict[str, None] = {}
    prefix = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(prefix):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_configuration(frame.f_locals.get(name)) for name in names if name not in ("self", "cls")):
            modules.setdefault(".".join(Path(code.co_filename).relative_to(PACKAGE).with_suffix("").parts))

    sys.settrace(note)  # only for calls, since it returns no local tracer
    try:
        assert cli.main(words) == 0
    finally:
        sys.settrace(None)
    return list(modules)


def trace() -> Mapping[str, list[str]]:
    """The modules that act in a tiny run of each command."""
    from lmtool.cli import main as cli
    from tests.commands.conftest import TINY, working_in

    rows = ["task=sst2", "task.path=rows", "device=cpu", "precision=fp32", "max_length=32", "checkpoint=runs/a"]
    finetune = ["finetune", *rows, "batch_examples=8", "optimizer.lr=1e-3", "max_steps=1"]
    with tempfile.TemporaryDirectory() as folder, working_in(Path(folder)):
        text = ["data=text", "data.path=text.txt", "model=bert_tiny", *TINY, "batch_tokens=256", "cache_dir=cache"]
        pretrained = acting_modules(["pretrain", *text, "name=a", "max_steps=1"])
        assert cli.main([*finetune, "name=teacher"]) == 0
        distilled = [*finetune[:-1], "tuning=lora", "distill=soft", "distill.teacher=runs/teacher"]
        return {
            "pretrain": pretrained,
            "finetune tuning=lora distill=soft": acting_modules([*distilled, "name=b", "max_steps=1"]),
        }


def ways() -> str:
    """`trace` in a separate process, where nothing is cached yet, as text."""
    command = [sys.executable, "-m", "tests.test_architecture", "--trace"]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines = []
    for command_words, modules in json.loads(out.splitlines()[-1]).items():
        lines += [f"{command_words}: {len(modules)} modules"]
        lines += textwrap.wrap(" ".join(modules), WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with updated generated blocks, each of which follows a comment with its name."""
    for name, text in (("packages", drawing()), ("way", ways())):
        block = re.compile(rf"(<!-- {name}[^\n]*-->\n```\n).*?(\n```)", re.DOTALL)
        page, count = block.subn(lambda match, text=text: match[1] + text + match[2], page)
        assert count == 1, name
    return page


def test_generated_blocks_match_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "python -m tests.test_architecture updates it"


def test_drawing_fits_one_screen() -> None:
    lines = drawing().splitlines()
    assert len(lines) <= SCREEN and max(map(len, lines)) <= WIDTH
    assert all(about(package) for package in packages_below())


if __name__ == "__main__":
    if sys.argv[1:] == ["--trace"]:
        print(json.dumps(trace()))
    else:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
