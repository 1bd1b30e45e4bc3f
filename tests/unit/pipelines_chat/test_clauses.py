# SPDX-License-Identifier: Apache-2.0
"""Clauses: where a text is cut, when a clause leaves, and that the cutting does not depend on the deltas."""

from __future__ import annotations

import random

import pytest

from triton_omni.backends.pipelines.chat.clauses import FIRST_CHARS, LONGEST_CHARS, Clauses, speakable


def whole(text: str) -> list[str]:
    return Clauses().feed(text, last=True)


@pytest.mark.parametrize(
    ("text", "clauses"),
    [
        ("Hello there. How are you?", ["Hello there.", "How are you?"]),
        ("Pi is 3.14 or so. Yes!", ["Pi is 3.14 or so.", "Yes!"]),
        ("Dr. Smith met J. K. Rowling. They spoke.", ["Dr. Smith met J. K. Rowling.", "They spoke."]),
        ("It is big, e.g. as a house. Ok.", ["It is big, e.g. as a house.", "Ok."]),
        ("The U.S. is large. It has 50 states.", ["The U.S. is large.", "It has 50 states."]),
        ('He said "Go away." Then he left.', ['He said "Go away."', "Then he left."]),
        ("Fruits:\n1. Apples\n2. Pears\n- Plums", ["Fruits:", "Apples", "Pears", "Plums"]),
        ("He lives at No. 5. She left.", ["He lives at No.", "5.", "She left."]),
        ("It was 4. \n5. Five - not six", ["It was 4.", "Five - not six"]),
        ("No stop at the end", ["No stop at the end"]),
        (
            "## A *bold* title\n\nText with `code` and [a link](http://x.y).",
            ["A bold title", "Text with code and a link."],
        ),
        ("Well... maybe. 🎉🎉", ["Well...", "maybe."]),
        ("It is 20°C. 😀 Nice.", ["It is 20°C.", "Nice."]),
        ("```python\n---\n", []),
        ("🎉 \n ** \t", []),
        ("", []),
        (" \n ", []),
    ],
)
def test_cuts(text: str, clauses: list[str]) -> None:
    assert whole(text) == clauses


def test_first_clause_leaves_before_the_second_is_complete() -> None:
    cutter = Clauses()
    assert cutter.feed("Hello there", last=False) == []
    assert cutter.feed(".", last=False) == []  # could be 3.14 or a web address
    assert cutter.feed(" How", last=False) == ["Hello there."]
    assert cutter.feed(" are you", last=True) == ["How are you"]


def test_first_clause_ends_at_an_early_comma_and_later_ones_do_not() -> None:
    text = "The capital of France, as you know, is Paris. It lies on the river Seine, in the north, far from the sea."
    assert whole(text) == [
        "The capital of France,",
        "as you know, is Paris.",
        "It lies on the river Seine, in the north, far from the sea.",
    ]
    assert len("Well, ") < FIRST_CHARS and whole("Well, no.") == ["Well, no."]


def test_clause_without_marks_is_cut_between_words_at_the_limit() -> None:
    text = "word " * 200
    clauses = whole(text)
    assert " ".join(clauses) == text.strip()
    assert all(len(clause) <= LONGEST_CHARS for clause in clauses) and len(clauses) == 4


def test_one_endless_word_is_cut_at_the_limit() -> None:
    assert [len(clause) for clause in whole("a" * (2 * LONGEST_CHARS + 5))] == [LONGEST_CHARS, LONGEST_CHARS, 5]


PIECES = (
    "Hello", " there", ". ", "! ", "? ", ", ", "; ", "3.14", " e.g. ", "Dr. ", "\n", "\n\n", "1. ", "- ", "**", "🎉",
    "a" * 90, "5. ", "\n7. ", ' "quoted." ', "...", " ", "  ", "x", " U.S. ", ".", ",", ")", "(", "I. ", "word " * 30,
    "`", "[a](b) ",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(200))
def test_the_way_a_text_is_cut_into_deltas_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(PIECES, k=rng.randrange(60)))
    expected = whole(text)
    for longest_delta in (1, 3, 40):
        cutter, found, at = Clauses(), [], 0
        while at < len(text):
            size = rng.randint(1, longest_delta)
            found += cutter.feed(text[at : at + size], last=False)
            at += size
        found += cutter.feed("", last=True)
        assert found == expected


@pytest.mark.parametrize("seed", range(20))
def test_no_word_is_lost_or_spoken_twice(seed: int) -> None:
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(rng.randrange(1, 200))]
    text = "".join(word + rng.choice((" ", ", ", ". ", "\n", "; ")) for word in words)
    spoken = " ".join(whole(text)).split()
    assert [word.strip(",.;") for word in spoken] == words


def test_speakable_drops_what_has_no_reading() -> None:
    assert speakable("snake_case | **x** 👍🏽") == "snake case x"
    assert speakable("Hello Привет, 你好 café naïve Łódź, ﬁne") == "Hello , café naïve Łódź, ﬁne"
    assert speakable("नमस्ते ελλάδα 가나다") == ""
    assert speakable("#1 costs $5 & 3^2") == "#1 costs $5 & 3^2"
