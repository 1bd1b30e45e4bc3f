# SPDX-License-Identifier: Apache-2.0
"""Deploy files in layers: `extends:` another file, then this file's values, then its block for the platform.

Layers are merged key by key. A later layer replaces scalars and lists; `null` removes a key, so that its default
counts again. Every value keeps the file and line that it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_omni.backends.config.paths import Build
from triton_omni.backends.config.schema import ConfigError

if TYPE_CHECKING:
    import yaml

PLATFORMS: tuple[Build, ...] = ("cpu", "cuda")
BLOCK_KEYS = ("orchestrator", "stages")
Keys = tuple[str, ...]


@dataclass
class Layers:
    """Merged values. `origins` maps the keys of each leaf to "FILE:LINE"; `files` are all files, the base first."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[Keys, str] = field(default_factory=dict[Keys, str])
    files: list[Path] = field(default_factory=list[Path])

    def merge(self, values: Mapping[str, Any], origins: Mapping[Keys, str]) -> None:
        """Add a layer over the present ones."""
        _merge(self.values, values)
        for keys, origin in origins.items():
            if isinstance(_value_at(values, keys), dict):  # an empty mapping replaces nothing
                continue
            for old in [old for old in self.origins if old[: len(keys)] == keys or keys[: len(old)] == old]:
                del self.origins[old]
            self.origins[keys] = origin


def read_layers(path: Path, platform: Build) -> Layers:
    """The deploy file at `path` with all that it extends. Raises ConfigError naming the file."""
    chain: list[tuple[Path, Any, dict[Keys, str]]] = []
    while True:
        if any(path.resolve() == file.resolve() for file, _, _ in chain):
            raise ConfigError(f"{path.name}: extends itself")
        values, origins = _read(path)
        chain.append((path, values, origins))
        base = values.pop("extends", None) if isinstance(values, dict) else None
        if base is None:
            break
        if not isinstance(base, str):
            raise ConfigError(f"{path.name}: extends must be the name of a deploy file (got {base!r})")
        path = path.parent / base
    layers = Layers()
    for file, values, origins in reversed(chain):
        _add_file(layers, file, values, origins, platform)
    return layers


def _add_file(layers: Layers, file: Path, values: Any, origins: Mapping[Keys, str], platform: Build) -> None:
    layers.files.append(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file.name}: must be a mapping of keys to values")
    blocks = {name: values.pop(name) for name in PLATFORMS if name in values}
    name = layers.values.get("pipeline")
    if name is not None and values.get("pipeline", name) != name:
        raise ConfigError(f"{file.name}: pipeline must be '{name}', as in the file that it extends")
    layers.merge(values, {keys: at for keys, at in origins.items() if keys[0] not in (*PLATFORMS, "extends")})
    for block_name, block in blocks.items():
        if not isinstance(block, dict) or not set(block) <= set(BLOCK_KEYS):
            raise ConfigError(f"{file.name}: block `{block_name}` may only have the keys {', '.join(BLOCK_KEYS)}")
    if platform in blocks:
        own = {keys[1:]: f"{at} ({platform})" for keys, at in origins.items() if keys[0] == platform and keys[1:]}
        layers.merge(blocks[platform], own)


def _value_at(values: Mapping[str, Any], keys: Keys) -> Any:
    value: Any = values
    for key in keys:
        value = value[key]
    return value


def _merge(base: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if value is None and key in base:
            del base[key]
        elif isinstance(value, dict):
            below = base.get(key)
            base[key] = below if isinstance(below, dict) else {}
            _merge(base[key], value)
        else:
            base[key] = value


def _read(path: Path) -> tuple[Any, dict[Keys, str]]:
    """Values of one YAML file, and the place of each leaf."""
    import yaml

    origins: dict[Keys, str] = {}
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            values = loader.construct_document(node) if node is not None else None
            if node is not None:
                _find_origins(loader, node, (), path.name, origins)
        finally:
            loader.dispose()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path.name}: {error}") from None
    _empty_stages(values)
    return values, origins


def _find_origins(loader: yaml.SafeLoader, node: yaml.Node, keys: Keys, file: str, origins: dict[Keys, str]) -> None:
    import yaml

    if not isinstance(node, yaml.MappingNode) or not node.value:
        origins[keys] = f"{file}:{node.start_mark.line + 1}"
        return
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        if key in seen:
            raise ConfigError(f"{file}:{key_node.start_mark.line + 1}: key '{key}' is used twice")
        seen.add(key)
        _find_origins(loader, value_node, (*keys, key), file, origins)


def _empty_stages(values: Any) -> None:
    """`tokens:` without a value means a stage with defaults, or unchanged in an extending file."""
    for block in [values, *(values.get(name) for name in PLATFORMS)] if isinstance(values, dict) else []:
        if isinstance(block, dict) and isinstance(block.get("stages"), dict):
            block["stages"] = {name: {} if stage is None else stage for name, stage in block["stages"].items()}
