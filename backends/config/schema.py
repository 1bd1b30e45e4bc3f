# SPDX-License-Identifier: Apache-2.0
"""Values of a deploy.yaml, and the same values as config.pbtxt parameters.

pipeline.py describes the model, deploy.yaml what this machine does with it (layers.py merges deploy files). All
defaults are here. Times in seconds; 0 disables a deadline.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from triton_omni.backends.core.hints import nearest_key

LINKS, CLUSTER = "links", "cluster"
"""Parameters of every model of a pipeline that has such a section: they are not of one stage."""
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


def _check_finite(name: str, seconds: float) -> None:
    if not math.isfinite(seconds):
        raise ValueError(f"{name} must be a finite number of seconds (0 disables it)")


class ConfigError(ValueError):
    """A deploy file or a model's parameters cannot be used; the text names the place and the key."""


class OrchestratorDeploy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Admission, deadlines and limits of a pipeline.

    max_live           running requests; more wait
    max_queue          requests that may wait; more are refused with too_busy
    queue_s            how long a request may wait
    first_output_s     from admission to the first piece of output
    stall_s            longest silence of an edge, or of a request after its first output
    total_s            from arrival to end
    optional_s         silence of optional outputs when all others have ended; then they are given up
    max_request_bytes  size of the request's JSON
    max_media_bytes    size of all media tensors of a request together
    workers            stages with several workers → how many, written by `make repository`
    engine             engine options of the stages that check requests before admission, written by `make repository`
    max_output_bytes   output of a stream that its client has not read; the request pauses there
    max_answer_bytes   one joined answer (`stream` false)
    """

    max_live: Count = 64
    max_queue: Annotated[int, msgspec.Meta(ge=0)] = 256
    queue_s: Seconds = 60.0
    first_output_s: Seconds = 120.0
    stall_s: Seconds = 120.0
    total_s: Seconds = 1800.0
    optional_s: Seconds = 10.0
    max_request_bytes: Count = 1 << 20
    max_media_bytes: Count = 256 << 20
    max_output_bytes: Count = 8 << 20
    max_answer_bytes: Count = 256 << 20
    engine: dict[str, dict[str, Any]] = {}
    workers: dict[str, Count] = {}

    def __post_init__(self) -> None:
        for name in ("queue_s", "first_output_s", "stall_s", "total_s", "optional_s"):
            _check_finite(name, getattr(self, name))


class TlsDeploy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files of mutual TLS: this server's certificate and its key, and the certificate of who signed all of them."""

    cert: str
    key: str
    ca: str


class LinksDeploy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How processes of this server and workers on other hosts reach each other.

    key_file  file with the secret that all of them share: at least 32 random bytes, readable by its owner only
    host      this host's address for the others; "auto": the one on the way to the default route
    ports     ports to listen on, "first-last" or one; "any": any that is free. Each process needs one
    tls       encrypt links with mutual TLS
    """

    key_file: str
    host: str = "auto"
    ports: str | int = "any"
    tls: TlsDeploy | None = None

    def __post_init__(self) -> None:
        if not self.key_file or not self.host:
            raise ValueError(f"{'host' if self.key_file else 'key_file'} must not be empty")
        self.port_range()

    def port_range(self) -> tuple[int, int]:
        """First and last port; 0, 0 for any."""
        if self.ports == "any":
            return 0, 0
        first, dash, last = str(self.ports).partition("-")
        numbers = [int(n) if n.isascii() and n.isdigit() else 0 for n in (first, last if dash else first)]
        if not 0 < numbers[0] <= numbers[1] < 1 << 16:
            raise ValueError(f"ports must be 'any', a port or 'first-last' between 1 and 65535 (got '{self.ports}')")
        return numbers[0], numbers[1]


class PlaceDeploy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a stage's workers run.

    by                     external: started by other means, `doctor` shows the command; ray: on a node of the `cluster`
    cpus, gpus, resources  what each worker needs of its node; for ray
    wait_s                 a worker that has not joined by then is asked for again; for ray
    """

    by: Literal["external", "ray"]
    cpus: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    gpus: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    resources: dict[str, Annotated[float, msgspec.Meta(ge=0)]] = {}
    wait_s: Seconds = 300.0

    def __post_init__(self) -> None:
        _check_finite("wait_s", self.wait_s)


class ClusterDeploy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Ray cluster.

    address  of its head, host:port
    python   interpreter of an environment on this host that has Ray, of the cluster's version
    """

    address: str
    python: str

    def __post_init__(self) -> None:
        if not self.address or not self.python:
            raise ValueError(f"{'python' if self.address else 'address'} must not be empty")


class StageDeploy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stage on this machine.

    instances          workers per GPU (or group of GPUs), or on the CPU
    route              which worker of several takes a run: "least_live" (the one with the fewest runs) or "affinity"
                       (requests that begin alike go to one worker, for its prefix cache, unless it is far busier)
    device             "cpu", "cuda" or "auto" (cuda where there is a GPU)
    gpus               GPUs to use, by the server's numbers; empty: all of them
    gpus_per_instance  number of consecutive `gpus` per worker, for engines that spread a model
    start_timeout_s    how long loading the engine may take
    hang_s             a worker without a heartbeat for this long is killed and restarted
    direct_calls       any client may call the stage's model itself; otherwise on a loopback address or with the
                       operator's key only
    gpu_memory_bytes   memory that a worker uses on each of its GPUs: weights, caches, activations; 0: not stated.
                       Only for the check that stages fit the GPUs they share
    place              who starts the workers; without it this server does, on this host. Needs `links`
    engine             options of the stage's engine; the engine knows its own keys
    """

    instances: Count = 1
    route: Literal["least_live", "affinity"] = "least_live"
    device: str = "auto"
    gpus: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    gpus_per_instance: Count = 1
    start_timeout_s: Seconds = 900.0
    hang_s: Seconds = 120.0
    direct_calls: bool = False
    gpu_memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    place: PlaceDeploy | None = None
    engine: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _check_finite("start_timeout_s", self.start_timeout_s)
        _check_finite("hang_s", self.hang_s)
        if self.device not in ("cpu", "cuda", "auto"):
            raise ValueError(f"device must be cpu, cuda or auto, not '{self.device}'")
        if len(set(self.gpus)) != len(self.gpus):
            raise ValueError(f"gpus names a GPU twice: {self.gpus}")
        if self.gpus and self.device == "cpu":
            raise ValueError("gpus cannot be used with device cpu")
        if len(self.gpus) % self.gpus_per_instance or (self.gpus_per_instance > 1 and not self.gpus):
            raise ValueError(f"gpus must name a multiple of gpus_per_instance ({self.gpus_per_instance}): {self.gpus}")
        if self.place is not None and self.device == "auto":
            raise ValueError("device must be cpu or cuda where place is given: this host does not know the other's")
        if self.place is not None and self.gpus:
            raise ValueError("gpus cannot be used with place: who starts the worker says which GPUs it sees")

    @property
    def spans_gpus(self) -> bool:
        """True if one stub has workers on several GPUs."""
        return len(self.gpus) > 1

    @property
    def workers(self) -> int:
        """Number of workers of one stub."""
        return self.instances * max(1, len(self.gpu_groups))

    @property
    def gpu_groups(self) -> list[list[int]]:
        """The GPUs of each group of workers."""
        size = self.gpus_per_instance
        return [self.gpus[i : i + size] for i in range(0, len(self.gpus), size)]


class Deploy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A deploy.yaml.

    gpu_bytes  memory of each GPU that the file is written for; 0: unknown, and whether stages fit is not checked
    links      for stages whose workers run on other hosts
    cluster    for stages that are placed by ray
    """

    pipeline: str
    stages: dict[str, StageDeploy]
    orchestrator: OrchestratorDeploy = OrchestratorDeploy()
    gpu_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    links: LinksDeploy | None = None
    cluster: ClusterDeploy | None = None


T = TypeVar("T", bound=msgspec.Struct)


def convert(values: object, kind: type[T], place: str, strict: bool = True) -> T:
    """`values` as `kind`; raises ConfigError naming `place`, the key and the nearest known key."""
    try:
        return msgspec.convert(values, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}{_hint(str(error), kind)}") from None


def _hint(message: str, kind: type[msgspec.Struct]) -> str:
    structs = (kind, OrchestratorDeploy, StageDeploy, LinksDeploy, TlsDeploy, PlaceDeploy, ClusterDeploy)
    known = (name for struct in structs for name in struct.__struct_fields__)
    return nearest_key(message, known)


# --- config.pbtxt parameters ------------------------------------------------------------------------------------
def to_parameters(deploy: OrchestratorDeploy | StageDeploy) -> dict[str, str]:
    """A deploy section as flat text parameters; engine options become `engine.<key>` with a JSON value."""
    values = msgspec.to_builtins(deploy)
    engine = values.pop("engine", {})
    unsaid = ["gpu_memory_bytes"]  # a static check has it
    if isinstance(deploy, StageDeploy) and not deploy.spans_gpus:
        unsaid += ["gpus", "gpus_per_instance"]
    if not values.get("place"):
        unsaid += ["device", "place"]  # instance_group has the device
    defaults = {"instances": 1, "route": "least_live", "direct_calls": False, "workers": {}}
    unsaid += [name for name, default in defaults.items() if values.get(name) == default]
    for name in unsaid:
        values.pop(name, None)
    flat = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return flat | {f"engine.{key}": json.dumps(value) for key, value in engine.items()}


def from_parameters(parameters: Mapping[str, str], kind: type[T], place: str) -> T:
    """The inverse of `to_parameters`, for what an operator may have edited by hand."""
    values: dict[str, Any] = {}
    for key, text in parameters.items():
        group, _, name = key.partition(".")
        if group == "engine" and name:
            values.setdefault("engine", {})[name] = _json(text, f"{place}: {key}")
        else:
            values[key] = _json(text, f"{place}: {key}") if text.startswith(("[", "{")) else text
    return convert(values, kind, place, strict=False)


def _json(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise ConfigError(f"{place}: '{text}' is not JSON (text needs quotes)") from None
