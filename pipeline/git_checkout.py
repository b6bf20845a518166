"""What git says of a checkout, read from its files: no process is started, so nothing that a checkout configures runs.

A checkout may be anybody's. git itself would run what its config names as filters and monitors.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from pathlib import Path

from offstage.pipeline.regular_files import read_regular

_MOST_FILES = 20_000
"""More files than that take longer to look at than a run that is served from the cache."""
_ENTRY = struct.Struct(">10I20sH")
_EXTENDED, _NAME_LENGTH = 0x4000, 0x0FFF
_LINK = 0o120000
_FILE = 0o100000
_KIND = 0o170000


def git_state(folder: Path) -> dict[str, object] | None:
    """Return the ``commit`` of the checkout that ``folder`` lies in, and whether it is ``dirty``; null in none.

    Dirty is one where a file that git knows isn't as it was committed. Null stands for what can't be told from files:
    a commit before the first, the state of a very large checkout or of one whose index is of another version.
    """
    root = next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)
    if root is None:
        return None
    return {"commit": commit_of(root), "dirty": is_dirty(root)}


def commit_of(root: Path) -> str | None:
    """Return the commit that is checked out in ``root``, null before the first one or where git's files can't tell."""
    try:
        return _head(_git_folder(root / ".git"))
    except (OSError, ValueError):
        return None


def is_dirty(root: Path) -> bool | None:
    """Return whether a file of the checkout ``root`` that git knows isn't as it was committed; null: can't be told."""
    try:
        index = read_regular(_git_folder(root / ".git") / "index")
        entries, end = _entries(index)
        tree = index[end:]  # which tree the files make, as git keeps it, and that it knows none since one was added
        is_staged = tree.startswith(b"TREE") and tree[8:].startswith(b"\0-1 ")
        return is_staged or any(_differs(root, *entry) for entry in entries)
    except (OSError, ValueError, struct.error):
        return None


def _git_folder(git: Path) -> Path:
    """Return git's folder; in a worktree ``.git`` is a file that names it."""
    if git.is_dir():
        return git
    return git.parent / _text(git).removeprefix("gitdir:").strip()


def _text(path: Path) -> str:
    return read_regular(path).decode("utf-8")


def _head(git: Path) -> str | None:
    head = _text(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head
    reference = head.removeprefix("ref:").strip()
    common = git / "commondir"
    shared = git / _text(common).strip() if common.exists() else git
    loose = shared / reference
    if loose.is_file():
        return _text(loose).strip()
    match = re.search(rf"^([0-9a-f]+) {re.escape(reference)}$", _text(shared / "packed-refs"), re.MULTILINE)
    return match[1] if match else None


def _entries(index: bytes) -> tuple[list[tuple[str, tuple[int, ...], bytes]], int]:
    """Return the name of each file in git's ``index``, what its status was and its hash; and where they end."""
    magic, version, count = struct.unpack_from(">4sII", index)
    if magic != b"DIRC" or version not in (2, 3) or count > _MOST_FILES:
        raise ValueError("an index of another kind")
    entries, place = [], 12
    for _ in range(count):
        *status, digest, flags = _ENTRY.unpack_from(index, place)
        begin = place + _ENTRY.size + 2 * bool(flags & _EXTENDED)
        end = index.index(b"\0", begin)
        entries.append((os.fsdecode(index[begin:end]), tuple(status), digest))
        place += (end - place + 8) // 8 * 8  # a name ends with one to eight zeros
    return entries, place


def _differs(root: Path, name: str, status: tuple[int, ...], digest: bytes) -> bool:
    """Return whether the file ``name`` isn't the one that git hashed to ``digest`` in the ``status`` of then."""
    seconds, nanoseconds, mode, size = status[2], status[3], status[6], status[9]
    if mode & _KIND not in (_FILE, _LINK):  # another repository in it
        return False
    path = root / name
    try:
        now = path.lstat()
    except FileNotFoundError:
        return True
    if now.st_mode & _KIND != mode & _KIND:
        return True
    if now.st_size & 0xFFFFFFFF == size and divmod(now.st_mtime_ns, 10**9) == (seconds, nanoseconds):
        return False
    content = os.fsencode(path.readlink()) if mode & _KIND == _LINK else read_regular(path)
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).digest() != digest
