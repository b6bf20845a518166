from __future__ import annotations

from offstage.stages.inference.padding import make_batch


def test_batches_pad_on_the_side_they_are_asked_to() -> None:
    left, right = (make_batch([[1, 2, 3], [4]], pad=9, side=side) for side in ("left", "right"))
    assert left.input_ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert right.input_ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert right.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
