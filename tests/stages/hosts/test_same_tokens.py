"""A model over several hosts gives the tokens and the logits of one process, to the bit."""

import json
import os
from typing import Any

import pytest

from tests.e2e.forked_hosts import run_alike
from tests.long_form import LONG_FORM, in_ci
from tests.stages.hosts.divided_models import CONFIGS, WAYS, main

SHORT = ("llama", "gemma2", "mixtral", "t5", "lfm2")
NAMES = in_ci(*SHORT, of=CONFIGS)


@pytest.fixture(scope="module", params=in_ci(3, of=[2, 3, 4]))
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Return what each host found, by model: one start of so many hosts for all."""
    folder, hosts = tmp_path_factory.mktemp("hosts"), request.param
    asked = list(CONFIGS) if os.environ.get(LONG_FORM) else list(SHORT)
    run_alike(hosts, main, folder, *asked)
    return {name: [json.loads((folder / f"{name}-{host}.json").read_text()) for host in range(hosts)] for name in asked}


@pytest.mark.parametrize("name", NAMES)
def test_every_host_has_the_whole_models_tokens_and_logits(answers: Any, name: str) -> None:
    for host in answers[name]:
        assert host["same"] == dict.fromkeys(WAYS, True), host["cuts"]


@pytest.mark.parametrize("name", NAMES)
def test_a_host_holds_what_its_share_of_the_skeleton_says(answers: Any, name: str) -> None:
    assert all(host["tensors"] for host in answers[name])


@pytest.mark.parametrize("name", NAMES)
def test_what_lies_on_several_hosts_is_refused_by_name(answers: Any, name: str) -> None:
    said = "output_hidden_states: what blocks return lies on several hosts, and isn't gathered; leave it out"
    assert [host["refusals"] for host in answers[name]] == [[said] * 2] * len(answers[name])


def test_between_hosts_goes_a_hidden_state_a_border_and_the_logits_and_no_more(answers: Any) -> None:
    wide, words, rows, tokens = 32, 200, 2, 12
    positions = {"greedy": 2 * (12 + tokens - 1), "beams": 6 * (12 + tokens - 1), "sampled": 2 * (12 + tokens - 1)}
    positions |= {"cache in fp8": positions["greedy"]} if "cache in fp8" in WAYS else {}
    hidden = sum(positions.values()) * wide * 4
    *others, last = (host["sent_bytes"] for host in answers["llama"])
    sequences = sum(count // (12 + tokens - 1) for count in positions.values())
    logits, first = sequences * tokens * words * 4 * len(others), others[0]
    assert len({*others}) == 1, "each sends on what it was sent"
    lookups = first - hidden  # prompt lookup's forwards are as many as its drafts make them
    assert 0 < lookups <= (12 + tokens * 4) * wide * 4, rows
    assert logits < last <= logits + (1 + tokens) * 4 * words * 4 * len(others)
