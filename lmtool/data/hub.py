"""The library datasets: imported where it is needed, kept off the network where it must be, its errors in one line.

No script of a data set is ever run: the library refuses those that have one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmtool.errors import UserError
from lmtool.network import answers
from lmtool.secrets import masked


@contextmanager
def hub_access(what: str, name: str, offline: bool, hint: str) -> Iterator[Any]:
    """The library, for what is done inside. What it raises becomes a UserError: `what` names the data set as it was
    typed, `hint` says what to do without it. name: of the data set, or a local folder. offline: no connection is
    opened; none is for a folder. Without a network the library would retry for half a minute; what it has in its cache
    it reads without one.
    """
    try:
        import datasets  # seconds to import, and needed for hub data only
        import huggingface_hub.constants
    except ModuleNotFoundError as problem:
        raise UserError(
            f"{what} is read by the library datasets, which is not installed", f"pip install 'lmtool[hub]', or {hint}"
        ) from problem
    local = Path(name).expanduser().is_dir()
    unreachable = not local and not offline and not answers(huggingface_hub.constants.ENDPOINT)
    modes = (datasets.config, huggingface_hub.constants)
    before = [mode.HF_HUB_OFFLINE for mode in modes]
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    for mode, was in zip(modes, before, strict=True):
        mode.HF_HUB_OFFLINE = was or local or offline or unreachable
    logger.setLevel(logging.ERROR)  # its retries are reported once, as the error
    try:
        yield datasets
    except (OSError, ValueError, RuntimeError, LookupError, datasets.exceptions.DatasetsError) as problem:
        # The library's own errors, those of its transport, of huggingface_hub and of pyarrow are all of these kinds.
        reason = masked(" ".join(str(problem).split()))[:160] or type(problem).__name__
        if not local and (unreachable or offline):
            reason = "no network" if unreachable else "offline=true, and not in the cache"
        raise UserError(f"{what} cannot be read: {reason}", hint) from problem
    finally:
        logger.setLevel(level)
        for mode, was in zip(modes, before, strict=True):
            mode.HF_HUB_OFFLINE = was
