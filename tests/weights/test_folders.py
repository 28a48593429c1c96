"""Published folders: shards, .bin files, half precision, hub caches, and broken files."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lmtool
from lmtool.cli.main import main
from lmtool.errors import UserError
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights import reading
from lmtool.weights.folders import hf_folder, tokenizer_folder
from lmtool.weights.peft.adapter import adapter_folder
from lmtool.weights.reading import read
from tests.weights.published_folders import make


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    make("bert", folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "bert")


def change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_shards_and_bin_give_same_weights(folder: Path) -> None:
    expected, whole = read(str(folder)).tensors, load_file(folder / "model.safetensors")
    names = list(whole)
    (folder / "model.safetensors").unlink()
    torch.save(whole, folder / "pytorch_model.bin")
    assert equal(read(str(folder)).tensors, expected)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in halves.items():
        save_file({name: whole[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in halves.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert equal(read(str(folder)).tensors, expected)  # shards take precedence over the .bin
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="lacks model-00002-of-00002.safetensors"):
        read(str(folder))
    index["weight_map"][names[0]] = "../../model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="is not a file"):
        read(str(folder))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_non_regular_files_are_refused(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    for make_it in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere")):
        make_it(folder / name)
        with pytest.raises(UserError, match=f"{name} is not a regular file"):
            hf_folder(str(folder))
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


def test_half_precision_weights_become_fp32(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in whole.items()}, folder / "model.safetensors")
    tensors = read(str(folder)).tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


class Payload:
    """Code in a hostile .bin."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("/nonexistent/ran").write_text, ("x",))


@pytest.mark.parametrize("content", ["code", "list", "cut"])
def test_bin_without_pure_tensors_is_refused(folder: Path, content: str) -> None:
    path = folder / "pytorch_model.bin"
    (folder / "model.safetensors").unlink()
    torch.save({"code": {"a": Payload()}, "list": [torch.ones(1)], "cut": {"a": torch.ones(99)}}[content], path)
    if content == "cut":
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match=r"pytorch_model\.bin (is not a file with only tensors|is not a dictionary)"):
        read(str(folder))


def test_truncated_checkpoint_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"model\.safetensors is not a complete safetensors file"):
        read(str(folder))
    path.unlink()
    with pytest.raises(UserError, match="has no weights: none of model.safetensors, "):
        read(str(folder))


def test_unknown_keys_are_listed_and_code_is_not_run(folder: Path) -> None:
    change(folder, surprise=1, auto_map={"AutoModel": "modeling.Evil"}, torch_dtype="float32")
    (folder / "modeling.py").write_text("raise SystemExit(9)")
    assert read(str(folder)).ignored == ("config.json: auto_map, surprise", "files: modeling.py")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "mamba"}, "config.json has model_type='mamba'; lmtool supports albert, bart, bert"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_act": "relu"}, "hidden_act='relu', but model=bert supports only gelu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"is_decoder": True}, "is_decoder=True"),
    ],
)
def test_unsupported_families_and_variants_are_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    change(folder, **keys)
    with pytest.raises(UserError, match=message) as caught:
        read(str(folder))
    assert caught.value.message.count("checkpoint=") == 1


def test_weights_that_do_not_match_config_are_refused(folder: Path) -> None:
    change(folder, num_hidden_layers=3)
    with pytest.raises(UserError, match=r"layers\.2\.self_attn\.q_proj\.weight is missing") as caught:
        lmtool.load(str(folder))
    assert caught.value.hint is not None and "do not match" in caught.value.hint


def test_broken_config_json_is_refused(folder: Path) -> None:
    for content, message in (("{", r"config\.json:1:2: not JSON"), ("[]", "is not a JSON object")):
        (folder / "config.json").write_text(content)
        with pytest.raises(UserError, match=message):
            hf_folder(str(folder))
    assert hf_folder(str(folder.parent)) is None


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
        "model.safetensors.index.json", "modules.json", "adapter_config.json", "generation_config.json",
    ],
)  # fmt: skip
def test_integer_of_5000_digits_is_refused(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, "extra": 0}).replace('"extra": 0', f'"extra": {"9" * 5000}'))
    if name.startswith("model."):
        (folder / "model.safetensors").unlink()
    output = folder.parent / "imported"
    assert main(["import", f"checkpoint={folder}", f"output={output}"]) == 2
    error = capsys.readouterr().err
    assert f"{name}: not readable JSON: Exceeds the limit" in error and "hint: copy the " in error
    assert not output.exists()


def make_hub_cache(original: Path, root: Path, *leave_out: str) -> str:
    """Create a hub cache with the folder, in the layout of huggingface_hub. Returns the commit."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = root / "models--some--bert"
    shutil.copytree(original, place / "snapshots" / commit)
    for name in leave_out:
        (place / "snapshots" / commit / name).unlink()
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    return commit


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Attempted connections, all of which fail."""
    attempts: list[Any] = []

    def refuse(*arguments: Any, **keywords: Any) -> None:
        attempts.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    return attempts


def test_hub_cache_is_read_without_network(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[Any]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = make_hub_cache(original, tmp_path)
    expected = read(str(original)).tensors
    for address in ("hf://some/bert", "hf://some/bert@main", f"hf://some/bert@{commit}"):
        folder = hf_folder(address, offline=True)
        assert folder is not None and folder.revision == commit
        assert equal(read(address, offline=True).tensors, expected)
    assert not no_network
    with pytest.raises(UserError, match=r"config\.json of some/other@main is not in the hub's cache, and offline=true"):
        read("hf://some/other", offline=True)
    assert not no_network
    with pytest.raises(UserError, match="is not in the hub's cache, and there is no network"):
        read("hf://some/other")
    for wrong in ("hf://a/b/c", "s3://bucket/name", "hf://some/bert@"):
        with pytest.raises(UserError, match="is not an address"):
            hf_folder(wrong, offline=True)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_local_folder_without_adapter_has_no_adapter_folder(original: Path, adapter: Path) -> None:
    assert adapter_folder(str(adapter)) == adapter
    assert adapter_folder(str(original)) is None


def test_cached_adapter_is_read_without_network(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[Any]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    commit = make_hub_cache(adapter, tmp_path / "cache")
    for address in ("hf://some/bert", f"hf://some/bert@{commit}"):
        folder = adapter_folder(address, offline=True)
        assert folder is not None and folder.name == commit and (folder / "adapter_config.json").is_file()
    assert adapter_folder("hf://some/other", offline=True) is None
    assert not no_network


def test_cached_tokenizer_is_read_without_network(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[Any]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = make_hub_cache(original, tmp_path, "model.safetensors", "config.json")
    for address in ("hf://some/bert", f"hf://some/bert@{commit}"):
        folder = tokenizer_folder(address, offline=True)
        assert folder.name == commit
        assert Tokenizer.load(folder).fingerprint == Tokenizer.load(original).fingerprint
    with pytest.raises(UserError) as caught:
        tokenizer_folder("hf://some/other@v2", offline=True)
    assert caught.value.message == (
        "tokenizer.path=hf://some/other@v2: tokenizer.json of some/other@v2 is not in the hub's cache, and "
        "offline=true "
        "or HF_HUB_OFFLINE is set"
    )
    assert "or use a local folder" in str(caught.value.hint)
    assert not no_network
    with pytest.raises(UserError, match="is not in the hub's cache, and there is no network"):
        tokenizer_folder("hf://some/other")
    assert len(no_network) == 1, "one connection attempt"
    with pytest.raises(UserError, match="is not an address"):
        tokenizer_folder("hf://a/b/c")


def test_offline_error_names_missing_weights(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[Any]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    make_hub_cache(original, tmp_path, "model.safetensors")
    with pytest.raises(UserError, match=r"the hub's cache \(offline=true\) has no weights: none of model.safetensors"):
        read("hf://some/bert", offline=True)
    assert not no_network


def test_file_above_memory_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(2**20))

    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(reading, "safe_open", refuse)
    with pytest.raises(UserError, match="GiB, which exceeds the memory limit of this process"):
        reading.read_file(path)
