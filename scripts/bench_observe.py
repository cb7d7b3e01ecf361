# SPDX-License-Identifier: Apache-2.0
"""Cost of the observation on a generate loop of a small transformers model, measured side by side in one run.

    python scripts/bench_observe.py [--rounds 30] [--tokens 32] [--limit 1.02]

Rounds with and without observation alternate, and which of the two comes first alternates too, so that a change of the
machine's speed hits both. The exit code is 1 when the ratio of the best rounds is above ``--limit``. Also printed: the
time that measuring took by itself, and the plain cost of making and dropping a cache.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache, DynamicCache
from vllm_omni_patch.patches.model_local_kv.observe import Observer


def generate_loop(model: Any, tokens: int, requests: int) -> Callable[[], None]:
    """``requests`` greedy generations of ``tokens`` tokens each, every one with its own cache."""
    prompt = torch.arange(8).reshape(1, 8)

    def loop() -> None:
        for _ in range(requests):
            model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)

    return loop


def copy_loop(caches: int) -> Callable[[], None]:
    """Make ``caches`` empty caches and drop them: nothing but what the observation adds to."""

    def loop() -> None:
        for _ in range(caches):
            DynamicCache()

    return loop


def timed(loop: Callable[[], None]) -> float:
    """Seconds of CPU that this process spends in one call, our measuring thread included.

    CPU and not wall time: a neighbour on the machine changes the second more than what is measured here.
    """
    start = time.process_time()
    loop()
    return time.process_time() - start


def alternate(loop: Callable[[], None], rounds: int, interval: float) -> tuple[list[float], list[float], Observer]:
    """Seconds of each round without and with observation."""
    off: list[float] = []
    on: list[float] = []
    observer = Observer(interval=interval)
    loop()
    for index in range(rounds):
        for watched in (False, True) if index % 2 else (True, False):
            undo: Callable[[], None] = lambda: None  # noqa: E731
            if watched:
                observer = Observer(interval=interval)
                undo = observer.install(Cache)
            gc.collect()
            (on if watched else off).append(timed(loop))
            undo()
    return off, on, observer


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two measurements")
    parser.add_argument("--limit", type=float, default=1.02, help="largest accepted ratio of the best rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=128,
        intermediate_size=256,
        vocab_size=512,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    loop = generate_loop(model, options.tokens, options.requests)
    off, on, observer = alternate(loop, options.rounds, options.interval)
    ratio = min(on) / min(off)
    print(
        f"generate ({options.requests} x {options.tokens} tokens, {options.layers} layers), CPU time, "
        f"{options.rounds} rounds each: best off {min(off) * 1e3:.1f} ms, on {min(on) * 1e3:.1f} ms, "
        f"ratio {ratio:.4f}; "
        f"median off {statistics.median(off) * 1e3:.1f} ms, on {statistics.median(on) * 1e3:.1f} ms, "
        f"ratio {statistics.median(on) / statistics.median(off):.4f}"
    )
    print(
        f"measuring in the last round: {observer.samples} times, {observer.seconds * 1e3:.2f} ms in all, "
        f"{observer.seconds / on[-1]:.4%} of it"
    )
    off, on, _ = alternate(copy_loop(2000), 5, options.interval)
    print(
        f"an empty cache made and dropped: off {min(off) / 2000 * 1e6:.2f} us, on {min(on) / 2000 * 1e6:.2f} us "
        f"(transformers {transformers.__version__}, torch {torch.__version__})"
    )
    if ratio > options.limit:
        print(f"above the limit of {options.limit}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
