"""A search by optuna that is typed again: what its jobs have given stands in their folders, and is given back to it.

Optuna's own storage is not used: the version Hydra's sweeper needs does not work with today's SQLAlchemy.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from lmtool.errors import UserError
from lmtool.sweeps import folders


def resume(sweeper: Any, arguments: list[str], folder: Path, has_result: bool) -> None:
    """Let a sweeper of optuna know the trials of earlier starts: those with a value count, the others are tried first.
    Nothing changes where a storage is typed. arguments: what was typed for all jobs."""
    import optuna
    from hydra_plugins.hydra_optuna_sweeper import _impl

    _silence()
    if sweeper.storage is not None or len(sweeper._get_directions()) > 1:
        return
    params = [*sweeper._parse_sweeper_params_config(), *arguments]
    distributions, _ = _impl.create_params_from_overrides(params)
    sweeper.storage, sweeper.study_name = optuna.storages.InMemoryStorage(), sweeper.study_name or "sweep"
    study = optuna.create_study(
        study_name=sweeper.study_name, storage=sweeper.storage, directions=sweeper._get_directions()
    )
    for path in sorted(folder.glob(f"*/{folders.SUBMITTED}")):
        varied = folders.read(path.parent, folders.SUBMITTED).get("varied", {})
        try:
            values = {name: _parsed(kind, varied[name.lstrip("+")]) for name, kind in distributions.items()}
        except (KeyError, ValueError):
            continue  # of another search space
        value = folders.read(path.parent).get("value")
        if folders.done(path.parent, has_result) and isinstance(value, int | float):
            trial = optuna.trial.create_trial(params=values, distributions=distributions, value=float(value))
            study.add_trial(trial)
            sweeper.n_trials -= 1
        else:
            study.enqueue_trial(values)
    if sweeper.n_trials < 1 and not study.trials:
        raise UserError(f"hydra.sweeper.n_trials={sweeper.n_trials}: no job", "give hydra.sweeper.n_trials=10")


def forget(sweeper: Any) -> None:
    """Let a sweeper of optuna begin a search that is written nowhere."""
    _silence()
    sweeper.storage = None


def _silence() -> None:
    """Let optuna say what is wrong alone."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def _parsed(distribution: Any, text: str) -> Any:
    """A value as it stands in an override, as the distribution has it. ValueError where it is not in it."""
    if hasattr(distribution, "choices"):
        chosen = [choice for choice in distribution.choices if str(choice) == text]
        if not chosen:
            raise ValueError(text)
        return chosen[0]
    value = int(text) if type(distribution).__name__.startswith("Int") else float(text)
    if not distribution._contains(distribution.to_internal_repr(value)):
        raise ValueError(text)
    return value
