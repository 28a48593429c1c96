"""Reads the tensors of a checkpoint from a Hugging Face folder or a run of lmtool, and lists keys and files of a folder
that are not read."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lmtool.config.base import JsonObject
from lmtool.config.registry import builder_module, entry_of, lookup
from lmtool.data.configs import FORMATS
from lmtool.data.formats import layout_difference
from lmtool.errors import UserError
from lmtool.learners.generation.configs import GENERATION
from lmtool.models.configs import ModelConfig
from lmtool.runs.checkpoints import read_weights
from lmtool.runs.finding import find
from lmtool.system.terminal import listing
from lmtool.tokenizers.configs import TOKENIZER_FILES
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.types import part_of
from lmtool.weights.base import Base, digest, saved_base
from lmtool.weights.folders import (
    CONFIG,
    SETTINGS,
    WEIGHTS,
    HFFolder,
    fetch_file,
    hf_folder,
    read_object,
    read_settings,
    weight_file,
)
from lmtool.weights.sentence_encoders import MODULES, PROMPTS, TRANSFORMER_FILES
from lmtool.weights.task_heads import CLASSIFIER, head_of_class, is_multi_label


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a `.bin` file, by name. torch's restricted unpickler builds only tensors and containers, so
    no code in the file is executed. Raises UserError if the file contains anything else or is damaged."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as reason:  # torch.load raises many kinds of errors
        text = " ".join(str(reason).split())[:160]
        raise UserError(
            f"{path} is not a file with only tensors: {text}",
            "use a folder with model.safetensors, or copy the file again",
        ) from reason
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path} is not a dictionary from names to tensors", "use a folder with model.safetensors")
    return {str(name): tensor for name, tensor in content.items()}


# The rest of a Hugging Face folder: keys and files that lmtool does not read are reported, unless they are known to
# have no effect. Keys that change the function of the model raise an error in its family or in the tokenizer's class.


# Keys that lmtool's tokenizer classes read; then keys about origin, padding and decoding, which do not change the ids.
_TOKENIZER_KEYS_TEXT = """
tokenizer_class added_tokens_decoder additional_special_tokens extra_special_tokens do_lower_case strip_accents
tokenize_chinese_chars add_prefix_space keep_accents legacy extra_ids model_max_length split_special_tokens
model_input_names name_or_path special_tokens_map_file tokenizer_file vocab_file merges_file use_fast processor_class
padding_side pad_token_type_id pad_to_multiple_of backend is_local local_files_only clean_up_tokenization_spaces
spaces_between_special_tokens trim_offsets errors max_length stride truncation_strategy max_len transformers_version
device from_slow model_specific_special_tokens
"""
_TOKENIZER_KEYS = frozenset(_TOKENIZER_KEYS_TEXT.split())
_TOKENIZER_VALUES: dict[str, tuple[object, ...]] = {
    "truncation_side": ("right",),
    "add_bos_token": (False,),
    "add_eos_token": (False,),
    "sp_model_kwargs": ({},),
    "never_split": ([],),
    "init_inputs": ([],),
    "do_basic_tokenize": (True,),
    "remove_space": (True,),
    "vocab_type": ("gpt2", "spm"),
    "split_by_punct": (False,),
}
"""Keys of tokenizer_config.json that have no effect if they have one of these values."""
_GENERATION_KEYS_TEXT = """
_from_model_config transformers_version bos_token_id pad_token_id decoder_start_token_id use_cache cache_implementation
output_attentions output_hidden_states output_scores output_logits return_dict_in_generate trust_remote_code
"""
_GENERATION_KEYS = frozenset(_GENERATION_KEYS_TEXT.split())
_GENERATION_DEFAULTS: JsonObject = {
    "max_length": 20,
    "max_new_tokens": 20,
    "min_length": 0,
    "min_new_tokens": 0,
    "do_sample": False,
    "num_beams": 1,
    "early_stopping": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_return_sequences": 1,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""Defaults of transformers' GenerationConfig. Older folders have these keys in config.json. `lmtool generate` has
separate settings."""
_OTHER_FORMATS = (
    "*.safetensors pytorch_model*.bin tf_model.h5 flax_model.msgpack rust_model.ot *.gguf *.onnx onnx openvino coreml "
    "original"
)
_DOCUMENTATION = "*.md LICENSE* NOTICE* .* *.png *.jpg *.svg *.gif *.pdf requirements.txt"
_TRAINING_FILES = (
    "training_args.bin trainer_state.json optimizer* scheduler* scaler* rng_state* runs logs *.log *results*.json "
    "checkpoint-*"
)
_KNOWN_FILES = (
    *(CONFIG, GENERATION, *TOKENIZER_FILES, *WEIGHTS, MODULES, PROMPTS, *TRANSFORMER_FILES),
    *f"{_OTHER_FORMATS} {_DOCUMENTATION} {_TRAINING_FILES}".split(),
)
"""Patterns of the files and folders that lmtool reads or that have no effect."""
_MAX_LISTED = 8


def ignored_keys(folder: HFFolder, generates_text: bool) -> tuple[str, ...]:
    """Lists the keys and files of a folder that lmtool does not read: one line per file with ignored keys, and one with
    the ignored files. A key of config.json counts as read if it was accessed before this call. generates_text: whether
    the model generates text, so that generation settings are relevant. Raises UserError if a file cannot be read."""
    generation, ignored = folder.path / GENERATION, folder.config.ignored
    keys = {
        CONFIG: [name for name in ignored if name not in _GENERATION_DEFAULTS],
        SETTINGS: _ignored_tokenizer_keys(read_settings(folder.path)),
    }
    if generates_text and generation.is_file():  # transformers then ignores generation settings in config.json
        keys[GENERATION] = _ignored_generation_keys(read_object(generation), folder)
    elif generates_text:
        keys[CONFIG] += _multiple_end_tokens(folder.config) + _changed_settings(folder.config)
    if folder.revision is None:  # only the files that lmtool reads are downloaded from the hub
        keys["files"] = _ignored_files(folder, generates_text)
    return tuple(f"{name}: {listing(names, _MAX_LISTED)}" for name, names in keys.items() if names)


def layout_warnings(tokenizer: Tokenizer, model: ModelConfig) -> tuple[str, ...]:
    """Returns a warning if tokenizer.json adds other special tokens to a text than lmtool does. lmtool adds none to the
    prompt of a decoder."""
    name = "plain" if model.architecture == "decoder" else model.text_format
    if not set(FORMATS[name].roles) <= set(tokenizer.roles):
        return ()
    reason = layout_difference(tokenizer, name)
    return () if reason is None else (f"tokenizer.json: special tokens around texts, {reason}",)


def ignored_warnings(checkpoint: str, ignored: Sequence[str]) -> list[str]:
    """Returns a warning that lists the ignored keys and files of a checkpoint, if there are any."""
    return [f"checkpoint={checkpoint} has parts that lmtool does not read: {'; '.join(ignored)}"] if ignored else []


def _ignored_tokenizer_keys(settings: Mapping[str, object]) -> list[str]:
    return [
        key
        for key, value in settings.items()
        if key not in _TOKENIZER_KEYS
        and value is not None
        and value not in _TOKENIZER_VALUES.get(key, ())
        and not (key.endswith("_token") and isinstance(value, str | dict))
    ]


def _ignored_generation_keys(settings: Mapping[str, object], folder: HFFolder) -> list[str]:
    vocab_size = folder.config.get("vocab_size")
    set_keys = [key for key, value in settings.items() if key not in _GENERATION_KEYS and value is not None]
    names = [key for key in set_keys if key not in _GENERATION_DEFAULTS and key != "eos_token_id"]
    names += _multiple_end_tokens(settings)
    changed_settings = _changed_settings(settings)
    return names + [name for name in changed_settings if not _suppresses_unused_rows(name, settings, vocab_size)]


def _multiple_end_tokens(settings: Mapping[str, object]) -> list[str]:
    """lmtool ends a text only at one token."""
    end = settings.get("eos_token_id")
    return [] if end is None or isinstance(end, int) else [f"eos_token_id={end}"]


def _suppresses_unused_rows(name: str, settings: Mapping[str, object], vocab_size: object) -> bool:
    """Whether a setting suppresses exactly the last ids, which have no token; lmtool never generates them."""
    tokens = settings.get("suppress_tokens")
    if not name.startswith("suppress_tokens") or not isinstance(tokens, list) or not isinstance(vocab_size, int):
        return False
    return tokens == list(range(vocab_size - len(tokens), vocab_size))


def _changed_settings(settings: Mapping[str, object]) -> list[str]:
    return [
        f"{key}={json.dumps(settings[key])[:30]}"
        for key, default in _GENERATION_DEFAULTS.items()
        if key in settings and settings[key] is not None and settings[key] != default
    ]


def _ignored_files(folder: HFFolder, generates_text: bool) -> list[str]:
    """The module folders of a sentence encoder are read."""
    modules = folder.path / MODULES
    patterns = [*_KNOWN_FILES, *(["[0-9]*_*"] if modules.is_file() or (folder.path / "1_Pooling").is_dir() else [])]
    patterns += [] if generates_text else ["chat_template*"]
    names = sorted(path.name for path in folder.path.iterdir())
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)]


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, under lmtool's names. folder: that of the checkpoint, which also has the tokenizer
    files. origin: the value of `checkpoint=` that the user gave. ignored: keys and files of a Hugging Face folder that
    are not read (`ignored_keys`). revision: the commit on the hub; None for a local folder. merged: whether the tensors
    were computed by merging a tuned checkpoint, so that no file contains them."""

    tensors: dict[str, Tensor]
    folder: Path
    origin: str
    ignored: tuple[str, ...] = ()
    revision: str | None = None
    merged: bool = False


def group_by_part(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Groups tensors by the part of the model to which they belong. The order of the tensors does not change."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(part_of(name), {})[name] = tensor
    return parts


def read(checkpoint: str, offline: bool = False, tuned_folders: tuple[Path, ...] = ()) -> Weights:
    """Reads the weights of a checkpoint, on the CPU. For a tuned checkpoint, they include those of its base. Raises
    UserError if they are missing, damaged or unsupported. tuned_folders: the tuned checkpoints whose base is this one,
    directly or through others; a checkpoint that is its own base is an error."""
    hugging_face = hf_folder(checkpoint, offline)
    if hugging_face is None:
        folder = find(checkpoint)
        tensors, base = read_weights(folder), saved_base(folder)
        if base is None:
            return Weights(tensors, folder, checkpoint)
        if folder.resolve() in tuned_folders:
            raise UserError(f"checkpoint={checkpoint} is its own base", "copy the checkpoint again")
        base_weights = read_base(base, tensors, checkpoint, offline, (*tuned_folders, folder.resolve()))
        return Weights({**base.base_tensors(base_weights.tensors, tensors), **tensors}, folder, checkpoint)
    section = hugging_face.model_section()  # raises for unsupported variants, and marks its keys as read
    try:
        tensors = to_lmtool_names(hugging_face, read_hf(hugging_face, offline))
    except UserError as error:
        raise UserError(f"checkpoint={checkpoint}: {error.message}", error.hint) from error
    output = tensors.get(f"heads.{CLASSIFIER}.output.weight")
    if output is not None and is_multi_label(hugging_face.config):
        # transformers decides at a probability of .5.
        tensors[f"heads.{CLASSIFIER}.thresholds"] = torch.full((len(output),), 0.5, dtype=torch.float64)
    entry = lookup("model", section["name"])
    encoder = entry is None or not issubclass(entry.config, ModelConfig) or entry.config.architecture == "encoder"
    ignored = ignored_keys(hugging_face, not encoder and head_of_class(hugging_face.config) is None)
    return Weights(to_fp32(tensors), hugging_face.path, checkpoint, ignored, hugging_face.revision)


def read_base(
    base: Base,
    tuned_names: Collection[str],
    checkpoint: str,
    offline: bool = False,
    tuned_folders: tuple[Path, ...] = (),
) -> Weights:
    """Reads the complete weights of the base of a tuned checkpoint. tuned_names: tensors that the tuned checkpoint
    stores itself. tuned_folders: see `read`. Raises UserError if the base does not exist or has changed."""
    address = base.address()
    if address is None:
        raise UserError(
            f"checkpoint={checkpoint} needs the weights of {base.checkpoint}, on which it was tuned, but there is no "
            f"{' and no '.join(base.addresses)}",
            f"restore the folder, or link to its new location: ln -s FOLDER {base.checkpoint}",
        )
    try:
        weights = read(address, offline, tuned_folders)
    except UserError as error:
        message = f"checkpoint={checkpoint} needs the weights that it was tuned on: {error.message}"
        raise UserError(message, error.hint) from error
    base.require_same(base.base_tensors(weights.tensors, tuned_names), address, checkpoint)
    return weights


def base_of_weights(address: str, weights: Weights, names: Collection[str], tokenizer: Tokenizer | None) -> Base:
    """Describes the base of a new checkpoint. names: the tensors that it leaves to the weights at `address`, from which
    it started."""
    path = None if weights.revision is not None else str(weights.folder.resolve())
    parts = tuple(sorted({part_of(name) for name in names}))
    sha256 = digest({name: weights.tensors[name] for name in names})
    fingerprint = "" if tokenizer is None else tokenizer.fingerprint
    return Base(address, path, weights.revision, parts, sha256, fingerprint, frozenset(names))


def to_lmtool_names(folder: HFFolder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the tensors of a Hugging Face folder to lmtool's names. Tensors that the family does not know keep their
    names."""
    return folder.family().from_hf(tensors, folder.config)


def to_hf_names(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames lmtool's tensors to transformers' names. Tensors that transformers does not have keep their names."""
    renamed: dict[str, Tensor] = builder_module(entry_of(config)).HF_FORMAT.to_hf(tensors, config)
    return renamed


def read_hf(folder: HFFolder, offline: bool = False) -> dict[str, Tensor]:
    """Reads the tensors of a Hugging Face folder, under transformers' names, from one file or from several shards."""
    file_or_index = weight_file(folder, offline)
    if not file_or_index.name.endswith(".index.json"):
        return read_file(file_or_index)
    shard_by_tensor = shards_of_index(file_or_index)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(shard_by_tensor.values())):
        path = fetch_file(folder, shard, offline)
        assert path is not None
        tensors.update(read_file(path))
    missing = sorted(set(shard_by_tensor) - set(tensors))
    if missing:
        raise UserError(f"{file_or_index}: none of its files contains {listing(missing, 1)}", "copy the folder again")
    return tensors


def read_file(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors or `.bin` file. Raises UserError if the file is damaged or does not fit in
    memory."""
    if path.suffix != ".safetensors":
        return read_pickled(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a complete safetensors file: {error}", "copy the file again from its source"
        ) from error
    except MemoryError as error:  # the file is mapped into memory, which may be limited
        size = path.stat().st_size / 2**30
        raise UserError(
            f"{path} has {size:.1f} GiB, which exceeds the memory limit of this process",
            "raise the limit (`ulimit -v`), or, if the model is smaller than this, copy the file again",
        ) from error


def to_fp32(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts tensors in half precision to fp32, the precision of weights in training."""
    return {
        name: tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        for name, tensor in tensors.items()
    }


def shards_of_index(path: Path) -> dict[str, str]:
    """Reads the index of a sharded checkpoint. Returns the name of the file that contains each tensor."""
    names = read_object(path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{path} has a weight_map that does not name files", "copy the file again")
    return names
