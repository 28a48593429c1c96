"""Published weights of ELMo (HDF5) through `lmtool import`, compared with a plain implementation on the same arrays."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet
import pytest
import torch

import lmtool
from lmtool.cli import main as cli

OPTIONS = {
    "lstm": {
        "use_skip_connections": True, "projection_dim": 6, "cell_clip": 0.9, "proj_clip": 0.7, "dim": 5, "n_layers": 2,
    },
    "char_cnn": {
        "activation": "relu", "filters": [[1, 4], [3, 5]], "n_highway": 2, "embedding": {"dim": 4},
        "n_characters": 262, "max_characters_per_token": 9,
    },
}  # fmt: skip
TEXT, WORDS = "The café, unbelievable dogs", ["The", "café", ",", "unbelievable", "dogs"]


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the published names, in the shapes of TensorFlow."""
    random, P, C, size, features = np.random.default_rng(seed), 6, 5, 4, 9
    shapes = {"char_embed": (261, size), "CNN_proj/W_proj": (features, P), "CNN_proj/b_proj": (P,)}
    for number, (width, outputs) in enumerate(OPTIONS["char_cnn"]["filters"]):
        shapes |= {f"CNN/W_cnn_{number}": (1, width, size, outputs), f"CNN/b_cnn_{number}": (outputs,)}
    for number in range(2):
        for part in ("carry", "transform"):
            shapes |= {f"CNN_high_{number}/W_{part}": (features, features), f"CNN_high_{number}/b_{part}": (features,)}
        for layer in range(2):
            cell = f"RNN_{number}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
            shapes |= {f"{cell}/W_0": (2 * P, 4 * C), f"{cell}/B": (4 * C,), f"{cell}/W_P_0": (C, P)}
    return {name: random.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, values: dict[str, np.ndarray], options: dict = OPTIONS, prefix: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{prefix}options.json").write_text(json.dumps(options))
    with h5py.File(folder / f"{prefix}weights.hdf5", "w") as file:
        for name, value in values.items():
            file[name] = value
    return folder


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def character_ids(word: str | int) -> list[int]:
    """The published encoding: bytes, 256 and 257 for the start and the end of a sentence, 258 and 259 for those of a
    word, 260 for padding; all plus one."""
    inner = [word] if isinstance(word, int) else list(word.encode()[:7])
    ids = [258, *inner, 259]
    return [number + 1 for number in [*ids, *[260] * (9 - len(ids))]]


def plain_word(values: dict[str, np.ndarray], word: str | int) -> np.ndarray:
    table = np.concatenate([np.zeros((1, 4)), values["char_embed"]])
    x_LC = table[character_ids(word)]
    features = []
    for number, (width, _) in enumerate(OPTIONS["char_cnn"]["filters"]):
        weight, bias = values[f"CNN/W_cnn_{number}"][0], values[f"CNN/b_cnn_{number}"]
        places = [np.einsum("wc,wcf->f", x_LC[at : at + width], weight) + bias for at in range(9 - width + 1)]
        features.append(np.maximum(np.max(places, 0), 0))
    x = np.concatenate(features)
    for number in range(2):
        part = {
            name: values[f"CNN_high_{number}/{name}"] for name in ("W_carry", "b_carry", "W_transform", "b_transform")
        }
        gate = sigmoid(x @ part["W_carry"] + part["b_carry"])
        x = gate * np.maximum(x @ part["W_transform"] + part["b_transform"], 0) + (1 - gate) * x
    return x @ values["CNN_proj/W_proj"] + values["CNN_proj/b_proj"]


def plain_lstm(values: dict[str, np.ndarray], direction: int, layer: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    cell_name = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
    weight, bias, project = (values[f"{cell_name}/{name}"] for name in ("W_0", "B", "W_P_0"))
    output, cell, outputs = np.zeros(6), np.zeros(5), []
    for x in inputs:
        write_gate, new, forget, read = np.split(np.concatenate([x, output]) @ weight + bias, 4)
        cell = np.clip(sigmoid(forget + 1) * cell + sigmoid(write_gate) * np.tanh(new), -0.9, 0.9)
        output = np.clip((sigmoid(read) * np.tanh(cell)) @ project, -0.7, 0.7)
        outputs.append(output)
    return outputs


def plain_layers(values: dict[str, np.ndarray], words: list[str]) -> np.ndarray:
    """(3, T, 12): the states of the words of a sentence, whose first and last word are those of its boundaries."""
    forward = backward = [plain_word(values, word) for word in (256, *words, 257)]
    layers = [np.concatenate([forward, backward], 1)]
    for layer in range(2):
        one = plain_lstm(values, 0, layer, forward)
        other = plain_lstm(values, 1, layer, backward[::-1])[::-1]
        forward = [y + x for y, x in zip(one, forward, strict=True)] if layer else one
        backward = [y + x for y, x in zip(other, backward, strict=True)] if layer else other
        layers.append(np.concatenate([forward, backward], 1))
    return np.stack(layers)


@pytest.mark.parametrize("vocabulary", [None, "<S>\n</S>\n<UNK>\nThe\n,\nU.S.\ndogs\n!!!MAXTERMID\n"])
def test_states_of_all_layers_are_those_of_the_published_model(tmp_path, monkeypatch, capsys, vocabulary):
    monkeypatch.chdir(tmp_path)
    values = arrays()
    write(tmp_path / "published", {**values, "softmax/b": np.zeros(3)}, prefix="small_")
    if vocabulary is not None:
        (tmp_path / "published/vocab.txt").write_text(vocabulary)
    assert cli.main(["import", "checkpoint=published", "output=elmo"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not read softmax/b" in said
    assert (
        "3 are one token; 1 word split, such as U.S." if vocabulary else "each is spelled, a token per byte"
    ) in said

    loaded = lmtool.load("elmo")
    ids = [loaded.tokenizer.role("bos"), *loaded.tokenizer.encode(TEXT).tolist(), loaded.tokenizer.role("eos")]
    word_T = np.cumsum(loaded.tokenizer.starts_word[ids]) - 1
    assert word_T[-1] == len(WORDS) + 1 and (len(ids) < 30) == (vocabulary is not None)
    expected = plain_layers(values, WORDS)
    np.testing.assert_allclose(
        loaded.model(torch.tensor([ids])).hidden[0].detach().numpy(), expected[-1][word_T], atol=1e-5
    )
    assert (np.abs(expected[1]) == 0.7).any(), "no value was clipped"

    # `embed` adds the boundaries of the sentence by itself.
    words = ["embed", "checkpoint=elmo", f"text={TEXT}", "layers=all", "pooling=none", "output=vectors.parquet"]
    assert cli.main([*words, "device=cpu", "precision=fp32"]) == 0
    table = pyarrow.parquet.read_table("vectors.parquet").to_pydict()
    embedded = np.stack([table[f"layer_{number}"] for number in range(3)])
    np.testing.assert_allclose(embedded, expected[:, word_T], atol=1e-4)


def test_imported_elmo_is_finetuned(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "published", arrays())
    assert cli.main(["import", "checkpoint=published/weights.hdf5", "output=elmo"]) == 0
    rows = [f"a {'good' if number % 2 else 'bad'} day {number}\t{number % 2}" for number in range(40)]
    (tmp_path / "rows.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    words = ["finetune", "task=rows.tsv", "checkpoint=elmo", "tuning=head", "tuning.layers=scalar_mix", "name=tuned"]
    words += [
        "max_steps=3",
        "max_epochs=null",
        "device=cpu",
        "cache_dir=cache",
        "task.text=[sentence]",
        "task.label=label",
    ]
    assert cli.main(words) == 0
    assert json.loads((tmp_path / "runs/tuned/result.json").read_text())["status"] == "done"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lstm": {"use_skip_connections": False}}, "lstm.use_skip_connections=False, but model=elmo has only True"),
        ({"char_cnn": {"activation": "tanh"}}, "char_cnn.activation=tanh, but model=elmo has only relu"),
        ({"char_cnn": {"n_characters": 60}}, "char_cnn.n_characters=60, but model=elmo has only 262 or 261"),
        ({"lstm": {"dim": 7}}, "W_0 is float32 of shape \\(12, 20\\); the options need floats of shape \\(12, 28\\)"),
        ({"lstm": {"dim": "7"}}, "is not the options of an ELMo"),
        ({"lstm": {"n_layers": 3}}, "has no array RNN_0/RNN/MultiRNNCell/Cell2/LSTMCell/W_0"),
    ],
)
def test_other_variants_are_refused(tmp_path, monkeypatch, capsys, change, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "published", arrays(), {key: {**value, **change.get(key, {})} for key, value in OPTIONS.items()})
    assert cli.main(["import", "checkpoint=published", "output=elmo"]) == 2
    shown = capsys.readouterr().err
    assert re.search(message, " ".join(shown.split())) and not Path("elmo").exists()


def test_incomplete_folders_and_a_missing_library_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def refusal(checkpoint: str) -> str:
        assert cli.main(["import", f"checkpoint={checkpoint}", "output=elmo"]) == 2
        return " ".join(capsys.readouterr().err.split())

    folder = write(tmp_path / "published", {})
    assert "has no array char_embed" in refusal("published")
    (folder / "other_weights.hdf5").write_bytes(b"not HDF5")
    assert "has several models: other_weights.hdf5, weights.hdf5" in refusal("published")
    assert "has no other_options.json beside it" in refusal("published/other_weights.hdf5")
    (folder / "other_options.json").write_text("{}")
    assert "is not a complete HDF5 file" in refusal("published/other_weights.hdf5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert "requires the library h5py, which is not installed hint: pip install 'lmtool[elmo]'" in refusal(
        "published/weights.hdf5"
    )
