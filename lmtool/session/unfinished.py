"""The finished part of an output file. If a command is stopped, the same command continues after it."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lmtool import __version__
from lmtool.errors import UserError
from lmtool.runs.files import to_json
from lmtool.system.files import user_path


class UnfinishedOutput:
    """The finished part of an output. file: for reading and appending, in memory if the output is an open stream. part:
    the path of the file."""

    def __init__(self, output: str, request: object):
        self.path = Path(os.path.realpath(user_path(output)))
        self.is_stream = self.path.exists() and not self.path.is_file()
        content = to_json([__version__, request], indent=None)
        digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        self.part = self.path.with_name(f"{self.path.name}.{digest[:12]}.unfinished")
        self.file: BinaryIO = io.BytesIO() if self.is_stream else self._open(output)

    def _open(self, output: str) -> BinaryIO:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = os.fdopen(os.open(self.part, flags, 0o666), "a+b")
        except OSError as error:
            raise UserError(f"output={output}: {self.part.name}: {error.strerror}", "use another output=") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            fault = f"output={output} is being written by the same command in another process"
            raise UserError(fault, "wait for it, or use another output=") from None
        except OSError:  # a file system without locks
            pass
        return file

    def damaged(self) -> UserError:
        """Returns the error for a file that cannot be continued."""
        return UserError(f"{self.part} is damaged", f"rm {self.part}, and repeat the command")

    def lines(self, multiple: int = 1) -> int:
        """Returns the number of complete lines, of which a multiple of a number is kept; the file ends after them."""
        self.file.seek(0)
        counted, end, kept = 0, 0, 0
        for line in self.file:
            end += len(line)
            if line.endswith(b"\n"):
                counted += 1
                kept = end if counted % multiple == 0 else kept
        self.file.truncate(kept)
        return counted - counted % multiple

    def publish(self) -> None:
        """Makes the file the output."""
        self.file.flush()
        if self.is_stream:
            self.file.seek(0)
            with self.path.open("wb") as stream:
                shutil.copyfileobj(self.file, stream)
        else:
            os.replace(self.part, self.path)

    def close(self, finished: bool) -> None:
        """Removes the file, unless something in it is still to be continued."""
        with suppress(OSError):  # on a full disk, what was written before is still to be continued
            self.file.flush()
        with suppress(OSError):
            if not self.is_stream and (finished or not self.part.stat().st_size):
                self.part.unlink(missing_ok=True)
        with suppress(OSError):
            self.file.close()


@contextmanager
def unfinished_output(output: str, request: object) -> Iterator[UnfinishedOutput]:
    """Yields the finished part of an output, `OUTPUT.DIGEST.unfinished`, which is removed when the block ends without
    an error. Otherwise it stays, and the next call with the same request (everything that determines the output, as
    plain data) yields it again. Raises UserError if the file cannot be written, or another process writes the same
    output."""
    part, finished = UnfinishedOutput(output, request), False
    try:
        yield part
        finished = True
    except OSError as error:
        raise UserError(f"output={output} cannot be written: {error.strerror}", "use another output=") from error
    finally:
        part.close(finished)
