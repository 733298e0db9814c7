"""Which form of attention a batch runs, by facts that a CUDA graph holds fixed: shapes, never lengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeConfig:
    """A configuration of `kernels/decode_attention.py`.

    block_n: keys a tile, a power of 2, at least 16. num_splits: into how many parts a request's keys are split at most,
    a power of 2. keys_first: scores are computed as keys x queries, so that the keys fill the 64 rows that Hopper's
    matrix instruction wants (block_n at least 64, 4 warps), and not as queries x keys. early_join: the kernel that
    joins splits is launched while the first still runs (Hopper's programmatic dependent launch).
    """

    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    keys_first: bool = False
    early_join: bool = False


MANY = 1 << 30
# (head_dim, rows of a tile) -> (most requests x kv heads, configuration), ascending; the first that holds a batch is
# taken. None, and what is not listed: the general kernel of `kernels/paged_attention.py`. Lines as
# `benchmarks/decode_attention.py` prints them, but for (64, 32) of a single request: its keys lie over warps, tiles and
# splits as those of (64, 16), so that a request's verification adds them up in the order of plain decoding and, alone,
# gives its tokens bit for bit in bfloat16 too.
TABLE: dict[tuple[int, int], tuple[tuple[int, DecodeConfig | None], ...]] = {
    (64, 16): (
        (3, DecodeConfig(128, 4, 2, 8, early_join=True)),
        (24, DecodeConfig(32, 2, 3, 4, early_join=True)),
        (MANY, DecodeConfig(32, 2, 3)),
    ),
    (64, 32): (
        (3, DecodeConfig(128, 4, 2, 8, early_join=True)),
        (24, DecodeConfig(64, 4, 3, 4, early_join=True)),
        (MANY, DecodeConfig(64, 4, 3, 2, early_join=True)),
    ),
    (64, 64): (
        (3, DecodeConfig(64, 4, 3, 8, early_join=True)),
        (24, DecodeConfig(64, 4, 3, 4, early_join=True)),
        (MANY, DecodeConfig(64, 4, 3, 2, early_join=True)),
    ),
    (128, 16): (
        (8, DecodeConfig(128, 4, 2, 8, early_join=True)),
        (64, DecodeConfig(32, 2, 3, 4, early_join=True)),
        (MANY, DecodeConfig(32, 2, 3)),
    ),
    (128, 32): (
        (8, DecodeConfig(64, 4, 3, 8, early_join=True)),
        (64, DecodeConfig(32, 2, 4, 4, early_join=True)),
        (256, DecodeConfig(64, 4, 3)),
        (MANY, DecodeConfig(32, 2, 3)),
    ),
    (128, 64): (
        (8, DecodeConfig(64, 4, 3, 8, early_join=True)),
        (64, DecodeConfig(64, 4, 3, 4, early_join=True)),
        (MANY, DecodeConfig(64, 4, 3)),
    ),
}


def tile_rows(max_query_len: int, group: int) -> int:
    """Rows of a tile that holds all query rows of a request and kv head: a power of 2, 16 or more."""
    return max(16, 1 << (max_query_len * group - 1).bit_length())


def choose_config(
    requests: int, max_query_len: int, kv_heads: int, group: int, head_dim: int, kv_itemsize: int
) -> DecodeConfig | None:
    """The table's configuration for a batch, or None for the general kernel; float8 and float32 were not measured."""
    if kv_itemsize != 2:
        return None
    for most, config in TABLE.get((head_dim, tile_rows(max_query_len, group)), ()):
        if requests * kv_heads <= most:
            return config
    return None


def useful_splits(config: DecodeConfig, max_context: int) -> int:
    """The configuration's splits, or fewer where contexts are too short for each to get a tile of keys."""
    splits = config.num_splits
    while splits > 1 and splits // 2 * config.block_n >= max_context:
        splits //= 2
    return splits
