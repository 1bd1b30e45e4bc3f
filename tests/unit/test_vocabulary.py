# SPDX-License-Identifier: Apache-2.0
"""Class names are unique across packages, and retired words stay out of code, tests and docs."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RETIRED_WORDS = frozenset(
    {"wish", "manner", "worn", "ear", "told", "heard", "brought", "film", "sound", "picture", "keeper", "sketch"}
    | {"dice", "bury", "graveyard", "door", "lane", "whoever", "nobody", "anew", "rooms"}
)
RETIRED_PHRASES = re.compile(r"\b(?:for ever|in work|put away)\b")
DEFINED_TWICE = frozenset({"TritonPythonModel"})
"""Class names that several packages may define: Triton looks this one up by name in each model."""
MODEL_TEXTS = frozenset(
    {
        "backends/diffusion/edit.py",
        "backends/tools/digits/small_model.py",
        "tests/kit/spoken_corpus.py",
        "tests/reference/test_chat_speech.py",
    }
)
"""Files with texts that a model reads or speaks."""
TEXT_SUFFIXES = (".py", ".md", ".yaml", ".toml", ".txt")
_TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def tracked_files(*folders: str) -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def class_definitions() -> dict[str, list[str]]:
    """Class name → files of backends/ and client/ that define it."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in tracked_files("backends", "client"):
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(str(path.relative_to(ROOT)))
    return files


def retired_words(text: str) -> set[str]:
    """Retired words in a text, also as plurals; identifiers are split at underscores and capitals."""
    tokens = {token.lower() for token in _TOKEN.findall(text)}
    tokens |= {token.removesuffix("s") for token in tokens}
    lowered = " ".join(text.lower().split())
    return (RETIRED_WORDS & tokens) | set(RETIRED_PHRASES.findall(lowered))


def test_class_names_are_unique_across_packages():
    duplicates = {name: files for name, files in class_definitions().items() if len(files) > 1}
    unexpected = {name: files for name, files in duplicates.items() if name not in DEFINED_TWICE}
    assert not unexpected, "\n".join(f"{name}: {', '.join(files)}" for name, files in unexpected.items())


def test_retired_words_stay_out_of_code_tests_and_docs():
    found: dict[str, list[str]] = {}
    for path in tracked_files():
        if path.suffix in TEXT_SUFFIXES and path != Path(__file__).resolve():
            words = retired_words(path.read_text(encoding="utf-8"))
            if words and str(path.relative_to(ROOT)) not in MODEL_TEXTS:
                found[str(path.relative_to(ROOT))] = sorted(words)
    assert not found, "\n".join(f"{name}: {', '.join(words)}" for name, words in found.items())


def test_identifiers_are_split_into_words():
    assert retired_words("def read_wish(picture_url): return SoundFile") == {"wish", "picture", "sound"}
    assert retired_words("`films`, many_pictures; this, has, lanes") == {"film", "picture", "lane"}
    assert retired_words("import soundfile; unheard; a worker in workers; wait for\n ever") == {"for ever"}
