# SPDX-License-Identifier: Apache-2.0
"""question.wav (16-bit mono) as text: the samples lie in system shared memory, and none goes through gRPC."""

import json
import queue
import sys
import wave

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import shared_memory as shm

KEY = {"triton-grpc-protocol-triton-omni-key": sys.argv[1]}  # `make serve` prints the key
with wave.open("question.wav") as file:
    rate = file.getframerate()
    samples = np.frombuffer(file.readframes(-1), "<i2").astype(np.float32) / 32768

part = {"type": "audio", "length": samples.size, "sample_rate": rate}
request = {"operation": "transcription", "messages": [{"role": "user", "content": [part]}], "stream": False}
given = grpc.InferInput("request", [1], "BYTES")
given.set_data_from_numpy(np.array([json.dumps(request).encode()], dtype=object))
audio = grpc.InferInput("audio", [samples.size], "FP32")
audio.set_shared_memory("question", samples.nbytes)
answers: queue.Queue = queue.Queue()
region = shm.create_shared_memory_region("question", "/omni_question", samples.nbytes)
try:
    shm.set_shared_memory_region(region, [samples])
    with grpc.InferenceServerClient("localhost:8001") as client:
        client.register_system_shared_memory("question", "/omni_question", samples.nbytes, headers=KEY)
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("chat", [given, audio])
        result, error = answers.get(timeout=120)
        client.unregister_system_shared_memory("question", headers=KEY)
finally:
    shm.destroy_shared_memory_region(region)
if error is not None:
    raise error
print(result.as_numpy("text_output")[0].decode())
