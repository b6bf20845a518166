"""What is done to packed weights: to the head of a GGUF file field by field, and to what a zstandard frame says."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from random import Random

from tests.fuzz.mutations import BYTES, Mutations

_FRAME = b"\x28\xb5\x2f\xfd"
_HEADER_BYTES = 14
"""The longest that a zstandard frame says of itself."""
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""The bytes of a GGUF value by its type's number."""
_STRING, _ARRAY = 8, 9
_KINDS = (*range(42), 99)
_SIZES = (0, 1, 2, 3, 4, 31, 32, 33, 255, 256, 257, 2**16, 2**20, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)

_MOST_SIZES = 8

Field = tuple[int, int]
"""Where a number lies, and its bytes."""


def inside_gguf(content: bytes, donor: bytes, chance: Random) -> bytes:
    """Change one to three numbers of the head of a GGUF file: counts, lengths, types, sizes, offsets."""
    fields = list(_fields_of(content))
    if not fields:
        return BYTES[0](content, donor, chance)
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        place, width = chance.choice(fields)
        number = int.from_bytes(changed[place : place + width], "little")
        steps = (number + 1, number - 1, number * 2, number // 2, number + 32, -number)
        number = chance.choice((*steps, chance.choice(_SIZES), chance.choice(_KINDS)))
        changed[place : place + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(changed)


def stretch_gguf(content: bytes, _donor: bytes, chance: Random) -> bytes:
    """Put bytes into the head or take some out, at the border of a field: all that follows lies elsewhere."""
    fields = list(_fields_of(content))
    place = chance.choice(fields)[0] if fields else 0
    count = chance.choice((1, 4, 8, 24, 32))
    return content[:place] + (bytes(count) if chance.random() < 0.5 else b"") + content[place + count :]


def _fields_of(content: bytes) -> Iterator[Field]:
    """Yield the numbers of a GGUF file's head, as far as it can be read."""
    try:
        yield from _read_fields(content)
    except (struct.error, KeyError, OverflowError):
        return


def _read_fields(content: bytes) -> Iterator[Field]:
    tensors, keys = struct.unpack_from("<QQ", content, 8)
    yield from ((4, 4), (8, 8), (16, 8))
    at = 24
    for _ in range(keys):
        yield at, 8
        at += 8 + _number(content, at, 8)
        yield at, 4
        kind, at = _number(content, at, 4), at + 4
        yield from _value_fields(content, at, kind)
        at = _value_end(content, at, kind)
    for _ in range(tensors):
        yield at, 8
        at += 8 + _number(content, at, 8)
        yield at, 4
        sizes, at = min(_number(content, at, 4), _MOST_SIZES), at + 4
        yield from ((at + 8 * place, 8) for place in range(sizes))
        at += 8 * sizes
        yield from ((at, 4), (at + 4, 8))
        at += 12


def _value_fields(content: bytes, at: int, kind: int) -> Iterator[Field]:
    if kind == _ARRAY:
        yield from ((at, 4), (at + 4, 8))
    elif kind == _STRING:
        yield at, 8
    else:
        yield at, _WIDTHS[kind]


def _value_end(content: bytes, at: int, kind: int) -> int:
    if kind == _STRING:
        return at + 8 + _number(content, at, 8)
    if kind != _ARRAY:
        return at + _WIDTHS[kind]
    element, count = struct.unpack_from("<IQ", content, at)
    if element != _STRING:
        return int(at + 12 + count * _WIDTHS[element])
    end = at + 12
    for _ in range(count):
        end += 8 + _number(content, end, 8)
    return end


def _number(content: bytes, at: int, width: int) -> int:
    shape = {4: "<I", 8: "<Q"}[width]
    return int(struct.unpack_from(shape, content, at)[0])


def inside_frames(content: bytes, donor: bytes, chance: Random) -> bytes:
    """Change what a zstandard frame says of itself, its size and its checksum among it."""
    places = [place for place in range(len(content)) if content.startswith(_FRAME, place)]
    if not places:
        return BYTES[0](content, donor, chance)
    changed = bytearray(content)
    begin = chance.choice(places)
    place = begin + chance.randrange(_HEADER_BYTES) if chance.random() < 0.7 else begin - 1 - chance.randrange(4)
    width = chance.choice((1, 1, 2, 4, 8))
    number = chance.choice((*_SIZES, chance.getrandbits(64)))
    changed[max(place, 0) : max(place, 0) + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
    return bytes(changed)


GGUF: Mutations = (*[inside_gguf] * 12, *[stretch_gguf] * 2, *BYTES)
FRAMES: Mutations = (*[inside_frames] * 8, *BYTES)
