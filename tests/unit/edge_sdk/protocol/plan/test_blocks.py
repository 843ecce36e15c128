"""Blocks in and out of the whole model's vector, against one value at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.protocol.plan.blocks import block_runs, select_blocks
from edge_sdk.protocol.plan.layout import Indices


@st.composite
def choices_of_blocks(draw: st.DrawFn) -> tuple[Indices, Indices, list[int]]:
    """Ascending ids, the offsets of all blocks, and where the chosen blocks' values lie."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=12))
    chosen = sorted(draw(st.sets(st.integers(0, len(sizes) - 1))))
    offsets = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    places = [at for block in chosen for at in range(offsets[block], offsets[block + 1])]
    return np.array(chosen, dtype=np.int64), np.array(offsets, dtype=np.int64), places


@given(choices_of_blocks())
def test_block_runs_are_the_fewest_slices(choice: tuple[Indices, Indices, list[int]]) -> None:
    ids, offsets, places = choice
    runs = block_runs(ids, offsets)
    assert [at for whole, _ in runs for at in range(whole.start, whole.stop)] == places
    assert [at for _, part in runs for at in range(part.start, part.stop)] == list(
        range(len(places))
    )
    assert len(runs) == sum(block - 1 not in ids for block in ids)


@given(choices_of_blocks())
def test_select_copies_the_chosen_values(
    choice: tuple[Indices, Indices, list[int]],
) -> None:
    ids, offsets, places = choice
    flat = np.arange(offsets[-1], dtype=np.float32) + 1
    blocks = select_blocks(flat, ids, offsets)
    assert blocks.values.dtype == np.float32
    assert blocks.values.tolist() == [flat[at] for at in places]
    assert not np.shares_memory(blocks.values, flat)
    assert blocks.size_bytes == 4 * len(places)
