"""A suffix automaton that grows with its text (Blumer et al. 1985) and counts."""

from __future__ import annotations


class SuffixAutomaton:
    """All substrings of a text of at most ``depth`` tokens: how often each occurs, and where it ended last.

    A state stands for the substrings that end at the same positions; ``links`` leads from it to the longest suffix
    that ends at more of them. Appending a token costs O(1) amortised for the automaton and a step per linked suffix
    within ``depth`` for the counts: O(matched length).

    ``state`` and ``matched`` are the longest suffix of the text, within ``depth``, that also occurs earlier, and
    ``earlier`` is the position after its most recent earlier occurrence; matched 0 when there is none.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.links = [-1]
        self.lengths = [0]
        self.counts = [0]
        self.ends = [0]
        self.state = self.matched = self.earlier = 0
        self._whole = 0

    def append(self, token: int) -> None:
        """Add a token to the text."""
        state, self.matched = self.advance(self.state, self.matched, token)
        self._grow(token)
        self.text.append(token)
        self.state = state = self.settle(state, self.matched)
        links, counts, ends, end = self.links, self.counts, self.ends, len(self.text)
        self.earlier = ends[state]
        while state > 0:
            counts[state] += 1
            ends[state] = end
            state = links[state]

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Return the longest suffix of a matched substring and ``token`` that occurs, within ``depth``."""
        following = self.next
        while (longer := following[state].get(token)) is None:
            state = self.links[state]
            if state < 0:
                return 0, 0
            matched = self.lengths[state]
        matched = matched + 1 if matched < self.depth else self.depth
        return self.settle(longer, matched), matched

    def settle(self, state: int, matched: int) -> int:
        """Return the state of a substring that ended in ``state`` before the text grew."""
        if not matched:
            return 0
        links, lengths = self.links, self.lengths
        while lengths[shorter := links[state]] >= matched:
            state = shorter
        return state

    def _grow(self, token: int) -> None:
        following, links, lengths = self.next, self.links, self.lengths
        state = self._whole
        self._whole = new = self._add({}, lengths[state] + 1, 0, 1, len(self.text) + 1)
        while (old := following[state].setdefault(token, new)) == new:
            state = links[state]
            if state < 0:
                return
        if lengths[old] > lengths[state] + 1:
            # The substrings up to this length now end at one position more than the longer ones.
            copy = self._add(following[old].copy(), lengths[state] + 1, links[old], self.counts[old], self.ends[old])
            while state >= 0 and following[state].get(token) == old:
                following[state][token] = copy
                state = links[state]
            links[old] = old = copy
        links[new] = old

    def _add(self, following: dict[int, int], length: int, link: int, count: int, end: int) -> int:
        self.next.append(following)
        self.lengths.append(length)
        self.links.append(link)
        self.counts.append(count)
        self.ends.append(end)
        return len(self.next) - 1
