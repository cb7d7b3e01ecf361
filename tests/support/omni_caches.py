# SPDX-License-Identifier: Apache-2.0
"""Build the cache owners of an installed vLLM-Omni with small widths, and measure the caches they really hold.

Importing this skips the test module where vLLM-Omni is not installed.

The widths that a cache does not see (feed-forward, vocabulary, codebooks) are shrunk; layers, heads, head size, dtype
and length are the published ones, so that the bytes are the ones of a deployment.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

if importlib.util.find_spec("vllm_omni") is None:
    pytest.skip(
        "vLLM-Omni is not installed; scripts/check_families.py makes an environment for it", allow_module_level=True
    )
import torch

from vllm_omni_patch.patch import Hook
from vllm_omni_patch.patches.model_local_kv import PATCH
from vllm_omni_patch.patches.model_local_kv.collect import Collection, Entry, collect

MiB = 1 << 20
KiB = 1 << 10
MODELS = "vllm_omni.model_executor.models."


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for torchvision and torchaudio, whose builds do not load beside a CPU torch.

    Their names are imported at module level by code that no cache passes through; what they hold is a mock.
    """

    names = ("torchvision", "torchaudio")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        mock = MagicMock(name=spec.name)
        mock.__spec__, mock.__path__, mock.__name__ = spec, [], spec.name
        mock.__version__ = "0.0"
        return mock

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


def omni_release() -> tuple[int, int]:
    """Import the installed vLLM-Omni; its release as (major, minor)."""
    import transformers.utils
    from packaging.version import Version

    # transformers must have decided that there is no torchvision before the stand-in turns up.
    transformers.utils.is_torchvision_available()
    if not any(isinstance(finder, Absent) for finder in sys.meta_path):
        missing = [name for name in Absent.names if importlib.util.find_spec(name) is None]
        if missing:
            sys.meta_path.append(Absent())
    import vllm_omni

    release = Version(vllm_omni.__version__).release
    return release[0], release[1]


def since(major: int, minor: int) -> pytest.MarkDecorator:
    """Run from this release on."""
    here = omni_release()
    return pytest.mark.skipif((major, minor) > here, reason=f"vLLM-Omni {here} is older than {major}.{minor}")


def before(major: int, minor: int) -> pytest.MarkDecorator:
    """Run in releases older than this one."""
    here = omni_release()
    return pytest.mark.skipif((major, minor) <= here, reason=f"vLLM-Omni {here} is not older than {major}.{minor}")


def module(name: str) -> Any:
    """Import a module below ``vllm_omni.model_executor.models``."""
    import transformers

    # Without torchvision transformers exports a placeholder that refuses to be registered with.
    automatic = importlib.import_module("transformers.models.auto.image_processing_auto")
    transformers.AutoImageProcessor = automatic.AutoImageProcessor
    return importlib.import_module(MODELS + name)


@contextlib.contextmanager
def installed(*names: str) -> Iterator[None]:
    """Install the family targets of the modules ``names``, read them back, and undo them."""
    targets = [t for t in PATCH.targets if t.module in names and "families" in t.install]
    assert targets, f"no family target for {names}"
    undos = []
    for target in targets:
        owner = importlib.import_module(target.module)
        hook = Hook(PATCH, target, owner, owner, target.qualname, getattr(owner, target.qualname))
        undos.append(_resolve(target.install)(hook))
        assert _resolve(target.verify)(hook)
    try:
        yield
    finally:
        for undo in reversed(undos):
            undo()


def _resolve(name: str) -> Any:
    home, _, function = name.partition(":")
    return getattr(importlib.import_module(home), function)


def declared(owner: Any, vllm_config: Any = None, max_num_seqs: int = 1) -> Collection:
    """What the collector reads from ``owner``; a declarer that raised fails the test."""
    found = collect([("", owner)], max_num_seqs=max_num_seqs, vllm_config=vllm_config)
    assert not found.failed, found.failed[0].traceback
    return found


def entry(found: Collection, name: str) -> Entry:
    """The only entry called ``name``."""
    (one,) = [e for e in found.entries if e.name == name]
    return one


def cache_tensors(caches: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Keys and values of transformers caches that hold something."""
    for cache in caches:
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                if tensor is not None and tensor.numel():
                    yield tensor


def view_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the tensors show."""
    return sum(t.numel() * t.element_size() for t in tensors)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind the tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class Table:
    """What was declared and what was measured, for ``scripts/check_families.py``, which names the file to write."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, family: str, what: str, declared: int, measured: int, note: str = "") -> None:
        """Note a pair of byte counts. The test asserts on them itself."""
        self.rows.append({"family": family, "what": what, "declared": declared, "measured": measured, "note": note})
        path = os.environ.get("FAMILIES_TABLE")
        if path:
            Path(path).write_text(json.dumps(self.rows, indent=1))


TABLE = Table()


# --- Qwen3-TTS ----------------------------------------------------------------------------------------------------

QWEN3 = "qwen3_tts.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2"
QWEN3_WIDTHS = {
    # Published: 8 layers, 16 heads of 64, window 72.
    "head_dim": 64,
    "hidden_size": 32,
    "latent_dim": 32,
    "codebook_dim": 32,
    "codebook_size": 16,
    "decoder_dim": 32,
    "intermediate_size": 32,
    "upsample_rates": (2, 2),
    "upsampling_ratios": (2, 2),
    "num_quantizers": 4,
}


def qwen3_config(folder: Path, **connector: Any) -> SimpleNamespace:
    """The settings that ``Qwen3TTSCode2Wav`` reads, as the shipped deployment sets them, and a checkpoint for it."""
    from safetensors.torch import save_file
    from vllm.config import LoadConfig

    configuration = module("qwen3_tts.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2")
    config = configuration.Qwen3TTSTokenizerV2Config(decoder_config=QWEN3_WIDTHS)
    config.save_pretrained(folder / "speech_tokenizer")
    decoder = module(QWEN3).Qwen3TTSTokenizerV2Decoder._from_config(config.decoder_config)
    weights = {f"decoder.{name}": value.contiguous() for name, value in decoder.state_dict().items()}
    save_file(weights, folder / "speech_tokenizer" / "model.safetensors")
    extra = {"codec_chunk_frames": 25, "codec_left_context_frames": 72, **connector}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            revision=None,
            async_chunk=True,
            dtype=torch.bfloat16,
            enforce_eager=True,
            stage_connector_config={"extra": extra},
        ),
        load_config=LoadConfig(),
        device_config=SimpleNamespace(device=torch.device("cpu")),
        scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=8192),
    )


def qwen3_stage(vllm_config: Any) -> Any:
    """The real stage, loaded by its own ``load_weights``: the dtype is the one that the release casts to."""
    stage = module("qwen3_tts.qwen3_tts_code2wav").Qwen3TTSCode2Wav(vllm_config=vllm_config)
    stage.load_weights([])
    return stage


# --- MiMo-Audio ---------------------------------------------------------------------------------------------------

MIMO = "mimo_audio.mimo_audio_llm"


def mimo_model() -> Any:
    """The real class with its two local transformers and what their loops read; the 36-layer LLM is left out."""
    mimo = module(MIMO)
    config = module("mimo_audio.config_mimo_audio").MiMoAudioConfig(
        num_hidden_layers=36,
        local_ffn_dim=32,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
    )
    model = mimo.MiMoAudioLLMForConditionalGeneration.__new__(mimo.MiMoAudioLLMForConditionalGeneration)
    torch.nn.Module.__init__(model)
    model.config = config
    model.local_config, model.input_local_config = config.local_config(), config.input_local_config()
    model.group_size, model.audio_channels = config.group_size, config.audio_channels
    model.delay_pattern = config.parsed_delay_pattern()
    model.speech_empty_ids, model.speech_vocab_sizes = (
        config.parsed_speech_empty_ids(),
        config.parsed_speech_vocab_sizes(),
    )
    model.local_transformer = mimo.MiMoAudioQwen2Model(model.local_config)
    model.input_local_transformer = mimo.MiMoAudioQwen2Model(model.input_local_config)
    width, input_width = model.local_config.hidden_size, model.input_local_config.hidden_size
    model.local_transformer_lm_heads = torch.nn.ModuleList(
        [torch.nn.Linear(width, size, bias=False) for size in model.speech_vocab_sizes[: model.audio_channels]]
    )
    model.speech_embeddings = torch.nn.ModuleList(
        [torch.nn.Embedding(size, input_width) for size in model.speech_vocab_sizes[: model.audio_channels]]
    )
    model.speech_embeddings_to_local = None if width == input_width else torch.nn.Linear(input_width, width, bias=False)
    model.local_forward_cg_by_bs, model.input_local_transformer_cg_by_bs = {}, {}
    return model.to(torch.bfloat16).eval()


def mimo_captured(model: Any) -> None:
    """Note every bucket as captured, as the constructor does on CUDA, with the release's own capture classes."""
    mimo = module(MIMO)
    for size in mimo.MIMO_CUDAGRAPH_BATCH_SIZES:
        model.local_forward_cg_by_bs[size] = mimo.MiMoLocalDecodeCudaGraph(None, None, None, size)
        model.input_local_transformer_cg_by_bs[size] = mimo.MiMoInputLocalTransformerCudaGraph(None, None, None, size)


def mimo_caches(model: Any, rows: int) -> tuple[Any, Any]:
    """The caches of one local decode and one group encoding at ``rows`` rows, as the release's code makes them."""
    held: list[Any] = []
    hooks = [
        part.register_forward_hook(lambda _module, _args, output: held.append(output.past_key_values))
        for part in (model.local_transformer, model.input_local_transformer)
    ]
    with torch.no_grad():
        model.base_local_forward(torch.zeros(rows, 1, model.local_config.hidden_size, dtype=torch.bfloat16))
        decode = held[-1]
        width = model.input_local_config.hidden_size
        model.apply_input_local_transformer(torch.zeros(1, rows, model.group_size, width, dtype=torch.bfloat16))
        encode = held[-1]
    for hook in hooks:
        hook.remove()
    return decode, encode


# --- MiniCPM-o ----------------------------------------------------------------------------------------------------

MINICPM = "minicpmo_4_5.minicpmo_4_5_omni_llm"


def minicpm_encoder() -> Any:
    """The real streaming Whisper encoder: 24 layers, 16 heads of 64, 1500 positions, bfloat16."""
    from transformers import WhisperConfig

    config = WhisperConfig(
        d_model=1024,
        encoder_layers=24,
        encoder_attention_heads=16,
        encoder_ffn_dim=32,
        decoder_layers=1,
        decoder_ffn_dim=32,
        num_mel_bins=80,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    config._attn_implementation = "sdpa"
    return module(MINICPM).MiniCPMWhisperEncoder(config).to(torch.bfloat16).eval()


def minicpm_stream(encoder: Any, chunks: int) -> Any:
    """Hear ``chunks`` chunks of 50 positions (one second) in one session; returns the session's cache, or ``None``."""
    if omni_release() < (0, 28):
        # The session's runtime puts back a method that transformers dropped, before it streams.
        home = importlib.import_module("vllm_omni.experimental.fullduplex.minicpmo45.stage0")
        (runtime,) = [kind for kind in vars(home).values() if hasattr(kind, "_ensure_dynamic_cache_compat")]
        runtime._ensure_dynamic_cache_compat()
    cache = None
    with torch.no_grad():
        for _ in range(chunks):
            heard = encoder(
                torch.zeros(1, 80, 100, dtype=torch.bfloat16),
                past_key_values=cache,
                use_cache=True,
                output_hidden_states=True,
                return_dict=True,
            )
            cache = heard.past_key_values
    return cache


def duplex_config(**settings: Any) -> SimpleNamespace:
    """A ``VllmConfig``'s part that says in which mode sessions run."""
    return SimpleNamespace(model_config=SimpleNamespace(**settings))


# --- ming-flash-omni ----------------------------------------------------------------------------------------------


def ming_generator() -> Any:
    """The real generator around a real ``Qwen2Model``: 24 layers, 2 heads of 64, bfloat16."""
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(
        hidden_size=896,
        num_attention_heads=14,
        num_key_value_heads=2,
        num_hidden_layers=24,
        intermediate_size=32,
        vocab_size=64,
    )
    config._attn_implementation = "sdpa"
    return module("ming_flash_omni.talker_module").MingAudioGenerator(
        config=None,
        llm_config=config,
        model=Qwen2Model(config).to(torch.bfloat16).eval(),
        cfm=None,
        aggregator=None,
        stop_head=None,
        audio_vae=None,
        patch_size=4,
        his_patch_size=4,
        latent_dim=4,
        cfg_strength=1.0,
        use_cuda_graphs=False,
    )
