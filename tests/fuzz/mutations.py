"""What is done to a valid input: to its bytes, and to the values of the JSON that it is or holds.

A mutation takes the content, another valid content of the same kind and a source of chance. The same seed gives the
same mutation. Bytes alone would be refused by the first check of a packed format, so some mutations unpack it, change
what is inside, and pack it again as it should be: lengths, checksums and hashes are right then.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

Mutation = Callable[[bytes, bytes, Random], bytes]
Mutations = Sequence[Mutation]

_MARKS = b'0123456789-,:[]{}"\\ \x00\xff\x80PK.u'
_LONG = 100_000


def flip(content: bytes, _donor: bytes, chance: Random) -> bytes:
    """Flip one to eight bits."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 8)) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def overwrite(content: bytes, _donor: bytes, chance: Random) -> bytes:
    """Put a byte that means something in a format over another, or a number of four or eight over as many."""
    place = chance.randrange(len(content) + 1)
    number = chance.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, chance.getrandbits(64)))
    size = chance.choice((1, 1, 4, 8))
    put = bytes([chance.choice(_MARKS)]) if size == 1 else (number % 2 ** (8 * size)).to_bytes(size, "little")
    return content[:place] + put + content[place + size :]


def cut(content: bytes, _donor: bytes, chance: Random) -> bytes:
    """Cut the end off, or the beginning."""
    place = chance.randrange(len(content) + 1)
    return content[place:] if chance.random() < 0.2 else content[:place]


def drop(content: bytes, _donor: bytes, chance: Random) -> bytes:
    """Take a block out."""
    begin, end = _block(content, chance)
    return content[:begin] + content[end:]


def duplicate(content: bytes, _donor: bytes, chance: Random) -> bytes:
    """Put a block in twice, somewhere."""
    (begin, end), place = _block(content, chance), chance.randrange(len(content) + 1)
    return content[:place] + content[begin:end] + content[place:]


def swap(content: bytes, _donor: bytes, chance: Random) -> bytes:
    """Let two blocks change places."""
    first, second, third, fourth = sorted(chance.randrange(len(content) + 1) for _ in range(4))
    return content[:first] + content[third:fourth] + content[second:third] + content[first:second] + content[fourth:]


def splice(content: bytes, donor: bytes, chance: Random) -> bytes:
    """Put a block of the other content over one of this."""
    (begin, end), (from_, to) = _block(content, chance), _block(donor, chance)
    return content[:begin] + donor[from_:to] + content[end:]


def _block(content: bytes, chance: Random) -> tuple[int, int]:
    begin = chance.randrange(len(content) + 1)
    return begin, min(len(content), begin + chance.choice((1, 2, 4, 16, 64, 512, 4096)))


BYTES: Mutations = (flip, flip, overwrite, overwrite, cut, drop, duplicate, swap, splice)


def _nested(depth: int, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


NUMBERS: Sequence[int | float] = (
    0, 1, -1, 2, 3, 7, 16, 127, 1000, 2**16, 2**20, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    -(2**63), 10**30, 0.0, -0.0, 0.5, -0.5, 1e-320, 1e30, 1e308, -1e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
TEXTS: Sequence[str] = (
    "", " ", "0", "1", "-1", "1e9", "1GB", "null", "true", "cpu", "disk", "auto", "float8", "\x00", "a\x00b", "\x1b[2J",
    "\r\n", "\ud800", "a\udfff", "\u202e", "\U0001f600", "../x", "/etc/passwd", "/dev/zero", "a/b", "a.b.c", ".", "..",
    "~", "${oc.env:HOME}", "${a}", "%s%n", "{}", "[1]", "*", "(a+)+$", "torch.load", "LlamaModel", "llama", "x" * 300,
    "x" * _LONG, "\ud800" * 300, "é" * _LONG,
)  # fmt: skip
_OTHERS: Sequence[Callable[[], Any]] = (
    lambda: None,
    lambda: True,
    lambda: False,
    list,
    dict,
    lambda: [[]],
    lambda: [None],
    lambda: [1, 2],
    lambda: ["a", "b"],
    lambda: [{}],
    lambda: [{"a": [1]}],
    lambda: {"": None},
    lambda: {"a": 1},
    lambda: _nested(40, list),
    lambda: _nested(120, list),
    lambda: _nested(120, dict),
    lambda: [0] * 10_000,
    lambda: ["cpu"] * 1000,
    lambda: {str(number): number for number in range(1000)},
    lambda: {"_target_": "torch.load", "f": "x"},
)
_Place = tuple[Any, Any]
_Edit = Callable[[Any, Any, Random], None]


def odd_value(chance: Random) -> Any:
    """Return a value that somebody may have forgotten."""
    kind = chance.randrange(3)
    if kind < 2:
        return chance.choice(NUMBERS if kind else TEXTS)
    return chance.choice(_OTHERS)()


def _descend(value: Any, chance: Random) -> _Place | None:
    """Return a container in ``value`` and a key of it: any level is as likely as another, however wide the next is."""
    place: _Place | None = None
    while isinstance(value, dict | list) and value and (place is None or chance.random() < 0.75):
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        place = value, key
        value = value[key]
    return place


def _replace(place: _Place, _donor: Any, chance: Random) -> None:
    place[0][place[1]] = odd_value(chance)


def _nudge(place: _Place, _donor: Any, chance: Random) -> None:
    """Change the value a little: a number by a step or a factor, a text by a letter, anything else by its type."""
    container, key = place
    value = container[key]
    if isinstance(value, bool) or value is None:
        container[key] = chance.choice((0, 1, "", None, not value))
    elif isinstance(value, int | float):
        steps = (value + 1, value - 1, -value, value * 2, value // 2 if value == value else 0, float(value), str(value))
        container[key] = chance.choice((*steps, [value]))
    elif isinstance(value, str):
        at = chance.randrange(len(value) + 1)
        container[key] = chance.choice(
            (value[:at] + chance.choice("aZ0./\x00é\ud800") + value[at:], value[:at], value * 2)
        )
    else:
        container[key] = chance.choice((len(value), str(value)[:50], list(value), [value]))


def _remove(place: _Place, _donor: Any, _chance: Random) -> None:
    del place[0][place[1]]


def _rename(place: _Place, _donor: Any, chance: Random) -> None:
    container, key = place
    if isinstance(container, dict):
        new = chance.choice(
            (key + "x", key[:-1], key.upper(), "", chance.choice(TEXTS), chance.choice(list(container)))
        )
        items = [(new if name == key else name, value) for name, value in container.items()]
        container.clear()
        container.update(items)
    else:
        container.insert(0, container.pop(key))


def _repeat(place: _Place, _donor: Any, chance: Random) -> None:
    container, key = place
    if isinstance(container, list):
        container[key:key] = [container[key]] * chance.choice((1, 2, 100, 3000))
    else:
        container[f"{key}{chance.randrange(3)}"] = deepcopy(container[key])


def _splice_value(place: _Place, donor: Any, chance: Random) -> None:
    """Put a value of the other content here: often what stands there under the same key."""
    container, key = place
    same = donor.get(key) if isinstance(donor, dict) and chance.random() < 0.5 else None
    other = _descend(donor, chance)
    container[key] = deepcopy(same if same is not None else other[0][other[1]] if other else None)


_EDITS: Sequence[_Edit] = (
    _replace,
    _replace,
    _replace,
    _nudge,
    _nudge,
    _nudge,
    _remove,
    _rename,
    _repeat,
    _splice_value,
)


def _swap_values(value: Any, chance: Random) -> None:
    one, other = _descend(value, chance), _descend(value, chance)
    if one and other:
        first, second = json.loads(json.dumps([one[0][one[1]], other[0][other[1]]]))
        one[0][one[1]] = second
        if not isinstance(other[0], list) or other[1] < len(other[0]):
            other[0][other[1]] = first


def json_value(content: bytes, donor: bytes, chance: Random) -> bytes:
    """Change one to three values of a JSON text; one that isn't JSON has its bytes changed."""
    try:
        value, other = json.loads(content), json.loads(donor)
    except (ValueError, RecursionError):
        return flip(content, donor, chance)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        place = _descend(value, chance)
        if place is None or chance.random() < 0.02:
            value = odd_value(chance)
        elif chance.random() < 0.08:
            _swap_values(value, chance)
        else:
            chance.choice(_EDITS)(place, other, chance)
    escaped = chance.random() < 0.7
    return json.dumps(value, ensure_ascii=escaped).encode("utf-8", "surrogatepass")


def json_twice(content: bytes, donor: bytes, chance: Random) -> bytes:
    """Let a key of an object stand there twice, with another value."""
    try:
        place = _descend(json.loads(content), chance)
    except ValueError:
        place = None
    if place is None or not isinstance(place[0], dict):
        return flip(content, donor, chance)
    key = json.dumps(place[1]).encode()
    value = json.dumps(odd_value(chance)).encode()
    return content.replace(key + b":", key + b": " + value + b", " + key + b":", 1)


JSON: Mutations = (*[json_value] * 12, json_twice, *BYTES)


def inside_safetensors(content: bytes, donor: bytes, chance: Random) -> bytes:
    """Change the header of a safetensors file, and the eight bytes before it to its length."""
    header, data = _safetensors(content)
    changed = chance.choice((json_value, json_value, json_twice, flip, overwrite))(
        header, _safetensors(donor)[0], chance
    )
    if chance.random() < 0.15:
        data = chance.choice(BYTES)(data, _safetensors(donor)[1], chance)
    return len(changed).to_bytes(8, "little") + changed + data


def shift_offsets(content: bytes, _donor: bytes, chance: Random) -> bytes:
    """Change the shape, dtype or place of tensors so that their sizes may still agree."""
    header, data = _safetensors(content)
    try:
        value = json.loads(header)
    except ValueError:
        return content
    names = [name for name, entry in value.items() if _is_entry(entry)] if isinstance(value, dict) else []
    if not names:  # it was changed before
        return content
    one, other = value[chance.choice(names)], value[chance.choice(names)]
    match chance.randrange(4):
        case 0:
            one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
        case 1:
            one["shape"] = chance.choice(
                (one["shape"][::-1], [math.prod(one["shape"])], [*one["shape"], 1], [1, *one["shape"]])
            )
        case 2:
            one["dtype"] = chance.choice(
                ("F32", "I32", "U32", "F16", "BF16", "I16", "F8_E4M3", "F4", "C64", "F64", "I64")
            )
        case _:
            one["dtype"], other["dtype"] = other["dtype"], one["dtype"]
    changed = json.dumps(value).encode()
    return len(changed).to_bytes(8, "little") + changed + data


def _is_entry(entry: Any) -> bool:
    """Return whether ``entry`` is what a header says of a tensor, its sizes numbers."""
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        return False
    return isinstance(entry["shape"], list) and all(isinstance(size, int) for size in entry["shape"])


def _safetensors(content: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length], content[8 + length :]


SAFETENSORS: Mutations = (*[inside_safetensors] * 8, *[shift_offsets] * 4, *BYTES)


def inside_zip(content: bytes, donor: bytes, chance: Random) -> bytes:
    """Change one entry of a zip, or the list of its entries, and pack it with checksums that fit."""
    entries, others = _entries(content), _entries(donor)
    if not entries:
        return flip(content, donor, chance)
    at = chance.randrange(len(entries)) if chance.random() < 0.4 else 0  # the pickle comes first
    name, data = entries[at]
    match chance.randrange(10):
        case 0:
            del entries[at]
        case 1:
            entries[at] = (
                chance.choice((name + "x", name[1:], "/" + name, chance.choice(entries)[0], "\x00", "..")),
                data,
            )
        case 2:
            entries[at] = (name, dict(others).get(name) or chance.choice(others)[1])
        case 3:
            chance.shuffle(entries)
        case _:
            entries[at] = (name, chance.choice(BYTES)(data, chance.choice(others)[1], chance))
    return _zipped(entries, chance)


def _entries(content: bytes) -> list[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, RuntimeError, struct.error):
        return []


def _zipped(entries: Sequence[tuple[str, bytes]], chance: Random) -> bytes:
    packed = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if chance.random() < 0.05 else zipfile.ZIP_STORED
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=method)
    return packed.getvalue()


ZIP: Mutations = (*[inside_zip] * 14, *BYTES)
