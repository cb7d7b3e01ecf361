#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every patch checked on the vLLM that this Python has; prints RESULT {json}. Called by live_matrix.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.live_release import main

main()
