"""Files of a repository on the hub, through huggingface_hub's cache: `hf://org/name@revision`.

Imports huggingface_hub where it is needed only: half a second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lmtool.errors import UserError
from lmtool.system.environment import answers
from lmtool.system.secrets import masked


class Absent(UserError):
    """A file is not in the cache, and not at hand elsewhere: the repository lacks it, or there is no network."""


@dataclass(frozen=True)
class Address:
    """A repository at a revision. typed: the key and value that name it (`checkpoint=hf://org/name`), for errors."""

    typed: str
    repository: str
    revision: str

    @classmethod
    def of(cls, key: str, text: str, hint: str) -> Address:
        """UserError with the hint where the text is no such address."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        match = re.fullmatch(r"hf://((?:[\w.-]+/)?[\w.-]+)(?:@([\w./-]+))?", text)
        if match is None:
            raise UserError(f"{key}={text}: no address that lmtool reads", hint)
        try:
            validate_repo_id(match[1])
        except HFValidationError as problem:
            raise UserError(f"{key}={text}: no name on the hub: {_short(problem)}", hint) from problem
        # A revision is a path in the cache.
        if match[2] is not None and not all(part.strip(".") for part in match[2].split("/")):
            raise UserError(f"{key}={text}: {match[2]} is no branch, tag or commit", hint)
        return cls(f"{key}={text}", match[1], match[2] or "main")

    def file(self, name: str, offline: bool, revision: str | None = None) -> Path:
        """A file in the cache, fetched where it is not there. offline: no socket is opened. revision: another one.

        Absent where there is none, UserError where the hub refuses it.
        """
        import huggingface_hub
        from huggingface_hub import constants, errors

        revision = revision or self.revision
        cached = huggingface_hub.try_to_load_from_cache(self.repository, name, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        file = f"{self.typed}: {name} of {self.repository}@{revision}"
        again = "type the command once with a network and without offline=true, or give a local folder"
        if offline or constants.HF_HUB_OFFLINE:
            raise Absent(f"{file}: offline=true, and not in the hub's cache", again)
        if not self._reachable:
            # Without a network the library retries for half a minute.
            raise Absent(f"{file}: no network, and not in the hub's cache", again)
        try:
            return Path(huggingface_hub.hf_hub_download(self.repository, name, revision=revision))
        except errors.LocalEntryNotFoundError as problem:
            raise Absent(f"{file}: {_short(problem)}", again) from problem
        except errors.EntryNotFoundError as problem:
            raise Absent(f"{file}: no such file there", again) from problem
        except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as problem:
            raise UserError(
                f"{self.typed}: {name}: {_short(problem)}",
                "see that the name and the revision are right, or give a local folder",
            ) from problem

    @cached_property
    def _reachable(self) -> bool:
        from huggingface_hub import constants

        return answers(constants.ENDPOINT)


def _short(problem: Exception) -> str:
    return masked(" ".join(str(problem).split()))[:160]
