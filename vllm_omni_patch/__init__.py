# SPDX-License-Identifier: Apache-2.0
"""A patch set for stock vLLM, switched on by ``VLLM_OMNI_PATCH``. Importing this package changes nothing."""

__version__ = "0.1.0"
