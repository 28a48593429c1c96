"""Rules for the code of lmtool, checked by reading the source: which package may import which, no import cycles, and
forbidden calls."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lmtool

PACKAGE = Path(lmtool.__file__).resolve().parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A package imports only the packages listed here, and itself. `types` needs torch, so packages without torch do not
# list it. Nested packages with a separate layer are written with their parent.
NESTED = {
    "learners/generation",
    "learners/metrics",
    "learners/representations",
    "models/heads",
    "reporting/trackers",
    "weights/conversion",
}
GROUND = {"errors", "random_streams", "system", "types"}
CONFIG = GROUND | {"config"}
NN = CONFIG | {"nn"}
MODELS = NN | {"models"}
HEADS = MODELS | {"models/heads"}
TEXT = CONFIG | {"tokenizers"}
DATA = TEXT | {"data"}
LEARN = HEADS | DATA | {"learners/generation", "learners/metrics", "runs", "training"}
LEARNERS = LEARN | {"learners"}
COMPONENTS = LEARNERS | {"objectives", "tasks", "tuning", "distillation", "weights", "reporting/trackers"}
SHELL = COMPONENTS | {"resolver", "reporting"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "random_streams": {"errors"},
    "system": {"errors"},
    "types": {"errors"},
    "config": {"errors", "system"},
    "nn": CONFIG,
    "models": NN,
    "models/heads": MODELS,
    "learners/generation": HEADS | TEXT,
    # lmtool.load returns a model with its tokenizer, from a checkpoint whose files `training` verifies.
    "weights": LEARNERS | {"tuning"},
    "tokenizers": CONFIG | {"runs"},
    "data": TEXT,
    "learners/metrics": CONFIG,
    "runs": CONFIG,
    # Files and plain data; a test checks that it imports no torch.
    "reporting": CONFIG | {"learners/metrics", "runs"},
    "reporting/trackers": CONFIG | {"runs"},
    "costs": SHELL,
    "learners": LEARN,
    "objectives": LEARNERS,
    # The auxiliary masked LM of prompts masks texts as in pretraining.
    "tasks": LEARNERS | {"objectives"},
    "tuning": LEARNERS,
    # A student starts from its teacher like a model from a checkpoint.
    "distillation": LEARNERS | {"tasks", "tuning", "weights"},
    "training": NN | {"runs"},
    "learners/representations": LEARNERS | {"objectives", "tasks", "weights"},
    "resolver": COMPONENTS,
    "session": SHELL | {"costs"},
    "weights/conversion": SHELL | {"costs", "session"},
    "course": CONFIG | {"learners/metrics", "reporting"},
    "commands": SHELL | {"course", "learners/representations", "costs", "session", "weights/conversion"},
    "sweeps": CONFIG | {"reporting", "runs"},
    "cli": CONFIG | {"__init__", "training", "resolver", "commands", "sweeps", "data", "runs"},
    "__main__": {"cli"},
    "__init__": {"commands"},  # lmtool.load, on first use
}
# The only module that opens torch's pickled files, and its call.
PICKLED = ("weights/reading.py", "torch.load(path, map_location='cpu', weights_only=True)")
HYDRA = {"hydra", "omegaconf"}
HEAVY = {"torch", "numpy", "transformers", "datasets", "safetensors", "tokenizers", "matplotlib"}


def package_of(path: Path) -> str:
    """The package of a file: `nn`, `models/heads`, ... or the name of a top-level file."""
    return package_in(path.relative_to(PACKAGE).with_suffix("").parts)


def package_in(parts: tuple[str, ...]) -> str:
    nested = "/".join(parts[:2])
    return nested if nested in NESTED else parts[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file, collected once for all tests."""
    return list(ast.walk(tree_of(path)))


@pytest.fixture(scope="module", autouse=True)
def free_trees() -> Iterator[None]:
    """No garbage is collected while there are half a million nodes, which each collection would look through."""
    gc.disable()
    yield
    for cached in (tree_of, nodes_of, names_used):
        cached.cache_clear()
    gc.enable()


def only_types(path: Path) -> set[ast.AST]:
    """The imports under `if TYPE_CHECKING:`, which never run."""
    hidden: set[ast.AST] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            hidden.update(inner for child in node.body for inner in ast.walk(child))
    return hidden


def imports(path: Path, top: bool = False) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, also inside functions, with its line. top: only imports at import time."""
    hidden = only_types(path) if top else set()
    if top:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                body = node.body if isinstance(node.body, list) else [node.body]
                hidden.update(inner for child in body for inner in ast.walk(child))
    for node in nodes_of(path):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@cache
def inside(name: str) -> Path | None:
    """The file of lmtool that an imported name refers to or is defined in."""
    parts = name.split(".")
    while len(parts) > 1 or parts == ["lmtool"]:
        if parts[0] != "lmtool":
            return None
        base = PACKAGE.joinpath(*parts[1:])
        if base.with_suffix(".py").is_file() and len(parts) > 1:
            return base.with_suffix(".py")
        if (base / "__init__.py").is_file():
            return base / "__init__.py"
        parts.pop()
    return None


def builders() -> Iterator[tuple[Path, str, int]]:
    """The literal `module:NAME` or `module:CLASS.build` builders of components, which are imported on use."""
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "component":
                for keyword in node.keywords:
                    if keyword.arg == "builder" and isinstance(keyword.value, ast.Constant):
                        yield path, str(keyword.value.value), node.lineno


def test_every_package_has_an_import_rule() -> None:
    assert {package_of(source) for source in SOURCES} - {"__init__"} <= set(MAY_IMPORT)


def test_packages_import_lower_packages_only() -> None:
    wrong = []
    for path in SOURCES:
        package = package_of(path)
        for name, line in imports(path):
            target = inside(name)
            if target is None or target == PACKAGE / "__init__.py":
                continue
            other = package_of(target)
            if other != package and other not in MAY_IMPORT.get(package, set()):
                wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {package} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_builders_are_in_the_package_of_their_configuration() -> None:
    wrong = []
    for path, builder, line in builders():
        module, _, attribute = builder.partition(":")
        attribute = attribute.removesuffix(".build")
        target = inside(module)
        if target is None or package_of(target) != package_of(path):
            wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {builder}")
        elif not any(getattr(node, "name", None) == attribute for node in tree_of(target).body):
            wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {builder} does not exist")
    assert not wrong, "\n".join(wrong)


# The modules that all task kinds share.
SHARED_MODULES = {"base.py", "learner.py"}


def kind_classes() -> dict[str, Path]:
    """The classes of single task kinds (configurations and learners), and the file of each."""
    classes = {}
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                # A suite is no kind: it is built elsewhere, and its tasks are separate runs.
                configured = any("lmtool.tasks.kinds." in ast.unparse(decorator) for decorator in node.decorator_list)
                if configured or ("kinds" in path.parts and path.name not in SHARED_MODULES):
                    classes[node.name] = path
    return classes


def test_task_kinds_are_named_in_their_file_only() -> None:
    """No module tests for the kind of a task; differences between kinds are methods."""
    kinds, wrong = kind_classes(), []
    assert {"Classification", "ClassificationConfig", "Regression"} <= kinds.keys()
    for path in SOURCES:
        others = {name for name, home in kinds.items() if home != path}
        for node in nodes_of(path):
            asked = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
            names = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)} if asked else set()
            compared = isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("task.kind")
            if names & others or compared:
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def learner_classes() -> set[str]:
    """The names of the classes that inherit `BaseLearner`, directly or indirectly."""
    bases = {
        node.name: {ast.unparse(base).partition("[")[0] for base in node.bases}
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    }
    learners = {"BaseLearner"}
    while new := {name for name, above in bases.items() if above & learners} - learners:
        learners |= new
    return learners


def test_commands_do_not_test_the_class_of_a_learner() -> None:
    """Differences between learners are methods."""
    learners = learner_classes()
    assert {"Mixture", "ReplacedTokenDetection", "TaskLearner"} <= learners
    wrong = []
    for path in SOURCES:
        # An export is compared with a task's learner, or with the parts of a checkpoint, which are no learner.
        shell = package_of(path) in ("commands", "session", "costs", "weights/conversion")
        if not shell or path == PACKAGE / "weights" / "conversion" / "parity.py":
            continue
        for node in nodes_of(path):
            asked = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
            if asked and learners & set(re.findall(r"\w+", ast.unparse(node))):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_modules_have_no_import_cycles() -> None:
    edges: dict[Path, set[Path]] = {}
    for path in SOURCES:
        targets = {inside(name) for name, _ in imports(path)}
        # The __init__ file of a package is above all its modules by construction.
        edges[path] = {
            target for target in targets if target is not None and target != path and target.parent != target
        }
    done: set[Path] = set()
    for start in SOURCES:
        _walk(start, edges, [], done)


def _walk(path: Path, edges: dict[Path, set[Path]], trail: list[Path], done: set[Path]) -> None:
    if path in trail:
        cycle = [*trail[trail.index(path) :], path]
        pytest.fail("import cycle: " + " -> ".join(module_of(module) for module in cycle))
    if path in done:
        return
    for other in edges[path]:
        _walk(other, edges, [*trail, path], done)
    done.add(path)


def test_import_rules_have_no_cycles() -> None:
    above = {package: set(below) - {package} for package, below in MAY_IMPORT.items()}
    while above:
        ground = [package for package, below in above.items() if not below & set(above)]
        assert ground, f"import cycle among {sorted(above)}"
        for package in ground:
            del above[package]


def test_only_terminal_and_console_print() -> None:
    """All output goes through `terminal.say` or `reporting.console.Output`, which mask and escape."""
    permitted = ("system/terminal.py", "reporting/console.py")
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in SOURCES
        for name, line in names_used(path)
        if re.fullmatch(r"print|sys\.std(out|err)\.write|.*\.console\.print|sys\.__std(out|err)__.*", name)
        and str(path.relative_to(PACKAGE)) not in permitted
    ]
    assert not wrong, "\n".join(wrong)


def test_only_cli_sweeps_and_config_import_hydra() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in SOURCES
        for name, line in imports(path)
        if name.split(".")[0] in HYDRA and package_of(path) not in ("cli", "config", "sweeps")
    ]
    assert not wrong, "\n".join(wrong)


def light() -> list[Path]:
    """The files of composing, decoding, `list` and `show`, which import no torch and no numpy, also not indirectly."""
    named = [source for source in SOURCES if package_of(source) in ("config", "errors", "system", "cli", "__main__")]
    named += [source for source in SOURCES if "configs" in (source.stem, source.parent.name)]
    named += [PACKAGE / "commands" / f"{name}.py" for name in ("show", "__init__")]
    named += [source for source in SOURCES if package_of(source) == "resolver" and source.stem != "files"]
    return named


def test_configuration_imports_no_heavy_package_indirectly() -> None:
    wrong, seen = [], set()
    left = [(path, path) for path in light()]
    while left:
        path, origin = left.pop()
        if path in seen:
            continue
        seen.add(path)
        for name, line in imports(path, top=True):
            if name.split(".")[0] in HEAVY:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {name} (through {origin.relative_to(PACKAGE)})")
            target = inside(name)
            if target is not None:
                left.append((target, origin))
                # Importing a.b runs a/__init__.py first.
                left += [
                    (folder / "__init__.py", origin) for folder in target.parents if (folder / "__init__.py") in SOURCES
                ]
    assert not wrong, "\n".join(wrong)


def test_reporting_imports_no_torch() -> None:
    """It imports no torch, also not indirectly: reports are written where no model can be loaded."""
    left, seen, wrong = [path for path in SOURCES if package_of(path) == "reporting"], set(), []
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        for name, line in imports(path, top=True):
            if name.split(".")[0] == "torch":
                wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {name}")
            target = inside(name)
            left += [] if target is None else [target]
    assert not wrong, "\n".join(wrong)


def test_config_imports_no_commands_or_processes() -> None:
    """The package config composes configurations; it imports no command and starts no job."""
    wrong = []
    for path in SOURCES:
        if package_of(path) == "config":
            for name, line in imports(path):
                target = inside(name)
                package = package_of(target) if target is not None else name.split(".")[0]
                if package in ("commands", "runs", "sweeps", "training", "subprocess", "multiprocessing", "concurrent"):
                    wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


@cache
def names_used(path: Path) -> list[tuple[str, int]]:
    """Every name and attribute that a file uses, as text, with its line."""
    named = [node for node in nodes_of(path) if isinstance(node, ast.Attribute | ast.Name)]
    return [(node.id if isinstance(node, ast.Name) else ast.unparse(node), node.lineno) for node in named]


FORBIDDEN = re.compile(
    r"^(torch\.load|torch\.save|hydra\.utils\.instantiate|instantiate|pickle\..*|eval|exec|os\.system|"
    r"NotImplementedError|OmegaConf\.register_new_resolver|yaml\.load|yaml\.unsafe_load)$"
)


def test_no_calls_that_execute_file_contents() -> None:
    wrong = []
    for path in SOURCES:
        here = path.relative_to(PACKAGE)
        wrong += [
            f"{here}:{line}: {name}"
            for name, line in names_used(path)
            if FORBIDDEN.match(name) and (str(here), name) != (PICKLED[0], "torch.load")
        ]
        wrong += [
            f"{here}:{line}: import {name}"
            for name, line in imports(path)
            if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve") or "instantiate" in name
        ]
    assert not wrong, "\n".join(wrong)


def test_torch_load_is_called_once_with_weights_only() -> None:
    calls = [
        ast.unparse(node)
        for node in ast.walk(tree_of(PACKAGE / PICKLED[0]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls == [PICKLED[1]]


def test_no_yaml_or_source_names_hydra_targets() -> None:
    from lmtool.config.groups import conf_dir

    files = [*conf_dir().rglob("*.yaml"), *SOURCES]
    naming = [file for file in files if re.search(r"\b_target_\b", file.read_text(encoding="utf-8"))]
    assert naming == [PACKAGE / "config" / "compose.py"]  # which refuses them in other files


def test_dynamic_imports_are_in_registry_and_plugins_of_hydra_only() -> None:
    """`importlib.import_module` is called only to build components, and to load plugins of the user and of Hydra."""
    callers = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for name, _ in names_used(path)
        if name in ("importlib.import_module", "import_module", "__import__")
    }
    assert callers <= {"config/registry.py", "sweeps/plugins.py"}


def test_no_bare_except_or_swallowed_exception() -> None:
    wrong = []
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                bare = node.type is None
                silent = ast.unparse(node.type or ast.Constant("")) == "Exception" and all(
                    isinstance(statement, ast.Pass) for statement in node.body
                )
                if bare or silent:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)
