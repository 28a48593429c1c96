"""The tokenizer that all packages use. It is stored in Hugging Face's format.

Shape letters: V vocabulary entries, T tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import processors

from lmtool.config.base import JsonMapping, JsonObject
from lmtool.errors import UserError
from lmtool.runs.finding import refusal
from lmtool.system.files import Damaged, user_path, verify_siblings
from lmtool.tokenizers.classes import FAST_CLASS, TOKENIZER_CONFIG, TOKENIZER_JSON
from lmtool.tokenizers.configs import TOKENIZER_FILES
from lmtool.tokenizers.entries import Marks, entry_bytes, marks_of, readable, starts_word
from lmtool.tokenizers.folders import read_backend
from lmtool.tokenizers.special import SPECIAL_MAP

ROLES = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
_SCORE = re.compile(r"-?\d+\.\d{10,}")
SAVED_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_MAP)


class Tokenizer:
    """Converts text to ids and back.

    Encoding adds no special tokens: formats (data/formats.py) add them. "[MASK]" or "<|endoftext|>" in a text is
    ordinary text unless `parse_special_tokens` is set. But in unigram vocabularies (T5, ALBERT) special tokens are
    ordinary entries, so text can produce them, as in transformers.

    Args:
        backend: The tokenizer object of the `tokenizers` library.
        roles: Ids of special tokens by role.
        origin: Name of the tokenizer in error messages.
        parse_special_tokens: Parse special tokens that occur in texts.
        without_role: Special tokens without a role, which the backend may not flag as special.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        roles: dict[str, int],
        origin: str = "the tokenizer",
        parse_special_tokens: bool = False,
        without_role: Sequence[str] = (),
    ):
        backend.encode_special_tokens = not parse_special_tokens
        self.parse_special_tokens = parse_special_tokens
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.roles = {name: roles[name] for name in ROLES if name in roles}
        self._origin = origin
        flagged = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self._unflagged = tuple(sorted(set(without_role) - flagged))

    def to_plain(self) -> JsonObject:
        """Returns plain data from which `from_plain` rebuilds the tokenizer in another process."""
        return {
            "backend": self._backend.to_str(),
            "roles": self.roles,
            "origin": self._origin,
            "parse_special_tokens": self.parse_special_tokens,
            "without_role": list(self._unflagged),
        }

    @classmethod
    def from_plain(cls, plain: JsonMapping) -> Tokenizer:
        """Rebuilds a tokenizer from the data of `to_plain`."""
        return cls(**{**plain, "backend": tokenizers.Tokenizer.from_str(plain["backend"])})

    @property
    def vocab_size(self) -> int:
        """V, the largest id plus 1."""
        return len(self._words)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens: tokens with a role, flagged by the backend, or in `without_role`."""
        flagged = {number for number, token in self._backend.get_added_tokens_decoder().items() if token.special}
        vocabulary = self._backend.get_vocab()
        unflagged = {vocabulary[token] for token in self._unflagged}
        return frozenset(flagged | unflagged | set(self.roles.values()))

    @cached_property
    def _words(self) -> list[str | None]:
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        words: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for word, number in vocabulary.items():
            words[number] = word
        return words

    @cached_property
    def starts_word(self) -> np.ndarray:
        """(V,) bool: whether each entry starts a word.

        A WordPiece entry starts a word if it has no continuation prefix, a SentencePiece entry if it starts with "▁",
        an entry of a word-level vocabulary always. A byte-level or character entry starts a word if it begins with
        white space or with a character that cannot be part of a word, such as a comma. Callers treat the first token of
        a text as the start of a word too, since no space precedes it.
        """
        starts = starts_word(self.marks, [word or "" for word in self._words])
        starts[sorted(self.special_ids)] = True
        return starts

    @cached_property
    def splits_on_spaces(self) -> bool:
        """Whether the text between two spaces has the same ids in every context. This holds for BERT's WordPiece,
        unless an added token contains or absorbs a space."""
        rules = json.loads(self._backend.to_str())
        types = [(rules[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
        added_tokens = self._backend.get_added_tokens_decoder().values()
        spaces_split = all(not (" " in token.content or token.lstrip or token.rstrip) for token in added_tokens)
        return spaces_split and types == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]

    @cached_property
    def marks(self) -> Marks:
        """How the entries mark word boundaries."""
        return marks_of(self._backend)

    def spellings(self, ids: Iterable[int]) -> list[bytes]:
        """Returns the UTF-8 bytes that each entry adds to a word, without marks. Special tokens are unchanged."""
        numbers = list(ids)
        entries = zip(numbers, self.pieces(numbers), strict=True)
        return [word.encode() if n in self.special_ids else entry_bytes(self.marks, word) for n, word in entries]

    def readable(self, ids: Iterable[int]) -> list[str]:
        """Returns `pieces` for display, with decoded bytes and visible white space. Special tokens are unchanged."""
        numbers = list(ids)
        entries = zip(numbers, self.pieces(numbers), strict=True)
        return [word if n in self.special_ids else readable(self.marks, word) for n, word in entries]

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of the rules, vocabulary and roles."""
        content = self._backend.to_str()
        # The last digit of scores changes when the library saves and loads them.
        content = _SCORE.sub(lambda match: f"{float(match[0]):.9f}", content) if '"Unigram"' in content else content
        content += json.dumps(self.roles, sort_keys=True)
        content += "parse_special_tokens" if self.parse_special_tokens else ""
        content += json.dumps(self._unflagged) if self._unflagged else ""
        return hashlib.sha256(content.encode()).hexdigest()

    def same_encoding(self, other: Tokenizer) -> bool:
        """Whether two tokenizers have the same vocabulary and encoding rules, and the same ids for the roles that both
        have. Ignores how they parse special tokens, their templates and decoding."""
        same_special_tokens = all(other.roles.get(name, number) == number for name, number in self.roles.items())
        return same_special_tokens and self._rules == other._rules

    @cached_property
    def _rules(self) -> JsonObject:
        """Scores are rounded to the precision that the library saves."""
        rules = json.loads(self._backend.to_str())
        model = rules["model"]
        if model["type"] == "Unigram":
            model["vocab"] = [[piece, round(score, 9)] for piece, score in model["vocab"]]
        return {name: rules[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")}

    @cached_property
    def sentinels(self) -> tuple[int, ...]:
        """Ids of <extra_id_0>, <extra_id_1>, ... (T5)."""
        sentinels: list[int] = []
        while (number := self._backend.token_to_id(f"<extra_id_{len(sentinels)}>")) is not None:
            sentinels.append(number)
        return tuple(sentinels)

    def role(self, name: str) -> int:
        """Returns the id of the special token with a role. Raises UserError if there is no such token."""
        if name not in self.roles:
            raise UserError(
                f"{self._origin} has no {name} token; its special tokens are: {', '.join(self.roles) or 'none'}",
                "use a tokenizer that fits the model (tokenizer=wordpiece for BERT, tokenizer=bytebpe for GPT), "
                "or omit tokenizer=",
            )
        return self.roles[name]

    @contextmanager
    def _library_errors(self) -> Iterator[None]:
        """A tokenizer.json may define no unknown token, and a pattern may exceed the library's limits, which raises a
        PanicException (not a subclass of Exception)."""
        try:
            yield
        except BaseException as error:
            panic = type(error).__name__ == "PanicException"
            if not panic and type(error) is not Exception:  # the library raises no narrower class
                raise
            hint = f"use a tokenizer {'with simpler patterns' if panic else 'with an unknown token'}, "
            raise UserError(f"{self._origin} cannot tokenize a text: {error}", f"{hint}or remove the text") from error

    def encode(self, text: str) -> np.ndarray:
        """Returns the (T,) int32 ids of a text."""
        with self._library_errors():
            return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def normalize(self, text: str) -> str:
        """Returns the normalized text."""
        return self._backend.normalizer.normalize_str(text) if self._backend.normalizer is not None else text

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the (T,) int32 ids of each text. Uses the library's threads."""
        with self._library_errors():
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encoded]

    def encode_aligned(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a text, (T,) int32, and the tokens' character ranges, (T, 2) int64: text[start:end].
        Ranges exclude white space at the ends of a token; a token of only white space has start = end."""
        return self.encode_aligned_batch([text])[0]

    def encode_aligned_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the result of `encode_aligned` for each text. Uses the library's threads."""
        with self._library_errors():
            encoded = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(encoding.ids, dtype=np.int32), _without_space(text, encoding.offsets))
            for text, encoding in zip(texts, encoded, strict=True)
        ]

    def encode_sentences(self, sentences: Sequence[Sequence[str]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Joins the words of each sentence by spaces, and returns the ids, (T,) int32, and the word index of each id,
        (T,) int64. A word that normalization removes has no token. Uses the library's threads."""
        texts = [" ".join(words) for words in sentences]
        encoded = []
        with self._library_errors():
            batch = self._backend.encode_batch(texts, add_special_tokens=False)
        for words, entry in zip(sentences, batch, strict=True):
            ids = np.array(entry.ids, dtype=np.int32)
            # A space belongs to the next word, since a token may start with a space or consist of one.
            ends = np.cumsum([len(word) + 1 for word in words], dtype=np.int64) - 1
            starts = np.array([start for start, _ in entry.offsets], dtype=np.int64)
            encoded.append((ids, np.minimum(np.searchsorted(ends, starts, side="right"), max(len(words) - 1, 0))))
        return encoded

    def encode_with_template(self, text: str, pair: str | None = None) -> tuple[list[int], list[int]]:
        """Returns the ids and segments of a text or a pair with the special tokens of tokenizer.json's template, as in
        transformers. lmtool itself uses formats (data/formats.py) instead."""
        with self._library_errors():
            encoded = self._backend.encode(text, pair, add_special_tokens=True)
        return encoded.ids, encoded.type_ids

    def with_template(self, single: Sequence[str], pair: Sequence[str], special: dict[str, int]) -> Tokenizer:
        """Returns a copy with another template: `$A:SEGMENT`, `$B:SEGMENT` and `NAME:SEGMENT` in order, for a text and
        for a pair. special: ids of the special tokens by NAME."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        tokens = [
            {"id": name, "ids": [number], "tokens": [self._words[number] or ""]} for name, number in special.items()
        ]
        backend.post_processor = processors.TemplateProcessing(list(single), list(pair), tokens)
        return self._copy(backend)

    def _copy(self, backend: tokenizers.Tokenizer, roles: dict[str, int] | None = None) -> Tokenizer:
        return Tokenizer(backend, roles or self.roles, self._origin, self.parse_special_tokens, self._unflagged)

    def with_parsing(self, parse_special_tokens: bool) -> Tokenizer:
        """Returns a copy that parses, or does not parse, special tokens in texts."""
        return Tokenizer.from_plain({**self.to_plain(), "parse_special_tokens": parse_special_tokens})

    def with_padding(self) -> Tokenizer:
        """Returns the tokenizer, or a copy that pads with the end token if there is no padding token, as usual for
        GPT-2."""
        if "pad" in self.roles or "eos" not in self.roles:
            return self
        return self._copy(self._backend, {**self.roles, "pad": self.roles["eos"]})

    def with_tokens(self, words: Mapping[str, str], first: int) -> Tokenizer:
        """Returns a copy with additional special tokens, which text cannot produce. words: the tokens by role. first:
        the id of the first token."""
        numbers = {role: first + number for number, role in enumerate(words)}
        copy = self._copy(self._backend, {**self.roles, **numbers})
        copy._words = [*self._words, *[None] * (first - len(self._words)), *words.values()]
        return copy

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Returns the text of ids. With WordPiece, white space, accents and case may be lost."""
        return self._backend.decode([int(number) for number in ids], skip_special_tokens=skip_special)

    def continuation(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Returns the text that `ids` add to the text of `before`, including the space between words, if any."""
        start, text = self.decode(before), self.decode([*before, *ids])
        return text.removeprefix(start) if text.startswith(start) else self.decode(ids)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Returns the vocabulary entry of each id, with marks; "" for an id without an entry."""
        return [self._words[int(number)] or "" for number in ids]

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json in Hugging Face's format."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        special = {f"{name}_token": self._words[number] for name, number in self.roles.items()}
        # Missing roles are null, since a transformers class may have default tokens for them.
        tokens = {f"{name}_token": None for name in ROLES} | special
        settings: JsonObject = {"tokenizer_class": FAST_CLASS, "clean_up_tokenization_spaces": False, **tokens}
        if self._unflagged:
            settings["additional_special_tokens"] = list(self._unflagged)
        contents = (self._backend.to_str(pretty=True), _json(settings), _json(special))
        for name, content in zip(SAVED_FILES, contents, strict=True):
            (folder / name).write_text(content, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path, parse_special_tokens: bool = False) -> Tokenizer:
        """Reads a folder in Hugging Face's format, see folders.py. Raises UserError if a file is missing or damaged, or
        if a checkpoint's file was changed."""
        folder = user_path(folder)
        try:
            verify_siblings(folder, TOKENIZER_FILES)
        except Damaged as damage:
            raise refusal(damage) from damage
        backend, tokens, without_role = read_backend(folder)
        vocabulary = backend.get_vocab()
        roles = {name: vocabulary[token] for name, token in tokens.items()}
        return cls(backend, roles, f"the tokenizer in {folder}", parse_special_tokens, without_role)


def _json(content: object) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _without_space(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns the (T, 2) int64 ranges without surrounding white space; a token of only white space gets an empty range
    at its end."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    positions = np.arange(len(text) + 1)
    space = np.array([character.isspace() for character in text], dtype=bool)
    # For each position, `following` is the position of the next character that is not a space, and `before` the end of
    # the last such character.
    following = np.minimum.accumulate(np.append(np.where(space, len(text), positions[:-1]), len(text))[::-1])[::-1]
    starts = np.minimum(following[starts], ends)
    before = np.maximum.accumulate(np.append(0, np.where(space, 0, positions[1:])))
    return np.stack([starts, np.maximum(before[ends], starts)], axis=1)
