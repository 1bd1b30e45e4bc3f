# SPDX-License-Identifier: Apache-2.0
"""The OpenAI proxy: HTTP in front, the server over gRPC behind. `python -m triton_omni.openai` runs it."""
