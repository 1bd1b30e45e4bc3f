# SPDX-License-Identifier: Apache-2.0
"""Images of the `digits` model: inks, backgrounds, prompt templates, and a reader that classifies an image. Needs numpy
only."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

INKS: dict[str, tuple[int, int, int]] = {
    "black": (0, 0, 0), "red": (220, 30, 30), "green": (20, 150, 40), "blue": (30, 60, 220),
    "purple": (130, 30, 160), "orange": (240, 130, 20), "white": (255, 255, 255),
}  # fmt: skip
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255), "yellow": (250, 230, 90), "black": (0, 0, 0), "pink": (250, 190, 210),
    "cyan": (150, 230, 240),
}  # fmt: skip
PAIRS = tuple((ink, background) for ink in INKS for background in BACKGROUNDS if ink != background)
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

COLORED = (
    "{a} {ink} {n} on a {bg} background",
    "{a} {ink} handwritten {n} on a {bg} background",
    "a handwritten {n} in {ink} ink on a {bg} background",
    "{a} {ink} digit {n} on a {bg} background",
    "the number {n} in {ink} on a {bg} background",
    "{a} {ink} {n} on {bg} paper",
    "draw the number {n} in {ink} on {bg}",
)
ON_WHITE = ("{a} {ink} handwritten {n}", "the digit {n} in {ink}", "{a} {ink} {n}", "draw {a} {ink} {n}")
PLAIN = ("a handwritten {n}", "a handwritten digit {n}", "the number {n}", "{n}", "draw a {n}", "please draw me a {n}")

HELD_OUT = Path(__file__).with_name("digits_held_out.npz")
"""Digits that are not in the training data."""

Pixels = npt.NDArray[np.uint8]


class Reading(NamedTuple):
    """What an image shows."""

    digit: int
    ink: str
    background: str


def templates(ink: str, background: str) -> tuple[str, ...]:
    """Prompt templates of a pair of colors; a white background and black ink may be left out."""
    result = COLORED
    if background == "white":
        result += ON_WHITE
    if (ink, background) == ("black", "white"):
        result += PLAIN
    return result


def prompt(template: str, wanted: Reading, spell: bool = False) -> str:
    """One prompt; `spell` writes the digit as a word."""
    name = NAMES[wanted.digit] if spell else str(wanted.digit)
    article = "an" if wanted.ink[0] in "aeiou" else "a"
    return template.format(a=article, ink=wanted.ink, bg=wanted.background, n=name)


def random_prompt(rng: random.Random, wanted: Reading) -> str:
    """A prompt with variations: sometimes a capital letter, a full stop or a wrong article."""
    text = prompt(rng.choice(templates(wanted.ink, wanted.background)), wanted, rng.random() < 0.5)
    if rng.random() < 0.1:
        text = text.replace("an orange", "a orange")
    if rng.random() < 0.2:
        text = text[0].upper() + text[1:]
    return text + "." if rng.random() < 0.15 else text


def random_colors(rng: random.Random) -> tuple[str, str]:
    """A pair of colors; black on white more often, because plain prompts mean it."""
    return PAIRS[rng.randrange(len(PAIRS))] if rng.random() > 0.15 else ("black", "white")


def evaluation_set(count: int, seed: int = 99) -> list[tuple[str, Reading]]:
    """`count` prompts over digits, inks and backgrounds, all in trained templates."""
    rng = random.Random(seed)
    cases: list[tuple[str, Reading]] = []
    for i in range(count):
        wanted = Reading(i % 10, *PAIRS[rng.randrange(len(PAIRS))])
        cases.append((prompt(COLORED[i % len(COLORED)], wanted, spell=rng.random() < 0.3), wanted))
    return cases


class Reader:
    """Reads an image: colors by the palette, the digit by its three nearest real digits (8 x 8, 0..16)."""

    def __init__(self, digits: npt.NDArray[np.number], labels: npt.NDArray[np.number]) -> None:
        self._digits = np.asarray(digits, np.float32).reshape(len(digits), 64)
        self._labels = np.asarray(labels, np.int64)

    def digit(self, strokes: npt.NDArray[np.float32]) -> int:
        """The digit that an 8 x 8 map of ink (0..16) shows."""
        distances = np.square(self._digits - strokes.reshape(1, 64)).sum(1)
        nearest = self._labels[np.argsort(distances, kind="stable")[:3]]
        return int(np.bincount(nearest, minlength=10).argmax())

    def read(self, pixels: Pixels) -> Reading:
        """Digit, ink and background of an RGB image (h, w, 3), without knowledge of the prompt."""
        ink, background = colors(pixels)
        return Reading(self.digit(strokes(pixels, ink, background)), ink, background)


def held_out_reader() -> Reader:
    """A reader that knows the held-out digits only."""
    with np.load(HELD_OUT) as held_out:
        return Reader(held_out["digits"], held_out["labels"])


def colors(pixels: Pixels) -> tuple[str, str]:
    """Nearest palette names of (ink, background): the border's median, and the 5 % of pixels farthest from it."""
    x = pixels.astype(np.float32)
    edges = (x[:3], x[-3:], x[:, :3], x[:, -3:])
    background = np.median(np.concatenate([e.reshape(-1, 3) for e in edges]), 0)
    far = np.linalg.norm(x - background, axis=-1)
    ink = x[far >= np.quantile(far, 0.95)].mean(0)
    return _nearest(INKS, ink), _nearest(BACKGROUNDS, background)


def strokes(pixels: Pixels, ink: str, background: str) -> npt.NDArray[np.float32]:
    """The 8 x 8 map of ink (0..16) in the image's middle square, which must be a multiple of 8 wide."""
    at, to = np.array(BACKGROUNDS[background], np.float32), np.array(INKS[ink], np.float32)
    line = to - at
    alpha = ((pixels.astype(np.float32) - at) @ line / (line @ line)).clip(0, 1)
    side = min(alpha.shape)
    top, left = (alpha.shape[0] - side) // 2, (alpha.shape[1] - side) // 2
    square = alpha[top : top + side, left : left + side]
    return square.reshape(8, side // 8, 8, side // 8).mean((1, 3)) * 16


def _nearest(palette: dict[str, tuple[int, int, int]], color: npt.NDArray[np.float32]) -> str:
    return min(palette, key=lambda name: float(np.linalg.norm(np.array(palette[name], np.float32) - color)))
