# SPDX-License-Identifier: Apache-2.0
"""`triton-omni serve`: tritonserver with our pipelines and the OpenAI proxy, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from triton_omni.backends.config import paths
from triton_omni.backends.repository import deploy_files
from triton_omni.backends.supervisor.deployment import write_deployed
from triton_omni.backends.supervisor.errors import Report, SetupError
from triton_omni.backends.supervisor.home import Home, find_home
from triton_omni.backends.supervisor.interpreter import check_same_code
from triton_omni.backends.supervisor.serve import run_folder
from triton_omni.backends.supervisor.serve.launch import Launch, Ports, check_ports, free_ports
from triton_omni.backends.supervisor.serve.locate import find_server
from triton_omni.backends.supervisor.serve.supervise import Plan, Supervisor
from triton_omni.backends.supervisor.serve.watch import Bounds, Watch

EMBEDDED_DEFAULT = ("chat", "image")
KEPT_LOGS = 10
_KEY = re.compile(r"[A-Za-z0-9]{16,128}")
DEVELOPMENT_SERVER = (
    "note: the Triton that set-up installs (24.10) has known security holes; use it for development on this machine.\n"
    "      It listens on {host}. Serve others from NVIDIA's container (docker/)."
)
WELCOME = """
Triton  http://{host}:{ports.http}  grpc {host}:{ports.grpc}  metrics http://{host}:{ports.metrics}/metrics
        (model control, shared memory, logging and tracing need the header '{key}')
try     curl {host}:{ports.http}/v2/models/{model}/generate_stream \\
             -d '{{"text_input": "Hello!", "stream": true, "modalities": "text"}}'"""


def serve(options: argparse.Namespace, report: Report) -> int:
    """Run until Ctrl-C; returns the exit code. Raises SetupError if the server cannot start."""
    home = find_home()
    server = find_server(home)
    check_same_code(server.stub_python, "environment of Triton's stubs")
    repositories = checked_repositories(options.repository)
    ports = ports_of(options)
    run_folder.sweep(report)
    run_dir = run_folder.make()
    try:
        key = make_key(options.key_file, run_dir.path)
        repositories += write_deployed(run_dir.path / "model_repository", deploys_of(options), paths.engine_build())
    except SetupError:
        run_dir.remove()
        raise
    launch = Launch(
        server, repositories, ports, run_dir,
        host=options.host, key=key, exit_timeout_s=options.exit_timeout_s, flags=options.flags,
    )  # fmt: skip
    plan = Plan(
        launch,
        Watch(Bounds(silent_s=options.silent_s, stage_silent_s=options.stage_silent_s)),
        server_log=new_log(home, "server"),
        proxy_log=new_log(home, "proxy"),
        proxy=() if options.no_proxy else proxy_command(launch, insecure=options.insecure),
        start_timeout_s=options.start_timeout_s,
        info_file=options.info_file,
        welcome="" if options.info_file else welcome(launch, not options.no_proxy),
    )
    if home.root in server.binary.parents:
        report(DEVELOPMENT_SERVER.format(host=launch.api().host))
    report(f"starting tritonserver with {', '.join(path.name for path in repositories)}")
    report(f"log: {plan.server_log} (its first line starts the same server by hand)")
    code = Supervisor(plan, report).run()
    report("stopped; nothing is left behind" if code == 0 else f"gave up; read {plan.server_log}")
    return code


def make_key(file: Path | None, run_dir: Path) -> str:
    """The operator's key: that of the file, which is made if missing. Raises SetupError for an unusable file."""
    if file is None:
        return paths.operator_key(run_dir)
    try:
        if file.exists():
            (run_dir / "key").write_text(file.read_text().strip())
        key = paths.operator_key(run_dir)
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text(f"{key}\n")
    except OSError as error:
        raise SetupError(f"--key-file: {error}", hint="name a file that this user may write") from None
    if not _KEY.fullmatch(key):
        raise SetupError(
            f"--key-file: {file} must hold 16 to 128 letters and digits", hint="remove it to have one made"
        )
    return key


def deploys_of(options: argparse.Namespace) -> list[Path]:
    """The deploy files to serve: those given; the embedded default if nothing is given."""
    if options.deploy or options.repository:
        return options.deploy
    return [file for name in EMBEDDED_DEFAULT for file in deploy_files(name)]


def checked_repositories(given: Sequence[Path]) -> list[Path]:
    """Absolute paths of model repositories. Raises SetupError for a folder that is none."""
    repositories = [path.resolve() for path in given]
    for path in repositories:
        if not any(path.glob("*/config.pbtxt")):
            hint = "name one such as model_repository/toy; `triton-omni repository` writes those of all pipelines"
            raise SetupError(f"{path} is not a model repository: it has no <model>/config.pbtxt", hint=hint)
    return repositories


def ports_of(options: argparse.Namespace) -> Ports:
    """The ports to use. Raises SetupError for one in use."""
    if options.any_port:
        return free_ports()
    ports = Ports(options.http_port, options.grpc_port, options.metrics_port, options.openai_port)
    check_ports(ports, options.host, proxy=not options.no_proxy)
    return ports


def new_log(home: Home, name: str) -> Path:
    """A new log file in the home; the oldest of its kind are removed."""
    home.logs.mkdir(parents=True, exist_ok=True)
    for old in sorted(home.logs.glob(f"{name}-*.log"))[: -KEPT_LOGS + 1]:
        old.unlink(missing_ok=True)
    return home.logs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def public_models(repositories: Sequence[Path]) -> list[str]:
    """Models that are configured with a pipeline and no stage: the ones clients call."""
    configs = {path.parent.name: path.read_text() for r in repositories for path in sorted(r.glob("*/config.pbtxt"))}
    return [name for name, text in configs.items() if 'key: "pipeline"' in text and 'key: "stage"' not in text]


def proxy_command(launch: Launch, *, insecure: bool = False) -> list[str]:
    """The command of the OpenAI proxy. It gets the pipelines as options: the index of models needs the key."""
    own = launch.api().host
    options = ["--triton", f"{own}:{launch.ports.grpc}", "--metrics", f"{own}:{launch.ports.metrics}"]
    options += ["--host", launch.host, "--port", str(launch.ports.openai)]
    options += ["--insecure"] if insecure else []
    for name in public_models(launch.repositories):
        options += ["--model", name]
    return [launch.server.environment[paths.ENGINE_PYTHON_VARIABLE], "-m", "triton_omni.openai", *options]


def welcome(launch: Launch, proxied: bool) -> str:
    """Where everything listens, and a first thing to try."""
    host, ports, models = launch.api().host, launch.ports, public_models(launch.repositories)
    text = WELCOME.format(host=host, ports=ports, key=launch.key_header, model=next(iter(models), "<model>"))
    return text + (f"\nOpenAI  http://{host}:{ports.openai}/v1" if proxied else "") + "\nCtrl-C stops it."
