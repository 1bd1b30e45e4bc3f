# SPDX-License-Identifier: Apache-2.0
"""Which phonemes say which written word. hibari reads "$9.99" as "nine dollars and ninety nine cents": the words of a
clause as written and as read are matched in their order, and a written word has the span of all that was read for it.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hibari.g2p import G2P
from hibari.g2p.normalize import normalize


@dataclass(frozen=True, slots=True)
class PlacedWord:
    """A word and where its phonemes are: from place `begin` to before `end`."""

    text: str
    begin: int
    end: int


class WordReader:
    """hibari's reader of text, which notes where the words of what it reads are.

    read  what was read since the list was emptied, in order: phonemes, and the words with their places in them
    """

    def __init__(self) -> None:
        self.g2p = G2P()
        self.read: list[tuple[str, list[PlacedWord]]] = []

    def __call__(self, sentence: str) -> str:
        """The phonemes of a sentence, as hibari's own reader gives them."""
        tokens = self.g2p.phonemize_tokens(self.g2p.tokenize(normalize(sentence)))
        phonemes, text, begin, end = "", "", 0, 0
        words: list[PlacedWord] = []
        for token in tokens:
            said = self.g2p.unk if token.phonemes is None else token.phonemes
            if said and any(char.isalnum() for char in token.text):
                begin = begin if text else len(phonemes)
                text += token.text
                end = len(phonemes) + len(said)
            phonemes += said + (" " if token.whitespace else "")
            if token.whitespace and text:
                words.append(PlacedWord(text, begin, end))
                text = ""
        if text:
            words.append(PlacedWord(text, begin, end))
        lead = len(phonemes) - len(phonemes.lstrip())
        phonemes = phonemes.strip()
        self.read.append((phonemes, [PlacedWord(w.text, w.begin - lead, w.end - lead) for w in words]))
        return phonemes


def placed(
    clause: str, read: Sequence[tuple[str, Sequence[PlacedWord]]], pieces: Sequence[str]
) -> list[list[PlacedWord]]:
    """The written words of a clause in each of its `pieces`, which together are the phonemes of what was `read` but for
    spaces. A word that goes on in another piece ends with the piece that it begins in.
    """
    read_words, done = list[PlacedWord](), 0  # places count the signs that are no spaces
    for phonemes, words in read:
        signs = [0, *accumulate(not char.isspace() for char in phonemes)]
        read_words += [PlacedWord(w.text, done + signs[w.begin], done + signs[w.end]) for w in words]
        done += signs[-1]
    rest = deque(_spans([word for word in clause.split() if plain(word)], read_words))
    found, first = list[list[PlacedWord]](), 0
    for number, piece in enumerate(pieces, 1):
        places = [place for place, char in enumerate(piece) if not char.isspace()]
        stop = first + len(places)
        found.append([])
        while rest and (rest[0].begin < stop or number == len(pieces)):
            word = rest.popleft()
            begin = places[word.begin - first] if word.begin < stop else len(piece)
            end = places[min(word.end, stop) - 1 - first] + 1 if word.begin < min(word.end, stop) else begin
            found[-1].append(PlacedWord(word.text, begin, end))
        first = stop
    return found


def _spans(written: Sequence[str], read_words: Sequence[PlacedWord]) -> Iterator[PlacedWord]:
    """The written words at the places of the read ones; one for which nothing was read has no length."""
    end = 0
    for text, first, last in matched(written, [word.text for word in read_words]):
        begin = read_words[first].begin if first < last else end
        end = read_words[last - 1].end if first < last else end
        yield PlacedWord(text, begin, end)


def matched(written: Sequence[str], read: Sequence[str]) -> list[tuple[str, int, int]]:
    """Every written word with the read words (first, last + 1) that stand for it; none if first is last + 1."""
    ours, theirs = [plain(word) for word in written], [plain(word) for word in read]
    if not ours:
        return []
    spans = [(0, 0)] * len(ours)
    leads: dict[int, int] = {}
    for kind, i, i_end, j, j_end in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if kind == "equal":
            spans[i:i_end] = [(place, place + 1) for place in range(j, j_end)]
        elif kind != "insert":
            spans[i:i_end] = _shared(ours[i:i_end], j, j_end)
        elif i == 0 or (i < len(ours) and not written[i][0].isalnum()):
            leads[i] = j  # "#1" is read "number 1"
        else:
            spans[i - 1] = (spans[i - 1][0], j_end)
    for place, first in leads.items():
        spans[place] = (first, spans[place][1])
    return [(word, first, last) for word, (first, last) in zip(written, spans, strict=True)]


def _shared(words: Sequence[str], first: int, last: int) -> list[tuple[int, int]]:
    """The read words from `first` to before `last`, dealt out to the written ones by length."""
    total = sum(map(len, words))
    cuts, done = [first], 0
    for word in words:
        done += len(word)
        cuts.append(first + round(done / total * (last - first)))
    return list(pairwise(cuts))


def plain(word: str) -> str:
    """What of a word counts when two are compared; empty for signs alone."""
    return "".join(char for char in word.lower().replace("’", "'") if char.isalnum() or char == "'").strip("'")
