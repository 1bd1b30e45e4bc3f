# SPDX-License-Identifier: Apache-2.0
"""Cuts a growing text into clauses to speak. Where it cuts depends on the text alone, not on how it arrived."""

from __future__ import annotations

import re
import unicodedata

LONGEST_CHARS = 300
FIRST_CHARS, NEXT_CHARS = 16, 120
"""A comma ends a clause of at least this length: soon in the first clause, for an early start, else in long ones."""
UNREADABLE = "nothing in it can be read aloud; the voice reads English"

_ABBREVIATIONS = """
mr mrs ms dr prof rev st sr jr gen capt lt sgt hon dept vs etc approx fig vol inc ltd co est
jan feb mar apr jun jul aug sep sept oct nov dec
"""
ABBREVIATIONS = frozenset(_ABBREVIATIONS.split())
SYMBOLS_FROM = 0x2000  # ° © ^ below it are read aloud
LETTER_S, SPELLED_S, DIGIT_S, SYMBOL_S = 0.075, 0.45, 0.5, 0.4
"""Seconds of speech at speed 1, upper estimates of what was measured: 0.06 per letter of English, 0.29 to 0.45 per
letter that is spelled, 0.23 to 0.49 per digit, 0.39 per symbol that is read by its name."""
_END = re.compile(r"""([.!?…]+)["'”’)\]*_]*(?=\s)|\n|[,;:—]["'”’)\]*_]*(?=\s)""")
_NUMBERED = re.compile(r"\s*[(\[]?(\d{1,3}|[A-Za-z])[.)]$")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)")
_LINE_MARK = re.compile(r"^\s*(?:#{1,6}|[-*+•>]|\d{1,3}[.)](?=\s))\s+")
_WORD = re.compile(r"[^\W\d_]+|[\W\d_]+")
_VOWEL = re.compile(r"[aeiouyAEIOUY\W\d_]|[^\x00-\x7f]")
_NAMED = frozenset("%&@#+=/\\$£€¥°©®™^<>")
_RULE_OR_FENCE = re.compile(r"^\s*(?:[-*_=]{3,}|```.*)\s*$")


class Clauses:
    """Text in, clauses out, each as soon as nothing that may follow could change it."""

    def __init__(self) -> None:
        self._text = ""
        self._first = True
        self._starts_line = True
        """A number or dash in front of the open clause is a list's mark only at the beginning of a line."""

    def feed(self, text: str, last: bool) -> list[str]:
        """Clauses complete now, cleaned for speech; with `last` the rest comes too. Silent ones are left out."""
        self._text += text
        self._skip_space()
        found: list[str] = []
        while (end := self._cut(last)) is not None:
            clause = speakable(self._text[:end], self._starts_line)
            self._starts_line = self._text[end - 1] == "\n"
            self._text = self._text[end:]
            self._skip_space()
            if clause:
                found.append(clause)
                self._first = False
        return found

    def _skip_space(self) -> None:
        rest = self._text.lstrip()
        self._starts_line = self._starts_line or "\n" in self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _cut(self, last: bool) -> int | None:
        """Where the first clause ends, or None while that is open."""
        shortest = FIRST_CHARS if self._first else NEXT_CHARS
        comma = 0
        for mark in _END.finditer(self._text):
            if mark.end() > LONGEST_CHARS:
                break
            if mark[1] or mark[0] == "\n":
                if not _is_inside(self._text[: mark.end(1)] if mark[1] else "", self._starts_line):
                    return mark.end()
            elif mark.end() >= shortest:
                return mark.end()
            else:
                comma = mark.end()
        if len(self._text) > LONGEST_CHARS:
            return comma or self._text.rfind(" ", 1, LONGEST_CHARS) + 1 or LONGEST_CHARS
        return len(self._text) if last and self._text else None


def _is_inside(text: str, starts_line: bool) -> bool:
    """True if the full stop at the end of `text` does not end a sentence: list number, initial, abbreviation."""
    if not text.endswith(".") or text.endswith(".."):
        return False
    if starts_line and _NUMBERED.match(text):
        return True
    word = text[:-1].rpartition(" ")[2].lstrip("(\"'“‘[*_")
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    has_inner_stops = "." in word and word[-1].isalpha()  # U.S., e.g., p.m.
    return is_initial or has_inner_stops or word.lower() in ABBREVIATIONS


def speakable(clause: str, starts_line: bool = True) -> str:
    """A clause without markdown and without what the voice cannot read; empty if there is nothing to say."""
    if _RULE_OR_FENCE.match(clause):
        return ""
    text = _LINK.sub(r"\1", _LINE_MARK.sub("", clause) if starts_line else clause)
    text = "".join(" " if c in "_|" else c for c in text if c not in "*`~" and _is_readable(c))
    text = " ".join(text.split())
    return text if any(c.isalnum() for c in text) else ""


def _is_readable(char: str) -> bool:
    """False for emoji and other symbols without a reading, for what joins them, and for letters that are not Latin."""
    if char.isascii():
        return char.isspace() or char.isprintable()
    category = unicodedata.category(char)
    if category[0] == "L":
        return unicodedata.name(unicodedata.normalize("NFKC", char)[0], "").startswith(("LATIN", "MODIFIER LETTER"))
    if category in ("So", "Sk"):
        return ord(char) < SYMBOLS_FROM
    return char.isspace() or category not in ("Cc", "Cf", "Cs", "Co", "Cn", "Mn", "Mc")


def estimated_speech_s(text: str) -> float:
    """About the seconds that a text takes at speed 1; rather more than less."""
    seconds = 0.0
    for word in _WORD.findall("".join(filter(_is_readable, text))):
        is_spelled = not _VOWEL.search(word)
        for char in word:
            if char.isalpha():
                seconds += SPELLED_S if is_spelled else LETTER_S
            else:
                seconds += DIGIT_S if char.isdigit() else SYMBOL_S if char in _NAMED else LETTER_S
    return seconds
