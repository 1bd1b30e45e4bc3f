# SPDX-License-Identifier: Apache-2.0
"""Deploy files: read in layers, checked, turned into the values of config/schema.py. Never read while serving."""
