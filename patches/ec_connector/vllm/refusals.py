# SPDX-License-Identifier: Apache-2.0
"""Configurations that this connector rejects at start, because it would answer wrongly later."""

from __future__ import annotations

import importlib.util
from typing import Any

from .configured import NAME, uses_v2_runner

# 0.17 accepts the role and then treats the instance as an encoder only: no KV cache, no tokens.
EC_BOTH_SINCE = (0, 18)


class ConnectorRefused(ValueError):
    """The connector was chosen for something that it cannot do here. The message names it and the next step."""


def check(vllm_config: Any, release: str) -> None:
    """Reject what cannot work.

    Args:
        release: ``vllm.__version__``.

    Raises:
        ConnectorRefused: role, model or model runner; the message names it.
    """
    transfer = vllm_config.ec_transfer_config
    role = getattr(transfer, "ec_role", None)
    if role == "ec_both" and _older(release, EC_BOTH_SINCE):
        raise ConnectorRefused(role_refusal(release))
    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        raise ConnectorRefused(
            f"{NAME} cannot serve {getattr(model, 'model', 'this model')!r}: it is an encoder-decoder model. vLLM "
            "hands its encoder's output to the decoder in the step that computed it, so a cached one would be left "
            "out and the answer would be wrong. Start vLLM without --ec-transfer-config for this model."
        )
    if uses_v2_runner(vllm_config) and importlib.util.find_spec("vllm.v1.worker.gpu.ec_connector") is None:
        raise ConnectorRefused(
            f"{NAME} needs the V1 model runner on vLLM {release}: the V2 runner takes part in encoder cache transfer "
            "from 0.28.0. Unset VLLM_USE_V2_MODEL_RUNNER, or upgrade vLLM."
        )


def role_refusal(release: str) -> str:
    """The message for ``ec_both`` on a release that cannot do it."""
    return (
        f"ec_role 'ec_both' does not work on vLLM {release or '(unknown release)'}: an instance that both stores and "
        "loads is possible from vLLM 0.18.0. Upgrade vLLM, or run an 'ec_producer' and an 'ec_consumer' instance."
    )


def _older(release: str, first: tuple[int, ...]) -> bool:
    """Whether ``release`` is a known release before ``first``. A development or unknown one is taken as newer."""
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(release)
    except InvalidVersion:
        return False
    return not version.is_devrelease and version.release[: len(first)] < first
