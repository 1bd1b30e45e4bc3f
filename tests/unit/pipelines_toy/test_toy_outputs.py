# SPDX-License-Identifier: Apache-2.0
"""Options of the toy's stages that loads use."""

from __future__ import annotations

from triton_omni.backends.core.engine import EngineFinished, EngineOutput, Run
from triton_omni.backends.core.generate import GenerateRequest, Message, Sampling
from triton_omni.backends.core.outputs import TextPiece
from triton_omni.backends.pipelines.toy.engines import ToyEngine, tokens


def test_only_every_so_many_th_output_goes_to_the_client():
    engine = ToyEngine("tokens", tokens)
    request = GenerateRequest(sampling=Sampling(max_tokens=7), stages={"tokens": {"output_every": 3}})
    engine.open(Run(b"r", "r", request, wanted=frozenset({"text"})))
    events = []
    while engine.has_work:
        events += engine.step()
    assert [e.piece.text for e in events if isinstance(e, EngineOutput)] == ["w0 ", "w3 ", "w6 "]
    assert isinstance(events[-1], EngineFinished) and events[-1].usage["completion_tokens"] == 7


def test_the_pieces_count_what_the_end_counts():
    """An answer that is cut short has only the counts of its pieces."""
    engine = ToyEngine("tokens", tokens)
    request = GenerateRequest(messages=(Message("user", "one two three"),), sampling=Sampling(max_tokens=4))
    engine.open(Run(b"r", "r", request, wanted=frozenset({"text"})))
    events = []
    while engine.has_work:
        events += engine.step()
    joined = TextPiece.join([e.piece for e in events if isinstance(e, EngineOutput)])
    assert joined.usage() == events[-1].usage == {"prompt_tokens": 3, "completion_tokens": 4}
