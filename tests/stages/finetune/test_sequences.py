import gc

import torch

from offstage.stages.finetune.sequences import pick

SEQUENCES = torch.arange(1000).view(1000, 1)


def test_each_round_takes_all_sequences_in_an_order_of_its_own() -> None:
    rounds = [pick(SEQUENCES, seed=3, begin=1000 * turn, count=1000).flatten().tolist() for turn in range(2)]
    assert sorted(rounds[0]) == sorted(rounds[1]) == SEQUENCES.flatten().tolist()
    assert rounds[0] != rounds[1]
    across = pick(SEQUENCES, seed=3, begin=990, count=20).flatten().tolist()
    assert across == rounds[0][990:] + rounds[1][:10]


def test_the_orders_of_rounds_that_are_over_take_no_memory() -> None:
    def count_orders() -> int:
        return len([one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.shape == (1000,)])

    pick(SEQUENCES, seed=4, begin=0, count=1)
    before = count_orders()
    for turn in range(1, 20):
        pick(SEQUENCES, seed=4, begin=1000 * turn, count=1)
    assert count_orders() <= before + 1
