# SPDX-License-Identifier: Apache-2.0
"""Every code block of README and docs is run or parsed here, or says which test runs it, or why none does."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import io
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import yaml

from tests.kit.doc_blocks import PROXY, ROOT, TRITON, VOICE_NAMES, Block, at_servers, blocks_of, commands, documents
from tests.kit.doc_blocks import write_media as write_media_files
from tests.kit.fake_backend import VOICES, FakeBackend
from tests.kit.proxy_server import RunningProxy, running_proxy
from triton_omni import cli
from triton_omni.backends import pipelines
from triton_omni.backends.deploy.load import load_deploy, to_deploy
from triton_omni.backends.repository import PUBLIC_INPUTS
from triton_omni.backends.wire import SHORT_FORM, GenerateRequest
from triton_omni.openai.http.settings import Settings

BLOCKS = [block for document, text in documents().items() for block in blocks_of(document, text)]
EXAMPLES = ROOT / "docs" / "examples"
LANGUAGES = {"python", "sh", "json", "yaml", "text"}
"""`text` is for diagrams and what commands print."""
MODELS = ("chat", "image", "qwen3_omni", "qwen3_omni_text", "qwen3_tts", "qwen_image", "qwen_image_edit", "toy")
OPERATIONS = ["chat", "completion", "speech", "transcription", "image", "edit"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))


class EveryModel(FakeBackend):
    """Offers what any of the models offers."""

    async def health(self, pipeline: str) -> dict[str, Any]:
        state = await super().health(pipeline)
        return {**state, "operations": OPERATIONS, "about": {**state["about"], "instructions": True}}

    def _refuse(self, request: GenerateRequest) -> None:
        """The parameters of all models; the proxy has read the request, and engines are tested elsewhere."""


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.fixture(scope="module")
def proxy() -> Iterator[RunningProxy]:
    """The real proxy over a stand-in of the server, which has all models and voices that the documents name."""
    settings = Settings(
        model_aliases=dict.fromkeys(MODELS, "fake"), voice_aliases=dict.fromkeys(VOICE_NAMES, VOICES[0])
    )
    with running_proxy(EveryModel(), settings) as one:
        yield one


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of what is run, with the files that blocks read."""
    write_media_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- every block -------------------------------------------------------------------------------------------------
def test_fences_are_paired_and_name_their_language() -> None:
    assert len(BLOCKS) >= 30
    for document, text in documents().items():
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks_of(document, text)), document
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.mark], ids=str)
def test_marks_name_a_test_or_a_reason(block: Block) -> None:
    if block.mark == "not run":
        assert len(block.why) > 8
        return
    file, _, name = block.why.partition("::")
    assert f"def {name or 'test_'}" in (ROOT / file).read_text(encoding="utf-8"), block.why


# --- python ------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("block", of("python"), ids=str)
def test_programs_run(block: Block, proxy: RunningProxy, folder: Path) -> None:
    code = compile(at_servers(block.text, proxy), str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if block.mark:
        return
    assert TRITON not in block.text, "needs a server: mark it"
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    for value in names.values():
        if isinstance(value, openai.OpenAI):
            value.close()
    gc.collect()  # what else the program has not closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", ["openai_chat.py", "openai_stream.py", "openai_transcribe.py", "openai_image.py"])
def test_examples_of_the_sdk_run(name: str, proxy: RunningProxy, folder: Path) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(at_servers(text, proxy), name, "exec"), names)
        names["client"].close()
    assert printed.getvalue().strip()
    gc.collect()


def test_examples_are_short_and_each_is_in_their_table() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = [path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")]
    assert len(programs) >= 10
    for path in programs:
        text = path.read_text(encoding="utf-8")
        assert re.search(f"`{path.name}( KEY)?`", table) and len(text.splitlines()) <= 40, path.name
        if path.suffix == ".py":
            compile(text, path.name, "exec")


def test_the_example_of_curl_runs(proxy: RunningProxy, folder: Path) -> None:
    words = commands((EXAMPLES / "curl.sh").read_text(encoding="utf-8"))
    assert len(words) >= 5 and all(check_command(command, proxy) for command in words)
    assert (folder / "hello.mp3").stat().st_size > 100 and "b64_json" in (folder / "image.json").read_text()


# --- shell -------------------------------------------------------------------------------------------------------
def parse_omni(words: list[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as complaint, contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.parser().parse_args(words)
        except SystemExit as end:
            if end.code:
                pytest.fail(f"{words}: {complaint.getvalue()}")


def check_make(words: list[str]) -> None:
    values = dict(word.split("=", 1) for word in words if "=" in word)
    assert set(values) <= VARIABLES and {word for word in words if "=" not in word} <= TARGETS
    if options := values.get("SERVE_ARGS"):
        parse_omni(["serve", *shlex.split(options)])
        for named in re.findall(r"(?:--deploy|--repository) (backends/\S+|model_repository\S*)", options):
            assert (ROOT / named).exists() or named.startswith("model_repository/shout"), named


def check_generate(url: str, body: str) -> None:
    """A body of Triton's generate endpoints: names of inputs, and the request in it."""
    values = json.loads(body)
    assert set(values) <= {spec.name for spec in PUBLIC_INPUTS} | set(SHORT_FORM), f"{url}: {sorted(values)}"
    if "request" in values:
        msgspec.json.decode(values["request"], type=GenerateRequest)


def run_curl(words: list[str], proxy: RunningProxy) -> None:
    if "https://" in " ".join(words):
        return  # a medium of the reader's own; such blocks are marked
    url = next(word for word in words if word.startswith(("localhost", "http://localhost")))
    if PROXY not in url:
        assert re.search(r"localhost:8000/v2/(models/\w+/(generate(_stream)?|ready)|health/ready)$", url), url
        if "-d" in words:
            check_generate(url, words[words.index("-d") + 1])
        return
    args = [at_servers(word, proxy) for word in words]
    done = subprocess.run([*args, "-sS", "--fail-with-body"], capture_output=True, text=True, timeout=30, check=False)
    written = Path(args[args.index("-o") + 1]).read_bytes()[:500] if "-o" in args else done.stdout[:500]
    assert done.returncode == 0, f"{done.stderr} {written!r}"


def check_command(words: list[str], proxy: RunningProxy) -> bool:
    """Whether this is a command that can be checked; AssertionError if it is wrong."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    name = words[0].rsplit("/", 1)[-1]
    if name == "make":
        check_make(words[1:])
    elif name == "triton-omni":
        parse_omni(words[1:])
    elif name == "curl":
        run_curl(words, proxy)
    elif name.startswith("python") and words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None, words[2]
    else:
        return False
    return True


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_commands_run_or_parse(block: Block, proxy: RunningProxy, folder: Path) -> None:
    unknown = [words[0] for words in commands(block.text) if not check_command(words, proxy)]
    assert not unknown or block.mark, f"no check knows {unknown}: mark the block"


@pytest.mark.parametrize("document", documents())
def test_commands_in_sentences_parse(document: str) -> None:
    for code in re.findall(
        r"`((?:make|triton-omni) [^`]+)`", re.sub(r"```.*?```", "", documents()[document], flags=re.DOTALL)
    ):
        words = shlex.split(code.replace("\n", " "))
        if words[0] == "make":
            check_make(words[1:])
        elif not re.search(r"[A-Z]{3,}|…", code):
            parse_omni(words[1:])


# --- data --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_parses_and_requests_decode(block: Block) -> None:
    try:
        values = [json.loads(block.text)]
    except ValueError:
        values = [json.loads(line) for line in block.text.splitlines()]
    for value in values:
        if "operation" in value:
            msgspec.convert(value, GenerateRequest)


@pytest.mark.parametrize("recipe", [d for d in documents() if d.startswith("docs/recipes/") and "README" not in d])
def test_recipes_have_one_form_and_legal_requests(recipe: str) -> None:
    text = documents()[recipe]
    headings = [heading for heading in re.findall(r"^## (.*)$", text, re.MULTILINE) if "tart" not in heading]
    assert headings == ["Requests", "Expected", "Verified"]
    named = re.search(r"^\| pipeline \| `(\w+)`", text, re.MULTILINE)
    assert named and all(f"| {row} |" in text for row in ("hardware", "download", "deploy file"))
    pipeline = pipelines.load(named[1])
    blocks = blocks_of(recipe, text)
    assert {"python", "sh", "json"} <= {block.language for block in blocks} or pipeline.name == "chat"
    for block in blocks:
        if block.language == "json":
            request = msgspec.json.decode(block.text, type=GenerateRequest)
            assert request.operation in {operation.name for operation in pipeline.operations}
            pipeline.check_params(request)
            pipeline.check(request)


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_deploy_files_keep_the_schema(block: Block, tmp_path: Path) -> None:
    """A block with `extends` is read beside the deploy files of the pipeline in whose folder its comment puts it."""
    values = yaml.safe_load(block.text)
    if block.mark == "not run" or not isinstance(values, dict):
        return
    if "extends" not in values:
        to_deploy({"pipeline": "any", **values}, str(block))
        return
    placed = re.match(r"# backends/pipelines/(\w+)/", block.text)
    name = placed[1] if placed else "chat"
    path = tmp_path / "mine.yaml"
    path.write_text(block.text)
    for source in (ROOT / "backends" / "pipelines" / name).glob("deploy*.yaml"):
        (tmp_path / source.name).write_text(source.read_text())
    for build in ("cpu", "cuda"):
        load_deploy(path, pipelines.load(name), build)
