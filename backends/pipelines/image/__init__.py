# SPDX-License-Identifier: Apache-2.0
"""Pipeline `image`: text to image."""
