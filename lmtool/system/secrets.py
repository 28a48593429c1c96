"""Masks secrets in all text that is written or printed. Standard library only."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote

MASK = "***"
SHORTEST = 6
"""Minimum number of characters of a masked value, since shorter values also occur in ordinary text."""

# Names of variables with secrets. TOKENIZERS_PARALLELISM holds no token; PWD is the working directory, but MYSQL_PWD is
# a password.
_SECRET_NAME = re.compile(
    r"KEY|TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|[A-Z]_PWD$|(?:^|_)(?:AUTH|BEARER|PASS|PAT)(?:_|$)",
    re.IGNORECASE,
)
# Text before a host: user:password@ or a token, but not the name in hf://name@revision. A path that was made from an
# address has only one slash.
_PASSWORD = re.compile(r"(?i)\b(?P<scheme>[a-z][a-z0-9+.-]*://?)[^/\s@:]*:(?P<password>[^/\s]*)@")
_BARE_CREDENTIAL = re.compile(r"(?i)\b(?P<scheme>(?!hf:)[a-z][a-z0-9+.-]*://?)[^/\s@:]+@")
_QUERY = re.compile(r"(?i)(?P<name>[?&;][\w.-]*(?:token|key|secret|passw|signature|auth|sig|credential)\w*=)[^&;#\s]+")
# A hub token, hf_ and 34 characters (but not a folder called hf_distilbert); or a tracker's key, 40 hexadecimal digits
# (but not the commit in hf://org/name@commit).
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<!@)\b[0-9a-f]{40}\b")


def masked(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Replaces each secret in a text, including quoted or escaped secrets, by `***`.

    Secrets are the values of environment variables named like *KEY*, *TOKEN*, *SECRET*, *PASSWORD*, *_AUTH or *_BEARER;
    passwords in variables that contain an address (DATABASE_URL); the part of an address before its @, and the values
    of `token=` and similar parameters; and texts that look like a hub token or a tracker's key.
    """
    return masker(environ)(text)


def masker(environ: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Returns a function like `masked` that reads the environment only once, for many texts."""
    secrets = set(_secrets(os.environ if environ is None else environ))
    spellings = _all_spellings(tuple(sorted(secrets)))

    def mask(text: str) -> str:
        for spelling in spellings:
            text = text.replace(spelling, MASK)
        if ":/" in text:
            text = _PASSWORD.sub(rf"\g<scheme>{MASK}@", text)
            text = _BARE_CREDENTIAL.sub(rf"\g<scheme>{MASK}@", text)
            text = _QUERY.sub(rf"\g<name>{MASK}", text)
        return _TOKEN.sub(MASK, text)

    return mask


def masked_data(value: object, mask: Callable[[str], str] | None = None) -> Any:
    """Masks all texts in plain data, including keys."""
    mask = masker() if mask is None else mask
    if isinstance(value, dict):
        return {mask(key) if isinstance(key, str) else key: masked_data(item, mask) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked_data(item, mask) for item in value]
    return mask(value) if isinstance(value, str) else value


def _secrets(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        secrets = [value.strip()] if _is_secret(name) else []
        if ":/" in value:
            secrets += [address["password"] for address in _PASSWORD.finditer(value)]
        for secret in secrets:
            yield from (spelling for spelling in (secret, unquote(secret)) if len(spelling) >= SHORTEST)


@lru_cache(maxsize=1024)
def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


@lru_cache(maxsize=8)
def _all_spellings(secrets: tuple[str, ...]) -> tuple[str, ...]:
    """Returns every spelling of the secrets, longest first, because a spelling may be part of a longer one."""
    spellings = {spelling for secret in secrets for spelling in _spellings(secret)}
    return tuple(sorted(spellings, key=lambda spelling: (-len(spelling), spelling)))


def _spellings(secret: str) -> Iterator[str]:
    yield secret
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield repr(secret)[1:-1]
    yield html.escape(secret)
    yield quote(secret, errors="replace")
    yield quote(secret, safe="", errors="replace")
    yield secret.replace("'", "'\"'\"'")
    yield secret.replace("'", "''")
    yield secret.replace("'", "\\'")
    yield secret.replace('"', '\\"')
    yield secret.replace("'", "\\'").replace('"', '\\"')
