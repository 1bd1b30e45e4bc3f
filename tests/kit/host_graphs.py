# SPDX-License-Identifier: Apache-2.0
"""A recorder of steps on a CPU: a replay computes the step and writes the memory of the recorded one, as a CUDA graph
does. It may lie."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class HostRecorder:
    """triton_omni.backends.cuda_graphs.Recorder.

    lie      "stale": outputs of the inputs before; "frozen": always those of the recorded step; "nan": not finite;
             "refuses": no step can be recorded
    replays  how many steps were replayed
    """

    lie: str = ""
    replays: int = field(default=0, init=False)

    def __call__(self, step):
        if self.lie == "refuses":
            raise RuntimeError("no capture here")
        written = [tensor.clone() for tensor in step()]
        pending = [tensor.clone() for tensor in written]

        def replay():
            self.replays += 1
            fresh = [tensor.clone() for tensor in step()]
            for place, (target, value) in enumerate(zip(written, fresh, strict=True)):
                source = pending[place] if self.lie in ("stale", "frozen") else value
                target.copy_(source)
                if self.lie == "nan" and target.is_floating_point():
                    target.fill_(torch.nan)
                if self.lie == "stale":
                    pending[place] = value

        return replay, written
