"""Code is compiled once, kept where nobody else may write, anew where it was harmed, and done without elsewhere."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from offstage.stages.machine import compiled_code
from tests.deadline import deadline

SOURCE = "int answer(void) { return 42; }\n"
FUNCTIONS = ("answer",)
COMPILERS = ("cc", "gcc", "clang")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source in C, of a user whose cache is empty; skips where there is no compiler."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled_code, "_in_use", {})  # pytest may name two tests' folders the same
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.so"))


def test_a_source_is_compiled_once_and_found_ever_after(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_code.load(source) is None, "nothing is compiled where it is used"
    compiled_code.build(source, FUNCTIONS)
    library = compiled_code.load(source)
    assert library is not None
    assert library.answer() == 42
    monkeypatch.setenv("CC", "/nowhere/cc")
    compiled_code.build(source, FUNCTIONS)
    assert compiled_code.load(source) is library
    (path,) = kept(source.parent)
    assert sorted(left.name for left in path.parent.iterdir()) == ["library.so", "manifest.json"]


@pytest.mark.parametrize("has_room", [True, False])
def test_it_is_begun_beside_other_work_where_there_is_memory_and_waited_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    begins, may_end, compiler = tmp_path / "begins", tmp_path / "may_end", tmp_path / "cc.sh"
    own = next(filter(None, map(shutil.which, COMPILERS)))
    compiler.write_text(f"""#!/bin/sh
echo >> {begins}
while ! test -e {may_end}; do sleep 0.01; done
exec {own} "$@"
""")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(compiled_code, "has_room", lambda beside: has_room)
    for _ in range(2):
        compiled_code.begin(source, FUNCTIONS)
    with deadline():
        while has_room and not begins.exists():
            time.sleep(0.01)
    assert begins.exists() == has_room
    assert compiled_code.load(source) is None
    may_end.touch()
    for _ in range(2):
        compiled_code.build(source, FUNCTIONS)
        compiled_code.begin(source, FUNCTIONS)
    library = compiled_code.load(source)
    assert library is not None
    assert library.answer() == 42
    assert len(begins.read_text().splitlines()) == 1


def test_a_process_that_ends_meanwhile_waits_for_no_compiler_and_leaves_nothing_of_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, compiler = tmp_path / "asked", tmp_path / "cc.sh"
    compiler.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {asked}\nwait\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    program = (
        "import time; from pathlib import Path; from offstage.stages.machine import compiled_code\n"
        f"compiled_code.begin(Path({str(source)!r}), {FUNCTIONS!r}); asked = Path({str(asked)!r})\n"
        "while not asked.exists() or not asked.read_text().endswith('\\n'): time.sleep(0.01)\n"
    )
    with deadline():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        while psutil.pid_exists(int(asked.read_text())):
            time.sleep(0.01)
    assert done.stderr == ""
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    assert not list((tmp_path / "cache").rglob(".tmp-*"))


def test_another_source_of_that_name_is_other_code(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / source.name
    other.parent.mkdir()
    other.write_text(SOURCE.replace("42", "43"))
    for path in (source, other):
        compiled_code.build(path, FUNCTIONS)
    library = compiled_code.load(other)
    assert library is not None
    assert library.answer() == 43
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize("compiler", ["false", "/nowhere/cc", "cc --no-such-option", "true"])
def test_where_the_compiler_fails_nothing_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    compiled_code.build(source, FUNCTIONS)
    assert compiled_code.load(source) is None
    assert kept(tmp_path) == []
    assert not list((tmp_path / "cache").rglob(".tmp-*"))


def answered(source: Path) -> int | None:
    """Return what a new process would have of the library; null where it would go without."""
    compiled_code._in_use.clear()
    library = compiled_code.load(source)
    return None if library is None else int(library.answer())


@pytest.mark.parametrize("mode", [0o702, 0o720])
def test_code_that_others_may_write_to_is_compiled_anew(source: Path, tmp_path: Path, mode: int) -> None:
    compiled_code.build(source, FUNCTIONS)
    (path,) = kept(tmp_path)
    for place in (path, path.parent):
        place.chmod(mode)
        assert answered(source) is None
        compiled_code.build(source, FUNCTIONS)
        assert answered(source) == 42
    path.rename(tmp_path / "aside")
    path.symlink_to(tmp_path / "aside")
    assert answered(source) is None
    compiled_code.build(source, FUNCTIONS)
    assert answered(source) == 42


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"x",
    "changed": lambda content: content.replace(b"answer", b"danger"),
    "no code": lambda content: b"no code",
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_what_is_not_as_it_was_compiled_is_compiled_anew(
    source: Path, tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    compiled_code.build(source, FUNCTIONS)
    (path,) = kept(tmp_path)
    path.with_name("harmed").write_bytes(harm(path.read_bytes()))  # the file itself may be in use by this process
    path.with_name("harmed").chmod(0o700)
    path.with_name("harmed").rename(path)
    assert answered(source) is None
    compiled_code.build(source, FUNCTIONS)
    assert answered(source) == 42


def test_what_is_loaded_is_what_was_checked(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_code.build(source, FUNCTIONS)
    (path,) = kept(tmp_path)
    load = ctypes.CDLL

    def exchanged(name: str) -> ctypes.CDLL:
        path.parent.rename(tmp_path / "checked")
        path.parent.mkdir()
        path.write_bytes(b"another's")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", exchanged)
    assert answered(source) == 42


def test_below_a_folder_that_others_may_write_to_nothing_is_compiled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
    shared.chmod(0o777)
    with caplog.at_level("INFO"):
        compiled_code.build(source, FUNCTIONS)
    assert f"'{shared}'" in caplog.text
    assert "chmod go-w" in caplog.text
    assert not list(shared.rglob("*.so"))
    shared.chmod(0o1777)
    compiled_code.build(source, FUNCTIONS)
    assert answered(source) == 42
    shared.chmod(0o777)
    assert answered(source) is None


def test_without_a_umask_its_folders_are_closed_all_the_same(source: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "cache" / "offstage").mkdir(parents=True)
        (tmp_path / "cache").chmod(0o755)
        compiled_code.build(source, FUNCTIONS)
    finally:
        os.umask(before)
    assert answered(source) == 42
    (path,) = kept(tmp_path)
    assert [place.stat().st_mode & 0o22 for place in (path, *path.parents[:3])] == [0, 0, 0, 0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("above", range(4))
def test_what_is_somebody_elses_is_never_run(source: Path, tmp_path: Path, above: int) -> None:
    compiled_code.build(source, FUNCTIONS)
    (path,) = kept(tmp_path)
    place = (path, *path.parents)[above]
    os.chown(place, 12345, -1)
    assert answered(source) is None
    compiled_code.build(source, FUNCTIONS)
    assert answered(source) == (42 if above < 2 else None)


def test_a_library_without_a_function_is_not_kept(source: Path, tmp_path: Path) -> None:
    compiled_code.build(source, ("answer", "question"))
    assert answered(source) is None
    assert kept(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_done_without(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file lies where a folder must be")
    compiled_code.build(source, FUNCTIONS)
    assert compiled_code.load(source) is None
