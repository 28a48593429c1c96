"""Values to sweep over that stand in YAML, as users of Hydra write them: `hydra.sweeper.params` of a chosen file.

conf/sweep/bert.yaml is one; any experiment may hold some too. They join what was typed before the jobs are known, and
what is typed for a key stands in the place of its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lmtool.config import compose
from lmtool.config.offers import Offers
from lmtool.config.overrides import Typed, key_of


def with_grid(
    read: Callable[[Sequence[str], Offers], Typed],
    overrides: Sequence[str],
    offers: Offers,
    primary: str,
    config_dirs: Sequence[Path],
) -> Typed:
    """What was typed, behind the values of the chosen YAML, for any sweeper of Hydra."""
    typed = read(overrides, offers)
    if typed.problems:
        return typed
    grid = compose.grid(primary, typed, config_dirs)
    own = {key_of(text) for text in overrides}
    words = [f"{key}={values}" for key, values in grid.items() if key_of(key) not in own]
    return read([*words, *overrides], offers) if words else typed
