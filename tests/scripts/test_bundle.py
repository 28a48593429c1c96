"""Wheels bundled for an offline machine; the tests write their own wheels and ask no package index."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

# By name: file name of the wheel and its requirements.
WHEELS = {
    "lmtool": ("lmtool-0.1.0-py3-none-any.whl", ["torch>=2.11", "early", "Fast>=1", "datasets; extra == 'hub'"]),
    "early": ("early-1.0-py3-none-any.whl", ["backport; python_version < '3.12'", "ring[gold]"]),
    "fast": ("Fast-2.0-cp312-cp312-manylinux_2_17_x86_64.whl", ["arm; platform_machine == 'aarch64'", "early"]),
    "ring": ("ring-3.0-py3-none-any.whl", ["gold; extra == 'gold'", "silver; extra == 'silver'", "lmtool"]),
    "backport": ("backport-1.0-py3-none-any.whl", []),
    "gold": ("gold-1.0-py3-none-any.whl", ["torch"]),
    "arm": ("arm-1.0-cp312-cp312-manylinux_2_17_aarch64.whl", []),
}


def write_wheel(folder: Path, name: str, size: int = 10) -> None:
    file, needed = WHEELS[name]
    lines = ["Metadata-Version: 2.4", f"Name: {name}", *(f"Requires-Dist: {requirement}" for requirement in needed)]
    with zipfile.ZipFile(folder / file, "w") as archive:
        archive.writestr(f"{name}-1.dist-info/METADATA", "\n".join(lines) + "\n")
        archive.writestr("content", b"\0" * size)


@pytest.fixture
def bundle(script, monkeypatch):
    """The script with a fake index of the wheels in `WHEELS`; `bundle.requested` lists the requests."""
    module = script("bundle")
    module.requested = []

    def fetch(requirement, versions, folder, options):
        module.requested.append(requirement.name)
        write_wheel(folder, requirement.name.lower())

    monkeypatch.setattr(module, "fetch", fetch)
    monkeypatch.setattr(module, "pip", lambda verb, *words: write_wheel(Path(words[2]), "lmtool"))
    return module


@pytest.mark.parametrize(
    ("version", "machine", "names"),
    [
        ("3.12", "x86_64", {"lmtool", "early", "Fast", "ring", "gold"}),
        ("3.11", "x86_64", {"lmtool", "early", "Fast", "ring", "gold", "backport"}),
        ("3.12", "aarch64", {"lmtool", "early", "Fast", "ring", "gold", "arm"}),
    ],
)
def test_gather_fetches_exactly_the_required_wheels(bundle, tmp_path, version, machine, names):
    """Markers are evaluated for the target; extras only where named, each wheel once, never torch."""
    wheels = bundle.gather(tmp_path, version, machine)
    assert {path.name.split("-")[0] for path in wheels} == names
    assert sorted(bundle.requested) == sorted(names - {"lmtool"})


def test_bundle_writes_folder_of_wheels(bundle, tmp_path, capsys):
    assert bundle.main(["--python-version", "3.12", "--machine", "x86_64", "--output", str(tmp_path / "out")]) == 0
    assert len(list((tmp_path / "out").glob("*.whl"))) == 5
    printed = capsys.readouterr().out
    assert "5 wheels" in printed and "without torch" in printed and "--no-index --find-links out lmtool" in printed


def test_too_large_bundle_is_refused(bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bundle, "LARGEST_BYTES", 100)
    with pytest.raises(SystemExit) as ended:
        bundle.main(["--python-version", "3.12", "--machine", "x86_64", "--output", str(tmp_path / "out")])
    assert ended.value.code == 3 and not (tmp_path / "out").exists()
    assert "MB of wheels" in capsys.readouterr().err


def test_platform_wheel_built_locally_is_refused(script, monkeypatch, tmp_path):
    bundle = script("bundle")
    failed = type("Done", (), {"returncode": 1})
    monkeypatch.setattr(bundle.subprocess, "run", lambda *words, **named: failed)
    monkeypatch.setattr(bundle, "pip", lambda *words: write_wheel(tmp_path, "fast"))
    with pytest.raises(SystemExit):
        bundle.fetch(Requirement("fast"), {}, tmp_path, [])
    monkeypatch.setattr(bundle, "pip", lambda *words: write_wheel(tmp_path, "gold"))
    bundle.fetch(Requirement("gold"), {}, tmp_path, [])
    assert (tmp_path / "gold-1.0-py3-none-any.whl").exists()


def test_versions_are_read_from_constraints(script):
    bundle = script("bundle")
    versions = bundle.pinned_versions((bundle.ROOT / "constraints.txt").read_text())
    assert versions["hydra-core"] == "1.3.8" and versions["pyyaml"].startswith("6.")
