"""Longest-suffix lookup: the tokens that follow in the corpus where it matches the end of a request.

    corpus   ... 7 4 9 5 8 | 2 4 9 5 3 6 | 1 9 5 8 ...        | separator, -1
    context            4 9 5                                  the last `DEPTH` tokens of prompt + response
    match        3 ----^       3 --^         2 --^            equal tokens backwards from each position
    vote               5 -> {8: 1, 3: 1} at length 3,  {8: 2, 3: 1} at length 2

Every position with the context's last token, and with a token after it, is an occurrence. For each match length the
occurrences at least that long vote for the next token, those that have the winner vote for the one after it, and so on:
a token's probability is the product of the shares of the votes up to it. A chain is at most `factor` times as long as
its match. The chain with the largest sum of probabilities is the draft; of equal ones that of the longest match: the
score of SuffixDecoding (arXiv:2411.04975, section 4.2) over an array instead of a tree.

`tests/support/lookup_reference.py` is the definition, in numpy; here occurrences are found by hash chains, as in LZ77,
and not by going over the corpus.

    tokens   ... 7 4 9 5 8 ... 2 4 9 5 3 ... 1 4 9 5 6 ...
    before3          -1 <------------ . <---------- .  <- heads[hash(4, 9, 5)]

Each position links to the one before it with the same last three tokens, and to the one with the same last token; the
newest of each is found by its hash. A lookup visits occurrences only, newest first, at most `VISITS`. Compiled by
numba, which vLLM requires on every platform. A step is one call for all requests, as a call from Python costs what a
lookup does, so corpora are given as addresses of their headers.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.extending import intrinsic

TOKENS, BEFORE1, BEFORE3 = range(3)
"""Rows of a corpus, int32 [3, capacity]: tokens, and before each the position with the same last token, or three."""

HEADER = 5
"""int64 of a corpus's header: address and capacity of its rows, address and length of its heads, positions in use."""

VISITS = 256  # positions of a chain that a lookup looks at


def _compile(f):  # type: ignore[no-untyped-def]
    try:
        return numba.njit(cache=True, nogil=True)(f)
    except RuntimeError:  # no folder that can be written for its cache
        return numba.njit(nogil=True)(f)


@intrinsic  # type: ignore[untyped-decorator]
def _at(_typing: Any, _address: Any, like: Any) -> Any:
    """The pointer of an address, to values such as `like`."""

    def generate(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _context.get_value_type(signature.return_type))

    return numba.types.CPointer(like)(numba.types.int64, like), generate


@_compile
def _corpus(address):  # type: ignore[no-untyped-def]
    """Rows, heads and positions in use of the corpus whose header is at `address`."""
    header = numba.carray(_at(address, np.int64(0)), HEADER)
    rows = numba.carray(_at(header[0], np.int32(0)), (3, header[1]))
    heads = numba.carray(_at(header[2], np.int32(0)), (2, header[3]))
    return rows, heads, header[4]


@_compile
def _hash1(a, mask):  # type: ignore[no-untyped-def]
    return np.int64((np.uint32(a) * np.uint32(2654435761)) >> np.uint32(7)) & mask


@_compile
def _hash3(a, b, c, mask):  # type: ignore[no-untyped-def]
    mixed = np.uint32(a) * np.uint32(2654435761) ^ np.uint32(b) * np.uint32(2246822519)
    mixed ^= np.uint32(c) * np.uint32(3266489917)
    return np.int64(mixed ^ (mixed >> np.uint32(15))) & mask


@_compile
def link(rows, heads, start, low, high):  # type: ignore[no-untyped-def]
    """Put the positions `low` to `high` of a sequence that begins at `start` into their chains.

    `heads` int32 [2, a power of two]: the newest place of each chain, -1 for none.
    """
    tokens = rows[TOKENS]
    mask = heads.shape[1] - 1
    for i in range(low, high):
        h = _hash1(tokens[i], mask)
        rows[BEFORE1, i] = heads[0, h]
        heads[0, h] = i
        if i - start >= 2:
            h = _hash3(tokens[i - 2], tokens[i - 1], tokens[i], mask)
            rows[BEFORE3, i] = heads[1, h]
            heads[1, h] = i


@_compile
def extend(corpora, starts, positions, ends, tokens):  # type: ignore[no-untyped-def]
    """Write `tokens` int32 [n] into corpora: the i-th of its parts, which end at `ends` int64 [B], from `positions[i]`
    on, into a sequence that begins at `starts[i]`. `corpora` int64 [B]: addresses of headers.
    """
    low = 0
    for i in range(len(corpora)):
        rows, heads, _ = _corpus(corpora[i])
        n = ends[i] - low
        rows[TOKENS, positions[i] : positions[i] + n] = tokens[low : ends[i]]
        link(rows, heads, starts[i], positions[i], positions[i] + n)
        low = ends[i]


@_compile
def _follow(tokens, end, voters, total, most, min_prob, alive, followers, votes, chain, shares):  # type: ignore[no-untyped-def]
    """`lookup_reference._follow`, into `chain` and `shares`; returns length and score. The rest is scratch."""
    left = total
    alive[:left] = voters[:left]
    prob, score, length = np.float32(1.0), np.float32(0.0), 0
    while length < most:
        kinds, cast = 0, 0
        for a in range(left):
            at = alive[a] + 1 + length
            token = tokens[at] if at < end else np.int32(-1)
            if token == -1:
                continue
            cast += 1
            k = 0
            while k < kinds and followers[k] != token:
                k += 1
            if k == kinds:
                followers[k] = token
                votes[k] = 0
                kinds += 1
            votes[k] += 1
        if cast == 0:
            break
        winner = 0
        for k in range(1, kinds):
            if votes[k] > votes[winner]:
                winner = k
        prob = np.float32(prob * np.float32(np.float32(votes[winner]) / np.float32(cast)))
        if prob < np.float32(min_prob):
            break
        chosen = followers[winner]
        still = 0
        for a in range(left):
            at = alive[a] + 1 + length
            if at < end and tokens[at] == chosen:
                alive[still] = alive[a]
                still += 1
        left = still
        chain[length] = chosen
        shares[length] = prob
        length += 1
        score = np.float32(score + prob)
    return length, score


@_compile
def lookup(corpora, fallback, weak, contexts, rooms, factor, min_prob, electorate, found, wider):  # type: ignore[no-untyped-def]
    """The drafts of a batch, to `found` (`scan.Found`), from each one's own corpus (int64 [B], addresses of headers).

    `fallback`: address of the shared one, 0 for none; asked where a match is shorter than `weak`, and taken where its
    score is higher: `wider` bool [B] says where. `contexts`: int32 [B, depth]. `rooms`: int32 [B]. `electorate`: most
    occurrences that vote. (No constant of another module: numba's cache would keep the old.)
    """
    tokens, probs, counts, matches, scores = found
    others, shares = np.empty(tokens.shape[1], np.int32), np.empty(tokens.shape[1], np.float32)
    for b in range(len(corpora)):
        rows, heads, end = _corpus(corpora[b])
        count, match, score = _one(
            rows, heads, end, contexts[b], rooms[b], factor, min_prob, electorate, tokens[b], probs[b]
        )
        if fallback != 0 and match < weak:
            rows, heads, end = _corpus(fallback)
            n, length, best = _one(
                rows, heads, end, contexts[b], rooms[b], factor, min_prob, electorate, others, shares
            )
            if best > score:
                wider[b], count, match, score = True, n, length, best
                tokens[b, :n], probs[b, :n] = others[:n], shares[:n]
        counts[b], matches[b], scores[b] = count, match, score


@_compile
def _one(rows, heads, end, context, room, factor, min_prob, electorate, out_tokens, out_probs):  # type: ignore[no-untyped-def]
    """One request's draft, to `out_tokens` int32 and `out_probs` float32, both [>= room].

    Returns token count, match length, score.
    """
    depth = len(context)
    if depth == 0 or room <= 0:
        return 0, 0, np.float32(0.0)
    tokens = rows[TOKENS]
    mask = heads.shape[1] - 1
    last = context[-1]
    positions = np.empty((depth + 1, electorate), np.int32)  # by match length, newest first
    kept = np.zeros(depth + 1, np.int32)
    voters = np.empty(electorate, np.int32)
    alive = np.empty(electorate, np.int32)
    followers = np.empty(electorate, np.int32)
    votes = np.empty(electorate, np.int32)
    chain = np.empty(room, np.int32)
    shares = np.empty(room, np.float32)
    total, count, match, best = 0, 0, 0, np.float32(0.0)
    for gram in (3, 1):  # matches of three tokens and more, then what is left
        if depth < gram:
            continue
        if gram == 3:
            row, least, longest = BEFORE3, 3, depth
            i = np.int64(heads[1, _hash3(context[-3], context[-2], last, mask)])
        else:
            row, least, longest = BEFORE1, 1, min(depth, 2)
            if total == electorate or best >= min(room, np.int64(longest * factor + 1e-6)):
                break
            i = np.int64(heads[0, _hash1(last, mask)])
        visits = 0
        while i >= 0 and visits < VISITS and kept[longest] < electorate:
            visits += 1
            if tokens[i] == last and i + 1 < end and tokens[i + 1] != -1:
                n = 1
                while n < depth and i >= n and tokens[i - n] == context[-1 - n]:
                    n += 1
                if least <= n <= longest and kept[n] < electorate:
                    positions[n, kept[n]] = i
                    kept[n] += 1
            i = np.int64(rows[row, i])
        for n in range(longest, least - 1, -1):
            more = min(kept[n], electorate - total)
            if more == 0:
                continue
            voters[total : total + more] = positions[n, :more]
            total += more
            most = min(room, np.int64(n * factor + 1e-6))
            if best >= most:
                continue
            length, score = _follow(tokens, end, voters, total, most, min_prob, alive, followers, votes, chain, shares)
            if score > best:
                best, count, match = score, length, n
                out_tokens[:length] = chain[:length]
                out_probs[:length] = shares[:length]
    return count, match, best
