"""The keys of trackers: what is refused before any work, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.config import check
from offstage.pipeline.tracking.options import TrackerConfig, check_tracker, located, read_tracker
from offstage.pipeline.typed_config import defaults


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offstage.pipeline.tracking.options.find_spec", lambda name: name != "trackio_of_old")


def config(**tracker: Any) -> dict[str, Any]:
    plain = defaults(TrackerConfig) | {"kind": "mlflow", "folder": "/tmp/store", **tracker}
    return {"stages": ["plan"], "stop_after": None, "outputs": "outputs", "tracker": plain}


@pytest.mark.parametrize(
    ("tracker", "key", "words"),
    [
        ({"kind": "wandb"}, "tracker.kind", "'wandb' is no tracker"),
        ({"kind": "mlflw"}, "tracker.kind", "did you mean 'mlflow'?"),
        ({"folder": "http://host:5000"}, "tracker.folder", "is an address and no folder; give tracker.uri=http://host"),
        ({"folder": None}, "tracker.folder", "None is no folder"),
        ({"folder": ""}, "tracker.folder", "'' is no folder"),
        ({"folder": "/etc/passwd/store"}, "tracker.folder", "'/etc/passwd' is a file"),
        ({"experiment": " "}, "tracker.experiment", "is no name of an experiment"),
        ({"experiment": "e" * 251}, "tracker.experiment", "a name has 1 to 250 characters"),
        ({"experiment": 5}, "tracker.experiment", "5 is no text"),
        ({"notes": 5}, "tracker.notes", "5 is no text or null"),
        ({"foldr": "x"}, "tracker.foldr", "unknown key (did you mean 'folder'?)"),
        ({"uri": "host:5000"}, "tracker.uri", "'host:5000' is no address of an MLflow server; give http://HOST:PORT"),
        ({"uri": "http://host:99999"}, "tracker.uri", "is no address"),
        ({"uri": "http://host/?a=b"}, "tracker.uri", "is no address"),
        ({"uri": "sqlite:///runs.db"}, "tracker.uri", "is no address"),
        ({"uri": "http://me:secret@host"}, "tracker.uri", "MLFLOW_TRACKING_PASSWORD"),
        ({"kind": "trackio", "uri": "http://host"}, "tracker.uri", "trackio has no server"),
        ({"kind": "trackio", "folder": "https://host"}, "tracker.folder", "trackio's runs are kept in one"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_the_rule_and_what_to_give(
    tracker: dict[str, Any], key: str, words: str
) -> None:
    (fault,) = check(config(**tracker), ["plan"])
    assert fault.key == key
    assert words in fault.message
    assert "secret" not in fault.message


@pytest.mark.parametrize(
    "tracker",
    [{}, {"uri": "https://host/prefix", "folder": None}, {"uri": "http://[::1]:5000"}, {"kind": "trackio"}],
)
def test_what_names_a_store_is_no_fault(tracker: dict[str, Any]) -> None:
    assert not list(check_tracker(config(**tracker)))


def test_a_tracker_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offstage.pipeline.tracking.options.find_spec", lambda name: None)
    (fault,) = check_tracker(config())
    assert "pip install 'offstage-pipeline[mlflow]'" in fault.message


@pytest.mark.parametrize("tracker", [{}, {"kind": None}, None])
def test_no_tracker_has_no_faults(tracker: Any) -> None:
    assert not list(check_tracker({"tracker": tracker}))


def test_an_address_stays_one_and_a_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (located("runs"), located("http://host")) == (str(tmp_path / "runs"), "http://host")
    assert read_tracker(config(uri="http://host/")).store == "http://host"
