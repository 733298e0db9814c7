"""Which KV blocks belong to whom. Knows nothing of tensors; target and drafter share the block tables.

Prefix caching. A full block is found again by a key: a hash over its tokens, chained to the key of the block before it,
so that equal keys mean equal tokens from the start. One key serves the target's and the drafter's part of a block,
because a hit must give both: a drafter row is made of the target's auxiliary states, which exist only in the step that
computes the position. The drafter's row p also reads the token x[p+1], so the last row of a block belongs to one
continuation only (docs/method.md). Therefore a key covers one token more than its block. The other ways are worse:
recomputing that one row needs auxiliary states that are gone, and letting the target recompute the last cached position
would write into a block that others read. The price is that a prompt which differs right behind a block boundary
computes that one block again. In return a hit never needs repair and never covers a whole prompt, since the token
behind it must be there: at least one row runs, and acceptance after a hit is that after a miss.

Only positions that the target has verified are cached, and by then the drafter's rows there are true ones: MTP rows and
rejected rows stand behind them. A request that does not draft leaves no drafter rows, so its keys are others. Where the
drafter may stay behind the target (draft_planner) a cached block may lack drafter rows; `drafted` says which have all,
and the auxiliary states that the others are made of are kept.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256


def extend_keys(keys: list[bytes], token_ids: Sequence[int], block_size: int, drafts: bool) -> None:
    """Add the keys of all blocks whose tokens, and the one behind them, are known.

    drafts: whether the request runs the drafter.
    """
    for i in range(len(keys), (len(token_ids) - 1) // block_size):
        before = keys[-1] if keys else bytes([drafts])
        tokens = array("q", token_ids[i * block_size : (i + 1) * block_size + 1])
        keys.append(sha256(before + tokens.tobytes()).digest())


class BlockManager:
    """`num_blocks` blocks of `block_size` positions each.

    A request's block table is a plain list of block ids that the request keeps; entry i holds its positions
    i * block_size and up. A block may stand in several tables when it is cached. One that stands in none is free; if it
    is cached it stays so until it is needed for something else, the least recently used first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._empty = list(range(num_blocks))  # a heap: neighbouring blocks make attention cheaper on the CPU
        self._idle: OrderedDict[int, None] = OrderedDict()  # free and cached, the least recently used first
        self._references = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.drafted: set[int] = set()  # blocks with all their drafter rows

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their key, in use or not."""
        return len(self._block_of)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use."""
        return 1.0 - self.num_free / self.num_blocks

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest run of keys from the first on."""
        found = []
        for key in keys:
            if (block := self._block_of.get(key)) is None:
                break
            found.append(block)
        return found

    def grow(self, table: list[int], num_tokens: int, cached: Sequence[int] = ()) -> list[int] | None:
        """Extend a block table to cover `num_tokens` positions, with the `cached` blocks (from `find`) first.

        Returns the blocks added (none when it covers them already), or None, changing nothing, when too few are free.
        """
        needed = max(-(-num_tokens // self.block_size) - len(table) - len(cached), 0)
        if needed > self.num_free - sum(block in self._idle for block in cached):
            return None
        for block in cached:
            self._idle.pop(block, None)
        added = [*cached, *self._take(needed)]
        for block in added:
            self._references[block] += 1
        table.extend(added)
        return added

    def _take(self, count: int) -> list[int]:
        """Free blocks in ascending order: the empty ones first, then cached ones, which are forgotten."""
        taken = [heapq.heappop(self._empty) for _ in range(min(count, len(self._empty)))]
        forgotten = sorted(self._idle.popitem(last=False)[0] for _ in range(count - len(taken)))
        for block in forgotten:
            key = self._key_of[block]
            assert key is not None
            del self._block_of[key]
            self._key_of[block] = None
        self.drafted.difference_update(taken, forgotten)
        return taken + forgotten

    def cache(self, block: int, key: bytes) -> None:
        """Let a full block be found by its key; of several with the same content the first is kept."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, table: list[int]) -> None:
        """Give all blocks of a table back and empty it. Its end is forgotten before its beginning."""
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if self._key_of[block] is None:
                heapq.heappush(self._empty, block)
            else:
                self._idle[block] = None
        table.clear()
