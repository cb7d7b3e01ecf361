# SPDX-License-Identifier: Apache-2.0
"""One module per model family. A module is ``families/<name>.py`` and is listed in :data:`FAMILIES`.

It holds ``TARGETS: tuple[Target, ...]``, one per owner class: ``module`` is the module to wait for, ``qualname`` the
owner class, ``optional=True``; ``install`` names a function that takes the ``Hook``, adds ``specs.METHOD`` to the class
``hook.original`` and returns the undo; ``verify`` names one that reads it back. The modules are imported before torch,
so whatever is heavy is imported inside functions.

Where a release declares natively, ``specs.METHOD`` is left alone and ours goes under ``specs.CORRECTED``.

What no module declares, because its bound is not in the config, is left to the observation and to the walk that lists
suspects: the flow caches of MiniCPM-o and Step-Audio2 (bounded by the prompt's mel frames), Audex and the VAE of
ming_tts (bounded by the utterance), the eager sessions of Nemotron VoiceChat (bounded by the session), and the
generation of Qwen3-TTS in vLLM-Omni 0.14 (bounded by ``max_new_tokens`` of the request).
"""

from __future__ import annotations

FAMILIES: tuple[str, ...] = (
    "qwen3_tts",
    "mimo_audio",
    "minicpm_o",
    "ming_talker",
    "moss_tts",
    "personaplex",
    "fast_ar",
    "nemotron_voicechat",
    "deepseek_ocr2",
)
"""Names of the modules of this package that declare targets, in the order in which they are registered."""
