# SPDX-License-Identifier: Apache-2.0
"""Faults in the storage under a real vLLM: python scripts/fault_ec_vllm.py --help"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.ec_faults_vllm import main

sys.exit(main())
