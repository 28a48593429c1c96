"""Files with something wrong at random places."""

from __future__ import annotations

import random


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The bytes of a file after one to four accidents: one changed, some lost, one that means something put in, a part
    of the beginning said again."""
    damaged = bytearray(content)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(damaged) + 1)
        match chance.randrange(4):
            case 0:
                damaged[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del damaged[at : at + chance.randrange(300)]
            case 2:
                damaged[at:at] = chance.choice([b'"', b"\t", b",", b"\n", b"\r", b"{", b"\0", b"\xff"])
            case _:
                damaged[at:at] = damaged[: chance.randrange(200)]
    return bytes(damaged)
