"""The tokenizer classes of transformers 5 that a Hugging Face folder may name.

A class takes the vocabulary from the files, and everything else from tokenizer_config.json or the class's defaults. It
ignores normalization, splitting and special tokens in tokenizer.json, even if they differ. Only the generic classes use
tokenizer.json unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import AddedToken, models

from lmtool.config.base import JsonObject
from lmtool.errors import UserError
from lmtool.system.files import parse_json
from lmtool.tokenizers import backends
from lmtool.tokenizers.configs import SPECIALS

_COPY = "copy the file again, or train a tokenizer with `lmtool tokenizer`"
MAX_BYTES = 200_000_000
"""Maximum size of a tokenizer's file: six times the largest known file, Gemma's tokenizer.json."""


def read_bytes(path: Path) -> bytes:
    """Reads a tokenizer's file. Raises UserError, without reading it, if it is too large."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise file_error(path, f"{size:,} bytes; a tokenizer's file has at most {MAX_BYTES:,}")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Reads a UTF-8 file, with line ends unchanged."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as reason:
        raise file_error(path, str(reason)) from reason


def read_json(path: Path) -> JsonObject:
    """Reads a JSON object. Raises UserError with file and line for anything else."""
    text = read_text(path)
    content = parse_json(text, path, _COPY)
    if "\\ud" in text.lower():  # encoding fails if an escape is only half of a surrogate pair
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeError as reason:
            raise file_error(path, str(reason)) from reason
    if not isinstance(content, dict):
        raise file_error(path, "not a JSON object")
    return content


def file_error(path: Path, reason: str) -> UserError:
    """Returns the error for an invalid tokenizer file."""
    return UserError(f"{path}: not a valid tokenizer file: {' '.join(reason.split())[:200]}", _COPY)


TOKENIZER_JSON, TOKENIZER_CONFIG, MODEL_CONFIG = "tokenizer.json", "tokenizer_config.json", "config.json"
FAST_CLASS, _BACKEND_CLASS = "PreTrainedTokenizerFast", "TokenizersBackend"
GENERIC_CLASSES = (FAST_CLASS, _BACKEND_CLASS, "PreTrainedTokenizer", "PythonBackend")
"""Classes without defaults: tokenizer.json defines everything."""
SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.model", "spm.model", "tokenizer.model")
_MAX_SENTINELS = 100_000

Token = str | AddedToken


@dataclass(frozen=True)
class Settings:
    """The content of tokenizer_config.json; empty if the file is missing. path: the file's path, for errors."""

    path: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Reads the settings in a folder. Raises UserError if the file is damaged."""
        path = folder / TOKENIZER_CONFIG
        return cls(path, read_json(path) if path.is_file() else {})

    def flag(self, key: str, default: bool) -> bool:
        """Returns a boolean. Raises UserError for any other value."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.path}: {key}={value!r} is not true or false", f"set {key} to true or false")
        return value

    def optional_flag(self, key: str) -> bool | None:
        """Returns a boolean, or None if the value is null or missing."""
        return None if self.values.get(key) is None else self.flag(key, False)

    @property
    def sentinel_count(self) -> int:
        """The number of T5's sentinels. Raises UserError if the value is invalid."""
        count = self.values.get("extra_ids", 100)
        if not isinstance(count, int) or not 0 <= count <= _MAX_SENTINELS:
            raise UserError(
                f"{self.path}: extra_ids={count!r} is not an integer from 0 to {_MAX_SENTINELS}",
                "set extra_ids to the number of <extra_id_N> tokens",
            )
        return count


@dataclass(frozen=True)
class FileVocabulary:
    """The content of a vocabulary file.

    Attributes:
        path: The file's path, for errors.
        entries: Ids by text; empty for a unigram model.
        unigrams: Text and score by id; empty for other models.
        merges: The merges of a BPE model in order; empty for other models.
        character_map: SentencePiece's precompiled map for normalization; may be empty.
        special_pieces: Control and user-defined tokens of a SentencePiece file; None for other files.
    """

    path: Path
    entries: dict[str, int] = field(default_factory=dict)
    unigrams: Sequence[tuple[str, float]] = ()
    merges: Sequence[tuple[str, str]] = ()
    character_map: bytes = b""
    special_pieces: tuple[AddedToken, ...] | None = None


@dataclass(frozen=True)
class TokenizerClass:
    """A tokenizer class of transformers.

    Attributes:
        names: The class and its equivalents in transformers; error messages use the first name.
        model_types: Values of `model_type` in config.json that imply this class.
        model: The kind of vocabulary: WordPiece, BPE or Unigram.
        files: Vocabulary files that are read if there is no tokenizer.json.
        specials: Default special tokens by role.
        build: Builds the tokenizer from a vocabulary, settings and special tokens by role.
        set_template: Sets the template of special tokens, which lmtool does not use; None keeps tokenizer.json's.
        extra_tokens: Adds default special tokens without a role to the tokens in the files; None adds nothing.
        exact_special_tokens: Match special tokens exactly, without the files' rules for adjacent spaces.
    """

    names: tuple[str, ...]
    model_types: tuple[str, ...]
    model: str
    files: tuple[str, ...]
    specials: Mapping[str, Token]
    build: Callable[[FileVocabulary, Settings, Mapping[str, str]], tokenizers.Tokenizer]
    set_template: Callable[[tokenizers.Tokenizer, Settings, Mapping[str, str]], None] | None = None
    extra_tokens: Callable[[Sequence[Token], Settings], list[Token]] | None = None
    exact_special_tokens: bool = False


def _bert(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    unknown = tokens.get("unk")
    if unknown is None or unknown not in vocabulary.entries:
        raise file_error(vocabulary.path, f"the unknown token {unknown or '(unk_token)'} is missing")
    return backends.wordpiece(
        vocabulary.entries,
        settings.flag("do_lower_case", True),
        settings.optional_flag("strip_accents"),
        settings.flag("tokenize_chinese_chars", True),
        unknown,
    )


def _bert_template(backend: tokenizers.Tokenizer, settings: Settings, tokens: Mapping[str, str]) -> None:
    backends.set_bert_template(backend, tokens.get("cls", ""), tokens.get("sep", ""))


def _gpt2(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    model = models.BPE(vocab=vocabulary.entries, merges=list(vocabulary.merges), fuse_unk=False)
    return backends.gpt2_bpe(model, settings.flag("add_prefix_space", False))


def _roberta_template(backend: tokenizers.Tokenizer, settings: Settings, tokens: Mapping[str, str]) -> None:
    if "cls" in tokens and "sep" in tokens:
        prefix = settings.flag("add_prefix_space", False)
        backends.set_roberta_template(backend, tokens["cls"], tokens["sep"], prefix)


def _qwen2(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    model = models.BPE(vocab=vocabulary.entries, merges=list(vocabulary.merges), fuse_unk=False)
    return backends.qwen2_bpe(model, bool(settings.optional_flag("add_prefix_space")))


def _gpt1(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    options: JsonObject = {"end_of_word_suffix": "</w>", "unk_token": tokens.get("unk"), "fuse_unk": False}
    return backends.gpt1_bpe(models.BPE(vocab=vocabulary.entries, merges=list(vocabulary.merges), **options))


def _t5(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    return backends.unigram(vocabulary.unigrams, "t5", vocabulary.character_map)


def _t5_template(backend: tokenizers.Tokenizer, settings: Settings, tokens: Mapping[str, str]) -> None:
    backends.set_t5_template(backend, tokens.get("eos", ""))


def _t5_sentinels(additional: Sequence[Token], settings: Settings) -> list[Token]:
    sentinels = sum("<extra_id_" in str(token) for token in additional)
    extra_ids = settings.sentinel_count
    if sentinels and extra_ids not in (0, sentinels):
        raise UserError(
            f"{settings.path}: extra_ids={extra_ids}, but {sentinels} of the special tokens are <extra_id_N>",
            "set extra_ids to the number of <extra_id_N> tokens",
        )
    return [*additional, *(f"<extra_id_{number}>" for number in range(0 if sentinels else extra_ids))]


def _albert(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    return backends.unigram(
        vocabulary.unigrams,
        "albert",
        vocabulary.character_map,
        settings.flag("do_lower_case", True),
        settings.flag("keep_accents", False),
        settings.flag("add_prefix_space", True),
    )


def _bigbird(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    return backends.bigbird_unigram(vocabulary.unigrams, tokens.get("unk", ""), settings.flag("add_prefix_space", True))


def _xlnet(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    lowercase = settings.flag("do_lower_case", False)
    return backends.unigram(vocabulary.unigrams, "xlnet", vocabulary.character_map, lowercase)


def _xlnet_template(backend: tokenizers.Tokenizer, settings: Settings, tokens: Mapping[str, str]) -> None:
    backends.set_xlnet_template(backend, tokens.get("sep", ""), tokens.get("cls", ""))


def _xlnet_extra_tokens(additional: Sequence[Token], settings: Settings) -> list[Token]:
    return list(additional) or ["<eop>", "<eod>"]


def _llama(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    prefix = settings.optional_flag("add_prefix_space")
    scheme: Literal["always", "first", "never"] = "always" if settings.optional_flag("legacy") else "first"
    return backends.llama_bpe(vocabulary.entries, vocabulary.merges, "never" if prefix is False else scheme)


BERT = TokenizerClass(
    ("BertTokenizer", "ElectraTokenizer", "DistilBertTokenizer"),
    ("bert", "electra", "distilbert"),
    "WordPiece",
    ("vocab.txt",),
    SPECIALS["bert"],
    _bert,
    _bert_template,
)
ROBERTA = TokenizerClass(
    ("RobertaTokenizer", "BartTokenizer"),
    ("roberta", "bart"),
    "BPE",
    ("vocab.json", "merges.txt"),
    SPECIALS["roberta"],
    _gpt2,
    _roberta_template,
)
GPT2 = TokenizerClass(
    ("GPT2Tokenizer",),
    ("gpt2",),
    "BPE",
    ("vocab.json", "merges.txt"),
    # Byte-level BPE encodes every character, but the class declares an unknown token.
    {**SPECIALS["gpt2"], "unk": "<|endoftext|>"},
    _gpt2,
)
QWEN2 = TokenizerClass(
    ("Qwen2Tokenizer",),
    ("qwen2",),
    "BPE",
    ("vocab.json", "merges.txt"),
    dict.fromkeys(("unk", "eos", "pad"), "<|endoftext|>"),
    _qwen2,
    exact_special_tokens=True,
)
GPT1 = TokenizerClass(
    ("OpenAIGPTTokenizer",), ("openai-gpt",), "BPE", ("vocab.json", "merges.txt"), SPECIALS["gpt1"], _gpt1
)
T5 = TokenizerClass(
    ("T5Tokenizer",), ("t5",), "Unigram", SENTENCEPIECE_FILES, SPECIALS["t5"], _t5, _t5_template, _t5_sentinels
)
ALBERT = TokenizerClass(("AlbertTokenizer",), ("albert",), "Unigram", SENTENCEPIECE_FILES, SPECIALS["albert"], _albert)
BIGBIRD = TokenizerClass(
    ("BigBirdTokenizer",),
    ("big_bird",),
    "Unigram",
    SENTENCEPIECE_FILES,
    {**SPECIALS["albert"], "bos": "<s>", "eos": "</s>", "mask": AddedToken("[MASK]", lstrip=True)},
    _bigbird,
    _bert_template,
)
XLNET = TokenizerClass(
    ("XLNetTokenizer",),
    ("xlnet",),
    "Unigram",
    SENTENCEPIECE_FILES,
    {**SPECIALS["xlnet"], "mask": AddedToken("<mask>", lstrip=True)},
    _xlnet,
    _xlnet_template,
    _xlnet_extra_tokens,
)
LLAMA = TokenizerClass(
    ("LlamaTokenizer",),
    ("llama",),
    "BPE",
    ("tokenizer.model",),
    {"unk": "<unk>", "bos": "<s>", "eos": "</s>"},
    _llama,
)
CLASSES = (BERT, ROBERTA, GPT2, QWEN2, GPT1, T5, ALBERT, BIGBIRD, XLNET, LLAMA)


_FIXED_CLASSES: dict[str, TokenizerClass | str] = {"qwen2": QWEN2, "modernbert": _BACKEND_CLASS}
"""Classes that transformers uses for a model_type regardless of the files."""


def transformers_class(folder: Path, settings: Settings) -> TokenizerClass | str | None:
    """Returns the class that transformers' AutoTokenizer uses for a folder, or the name of a generic class; None if the
    files name no class. For a few models the model_type alone decides. Otherwise the first of these decides: the
    tokenizer_class in tokenizer_config.json, the tokenizer_class in config.json, the model_type. Raises UserError for
    an unsupported class."""
    path = folder / MODEL_CONFIG
    config = read_json(path) if path.is_file() else {}
    name, model_type = config.get("tokenizer_class"), config.get("model_type")
    if settings.values.get("tokenizer_class"):
        path, name = settings.path, settings.values["tokenizer_class"]
    if not name and not model_type:
        return None
    if isinstance(model_type, str) and model_type in _FIXED_CLASSES:
        return _FIXED_CLASSES[model_type]
    base_name = str(name).removesuffix("Fast")
    if _uses_tokenizer_json(folder, base_name if name else None, model_type):
        return _BACKEND_CLASS
    for candidate in CLASSES:
        if base_name in candidate.names or (not name and model_type in candidate.model_types):
            return candidate
    if name in GENERIC_CLASSES:
        return str(name)
    declared = f"tokenizer_class={name!r}" if name else f"model_type={model_type!r} without a tokenizer_class"
    supported = ", ".join([*(name for candidate in CLASSES for name in candidate.names), FAST_CLASS])
    raise UserError(
        f"{path}: unsupported {declared}; lmtool supports {supported}",
        f'copy the folder and set "tokenizer_class": "{FAST_CLASS}" in {TOKENIZER_CONFIG}, to use '
        "tokenizer.json unchanged",
    )


def _uses_tokenizer_json(folder: Path, name: str | None, model_type: object) -> bool:
    """A Llama's is used if the files name no class, or if the vocabulary is byte-level (as in Llama 3), which its class
    does not support."""
    path = folder / TOKENIZER_JSON
    if not path.is_file() or not (name in LLAMA.names or (name is None and model_type in LLAMA.model_types)):
        return False
    return name is None or '"ByteLevel"' in read_text(path)
