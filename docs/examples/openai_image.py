# SPDX-License-Identifier: Apache-2.0
"""An image with previews from the openai SDK; writes image.png. The embedded model draws digits in colors."""

import base64
from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url="http://localhost:9000/v1", api_key="none")
stream = client.images.generate(model="image", prompt="a red seven", stream=True, partial_images=2)
for event in stream:
    if event.type == "image_generation.partial_image":
        print("preview", event.partial_image_index)
    elif event.type == "image_generation.completed":
        Path("image.png").write_bytes(base64.b64decode(event.b64_json))
        print("image.png")
