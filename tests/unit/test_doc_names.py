# SPDX-License-Identifier: Apache-2.0
"""What README and docs name exists: files, links, headings, make targets, commands and environment variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from triton_omni import cli

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backends", "client", "docker", "docs", "perf", "tests")
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")))
}
SUFFIXES = "py|md|yaml|json|txt|toml|pbtxt"
PATH = re.compile(
    rf"(?<![\w./<>:…-])((?:[\w*-]+/)+[\w*.-]*\.(?:{SUFFIXES})\b|(?:{'|'.join(FOLDERS)})/[\w/.-]*\w)(?![<\w])"
)
FILE = re.compile(rf"`([\w-]+\.(?:{SUFFIXES}))`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)

EXAMPLES = {
    "shout/engines.py",
    "shout/pipeline.py",
    "shout/deploy.yaml",
    "TRITON_OMNI_MODELS/Qwen-Image-Edit/model_index.json",
}
"""Files of the reader's own."""
WRITTEN = {"out/answer.txt", "out/gpu-first-hour.md", "tests/reference/test_"}
"""Files that commands write, and patterns."""
REMOVED = {"chat/deploy-gpu.yaml"}
"""Files whose removal the change log names."""
FOREIGN = {"model.py", "config.pbtxt", "chat_template.json", "requirements-models.txt"}
"""Names of files of model repositories and checkpoints."""


def _missing(name: str, document: str) -> bool:
    """Whether no file has this path below the root, backends/, client/, the pipelines or the document's folder."""
    bases = (ROOT, ROOT / "backends", ROOT / "client", ROOT / "backends/pipelines", (ROOT / document).parent)
    return not any(next(base.glob(name), None) for base in bases)


def _anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _code(document: str) -> str:
    return "\n".join(CODE.findall(DOCUMENTS[document]))


def test_all_documents_are_read():
    assert {"README.md", "CHANGELOG.md", "docs/architecture.md", "perf/README.md"} <= set(DOCUMENTS)
    assert len(DOCUMENTS) > 25


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_exist(document):
    named = set(PATH.findall(DOCUMENTS[document])) - EXAMPLES - WRITTEN - REMOVED
    assert sorted(name for name in named if _missing(name, document)) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_without_a_folder_exist(document):
    named = set(FILE.findall(DOCUMENTS[document])) - FOREIGN
    known = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | {p.name for p in ROOT.iterdir()}
    assert sorted(named - known) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_and_headings(document):
    broken = []
    for link in LINK.findall(DOCUMENTS[document]):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = ((ROOT / document).parent / file).resolve() if file else ROOT / document
        text = target.read_text(encoding="utf-8") if target.suffix == ".md" and target.exists() else ""
        if not target.exists() or (anchor and anchor not in _anchors(text)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert sorted(set(re.findall(r"\bmake ([a-z][a-z-]+)", _code(document))) - targets) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist(document):
    commands = next(action.choices for action in cli.parser()._actions if action.dest == "command")
    assert commands is not None
    assert sorted(set(re.findall(r"triton-omni ([a-z]+)\b", _code(document))) - set(commands)) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_environment_variables_exist(document):
    sources = [*(ROOT / "docker").iterdir(), ROOT / "Makefile"]
    sources += [path for folder in ("backends", "client", "tests") for path in (ROOT / folder).rglob("*.py")]
    sources.remove(Path(__file__).resolve())
    known = {
        name for path in sources for name in re.findall(r"\bTRITON_OMNI_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    assert sorted(set(re.findall(r"\bTRITON_OMNI_[A-Z_]*[A-Z]\b", DOCUMENTS[document])) - known) == []


def test_decisions_have_numbers_of_their_own():
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert [name[:4] for name in names] == [f"{number:04}" for number in range(1, len(names) + 1)]
    for name in names:
        assert DOCUMENTS[f"docs/decisions/{name}"].startswith(f"# {name[:4]}"), name


def test_every_exception_is_used():
    text = "\n".join(DOCUMENTS.values())
    assert [name for name in EXAMPLES | WRITTEN | REMOVED | FOREIGN if name not in text] == []


def test_a_name_that_does_not_exist_is_found(monkeypatch):
    text = "See `core/absent.py`, `absent.yaml`, [there](absent.md), [here](README.md#absent); run `make absent`."
    monkeypatch.setitem(DOCUMENTS, "README.md", text + " `triton-omni absent`, `TRITON_OMNI_ABSENT`")
    checks = (
        test_paths_exist,
        test_files_named_without_a_folder_exist,
        test_links_lead_to_files_and_headings,
        test_make_targets_exist,
        test_commands_exist,
        test_environment_variables_exist,
    )
    for check in checks:
        with pytest.raises(AssertionError):
            check("README.md")
