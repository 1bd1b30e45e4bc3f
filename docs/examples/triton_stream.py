# SPDX-License-Identifier: Apache-2.0
"""A streamed answer with NVIDIA's tritonclient alone: prints the text as it comes."""

import json
import queue

import numpy as np
import tritonclient.grpc as grpc

request = {
    "operation": "chat",
    "messages": [{"role": "user", "content": "Tell me about the sea."}],
    "modalities": ["text"],
    "sampling": {"max_tokens": 40},
    "stream": True,
}
given = grpc.InferInput("request", [1], "BYTES")
given.set_data_from_numpy(np.array([json.dumps(request).encode()], dtype=object))
answers: queue.Queue = queue.Queue()
with grpc.InferenceServerClient("localhost:8001") as client:
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("chat", [given])
    while True:
        result, error = answers.get(timeout=120)
        if error is not None:
            raise error
        event = json.loads(result.as_numpy("event")[0])
        if event["type"] == "end":
            break
        text = result.as_numpy("text_output")
        print(text[0].decode() if text is not None else "", end="", flush=True)
print()
