"""Where a model can be cut, who computes what then, and what is left of its skeleton on one host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offstage.pipeline.errors import ConfigError
from offstage.stages.empty_init.skeleton import CacheSpec, ExpertsSpec, ModuleSpec, PackedProducts, Skeleton, TensorSpec
from offstage.stages.hosts.partition import Chain, chain_of, partition_of, share


def decoder(blocks: int = 4) -> Skeleton:
    """Return a model of blocks between an embedding and a head that is tied to it."""
    names = [f"layers.{index}" for index in range(blocks)]
    modules = [
        ModuleSpec("", "Model"),
        ModuleSpec("embed", "Embedding", looks_up=True),
        ModuleSpec("layers", "ModuleList"),
        *(ModuleSpec(name, "Block") for name in names),
        ModuleSpec("norm", "Norm"),
        ModuleSpec("head", "Linear", multiplies=True),
    ]
    tensors = [
        TensorSpec("embed.weight", (8, 2), "float32"),
        *(TensorSpec(f"{name}.weight", (4, 4), "float32") for name in names),
        TensorSpec("norm.weight", (2,), "float32"),
        TensorSpec("head.weight", (8, 2), "float32"),
    ]
    called = ("embed", *names, "norm", "head")
    return Skeleton(
        tuple(tensors),
        tuple(modules),
        tied=(("embed.weight", "head.weight"),),
        no_split=("Block",),
        order=called,
        calls=called,
        model_class="Model",
        caches=(CacheSpec(tuple(names), position_bytes=8.0),),
    )


def test_a_decoder_is_cut_between_its_blocks_and_its_head_goes_with_the_last() -> None:
    chain = chain_of(decoder())
    assert chain == Chain({"layers": tuple(f"layers.{index}" for index in range(4))}, "head", is_plain=True)
    partition = partition_of(chain, [0, 1, 3, 4])
    assert [partition.owner("layers", place) for place in range(4)] == [0, 1, 1, 2]
    assert partition.away(0) == {"layers.1", "layers.2", "layers.3", "head"}
    assert partition.away(2) == {"layers.0", "layers.1", "layers.2"}
    assert partition.last == 2
    assert not partition.shares_end, "the logits are all that the others need"


def test_where_something_else_follows_the_blocks_their_output_goes_to_all() -> None:
    plain = decoder()
    wide = tuple(replace(spec, shape=(2, 2)) if spec.name == "norm.weight" else spec for spec in plain.tensors)
    chain = chain_of(replace(plain, tensors=wide))
    assert not chain.is_plain
    assert partition_of(chain, [0, 2, 4]).shares_end == ("layers",)


def test_an_encoders_last_states_go_to_all_beside_what_its_pooler_makes_of_them() -> None:
    chain = chain_of(replace(decoder(), caches=()))
    assert chain.head == "head"
    assert partition_of(chain, [0, 2, 4]).shares_end == ("layers",)


def test_a_model_without_a_head_sends_its_last_blocks_output_to_all() -> None:
    plain = decoder()
    bodied = replace(plain, calls=plain.calls[:-1], order=plain.order[:-1])
    chain = chain_of(bodied)
    assert chain.head is None
    assert partition_of(chain, [0, 2, 4]).shares_end == ("layers",)


def test_an_encoder_and_a_decoder_are_one_chain_and_the_encoders_end_goes_to_all() -> None:
    chain = Chain({"encoder": ("e.0", "e.1"), "decoder": ("d.0", "d.1", "d.2")}, "head", is_plain=True)
    partition = partition_of(chain, [0, 3, 5])
    assert partition.cuts == {"encoder": (0, 2, 2), "decoder": (0, 1, 3)}
    assert partition.shares_end == ("encoder",)
    assert partition_of(chain, [0, 2, 5]).shares_end == ("encoder", "decoder"), "a host without a block needs its end"
    assert partition.describe(1) == "decoder 1-2"


def products(*tensors: str) -> PackedProducts:
    return PackedProducts("{}", (("uint8", (4, 34)),), None, tiles=False, tensors=tensors)


def test_a_share_has_nothing_of_what_is_away() -> None:
    whole = replace(
        decoder(),
        experts=(
            ExpertsSpec("layers.0", 4, 1, ("layers.0.weight",)),
            ExpertsSpec("layers.3", 4, 1, ("layers.3.weight",)),
        ),
        written={"layers.1.weight": "layers.1"},
        products=(products("layers.1.weight", "layers.2.weight"), products("head.weight")),
    )
    part = share(whole, {"layers.0", "layers.1", "head"})
    assert [spec.name for spec in part.tensors] == ["embed.weight", "layers.2.weight", "layers.3.weight", "norm.weight"]
    assert part.tied == ()
    assert part.order == part.calls == ("embed", "layers.2", "layers.3", "norm")
    assert [cache.blocks for cache in part.caches] == [("layers.2", "layers.3")]
    assert [spec.module for spec in part.experts] == ["layers.3"]
    assert part.written == {}
    assert part.products == (products("layers.2.weight"),)
    assert share(whole, ()) == whole


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unrehearsed": "it says no"}, "couldn't be traced with fake tensors (it says no)"),
        ({"no_split": ()}, "no repeated blocks"),
    ],
)
def test_what_cant_be_divided_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=r"^hardware\.hosts: Model ") as refused:
        chain_of(replace(decoder(), **changes))  # type: ignore[arg-type]
    assert said in str(refused.value)
