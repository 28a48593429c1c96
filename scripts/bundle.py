"""Collect the wheels of lmtool and its dependencies for a machine without a network. torch is omitted, since such a
machine has its own build for its GPU.

    make bundle PYTHON_VERSION=3.12     dist/lmtool-VERSION-py3.12-x86_64/, at most 60 MB
    python scripts/bundle.py --python-version 3.12 [--machine aarch64] [--output FOLDER]

On that machine, in an environment with torch 2.11 or newer (docs/recipes.md, "A machine without a network"):

    pip install --no-index --find-links FOLDER lmtool

This script resolves the dependencies itself, from the metadata of the wheels, because `pip download` evaluates the
conditions of dependencies for this Python and machine instead of the target's. Versions come from constraints.txt. A
package without a wheel is built here if it is pure Python. `datasets`, which reads data sets from the Hugging Face hub,
is an extra (`lmtool[hub]`) and is not included: it would double the size, and needs a network.
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
OMITTED = frozenset({"torch"})
# Packages whose pure Python wheel is enough: the 4 MB of compiled parts speed up functions that matplotlib does not
# need for PNGs.
PURE_PYTHON = frozenset({"fonttools"})
# Minor versions of glibc on which a supported torch runs.
GLIBC_MINORS = range(28, 4, -1)


def target_environment(python_version: str, machine: str) -> dict[str, str]:
    """Returns the environment for which the conditions of dependencies (PEP 508 markers) are evaluated: CPython on
    Linux."""
    full_version = f"{python_version}.0"
    return {
        "python_version": python_version, "python_full_version": full_version, "implementation_version": full_version,
        "implementation_name": "cpython", "platform_python_implementation": "CPython", "os_name": "posix",
        "sys_platform": "linux", "platform_system": "Linux", "platform_machine": machine, "platform_release": "",
        "platform_version": "",
    }  # fmt: skip


def requirements_of(wheel: Path, extras: Sequence[str], target: dict[str, str]) -> list[Requirement]:
    """Returns the requirements of a wheel, with these extras, that apply to the target environment."""
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


def pinned_versions(constraints: str) -> dict[str, str]:
    """Returns the versions in a constraints file by the canonical names of the packages."""
    pairs = (line.split("==") for line in constraints.splitlines() if "==" in line)
    return {canonicalize_name(name.strip()): version.strip() for name, version in pairs}


def pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"])
    if done.returncode:
        stop(f"pip {words[0]} failed", "read the lines above; it needs a package index", 1)


def target_options(python_version: str, machine: str) -> list[str]:
    """Returns pip's options that select wheels for the target."""
    platforms = [*(f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS)]
    platforms += [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
    return [
        "--python-version", python_version,
        "--implementation", "cp",
        *(word for name in platforms for word in ("--platform", name)),
    ]  # fmt: skip


def fetch(requirement: Requirement, versions: dict[str, str], folder: Path, options: Sequence[str]) -> None:
    """Downloads the wheel of a requirement into the folder, or builds it if only its source is published. Ends the
    script if the build is not pure Python.

    Args:
        requirement: the package
        versions: versions by canonical name, from constraints.txt
        folder: the folder for the wheel
        options: pip's options that select wheels for the target
    """
    name = canonicalize_name(requirement.name)
    if name in PURE_PYTHON:
        options = [*options[:2], "--implementation", "py", "--abi", "none", "--platform", "any"]
    pinned_requirement = (
        f"{requirement.name}=={versions[name]}" if name in versions else f"{requirement.name}{requirement.specifier}"
    )
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    words += [*options, "--quiet", "--disable-pip-version-check", pinned_requirement]
    done = subprocess.run(words, capture_output=True)
    if done.returncode:
        print(f"  {pinned_requirement}: no wheel for the target, built here", file=sys.stderr, flush=True)
        before = set(folder.iterdir())
        pip("wheel", "--no-deps", "--wheel-dir", str(folder), pinned_requirement)
        for path in set(folder.iterdir()) - before:
            if not path.name.endswith("-none-any.whl"):
                stop(f"{path.name} works only on this machine", f"build {name} on the target itself", 1)


def wheels_in(folder: Path) -> dict[str, Path]:
    return {parse_wheel_filename(path.name)[0]: path for path in folder.glob("*.whl")}


def gather(folder: Path, python_version: str, machine: str) -> list[Path]:
    """Builds lmtool's wheel, collects it and the wheels of its dependencies in a folder, and returns their paths."""
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    versions = pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    target, options = target_environment(python_version, machine), target_options(python_version, machine)
    wheels: dict[str, Path] = {}
    resolved: set[tuple[str, frozenset[str]]] = set()
    unresolved = [Requirement("lmtool")]
    while unresolved:
        requirement = unresolved.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in OMITTED or (name, extras) in resolved:
            continue
        resolved.add((name, extras))
        if name not in wheels:
            if name not in wheels_in(folder):
                fetch(requirement, versions, folder, options)
            wheels[name] = wheels_in(folder)[name]
        unresolved += requirements_of(wheels[name], sorted(extras), target)
    return sorted(wheels.values())


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python-version", default="", help="Python of the target, such as 3.12 (default: this Python's)"
    )
    parser.add_argument(
        "--machine", default=platform.machine(), help="architecture of the target (default: this machine's)"
    )
    parser.add_argument("--output", type=Path, help="a folder (dist/lmtool-VERSION-pyPYTHON-MACHINE)")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    version = options.python_version or ".".join(map(str, sys.version_info[:2]))
    with tempfile.TemporaryDirectory() as folder:
        wheels = gather(Path(folder), version, options.machine)
        lmtool_wheel = next(path for path in wheels if path.name.startswith("lmtool-"))
        release = parse_wheel_filename(lmtool_wheel.name)[1]
        output = options.output or ROOT / "dist" / f"lmtool-{release}-py{version}-{options.machine}"
        total = sum(path.stat().st_size for path in wheels)
        if total > LARGEST_BYTES:
            for path in sorted(wheels, key=lambda path: -path.stat().st_size)[:5]:
                print(f"  {path.stat().st_size / 1e6:6.1f} MB  {path.name}", file=sys.stderr)
            message = f"{total / 1e6:.1f} MB of wheels, the limit is {LARGEST_BYTES / 1e6:.0f} MB"
            stop(message, "see the largest wheels above", 3)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(folder, output)
    print(f"{output}: {len(wheels)} wheels, {total / 1e6:.1f} MB, without {', '.join(sorted(OMITTED))}")
    print(f"on the target: pip install --no-index --find-links {output.name} lmtool")
    return 0


if __name__ == "__main__":
    sys.exit(main())
