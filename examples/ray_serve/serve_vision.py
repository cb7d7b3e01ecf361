# SPDX-License-Identifier: Apache-2.0
"""A vision model on Ray Serve LLM whose replicas share encoder outputs through one redis.

MODEL=YOUR_MODEL REDIS=redis://HOST:6379 serve run serve_vision:app

Every node needs vllm-omni-patch[lmcache] beside vLLM: in its image, or as "pip" in the ``runtime_env`` below.
"""

from __future__ import annotations

import os

from ray.serve.llm import LLMConfig, build_openai_app

vision = LLMConfig(
    model_loading_config={"model_id": "vision", "model_source": os.environ["MODEL"]},
    deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 8}},
    # The same as the options of `vllm serve`.
    engine_kwargs={"ec_transfer_config": {"ec_connector": "LMCacheECConnector", "ec_role": "ec_both"}},
    # The flag must reach the replicas and their workers; Ray sets these variables in all of them.
    runtime_env={"env_vars": {"VLLM_OMNI_PATCH": "1", "LMCACHE_EC_REMOTE_URL": os.environ["REDIS"]}},
)
app = build_openai_app({"llm_configs": [vision]})
