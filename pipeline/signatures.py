"""Which records this user's own commands wrote: each has a signature that only the user's key makes.

The key never leaves this user's files, so that what was sent, or changed on its way, has none that fits. Where no key
can be kept, nothing is signed, and every record is taken for a stranger's.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import TEMPORARY
from offstage.pipeline.plain_data import walk

_PLACE = re.compile(r"[/\\.~]")
_QUANTITY = re.compile(r"[\d.]+ ?[\w%]*")
_KEY_BYTES = 32
_OTHERS = 0o077


def key_path() -> Path:
    """Return where the user's key lies: in ``$XDG_DATA_HOME/offstage``."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "offstage" / "signing_key"


def sign(kind: str, content: Any) -> str | None:
    """Return the signature of ``content``, JSON data of a record of that ``kind``; null where there is no key."""
    try:
        key = _read_key() or _make_key()
    except (OSError, RuntimeError):  # no home, or none that may be written
        return None
    return _digest(key, kind, content) if key else None


def is_signed(kind: str, content: Any, signature: object) -> bool:
    """Return whether ``signature`` is what this user's key makes of ``content``."""
    try:
        key = _read_key()
    except (OSError, RuntimeError):
        return False
    if key is None or not isinstance(signature, str) or not signature.isascii():
        return False
    return hmac.compare_digest(signature, _digest(key, kind, content))


def places_in(config: Mapping[str, Any], noted: object) -> list[tuple[str, str]]:
    """Return each text in a run's ``config`` that may be a path or an address, and where it stands: what is signed.

    So are the places ``noted`` beside it, by which the others are found after a move. Whoever changes a number in a
    record of their own is no stranger for that.
    """
    both = config if noted is None else {**config, " places": noted}
    texts = ((place, leaf) for place, leaf in walk(both) if isinstance(leaf, str))
    return [(place, text) for place, text in texts if _PLACE.search(text) and not _QUANTITY.fullmatch(text)]


def _digest(key: bytes, kind: str, content: Any) -> str:
    as_read = json.loads(json.dumps(content))  # what a file gives back: lists, and keys that are texts
    return hmac.new(key, f"{kind}\0{json.dumps(as_read, sort_keys=True)}".encode(), "sha256").hexdigest()


def _read_key() -> bytes | None:
    """Return the key; null where there is none, or one that others may have made or read."""
    try:
        descriptor = os.open(key_path(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            return None
        key = file.read(_KEY_BYTES + 1)
    return key if len(key) == _KEY_BYTES else None


def _make_key() -> bytes | None:
    """Make a key, whole, where there is none, and return the one that then is there."""
    path = key_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(written, path)
    finally:
        written.unlink(missing_ok=True)
    return _read_key()
