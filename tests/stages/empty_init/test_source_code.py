"""The code behind a name, told without running it: what an edit must change, and what it must not."""

import importlib.machinery
import py_compile
import sys
import zipfile
from pathlib import Path

import pytest

from offstage.pipeline.errors import ConfigError
from offstage.stages.empty_init.source_code import ABSENT, code_identity

FILES = {
    "net_a.py": "import helper_a\nfrom pack_a import part\nimport json, torch\nraise RuntimeError('code has run')\n",
    "helper_a.py": "def late():\n    import late_a\n",
    "late_a.py": "import importlib\nimportlib.import_module('named_a')\n",
    "named_a.py": "try:\n    import gone_a\nexcept ImportError:\n    pass\n",
    "pack_a/__init__.py": "",
    "pack_a/part.py": "from .sub import deep\nfrom . import other\n",
    "pack_a/other.py": "",
    "pack_a/sub/deep.py": "x = 1\n",
    "stranger_a.py": "x = 1\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        tmp_path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_that_is_imported_counts_and_nothing_runs(folder: Path) -> None:
    digests = code_identity(["net_a.Net"])
    local = {str(Path(name).relative_to(folder)) for name in digests if name.startswith(str(folder))}
    assert local == set(FILES) - {"stranger_a.py"}
    assert digests["gone_a"] == ABSENT
    assert "torch" in digests
    assert "python" in digests
    assert not {name for name in sys.modules if name.endswith("_a") and name in ("net_a", "helper_a", "pack_a")}


@pytest.mark.parametrize("name", sorted(FILES))
def test_an_edit_counts_where_the_file_does(folder: Path, name: str) -> None:
    before = code_identity(["net_a.Net"])
    folder.joinpath(name).write_text(FILES[name] + "# edited\n")
    assert (code_identity(["net_a.Net"]) != before) == (name != "stranger_a.py")


def test_a_module_that_comes_to_be_counts(folder: Path) -> None:
    before = code_identity(["net_a.Net"])
    folder.joinpath("gone_a.py").write_text("")
    assert code_identity(["net_a.Net"]) != before


def test_what_is_installed_stands_as_its_version_alone() -> None:
    assert set(code_identity(["transformers.LlamaForCausalLM"])) == {"transformers"}
    assert set(code_identity(["collections.OrderedDict", "sys.path"])) == {"python"}


def test_a_file_that_shadows_what_is_installed_is_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.joinpath("peft.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    assert set(code_identity(["peft.Thing"])) == {str(folder / "peft.py")}


def test_an_editable_install_is_looked_at() -> None:
    digests = code_identity(["offstage.stages.units.parse_size"])
    assert any(name.endswith("stages/units.py") for name in digests)


def test_code_without_source_is_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.joinpath("bare_a.py").write_text("x = 1\n")
    py_compile.compile("bare_a.py", cfile="bare_a.pyc")
    folder.joinpath("bare_a.py").unlink()
    with pytest.raises(ConfigError, match=r"'bare_a' has no source .*bare_a\.pyc"):
        code_identity(["bare_a.Net"])
    with zipfile.ZipFile("all_a.zip", "w") as archive:
        archive.writestr("zipped_a.py", "x = 1\n")
    monkeypatch.syspath_prepend(str(folder / "all_a.zip"))
    folder.joinpath("helper_a.py").write_text("import zipped_a\n")
    with pytest.raises(ConfigError, match="'zipped_a' has no source"):
        code_identity(["net_a.Net"])


def test_an_extension_counts_by_its_bytes(folder: Path) -> None:
    library = folder / f"native_a{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    library.write_bytes(b"one")
    before = code_identity(["native_a.Net"])
    library.write_bytes(b"two")
    assert code_identity(["native_a.Net"]) != before
