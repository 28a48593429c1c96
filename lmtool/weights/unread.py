"""What a published folder holds that lmtool neither reads nor knows to be without effect: keys of its JSON files, and
files.

A key that decides what a model computes is refused by its family, or by the tokenizer's class; what is listed here may
mean something all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from lmtool.data.configs import FORMATS
from lmtool.data.formats import layout_difference
from lmtool.models.configs import ModelConfig
from lmtool.tokenizers.tokenizer import Tokenizer
from lmtool.weights.folders import CONFIG, SETTINGS, TOKENIZER, WEIGHTS, PublishedFolder, read_object, read_settings
from lmtool.weights.sentence_encoders import MODULES, PROMPTS, READING

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
_GENERATION_DEFAULTS: dict[str, Any] = {
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
    # Weights again, for others.
    "*.safetensors", "pytorch_model*.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "*.gguf", "*.onnx",
    "onnx", "openvino", "coreml", "original",
    # For people, and what a training left.
    "*.md", "LICENSE*", "NOTICE*", ".*", "*.png", "*.jpg", "*.svg", "*.gif", "*.pdf", "training_args.bin",
    "trainer_state.json", "optimizer*", "scheduler*", "scaler*", "rng_state*", "runs", "logs", "*.log",
    "*results*.json", "checkpoint-*", "requirements.txt",
)  # fmt: skip
"""Files and folders that are read, or that change nothing."""
_MOST = 8


def unread(folder: PublishedFolder, writes: bool) -> tuple[str, ...]:
    """A line a file, with its keys; the files last. The keys of config.json are those that nobody asked for before.
    writes: whether the model writes text, so that settings of generation mean something. UserError for a file that
    cannot be read."""
    generation, of_model = folder.path / GENERATION, folder.config.ignored
    keys = {
        CONFIG: [name for name in of_model if name not in _GENERATION_DEFAULTS],
        SETTINGS: _of_tokenizer(read_settings(folder.path)),
    }
    if writes and generation.is_file():  # transformers reads no other settings of generation then
        keys[GENERATION] = _of_generation(read_object(folder.checkpoint, generation), folder)
    elif writes:
        keys[CONFIG] += _changed(folder.config)
    if folder.revision is None:  # of the hub only those files are here that are read
        keys["files"] = _files(folder, writes)
    return tuple(f"{name}: {_these(names)}" for name, names in keys.items() if names)


def unread_layout(tokenizer: Tokenizer, model: ModelConfig) -> tuple[str, ...]:
    """That a tokenizer.json puts other tokens around texts than lmtool does, if so; of a model that writes text, which
    stands there as it is."""
    name = "plain" if model.architecture == "decoder" else model.text_format
    if not set(FORMATS[name].roles) <= set(tokenizer.roles):
        return ()
    problem = layout_difference(tokenizer, name)
    return () if problem is None else (f"tokenizer.json: its layout of texts, {problem}",)


def notes(checkpoint: str, ignored: Sequence[str]) -> list[str]:
    """A warning, where anything is not read."""
    return [f"checkpoint={checkpoint}: not read: {'; '.join(ignored)}"] if ignored else []


def _of_tokenizer(settings: Mapping[str, Any]) -> list[str]:
    """A token of any name is read."""
    return [
        key
        for key, value in settings.items()
        if key not in _TOKENIZER_KEYS
        and value is not None
        and value not in _TOKENIZER_VALUES.get(key, ())
        and not (key.endswith("_token") and isinstance(value, str | dict))
    ]


def _of_generation(settings: Mapping[str, Any], folder: PublishedFolder) -> list[str]:
    ends, rows = settings.get("eos_token_id"), folder.config.get("vocab_size")
    others = [key for key, value in settings.items() if key not in _GENERATION_KEYS and value is not None]
    names = [key for key in others if key not in _GENERATION_DEFAULTS and key != "eos_token_id"]
    names += [] if ends is None or isinstance(ends, int) else [f"eos_token_id={ends}"]
    return names + [name for name in _changed(settings) if not _is_behind(name, settings, rows)]


def _is_behind(name: str, settings: Mapping[str, Any], rows: Any) -> bool:
    """Whether tokens that are not written are the last rows of the table, which lmtool never writes."""
    tokens = settings.get("suppress_tokens")
    if not name.startswith("suppress_tokens") or not isinstance(tokens, list) or not isinstance(rows, int):
        return False
    return tokens == list(range(rows - len(tokens), rows))


def _changed(settings: Mapping[str, Any]) -> list[str]:
    """Settings of generation that are not the default."""
    return [
        f"{key}={json.dumps(settings[key])[:30]}"
        for key, default in _GENERATION_DEFAULTS.items()
        if key in settings and settings[key] is not None and settings[key] != default
    ]


def _files(folder: PublishedFolder, writes: bool) -> list[str]:
    """Of a sentence encoder the folders of its modules are read."""
    modules = folder.path / MODULES
    known = [*_FILES, *(["[0-9]*_*"] if modules.is_file() or (folder.path / "1_Pooling").is_dir() else [])]
    known += [] if writes else ["chat_template*"]
    names = sorted(path.name for path in folder.path.iterdir())
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in known)]


def _these(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST} more" if len(listed) > _MOST else ""
    return ", ".join(listed[:_MOST]) + more
