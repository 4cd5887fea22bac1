"""`lookup_reference` on the device: two Triton kernels, no host in between.

    scan    grid (B, blocks of the longest slice): match length of every place in the block; the block's best
            occurrences, by length and then place, go to its row of keys
    vote    grid (B,): the best `OCCURRENCES` of all blocks' keys vote, once per match length, for up to K tokens

    keys  [B, blocks * OCCURRENCES] int32   length * 2^26 + place in the slice, 0 for none; so larger is better

A corpus is one int32 tensor of slices, one slice per prompt group, so a step reads a request's own slice only: 4 bytes
a token. Lengths, positions and drafts stay on the device; the host knows a bound of the slices' lengths, for the grid.
"""

# ruff: noqa: N803 - Triton's constants are in capitals
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rollspec.proposal.lookup import DEPTH, OCCURRENCES

BLOCK = 1024
"""Positions of a block."""

_PLACES = 26  # bits of a key that say where; longer slices than 2^26 tokens are refused


class Drafts(NamedTuple):
    """On the device: `tokens` int32 [B, K] (rows beyond a count: -1), `probs` float32 [B, K] (0 there), `counts` and
    `matches` int32 [B], `scores` float32 [B].
    """

    tokens: torch.Tensor
    probs: torch.Tensor
    counts: torch.Tensor
    matches: torch.Tensor
    scores: torch.Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _scan(  # type: ignore[no-untyped-def]
    corpus,  # int32 [N]
    starts,  # int64 [B]
    ends,  # int64 [B]
    contexts,  # int32 [B, DEPTH]
    keys,  # int32 [B, blocks * OCC]
    row,  # stride of keys
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OCC: tl.constexpr,
    PLACES: tl.constexpr,
):
    b = tl.program_id(0)
    block = tl.program_id(1)
    start = tl.load(starts + b)
    size = tl.load(ends + b) - start
    out = keys + b * row + block * OCC + tl.arange(0, OCC)
    if block * BLOCK >= size:
        tl.store(out, tl.zeros([OCC], tl.int32))
    else:
        at = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] positions in the slice
        follower = tl.load(corpus + start + at + 1, mask=at + 1 < size, other=-1)
        alive = follower != -1
        length = tl.zeros([BLOCK], tl.int32)
        back = 0
        going = tl.max(alive.to(tl.int32), 0)
        while (back < DEPTH) & (going > 0):
            wanted = tl.load(contexts + b * DEPTH + DEPTH - 1 - back)
            token = tl.load(corpus + start + at - back, mask=alive & (at >= back) & (at < size), other=-1)
            alive = alive & (token == wanted)
            length += alive.to(tl.int32)
            going = tl.max(alive.to(tl.int32), 0)
            back += 1
        key = tl.where(length > 0, (length << PLACES) + at.to(tl.int32), 0)
        tl.store(out, tl.topk(key, OCC))


@triton.jit  # type: ignore[untyped-decorator]
def _vote(  # type: ignore[no-untyped-def]
    corpus,  # int32 [N]
    starts,  # int64 [B]
    ends,  # int64 [B]
    rooms,  # int32 [B]
    keys,  # int32 [B, blocks * OCC]
    row,  # stride of keys
    width,  # blocks * OCC
    factor,
    min_prob,
    tokens,  # int32 [B, K], filled with -1
    probs,  # float32 [B, K], filled with 0
    counts,  # int32 [B]
    matches,  # int32 [B]
    scores,  # float32 [B]
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    OCC: tl.constexpr,
    PLACES: tl.constexpr,
):
    b = tl.program_id(0)
    start = tl.load(starts + b)
    size = tl.load(ends + b) - start
    room = tl.load(rooms + b)
    lane = tl.arange(0, OCC)
    column = tl.arange(0, K_PADDED)

    best = tl.load(keys + b * row + lane)  # [OCC] in falling order
    done = OCC
    while done < width:  # a block's row falls, too, so two rows are one: the larger half of both
        other = tl.load(keys + b * row + done + lane)
        if tl.max(other, 0) > tl.min(best, 0):
            best = tl.topk(tl.reshape(tl.join(best, other), [2 * OCC]), OCC)
        done += OCC

    length = best >> PLACES  # [OCC] match lengths
    place = best & ((1 << PLACES) - 1)
    score, match, count = 0.0, 0, 0
    chain = tl.full([K_PADDED], -1, tl.int32)
    shares = tl.zeros([K_PADDED], tl.float32)
    level = tl.max(length, 0)
    while level > 0:
        most = tl.minimum(room, (level * factor + 1e-6).to(tl.int32))
        if score < most:  # else it cannot be beaten from here
            alive = length >= level
            prob, total, said = 1.0, 0.0, 0
            mine = tl.full([K_PADDED], -1, tl.int32)
            ours = tl.zeros([K_PADDED], tl.float32)
            going = most > 0
            while going:
                at = place + 1 + said
                token = tl.load(corpus + start + at, mask=alive & (at < size), other=-1)  # [OCC]
                alive = alive & (token != -1)
                cast = tl.sum(alive.to(tl.int32), 0)
                same = (token[:, None] == token[None, :]) & alive[:, None] & alive[None, :]
                votes = tl.sum(same.to(tl.int32), 1)  # [OCC] votes for each one's token
                # Of equal votes, the first in the order of keys.
                ranked = tl.max(tl.where(alive, votes * OCC + (OCC - 1 - lane), -1), 0)
                first = OCC - 1 - ranked % OCC
                winner = tl.max(tl.where(lane == first, token, -1), 0)
                prob = prob * ((ranked // OCC).to(tl.float32) / tl.maximum(cast, 1).to(tl.float32))
                going = (cast > 0) & (prob >= min_prob)
                if going:
                    mine = tl.where(column == said, winner, mine)
                    ours = tl.where(column == said, prob, ours)
                    total += prob
                    said += 1
                    alive = alive & (token == winner)
                    going = said < most
            if total > score:
                score, match, count = total, level, said
                chain, shares = mine, ours
        level = tl.max(tl.where(length < level, length, 0), 0)
    tl.store(tokens + b * K + column, chain, mask=column < K)
    tl.store(probs + b * K + column, shares, mask=column < K)
    tl.store(counts + b, count)
    tl.store(matches + b, match)
    tl.store(scores + b, score)


def lookup(
    corpus: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    contexts: torch.Tensor,
    rooms: torch.Tensor,
    factor: float,
    min_prob: float,
    k: int,
    longest: int,
    block: int = BLOCK,
) -> Drafts:
    """See `lookup_reference`; all tensors on one device, and nothing waits for it.

    Args:
        k: most tokens of any draft; `rooms` are at most that.
        longest: no slice is longer; what the host knows of `ends` - `starts`.
        block: positions per program, a power of two and at least `OCCURRENCES`.
    """
    if longest >= 1 << _PLACES:
        raise ValueError(f"a slice of {longest} tokens is longer than {(1 << _PLACES) - 1}; keep fewer epochs")
    batch, device = len(contexts), corpus.device
    blocks = max(1, triton.cdiv(longest, block))
    width = blocks * OCCURRENCES
    keys = torch.empty(batch, width, dtype=torch.int32, device=device)
    drafts = Drafts(
        torch.empty(batch, k, dtype=torch.int32, device=device),
        torch.empty(batch, k, dtype=torch.float32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.float32, device=device),
    )
    if batch:
        _scan[(batch, blocks)](
            corpus, starts, ends, contexts, keys, width, DEPTH=DEPTH, BLOCK=block, OCC=OCCURRENCES, PLACES=_PLACES
        )
        _vote[(batch,)](
            corpus, starts, ends, rooms, keys, width, width, factor, min_prob, *drafts, K=k,
            K_PADDED=triton.next_power_of_2(k), DEPTH=DEPTH, OCC=OCCURRENCES, PLACES=_PLACES,
        )  # fmt: skip
    return drafts
