# SPDX-License-Identifier: Apache-2.0
"""Images, audio and video: thinker and talker against transformers on the same samples and pixels."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.kit.ar_worker import become_ar_worker
from tests.kit.engine_chain import Chain
from tests.kit.gpu_devices import BUILD, VLLM_DEVICES
from tests.kit.omni_chats import check, engines
from tests.kit.omni_media import CASES, our_request, see
from tests.kit.tiny_omni import Reference, tiny_omni
from triton_omni.backends.core.chunk import Tensor
from triton_omni.backends.core.engine import EngineChunk
from triton_omni.backends.core.errors import BadRequest
from triton_omni.backends.core.generate import GenerateRequest, Message, Part, Sampling
from triton_omni.backends.pipelines.qwen3_omni.pipeline import PIPELINE

become_ar_worker()
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_omni(tmp_path_factory.mktemp("tiny_omni"))


@pytest.fixture(scope="module")
def reference(folder):
    model = Reference(folder)
    return {name: see(model, case) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=VLLM_DEVICES)
def chain(request, folder):
    limits = {"limit_mm_per_prompt": {"audio": 2, "image": 2, "video": 1}}
    chain = Chain(PIPELINE, engines(folder, limits | {"max_num_batched_tokens": 1024}, device=request.param))
    yield chain
    chain.close()
    gc.collect()


@pytest.mark.parametrize("name", CASES)
def test_alone_equals_transformers(chain, reference, name):
    job = chain.open(*our_request(CASES[name]))
    chain.run()
    check(job, reference[name])


def test_together_and_again_equals_transformers(chain, reference):
    """The second time everything is in the prefix and encoder caches."""
    for _ in range(2):
        jobs = {name: chain.open(*our_request(case)) for name, case in CASES.items()}
        chain.run()
        for name, job in jobs.items():
            check(job, reference[name])


def test_media_rows_leave_the_thinker_on_its_device(chain):
    """The carrier decides whether they cross in GPU memory; the engine copies nothing to the host."""
    job = chain.open(*our_request(next(iter(CASES.values()))))
    chain.run()
    sent = [t for e in job.events["thinker"] if isinstance(e, EngineChunk) for t in e.tensors if t.name == "media"]
    assert [tensor.device for tensor in sent] == ["cuda:0" if BUILD == "cuda" else "cpu"]


@pytest.mark.parametrize(
    "part",
    [
        Part("image", length=10, shape=(1, 1, 3)),
        Part("image", length=12, shape=(2, 2)),
        Part("image", offset=10**9, length=3, shape=(1, 1, 3)),
        Part("audio", length=10),
        Part("audio", length=9),
    ],
)
def test_media_that_are_not_there_or_no_numbers_are_refused(chain, part):
    request = GenerateRequest(messages=(Message("user", (part,)),))
    media = {"image": np.zeros(300, np.uint8), "audio": np.full(9, np.nan, np.float32)}
    with pytest.raises(BadRequest) as caught:
        chain.open(request, {name: Tensor.of(name, values) for name, values in media.items()})
    assert caught.value.where == "messages[0]"


@pytest.mark.parametrize("schema", [None, {"enum": ["yes", "no"]}])
@pytest.mark.parametrize("case", [["image0", "image1", "image0"], ["a", "video"]])
def test_too_many_or_too_long_media_are_refused(chain, case, schema):
    """Three images where two are allowed; a video of more positions than the context has. No schema is to blame."""
    sampling = Sampling(json_schema=schema)
    if case[-1] == "video":
        video = np.zeros((24, 64, 64, 3), np.uint8)
        parts = (Part("video", length=video.size, shape=video.shape), Part("text", "what is this"))
        request = GenerateRequest(messages=(Message("user", parts),), sampling=sampling)
        given = request, {"video": Tensor.of("video", video.reshape(-1))}
    else:
        given = our_request(case, sampling=sampling)
    with pytest.raises(BadRequest) as caught:
        chain.open(*given)
    assert caught.value.where == "messages"
    assert not chain.engines["thinker"].has_work
    for engine in chain.engines.values():
        assert not engine.llm.engine.has_unfinished_requests()
