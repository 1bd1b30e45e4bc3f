# SPDX-License-Identifier: Apache-2.0
"""Random lives of requests to the toy pipeline, seeded: every way to behave, and what must be true of each end."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.kit.load_generator import Life, Plan, body, run_many
from triton_omni.backends.pipelines.toy.engines import FRAMES_PER_TOKEN, SAMPLES_PER_FRAME

STAGES = ("tokens", "frames", "wave")
MODALITIES = (("text",), ("audio",), ("text", "audio"))
FINAL = {"text": ("text", "tokens"), "audio": ("audio", "wave")}
IDS = ("", "same", "same", "a/b", "../../x", "req-1", "req-10", "x" * 256, "Ω≈ç√", "'; --")
DEADLINES = {"stall_s": 1.5, "first_output_s": 3.0}
BAD_IDS = ("x" * 257, "a\nb", "\x7f")
BAD_BODIES = (
    b"", b"\x00", b"\xff\xfe", b"nope", b"[]", b"null", b"{}", b'{"operation": "dance"}', b'{"messages": []}',
    b'{"messages": [{"role": "king", "content": "x"}]}', b'{"messages": "' + b"x" * (1 << 20) + b'"}',
    b"[" * 100_000, b'{"a":' * 50_000, b'{"sampling": {"max_tokens": 1e999}}', b'{"target": 1}',
)  # fmt: skip
COMPLETED = ("length", "stop")

Fate = Callable[[random.Random, int], Plan]


def _good(rng: random.Random, n: int) -> Plan:
    return _plan(rng, n)


def _slow(rng: random.Random, n: int) -> Plan:
    """Few tokens, each late: phases long enough to be left in."""
    return _plan(rng, min(n, 8), **{rng.choice(STAGES): {"delay_s": rng.uniform(0, 0.05)}})


def _fails(rng: random.Random, n: int) -> Plan:
    return _plan(rng, n, **{rng.choice(STAGES): {"fail_after": rng.randint(0, n)}})


def _refuses(rng: random.Random, n: int) -> Plan:
    return _plan(rng, n, **{rng.choice(STAGES): {"refuse": True}})


def _falls_silent(rng: random.Random, n: int) -> Plan:
    """A lost terminal: nothing but a deadline or the client ends it."""
    return _plan(rng, n, **{rng.choice(STAGES): {"hold_after": rng.randint(0, n)}})


def _sizes(rng: random.Random, n: int) -> Plan:
    bytes_each = rng.choice([1, 8191, 8192, 8193, 1 << 20])
    return _plan(rng, n, **{rng.choice(STAGES[:2]): {"frame_bytes": bytes_each, "burst": rng.randint(1, 20)}})


def _full_slab(rng: random.Random, n: int) -> Plan:
    """More than a link's 64 MiB waits before a stage that takes nothing."""
    source = rng.choice([0, 1])
    pouring = {"frame_bytes": 9 << 20, "burst": 10}
    return _plan(rng, 20, **{STAGES[source]: pouring, STAGES[source + 1]: {"hold_after": rng.choice([0, 1, n])}})


def _hurried(rng: random.Random, n: int) -> Plan:
    plan = _slow(rng, n)
    return _with(
        plan, deadlines=DEADLINES | {rng.choice(["total_s", "first_output_s", "stall_s"]): rng.uniform(0.01, 0.4)}
    )


def _whole(rng: random.Random, n: int) -> Plan:
    return _with(_plan(rng, n), stream=False)


def _direct(rng: random.Random, n: int) -> Plan:
    return Plan(body(n, ("text",)), "toy_tokens", rng.choice(IDS))


def _bad_body(rng: random.Random, n: int) -> Plan:
    return Plan(rng.choice(BAD_BODIES), request_id=rng.choice(IDS))


def _bad_id(rng: random.Random, n: int) -> Plan:
    return replace(_plan(rng, n), request_id=rng.choice(BAD_IDS))


def _dies(rng: random.Random, n: int) -> Plan:
    return _plan(rng, n, **{rng.choice(STAGES): {rng.choice(["die_after", "raise_after"]): rng.randint(0, n)}})


FATES: dict[Fate, float] = {
    _good: 30, _slow: 20, _fails: 8, _refuses: 3, _falls_silent: 5, _sizes: 8, _full_slab: 0.5, _hurried: 6,
    _whole: 6, _direct: 4, _bad_body: 5, _bad_id: 2,
}  # fmt: skip


def random_plan(rng: random.Random, tokens: int = 40, deaths: float = 0.0) -> Plan:
    """One life. `deaths`: share of those that kill a worker."""
    fates = FATES | {_dies: deaths * sum(FATES.values())}
    fate = rng.choices(list(fates), list(fates.values()))[0]
    plan = fate(rng, rng.randint(1, tokens))
    plan.label, plan.timeout_s = fate.__name__.strip("_"), 60.0
    if rng.random() < 0.4:
        _leave(rng, plan, tokens)
    if rng.random() < 0.05:
        plan.reading = partial(time.sleep, 0.01)
    return plan


def _plan(rng: random.Random, n: int, **stages: dict[str, Any]) -> Plan:
    return _with(Plan(body(n, rng.choice(MODALITIES), **stages), request_id=rng.choice(IDS)), deadlines=DEADLINES)


def _with(plan: Plan, **fields: Any) -> Plan:
    """The plan with fields of its request replaced."""
    assert isinstance(plan.body, dict)
    return replace(plan, body=plan.body | fields)


def _leave(rng: random.Random, plan: Plan, tokens: int) -> None:
    """Leave by closing the stream or by an abort; after some pieces, or whatever came, also in silence."""
    if rng.random() < 0.5:
        plan.cancel_after = rng.randint(0, tokens)
    else:
        plan.cancel_after_s = rng.choice([0.0, 0.002, rng.uniform(0, 0.05), rng.uniform(0, 0.6)])
    plan.by_abort = bool(plan.request_id) and plan.model == "toy" and rng.random() < 0.4


# --- what must hold ------------------------------------------------------------------------------------------------
@dataclass
class Tally:
    """What a number of lives came to. `faults`: everything that must not be. `seen`: the lives of one `live`."""

    lives: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seen: list[tuple[Plan, Life]] = field(default_factory=list)

    def add(self, plan: Plan, life: Life) -> None:
        """Count one life."""
        self.lives += 1
        self.ends[life.ends[0].split("]")[0][:60] if life.ends else "none"] += 1
        self.faults += [f"{plan.label}: {fault}: {plan} {life}"[:1500] for fault in faults(plan, life)]


def faults(plan: Plan, life: Life) -> Iterator[str]:
    """What is wrong with one life."""
    if len(life.ends) != 1:
        yield f"{len(life.ends)} ends"
        return
    end = life.ends[0]
    if end == "timeout":
        yield "no end"
    if life.late:
        yield f"{life.late} responses after the end"
    if life.order_errors:
        yield "out of order"
    if plan.label in ("bad_body", "bad_id") and end in (*COMPLETED, "abort"):
        yield "accepted"
    if isinstance(plan.body, bytes) or plan.model != "toy":
        return
    wanted = plan.body["modalities"]
    if life.final is not None and life.final != FINAL[wanted[-1]]:
        yield f"ended as {life.final}"
    tokens = plan.body["sampling"]["max_tokens"]
    samples = tokens * FRAMES_PER_TOKEN * SAMPLES_PER_FRAME
    expected = (tokens if "text" in wanted else 0, samples if "audio" in wanted else 0)
    if end in COMPLETED and (life.words, life.samples) != expected:
        yield f"{(life.words, life.samples)} words and samples instead of {expected}"


def live(url: str, plans: Sequence[Plan], streams: int) -> Tally:
    """Live all plans and judge every one."""
    tally = Tally()
    for plan, life in zip(plans, run_many(url, list(plans), streams), strict=True):
        tally.add(plan, life)
        tally.seen.append((plan, life))
    return tally


def report(tally: Tally) -> str:
    """One line."""
    return f"{tally.lives} lives, {len(tally.faults)} faults, ends: {json.dumps(dict(tally.ends.most_common()))}"
