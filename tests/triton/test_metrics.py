# SPDX-License-Identifier: Apache-2.0
"""The metrics page adds up over requests as their clients saw them; docs/metrics-and-traces.md lists what is on it."""

from __future__ import annotations

import random
import re
import threading
import urllib.request
from collections import Counter

import pytest

from tests.kit.fuzzed_requests import random_plan
from tests.kit.load_generator import Life, Plan, abort, body, run_many
from tests.kit.metrics_reconcile import disagreements, outcome_of
from tests.kit.server_calls import HTTP_TIMEOUT_S, metrics, wait_until_idle
from tests.kit.triton_server import RunningServer, wait_for
from triton_omni.backends.supervisor.home import REPO

pytestmark = pytest.mark.triton
STREAMS = 16


def lived(server: RunningServer, plans: list[Plan]) -> tuple[dict[str, float], list[tuple[Plan, Life]]]:
    """The page before, and all lives after which the server is idle again."""
    wait_until_idle(server, timeout_s=30)
    before = metrics(server)
    lives = list(zip(plans, run_many(server.grpc, plans, STREAMS), strict=True))
    wait_until_idle(server, timeout_s=30)
    return before, lives


def test_clients_that_stay_agree_with_every_number(toy: RunningServer) -> None:
    rng = random.Random(7)
    plans = [Plan(body(rng.randint(1, 20), rng.choice([("text",), ("audio",), ("text", "audio")]))) for _ in range(60)]
    for plan in plans[::5]:
        plan.body["stream"] = False  # pyright: ignore[reportIndexIssue]
    before, lives = lived(toy, plans)
    assert Counter(life.outcome for _, life in lives) == {"completed": 60}
    assert disagreements(before, metrics(toy), lives) == []


def test_a_mix_of_good_aborted_refused_and_failed_requests_adds_up(toy: RunningServer) -> None:
    rng = random.Random(8)
    before, lives = lived(toy, [random_plan(rng) for _ in range(250)])
    kinds = Counter(str(outcome_of(life)) for _, life in lives)
    print(dict(kinds))
    assert {"completed", "cancelled", "bad_request", "stage_failed", "deadline_exceeded", "None"} <= set(kinds)
    assert disagreements(before, metrics(toy), lives) == []


def test_gauges_are_right_while_requests_hang(toy: RunningServer) -> None:
    """They were published at the end of requests only, and read 0 while a stalled stage held all of them."""
    held = [Plan(body(5, tokens={"hold_after": 1}), request_id="held") for _ in range(3)]
    lives: list[Life] = []
    clients = threading.Thread(target=lambda: lives.extend(run_many(toy.grpc, held, 3)))
    clients.start()
    gauges = (
        'omni_requests_running{pipeline="toy"}',
        'omni_stage_runs_live{pipeline="toy",stage="tokens",worker="0_0"}',
    )
    wait_for(lambda: all(metrics(toy).get(gauge) == 3 for gauge in gauges), 20, f"{gauges} are 3: {metrics(toy)}")
    abort(toy.grpc, "toy", "held")
    clients.join(30)
    assert [life.ends for life in lives] == [["abort"]] * 3
    wait_until_idle(toy, timeout_s=30)


def test_a_number_that_is_wrong_is_found(toy: RunningServer) -> None:
    """The check itself can fail: every kind of wrong number is seen."""
    before, lives = lived(toy, [Plan(body(3)) for _ in range(4)])
    after = metrics(toy)
    assert disagreements(before, after, lives) == []
    changed = [name for name in after if "_bucket" not in name and after[name] != before.get(name, 0.0)]
    blind = [name for name in changed if disagreements(before, after | {name: after[name] + 1}, lives) == []]
    exempt = re.compile(
        r"omni_(stage_(run|first_output|step|turn)_seconds|stage_step(s|_runs)_total|output_gap_seconds_sum|audio_(rtf|underrun_seconds)_sum"
        r"|edge_(wait|transfer|chunks|bytes))"
    )  # what no client can know exactly
    assert [name for name in blind if not exempt.match(name)] == []
    assert disagreements(before, after, lives[1:]) != []


def test_the_table_in_the_docs_is_the_page(toy: RunningServer, toy_proxy_url: str) -> None:
    lived(toy, [Plan(body(3)), Plan(body(3, ("text",)))])  # every histogram appears
    urllib.request.urlopen(f"{toy_proxy_url}/v1/models", timeout=HTTP_TIMEOUT_S).close()  # its histogram appears
    with urllib.request.urlopen(f"{toy_proxy_url}/metrics", timeout=HTTP_TIMEOUT_S) as answer:
        page = answer.read().decode()
    shown: dict[str, tuple[str, frozenset[str]]] = {}
    for name, labels in re.findall(r"^(omni_\w+)(?:\{([^}]*)\})? ", page, re.MULTILINE):
        kind = re.search(rf"^# TYPE {name} (\w+)$", page, re.MULTILINE)
        found = set(re.findall(r'(\w+)="', labels)) - {"pipeline"}
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        if family != name:
            shown[family] = ("histogram", frozenset(found - {"le"}) | shown.get(family, ("", frozenset()))[1])
        else:
            assert kind is not None, name
            shown[name] = (kind[1], frozenset(found))
    text = (REPO / "docs" / "metrics-and-traces.md").read_text()
    rows = re.findall(r"^\| `(omni_\w+)` \| (\w+) \|([\w, ]*)\| .+ \|$", text, re.MULTILINE)
    documented = {name: (kind, frozenset(labels.replace(" ", "").split(",")) - {""}) for name, kind, labels in rows}
    assert documented == shown
