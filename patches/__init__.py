# SPDX-License-Identifier: Apache-2.0
"""The built-in patches, installed as ``vllm_omni_patch.patches.<name>``; each folder declares one ``PATCH``."""
