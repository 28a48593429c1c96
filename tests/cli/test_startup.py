"""What a command imports that ends before it runs: composing and deciding, nothing that computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lmtool
from lmtool.config import registry

# Torch and what reads data, what draws, a tracker's connection, Hydra's plugins, and every module that runs a command.
NEVER = (
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
    "lmtool.resolver.files",
)
# Components that a run of BERT on docstrings does not choose.
OTHERS = (
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
    """The exit status of a command line in a process of its own, and what that has imported."""
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
def test_what_a_command_that_does_not_run_never_imports(words: list[str], status: int) -> None:
    ended, modules = modules_after(*words)
    assert ended == status
    assert not modules.intersection(NEVER) and not modules.intersection(OTHERS)


def test_an_unknown_command_imports_no_configuration() -> None:
    status, modules = modules_after("pretran")
    assert status == 2 and not modules.intersection((*NEVER, "hydra", "omegaconf", "pydantic", "yaml"))


def test_every_shipped_component_stands_in_the_module_that_the_table_names() -> None:
    for group, by_module in registry.SHIPPED.items():
        for module, names in by_module.items():
            for name in names.split():
                entry = registry.lookup(group, name)
                assert entry is not None and (entry.config.__module__, entry.name) == (module, name)
    # Each module is imported by now: what it registers beside these is a name that the table lacks.
    assert not [entry for entry in registry.added() if entry.config.__module__.startswith("lmtool.")]


def test_the_table_names_every_module_that_registers_a_component() -> None:
    package = Path(lmtool.__file__).parent
    registering = {
        ".".join(("lmtool", *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
        if "\n@component(" in path.read_text(encoding="utf-8")
    }
    assert registering == {module for modules in registry.SHIPPED.values() for module in modules}
