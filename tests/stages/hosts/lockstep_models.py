"""Run as each of several hosts: a small checkpoint divided among all answers many prompts in lockstep.

``main`` with the arguments ``FOLDER SEED NAME memory disk…`` leaves ``disk-RANK.json`` in the folder, and so on: which
calls didn't give what they give one after another in one process, by where the weights lie (``compared``).
The calls are drawn by the seed: how many, how long their prompts and
answers are, whether they sample, search by beams, or end early.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import offstage
from offstage.pipeline.peers import peers
from offstage.stages.hosts.stand_ins import StandIn
from tests.stages.hosts.divided_models import CONFIGS
from tests.stages.hosts.failing_calls import cache_beside, outcomes

_END = 7
"""A token that ends an answer of random weights sooner or later, or never."""


def drawn_calls(chance: random.Random) -> list[dict[str, Any]]:
    """Return the options of some calls of ``generate``."""
    calls = []
    for _ in range(chance.randint(3, 9)):
        rows = chance.choice([1, 1, 1, 2])
        length = chance.randint(2, 20)
        ids = torch.tensor([[chance.randrange(10, 200) for _ in range(length)] for _ in range(rows)])
        way = chance.choice([{}, {}, {"do_sample": True, "temperature": 3.0}, {"num_beams": 2}])
        ends = {"eos_token_id": [_END, *range(100, 100 + chance.choice([0, 30]))]}
        calls.append(
            {"input_ids": ids, "max_new_tokens": chance.randint(1, 12), "pad_token_id": 0, "do_sample": False}
            | ends
            | way
        )
    return calls


def answered(model: Any, options: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """Return the tokens and the logits of one call."""
    torch.manual_seed(seed)
    ids = options["input_ids"]
    output = model.generate(
        **options, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True
    )
    return [output.sequences, *output.logits]


def save(name: str, folder: Path) -> Path:
    """Save the model ``name`` of random weights as a checkpoint in ``folder``, and return that."""
    config = CONFIGS[name]()
    torch.manual_seed(1)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    kind.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def compared(folder: Path, chance: random.Random, lies: str) -> dict[str, Any]:
    """Return which calls of the checkpoint ``folder`` differ, by ``lockstep``, and after them all by ``submit``.

    Its weights lie in memory or in part on disk or on the host of a simulated accelerator; as ``fp8`` they are
    quantised to that, on one host too. What an accelerator computes in float32 is compared with one process that has
    it all on such a one: these kernels go by where in memory a weight begins, unlike those in half precision.
    """
    calls = drawn_calls(chance)
    size = chance.choice([2, 3, 4, len(calls)])
    made: dict[str, Any] = {"fp8": {"quantize": "fp8"}, "simulated": {"dtype": "bfloat16"}}.get(lies, {})
    accelerated = {"hardware": {"devices": [{"memory": "1GB"}]}} if lies.startswith("simulated") else {}
    whole_room: dict[Any, int] = {"cpu": 10**9}
    if lies == "simulated float32":
        made, whole_room = accelerated, {0: 10**8, **whole_room}
    cache = cache_beside(folder)
    with offstage.load(folder, max_memory=whole_room, cache=cache, **made) as whole:
        wanted = [answered(whole.model, call, seed) for seed, call in enumerate(calls)]
        share = sum(tensor.nbytes for tensor in whole.model.parameters()) // peers().size
    part = share * 9 // 10
    room: dict[Any, int] = {0: part, "cpu": 10**9} if accelerated else {"cpu": part if lies == "disk" else 10**9}
    made |= accelerated
    with offstage.load(folder, hosts="auto", max_memory=room, cache=cache, **made) as loaded:
        asked = [partial(answered, loaded.model, call, seed) for seed, call in enumerate(calls)]
        answers = offstage.lockstep(loaded.model, asked, size=size)
        queued = [loaded.submit(answered, loaded.model, call, seed) for seed, call in enumerate(calls)]
        answers += [future.result() for future in queued]
        is_alike = alike_by_prompts(loaded, [call["input_ids"][0].tolist() for call in calls], size)
        streams = any(host.streamed_bytes for host in loaded.plan.hosts)
    differ = [
        number
        for number, (one, other) in enumerate(zip(answers, wanted * 2, strict=True))
        if len(one) != len(other) or not all(map(torch.equal, one, other))
    ]
    drawn = {"calls": len(calls), "size": size}
    return {"differ": differ, "prompts_alike": is_alike, "streams": streams, "drawn": drawn}


def alike_by_prompts(loaded: offstage.LoadedModel, prompts: list[list[int]], size: int) -> bool:
    """Return whether ``prompts`` have the same tokens one after another, in lockstep, and with guesses in lockstep."""
    ways: list[dict[str, Any]] = [{"lockstep": 1}, {"lockstep": size}]
    if type(loaded.model).__name__ == "LlamaForCausalLM":
        ways.append({"lockstep": size, "prompt_lookup_num_tokens": 3})
    answers = [loaded.generate(prompts, max_new_tokens=6, batch_size=1, **way) for way in ways]
    tokens = [[one.token_ids for one in answer] for answer in answers]
    return all(each == tokens[0] for each in tokens)


def paced(folder: Path) -> float:
    """Return how many times as long calls take one after another as in lockstep, where each block takes a while."""
    call = {"max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0}
    with offstage.load(folder, hosts="auto", max_memory={"cpu": 10**9}, cache=cache_beside(folder)) as loaded:
        for block in loaded.model.get_submodule("model.layers"):
            if not isinstance(block, StandIn):
                block.register_forward_pre_hook(lambda *_: time.sleep(0.04))
        ids = [torch.tensor([[10 + first, 11, 12]]) for first in range(6)]
        asked = [partial(answered, loaded.model, {"input_ids": one, **call}, 0) for one in ids]
        seconds = []
        for size in (1, len(asked)):
            began = time.perf_counter()
            offstage.lockstep(loaded.model, asked, size=size)
            seconds.append(time.perf_counter() - began)
    return seconds[0] / seconds[1]


def main() -> None:
    folder, seed, name, *ways = Path(sys.argv[1]), *sys.argv[2:]
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    # hosts save alike, before they are connected: then transformers would have the first one do so alone
    checkpoint = save(name, folder / rank)

    def leave(what: str, found: object) -> None:
        (folder / f"{what}-{rank}.json").write_text(json.dumps(found))

    for lies in ways:
        leave(lies, compared(checkpoint, random.Random(f"{seed} {lies}"), lies) | {"seed": seed})
    if name == "llama":
        leave("failing", outcomes(checkpoint))
        leave("pace", paced(checkpoint))
    peers().close()
