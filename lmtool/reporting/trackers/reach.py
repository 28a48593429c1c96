"""Whether a tracker's server can be used, found out before its library is: a connection that fails half-way through
its own start may leave it unable to work offline."""

from __future__ import annotations

import netrc
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

PATIENCE = 2.0
"""Seconds in which a server must answer."""
Mode = Literal["online", "offline", "disabled"]
_MODES: dict[str, Mode] = {
    "dryrun": "offline",
    "run": "online",
    "online": "online",
    "offline": "offline",
    "disabled": "disabled",
}


def mode_of(mode: Mode | Literal["auto"], offline: bool, environ: Mapping[str, str]) -> tuple[Mode, str]:
    """online, offline or disabled, and why, of wandb's mode as configured.

    offline: the run opens no connection. environ: with WANDB_MODE and WANDB_DISABLED, which decide where the
    configuration says auto, WANDB_API_KEY and WANDB_BASE_URL.
    """
    if mode == "auto" and environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return "disabled", "WANDB_DISABLED"
    said = environ.get("WANDB_MODE", "").strip().lower()
    reason = f"logger.wandb.mode={mode}"
    if mode == "auto" and said in _MODES:
        mode, reason = _MODES[said], f"WANDB_MODE={said}"
    if mode in ("disabled", "offline"):
        return mode, reason
    if offline:
        return "offline", "offline=true"
    server = server_of(environ)
    if not has_key(server, environ):
        return "offline", f"no key for {server}: set WANDB_API_KEY, or type `wandb login`"
    if not replies(server):
        return "offline", f"{server} does not answer within {PATIENCE:g} seconds"
    return "online", reason


def server_of(environ: Mapping[str, str]) -> str:
    """The address of wandb's server."""
    return environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def has_key(server: str, environ: Mapping[str, str]) -> bool:
    """Whether wandb finds a key of this server: in the environment, or where `wandb login` puts it."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    for name in (environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            host = urllib.parse.urlsplit(server).hostname
            if name and host and netrc.netrc(Path(name).expanduser()).authenticators(host):
                return True
        except (OSError, ValueError, RuntimeError, netrc.NetrcParseError):
            continue
    return False


def replies(server: str, seconds: float = PATIENCE) -> bool:
    """Whether a server replies to a request, more than taking the connection; through the proxy of the environment."""
    # Only a run that is shown on a server needs these: every other command would pay for them.
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(server, method="HEAD"), timeout=seconds):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, http.client.HTTPException):
        return False
