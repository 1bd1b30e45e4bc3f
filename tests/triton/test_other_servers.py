# SPDX-License-Identifier: Apache-2.0
"""Servers of their own: a hung worker, an end with requests in flight, two servers side by side, bad deploys."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from tests.kit.load_generator import Life, Plan, body, run_many, run_one
from tests.kit.server_calls import generate, health, idle, wait_until_idle
from tests.kit.triton_server import TOY_REPOSITORY, running_server, toy_repository, wait_for
from triton_omni.backends.config.paths import LOOPBACK_VARIABLE, operator_key
from triton_omni.backends.control import probe
from triton_omni.backends.repository import write
from triton_omni.backends.supervisor.serve.run_folder import HEALTH_FILE

pytestmark = pytest.mark.triton


def test_hung_worker_is_killed_and_comes_back(tmp_path: Path) -> None:
    deploy = "pipeline: toy\nstages:\n  tokens: {}\n  frames: {}\n  wave: {hang_s: 2}\n"
    with running_server([toy_repository(tmp_path, deploy)]) as server:
        plan = Plan(body(10, ("audio",), wave={"hang_after": 3}), timeout_s=30)
        assert run_one(server.grpc, plan).ends == ["error [stage_failed:wave] the stage's worker died"]
        wait_for(lambda: health(server)["ready"], 30, "back by itself")
        assert run_one(server.grpc, Plan(body(5, ("audio",)))).ends == ["stop"]


def test_a_worker_sees_the_gpus_of_its_deploy_file_and_no_other(tmp_path: Path) -> None:
    """The toy needs none, so a server without GPUs shows it as well."""
    deploy = "pipeline: toy\nstages: {tokens: , frames: {device: cpu}, wave: {device: cuda, gpus: [0, 1], "
    with running_server([toy_repository(tmp_path, deploy + "gpus_per_instance: 2}}\n")]) as server:

        def seen(stage: str) -> str:
            pid = server.instance(f"toy_{stage}").worker_pid
            variables = dict(v.partition("=")[::2] for v in Path(f"/proc/{pid}/environ").read_text().split("\0"))
            return variables["CUDA_VISIBLE_DEVICES"]

        assert (seen("wave"), seen("frames")) == ("0,1", "")
        assert run_one(server.grpc, Plan(body(5))).ends == ["length"]


def test_sigterm_lets_requests_in_flight_finish(tmp_path: Path) -> None:
    lives: list[Life] = []
    with running_server([TOY_REPOSITORY]) as server:
        plans = [Plan(body(20, tokens={"delay_s": 0.05}), timeout_s=30) for _ in range(8)]
        clients = threading.Thread(target=lambda: lives.extend(run_many(server.grpc, plans, 8)))
        clients.start()
        stages = [server.instance(f"toy_{name}").address for name in ("tokens", "frames", "wave")]
        wait_for(lambda: all(probe(stage, 5).live == 8 for stage in stages), 20, "all stages of all requests open")
        os.kill(server.pid, signal.SIGTERM)
        clients.join(60)
    assert [life.ends for life in lives] == [["length"]] * 8


def test_two_servers_do_not_touch_each_other(tmp_path: Path) -> None:
    with running_server([TOY_REPOSITORY]) as one:
        with running_server([TOY_REPOSITORY]) as two:
            assert one.run_dir != two.run_dir
            run_many(one.grpc, [Plan(body(5))] * 8, 4)
            run_many(two.grpc, [Plan(body(5))] * 8, 4)
        assert two.regions() == []
        assert run_one(one.grpc, Plan(body(5))).ends == ["length"]
        assert idle(one)


def test_several_instances_of_a_stage_share_the_work(tmp_path: Path) -> None:
    deploy = "pipeline: toy\nstages:\n  tokens: {instances: 2}\n  frames: {}\n  wave: {instances: 2}\n"
    with running_server([toy_repository(tmp_path, deploy)]) as server:
        plans = [Plan(body(50, tokens={"delay_s": 0.01}), timeout_s=60) for _ in range(24)]
        lives = run_many(server.grpc, plans, 24)
        assert [life.ends for life in lives] == [["length"]] * 24
        assert sum(life.order_errors for life in lives) == 0
        assert health(server)["stages"]["wave"]["instances"] == 2
        assert health(server)["state"] == "ready"
        os.kill(server.instance("toy_wave", "0_0.1").worker_pid, signal.SIGSTOP)
        wait_for(lambda: health(server)["stages"]["wave"]["ready"] == 1, 5, "one of two is missing")
        assert (health(server)["state"], health(server)["ready"]) == ("degraded", True)
        assert [life.ends for life in run_many(server.grpc, [Plan(body(3))] * 8, 2)] == [["length"]] * 8
        wait_until_idle(server)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("max_live", "0", "max_live"),
        ("stall_s", "-1", "stall_s"),
        ("stall_s", "nan", "stall_s"),
        ("max_lives", "3", "did you mean 'max_live'"),
    ],
)
def test_a_bad_parameter_is_a_load_error_in_words(tmp_path: Path, key: str, value: str, said: str) -> None:
    repository = tmp_path / "toy"
    shutil.copytree(TOY_REPOSITORY, repository)
    config = repository / "toy" / "config.pbtxt"
    kept = [line for line in config.read_text().splitlines() if f'key: "{key}"' not in line]
    kept.append(f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}')
    config.write_text("\n".join(kept))
    with pytest.raises(AssertionError, match=said), running_server([repository]):
        pass


def test_load_error_of_an_engine_is_the_models(tmp_path: Path) -> None:
    deploy = "pipeline: toy\nstages:\n  tokens: {}\n  frames: {}\n  wave: {engine: {no_such_option: 1}}\n"
    with pytest.raises(AssertionError, match="no_such_option"), running_server([toy_repository(tmp_path, deploy)]):
        pass


def test_a_pipeline_that_cannot_be_loaded_leaves_the_others_up(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text("pipeline: image\nstages:\n  denoiser: {engine: {model: no_such_folder}}\n")
    write(tmp_path, file)
    with running_server([TOY_REPOSITORY, tmp_path / "image"], supervised=True) as server:
        status, answer = generate(server, text_input="x", max_tokens=2)
        assert (status, answer["text_output"]) == (200, "w0 w1 ")
        assert server.health() == "degraded"
        found = json.loads((server.run_dir / HEALTH_FILE).read_text())
        assert "pipeline image is not loaded" in found["problems"][0] and "no_such_folder" in found["problems"][0]
        assert generate(server, "image", text_input="a red 7", operation="image")[0] == 400  # 24.10 has no 503


def test_stages_of_a_server_that_others_reach_answer_direct_calls_with_the_operators_key(tmp_path: Path) -> None:
    """Anybody who reached Triton's port could feed stages past admission and its limits."""
    deploy = "pipeline: toy\nstages:\n  tokens: {}\n  frames: {direct_calls: true}\n  wave: {}\n"
    not_loopback = {LOOPBACK_VARIABLE: ""}
    with running_server([toy_repository(tmp_path, deploy)], variables=not_loopback) as server:
        status, answer = generate(server, "toy_tokens", text_input="x", max_tokens=2)
        assert status == 400 and answer["error"].startswith("[bad_request:operator_key] stage models answer"), answer
        key = operator_key(server.run_dir)
        for parameters, expected in (({"operator_key": key}, 200), ({"operator_key": key[:-1]}, 400)):
            assert generate(server, "toy_tokens", text_input="x", max_tokens=2, **parameters)[0] == expected
        assert generate(server, "toy_frames", text_input="one two", operation="speech")[0] == 200
        assert run_one(server.grpc, Plan(body(5))).ends == ["length"], "the orchestrator's calls need no key"


def test_generate_without_the_speech_stages(tmp_path: Path) -> None:
    """One dead stage fails only requests routed through it."""
    with running_server([TOY_REPOSITORY]) as server:
        os.kill(health(server)["stages"]["wave"]["worker_pids"][0], signal.SIGKILL)
        status, answer = generate(server, text_input="x", max_tokens=2)
        assert (status, answer["text_output"]) == (200, "w0 w1 ")
