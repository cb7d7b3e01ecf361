# SPDX-License-Identifier: Apache-2.0
"""One module per model family, ``families/<name>.py``, imported when its model's module is; see ``targets.py``.

A module holds one function per target that takes the ``Hook``, adds ``specs.METHOD`` to the class ``hook.original`` and
returns the undo. Where a release declares natively, ``specs.METHOD`` is left alone and ours goes under
``specs.CORRECTED``.

What no module declares, because its bound is not in the config, is left to the observation and to the walk that lists
suspects: the flow caches of MiniCPM-o and Step-Audio2 (bounded by the prompt's mel frames), Audex and the VAE of
ming_tts (bounded by the utterance), the eager sessions of Nemotron VoiceChat (bounded by the session), and the
generation of Qwen3-TTS in vLLM-Omni 0.14 (bounded by ``max_new_tokens`` of the request).
"""
