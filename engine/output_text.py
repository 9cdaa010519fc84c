"""The visible text of one output: detokenized, and cut at the first stop string."""

from __future__ import annotations

from engine.request import SamplingParams
from engine.tokens import TextStream


class OutputText:
    """Turns committed tokens into visible text, one at a time.

    Of the stop strings, the match that ends first wins; of those that end together, the one
    listed first. A match ends in a token at output position `min_tokens` (from 0) or later; it
    may begin before. Text that may be the beginning of a match is held back. Equal tokens give
    equal text and an equal stop, so the engine and the HTTP process agree on the cut.

    The token that ended a request without a stop string (EOS, a stop token id) has no text
    of its own here: the caller does not push it.
    """

    def __init__(self, stream: TextStream, params: SamplingParams) -> None:
        self.stop_string: str | None = None
        self._stream = stream
        self._has_stop_in_output = params.include_stop_str_in_output
        self._prefixes = [_StopPrefix(stop) for stop in params.stop_strings]
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, token_id: int) -> str:
        """The text that one more token makes visible; sets `stop_string` at a match."""
        assert self.stop_string is None, "the output has ended"
        can_stop = self._num_tokens >= self._min_tokens
        self._num_tokens += 1
        new = self._stream.push((token_id,))
        if not self._prefixes:
            return new
        text = self._held + new
        for end, char in enumerate(new, start=len(self._held) + 1):
            # Every prefix advances, also past a match: held text depends on all of them.
            matched = [prefix for prefix in self._prefixes if prefix.advance(char)]
            if matched and can_stop:
                return self._end(text[:end], matched[0].stop)
        num_held = max(prefix.len for prefix in self._prefixes)
        num_visible = len(text) - num_held
        self._held = text[num_visible:]
        return text[:num_visible]

    def finish(self) -> str:
        """The text still held when the request ends for another reason than a stop string.

        What an unfinished character leaves (U+FFFD) completes no stop string.
        """
        assert self.stop_string is None, "a stop string has ended the output"
        text = self._held + self._stream.flush()
        self._held = ""
        return text

    def _end(self, text: str, stop: str) -> str:
        self.stop_string = stop
        self._held = ""
        return text if self._has_stop_in_output else text.removesuffix(stop)


class _StopPrefix:
    """The longest proper prefix of a stop string that the text so far ends with.

    Knuth, Morris, Pratt (1977): amortized constant time per character.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.len = 0
        # _shorter[n]: the longest proper prefix of stop[:n + 1] that also ends it.
        self._shorter = [0]
        for char in stop[1:]:
            self._shorter.append(self._extend(self._shorter[-1], char))

    def advance(self, char: str) -> bool:
        """Take the next character; whether the text now ends with the whole stop string."""
        self.len = self._extend(self.len, char)
        if self.len < len(self.stop):
            return False
        self.len = self._shorter[-1]
        return True

    def _extend(self, prefix_len: int, char: str) -> int:
        while prefix_len and self.stop[prefix_len] != char:
            prefix_len = self._shorter[prefix_len - 1]
        return prefix_len + 1 if self.stop[prefix_len] == char else 0
