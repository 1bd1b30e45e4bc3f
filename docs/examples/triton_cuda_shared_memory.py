# SPDX-License-Identifier: Apache-2.0
# not run: needs a GPU
"""An edit of 256 x 256 pixels that lie on GPU 0. Needs the server on the same host, and a model that edits."""

import json
import queue
import sys

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import cuda_shared_memory as cuda_shm

KEY = {"triton-grpc-protocol-triton-omni-key": sys.argv[1]}  # `make serve` prints the key
pixels = np.full((256, 256, 3), 200, np.uint8)
part = {"type": "image", "shape": list(pixels.shape)}
request = {
    "operation": "edit",
    "messages": [{"role": "user", "content": [part, {"type": "text", "text": "a red sky"}]}],
    "stream": False,
}
given = grpc.InferInput("request", [1], "BYTES")
given.set_data_from_numpy(np.array([json.dumps(request).encode()], dtype=object))
image = grpc.InferInput("image", [pixels.size], "UINT8")
image.set_shared_memory("pixels", pixels.nbytes)
answers: queue.Queue = queue.Queue()
region = cuda_shm.create_shared_memory_region("pixels", pixels.nbytes, 0)
try:
    cuda_shm.set_shared_memory_region(region, [pixels.reshape(-1)])
    with grpc.InferenceServerClient("localhost:8001") as client:
        client.register_cuda_shared_memory("pixels", cuda_shm.get_raw_handle(region), 0, pixels.nbytes, headers=KEY)
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("qwen_image_edit", [given, image])
        result, error = answers.get(timeout=600)
        client.unregister_cuda_shared_memory("pixels", headers=KEY)
finally:
    cuda_shm.destroy_shared_memory_region(region)
if error is not None:
    raise error
print(result.as_numpy("image").shape)
