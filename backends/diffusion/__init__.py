# SPDX-License-Identifier: Apache-2.0
"""The diffusion engine: continuous batching of image requests."""
