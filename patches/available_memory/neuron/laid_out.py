# SPDX-License-Identifier: Apache-2.0
"""KV that NxD Inference has laid out while the model loaded, as the loaded model reports it.

The plugin's releases 0.1 to 0.5 put the library's configuration on their model (``model.neuron_config``). With a block
layout ``pa_num_blocks`` blocks exist, and with prefix caching one more that takes the writes of padding. With the
contiguous layout there is one block per sequence, chosen by the plugin and not by vLLM's block numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LaidOut:
    """KV that the inference library has laid out already: ``blocks`` that vLLM may use, of ``block_bytes`` each as
    vLLM divides a budget. ``warning`` is for the log; empty when all is well.
    """

    blocks: int
    block_bytes: int
    source: str
    warning: str = ""


def laid_out(model: Any, block_size: int, block_bytes: int, max_num_seqs: int, max_model_len: int) -> LaidOut | None:
    """The KV blocks of ``model``; ``None`` where it reports none, or blocks of another size than vLLM's.

    ``block_size`` and the lengths are in tokens; ``block_bytes`` is one block over all layers that vLLM knows.
    """
    config = getattr(model, "neuron_config", None)
    is_block_layout = getattr(config, "is_block_kv_layout", None)
    if not isinstance(is_block_layout, bool):
        return None
    if not is_block_layout:
        if max_num_seqs < 1:
            return None
        # vLLM reserves one block and never uses it.
        return LaidOut(max_num_seqs + 1, block_bytes, "contiguous KV: max_num_seqs + 1")
    blocks, size = _count(config, "pa_num_blocks"), _count(config, "pa_block_size")
    if blocks is None or size != block_size:
        return None
    # vLLM reserves one block. Where the rest does not hold one request, newer releases of vLLM do not start and older
    # ones never schedule that request; the unpatched plugin plans more blocks than exist, and starts.
    one_request = -(-max_model_len // block_size) + 1
    warning = ""
    if blocks < one_request:
        warning = (
            f"The compiled model has {blocks} KV blocks, of which vLLM reserves one, so {one_request} are planned: a "
            f"request of more than {(blocks - 1) * block_size} tokens writes into a block of another request. To fix: "
            f"compile again with --num-gpu-blocks-override {one_request - 1}; the plugin adds the reserved block."
        )
    source = "neuron_config.pa_num_blocks of the loaded model"
    return LaidOut(max(blocks, one_request), block_bytes, source, warning)


def _count(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
