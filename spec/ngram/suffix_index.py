"""Where the last tokens of a growing history occurred before, without reading it again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_TOKEN_BYTES = array("I").itemsize


class SuffixIndex:
    """The last place of every run of a few given lengths in one history of tokens.

    A token costs one dict entry for each length; the history itself is not kept.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        """An empty history. lengths: of the runs, in tokens, each at least 1."""
        assert lengths and min(lengths) >= 1, lengths
        # Longest first, as matches are looked for. Keys are bytes, because Python salts their
        # hashes: a prompt cannot be written so that all its runs collide.
        self._next_places: dict[int, dict[bytes, int]] = {
            _TOKEN_BYTES * length: {} for length in sorted(lengths, reverse=True)
        }
        self._max_bytes = _TOKEN_BYTES * max(lengths)
        self._tail = b""
        self._num_tokens = 0

    def __len__(self) -> int:
        """Tokens of the history."""
        return self._num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """The history goes on with these tokens, each 0 to 2^32 - 1.

        A run is kept once a token follows it: the history's own end is never among the places.
        """
        ends_at = len(self._tail)
        known = self._tail + array("I", token_ids).tobytes()
        places = list(range(self._num_tokens, self._num_tokens + len(token_ids)))
        for num_bytes, next_places in self._next_places.items():
            num_short = max(0, num_bytes - ends_at) // _TOKEN_BYTES
            ends = range(max(ends_at, num_bytes), len(known), _TOKEN_BYTES)
            for place, end in zip(places[num_short:], ends, strict=True):
                next_places[known[end - num_bytes : end]] = place
        self._tail = known[-self._max_bytes :]
        self._num_tokens += len(token_ids)

    def find_next(self) -> int | None:
        """Place of the token that followed the last tokens where they occurred before.

        The longest run that occurred wins, and of its occurrences the last; None if none did.
        """
        for num_bytes, next_places in self._next_places.items():
            if num_bytes <= len(self._tail):
                place = next_places.get(self._tail[-num_bytes:])
                if place is not None:
                    return place
        return None
