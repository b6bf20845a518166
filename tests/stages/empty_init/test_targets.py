"""What a config's target may be: a module's class, known to be one before anything is called."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.empty_init.model import build_model


def build(**arguments: Any) -> nn.Module:
    return build_model({"kind": "module", "path": ".", **arguments}, "auto")


def gadgets(canary: Path) -> dict[str, dict[str, Any]]:
    """Return calls that leave ``canary`` behind, as the arguments of a target."""
    source = canary.with_name("source")
    shell = {"_target_": "torch._inductor.codecache.PyCodeCache.load", "source_code": f"open({str(canary)!r}, 'w')"}
    copied = {"_target_": "shutil.copyfile", "src": str(source), "dst": str(canary)}
    logged = {"_target_": "logging.FileHandler", "filename": str(canary)}
    return {
        "a function that runs what it is given": shell,
        "a function that copies a file": copied,
        "a class that makes a file": logged,
        "a pickle": {"_target_": "torch.load", "f": str(source), "weights_only": False},
        "a builtin": {"_target_": "builtins.open", "file": str(canary), "mode": "w"},
        "an argument of a module": {"_target_": "torch.nn.Sequential", "_args_": [copied]},
        "an argument of an argument": {
            "_target_": "torch.nn.Sequential", "_args_": [{"_target_": "torch.nn.Sequential", "_args_": [[logged]]}]
        },
        "an interpolation that makes a target": {
            "_target_": "torch.nn.Sequential",
            "_args_": ["${oc.create:{_target_:logging.FileHandler,filename:" + str(canary) + "}}"],
        },
        "a partial": {"_target_": "logging.FileHandler", "filename": str(canary), "_partial_": True},
        "a name that isn't there": {"_target_": "torch.nn.Nothing"},
        "a module that isn't there": {"_target_": "nowhere.Nothing"},
        "no name at all": {"_target_": ".."},
    }  # fmt: skip


GADGETS = list(gadgets(Path("canary")))


@pytest.mark.parametrize("gadget", GADGETS)
def test_what_is_no_module_is_never_called(gadget: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.with_name("source").write_text("x")
    with pytest.raises(ConfigError, match=r"model\.\S*: ") as refusal:
        build(**gadgets(canary)[gadget])
    assert not canary.exists()
    assert "\n" not in str(refusal.value)


def test_modules_inside_modules_and_their_configs_are_built() -> None:
    relu = {"_target_": "torch.nn.ReLU"}
    linear = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
    built = build(_target_="torch.nn.Sequential", _args_=[linear, relu])
    assert [type(module) for module in built] == [nn.Linear, nn.ReLU]  # type: ignore[arg-type]
    config = {"_target_": "transformers.LlamaConfig", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 9}
    assert type(build(_target_="transformers.LlamaModel", config=config)).__name__ == "LlamaModel"


def test_what_a_constructor_raises_is_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"model\._target_: 'torch\.nn\.Linear' can't be built: .*in_features"):
        build(_target_="torch.nn.Linear")
