"""Special and added tokens of a Hugging Face folder, read as in transformers 5: from tokenizer_config.json; if that has
no `added_tokens_decoder`, also from special_tokens_map.json, added_tokens.json and tokenizer.json (`added_tokens`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from lmtool.config.base import JsonObject
from lmtool.tokenizers.classes import Settings, Token, TokenizerClass, file_error, read_json

SPECIAL_MAP, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""The roles of special tokens, in the order in which transformers adds the tokens."""
# The keys of the list of tokens that have no role: in transformers 4, and in transformers 5.
_OLD_LIST, _NEW_LIST = "additional_special_tokens", "extra_special_tokens"


@dataclass(frozen=True)
class SpecialTokens:
    """The special and added tokens of a folder.

    Attributes:
        named: Special tokens by name: the key NAME_token without "_token", which is a role or another name. None if no
            file sets the token, or if one sets null.
        extra: Special tokens without a name.
        added: By id, the tokens that are recognized before a text is split, special or not, each with the file that
            defines it.
        path: The path of tokenizer_config.json, for errors.
    """

    named: dict[str, Token | None]
    extra: list[Token]
    added: dict[int, tuple[AddedToken, Path]]
    path: Path

    @property
    def roles(self) -> dict[str, str]:
        """Special tokens with a role."""
        return {name: str(token) for name, token in self.named.items() if name in ROLES and token is not None}

    @property
    def without_role(self) -> list[str]:
        """Special tokens without a role."""
        others = (token for name, token in self.named.items() if name not in ROLES)
        return [str(token) for token in (*others, *self.extra) if token is not None and str(token)]

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Adds the tokens that a backend lacks. Raises UserError if a token cannot have the id that a file gives it."""
        present = backend.get_added_tokens_decoder().values()
        descriptions = {repr(token) for token in present}
        absent: list[Token] = [token for _, (token, _) in sorted(self.added.items()) if repr(token) not in descriptions]
        contents = {token.content for token in present} | {str(token) for token in absent}
        for token in (*self.named.values(), *self.extra):
            if token is not None and str(token) not in contents and token not in absent:
                absent.append(token)
        with_name = {str(token) for token in self.named.values() if token is not None}
        backend.add_tokens([_as_special(token, str(token) in with_name) for token in absent])
        for number, (token, path) in self.added.items():
            if backend.token_to_id(token.content) != number:
                raise file_error(path, f"{token.content} cannot have the id {number}")
        for role, content in self.roles.items():
            if backend.token_to_id(content) is None:  # the library does not add empty tokens
                raise file_error(self.path, f"{role}_token={content!r} is not a token")


def _as_special(token: Token, has_name: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    token.special = token.special or has_name
    return token


def read_special(
    folder: Path,
    settings: Settings,
    kind: TokenizerClass | None,
    tokenizer_json: Path | None,
    special_pieces: Sequence[AddedToken] | None = None,
) -> SpecialTokens:
    """Reads the special tokens in a folder's files. kind: the tokenizer class; None means a generic class.
    special_pieces: control and user-defined tokens of the SentencePiece file, if it is read. Raises UserError if a file
    is damaged."""
    values = dict(settings.values)
    if _OLD_LIST in values and not values.get(_NEW_LIST):
        values[_NEW_LIST] = values.pop(_OLD_LIST)
    named_tokens = _pop_names(values)
    added: dict[int, tuple[AddedToken, Path]] = {}

    def add(path: Path, tokens: dict[int, AddedToken]) -> None:
        added.update({number: (token, path) for number, token in tokens.items()})

    if "added_tokens_decoder" in values:
        add(settings.path, _by_id(settings.path, values["added_tokens_decoder"]))
    else:
        values |= _read_special_map(folder / SPECIAL_MAP, values)
        named_tokens |= _pop_names(values)
        if (folder / ADDED_TOKENS).is_file():
            add(folder / ADDED_TOKENS, _read_added_tokens(folder / ADDED_TOKENS, values))
        if tokenizer_json is not None:
            tokens = read_json(tokenizer_json).get("added_tokens") or ()
            add(tokenizer_json, _by_id(tokenizer_json, {str(_get(token, "id")): token for token in tokens}))
    by_content = {token.content: token for token, _ in added.values()}

    named: dict[str, Token | None] = dict.fromkeys(ROLES)
    named |= {} if kind is None else kind.specials
    for key, value in values.items():
        name = key.removesuffix("_token")
        if name != key and (name in ROLES or _is_token(value) or _get(value, "__type")):
            token = None if value is None else _token(settings.path, value)
            named[name] = token if token is None else by_content.get(str(token), token)
    named |= {name: _token(settings.path, token) for name, token in named_tokens.items()}

    old_list, new_list = (_tokens(settings.path, values.get(key)) for key in (_OLD_LIST, _NEW_LIST))
    extra: Sequence[Token] = old_list if special_pieces is None else special_pieces
    if kind is not None and kind.extra_tokens is not None:
        extra = kind.extra_tokens(extra, settings)
    return SpecialTokens(named, new_list if _NEW_LIST in values else list(extra), added, settings.path)


def _pop_names(values: JsonObject) -> JsonObject:
    """Removes `extra_special_tokens` and returns it if it is an object of tokens by name."""
    return values.pop(_NEW_LIST) if isinstance(values.get(_NEW_LIST), dict) else {}


def _read_special_map(path: Path, settings: JsonObject) -> JsonObject:
    """All tokens of the file are special. `extra_special_tokens` of `settings` come first."""
    values = read_json(path) if path.is_file() else {}
    values = {key: _token(path, token, True) if _get(token, "content") else token for key, token in values.items()}
    for key in (_OLD_LIST, _NEW_LIST):
        if isinstance(values.get(key), list):
            values[key] = [_token(path, token, True) for token in values[key]]
    if isinstance(values.get(_NEW_LIST), list):
        values[_NEW_LIST] = [*_tokens(path, settings.get(_NEW_LIST)), *values[_NEW_LIST]]
    return values


def _read_added_tokens(path: Path, values: JsonObject) -> dict[int, AddedToken]:
    """A token is special if `values`, from other files, list it."""
    candidates = [*(values.get(f"{role}_token") for role in ROLES), *_tokens(path, values.get(_NEW_LIST))]
    special = {str(token) for token in candidates if _is_token(token)}
    numbers = read_json(path)
    if not all(isinstance(number, int) for number in numbers.values()):
        raise file_error(path, "the values are not integers")
    return {
        number: AddedToken(content, normalized=content not in special, special=content in special)
        for content, number in numbers.items()
    }


def _by_id(path: Path, tokens: object) -> dict[int, AddedToken]:
    if not isinstance(tokens, dict) or not all(number.isdecimal() for number in tokens):
        raise file_error(path, "the added tokens have no ids")
    return {int(number): _token(path, token) for number, token in tokens.items()}


def _tokens(path: Path, values: object) -> list[Token]:
    values = values or []
    if not isinstance(values, list):
        raise file_error(path, f"{values!r} is not a list of tokens")
    return [_token(path, token) for token in values]


def _token(path: Path, value: object, special: bool | None = None) -> Any:
    if _is_token(value):
        return value
    content = _get(value, "content")
    if not isinstance(value, dict) or not isinstance(content, str):
        raise file_error(path, f"{value!r} is not a token")
    keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
    flags = {key: bool(value[key]) for key in keys if key in value}
    return AddedToken(content, **flags | ({} if special is None else {"special": special}))


def _is_token(value: object) -> bool:
    return isinstance(value, (str, AddedToken))


def _get(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, dict) else None
