# SPDX-License-Identifier: Apache-2.0
"""Tests; `tests.kit` is what they and `perf` share."""
