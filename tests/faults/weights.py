"""Untrusted checkpoints: pickles, code next to weights, invalid headers, absurd configurations; and checkpoints of
lmtool whose hashes are correct but which contain impossible values."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.scenes import EITHER, ESCAPES, LEGAL, REFUSED, Scene, plant_factory
from tests.faults.stage import PREDICT, with_overrides

PUBLISHED = with_overrides(PREDICT, "checkpoint=published")
IMPORT = ("import", "checkpoint=published", "output=imported")


class _Bomb:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch RAN",))


# --- published folders ----------------------------------------------------------------------------------------------


@plant_factory
def _edit_published(workdir: Path, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edits a JSON file of the published folder."""
    path = workdir / "published" / name
    data = json.loads(path.read_text())
    path.write_text(json.dumps(edit(data) or data))


@plant_factory
def _replace_weights(workdir: Path, content: bytes | None, name: str = "model.safetensors") -> None:
    (workdir / "published" / "model.safetensors").unlink()
    if content is not None:
        (workdir / "published" / name).write_bytes(content)


def _safetensors(header: object, body: bytes = b"") -> bytes:
    """Returns the content of a safetensors file with this header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _add_code(workdir: Path) -> None:
    _edit_published(
        "config.json", lambda data: data.update(auto_map={"AutoModel": "stranger.Model"}, trust_remote_code=True)
    )(workdir)
    (workdir / "published" / "stranger.py").write_text("open('RAN', 'w')\n")
    (workdir / "published" / "__init__.py").write_text("open('RAN', 'w')\n")


@plant_factory
def _replace_by_index(workdir: Path, names: dict[str, str]) -> None:
    (workdir / "published" / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": names}
    (workdir / "published" / "model.safetensors.index.json").write_text(json.dumps(index))


def _add_slow_pattern(workdir: Path) -> None:
    """Adds a regular expression to the tokenizer that needs exponential time for some texts."""

    def edit(data: dict[str, Any]) -> None:
        pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        data["pre_tokenizer"] = pattern

    _edit_published("tokenizer.json", edit)(workdir)


_TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
_FILES = {
    "a pickle with code": _replace_weights(pickle.dumps(_Bomb()), "pytorch_model.bin"),
    "an old pickle with code": _replace_weights(pickle.dumps(_Bomb(), protocol=0), "pytorch_model.bin"),
    "a header of 2^63 bytes": _replace_weights(struct.pack("<Q", 1 << 63) + b"{}"),
    "a header of 90 million bytes": _replace_weights(struct.pack("<Q", 90_000_000) + b"{}"),
    "a header that is not an object": _replace_weights(_safetensors([1])),
    "a tensor of wrong size": _replace_weights(_safetensors({"x": {**_TENSOR, "shape": [1 << 40]}}, b"\0" * 8)),
    "overlapping tensors": _replace_weights(_safetensors({"x": _TENSOR, "y": _TENSOR}, b"\0" * 8)),
    "no tensors": _replace_weights(_safetensors({})),
    "a tensor named with terminal codes": _replace_weights(_safetensors({f"bert.{ESCAPES}": _TENSOR}, b"\0" * 8)),
    "no weights": _replace_weights(None),
    "shards outside the folder": _replace_by_index({"bert.x": "../../precious/file", "bert.y": "/etc/passwd"}),
    "shards named with terminal codes": _replace_by_index({"bert.x": ESCAPES}),
    "a shard that is the index": _replace_by_index({"bert.x": "model.safetensors.index.json"}),
    "a shard that is a pickle": lambda workdir: (
        _replace_by_index({"bert.x": "evil.bin"})(workdir),
        (workdir / "published" / "evil.bin").write_bytes(pickle.dumps(_Bomb())),
    )[0],
}
_CONFIGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    f"{key}={str(value)[:30]}": lambda data, key=key, value=value: data.update({key: value})
    for key, value in (
        ("vocab_size", 2147483647), ("vocab_size", -1), ("vocab_size", 10**30), ("vocab_size", "400"),
        ("vocab_size", 1.5), ("num_hidden_layers", 10**9), ("num_hidden_layers", 0), ("num_hidden_layers", "one"),
        ("hidden_size", 10**9), ("hidden_size", -32), ("num_attention_heads", 0), ("num_attention_heads", 7),
        ("max_position_embeddings", 10**12),
        ("intermediate_size", 10**12), ("model_type", "../../x"), ("model_type", ["bert"]), ("model_type", ESCAPES),
        ("model_type", None), ("hidden_act", "os.system"), ("hidden_act", ESCAPES), ("layer_norm_eps", "x"),
        ("layer_norm_eps", float("nan")), ("type_vocab_size", 10**10), ("architectures", "x"), ("architectures", [1]),
        ("id2label", {"0": ESCAPES, "1": "b"}), ("id2label", {"x": "a"}), ("id2label", [1]), ("num_labels", 10**9),
        ("tie_word_embeddings", "no"), ("hidden_dropout_prob", 7), ("position_embedding_type", "../x"),
    )
}  # fmt: skip
_TOKENS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no model": lambda data: data.pop("model") and None,
    "a vocabulary that repeats an id": lambda data: data["model"]["vocab"].update({"x": 0, "y": 0}),
    "an id of 2^31 - 1": lambda data: data["model"]["vocab"].update({"x": 2**31 - 1}),
    "a list": lambda data: [1],
    "terminal codes as a token": lambda data: data["model"]["vocab"].update({ESCAPES: 3}),
}


def _published_scenes() -> Iterator[Scene]:
    commands = (("", PUBLISHED), (", imported", IMPORT))
    for name, plant in _FILES.items():
        for suffix, arguments in commands:
            yield Scene(f"published weights: {name}{suffix}", arguments, plant, ("published",))
    for name, edit in _CONFIGS.items():
        plant = _edit_published("config.json", edit)
        for suffix, arguments in commands:
            yield Scene(f"published config: {name}{suffix}", arguments, plant, ("published",), EITHER)
    for name, edit in _TOKENS.items():
        plant = _edit_published("tokenizer.json", edit)
        yield Scene(f"published tokenizer: {name}", PUBLISHED, plant, ("published",), EITHER)
    yield Scene("code next to published weights", PUBLISHED, _add_code, expected=LEGAL)
    yield Scene(
        "a pattern of exponential time",
        with_overrides(PUBLISHED, "text=" + "a" * 40 + "!"),
        _add_slow_pattern,
        ("published",),
        EITHER,
    )


# --- checkpoints of lmtool with correct hashes ----------------------------------------------------------------------


@plant_factory
def _forge(workdir: Path, run: str, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edits a JSON file of every checkpoint of a run, and writes new manifests, so that the hashes are correct."""
    from lmtool.system.files import write_manifest

    for folder in (workdir / run / "checkpoints").glob("step_*"):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(edit(data) or data))
        (folder / "manifest.json").unlink()
        write_manifest(folder, {"step": int(folder.name[5:])})


_STATES = {
    f"{key}={str(value)[:20]}": lambda data, key=key, value=value: data.update({key: value})
    for key, value in (
        ("step", 10**30), ("step", -1), ("step", "x"), ("step", None), ("step", 1.5),
        ("cursor", {"epoch": -5, "batch": -5}), ("cursor", {"epoch": 10**30, "batch": 0}), ("cursor", [1]),
        ("cursor", "x"), ("total_steps", 0), ("best_value", "x"), ("best_step", 10**9), ("seconds", "nan"),
        ("tokens", -1), ("unknown", 1), ("metrics", ESCAPES),
    )
}  # fmt: skip
_SAVED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a class path": lambda data: data.update(_target_="os.system"),
    "a class path in the model": lambda data: data["model"].update(_target_="os.system"),
    "another model": lambda data: data["model"].update(name="evil.module:Class"),
    "a model outside the folder": lambda data: data["model"].update(name="../../evil"),
    "a plugin": lambda data: data.update(plugins=["evil"]),
    "another command": lambda data: data.update(command="rm"),
    "an unknown version": lambda data: data.update(version=99),
    "no model": lambda data: data.pop("model") and None,
    "a list": lambda data: [1],
    "an endless model": lambda data: data["model"].update(num_layers=10**9),
    "a huge vocabulary": lambda data: data["model"].update(vocab_size=2**31 - 1),
    "labels with terminal codes": lambda data: data["task"].update(labels=[ESCAPES, "b"]),
    "three labels": lambda data: data["task"].update(labels=["a", "b", "c"]),
    "an interpolation": lambda data: data.update(checkpoint="${oc.env:SOME_TOKEN}"),
    "terminal codes": lambda data: data.update(checkpoint=ESCAPES),
}


def _run_scenes() -> Iterator[Scene]:
    for name, edit in _STATES.items():
        # `lmtool resume` does not read these values.
        optional = name.startswith(("unknown", "metrics", "tokens", "best_step", "total_steps"))
        plant, expected = _forge("runs/tuned", "state.json", edit), EITHER if optional else REFUSED
        yield Scene(f"state.json: {name}, resumed", ("resume", "runs/tuned"), plant, ("state.json",), expected)
    for name, edit in _SAVED.items():
        optional = "labels with" in name or name in ("an interpolation", "terminal codes")
        plant, expected = _forge("done/tuned", "config.json", edit), EITHER if optional else REFUSED
        yield Scene(f"config.json: {name}", PREDICT, plant, ("done/tuned", "plugin"), expected)


SCENES = [*_published_scenes(), *_run_scenes()]
