"""The tensors of a checkpoint: of a published folder or of a run of lmtool."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmtool.config.checkpoint import find
from lmtool.config.saved import JsonObject
from lmtool.config.tables import builder_module, entry_of, lookup
from lmtool.data.configs import FORMATS
from lmtool.data.formats import layout_difference
from lmtool.errors import UserError
from lmtool.models.configs import ModelConfig
from lmtool.runs.checkpoints import read_weights
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.folders import (
    CONFIG,
    SETTINGS,
    TOKENIZER,
    WEIGHTS,
    HFFolder,
    fetched,
    hf_folder,
    read_object,
    read_settings,
    weight_file,
)
from lmtool.weights.loading import Base, saved_base
from lmtool.weights.sentence_encoders import MODULES, PROMPTS, READING
from lmtool.weights.task_heads import CLASSIFIER, head_of_class, is_multi_label


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.bin` file, by name. torch's restricted reader builds tensors and containers and refuses
    everything else, so nothing in the file is executed. UserError if it contains anything else, or is damaged."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as reason:  # the errors of a reader of pickles, whose module is not imported here
        words = " ".join(str(reason).split())[:160]
        raise UserError(
            f"{path}: no file of tensors alone: {words}", "give a folder with model.safetensors, or copy it again"
        ) from reason
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path}: it holds more than tensors by name", "give a folder with model.safetensors")
    return {str(name): tensor for name, tensor in content.items()}


# Parts of a published folder that lmtool does not read and that might matter: keys of its JSON files, and files.
#
# A key that changes what a model computes is rejected by its family or by the tokenizer's class; the keys listed here
# may matter all the same.


GENERATION = "generation_config.json"
_TOKENIZER_KEYS = frozenset(
    {
        # Read, by the classes that have them.
        "tokenizer_class", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "do_lower_case",
        "strip_accents", "tokenize_chinese_chars", "add_prefix_space", "keep_accents", "legacy", "extra_ids",
        "model_max_length", "split_special_tokens", "model_input_names",
        # Where a tokenizer came from, how it pads, and how ids become text.
        "name_or_path", "special_tokens_map_file", "tokenizer_file", "vocab_file", "merges_file", "use_fast",
        "processor_class", "padding_side", "pad_token_type_id", "pad_to_multiple_of", "backend", "is_local",
        "local_files_only", "clean_up_tokenization_spaces", "spaces_between_special_tokens", "trim_offsets", "errors",
        "max_length", "stride", "truncation_strategy", "max_len", "transformers_version", "device", "from_slow",
        "model_specific_special_tokens",
    }
)  # fmt: skip
_TOKENIZER_VALUES: dict[str, tuple[Any, ...]] = {
    "truncation_side": ("right",), "add_bos_token": (False,), "add_eos_token": (False,), "sp_model_kwargs": ({},),
    "never_split": ([],), "init_inputs": ([],), "do_basic_tokenize": (True,), "remove_space": (True,),
    "vocab_type": ("gpt2", "spm"), "split_by_punct": (False,),
}  # fmt: skip
"""Keys without effect where they have one of these values."""
_GENERATION_KEYS = frozenset(
    {
        "_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id",
        "use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "output_scores",
        "output_logits", "return_dict_in_generate", "trust_remote_code",
    }
)  # fmt: skip
_GENERATION_DEFAULTS: JsonObject = {
    "max_length": 20, "max_new_tokens": 20, "min_length": 0, "min_new_tokens": 0, "do_sample": False, "num_beams": 1,
    "early_stopping": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "num_return_sequences": 1, "diversity_penalty": 0.0, "num_beam_groups": 1, "remove_invalid_values": False,
    "renormalize_logits": False, "forced_bos_token_id": None, "forced_eos_token_id": None, "bad_words_ids": None,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
"""What transformers' generate does where nothing else is said (GenerationConfig). Older folders say it in config.json;
`lmtool generate` has settings of its own."""
_FILES = (
    CONFIG, GENERATION, *TOKENIZER, *WEIGHTS, MODULES, PROMPTS, *READING,
    # Weights in other formats.
    "*.safetensors", "pytorch_model*.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "*.gguf", "*.onnx",
    "onnx", "openvino", "coreml", "original",
    # Documentation and leftovers of training.
    "*.md", "LICENSE*", "NOTICE*", ".*", "*.png", "*.jpg", "*.svg", "*.gif", "*.pdf", "training_args.bin",
    "trainer_state.json", "optimizer*", "scheduler*", "scaler*", "rng_state*", "runs", "logs", "*.log",
    "*results*.json", "checkpoint-*", "requirements.txt",
)  # fmt: skip
"""Files and folders that are read, or that change nothing."""
_MOST = 8


def ignored_keys(folder: HFFolder, generates_text: bool) -> tuple[str, ...]:
    """One line per file with its ignored keys; ignored files last. The keys of config.json are those that have not been
    read before. generates_text: whether generation settings matter. UserError for a file that cannot be read."""
    generation, of_model = folder.path / GENERATION, folder.config.ignored
    keys = {
        CONFIG: [name for name in of_model if name not in _GENERATION_DEFAULTS],
        SETTINGS: _of_tokenizer(read_settings(folder.path)),
    }
    if generates_text and generation.is_file():  # transformers reads no other settings of generation then
        keys[GENERATION] = _of_generation(read_object(folder.checkpoint, generation), folder)
    elif generates_text:
        keys[CONFIG] += _changed(folder.config)
    if folder.revision is None:  # of the hub only those files are here that are read
        keys["files"] = _files(folder, generates_text)
    return tuple(f"{name}: {_these(names)}" for name, names in keys.items() if names)


def layout_warnings(tokenizer: Tokenizer, model: ModelConfig) -> tuple[str, ...]:
    """A warning if tokenizer.json adds other special tokens than lmtool does; for a model that generates text, whose
    prompts get none."""
    name = "plain" if model.architecture == "decoder" else model.text_format
    if not set(FORMATS[name].roles) <= set(tokenizer.roles):
        return ()
    reason = layout_difference(tokenizer, name)
    return () if reason is None else (f"tokenizer.json: its layout of texts, {reason}",)


def notes(checkpoint: str, ignored: Sequence[str]) -> list[str]:
    """A warning if anything is ignored."""
    return [f"checkpoint={checkpoint}: not read: {'; '.join(ignored)}"] if ignored else []


def _of_tokenizer(settings: Mapping[str, object]) -> list[str]:
    """Keys of any token are read."""
    return [
        key
        for key, value in settings.items()
        if key not in _TOKENIZER_KEYS
        and value is not None
        and value not in _TOKENIZER_VALUES.get(key, ())
        and not (key.endswith("_token") and isinstance(value, str | dict))
    ]


def _of_generation(settings: Mapping[str, object], folder: HFFolder) -> list[str]:
    ends, rows = settings.get("eos_token_id"), folder.config.get("vocab_size")
    set_keys = [key for key, value in settings.items() if key not in _GENERATION_KEYS and value is not None]
    names = [key for key in set_keys if key not in _GENERATION_DEFAULTS and key != "eos_token_id"]
    names += [] if ends is None or isinstance(ends, int) else [f"eos_token_id={ends}"]
    return names + [name for name in _changed(settings) if not _is_past_vocabulary(name, settings, rows)]


def _is_past_vocabulary(name: str, settings: Mapping[str, object], rows: Any) -> bool:
    """Whether suppressed tokens are the last rows of the table, which lmtool never generates."""
    tokens = settings.get("suppress_tokens")
    if not name.startswith("suppress_tokens") or not isinstance(tokens, list) or not isinstance(rows, int):
        return False
    return tokens == list(range(rows - len(tokens), rows))


def _changed(settings: Mapping[str, object]) -> list[str]:
    """Generation settings that differ from the default."""
    return [
        f"{key}={json.dumps(settings[key])[:30]}"
        for key, default in _GENERATION_DEFAULTS.items()
        if key in settings and settings[key] is not None and settings[key] != default
    ]


def _files(folder: HFFolder, generates_text: bool) -> list[str]:
    """A sentence encoder's module folders are read."""
    modules = folder.path / MODULES
    known = [*_FILES, *(["[0-9]*_*"] if modules.is_file() or (folder.path / "1_Pooling").is_dir() else [])]
    known += [] if generates_text else ["chat_template*"]
    names = sorted(path.name for path in folder.path.iterdir())
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in known)]


def _these(names: Iterable[str]) -> str:
    items = list(names)
    more = f" and {len(items) - _MOST} more" if len(items) > _MOST else ""
    return ", ".join(items[:_MOST]) + more


@dataclass(frozen=True)
class Weights:
    """Tensors under our names. folder: also contains the tokenizer files. origin: the `checkpoint=` that named them.
    ignored: what is not read of a published folder (`ignored_keys`). revision: the commit on the hub. merged:
    whether they were computed from a tuned checkpoint, so that no file contains them."""

    tensors: dict[str, Tensor]
    folder: Path
    origin: str
    ignored: tuple[str, ...] = ()
    revision: str | None = None
    merged: bool = False


def read(checkpoint: str, offline: bool = False, tuned: tuple[Path, ...] = ()) -> Weights:
    """The weights that `checkpoint=` names, on the CPU; for a tuned run including its base. tuned: the checkpoints that
    this is the base of. UserError if they are missing, damaged or unreadable."""
    folder_on_disk = hf_folder(checkpoint, offline)
    if folder_on_disk is None:
        folder = find(checkpoint)
        own_tensors, base = read_weights(folder), saved_base(folder)
        if base is None:
            return Weights(own_tensors, folder, checkpoint)
        if folder.resolve() in tuned:
            raise UserError(f"checkpoint={checkpoint} is its own base", "copy the checkpoint again")
        base_weights = read_base(base, own_tensors, checkpoint, offline, (*tuned, folder.resolve()))
        return Weights({**base.base_tensors(base_weights.tensors, own_tensors), **own_tensors}, folder, checkpoint)
    section = folder_on_disk.model_section()  # a variant that we do not compute is refused here, and its keys are read
    try:
        tensors = our_names(folder_on_disk, read_hf(folder_on_disk, offline))
    except UserError as error:
        raise UserError(f"checkpoint={checkpoint}: {error.message}", error.hint) from error
    output = tensors.get(f"heads.{CLASSIFIER}.output.weight")
    if output is not None and is_multi_label(folder_on_disk.config):
        tensors[f"heads.{CLASSIFIER}.thresholds"] = torch.full((len(output),), 0.5, dtype=torch.float64)
    entry = lookup("model", section["name"])
    architecture = getattr(entry.config, "architecture", "encoder") if entry is not None else "encoder"
    ignored = ignored_keys(folder_on_disk, architecture != "encoder" and head_of_class(folder_on_disk.config) is None)
    return Weights(wide(tensors), folder_on_disk.path, checkpoint, ignored, folder_on_disk.revision)


def read_base(
    base: Base, own_names: Collection[str], checkpoint: str, offline: bool = False, tuned: tuple[Path, ...] = ()
) -> Weights:
    """The complete weights that a tuned checkpoint started from. own_names: names of the tensors it has itself.
    checkpoint: its name in errors. UserError if its base is gone or has changed."""
    address = base.address()
    if address is None:
        raise UserError(
            f"checkpoint={checkpoint} holds what was tuned of {base.checkpoint} alone, and that is gone: "
            f"{' and '.join(base.addresses)}",
            f"bring it back, or leave a link to where it is now: ln -s FOLDER {base.checkpoint}",
        )
    try:
        weights = read(address, offline, tuned)
    except UserError as error:
        why = f"checkpoint={checkpoint} needs the weights that it was tuned on: {error.message}"
        raise UserError(why, error.hint) from error
    base.require_same(base.base_tensors(weights.tensors, own_names), address, checkpoint)
    return weights


def our_names(folder: HFFolder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A published folder's tensors under our names; those that lmtool lacks keep theirs."""
    tensors_by_name: dict[str, Tensor] = folder.family().from_hf(tensors, folder.config)
    return tensors_by_name


def their_names(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under transformers' names; those that transformers lacks keep ours. config: of the model."""
    renamed: dict[str, Tensor] = builder_module(entry_of(config)).to_hf(tensors, config)
    return renamed


def read_hf(folder: HFFolder, offline: bool = False) -> dict[str, Tensor]:
    """A published folder's tensors under their own names, from one file or several shards."""
    first = weight_file(folder, offline)
    if not first.name.endswith(".index.json"):
        return read_file(first)
    names = shards_of_index(first)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(names.values())):
        path = fetched(folder, shard, offline)
        assert path is not None
        tensors.update(read_file(path))
    missing = sorted(set(names) - set(tensors))
    if missing:
        raise UserError(f"{first}: {missing[0]} (and {len(missing) - 1} more) is in none of its files", "copy it again")
    return tensors


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. UserError if it is damaged."""
    if path.suffix != ".safetensors":
        return read_pickled(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: no whole safetensors file: {error}", "copy it again from where it came") from error
    except MemoryError as error:  # its pages are mapped into the process's memory, which a limit may bound
        size = path.stat().st_size / 2**30
        raise UserError(
            f"{path}: {size:.1f} GiB do not fit into the memory that this process may use",
            "raise its memory limit (`ulimit -v`), or copy the file again if the model is smaller than that",
        ) from error


def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Half precision as fp32, in which training keeps weights; others unchanged."""
    return {
        name: tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        for name, tensor in tensors.items()
    }


def shards_of_index(path: Path) -> dict[str, str]:
    """The file of each tensor, from the index of shards."""
    try:
        names: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path}: no index of files: {error!r}", "copy it again") from error
    if not isinstance(names, dict) or not _are_text(names.values()):
        raise UserError(f"{path}: its weight_map does not name files", "copy it again")
    return names


def _are_text(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)
