"""The system calls of a run on its storage, as strace tells them: which call, on what, which of its thread's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CHANGED = ("EIO", "ENOSPC", "EROFS", "EDQUOT")
"""What a call gives that changes a folder."""
LISTED = ("EIO", "EMFILE", "EACCES")
"""What opening a folder gives; the interpreter doesn't try that again where it was interrupted."""
OPENED = (*LISTED, "EINTR")
CREATED = (*OPENED, "ENOSPC", "EROFS", "EDQUOT")
READ = ("EIO", "EINTR")
WRITTEN = ("EIO", "EINTR", "ENOSPC", "EDQUOT")
ERRORS = {
    "openat": OPENED, "read": READ, "pread64": READ, "preadv": READ, "preadv2": READ, "readv": READ,
    "write": WRITTEN, "pwrite64": WRITTEN, "pwritev": WRITTEN, "pwritev2": WRITTEN, "writev": WRITTEN,
    "fsync": ("EIO", "EINTR", "ENOSPC", "EDQUOT", "EINVAL"), "fdatasync": ("EIO", "EINTR", "ENOSPC", "EDQUOT"),
    "msync": ("EIO",), "close": ("EIO", "ENOSPC", "EDQUOT"),
    "rename": CHANGED, "renameat": CHANGED, "renameat2": CHANGED, "mkdir": CHANGED, "mkdirat": CHANGED,
    "link": (*CHANGED, "EPERM", "EMLINK", "EOPNOTSUPP", "ENOSYS"), "linkat": CHANGED,
    "symlink": CHANGED, "symlinkat": CHANGED,
    "unlink": ("EIO", "EROFS", "EPERM"), "unlinkat": ("EIO", "EROFS", "EPERM"), "rmdir": ("EIO", "EROFS"),
    "newfstatat": ("EIO", "ENOMEM", "EACCES"), "stat": ("EIO",), "lstat": ("EIO",), "fstat": ("EIO",),
    "statx": ("EIO", "ENOSYS"), "access": ("EIO",), "faccessat2": ("EIO",), "readlink": ("EIO",),
    "getdents64": ("EIO",), "statfs": ("EIO", "EINTR", "ENOSYS"), "fstatfs": ("EIO", "EINTR", "ENOSYS"),
    "mmap": ("ENOMEM", "ENODEV", "EAGAIN"), "madvise": ("ENOMEM", "EIO"), "fadvise64": ("EIO", "ENOSYS"),
    "flock": ("EIO", "EINTR", "ENOLCK", "EOPNOTSUPP", "ENOSYS"), "fcntl": ("EIO", "EINTR", "ENOLCK"),
    "ftruncate": ("EIO", "EINTR", "ENOSPC"), "fallocate": ("EIO", "EINTR", "ENOSPC", "EOPNOTSUPP"),
    "utimensat": ("EIO", "EROFS", "EPERM"), "chmod": ("EPERM", "EROFS"), "fchmod": ("EPERM", "EROFS"),
    "copy_file_range": ("EIO", "ENOSPC", "EOPNOTSUPP"), "sendfile": ("EIO", "ENOSPC"),
}  # fmt: skip
"""The calls that work on files, with the errors that a disk, a quota, a full table or a file system without them may
give. Not among them: what moves no data and can't fail for such a reason (lseek, ioctl, dup, getcwd)."""
RETRIED = "EINTR"
"""The error after which POSIX has the call tried again: a run that meets it ends as it would have without."""

SHORT_COUNT, SHORTENED = "short count", " SHORT"
"""What stands for an error where a call does less than it was asked to, and the end of such a call's line in a log."""

_LINE = re.compile(r"^(\d+) +(\w+)\((.*)$")
_PLACE = re.compile(r'^(?:\d+|AT_FDCWD)?<([^<>]*)>(?:\(deleted\))?|"([^"]*)"')
_MAPPED = re.compile(r"\d+<(/[^<>]*)>")
_PASSING = re.compile(r"/\.tmp-|/runs/\d|/#\d")
"""What is in paths that no other run has."""
_VARIABLE = (
    (re.compile(r"[0-9a-f]{32,}"), "*"),
    (re.compile(r"\d{4}-\d\d-\d\d(/\d\d-\d\d-\d\d-\d+-\d+)?"), lambda match: "DAY/RUN" if match[1] else "DAY"),
    (re.compile(r"[\w.]+\.dat\b"), "*.dat"),
    (re.compile(r"(model)-\d+-of-\d+"), r"\1-*"),
    (re.compile(r"#\d+"), "#*"),  # a file of no name
)


@dataclass(frozen=True, slots=True)
class SystemCall:
    """One call: the thread that made it (0: the process's first), the kind of place that it works on, the errors that
    it can give.

    It is the ``number``-th of its thread and name; of those on ``path``, where that is one that every run works on.
    """

    thread: int
    name: str
    number: int
    place: str
    path: Path | None
    errors: Sequence[str]
    injected: bool

    @property
    def kind(self) -> str:
        """The kind of place, whichever stage's it is."""
        return re.sub(r"cache/[a-z_]+/", "cache/STAGE/", self.place)


def read_calls(log: Path, folder: Path) -> Iterator[SystemCall]:
    """Yield the calls in ``log`` that work on something in ``folder``, the working folder of the process."""
    threads: dict[str, int] = {}
    counts: Counter[tuple[int, str, Path | None]] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        thread, name, rest = threads.setdefault(match[1], len(threads)), match[2], match[3]
        path = _path(name, rest, folder)
        inside = path is not None and path.is_relative_to(folder) and path != folder
        fixed = path if inside and not _PASSING.search(str(path)) else None
        counts.update({(thread, name, None), (thread, name, fixed)})
        if path is not None and inside and name in ERRORS and not _is_other_control(name, rest):
            number, place = counts[thread, name, fixed], _kind(path.relative_to(folder))
            yield SystemCall(thread, name, number, place, fixed, _errors(name, rest), "(INJECTED)" in line)


def _errors(name: str, rest: str) -> Sequence[str]:
    if name == "openat" and "O_DIRECTORY" in rest:
        return LISTED
    return CREATED if name == "openat" and re.search("O_CREAT|O_WRONLY|O_RDWR", rest) else ERRORS[name]


def read_countable(log: Path, folder: Path) -> Iterator[SystemCall]:
    """Yield the calls that ``log`` lists which can be told to do less; ``short_counts.c`` writes it."""
    counts: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        name, _, rest = line.partition(" ")
        counts[name] += 1
        path = Path(rest.removesuffix(SHORTENED))
        place = _kind(path.relative_to(folder))
        yield SystemCall(0, name, counts[name], place, None, (SHORT_COUNT,), rest.endswith(SHORTENED))


def _is_other_control(name: str, rest: str) -> bool:
    return name == "fcntl" and "LK" not in rest.split("=")[0]


def _path(name: str, rest: str, folder: Path) -> Path | None:
    """Return what the call works on; None where it names nothing."""
    match = _MAPPED.search(rest) if name == "mmap" else _PLACE.search(rest)
    if match is None:
        return None
    named = match[1]
    quoted = re.search(r'"([^"]*)"', rest)
    if named is None or (rest.startswith("AT_FDCWD") and quoted):
        named = quoted[1] if quoted else ""
    return folder / named.removesuffix(" (deleted)")


def _kind(path: Path) -> str:
    """Return ``path`` with what varies, by run or by file, replaced."""
    place = str(path)
    for pattern, replacement in _VARIABLE:
        place = pattern.sub(replacement, place)
    return place
