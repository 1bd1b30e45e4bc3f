# SPDX-License-Identifier: Apache-2.0
"""The window of a stream: what may be sent ahead of a client, with and without acknowledgments."""

from __future__ import annotations

import random

import pytest

from triton_omni.backends.core.output_window import (
    BURST,
    FIRST_SHARE,
    MARKS,
    PACE_S,
    RESPONSE_BYTES,
    OutputWindow,
)

LIMIT = 1 << 20


@pytest.mark.parametrize("seed", range(20))
def test_random_sizes_never_exceed_the_window_and_never_stand_still(seed: int) -> None:
    """The client reads in order and late; whatever is marked is acknowledged some time after it was read."""
    rng = random.Random(seed)
    window, marked, sent = OutputWindow(LIMIT, acknowledges=True), list[tuple[str, int]](), 0
    while sent < 3_000:
        nbytes = rng.choice((0, 100, 5_000, LIMIT // 3, rng.randrange(3 * LIMIT)))
        if window.has_room(nbytes) and rng.random() < 0.9:
            alone, open_bytes = window.sent_bytes - window.read_bytes < window.open_bytes / MARKS, window.open_bytes
            if mark := window.send(nbytes):
                marked.append((mark, window.sent_bytes))
            sent += 1
            assert alone or window.sent_bytes - window.read_bytes <= open_bytes <= LIMIT
        elif marked:
            mark, count = marked.pop(rng.randrange(len(marked)) if rng.random() < 0.5 else 0)
            assert window.acknowledge(mark) and window.read_bytes == count
            marked = [later for later in marked if later[1] > window.read_bytes]
        else:
            assert window.has_room(nbytes), "nothing is asked for, so nothing can come: it must be free to send"


def test_marks_are_few() -> None:
    window = OutputWindow(LIMIT, acknowledges=True)
    asked = 0
    for _ in range(10_000):
        if mark := window.send(1_000):
            asked += 1
            window.acknowledge(mark)
    assert asked == pytest.approx(10_000 * (1_000 + RESPONSE_BYTES) / (LIMIT / MARKS), abs=8)


def test_a_client_that_never_acknowledges_is_sent_a_small_part_of_the_window() -> None:
    window, sent = OutputWindow(LIMIT, acknowledges=True), 0
    while window.has_room(0):
        sent += RESPONSE_BYTES
        window.send(0)
    assert sent == pytest.approx(LIMIT * FIRST_SHARE, rel=0.02)


def test_a_short_answer_needs_no_acknowledgment() -> None:
    window = OutputWindow(8 << 20, acknowledges=True)
    assert not any(window.send(20) for _ in range(100))


def test_only_marks_that_were_sent_acknowledge_and_each_once() -> None:
    window = OutputWindow(LIMIT, acknowledges=True)
    marks = [mark for _ in range(2_000) if (mark := window.send(1_000))]
    assert len(set(marks)) == len(marks) > 20
    for forged in ("", "0", str(window.sent_bytes), marks[0][:-1]):
        assert not window.acknowledge(forged)
    assert window.read_bytes == 0
    assert window.acknowledge(marks[5])
    read = window.read_bytes
    assert not window.acknowledge(marks[5]) and not window.acknowledge(marks[2])
    assert window.read_bytes == read > 0, "an older one takes nothing back"


def send_all(window: OutputWindow, nbytes: int, playback_s: float, seconds: float) -> int:
    """Responses that leave within a time, if there are always more."""
    count, now_s = 0, 0.0
    while now_s <= seconds:
        window.elapse(now_s)
        while window.has_room(nbytes):
            window.send(nbytes, playback_s)
            count += 1
        now_s += 0.1
    return count


def test_text_without_acknowledgments_is_paced() -> None:
    count = send_all(OutputWindow(LIMIT, acknowledges=False), 0, 0.0, 60)
    assert count * RESPONSE_BYTES == pytest.approx(LIMIT * (BURST + 60 / PACE_S), rel=0.02)


@pytest.mark.parametrize("expansion", [1, 5])
def test_audio_without_acknowledgments_keeps_up_with_its_playing(expansion: int) -> None:
    piece_s = 0.3
    window = OutputWindow(LIMIT, acknowledges=False, expansion=expansion)
    count = send_all(window, int(24_000 * 4 * piece_s), piece_s, 60)
    assert 0.9 * 60 <= count * piece_s <= 1.2 * 60 + LIMIT / 96_000


def test_images_without_acknowledgments_do_not_wait_for_long() -> None:
    image = 3 * 1024 * 1024
    assert send_all(OutputWindow(8 * LIMIT, acknowledges=False), image, 0.0, 3) >= 6
