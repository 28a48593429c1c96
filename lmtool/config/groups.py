"""The folder `conf/`: its groups, options and YAML files. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from lmtool.errors import UserError, nearest


@cache
def conf_dir() -> Path:
    """Returns the shipped configuration: inside the package (wheel) or next to it (checkout)."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "pretrain.yaml").is_file():
            return folder
    raise UserError(
        f"lmtool's own configuration files are missing: no conf/ in {package} or next to it", "install lmtool again"
    )


def folders(config_dirs: Sequence[Path] = ()) -> list[Path]:
    """Returns the folders that are searched for YAML: the shipped one, then the user's."""
    for folder in config_dirs:
        if not folder.is_dir():
            kind = "a file, not a folder" if folder.exists() else "no such folder"
            siblings = [sibling.name for sibling in folder.parent.glob("*/")] if folder.parent.is_dir() else []
            close = nearest(folder.name, siblings)
            structure = "use a folder with the structure of conf/: experiment/mine.yaml in it is experiment=mine"
            hint = f"did you mean --config-dir {folder.parent / close}?" if close else structure
            raise UserError(f"--config-dir {folder}: {kind}", hint)
    return [conf_dir(), *config_dirs]


def all_options(config_dirs: Sequence[Path] = ()) -> dict[str, tuple[str, ...]]:
    """Returns the YAML names of every group, sorted."""
    names: dict[str, set[str]] = {}
    for root in folders(config_dirs):
        for folder, _, files in os.walk(root):
            group = os.path.relpath(folder, root)
            yamls = {name.removesuffix(".yaml") for name in files if name.endswith(".yaml")}
            if yamls and group != ".":
                names[group] = names.get(group, set()) | yamls
    return {group: tuple(sorted(names[group])) for group in sorted(names)}


def options(group: str, config_dirs: Sequence[Path] = ()) -> tuple[str, ...]:
    """Returns the YAML names of a group, sorted."""
    names = {path.stem for folder in folders(config_dirs) for path in (folder / group).glob("*.yaml")}
    return tuple(sorted(names))


def singular(word: str, known: Collection[str]) -> str:
    """Returns the group if its plural was typed (`models`), otherwise the word itself."""
    return next((word.removesuffix(end) for end in ("", "s", "es") if word.removesuffix(end) in known), word)


def is_path_like(value: str) -> bool:
    """Whether a value looks like a path. No option of a group contains a slash or a suffix."""
    return "/" in value or bool(Path(value).suffix) or value in (".", "..")


def is_path_only(value: str) -> bool:
    """Whether a value can only be a path, existing or not: it starts like one, or its parent folder exists."""
    return value.startswith((".", "/", "~")) or ("/" in value and Path(value).parent.is_dir())


def yaml_file(group: str, option: str, config_dirs: Sequence[Path] = ()) -> Path | None:
    """Returns the file of an option. As in Hydra, the first folder that contains it wins."""
    for folder in folders(config_dirs):
        if (folder / group / f"{option}.yaml").is_file():
            return folder / group / f"{option}.yaml"
    return None


def purpose(path: Path) -> str:
    """Returns the first sentence of the first comment in a YAML file: its purpose. A line with a command ends it."""
    purpose = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# @package"):
            continue
        text = line.lstrip("# ").rstrip()
        if not line.startswith("#") or text.startswith("lmtool ") or purpose.endswith("."):
            break
        purpose = f"{purpose} {text}".strip()
    return purpose
