from collections.abc import Iterator
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from offstage.pipeline.config import check, choose_stages, register, resolve
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.typed_config import Device

STAGES = ["empty_init", "plan", "shard_load", "dispatch", "generate"]


@pytest.fixture(scope="module", autouse=True)
def hydra_tree() -> Iterator[None]:
    register()
    with initialize_config_module("offstage.conf", version_base="1.3"):
        yield


def composed(*overrides: str) -> dict[str, Any]:
    return resolve(compose("config", list(overrides)))


def faults(*overrides: str) -> list[str]:
    return [str(fault) for fault in check(composed(*overrides), STAGES)]


PRETRAINED = ("model=pretrained", "model.path=/x")


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        ((), {"0": "3MB", "cpu": "3.8MB"}),
        (("max_memory.0=5GB",), {"0": "5GB", "cpu": "3.8MB"}),
        (("max_memory.1=3GB",), {"0": "3MB", "cpu": "3.8MB", "1": "3GB"}),
        (("max_memory={0: 3GB, cpu: 1GB}",), {"0": "3GB", "cpu": "1GB"}),
        (("max_memory={1: 3GB}",), {"0": "3MB", "cpu": "3.8MB", "1": "3GB"}),
        (("~max_memory.cpu",), {"0": "3MB"}),
        (("max_memory=null",), {}),
        (("max_memory.disk=1GB",), {"0": "3MB", "cpu": "3.8MB", "disk": "1GB"}),
        (PRETRAINED, {}),
        ((*PRETRAINED, "max_memory.cpu=1GB"), {"cpu": "1GB"}),
        ((*PRETRAINED, "max_memory.0=1000"), {"0": "1000"}),
        ((*PRETRAINED, "max_memory={0: 3GB, cpu: 1GB}"), {"0": "3GB", "cpu": "1GB"}),
        ((*PRETRAINED, "max_memory.cpu=80%"), {"cpu": "80%"}),
    ],
)  # fmt: skip
def test_max_memory_means_what_it_says(overrides: tuple[str, ...], meant: dict[str, str]) -> None:
    assert composed(*overrides)["max_memory"] == meant


def test_yaml_ints_and_the_command_line_meet_in_one_key(tmp_path) -> None:
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    tmp_path.joinpath("mine.yaml").write_text(
        "defaults: [schema, _self_]\nmodel: {kind: pretrained, path: /x}\nmax_memory: {0: 10GB, cpu: 20GB}\n"
    )
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        plain = resolve(compose("mine"))
        overridden = resolve(compose("mine", ["max_memory.0=5GB", "max_memory.1=3GB"]))
    GlobalHydra.instance().clear()
    initialize_config_module("offstage.conf", version_base="1.3").__enter__()
    assert plain["max_memory"] == {"0": "10GB", "cpu": "20GB"}
    assert overridden["max_memory"] == {"0": "5GB", "cpu": "20GB", "1": "3GB"}


def test_a_device_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(Exception, match=r"max_memory.gpu"):
        compose("config", ["max_memory.gpu=1GB"])
    assert [member.name for member in Device][-2:] == ["cpu", "disk"]


def test_a_device_map_keeps_keys_with_dots() -> None:
    given = composed("device_map={model.embed_tokens: cpu, model.layers.0: disk, lm_head: 0}")
    assert given["device_map"] == {"model.embed_tokens": "cpu", "model.layers.0": "disk", "lm_head": 0}


def test_generate_takes_any_option_without_a_plus() -> None:
    generate = composed("generate.num_beams=2", "generate.prompts=[[5,6,7],hello]")["generate"]
    assert generate["num_beams"] == 2
    assert generate["prompts"] == [[5, 6, 7], "hello"]


def test_a_module_takes_constructor_arguments_beside_its_target() -> None:
    model = composed("model=module", "model._target_=a.B", "model.path=/x", "model.hidden=3")["model"]
    assert (model["_target_"], model["hidden"]) == ("a.B", 3)


def test_paths_become_absolute(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = composed("model=pretrained", "model.path=here", "offload_folder=spill", "outputs=out")
    assert config["model"]["path"] == str(tmp_path / "here")
    assert config["offload_folder"] == str(tmp_path / "spill")
    assert config["outputs"] == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("outputs='~nouser/x'", "outputs"),
        ("model.tokenizer='~nouser/x'", "model.tokenizer"),
        ("device_map='~nouser/map.json'", "device_map"),
        ("tracker.folder='~nouser/x'", "tracker.folder"),
        ("generate.prompts=[{prompt: Look, images: ['~nouser/x.png']}]", "generate.prompts"),
        ("forward.audio=['~nouser/x.wav']", "forward.audio"),
    ],
)
def test_a_home_that_there_isnt_is_a_fault_of_its_key(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: '~nouser/[^ ]*' begins with the home folder of a user"):
        composed("model=pretrained", "model.path=/x", override)


def test_paths_inside_prompts_become_absolute(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is run again from another folder."""
    monkeypatch.chdir(tmp_path)
    chat = "{messages: [{role: user, content: [{type: image, path: b.png}, {type: text, text: Look}]}], audio: c.wav}"
    plain = composed(f"generate.prompts=[Look,{{prompt: Look, images: [a.png]}},{chat}]")
    text, beside, within = plain["generate"]["prompts"]
    assert text == "Look"
    assert beside == {"prompt": "Look", "images": [str(tmp_path / "a.png")]}
    assert within["audio"] == str(tmp_path / "c.wav")
    assert within["messages"][0]["content"][0] == {"type": "image", "path": str(tmp_path / "b.png")}


def test_mandatory_values_are_all_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"model\._target_: no value.*\n.*model\.path: no value"):
        composed("model=module")


def test_resolving_leaves_the_config_alone() -> None:
    config = compose("config", [])
    before = OmegaConf.to_yaml(config)
    resolve(config)
    assert OmegaConf.to_yaml(config) == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dtype=float31", ["dtype: 'float31' is none of auto", "did you mean 'float32'"]),
        ("dtype=null", ["dtype: None is none of auto, float32, float16, bfloat16", "the default is 'auto'"]),
        ("seed=x", ["seed: 'x'"]),
        ("seed=true", ["seed: True is no whole number"]),
        ("offload_state_dict=maybe", ["offload_state_dict: 'maybe'"]),
        ("offload_folder=3", ["offload_folder: 3 is no text or null"]),
        ("outputs=null", ["outputs: None"]),
        ("stop_after=pln", ["stop_after: 'pln'", "did you mean 'plan'"]),
        ("check_finite=1", ["check_finite: 1 is neither true nor false", "the default is False"]),
        ("storage.io=mapped", ["storage.io: 'mapped' is none of auto, direct, mmap", "did you mean 'mmap'"]),
        ("+storage.o=direct", ["storage.o: unknown key", "did you mean 'io'"]),
        ("storage=direct", ["storage: 'direct' is no group of the keys io"]),
        ("+max_memry=1", ["max_memry: unknown key", "did you mean 'max_memory'"]),
    ],
)
def test_bad_values_are_named_with_the_rule(override: str, words: list[str]) -> None:
    text = "\n".join(faults(override))
    assert all(word in text for word in words), text


def test_unknown_stages_are_named_with_the_closest() -> None:
    config = {**composed(), "stages": ["plan", "genrate"]}
    assert [str(f) for f in check(config, STAGES)] == [
        f"stages: 'genrate' is no stage (did you mean 'generate'?); installed are {', '.join(STAGES)}"
    ]


def test_a_stage_that_is_named_wrongly_again_and_again_is_told_once() -> None:
    (fault,) = check({**composed(), "stages": ["plan", *["pln"] * 3000]}, ["plan"])
    assert fault.message.startswith("'pln' is no stage (did you mean 'plan'?)")


def test_all_faults_are_reported_together() -> None:
    assert len(faults("dtype=x", "seed=y", "stop_after=z", "trace=1")) == 4


def test_the_shipped_config_is_sound() -> None:
    assert faults() == []
    assert faults("experiment=memory_sweep", "generate=sample", "stages=plan_only") == []


def test_variables_of_one_s_own_are_what_interpolations_make_of_them_and_stay_in_the_config() -> None:
    given = composed(
        "vars={lab: {link: 25GB, all: [1, {2: x}]}}", "hardware.rates.host_to_device=${vars.lab.link}", "vars.new=1"
    )
    assert given["hardware"]["rates"]["host_to_device"] == "25GB"
    assert given["vars"] == {"lab": {"link": "25GB", "all": [1, {2: "x"}]}, "new": 1}
    assert list(check(given, STAGES)) == []
    assert composed()["vars"] == {}


def test_a_list_of_stages_takes_any_name_that_an_entry_point_may_have() -> None:
    assert choose_stages("stages=[plan, my-stage]") == "stages=plan-my-stage"
    assert choose_stages("stages=plan_only") == "stages=plan_only"
