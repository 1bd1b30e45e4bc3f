# SPDX-License-Identifier: Apache-2.0
"""Deploy files in layers: `extends:` another file, then this file's values, then its block for the platform.

Layers are merged key by key. A later layer replaces scalars and lists; `null` removes a key, so that its default
counts again. Every value keeps the file and line that it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triton_omni.backends.config.paths import Build
from triton_omni.backends.config.schema import ConfigError

if TYPE_CHECKING:
    import yaml

PLATFORMS: tuple[Build, ...] = ("cpu", "cuda")
BLOCK_KEYS = frozenset({"orchestrator", "stages"})


@dataclass(frozen=True)
class Leaf:
    """A value that is no mapping, or an empty one, and where it stands: "FILE:LINE"."""

    value: object
    origin: str


Tree = dict[str, "Tree | Leaf"]


def read_layers(path: Path, platform: Build) -> tuple[Tree, list[Path]]:
    """The deploy file at `path` merged with all that it extends, and the files, base first. Raises ConfigError."""
    chain: list[tuple[Path, Tree]] = []
    base: Tree | Leaf | None = Leaf(path.name, "")
    while base is not None:
        if not (isinstance(base, Leaf) and isinstance(base.value, str)):
            raise ConfigError(f"{path.name}: extends must be the name of a deploy file")
        path = path.parent / base.value
        if any(path.resolve() == file.resolve() for file, _ in chain):
            raise ConfigError(f"{path.name}: extends itself")
        chain.append((path, _read(path)))
        base = chain[-1][1].pop("extends", None)
    merged: Tree = {}
    for file, tree in reversed(chain):
        blocks = {name: tree.pop(name) for name in PLATFORMS if name in tree}
        name = merged.get("pipeline")
        if isinstance(name, Leaf) and values_of(tree).get("pipeline", name.value) != name.value:
            raise ConfigError(f"{file.name}: pipeline must be '{name.value}', as in the file that it extends")
        _merge(merged, tree)
        for block_name, block in blocks.items():
            if isinstance(block, Leaf) or not set(block) <= BLOCK_KEYS:
                keys = ", ".join(sorted(BLOCK_KEYS))
                raise ConfigError(f"{file.name}: block `{block_name}` may only have the keys {keys}")
            if block_name == platform:
                _merge(merged, block)
    return merged, [file for file, _ in reversed(chain)]


def values_of(tree: Tree) -> dict[str, object]:
    """The values alone."""
    return {key: below.value if isinstance(below, Leaf) else values_of(below) for key, below in tree.items()}


def leaves(tree: Tree, above: tuple[str, ...] = ()) -> Iterator[tuple[str, Leaf]]:
    """Every value with its keys, joined by dots."""
    for key, below in tree.items():
        if isinstance(below, Leaf):
            yield ".".join((*above, key)), below
        else:
            yield from leaves(below, (*above, key))


def _merge(base: Tree, over: Tree, in_stages: bool = False) -> None:
    """Add a layer. `tokens:` without a value is a stage with defaults, or an unchanged one."""
    for key, value in over.items():
        below = base.get(key)
        if isinstance(value, dict):
            target: Tree = below if isinstance(below, dict) else {}
            base[key] = target
            _merge(target, value, key == "stages" and not in_stages)
        elif value.value == {} or (value.value is None and in_stages):
            base.setdefault(key, {})
        elif value.value is None and key in base:
            del base[key]
        else:
            base[key] = value


def _read(path: Path) -> Tree:
    """One YAML file. Raises ConfigError naming it."""
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            tree = None if node is None else _tree(loader, node, path.name)
        finally:
            loader.dispose()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path.name}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path.name}: must be a mapping of keys to values")
    return tree


def _tree(loader: yaml.SafeLoader, node: yaml.Node, file: str) -> Tree | Leaf:
    import yaml

    if not isinstance(node, yaml.MappingNode) or not node.value:
        return Leaf(loader.construct_object(node, deep=True), f"{file}:{node.start_mark.line + 1}")
    tree: Tree = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        if key in tree:
            raise ConfigError(f"{file}:{key_node.start_mark.line + 1}: key '{key}' is used twice")
        tree[key] = _tree(loader, value_node, file)
    return tree
