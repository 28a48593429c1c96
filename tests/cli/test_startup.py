"""Modules that a command imports before it runs: configuration only, nothing that computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lmtool
from lmtool.config import registry

# Libraries that compute, read data, draw or connect; Hydra's plugins; and modules that run commands.
UNUSED_LIBRARIES = (
    "torch",
    "numpy",
    "datasets",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "matplotlib",
    "rich",
    "urllib.request",
    "http.client",
    "hydra_plugins.hydra_optuna_sweeper",
    "lmtool.commands.pretrain",
    "lmtool.session",
    "lmtool.tasks.guessing",
)
# Configuration modules of components that pretraining of BERT on docstrings does not use.
UNUSED_CONFIGS = (
    "lmtool.models.encoder_configs",
    "lmtool.models.decoder_configs",
    "lmtool.models.encoder_decoder_configs",
    "lmtool.models.pretransformer_configs",
    "lmtool.tuning.configs.methods",
    "lmtool.tuning.configs.adapter",
    "lmtool.tasks.configs.classification",
    "lmtool.tasks.configs.texts",
    "lmtool.distillation.configs.modes",
    "lmtool.distillation.configs.terms",
)


def modules_after(*words: str) -> tuple[int, set[str]]:
    """The exit status of a command line in a new process, and the modules it imported."""
    code = (
        "import json, sys; from lmtool.cli.main import main\n"
        "status = main(sys.argv[1:])\n"
        "print('\\0' + json.dumps([status, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    status, modules = json.loads(done.stdout.rpartition("\0")[2])
    return status, set(modules)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["pretrain", "model=brt"], 2),
        (["pretrain", "--cfg", "job"], 0),
    ],
)
def test_commands_that_do_not_run_import_few_modules(words: list[str], status: int) -> None:
    ended, modules = modules_after(*words)
    assert ended == status
    assert not modules.intersection(UNUSED_LIBRARIES) and not modules.intersection(UNUSED_CONFIGS)


def test_unknown_command_imports_no_config_library() -> None:
    status, modules = modules_after("pretran")
    assert status == 2 and not modules.intersection((*UNUSED_LIBRARIES, "hydra", "omegaconf", "pydantic", "yaml"))


def test_shipped_components_are_in_listed_modules() -> None:
    for group, by_module in registry.SHIPPED.items():
        for module, names in by_module.items():
            for name in names.split():
                entry = registry.lookup(group, name)
                assert entry is not None and (entry.config.__module__, entry.name) == (module, name)
    # All modules are imported by now, so a further registered component is missing from the table.
    registered = {(group, name): entry for group, table in registry._TABLES.items() for name, entry in table.items()}
    added = [entry for key, entry in registered.items() if key not in registry._MODULES]
    assert not [entry for entry in added if entry.config.__module__.startswith("lmtool.")]


def test_table_lists_every_module_with_components() -> None:
    package = Path(lmtool.__file__).parent
    registering = {
        ".".join(("lmtool", *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
        if "\n@component(" in path.read_text(encoding="utf-8")
    }
    assert registering == {module for modules in registry.SHIPPED.values() for module in modules}
