# SPDX-License-Identifier: Apache-2.0
"""Harnesses, contracts, fakes and tiny models for tests and benchmarks."""
