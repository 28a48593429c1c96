"""The house's own rules, held by a walk over every import of the tree: who may import whom, and no circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lmtool

PACKAGE = Path(lmtool.__file__).resolve().parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A package imports only what is named here (and itself). `types` needs torch, so packages without torch do not name it.
# Packages inside a package that have a layer of their own are named with it.
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
    # lmtool.load gives a model with its tokenizer, from a checkpoint whose files `training` verifies.
    "weights": LEARNERS | {"tuning"},
    "tokenizers": CONFIG | {"runs"},
    "data": TEXT,
    "learners/metrics": CONFIG,
    "runs": CONFIG,
    # Files and plain data; a test holds that it imports no torch.
    "reporting": CONFIG | {"learners/metrics", "runs"},
    "reporting/trackers": CONFIG | {"runs"},
    "costs": SHELL,
    "learners": LEARN,
    "objectives": LEARNERS,
    # Masked texts beside prompts are masked as in pretraining.
    "tasks": LEARNERS | {"objectives"},
    "tuning": LEARNERS,
    # A student starts from its teacher as a model from a checkpoint.
    "distillation": LEARNERS | {"tasks", "tuning", "weights"},
    "training": NN | {"runs"},
    "learners/representations": LEARNERS | {"objectives", "tasks", "weights"},
    "resolver": COMPONENTS,
    "session": SHELL | {"costs"},
    "weights/conversion": SHELL | {"costs", "session"},
    "commands": SHELL | {"learners/representations", "costs", "session", "weights/conversion"},
    "sweeps": CONFIG | {"reporting", "runs"},
    "cli": CONFIG | {"__init__", "training", "resolver", "commands", "sweeps", "data", "runs"},
    "__main__": {"cli"},
    "__init__": {"commands"},  # lmtool.load, when it is asked for
}
# The one function that opens torch's own files, and the call in it.
PICKLED = ("weights/reading.py", "torch.load(path, map_location='cpu', weights_only=True)")
HYDRA = {"hydra", "omegaconf"}
HEAVY = {"torch", "numpy", "transformers", "datasets", "safetensors", "tokenizers", "matplotlib"}


def room_of(path: Path) -> str:
    """The package a file belongs to: `nn`, `models/heads`, ... or the name of a file at the top."""
    return room_in(path.relative_to(PACKAGE).with_suffix("").parts)


def room_in(parts: tuple[str, ...]) -> str:
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
    """All nodes of a file, walked once for all tests."""
    return list(ast.walk(tree_of(path)))


@pytest.fixture(scope="module", autouse=True)
def free_trees() -> Iterator[None]:
    """Half a million nodes would slow every later garbage collection of the process."""
    yield
    nodes_of.cache_clear()
    tree_of.cache_clear()


def only_types(path: Path) -> set[ast.AST]:
    """Imports under `if TYPE_CHECKING:`, which never run."""
    hidden: set[ast.AST] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            hidden.update(inner for child in node.body for inner in ast.walk(child))
    return hidden


def imports(path: Path, top: bool = False) -> Iterator[tuple[str, int]]:
    """Every module a file imports, also inside functions, with its line; `top`: at import time only."""
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
    """The file of lmtool that an imported name is, or lies in."""
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
    """The literal `module:NAME` or `module:CLASS.build` builders of the tables, which are imported when chosen."""
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "component":
                for keyword in node.keywords:
                    if keyword.arg == "builder" and isinstance(keyword.value, ast.Constant):
                        yield path, str(keyword.value.value), node.lineno


def test_every_room_has_its_rule() -> None:
    assert {room_of(source) for source in SOURCES} - {"__init__"} <= set(MAY_IMPORT)


def test_a_room_imports_only_what_lies_below_it() -> None:
    wrong = []
    for path in SOURCES:
        room = room_of(path)
        for name, line in imports(path):
            target = inside(name)
            if target is None or target == PACKAGE / "__init__.py":
                continue
            other = room_of(target)
            if other != room and other not in MAY_IMPORT.get(room, set()):
                wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {room} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_builders_lie_in_the_room_of_their_configuration() -> None:
    wrong = []
    for path, builder, line in builders():
        module, _, attribute = builder.partition(":")
        attribute = attribute.removesuffix(".build")
        target = inside(module)
        if target is None or room_of(target) != room_of(path):
            wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {builder}")
        elif not any(getattr(node, "name", None) == attribute for node in tree_of(target).body):
            wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {builder} is not there")
    assert not wrong, "\n".join(wrong)


# What every task kind shares.
CONTRACT = {"base.py", "learner.py"}


def kind_classes() -> dict[str, Path]:
    """The classes of single task kinds, and the file of each: their configurations, and what is built from them."""
    classes = {}
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                # A suite is no kind: it is built elsewhere, and its tasks have runs of their own.
                configured = any("lmtool.tasks.kinds." in ast.unparse(decorator) for decorator in node.decorator_list)
                if configured or ("kinds" in path.parts and path.name not in CONTRACT):
                    classes[node.name] = path
    return classes


def test_what_a_task_kind_is_stays_in_its_file() -> None:
    """Nobody asks which kind a task is: what differs between kinds is a method of theirs."""
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
    """Names of the classes that are learners: those that inherit `BaseLearner`, at whatever remove."""
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


def test_commands_ask_no_learner_what_it_is() -> None:
    """What differs between learners is a method of theirs."""
    learners = learner_classes()
    assert {"Mixture", "ReplacedTokenDetection", "TaskLearner"} <= learners
    wrong = []
    for path in SOURCES:
        # An export stands beside a task's learner, or beside the parts of a checkpoint, which are none.
        shell = room_of(path) in ("commands", "session", "costs", "weights/conversion")
        if not shell or path == PACKAGE / "weights" / "conversion" / "parity.py":
            continue
        for node in nodes_of(path):
            asked = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
            if asked and learners & set(re.findall(r"\w+", ast.unparse(node))):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_no_circles_also_inside_functions() -> None:
    edges: dict[Path, set[Path]] = {}
    for path in SOURCES:
        targets = {inside(name) for name, _ in imports(path)}
        # The package's own file is above all its modules by construction.
        edges[path] = {
            target for target in targets if target is not None and target != path and target.parent != target
        }
    done: set[Path] = set()
    for start in SOURCES:
        _walk(start, edges, [], done)


def _walk(path: Path, edges: dict[Path, set[Path]], trail: list[Path], done: set[Path]) -> None:
    if path in trail:
        circle = [*trail[trail.index(path) :], path]
        pytest.fail("a circle: " + " -> ".join(module_of(module) for module in circle))
    if path in done:
        return
    for other in edges[path]:
        _walk(other, edges, [*trail, path], done)
    done.add(path)


def test_no_circles_between_rooms() -> None:
    above = {room: set(below) - {room} for room, below in MAY_IMPORT.items()}
    while above:
        ground = [room for room, below in above.items() if not below & set(above)]
        assert ground, f"a circle among {sorted(above)}"
        for room in ground:
            del above[room]


def test_there_is_one_door_to_the_terminal() -> None:
    """Everything printed goes through `terminal.say` or `reporting.console.Output`, which mask and escape."""
    doors = ("system/terminal.py", "reporting/console.py")
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in SOURCES
        for name, line in names_used(path)
        if re.fullmatch(r"print|sys\.std(out|err)\.write|.*\.console\.print|sys\.__std(out|err)__.*", name)
        and str(path.relative_to(PACKAGE)) not in doors
    ]
    assert not wrong, "\n".join(wrong)


def test_only_cli_sweeps_and_config_import_hydra() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in SOURCES
        for name, line in imports(path)
        if name.split(".")[0] in HYDRA and room_of(path) not in ("cli", "config", "sweeps")
    ]
    assert not wrong, "\n".join(wrong)


def light() -> list[Path]:
    """Files that composing, decoding, list and show run: no torch, no numpy, in them or in what they import."""
    named = [source for source in SOURCES if room_of(source) in ("config", "errors", "system", "cli", "__main__")]
    named += [source for source in SOURCES if "configs" in (source.stem, source.parent.name)]
    named += [PACKAGE / "commands" / f"{name}.py" for name in ("show", "__init__")]
    named += [source for source in SOURCES if room_of(source) == "resolver" and source.stem != "files"]
    return named


def test_configuration_imports_nothing_heavy_not_even_indirectly() -> None:
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


def test_reporting_reads_files_and_plain_data() -> None:
    """No torch in it, nor in what it imports of lmtool: a report is made where no model can be."""
    left, seen, wrong = [path for path in SOURCES if room_of(path) == "reporting"], set(), []
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


def test_configuration_runs_nothing() -> None:
    """The package config composes and decides; it imports no command and starts no job."""
    wrong = []
    for path in SOURCES:
        if room_of(path) == "config":
            for name, line in imports(path):
                target = inside(name)
                room = room_of(target) if target is not None else name.split(".")[0]
                if room in ("commands", "runs", "sweeps", "training", "subprocess", "multiprocessing", "concurrent"):
                    wrong.append(f"{path.relative_to(PACKAGE)}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


def names_used(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute | ast.Name):
            yield ast.unparse(node), getattr(node, "lineno", 0)


FORBIDDEN = re.compile(
    r"^(torch\.load|torch\.save|hydra\.utils\.instantiate|instantiate|pickle\..*|eval|exec|os\.system|"
    r"NotImplementedError|OmegaConf\.register_new_resolver|yaml\.load|yaml\.unsafe_load)$"
)


def test_nothing_that_runs_what_a_file_says() -> None:
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


def test_pickled_weights_are_opened_in_one_place_and_restricted() -> None:
    calls = [
        ast.unparse(node)
        for node in ast.walk(tree_of(PACKAGE / PICKLED[0]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls == [PICKLED[1]]


def test_no_target_in_any_yaml_or_source() -> None:
    from lmtool.config.groups import conf_dir

    files = [*conf_dir().rglob("*.yaml"), *SOURCES]
    naming = [file for file in files if re.search(r"\b_target_\b", file.read_text(encoding="utf-8"))]
    assert naming == [PACKAGE / "config" / "compose.py"]  # where those of others are refused


def test_imports_by_a_string_are_the_tables_and_the_plugins_only() -> None:
    """`importlib.import_module` is called where the tables build, and where typed and Hydra's plugins load."""
    callers = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for name, _ in names_used(path)
        if name in ("importlib.import_module", "import_module", "__import__")
    }
    assert callers <= {"config/registry.py", "config/compose.py"}


def test_no_bare_except_and_no_swallowed_exception() -> None:
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
