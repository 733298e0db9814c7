"""Which KV blocks belong to whom. Knows nothing of tensors; target and drafter share the block tables."""

from __future__ import annotations

from collections import deque


class BlockManager:
    """A free list of `num_blocks` blocks of `block_size` positions each.

    A request's block table is a plain list of block ids that the request keeps; entry i holds its positions
    i * block_size and up. Blocks are handed out oldest first, so that a cache of finished prefixes (which would sit
    behind `release`) sees them reused last.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use."""
        return 1.0 - len(self._free) / self.num_blocks

    def grow(self, table: list[int], num_tokens: int) -> list[int] | None:
        """Extend a block table to cover `num_tokens` positions.

        Returns the blocks added (none when it covers them already), or None, changing nothing, when too few are free.
        """
        needed = -(-num_tokens // self.block_size) - len(table)
        if needed <= 0:
            return []
        if needed > len(self._free):
            return None
        added = [self._free.popleft() for _ in range(needed)]
        table.extend(added)
        return added

    def release(self, table: list[int]) -> None:
        """Give all blocks of a table back and empty it."""
        self._free.extend(table)
        table.clear()
