"""Published weights of ELMo: `lmtool import` of a folder of github.com/allenai/bilm-tf and AllenNLP.

The folder has the sizes in options.json, the weights in weights.hdf5 (a common prefix of both names is allowed), and,
if the user adds it, the vocabulary in vocab.txt. The softmax over the vocabulary is not published.

The file stores matrices as (inputs, outputs), the gates of an LSTM in the order input, cell, forget, output, and the
forget gates without the 1 that TensorFlow adds. The symbol of padding, 0, has no row, and is zeros.

Shape letters: C cell width, P width of one direction, G gates (4C).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.errors import CheckFailed, UserError
from lmtool.models.characters import SYMBOLS
from lmtool.models.pretransformer_configs import ElmoConfig
from lmtool.reporting.console import Output
from lmtool.reporting.text import count
from lmtool.resolver.commands import ImportConfig
from lmtool.system.files import user_path
from lmtool.system.terminal import counted, listing
from lmtool.tokenizers.configs import SpelledConfig
from lmtool.tokenizers.trained import from_spelled_words
from lmtool.weights.exporting import ImportedModel, write_import
from lmtool.weights.folders import read_object
from lmtool.weights.padded_model import load

WEIGHTS, OPTIONS, VOCABULARY = "weights.hdf5", "options.json", "vocab.txt"
_COPY_AGAIN = "download the options and the weights of the same model again"


@dataclass(frozen=True)
class ElmoFiles:
    """The files of a published ELMo. vocabulary: None if the folder has no vocab.txt."""

    options: Path
    weights: Path
    vocabulary: Path | None


def elmo_files(checkpoint: str) -> ElmoFiles | None:
    """Returns the files of a published ELMo, given its folder or the file with its weights; None for anything else.
    Raises UserError if the folder has several models, or no options."""
    path = user_path(checkpoint)
    is_file = path.name.endswith(WEIGHTS) and path.is_file()
    candidates = [path] if is_file else sorted(path.glob(f"*{WEIGHTS}"))
    if not candidates:
        return None
    if len(candidates) > 1:
        names = listing([candidate.name for candidate in candidates], 3)
        raise UserError(f"checkpoint={checkpoint} has several models: {names}", "set checkpoint= to one of the files")
    weights = candidates[0]
    options = weights.with_name(weights.name.removesuffix(WEIGHTS) + OPTIONS)
    if not options.is_file():
        raise UserError(f"{weights} has no {options.name} beside it", "download it from the source of the weights")
    vocabulary = weights.with_name(VOCABULARY)
    return ElmoFiles(options, weights, vocabulary if vocabulary.is_file() else None)


def import_elmo(config: ImportConfig, files: ElmoFiles) -> None:
    """Writes a checkpoint with model=elmo, reads it back, and prints what it contains. Raises UserError if the files
    cannot be read or have parts that the model lacks, and CheckFailed if the checkpoint is read back with other
    values."""
    arrays = read_arrays(files.weights)
    words = [] if files.vocabulary is None else _words(files.vocabulary)
    tokenizer, unreachable = from_spelled_words(SpelledConfig(), words)
    model = model_of(files.options, tokenizer.vocab_size)
    tensors, unread = tensors_of(model, arrays, files.weights)
    source: JsonObject = {
        "checkpoint": config.checkpoint,
        "revision": None,
        "file": files.weights.name,
        "ignored_keys": unread,
    }
    folder = user_path(config.output)
    write_import(ImportedModel(tensors, model, tokenizer, source), folder)
    reloaded = load(str(folder), offline=True).model.parts.state_dict()
    output = Output()
    values = count(sum(tensor.numel() for tensor in tensors.values()))
    output.line(f"{folder} · model=elmo · {values} parameters from {files.weights.name}")
    examples = f", such as {', '.join(unreachable[:3])}" if unreachable else ""
    listed = f"{len(words) - len(unreachable):,} are one token; {counted(len(unreachable), 'word')} split{examples}"
    spelled = f"each is spelled, a token per byte: set a large max_length, or add the published {VOCABULARY}"
    output.rows(
        [
            ("words", spelled if files.vocabulary is None else listed),
            ("text", "split at white space and around punctuation, between <S> and </S>"),
            ("not read", listing(unread, 3) if unread else "nothing"),
        ]
    )
    different = [name for name, tensor in tensors.items() if not torch.equal(reloaded[name], tensor)]
    if different:
        raise CheckFailed(
            f"{folder} differs from the file in {listing(different, 3)}", "keep the file, and import again"
        )


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an HDF5 file by their path in it. Raises UserError if h5py is not installed, or if the file
    is damaged."""
    try:
        import h5py  # needed only here
    except ModuleNotFoundError as problem:
        raise UserError(
            f"{path}: reading it requires the library h5py, which is not installed", "pip install 'lmtool[elmo]'"
        ) from problem
    arrays: dict[str, np.ndarray] = {}

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[name] = item[()]

    try:
        with h5py.File(path, "r") as file:
            file.visititems(add)
    except (OSError, RuntimeError) as problem:
        raise UserError(f"{path} is not a complete HDF5 file: {problem}", "download the file again") from problem
    return arrays


def model_of(path: Path, vocab_size: int) -> ElmoConfig:
    """Returns the model that options.json describes. vocab_size: the number of entries of the tokenizer. Raises
    UserError for a variant that model=elmo does not have, or an invalid file."""
    options = read_object(path)
    try:
        lstm, words = options["lstm"], options["char_cnn"]
        supported = {
            "lstm.use_skip_connections": (lstm.get("use_skip_connections", False), (True,)),
            "bidirectional": (options.get("bidirectional", True), (True,)),
            "char_cnn.activation": (words["activation"], ("relu",)),
            # Training has one symbol less, because it needs no padding of texts.
            "char_cnn.n_characters": (words["n_characters"], (SYMBOLS, SYMBOLS - 1)),
        }
        for key, (value, values) in supported.items():
            if value not in values:
                raise UserError(
                    f"{path}: {key}={value}, but model=elmo has only {' or '.join(map(str, values))}",
                    "use the weights of the original model, or of its smaller sizes",
                )
        return ElmoConfig(
            vocab_size=vocab_size,
            num_layers=lstm["n_layers"],
            hidden_size=2 * lstm["projection_dim"],
            cell_size=lstm["dim"],
            cell_clip=lstm.get("cell_clip") or None,
            projection_clip=lstm.get("proj_clip") or None,
            word_length=words["max_characters_per_token"],
            character_size=words["embedding"]["dim"],
            filters=tuple((width, number) for width, number in words["filters"]),
            highways=words.get("n_highway") or 0,
            start_token=True,
        )
    except KeyError as problem:
        raise UserError(f"{path} has no key {problem}", _COPY_AGAIN) from problem
    except (AttributeError, TypeError, ValidationError, ValueError) as problem:
        raise UserError(
            f"{path} is not the options of an ELMo: {str(problem).splitlines()[-1]}", _COPY_AGAIN
        ) from problem


def tensors_of(config: ElmoConfig, arrays: Mapping[str, np.ndarray], path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors under lmtool's names, and the names of the arrays that were not read. Raises UserError, which
    names the array, if an array is missing or has another shape. path: the file, for messages."""
    unread, tensors = dict(arrays), dict[str, Tensor]()

    def take(name: str, *shape: int) -> Tensor:
        array = unread.pop(name, None)
        if array is None:
            raise UserError(f"{path} has no array {name}", _COPY_AGAIN)
        if array.shape != shape or array.dtype.kind != "f":
            message = (
                f"{path}: {name} is {array.dtype} of shape {array.shape}; the options need floats of shape {shape}"
            )
            raise UserError(message, _COPY_AGAIN)
        return torch.from_numpy(array.astype(np.float32))

    def add(name: str, tensor: Tensor) -> None:
        tensors[f"backbone.{name}"] = tensor.contiguous()

    def add_linear(name: str, weight: str, bias: str, inputs: int, outputs: int) -> None:
        add(f"{name}.weight", take(weight, inputs, outputs).T)
        add(f"{name}.bias", take(bias, outputs))

    size, features = config.character_size, sum(number for _, number in config.filters)
    add("embed.characters.weight", torch.cat([torch.zeros(1, size), take("char_embed", SYMBOLS - 1, size)]))
    for number, (width, outputs) in enumerate(config.filters):
        weight = take(f"CNN/W_cnn_{number}", 1, width, size, outputs)
        add(f"embed.convolutions.{number}.weight", weight[0].permute(2, 1, 0))
        add(f"embed.convolutions.{number}.bias", take(f"CNN/b_cnn_{number}", outputs))
    for number in range(config.highways):
        for part, published in (("transform", "transform"), ("gate", "carry")):
            names = [f"CNN_high_{number}/{letter}_{published}" for letter in ("W", "b")]
            add_linear(f"embed.highways.{number}.{part}", names[0], names[1], features, features)
    P, C = config.hidden_size // 2, config.cell_size
    add_linear("embed.project", "CNN_proj/W_proj", "CNN_proj/b_proj", features, P)
    for layer in range(config.num_layers):
        for direction, name in enumerate(("forward_lstm", "backward_lstm")):
            cell, target = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell", f"layers.{layer}.{name}"
            weight_GI = _reordered(take(f"{cell}/W_0", 2 * P, 4 * C).T)
            bias_G = _reordered(take(f"{cell}/B", 4 * C))
            bias_G[C : 2 * C] += 1.0
            add(f"{target}.weight_ih", weight_GI[:, :P])
            add(f"{target}.weight_hh", weight_GI[:, P:])
            add(f"{target}.bias", bias_G)
            add(f"{target}.weight_hr", take(f"{cell}/W_P_0", C, P).T)
    return tensors, sorted(unread)


def _reordered(gates: Tensor) -> Tensor:
    read, cell, forget, output = gates.chunk(4)
    return torch.cat([read, forget, cell, output])


def _words(path: Path) -> list[str]:
    """Returns the distinct words, one a line, without the special tokens."""
    special = {*SpelledConfig().specials.values(), "!!!MAXTERMID", ""}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path} cannot be read: {problem}", "use a text file in UTF-8 with a word a line") from problem
    return [word for word in dict.fromkeys(map(str.strip, lines)) if word not in special]
