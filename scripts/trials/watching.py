"""What a command did beside its work: programs started, connections opened, files written outside its folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

_STARTS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pty.spawn", "socket.connect")
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "shutil.rmtree")
_ALLOWED = ("/dev/", "/proc/")
_KNOWN = ("fc-list", "uname")  # programs that matplotlib and platform start by themselves


def watch(place: Path) -> Callable[[], list[str]]:
    """Watch this process from here on; the function returned lists what it did. For a fork: a hook stays for good."""
    events: list[str] = []
    home = os.path.realpath(place)

    def inside(path: object) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # an open file's number
        resolved = os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(path))))
        return f"{resolved}/".startswith((f"{home}/", *_ALLOWED)) or "__pycache__" in resolved

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in _STARTS and arguments[0] not in _KNOWN:
            events.append(f"{event} {arguments[:2]!r}"[:200])
        elif event == "open" and isinstance(arguments[2], int):
            written = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if written and not inside(arguments[0]):
                events.append(f"writes {arguments[0]!r}")
        elif event in _CHANGES and not inside(arguments[0]):
            events.append(f"{event} {arguments[0]!r}")

    sys.addaudithook(hook)
    return lambda: list(events)
