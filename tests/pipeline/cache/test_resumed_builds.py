"""What a build that was killed left: what is gone on with, what is published, what goes."""

from __future__ import annotations

from pathlib import Path

from offstage.pipeline.cache import sealed_files
from offstage.pipeline.cache.store import Store
from tests.pipeline.cache.stores import CONTENT, KEY, names, never, write


def test_a_build_that_was_killed_as_it_was_published_is_gone_on_with(root: Path) -> None:
    folder = root / "plan" / f".tmp-{KEY}"
    folder.mkdir(parents=True)
    for name in (sealed_files.MANIFEST, ".tmp-0123"):
        folder.joinpath(name).write_text("half of it")
    folder.joinpath("done").write_text("kept")

    def go_on(building: Path) -> str:
        write(building)
        return building.joinpath("done").read_text()

    artifact, made, cached = Store(root).obtain("plan", KEY, go_on, resumes=("done",))
    assert (made, cached) == ("kept", False)
    assert ".tmp-0123" not in artifact.files
    assert sealed_files.verify(artifact.folder, stage="plan", key=KEY) == artifact.files
    assert not folder.exists()


def killed(root: Path, *, sealed: bool = False) -> Path:
    """Return the folder of a build that was killed: what it goes on with, its own folder, and what isn't its."""
    folder = root / "plan" / f".tmp-{KEY}"
    folder.joinpath(".own").mkdir(parents=True)
    write(folder)
    folder.joinpath("done").write_text("kept")
    folder.joinpath(".own", "state").write_text("half of the work")
    if sealed:
        sealed_files.seal(folder, stage="plan", key=KEY, without=(".own",))
    folder.joinpath("stray").symlink_to("/dev/zero")
    folder.joinpath("shards", "stray").write_text("not the build's") if not sealed else None
    return folder


def test_of_a_build_that_was_killed_nothing_is_published_that_it_did_not_write(root: Path) -> None:
    folder = killed(root)

    def go_on(building: Path) -> list[str]:
        left = names(building)
        assert building.joinpath(".own", "state").exists()
        write(building)
        return left

    artifact, left, _ = Store(root).obtain("plan", KEY, go_on, resumes=("done", ".own"))
    assert left == [".own", "done"]
    assert artifact.files.keys() == {*CONTENT, "done"}
    assert names(artifact.folder) == ["answer.json", "done", "manifest.json", "shards"]
    assert not folder.exists()


def test_what_a_build_has_for_itself_is_there_until_all_is_on_the_disk(root: Path) -> None:
    killed(root, sealed=True)
    artifact, made, cached = Store(root).obtain("plan", KEY, never, resumes=("done", ".own"))
    assert (made, cached) == (None, True)
    assert names(artifact.folder) == ["answer.json", "done", "manifest.json", "shards"]
    assert artifact == Store(root).find("plan", KEY)


def test_what_stands_in_the_place_of_a_file_that_is_gone_on_with_is_removed(root: Path) -> None:
    folder = root / "plan" / f".tmp-{KEY}"
    folder.joinpath("done").mkdir(parents=True)
    artifact, _, _ = Store(root).obtain("plan", KEY, write, resumes=("done",))
    assert artifact.files.keys() == CONTENT.keys()


def test_two_builds_that_no_lock_keeps_apart_do_not_share_what_they_go_on_with(root: Path, no_locks: None) -> None:
    def overtaken(folder: Path) -> str:
        (folder / "done").write_text("mine")
        write(folder)
        Store(root).obtain("plan", KEY, write, resumes=("done",))
        return (folder / "done").read_text()

    artifact, made, cached = Store(root).obtain("plan", KEY, overtaken, resumes=("done",))
    assert (made, cached) == ("mine", False)
    assert artifact.files.keys() == set(CONTENT)
    assert names(root / "plan") == [KEY]
