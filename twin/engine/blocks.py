"""KV blocks: the free queue and the prefix cache, as vLLM 0.32 keeps them, without listing blocks.

vLLM has one free queue of blocks. Blocks freed without a hash go to its front; hashed ones go to
its tail, the last block of a request first, and stay findable until they are taken again from the
front. Here a queue entry stands for many blocks:

* blocks without a hash are all alike: one counter, ``_front``;
* a ``Run`` is a number of hashed blocks that only their owner could find again;
* an ``Extent`` is a stretch of shared content, blocks ``start`` to ``start + count`` of a prefix
  path. It is split when part of it is hit, and shrinks from its end when part of it is evicted.

Content is named by keys: the hash of the path of prefix ids from the start (see ``path_keys``).
The same content can lie in the pool more than once; the copy that was registered first is hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twin.engine.sequence import Sequence


class Cell:
    """A place in the free queue: a doubly linked list, oldest (next to be evicted) first."""

    __slots__ = ("after", "before", "count")

    before: Cell
    after: Cell

    def __init__(self, count: int) -> None:
        self.count = count


class Run(Cell):
    """Hashed blocks of one request's own content; evicted from its end, so a head remains."""

    __slots__ = ("owner",)

    def __init__(self, count: int, owner: Sequence | None) -> None:
        self.count = count
        self.owner = owner


class Extent(Cell):
    """A copy of blocks ``start`` .. ``start + count`` of the content ``key``.

    ``refs`` requests hold it (all of it); with none it lies in the free queue. ``rest`` is what was
    split off behind it, for those who held both parts before.
    """

    __slots__ = ("key", "refs", "rest", "start")

    def __init__(self, key: int, start: int, count: int, refs: int) -> None:
        self.count = count
        self.key = key
        self.start = start
        self.refs = refs
        self.rest: Extent | None = None


class Hit:
    """What a request would find in the cache: pieces of extents, then blocks of its own run."""

    __slots__ = ("blocks", "doubled", "in_use", "own", "pieces")

    def __init__(self) -> None:
        self.pieces: list[tuple[Extent, int, int]] = []
        """(extent, first block, number of blocks)"""
        self.blocks = 0
        self.in_use = 0
        """Blocks of the hit that another request holds: they cost nothing."""
        self.own = 0
        """Blocks of the own run, behind the pieces."""
        self.doubled = False
        """Some of the content lies in the pool more than once."""


NO_HIT = Hit()


def path_keys(prefix: tuple[int, ...]) -> tuple[int, ...]:
    """One key per prefix id (64 bits) that names the whole path up to it.

    Integers hash alike in every Python process, so keys do not depend on PYTHONHASHSEED. Ids are
    hashed in two halves because Python takes an integer modulo 2**61 - 1, and -1 for -2.
    """
    key = 0
    keys = []
    for content in prefix:
        key = hash((key, content & 0xFFFFFFFF, content >> 32 & 0xFFFFFFFF))
        keys.append(key)
    return tuple(keys)


class BlockPool:
    """The pool of one replica. One block is vLLM's null block and never handed out."""

    __slots__ = ("_block_tokens", "_caching", "_copies", "_front", "_head", "_tail", "free")

    def __init__(self, blocks: int, block_tokens: int, prefix_caching: bool) -> None:
        self._block_tokens = block_tokens
        self._caching = prefix_caching
        self.free = blocks - 1
        self._front = blocks - 1
        self._copies: dict[int, list[Extent]] = {}
        self._head = Cell(0)
        self._tail = Cell(0)
        self._head.after = self._tail
        self._tail.before = self._head

    # ---- the queue ----

    def _push(self, cell: Cell) -> None:
        tail = self._tail
        last = tail.before
        cell.before = last
        cell.after = tail
        last.after = cell
        tail.before = cell

    @staticmethod
    def _unlink(cell: Cell) -> None:
        cell.before.after = cell.after
        cell.after.before = cell.before

    def take(self, count: int) -> None:
        """Take ``count`` blocks off the front; what they cached is forgotten."""
        self.free -= count
        front = self._front
        if count <= front:
            self._front = front - count
            return
        self._front = 0
        count -= front
        head = self._head
        while True:
            cell = head.after
            blocks = cell.count
            if blocks > count:
                cell.count = blocks - count
                return
            count -= blocks
            after = cell.after
            head.after = after
            after.before = head
            if isinstance(cell, Extent):
                copies = self._copies[cell.key]
                if len(copies) == 1:
                    del self._copies[cell.key]
                else:
                    copies.remove(cell)
            elif isinstance(cell, Run) and cell.owner is not None:
                cell.owner.own_run = None
            if not count:
                return

    # ---- finding and claiming what is cached ----

    def lookup(self, seq: Sequence, tokens: int) -> Hit:
        """What a prefill of the first ``tokens`` tokens of ``seq`` would find; nothing changes.

        The last token is always computed, so at most ``tokens - 1`` are found.
        """
        limit = (tokens - 1) // self._block_tokens
        shared = seq.shared_blocks
        if not shared:
            if seq.own_run is None or not limit:
                return NO_HIT
            hit = Hit()
            hit.own = hit.blocks = min(seq.own_run.count, limit)
            return hit
        hit = Hit()
        position = self._walk(seq, min(shared, limit), hit)
        hit.blocks = position
        if seq.own_run is not None and position == shared:
            hit.own = min(seq.own_run.count, limit - position)
            hit.blocks += hit.own
        return hit

    def _walk(self, seq: Sequence, limit: int, hit: Hit) -> int:
        """Collect the pieces of cached shared content from the start; return where they end."""
        position = 0
        covered = 0
        block_tokens = self._block_tokens
        id_tokens = seq.prefix_block_tokens
        copies_of = self._copies
        pieces = hit.pieces
        for key in seq.path:
            covered += id_tokens
            end = covered // block_tokens
            if end > limit:
                end = limit
            if position >= end:
                if position >= limit:
                    break
                continue
            copies = copies_of.get(key)
            if copies is None:
                break
            if len(copies) > 1:
                hit.doubled = True
                position = self._walk_copies(copies, position, end, hit)
            else:
                extent = copies[0]
                if extent.start <= position:
                    found = extent.start + extent.count
                    if found > end:
                        found = end
                    if found > position:
                        pieces.append((extent, position, found - position))
                        if extent.refs:
                            hit.in_use += found - position
                        position = found
            if position < end:
                break
        return position

    def _walk_copies(self, copies: list[Extent], position: int, end: int, hit: Hit) -> int:
        """As ``_walk`` where content lies there more than once: the earliest registered wins."""
        while position < end:
            stop = end
            for extent in copies:
                if extent.start > position:
                    stop = min(stop, extent.start)
                elif extent.start + extent.count > position:
                    found = min(extent.start + extent.count, stop)
                    hit.pieces.append((extent, position, found - position))
                    if extent.refs:
                        hit.in_use += found - position
                    position = found
                    break
            else:
                break
        return position

    def claim(self, seq: Sequence, hit: Hit) -> None:
        """Make ``seq`` a holder of what ``hit`` found."""
        for extent, start, count in hit.pieces:
            piece = extent
            while piece.start + piece.count <= start:  # split by an earlier piece of this hit
                assert piece.rest is not None
                piece = piece.rest
            if piece.start < start:
                piece = self._split(piece, start)
            if piece.count > count:
                self._split(piece, start + count)
            if not piece.refs:
                self._unlink(piece)
                self.free -= count
            piece.refs += 1
            seq.held.append((piece, count))
        seq.held_blocks = hit.blocks - hit.own
        run = seq.own_run
        if run is not None:
            self.free -= hit.own
            run.count -= hit.own
            run.owner = None
            seq.own_run = None
            if not run.count:
                self._unlink(run)

    def _split(self, extent: Extent, at: int) -> Extent:
        """Cut ``extent`` before block ``at``; return the part behind. Holders hold both."""
        rest = Extent(extent.key, at, extent.start + extent.count - at, extent.refs)
        extent.count = at - extent.start
        rest.rest = extent.rest
        extent.rest = rest
        copies = self._copies[extent.key]
        copies.insert(copies.index(extent) + 1, rest)
        if not extent.refs:  # evicted from the end: the part behind comes first in the queue
            before = extent.before
            rest.before = before
            rest.after = extent
            before.after = rest
            extent.before = rest
        return rest

    # ---- registering and releasing ----

    def register(self, seq: Sequence, computed: int) -> None:
        """The full shared blocks among the first ``computed`` tokens of ``seq`` become findable."""
        shared = computed // self._block_tokens
        if shared > seq.shared_blocks:
            shared = seq.shared_blocks
        position = seq.held_blocks
        if position >= shared:
            return
        id_tokens = seq.prefix_block_tokens
        block_tokens = self._block_tokens
        index = position * block_tokens // id_tokens
        if (index + 1) * id_tokens // block_tokens <= position:
            index += 1
        held = seq.held
        while position < shared:
            end = (index + 1) * id_tokens // block_tokens
            if end > shared:
                end = shared
            if end > position:
                key = seq.path[index]
                copies = self._copies.get(key)
                if copies is None:
                    extent = Extent(key, position, end - position, 1)
                    self._copies[key] = [extent]
                    held.append((extent, end - position))
                else:
                    self._hold_beside(copies, held, position, end - position)
                position = end
            index += 1
        seq.held_blocks = shared

    @staticmethod
    def _hold_beside(
        copies: list[Extent], held: list[tuple[Extent, int]], start: int, count: int
    ) -> None:
        """Register content some of which is there: grow the holder's own extent, or start one.

        An extent may only grow while nobody else holds it and none was registered after it.
        """
        last = copies[-1]
        if held and held[-1][0] is last and last.refs == 1 and last.rest is None:
            last.count += count
            held[-1] = (last, held[-1][1] + count)
            return
        extent = Extent(last.key, start, count, 1)
        copies.append(extent)
        held.append((extent, count))

    def release(self, seq: Sequence, blocks: int, hashed: int, keep: bool) -> None:
        """``seq`` gives back its ``blocks`` blocks; the first ``hashed`` are full and known.

        Args:
            keep: the sequence may come back and find its own blocks again (a preemption).
        """
        if not self._caching:
            self.free += blocks
            self._front += blocks
            return
        own = hashed - seq.held_blocks
        self.free += blocks - seq.held_blocks
        self._front += blocks - hashed
        if own:
            if keep:
                run = Run(own, seq)
                seq.own_run = run
                self._push(run)
            else:
                last = self._tail.before
                if type(last) is Run and last.owner is None:
                    last.count += own
                else:
                    self._push(Run(own, None))
        if seq.held:
            self._release_shared(seq)

    def _release_shared(self, seq: Sequence) -> None:
        tail = self._tail
        for extent, count in reversed(seq.held):
            if extent.count != count:
                self._release_split(extent, count)
                continue
            extent.refs -= 1
            if not extent.refs:
                extent.rest = None
                self.free += count
                last = tail.before
                extent.before = last
                extent.after = tail
                last.after = extent
                tail.before = extent
        seq.held = []
        seq.held_blocks = 0

    def _release_split(self, extent: Extent, count: int) -> None:
        """Release ``count`` blocks of what was one extent when it was held."""
        parts = []
        part: Extent | None = extent
        while count:
            assert part is not None
            parts.append(part)
            count -= part.count
            part = part.rest
        for part in reversed(parts):
            part.refs -= 1
            if not part.refs:
                part.rest = None
                self.free += part.count
                self._push(part)

    def forget(self, seq: Sequence) -> None:
        """``seq`` will not come back for its own run."""
        run = seq.own_run
        if run is not None:
            run.owner = None
            seq.own_run = None
