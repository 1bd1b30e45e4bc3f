# SPDX-License-Identifier: Apache-2.0
"""`triton-omni serve`: tritonserver with our pipelines and the OpenAI proxy, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from triton_omni.backends.config.paths import ENGINE_PYTHON_VARIABLE
from triton_omni.backends.config.schema import ConfigError
from triton_omni.backends.repository import write
from triton_omni.backends.supervisor.errors import Problem, Say
from triton_omni.backends.supervisor.home import REPO, Home, find_home
from triton_omni.backends.supervisor.serve import run_folder as rundir
from triton_omni.backends.supervisor.serve.launch import LOCAL, Launch, Ports, check_ports, free_ports
from triton_omni.backends.supervisor.serve.locate import Server, find_server
from triton_omni.backends.supervisor.serve.run_folder import RunDir
from triton_omni.backends.supervisor.serve.watch import Bounds, Watch

EMBEDDED_DEFAULT = tuple(REPO / "model_repository" / name for name in ("chat", "image"))
KEPT_LOGS = 10
OLD_SERVER = (
    "note: this local Triton (24.10) has known security holes: for development on this machine only; it listens on\n"
    "      {host}. Serve others from NVIDIA's container (docker/)."
)
WELCOME = """
Triton  http://{host}:{ports.http}  grpc {host}:{ports.grpc}  metrics http://{host}:{ports.metrics}/metrics
        (loading, unloading and shared memory need the header '{key}')
try     curl {host}:{ports.http}/v2/models/{model}/generate_stream \\
             -d '{{"text_input": "Hello!", "stream": true, "modalities": "text"}}'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `serve`."""
    add = parser.add_argument
    add("--repository", action="append", type=Path, default=[], help="model repository; may be given several times")
    add("--deploy", action="append", type=Path, default=[], help="deploy file; its pipeline is served as it says")
    add("--host", default=LOCAL, help="address to listen on (in a container: 0.0.0.0)")
    add("--http-port", type=int, default=Ports.http)
    add("--grpc-port", type=int, default=Ports.grpc)
    add("--metrics-port", type=int, default=Ports.metrics)
    add("--openai-port", type=int, default=Ports.openai)
    add("--any-port", action="store_true", help="take free ports instead")
    add("--no-proxy", action="store_true", help="tritonserver only")
    add("--start-timeout-s", type=float, default=900.0, help="how long the models may take to load")
    add("--exit-timeout-s", type=int, default=20, help="how long open requests may take to end at shutdown")
    add("--silent-s", type=float, default=Bounds.silent_s, help="a server or orchestrator so long silent is hung")
    add("--stage-silent-s", type=float, default=Bounds.stage_silent_s, help="the same for a stage's worker")
    add("--info-file", type=Path, help="gets addresses and pids as JSON once all is ready")
    add("flags", nargs="*", help="after --: more flags for tritonserver")


def written(deploy_files: list[Path], run_dir: RunDir) -> list[Path]:
    """Model repositories made of deploy files, in the run's folder. Raises Problem for a file that cannot be used."""
    out = run_dir.path / "model_repository"
    for count, file in enumerate(deploy_files, 1):
        try:
            write(out, file)
            if len(list(out.glob("*"))) < count:
                raise ConfigError(f"{file}: another deploy file has its pipeline already")
        except (ConfigError, LookupError) as error:
            run_dir.remove()
            raise Problem(str(error), f"correct {file}; docs/operations.md explains the keys") from None
    return sorted(out.glob("*"))


def repositories(given: list[Path]) -> list[Path]:
    """Absolute model repositories. Raises Problem for one that is none."""
    found = [path.resolve() for path in given or EMBEDDED_DEFAULT]
    for path in found:
        if not any(path.glob("*/config.pbtxt")):
            way_out = "name one such as model_repository/toy; make repository writes those of all pipelines"
            raise Problem(f"{path} is no model repository: there is no <model>/config.pbtxt", way_out)
    return found


def ports_of(options: argparse.Namespace) -> Ports:
    """The ports to use. Raises Problem for one in use."""
    if options.any_port:
        return free_ports()
    ports = Ports(options.http_port, options.grpc_port, options.metrics_port, options.openai_port)
    check_ports(ports, options.host, proxy=not options.no_proxy)
    return ports


def new_log(home: Home, name: str) -> Path:
    """A new log file in the home; the oldest of its kind go."""
    home.logs.mkdir(parents=True, exist_ok=True)
    for old in sorted(home.logs.glob(f"{name}-*.log"))[: -KEPT_LOGS + 1]:
        old.unlink(missing_ok=True)
    return home.logs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def public_models(repositories: Sequence[Path]) -> list[str]:
    """Models that are configured with a pipeline and no stage: the ones clients call."""
    configs = {path.parent.name: path.read_text() for r in repositories for path in sorted(r.glob("*/config.pbtxt"))}
    return [name for name, text in configs.items() if 'key: "pipeline"' in text and 'key: "stage"' not in text]


def proxy_command(launch: Launch) -> list[str]:
    """The OpenAI proxy beside the server. It is told the pipelines: the index of models needs the key."""
    own = launch.api().host
    options = ["--triton", f"{own}:{launch.ports.grpc}", "--metrics", f"{own}:{launch.ports.metrics}"]
    options += ["--host", launch.host, "--port", str(launch.ports.openai)]
    for name in public_models(launch.repositories):
        options += ["--model", name]
    return [launch.server.environment[ENGINE_PYTHON_VARIABLE], "-m", "triton_omni.openai", *options]


def welcome(launch: Launch, proxied: bool) -> str:
    """Where everything listens, and a first thing to try."""
    host, ports, models = launch.api().host, launch.ports, public_models(launch.repositories)
    text = WELCOME.format(host=host, ports=ports, key=launch.key_header, model=next(iter(models), "<model>"))
    return text + (f"\nOpenAI  http://{host}:{ports.openai}/v1" if proxied else "") + "\nCtrl-C ends it."


def serve(options: argparse.Namespace, say: Say) -> int:
    """Run until Ctrl-C; returns the exit code. Raises Problem if it cannot start."""
    from triton_omni.backends.supervisor.serve.supervise import Plan, Supervisor

    home = find_home()
    server: Server = find_server(home)
    paths = repositories(options.repository) if options.repository or not options.deploy else []
    ports = ports_of(options)
    rundir.sweep(say)
    run_dir = rundir.make()
    paths += written(options.deploy, run_dir)
    launch = Launch(
        server, paths, ports, run_dir,
        host=options.host, key=secrets.token_hex(16), exit_timeout_s=options.exit_timeout_s, flags=options.flags,
    )  # fmt: skip
    plan = Plan(
        launch,
        Watch(Bounds(silent_s=options.silent_s, stage_silent_s=options.stage_silent_s)),
        server_log=new_log(home, "server"),
        proxy_log=new_log(home, "proxy"),
        proxy=() if options.no_proxy else proxy_command(launch),
        start_timeout_s=options.start_timeout_s,
        info_file=options.info_file,
        welcome="" if options.info_file else welcome(launch, not options.no_proxy),
    )
    if not server.in_container:
        say(OLD_SERVER.format(host=launch.api().host))
    say(f"starting tritonserver with {', '.join(path.name for path in paths)}")
    say(f"log: {plan.server_log} (its first line starts the same server by hand)")
    code = Supervisor(plan, say).run()
    say("ended; nothing is left behind" if code == 0 else f"gave up; read {plan.server_log}")
    return code
