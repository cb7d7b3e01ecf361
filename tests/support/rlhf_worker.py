# SPDX-License-Identifier: Apache-2.0
"""What a trainer puts into vLLM's worker: a method that writes new weights into the running model.

``--worker-extension-cls support.rlhf_worker.Trainer`` with this folder on ``PYTHONPATH``; then ``collective_rpc``.
"""

from __future__ import annotations

from typing import Any


class Trainer:
    """Mixed into vLLM's worker class."""

    def write_encoder(self: Any) -> list[str]:
        """Load other values into the vision side, as trainers do; returns the names that were written.

        Weights that vLLM packed for the CPU are empty afterwards and cannot be written.
        """
        model = self.model_runner.get_model()
        given = {
            name: parameter.detach().neg().contiguous()
            for name, parameter in model.named_parameters()
            if not name.startswith("language_model.") and "embed" in name and parameter.numel()
        }
        loaded = model.load_weights(iter(given.items()))
        return sorted(loaded)
