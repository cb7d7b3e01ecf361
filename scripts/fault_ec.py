#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Faults in the storage of the engine alone, without vLLM: python scripts/fault_ec.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.ec_faults_engine import main

# Processes that it starts import this file again.
if __name__ == "__main__":
    sys.exit(main())
