from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from offstage.pipeline.config import register
from offstage.pipeline.hydra_composing import composed_once
from offstage.pipeline.hydra_messages import COMPOSING_ERRORS
from offstage.pipeline.sweeps.sweep_keys import register_sweeps


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    register_sweeps()
    register()


def configs(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, *, once: bool) -> tuple[list[str], int]:
    """Return the configs that Hydra calls a task with, its own keys in them, and how often it composed one."""
    called, composed = [], []
    load = ConfigLoaderImpl._load_configuration_impl

    def task(config: DictConfig) -> None:
        own = OmegaConf.to_yaml(HydraConfig.get())
        called.append(
            OmegaConf.to_yaml(config) + "\n".join(line for line in own.splitlines() if "output_dir" not in line)
        )

    def counted(loader: ConfigLoaderImpl, *given: Any, **options: Any) -> DictConfig:
        composed.append(given)
        return load(loader, *given, **options)

    with monkeypatch.context() as patch, composed_once() if once else nullcontext():
        patch.setattr(ConfigLoaderImpl, "_load_configuration_impl", counted)
        patch.setattr(sys, "argv", ["offstage", *arguments])
        hydra.main(config_path="pkg://offstage.conf", config_name="config", version_base="1.3")(task)()
    return called, len(composed)


@pytest.mark.parametrize(
    "arguments",
    [[], ["hydra.mode=RUN"], ["hydra.job.name=x", "generate=sample", "max_memory.cpu=1GB"], ["--run", "seed=3"]],
    ids=" ".join,
)
def test_a_runs_config_is_composed_once_and_is_what_hydra_composes(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, twice = configs(arguments, monkeypatch, once=False)
    config, once = configs(arguments, monkeypatch, once=True)
    assert config == expected
    assert (once, twice) == (1, 2)


@pytest.mark.parametrize(
    "arguments", [["+generate.top_k=x,y"], ["seed=[1"], ["~sed"], ["generate=gredy"]], ids=" ".join
)
def test_what_cannot_be_composed_is_said_in_hydras_words(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    messages = []
    for once in (False, True):
        with pytest.raises(COMPOSING_ERRORS) as error:
            configs(arguments, monkeypatch, once=once)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
