"""The block pool: its free queue and the extents of shared content. Blocks hold 4 tokens."""

from __future__ import annotations

from twin.engine.blocks import BlockPool, Extent, path_keys
from twin.engine.sequence import Sequence

BLOCK = 4


def sequence(
    id: int, tokens: int, prefix: tuple[int, ...] = (), id_tokens: int = BLOCK
) -> Sequence:
    """As the engine prepares it."""
    seq = Sequence(id, tokens, 1, prefix=prefix, prefix_block_tokens=id_tokens)
    seq.path = path_keys(prefix)
    seq.shared_blocks = min(len(prefix) * id_tokens, tokens) // BLOCK
    return seq


def pool(blocks: int, prefix_caching: bool = True) -> BlockPool:
    """So many blocks to give out; the null block comes on top."""
    return BlockPool(blocks + 1, BLOCK, prefix_caching)


def hold(pool: BlockPool, seq: Sequence) -> int:
    """Prefill all of ``seq``; returns the blocks it found."""
    hit = pool.lookup(seq, seq.prompt_tokens)
    found = hit.blocks
    pool.claim(seq, hit)
    pool.take(-(-seq.prompt_tokens // BLOCK) - found)
    pool.register(seq, seq.prompt_tokens)
    return found


def give_back(pool: BlockPool, seq: Sequence, keep: bool = False) -> None:
    tokens = seq.prompt_tokens
    pool.release(seq, -(-tokens // BLOCK), tokens // BLOCK, keep)


def found(pool: BlockPool, seq: Sequence) -> int:
    return pool.lookup(seq, seq.prompt_tokens).blocks


def extents(pool: BlockPool) -> list[tuple[int, int, int]]:
    """(start, count, refs) of everything that is findable, in order of content."""
    return sorted(
        (extent.start, extent.count, extent.refs)
        for copies in pool._copies.values()
        for extent in copies
    )


def queue(pool: BlockPool) -> list[tuple[str, int]]:
    """The free queue, next to be taken first: (kind, blocks)."""
    cells = [("unhashed", pool._front)] if pool._front else []
    cell = pool._head.after
    while cell is not None and cell is not pool._tail:
        cells.append((f"from {cell.start}" if isinstance(cell, Extent) else "own", cell.count))
        cell = cell.after
    return cells


# Keys


def test_a_key_names_the_whole_path_up_to_it() -> None:
    assert path_keys((1, 2, 3))[:2] == path_keys((1, 2, 9))[:2]
    assert path_keys((1, 2))[1] != path_keys((3, 2))[1]
    assert path_keys((1, 2)) != path_keys((2, 1))
    assert len(set(path_keys((0,) * 50))) == 50


def test_ids_that_python_hashes_alike_are_different_content() -> None:
    """hash(-1) == hash(-2), and integers are hashed modulo 2**61 - 1; ids are any int64."""
    assert path_keys((-1,)) != path_keys((-2,))
    assert path_keys((5,)) != path_keys((5 + 2**61 - 1,))


# The queue


def test_one_block_is_never_given_out() -> None:
    assert BlockPool(11, BLOCK, True).free == 10


def test_blocks_without_a_hash_are_taken_before_any_that_is_known() -> None:
    """11 tokens: two full blocks are known, the third is not and goes to the front."""
    blocks = pool(6)
    seq = sequence(1, 11, (1, 2))
    hold(blocks, seq)
    give_back(blocks, seq)
    assert blocks.free == 6
    assert queue(blocks) == [("unhashed", 4), ("from 1", 1), ("from 0", 1)]
    twin = sequence(2, 11, (1, 2))
    blocks.take(4)
    assert found(blocks, twin) == 2
    blocks.take(1)
    assert found(blocks, twin) == 1
    blocks.take(1)
    assert found(blocks, twin) == 0
    assert blocks.free == 0


def test_what_was_freed_first_is_taken_first_each_from_its_end() -> None:
    blocks = pool(9)
    old, young = sequence(1, 17, (1,), 16), sequence(2, 13, (2,), 12)
    for seq in (old, young):
        hold(blocks, seq)
    assert blocks.free == 0
    for seq in (old, young):
        give_back(blocks, seq)
    assert [found(blocks, old), found(blocks, young)] == [4, 3]
    blocks.take(2 + 2)
    assert [found(blocks, old), found(blocks, young)] == [2, 3]
    blocks.take(2 + 1)
    assert [found(blocks, old), found(blocks, young)] == [0, 2]


def test_own_content_is_known_only_to_a_preempted_owner() -> None:
    blocks = pool(10)
    seq = sequence(1, 14)
    hold(blocks, seq)
    give_back(blocks, seq, keep=True)
    assert found(blocks, seq) == 3
    assert found(blocks, sequence(2, 14)) == 0
    blocks.take(10 - 3)
    assert found(blocks, seq) == 3
    blocks.take(1)
    assert found(blocks, seq) == 2  # its head remains
    blocks.take(2)
    assert found(blocks, seq) == 0
    assert seq.own_run is None


def test_a_preempted_owner_takes_its_own_blocks_out_of_the_queue_again() -> None:
    blocks = pool(10)
    seq = sequence(1, 14)
    hold(blocks, seq)
    give_back(blocks, seq, keep=True)
    assert hold(blocks, seq) == 3
    assert blocks.free == 10 - 4
    assert queue(blocks) == [("unhashed", 6)]


def test_what_a_preempted_owner_cannot_use_stays_in_the_queue() -> None:
    blocks = pool(10)
    seq = sequence(1, 12)
    hold(blocks, seq)
    give_back(blocks, seq, keep=True)
    assert hold(blocks, seq) == 2  # the last token is computed again
    assert blocks.free == 10 - 3
    assert queue(blocks) == [("unhashed", 6), ("own", 1)]


def test_a_forgotten_run_stays_in_the_queue_but_is_not_found() -> None:
    blocks = pool(10)
    seq = sequence(1, 14)
    hold(blocks, seq)
    give_back(blocks, seq, keep=True)
    blocks.forget(seq)
    assert found(blocks, seq) == 0
    assert queue(blocks) == [("unhashed", 7), ("own", 3)]


def test_own_content_behind_shared_content_is_found_after_it() -> None:
    blocks = pool(10)
    seq = sequence(1, 18, (1, 2))
    hold(blocks, seq)
    give_back(blocks, seq, keep=True)
    assert queue(blocks) == [("unhashed", 6), ("own", 2), ("from 1", 1), ("from 0", 1)]
    assert found(blocks, seq) == 4
    assert found(blocks, sequence(2, 18, (1, 2))) == 2


def test_own_content_is_not_found_across_a_hole() -> None:
    """Shared blocks are gone from the front of the prompt: what lies behind them is of no use."""
    blocks = pool(6)
    seq = sequence(1, 18, (1, 2))
    hold(blocks, seq)
    give_back(blocks, seq, keep=True)
    blocks.take(5)  # the two unhashed, the own two, and the second shared block
    assert found(blocks, seq) == 1


def test_without_caching_everything_goes_to_the_front() -> None:
    blocks = pool(10, prefix_caching=False)
    seq = sequence(1, 14)
    blocks.take(4)
    give_back(blocks, seq)
    assert queue(blocks) == [("unhashed", 10)]
    assert blocks.free == 10


# Extents


def test_an_extent_is_shared_and_freed_with_its_last_holder() -> None:
    blocks = pool(20)
    first, second = sequence(1, 17, (1,), 16), sequence(2, 17, (1,), 16)
    assert hold(blocks, first) == 0
    assert hold(blocks, second) == 4
    assert blocks.free == 20 - 4 - 2
    assert extents(blocks) == [(0, 4, 2)]
    give_back(blocks, first)
    assert blocks.free == 20 - 4 - 1
    assert extents(blocks) == [(0, 4, 1)]
    give_back(blocks, second)
    assert blocks.free == 20
    assert extents(blocks) == [(0, 4, 0)]


def test_a_partial_hit_splits_an_extent_and_the_part_behind_is_evicted_first() -> None:
    blocks = pool(20)
    long = sequence(1, 17, (1,), 16)
    hold(blocks, long)
    give_back(blocks, long)
    short = sequence(2, 9, (1,), 16)
    assert hold(blocks, short) == 2
    assert extents(blocks) == [(0, 2, 1), (2, 2, 0)]
    give_back(blocks, short)
    assert queue(blocks)[1:] == [("from 2", 2), ("from 0", 2)]
    assert found(blocks, long) == 4


def test_an_extent_that_is_split_while_it_is_held_is_freed_whole_by_its_holder() -> None:
    blocks = pool(20)
    long, short = sequence(1, 17, (1,), 16), sequence(2, 9, (1,), 16)
    hold(blocks, long)
    assert hold(blocks, short) == 2
    assert extents(blocks) == [(0, 2, 2), (2, 2, 1)]
    give_back(blocks, long)
    assert extents(blocks) == [(0, 2, 1), (2, 2, 0)]
    give_back(blocks, short)
    assert blocks.free == 20
    assert extents(blocks) == [(0, 2, 0), (2, 2, 0)]


def test_a_held_extent_can_be_split_more_than_once() -> None:
    blocks = pool(30)
    long = sequence(1, 33, (1,), 32)
    hold(blocks, long)
    shorter = [sequence(number, tokens, (1,), 32) for number, tokens in ((2, 25), (3, 9), (4, 17))]
    assert [hold(blocks, seq) for seq in shorter] == [6, 2, 4]
    assert extents(blocks) == [(0, 2, 4), (2, 2, 3), (4, 2, 2), (6, 2, 1)]
    for seq in (long, *shorter):
        give_back(blocks, seq)
    assert blocks.free == 30
    assert all(refs == 0 for _, _, refs in extents(blocks))


def test_an_extent_shrinks_from_its_end_as_its_blocks_are_evicted() -> None:
    blocks = pool(8)
    seq = sequence(1, 17, (1,), 16)
    hold(blocks, seq)
    give_back(blocks, seq)
    blocks.take(4)  # the unhashed ones
    for left in (4, 3, 2, 1):
        assert found(blocks, seq) == left
        assert extents(blocks) == [(0, left, 0)]
        blocks.take(1)
    assert found(blocks, seq) == 0
    assert extents(blocks) == []


def test_content_lying_there_twice_is_hit_where_it_was_registered_first() -> None:
    """A prompt that ends with the shared content computes its last block again: a second copy."""
    blocks = pool(20)
    first, second = sequence(1, 8, (1, 2)), sequence(2, 8, (1, 2))
    hold(blocks, first)
    assert hold(blocks, second) == 1
    assert extents(blocks) == [(0, 1, 2), (1, 1, 1), (1, 1, 1)]
    longer = sequence(3, 9, (1, 2))
    hit = blocks.lookup(longer, 9)
    assert hit.doubled
    assert [(piece.refs, start) for piece, start, _ in hit.pieces] == [(2, 0), (1, 1)]
    assert hit.pieces[1][0] is first.held[1][0]


def test_evicting_a_free_copy_uncovers_the_one_in_use() -> None:
    """Then a head that waits needs less: the reason why it must be looked at again."""
    blocks = pool(6)
    first, second = sequence(1, 8, (1, 2)), sequence(2, 8, (1, 2))
    hold(blocks, first)
    hold(blocks, second)
    give_back(blocks, first)
    longer = sequence(3, 9, (1, 2))
    assert blocks.lookup(longer, 9).in_use == 1
    blocks.take(blocks.free)
    hit = blocks.lookup(longer, 9)
    assert (hit.blocks, hit.in_use) == (2, 2)
    assert not hit.doubled


def test_looking_up_changes_nothing() -> None:
    blocks = pool(20)
    long = sequence(1, 17, (1,), 16)
    hold(blocks, long)
    give_back(blocks, long)
    before = (blocks.free, queue(blocks), extents(blocks))
    blocks.lookup(sequence(2, 9, (1,), 16), 9)
    assert (blocks.free, queue(blocks), extents(blocks)) == before


def test_a_prompt_prefilled_in_chunks_registers_what_is_complete_so_far() -> None:
    blocks = pool(20)
    seq = sequence(1, 33, (1, 2), 16)
    blocks.claim(seq, blocks.lookup(seq, 33))
    for computed, known in ((6, 1), (10, 2), (15, 3), (16, 4), (27, 6), (33, 8)):
        blocks.take(-(-computed // BLOCK) - (20 - blocks.free))
        blocks.register(seq, computed)
        assert found(blocks, sequence(2, 33, (1, 2), 16)) == known
    assert extents(blocks) == [(0, 4, 1), (4, 4, 1)]
