"""The tokenizer classes of transformers 5 that a Hugging Face folder may name.

A class reads its vocabulary from the files, and everything else from tokenizer_config.json or its defaults;
normalization, splitting and special tokens in tokenizer.json are ignored, even if they differ. Only the generic classes
use tokenizer.json unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import AddedToken, models

from lmtool.config.saved import JsonObject
from lmtool.errors import UserError
from lmtool.tokenizers import backends
from lmtool.tokenizers.configs import SPECIALS

MOST_BYTES = 200_000_000
"""Maximum size of a tokenizer's file: six times the largest known, Gemma's tokenizer.json."""


def read_bytes(path: Path) -> bytes:
    """Read a tokenizer's file. UserError, before reading, if it is too large."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise broken(path, f"{size:,} bytes; a tokenizer's file has at most {MOST_BYTES:,}")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Read a UTF-8 file, with line ends unchanged."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as reason:
        raise broken(path, str(reason)) from reason


def read_json(path: Path) -> JsonObject:
    """Read a JSON object. UserError with file and line for anything else."""
    try:
        text = read_text(path)
        content = json.loads(text)
        if "\\ud" in text.lower():  # a lone surrogate escape is not a character
            json.dumps(content, ensure_ascii=False).encode()
    except json.JSONDecodeError as reason:
        raise broken(path, reason.msg, reason.lineno) from reason
    except (UnicodeError, RecursionError) as reason:
        raise broken(path, str(reason)) from reason
    if not isinstance(content, dict):
        raise broken(path, "not a JSON object")
    return content


def broken(path: Path, reason: str, line: int | None = None) -> UserError:
    """The error for an invalid tokenizer file."""
    at = f"{path}:{line}" if line else str(path)
    return UserError(
        f"{at}: not a valid tokenizer file: {' '.join(reason.split())[:200]}",
        "copy the file again, or train a tokenizer with `lmtool tokenizer`",
    )


TOKENIZER_JSON, SETTINGS, CONFIG = "tokenizer.json", "tokenizer_config.json", "config.json"
PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend", "PreTrainedTokenizer", "PythonBackend")
"""Generic classes without defaults: tokenizer.json defines everything."""
SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.model", "spm.model", "tokenizer.model")
_MOST_SENTINELS = 100_000

Token = str | AddedToken


@dataclass(frozen=True)
class Settings:
    """tokenizer_config.json. path: of the file, for errors. values: its content; empty if the file is missing."""

    path: Path
    values: Mapping[str, object]

    @classmethod
    def of(cls, folder: Path) -> Settings:
        """The settings of a folder. UserError if the file is damaged."""
        path = folder / SETTINGS
        return cls(path, read_json(path) if path.is_file() else {})

    def flag(self, key: str, default: bool) -> bool:
        """A boolean. UserError for any other value."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{self.path}: {key}={value!r} is not true or false", f"set {key} to true or false")
        return value

    def optional_flag(self, key: str) -> bool | None:
        """A boolean that may be null or missing."""
        return None if self.values.get(key) is None else self.flag(key, False)

    @property
    def sentinels(self) -> int:
        """T5's number of sentinels. UserError if it is invalid."""
        count = self.values.get("extra_ids", 100)
        if not isinstance(count, int) or not 0 <= count <= _MOST_SENTINELS:
            raise UserError(
                f"{self.path}: extra_ids={count!r} is not an integer from 0 to {_MOST_SENTINELS}",
                "set extra_ids to the number of <extra_id_N> tokens",
            )
        return count


@dataclass(frozen=True)
class FileVocabulary:
    """The content of a vocabulary file.

    Attributes:
        path: The file, for errors.
        entries: Ids by text.
        unigrams: Text and score by id, of a unigram model.
        merges: Pairs in the order in which they are merged, of a BPE model.
        characters: SentencePiece's precompiled character map.
        marked: Control and user-defined tokens of a SentencePiece file; None for other files.
    """

    path: Path
    entries: dict[str, int] = field(default_factory=dict)
    unigrams: Sequence[tuple[str, float]] = ()
    merges: Sequence[tuple[str, str]] = ()
    characters: bytes = b""
    marked: tuple[AddedToken, ...] | None = None


def _as_named(additional: Sequence[Token], settings: Settings) -> list[Token]:
    return list(additional)


@dataclass(frozen=True)
class TokenizerClass:
    """A tokenizer class of transformers.

    Attributes:
        names: In transformers; error messages use the first.
        model_types: `model_type` values of config.json that have this class.
        model: The kind of vocabulary.
        files: Vocabulary files that are read if there is no tokenizer.json.
        specials: Default special tokens by role.
        build: Builds the tokenizer from a vocabulary, settings and special tokens by role.
        around: Sets the template of special tokens (which lmtool does not use); None for that of tokenizer.json.
        extra_tokens: Special tokens without a role, from those named in the files.
        bare: Match special tokens exactly, without the files' rules for adjacent spaces.
    """

    names: tuple[str, ...]
    model_types: tuple[str, ...]
    model: str
    files: tuple[str, ...]
    specials: Mapping[str, Token]
    build: Callable[[FileVocabulary, Settings, Mapping[str, str]], tokenizers.Tokenizer]
    around: Callable[[tokenizers.Tokenizer, Settings, Mapping[str, str]], None] | None = None
    extra_tokens: Callable[[Sequence[Token], Settings], list[Token]] = _as_named
    bare: bool = False


def _bert(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    unknown = tokens.get("unk")
    if unknown is None or unknown not in vocabulary.entries:
        raise broken(vocabulary.path, f"{unknown} is missing")
    return backends.wordpiece(
        vocabulary.entries,
        settings.flag("do_lower_case", True),
        settings.optional_flag("strip_accents"),
        settings.flag("tokenize_chinese_chars", True),
        unknown,
    )


def _bert_around(backend: tokenizers.Tokenizer, settings: Settings, tokens: Mapping[str, str]) -> None:
    backends.around(backend, tokens.get("cls", ""), tokens.get("sep", ""))


def _byte_level(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    model = models.BPE(vocab=vocabulary.entries, merges=list(vocabulary.merges), fuse_unk=False)
    return backends.byte_level(model, settings.flag("add_prefix_space", False))


def _roberta_around(backend: tokenizers.Tokenizer, settings: Settings, tokens: Mapping[str, str]) -> None:
    if "cls" in tokens and "sep" in tokens:
        prefix = settings.flag("add_prefix_space", False)
        backends.roberta_around(backend, tokens["cls"], tokens["sep"], prefix)


def _qwen2(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    model = models.BPE(vocab=vocabulary.entries, merges=list(vocabulary.merges), fuse_unk=False)
    return backends.qwen2_level(model, bool(settings.optional_flag("add_prefix_space")))


def _word_end(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    options: JsonObject = {"end_of_word_suffix": "</w>", "unk_token": tokens.get("unk"), "fuse_unk": False}
    return backends.word_end(models.BPE(vocab=vocabulary.entries, merges=list(vocabulary.merges), **options))


def _t5(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    return backends.unigram(vocabulary.unigrams, "t5", vocabulary.characters)


def _t5_around(backend: tokenizers.Tokenizer, settings: Settings, tokens: Mapping[str, str]) -> None:
    backends.ends_with(backend, tokens.get("eos", ""))


def _t5_sentinels(additional: Sequence[Token], settings: Settings) -> list[Token]:
    """Add the sentinels, unless the files name some of them."""
    named = sum("<extra_id_" in str(token) for token in additional)
    count = settings.sentinels
    if named and count not in (0, named):
        raise UserError(
            f"{settings.path}: extra_ids={count}, but {named} of its special tokens are <extra_id_N>",
            "set extra_ids to the number of <extra_id_N> tokens",
        )
    return [*additional, *(f"<extra_id_{number}>" for number in range(0 if named else count))]


def _albert(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    return backends.unigram(
        vocabulary.unigrams,
        "albert",
        vocabulary.characters,
        settings.flag("do_lower_case", True),
        settings.flag("keep_accents", False),
        settings.flag("add_prefix_space", True),
    )


def _bigbird(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    return backends.plain_unigram(vocabulary.unigrams, tokens.get("unk", ""), settings.flag("add_prefix_space", True))


def _xlnet(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    return backends.unigram(vocabulary.unigrams, "xlnet", vocabulary.characters, settings.flag("do_lower_case", False))


def _xlnet_around(backend: tokenizers.Tokenizer, settings: Settings, tokens: Mapping[str, str]) -> None:
    backends.append_tokens(backend, tokens.get("sep", ""), tokens.get("cls", ""))


def _xlnet_extra_tokens(additional: Sequence[Token], settings: Settings) -> list[Token]:
    return list(additional) or ["<eop>", "<eod>"]


def _llama(vocabulary: FileVocabulary, settings: Settings, tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    prefix = settings.optional_flag("add_prefix_space")
    scheme: Literal["always", "first", "never"] = "always" if settings.optional_flag("legacy") else "first"
    return backends.byte_fallback(vocabulary.entries, vocabulary.merges, "never" if prefix is False else scheme)


BERT = TokenizerClass(
    ("BertTokenizer", "ElectraTokenizer", "DistilBertTokenizer"),
    ("bert", "electra", "distilbert"),
    "WordPiece",
    ("vocab.txt",),
    SPECIALS["bert"],
    _bert,
    _bert_around,
)
ROBERTA = TokenizerClass(
    ("RobertaTokenizer", "BartTokenizer"),
    ("roberta", "bart"),
    "BPE",
    ("vocab.json", "merges.txt"),
    SPECIALS["roberta"],
    _byte_level,
    _roberta_around,
)
GPT2 = TokenizerClass(
    ("GPT2Tokenizer",),
    ("gpt2",),
    "BPE",
    ("vocab.json", "merges.txt"),
    # Byte-level BPE never meets unknown characters, but the class declares an unknown token.
    {**SPECIALS["gpt2"], "unk": "<|endoftext|>"},
    _byte_level,
)
QWEN2 = TokenizerClass(
    ("Qwen2Tokenizer",),
    ("qwen2",),
    "BPE",
    ("vocab.json", "merges.txt"),
    dict.fromkeys(("unk", "eos", "pad"), "<|endoftext|>"),
    _qwen2,
    bare=True,
)
GPT1 = TokenizerClass(
    ("OpenAIGPTTokenizer",), ("openai-gpt",), "BPE", ("vocab.json", "merges.txt"), SPECIALS["gpt1"], _word_end
)
T5 = TokenizerClass(
    ("T5Tokenizer",), ("t5",), "Unigram", SENTENCEPIECE_FILES, SPECIALS["t5"], _t5, _t5_around, _t5_sentinels
)
ALBERT = TokenizerClass(("AlbertTokenizer",), ("albert",), "Unigram", SENTENCEPIECE_FILES, SPECIALS["albert"], _albert)
BIGBIRD = TokenizerClass(
    ("BigBirdTokenizer",),
    ("big_bird",),
    "Unigram",
    SENTENCEPIECE_FILES,
    {**SPECIALS["albert"], "bos": "<s>", "eos": "</s>", "mask": AddedToken("[MASK]", lstrip=True)},
    _bigbird,
    _bert_around,
)
XLNET = TokenizerClass(
    ("XLNetTokenizer",),
    ("xlnet",),
    "Unigram",
    SENTENCEPIECE_FILES,
    {**SPECIALS["xlnet"], "mask": AddedToken("<mask>", lstrip=True)},
    _xlnet,
    _xlnet_around,
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


_FIXED_CLASSES: dict[str, TokenizerClass | str] = {"qwen2": QWEN2, "modernbert": PLAIN[1]}
"""Classes that transformers uses for a model_type regardless of the files."""


def class_of(folder: Path, settings: Settings) -> TokenizerClass | str | None:
    """The class that transformers' AutoTokenizer uses for a folder: by model_type for some models, then by
    tokenizer_config.json, config.json, and model_type.

    Returns: the class; the name of a generic class; None if nothing names one. Raises UserError for an unsupported
    class.
    """
    path, config = folder / CONFIG, read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    name, model_type = config.get("tokenizer_class"), config.get("model_type")
    if settings.values.get("tokenizer_class"):
        path, name = settings.path, settings.values["tokenizer_class"]
    if not name and not model_type:
        return None
    if isinstance(model_type, str) and model_type in _FIXED_CLASSES:
        return _FIXED_CLASSES[model_type]
    base_name = str(name).removesuffix("Fast")
    if _uses_tokenizer_json(folder, base_name if name else None, model_type):
        return PLAIN[1]
    for candidate in CLASSES:
        if base_name in candidate.names or (not name and model_type in candidate.model_types):
            return candidate
    if name in PLAIN:
        return str(name)
    declared = f"tokenizer_class={name!r}" if name else f"model_type={model_type!r} without a tokenizer_class"
    supported = ", ".join([*(name for candidate in CLASSES for name in candidate.names), PLAIN[0]])
    raise UserError(
        f"{path}: unsupported {declared}; lmtool supports {supported}",
        f'set "tokenizer_class": "{PLAIN[0]}" in {SETTINGS} of a copy to use tokenizer.json unchanged',
    )


def _uses_tokenizer_json(folder: Path, name: str | None, model_type: object) -> bool:
    """Whether a Llama's tokenizer.json is used unchanged: if no class is named, or if its vocabulary is byte-level,
    which Llama's class does not support (as in Llama 3)."""
    path = folder / TOKENIZER_JSON
    if not path.is_file() or not (name in LLAMA.names or (name is None and model_type in LLAMA.model_types)):
        return False
    return name is None or '"ByteLevel"' in read_text(path)
