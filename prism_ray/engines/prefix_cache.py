"""The paged key-value cache of transformers' continuous batching, with blocks that belong to a plane and a salt.

transformers names a full block by the hash of its tokens and of the block before it, and lets every request with the same tokens share it. Keys and values also
depend on the plane, and a shared block tells by its speed who asked before (field cases SRV-01, SRV-03). So the chain of hashes starts at

    root = SHA-256(len(salt) | salt | plane digest)[:16],   block_i = SHA-256(block_{i-1} | tokens_i)[:16]

and a block is found only under the plane and the salt that wrote it. Lengths are in the hash, so ("ab", "c") and ("a", "bc") differ. A plane's digest stands for
the same bytes for ever, so a block never goes stale; `drop_plane` frees the blocks of a plane that is detached. Models with sliding windows share no block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

HASH_BYTES = 16


def root_hash(salt: str, digest: str) -> int:
    """Where the chain of a plane's blocks begins under a salt."""
    text = salt.encode()
    return _number(hashlib.sha256(len(text).to_bytes(8, "little") + text + digest.encode()))


def block_hash(parent: int, tokens: list[int]) -> int:
    """Name of the block that holds `tokens` behind `parent`."""
    return _number(hashlib.sha256(parent.to_bytes(HASH_BYTES, "little") + array("q", tokens).tobytes()))


def _number(found: Any) -> int:
    return int.from_bytes(found.digest()[:HASH_BYTES], "little")


class PlanePagedCache(PagedAttentionCache):
    """identity: request id -> (salt, plane digest); on_match: called with a request id and the prompt tokens that were found."""

    identity: Callable[[str], tuple[str, str]]
    on_match: Callable[[str, int], None]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._blocks: dict[str, set[int]] = {}

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Share the longest run of the prompt's blocks that this plane and salt wrote; returns its tokens. The last token is never among them."""
        if not self.use_prefix_sharing:
            return 0
        root = root_hash(*self.identity(request_id))
        matched: dict[str, list[int]] = {}
        for name, allocator in self.cache_allocators.items():
            matched[name], parent, size = [], root, allocator.tokens_per_page
            for start in range(0, (len(prompt_ids) - 1) // size * size, size):
                parent = block_hash(parent, prompt_ids[start : start + size])
                block = allocator.ledger.hash_to_block.get(parent)
                if block is None:
                    break
                matched[name].append(block)
        tokens = min(len(blocks) * self.cache_allocators[name].tokens_per_page for name, blocks in matched.items())
        if tokens:
            for name, blocks in matched.items():
                self.cache_allocators[name].acquire_prefix_blocks(request_id, tokens, blocks)
            self.on_match(request_id, tokens)
        return tokens

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Name the blocks that the last forward filled; one that exists already is shared instead."""
        if not self.use_prefix_sharing or not complete_blocks or state.status == RequestStatus.FINISHED:
            return
        salt, digest = self.identity(state.request_id)
        tokens = state.initial_tokens + state.generated_tokens
        for name, count in complete_blocks.items():
            self._mark(self.cache_allocators[name], state.request_id, root_hash(salt, digest), digest, tokens, count)

    def _mark(self, allocator: Any, request_id: str, parent: int, digest: str, tokens: list[int], count: int) -> None:
        table, size, ledger = allocator.block_table[request_id], allocator.tokens_per_page, allocator.ledger
        for position, block in enumerate(table):
            found = ledger.block_to_hash.get(block)
            if found is None:
                piece = tokens[position * size : (position + 1) * size]
                if count == 0 or len(piece) < size:
                    return
                count -= 1
                found = block_hash(parent, piece)
                self._remember(digest, found)
                same = ledger.register_new_hash(block, found)
                if same is not None:
                    ledger.acquire(same)
                    table[position] = same
                    if ledger.release(block):
                        self.pool.free_blocks(allocator.index, [block])
            parent = found

    def _remember(self, digest: str, name: int) -> None:
        names = self._blocks.setdefault(digest, set())
        names.add(name)
        if len(names) > 4 * self.num_blocks + 16:
            # Evicted blocks left their names behind.
            names &= {known for allocator in self.cache_allocators.values() for known in allocator.ledger.hash_to_block}

    def drop_plane(self, digest: str) -> int:
        """Free the unused blocks that a plane wrote; returns how many. No request may be on the plane."""
        freed = 0
        names = self._blocks.pop(digest, set())
        for allocator in self.cache_allocators.values():
            ledger = allocator.ledger
            blocks = [ledger.hash_to_block[name] for name in names if ledger.hash_to_block.get(name) in ledger.cached_blocks]
            for block in blocks:
                ledger.cached_blocks.pop(block)
                ledger.hash_to_block.pop(ledger.block_to_hash.pop(block))
            self.pool.free_blocks(allocator.index, blocks)
            freed += len(blocks)
        return freed
