# SPDX-License-Identifier: Apache-2.0
"""The owner classes of every family, declared. A family's own module is imported when its model's module is."""

from __future__ import annotations

from vllm_omni_patch.patch import Contract, Target

_MODELS = "vllm_omni.model_executor.models."
_FAST_AR = Contract(base_methods=("_ensure_buffers",), class_attributes=("config", "_num_codebooks"))


def _owner(
    family: str,
    module: str,
    owner: str,
    note: str,
    contract: Contract,
    install: str = "install",
    distribution: str = "vllm-omni",
) -> Target:
    """The target of one owner class of ``families/<family>.py``.

    ``module`` is relative to ``vllm_omni.model_executor.models`` unless ``distribution`` is another one. Every owner
    is optional: a release without the model is an ordinary one.
    """
    return Target(
        module=_MODELS + module if distribution == "vllm-omni" else module,
        qualname=owner,
        install=f"{__package__}.{family}:{install}",
        verify=f"{__package__}.attach:declares",
        distribution=distribution,
        contract=contract,
        optional=True,
        note=note,
    )


TARGETS: tuple[Target, ...] = (
    _owner(
        "qwen3_tts",
        "qwen3_tts.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2",
        "Qwen3TTSTokenizerV2Decoder",
        "codec decoder: per-request cache, working copies, captured graphs; inert before 0.28",
        Contract(base_methods=("forward",), class_attributes=("pre_transformer",)),
    ),
    _owner(
        "mimo_audio",
        "mimo_audio.mimo_audio_llm",
        "MiMoAudioLLMForConditionalGeneration",
        "local transformers: one cache per call, and captured buckets",
        Contract(
            base_methods=("base_local_forward",),
            class_attributes=(
                "local_config",
                "input_local_config",
                "local_transformer",
                "input_local_transformer",
                "group_size",
                "delay_pattern",
                "local_forward_cg_by_bs",
                "input_local_transformer_cg_by_bs",
            ),
        ),
    ),
    _owner(
        "minicpm_o",
        "minicpmo_4_5.minicpmo_4_5_omni_llm",
        "MiniCPMWhisperEncoder",
        "one encoder cache per duplex session; inert before 0.28 and in turn mode",
        Contract(
            base_methods=("forward",),
            class_attributes=("layers",),
            module_attributes=("MiniCPMO45OmniLLMForConditionalGeneration",),
        ),
    ),
    _owner(
        "ming_talker",
        "ming_flash_omni.talker_module",
        "MingAudioGenerator",
        "static cache of the talker, one request at a time",
        Contract(base_methods=("_init_kv_cache",), class_attributes=("_llm_config", "_model")),
    ),
    _owner(
        "ming_talker",
        "ming_flash_omni.ming_flash_omni_talker",
        "MingFlashOmniTalkerForConditionalGeneration",
        "answers for its audio_generator, which is not a submodule",
        Contract(base_methods=("forward",), class_attributes=("audio_generator",)),
        install="install_talker",
    ),
    *(
        _owner(
            "moss_tts",
            f"moss_tts.{module}",
            "MossAudioTokenizerModel",
            "streaming decoder: a ring per attention and slot",
            Contract(class_attributes=("decoder",)),
        )
        for module in ("audio_tokenizer", "audio_tokenizer_v2")
    ),
    _owner(
        "personaplex",
        "personaplex.personaplex_mimi",
        "_MimiStreamingTransformer",
        "ring of the streaming Mimi codec, per session slot",
        Contract(base_methods=("streaming_init",), class_attributes=("layers", "context", "_kv")),
    ),
    _owner(
        "fast_ar",
        "fish_speech.fish_speech_fast_ar",
        "FishSpeechFastAR",
        "per-frame codebook buffers; inert before 0.22",
        _FAST_AR,
    ),
    _owner("fast_ar", "audio8_tts.audio8_tts_fast_ar", "Audio8TTSFastAR", "per-frame codebook buffers", _FAST_AR),
    _owner(
        "nemotron_voicechat",
        "nemotron_voicechat.nemotron_voicechat_talker",
        "NemotronVoiceChatTalkerForConditionalGeneration",
        "static caches of captured decode steps; sessions without them have no bound",
        Contract(base_methods=("forward",), class_attributes=("tts",)),
    ),
    _owner(
        "deepseek_ocr2",
        "vllm.model_executor.models.deepencoder2",
        "Qwen2Decoder2Encoder",
        "a cache that transformers builds by default, per image view",
        Contract(base_methods=("forward",), class_attributes=("model", "query_768", "query_1024")),
        distribution="vllm",
    ),
)
