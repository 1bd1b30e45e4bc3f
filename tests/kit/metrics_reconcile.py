# SPDX-License-Identifier: Apache-2.0
"""The metrics page against what the clients of the toy pipeline saw of the same requests.

A client that stayed knows how its request ended; of one that left, the server may have counted anything, or nothing
if it left before the request arrived. So every number has a lower and an upper bound, which are equal where all
clients stayed. Numbers of the page that must agree with each other are compared exactly, always.

    before = metrics(server)                    # idle: `calls.idle` brings the page up to date
    lives = run_many(server.grpc, plans, 24)
    ...                                         # until idle again
    assert disagreements(before, metrics(server), list(zip(plans, lives))) == []
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.kit.load_generator import Life, Plan
from triton_omni.backends.pipelines.toy.engines import SAMPLE_RATE_HZ
from triton_omni.backends.pipelines.toy.pipeline import PIPELINE

CODE = re.compile(r"^error .*?\[([a-z_]+)[\]:]")
MEASURED = ("finished", "failed", "stopped")
ROUNDING_S = 1e-6  # of the timings in an end
Seen = Sequence[tuple[Plan, Life]]
Bounds = tuple[float, float]


class Page:
    """What the page grew by: samples by name and labels."""

    def __init__(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        self.after = after
        self.grown = {_key(name): value - before.get(name, 0.0) for name, value in after.items()}

    def at(self, name: str, **labels: str) -> float:
        """The growth of one sample; 0 if it is not there."""
        return self.grown.get((name, frozenset(labels.items())), 0.0)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Growth by one label, summed over the others."""
        found: dict[str, float] = defaultdict(float)
        for (own, labels), value in self.grown.items():
            if own == name:
                found[dict(labels)[label]] += value
        return dict(found)

    def total(self, name: str) -> float:
        """Growth summed over all labels."""
        return sum(value for (own, _), value in self.grown.items() if own == name)


def _key(sample: str) -> tuple[str, frozenset[tuple[str, str]]]:
    name, _, labels = sample.partition("{")
    pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    pairs.pop("pipeline", None)
    return name, frozenset(pairs.items())


def outcome_of(life: Life) -> str | None:
    """How the server ended the request, as far as its client knows."""
    if life.outcome:
        return life.outcome
    code = CODE.match(life.ends[0]) if life.ends else None
    return code[1] if code else None


def disagreements(before: Mapping[str, float], after: Mapping[str, float], lives: Seen) -> list[str]:
    """Every number that cannot be true; empty if all add up. The server must be idle and have died nowhere."""
    page = Page(before, after)
    seen = [(plan, life) for plan, life in lives if plan.model == PIPELINE.name]
    found = [*_page_itself(page), *_requests(page, seen), *_outputs(page, seen), *_runs(page, seen)]
    return [text for text in found if text]


# --- what the page must say whatever happened ----------------------------------------------------------------------
def _page_itself(page: Page) -> Iterator[str]:
    gauges = ("omni_requests_running", "omni_requests_waiting", "omni_stage_runs_live")
    for sample, value in page.after.items():
        if sample.startswith(gauges) and value:
            yield f"{sample} is {value} at rest"
    for (name, labels), value in page.grown.items():
        if value < -1e-9 and not name.startswith((*gauges, "omni_stage_workers")):  # a worker may be restarting
            yield f"{name} {dict(labels)} fell by {-value}"
    for outcome, count in page.by("omni_requests_total", "outcome").items():
        yield _equal(f"requests {outcome} timed", page.at("omni_request_seconds_count", outcome=outcome), count)
    reasons = page.total("omni_requests_cancelled_total")
    yield _equal("reasons of cancelled requests", reasons, page.at("omni_requests_total", outcome="cancelled"))
    for output in PIPELINE.outputs:
        pieces = page.at("omni_output_pieces_total", output=output.name)
        firsts = page.at("omni_first_output_seconds_count", output=output.name)
        yield _equal(
            f"gaps of {output.name}", page.at("omni_output_gap_seconds_count", output=output.name), pieces - firsts
        )
        received = page.at("omni_edge_chunks_total", source=output.stage, target="client")
        yield _equal(f"pieces of {output.name} over the edge to the client", received, pieces)
    listeners = page.at("omni_audio_rtf_count")
    yield _equal("listeners", page.at("omni_audio_underrun_seconds_count"), listeners)
    for stage in PIPELINE.stages:
        opened = page.at("omni_stage_runs_opened_total", stage=stage.name)
        ends = {
            o: page.at("omni_stage_runs_total", stage=stage.name, outcome=o) for o in (*MEASURED, "lost", "refused")
        }
        yield _equal(f"ended runs of {stage.name} {ends}", sum(ends.values()), opened)
        timed = page.at("omni_stage_run_seconds_count", stage=stage.name)
        yield _equal(f"timed runs of {stage.name}", timed, sum(ends[o] for o in MEASURED))
        first = page.at("omni_stage_first_output_seconds_count", stage=stage.name)
        yield _within(f"runs of {stage.name} with output", first, (0, timed))


# --- what the clients know -----------------------------------------------------------------------------------------
def _requests(page: Page, seen: Seen) -> Iterator[str]:
    known = Counter(outcome for _, life in seen if (outcome := outcome_of(life)))
    unknown = len(seen) - known.total()
    counted = page.by("omni_requests_total", "outcome")
    yield _within("requests", sum(counted.values()), (known.total(), len(seen)))
    for outcome in known.keys() | counted.keys():
        bounds = (known[outcome], known[outcome] + unknown)
        yield _within(f"requests {outcome}", counted.get(outcome, 0), bounds)
    aborts = sum(life.ends == ["abort"] for _, life in seen)
    yield _within("aborts", page.at("omni_requests_cancelled_total", reason="abort"), (aborts, aborts + unknown))
    admitted = page.at("omni_queue_seconds_count")
    yield _within("admitted requests", admitted, (known["completed"], len(seen) - known["too_busy"]))
    stayed = unknown == 0
    completed = [(plan, life) for plan, life in seen if life.outcome == "completed"]  # others may have left the queue
    waits_s = page.at("omni_queue_seconds_sum")
    yield _seconds("waits for admission", waits_s, _timings(completed, "queue_s"), len(completed) == len(seen))
    for outcome in ("completed", "cancelled"):
        own = [(plan, life) for plan, life in seen if life.outcome == outcome]
        total = page.at("omni_request_seconds_sum", outcome=outcome)
        yield _seconds(f"times of requests {outcome}", total, _timings(own, "total_s"), stayed)


def _outputs(page: Page, seen: Seen) -> Iterator[str]:
    complete = [life for _, life in seen if life.outcome]  # their ends say everything
    streamed = [life for plan, life in seen if not life.outcome]
    exact = not any(_hidden(plan, life) for plan, life in seen)
    pieces = sum(life.pieces for life in complete) + sum(life.counts.total() for life in streamed)
    yield _at_least("pieces", page.total("omni_output_pieces_total"), pieces, exact)
    for output in ("text", "audio"):
        key = f"first_{output}_s"
        firsts = sum(key in life.timings for life in complete) + sum(life.counts[output] > 0 for life in streamed)
        yield _at_least(f"first {output}", page.at("omni_first_output_seconds_count", output=output), firsts, exact)
        total_s = page.at("omni_first_output_seconds_sum", output=output)
        yield _seconds(f"times to first {output}", total_s, _timings(seen, key), len(complete) == len(seen))
    usage: Counter[str] = Counter()
    for life in complete:
        usage.update(life.usage)
    for kind, count in usage.items():
        yield _at_least(f"usage {kind}", page.at("omni_usage_total", kind=kind), count, len(complete) == len(seen))
    samples = sum(life.samples for _, life in seen)
    yield _at_least("seconds of audio", page.at("omni_audio_seconds_total"), samples / SAMPLE_RATE_HZ, exact)
    yield _at_least(
        "bytes of audio", page.at("omni_edge_bytes_total", source="wave", target="client"), 4 * samples, exact
    )
    listeners = sum(life.outcome == "completed" and life.samples > 0 for life in complete)
    unknown = sum(outcome_of(life) is None for _, life in seen)
    yield _within("listeners", page.at("omni_audio_rtf_count"), (listeners, listeners + unknown))


def _runs(page: Page, seen: Seen) -> Iterator[str]:
    """Stages opened, and what their edges carried, of requests that completed."""
    least: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for plan, life in seen:
        stages = _stages(plan)
        most.update(stages)
        if life.outcome == "completed":
            least.update(stages)
    for stage in PIPELINE.stages:
        opened = page.at("omni_stage_runs_opened_total", stage=stage.name)
        yield _within(f"opened runs of {stage.name}", opened, (least[stage.name], most[stage.name]))
        finished = page.at("omni_stage_runs_total", stage=stage.name, outcome="finished")
        yield _within(f"finished runs of {stage.name}", finished, (least[stage.name], most[stage.name]))
    for edge in PIPELINE.edges:
        ends = {"source": edge.source, "target": edge.target}
        yield _within(f"chunks of {ends}", page.at("omni_edge_chunks_total", **ends), (least[edge.target], math.inf))
        if least[edge.target]:
            took_s = page.at("omni_edge_transfer_seconds_total", **ends)
            lived_s = sum(life.seconds for _, life in seen) * page.at("omni_edge_chunks_total", **ends)
            yield _within(f"seconds on {ends}", took_s, (1e-9, lived_s))


def _stages(plan: Plan) -> Iterable[str]:
    if isinstance(plan.body, bytes):
        return ()
    return ("tokens", "frames", "wave") if "audio" in plan.body.get("modalities", ()) else ("tokens",)


def _hidden(plan: Plan, life: Life) -> bool:
    """True if the server may have made output that this client did not see."""
    whole = isinstance(plan.body, dict) and plan.body.get("stream") is False
    return outcome_of(life) is None or (whole and not life.outcome)


def _timings(seen: Seen, key: str) -> list[float]:
    return [life.timings[key] for _, life in seen if key in life.timings]


# --- comparisons: nothing, or what is wrong ------------------------------------------------------------------------
def _equal(what: str, counted: float, expected: float) -> str:
    return "" if counted == expected else f"{what}: {counted:g}, not {expected:g}"


def _within(what: str, counted: float, bounds: Bounds) -> str:
    return "" if bounds[0] <= counted <= bounds[1] else f"{what}: {counted:g}, not {bounds[0]:g} to {bounds[1]:g}"


def _at_least(what: str, counted: float, expected: float, exact: bool) -> str:
    slack = 1e-9 * max(1.0, expected)  # sums of seconds in another order
    return _within(what, counted, (expected - slack, expected + slack if exact else math.inf))


def _seconds(what: str, counted: float, expected: Sequence[float], exact: bool) -> str:
    slack = ROUNDING_S * (1 + len(expected))
    return _within(what, counted, (sum(expected) - slack, sum(expected) + slack if exact else math.inf))
