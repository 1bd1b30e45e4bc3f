# SPDX-License-Identifier: Apache-2.0
"""deploy.yaml → Deploy, checked against the pipeline it is for."""

from __future__ import annotations

from pathlib import Path

from triton_omni.backends.config.schema import ConfigError, Deploy, convert
from triton_omni.backends.core.pipeline import Pipeline


def read_deploy(path: Path) -> Deploy:
    """The deploy file at `path`, whatever pipeline it is for; raises ConfigError naming file and key."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path.name}: {error}") from None
    if isinstance(values, dict) and isinstance(values.setdefault("stages", {}), dict):
        # `tokens:` with nothing behind it means all defaults
        values["stages"] = {name: {} if stage is None else stage for name, stage in values["stages"].items()}
    return convert(values, Deploy, path.name)


def load_deploy(path: Path, pipeline: Pipeline) -> Deploy:
    """The deploy file at `path` for `pipeline`; raises ConfigError naming file and key."""
    deploy = read_deploy(path)
    if deploy.pipeline != pipeline.name:
        raise ConfigError(f"{path.name}: it is for pipeline '{deploy.pipeline}', not '{pipeline.name}'")
    names = {s.name for s in pipeline.stages}
    if set(deploy.stages) != names:
        odd = ", ".join(sorted(set(deploy.stages) ^ names))
        raise ConfigError(f"{path.name}: stages must be exactly {', '.join(sorted(names))}; odd: {odd}")
    return deploy
