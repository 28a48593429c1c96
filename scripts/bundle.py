"""Collect the wheels of lmtool and its dependencies for a machine without a network. torch is omitted: such a machine
has a build for its GPU.

    make bundle PYTHON_VERSION=3.12     dist/lmtool-VERSION-py3.12-x86_64/, at most 60 MB
    python scripts/bundle.py --python-version 3.12 [--machine aarch64] [--output FOLDER]

There, in an environment that has torch 2.11 or newer (docs/recipes.md, "A machine without a network"):

    pip install --no-index --find-links FOLDER lmtool

The dependencies are resolved from the metadata of the wheels for the target's Python and machine, since `pip download`
evaluates their conditions for this Python. Versions come from constraints.txt. Packages published without a wheel are
built here if they are pure Python. `datasets`, which reads data sets from the hub, is an extra (`lmtool[hub]`) and not
included: it would double the size, and needs a network.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

from common import ROOT, stop
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

LARGEST_BYTES = 60_000_000
LEFT_OUT = frozenset({"torch"})
# The pure wheel suffices: 4 MB of compiled parts speed up functions that matplotlib's PNGs do not need.
PURE = frozenset({"fonttools"})
# Minor versions of glibc on which a supported torch runs.
GLIBC_MINORS = range(28, 4, -1)


def environment(python_version: str, machine: str) -> dict[str, str]:
    """The environment in which conditions of dependencies are evaluated: Linux with CPython."""
    full = f"{python_version}.0"
    return {
        "python_version": python_version, "python_full_version": full, "implementation_version": full,
        "implementation_name": "cpython", "platform_python_implementation": "CPython", "os_name": "posix",
        "sys_platform": "linux", "platform_system": "Linux", "platform_machine": machine, "platform_release": "",
        "platform_version": "",
    }  # fmt: skip


def needs(wheel: Path, extras: Sequence[str], target: dict[str, str]) -> list[Requirement]:
    """The requirements of a wheel on the target, with these extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    requirements = map(Requirement, metadata.get_all("Requires-Dist", []))
    chosen = [{**target, "extra": extra} for extra in ("", *extras)]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None or any(requirement.marker.evaluate(case) for case in chosen)
    ]


def pinned(constraints: str) -> dict[str, str]:
    """Versions by canonical name."""
    pairs = (line.split("==") for line in constraints.splitlines() if "==" in line)
    return {canonicalize_name(name.strip()): version.strip() for name, version in pairs}


def pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"])
    if done.returncode:
        stop(f"pip {words[0]} failed", "read the lines above; it needs a package index", 1)


def tags(python_version: str, machine: str) -> list[str]:
    """pip's options for the target's wheels."""
    platforms = [*(f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS)]
    platforms += [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
    return [
        "--python-version", python_version,
        *("--implementation", "cp"),
        *(word for name in platforms for word in ("--platform", name)),
    ]  # fmt: skip


def fetch(requirement: Requirement, versions: dict[str, str], folder: Path, options: Sequence[str]) -> None:
    """Downloads a wheel to the folder, or builds it if only its source is published."""
    name = canonicalize_name(requirement.name)
    if name in PURE:
        options = [*options[:2], "--implementation", "py", "--abi", "none", "--platform", "any"]
    exact = (
        f"{requirement.name}=={versions[name]}" if name in versions else f"{requirement.name}{requirement.specifier}"
    )
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*words, *options, "--quiet", "--disable-pip-version-check", exact], capture_output=True)
    if done.returncode:
        print(f"  {exact}: no wheel for the target, built here", file=sys.stderr, flush=True)
        before = set(folder.iterdir())
        pip("wheel", "--no-deps", "--wheel-dir", str(folder), exact)
        for path in set(folder.iterdir()) - before:
            if not path.name.endswith("-none-any.whl"):
                stop(f"{path.name} is built for this machine alone", f"ask for {name} on the target itself", 1)


def wheels_in(folder: Path) -> dict[str, Path]:
    return {parse_wheel_filename(path.name)[0]: path for path in folder.glob("*.whl")}


def gather(folder: Path, python_version: str, machine: str) -> list[Path]:
    """Collects in the folder lmtool's wheel, built from this tree, and those of its dependencies."""
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    versions = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    target, options = environment(python_version, machine), tags(python_version, machine)
    wheels: dict[str, Path] = {}
    read: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement("lmtool")]
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in LEFT_OUT or (name, extras) in read:
            continue
        read.add((name, extras))
        if name not in wheels:
            if name not in wheels_in(folder):
                fetch(requirement, versions, folder, options)
            wheels[name] = wheels_in(folder)[name]
        waiting += needs(wheels[name], sorted(extras), target)
    return sorted(wheels.values())


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-version", default="", help="of the target, such as 3.12 (this Python's)")
    parser.add_argument("--machine", default=platform.machine(), help="of the target (this one's)")
    parser.add_argument("--output", type=Path, help="a folder (dist/lmtool-VERSION-pyPYTHON-MACHINE)")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    version = options.python_version or ".".join(map(str, sys.version_info[:2]))
    with tempfile.TemporaryDirectory() as place:
        wheels = gather(Path(place), version, options.machine)
        own = next(path for path in wheels if path.name.startswith("lmtool-"))
        number = parse_wheel_filename(own.name)[1]
        output = options.output or ROOT / "dist" / f"lmtool-{number}-py{version}-{options.machine}"
        total = sum(path.stat().st_size for path in wheels)
        if total > LARGEST_BYTES:
            for path in sorted(wheels, key=lambda path: -path.stat().st_size)[:5]:
                print(f"  {path.stat().st_size / 1e6:6.1f} MB  {path.name}", file=sys.stderr)
            wanted = f"{total / 1e6:.1f} MB of wheels, at most {LARGEST_BYTES / 1e6:.0f} are wanted"
            stop(wanted, "see the largest above", 3)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(place, output)
    print(f"{output}: {len(wheels)} wheels, {total / 1e6:.1f} MB, without {', '.join(sorted(LEFT_OUT))}")
    print(f"there: pip install --no-index --find-links {output.name} lmtool")
    return 0


if __name__ == "__main__":
    sys.exit(main())
