"""Streams, folders, bytes and places that aren't as they should be: the run goes on, or one line says why not."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib import resources
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.conftest import COMMAND, Finished, environment, records_in
from tests.long_form import in_ci

Run = Callable[..., Finished]
PLAN = ["stop_after=plan"]


def shell(
    folder: Path, redirection: str, *arguments: str | bytes, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command through a shell that does ``redirection`` to its streams, or before it."""
    command = ["bash", "-c", redirection.replace("RUN", '"$@"'), "bash", *COMMAND, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(extra), capture_output=True, text=True, timeout=300, check=False
    )


def one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    "redirection",
    in_ci(
        "RUN >&- 2>&- <&-", "RUN | head -1",
        of=["RUN >&-", "RUN <&-", "RUN >&- 2>&- <&-", "RUN | head -1", "RUN | true"],
    ),
)  # fmt: skip
def test_a_run_does_not_need_its_streams(redirection: str, fresh_folder: Path) -> None:
    done = shell(fresh_folder, f"set -o pipefail; {redirection}", *PLAN)
    assert (done.returncode, "Traceback" in done.stderr, "Error" in done.stderr) == (0, False, False), done.stderr
    (record,) = records_in(fresh_folder).values()
    assert record["status"] == "completed"


@pytest.mark.long_form
def test_what_a_stream_cannot_show_is_shown_escaped(fresh_folder: Path, offstage_here: Run) -> None:
    asked = ("generate.prompts=['dé…jà']", "generate.max_new_tokens=1")
    assert offstage_here(*asked).code == 0, "what is served is shown too"
    for extra in ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}):
        done = shell(fresh_folder, "RUN", *asked, extra=extra)
        assert done.returncode == 0, done.stderr
        assert "jà" in done.stdout or "\\xe0" in done.stdout


def test_a_current_folder_that_is_gone_is_said_in_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    one_line(shell(gone, 'rmdir "$PWD"; RUN', *PLAN), 2, "current folder")


def test_a_prompt_that_is_not_utf_8_is_said_in_one_line(tmp_path: Path) -> None:
    one_line(shell(tmp_path, "RUN", b"generate.prompts=['\xff\xfe']"), 2, "UTF-8")


def test_half_a_character_in_a_prompt_is_said_in_one_line(tmp_path: Path, offstage: Run) -> None:
    tmp_path.joinpath("mine.yaml").write_text('defaults: [config, _self_]\ngenerate: {prompts: ["a\\uD800b"]}\n')
    done = offstage("--config-dir", ".", "--config-name", "mine")
    assert (done.code, "Traceback" in done.err, done.err.count("\n")) == (2, False, 1), done.err


@pytest.mark.parametrize(
    "place", in_ci("/proc/nothing", "/dev/null/x", of=["/etc/passwd", "/proc/nothing", "/dev/null/x", "/sys/x"])
)
def test_outputs_that_cannot_be_a_folder_are_said_in_one_line(place: str, tmp_path: Path) -> None:
    one_line(shell(tmp_path, "RUN", f"outputs={place}", *PLAN), 5, place)


MISTYPED = {
    "hidden_size": ["x", None, [1], -1, 0, 1.5, True],
    "num_hidden_layers": ["2", None, -3, {}, 0.5],
    "num_attention_heads": [0, "4", [], 7, None],
    "num_key_value_heads": [0, "a", -1, 3],
    "vocab_size": ["many", None, -5, {}],
    "rope_parameters": [1, "x", [], {"rope_type": "nothing"}, {"rope_theta": "x"}],
    "hidden_act": ["nothing", 5, None],
    "rms_norm_eps": ["tiny", [], None],
    "torch_dtype": [5, "float7", "int8", []],
    "dtype": [5, "float7", "int8", "Tensor", []],
    "architectures": [5, "LlamaForCausalLM", [5], [None], {}, ["AutoModel"]],
    "model_type": [5, None, [], {}],
    "tie_word_embeddings": ["x", 5, []],
    "max_position_embeddings": ["x", None, -1],
    "eos_token_id": ["x", {}, [[1]]],
    "quantization_config": ["x", 5],
    "auto_map": [5, "x", {"AutoModelForCausalLM": 5}],
    "text_config": [5, "x", []],
    "layer_types": ["x", [5], ["nothing"]],
    "transformers_version": [5, {}],
}


@pytest.mark.parametrize(
    "field",
    in_ci(
        "num_attention_heads", "auto_map", "quantization_config", of=MISTYPED,
    ),
)  # fmt: skip
def test_mistyped_fields_of_a_config_are_served_or_said_in_one_line(
    field: str, tmp_path: Path, offstage_here: Run
) -> None:
    folder = Path(
        shutil.copytree(str(resources.files("offstage.conf") / "checkpoints" / "tiny"), tmp_path / "checkpoint")
    )
    known = json.loads((folder / "config.json").read_text())
    for value in MISTYPED[field]:
        folder.joinpath("config.json").write_text(json.dumps({**known, field: value}))
        done = offstage_here(f"model.path={folder}", *PLAN)
        assert done.code in (0, 2, 3, 4), (value, done.err)
        assert "Traceback" not in done.err, value
        assert sum(line.startswith("offstage: ") for line in done.err.splitlines()) == bool(done.code), done.err
    assert all(record["status"] != "running" for record in records_in(tmp_path).values())


def deep(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
FILES += ["model.safetensors.index.json"]
CONTENTS = {
    "nested": deep(100_000), "a list": "[]", "a number": "5", "null": "null", "a text": '"x"', "half": "{",
    "a zero": "\0", "half a character": "\ud800",
}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "content"),
    in_ci(*product(FILES, ["nested"]), of=product(FILES, CONTENTS)),
)
def test_files_of_other_content_are_said_in_one_line(
    file: str, content: str, tmp_path: Path, offstage_here: Run
) -> None:
    folder = Path(
        shutil.copytree(str(resources.files("offstage.conf") / "checkpoints" / "tiny"), tmp_path / "checkpoint")
    )
    folder.joinpath(file).write_bytes(CONTENTS[content].encode("utf-8", "surrogatepass"))
    done = offstage_here(f"model.path={folder}", "generate.prompts=['a']", "generate.max_new_tokens=1")
    assert done.code in (0, 2, 3), done.err
    assert "Traceback" not in done.err
    assert sum(line.startswith("offstage: ") for line in done.err.splitlines()) == bool(done.code), done.err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_file_system_that_is_full_is_said_in_one_line(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = f"unshare -m bash -c 'mount -t tmpfs -o size=4k,nr_inodes=4 none {small} && exec \"$@\"' bash"
    if subprocess.run(["bash", "-c", f"{mount} true"], capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    one_line(shell(tmp_path, f"{mount} RUN", f"outputs={small}", *PLAN), 5, "No space left")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_an_output_that_is_full_is_named(fresh_folder: Path) -> None:
    done = shell(fresh_folder, "RUN > /dev/full", *PLAN)
    one_line(done, 5, "standard output: No space left on device; free some space where it goes")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_a_log_that_cannot_be_written_is_no_reason_to_end(fresh_folder: Path) -> None:
    fresh_folder.joinpath("here").mkdir()
    fresh_folder.joinpath("here", "run.log").symlink_to("/dev/full")
    done = shell(fresh_folder, "RUN", "hydra.run.dir=here", *PLAN)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(fresh_folder.joinpath("here", "run.json").read_text())["status"] == "completed"
