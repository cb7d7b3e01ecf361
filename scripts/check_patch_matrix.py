#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-patch matrix`` from a checkout: judge the patches' targets on releases and write ``matrix.json``."""

from vllm_omni_patch.commands.matrix import main

if __name__ == "__main__":
    main()
