# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of observation on a generate loop of a small transformers model, side by side in one run.

    python scripts/bench_observe.py [--rounds 100] [--tokens 32] [--limit 1.02]

Rounds with and without observation alternate, and so does which of the two is first, so a change of the
machine's speed affects both. The script prints the ratios of the quiet rounds and of the medians, the CPU time spent
inside the observation (which a busy machine does not affect), and the cost of creating and dropping a cache. Exit
status 1 if both ratios, or that share alone, are above ``--limit``.
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

from vllm_omni_patch.patches.model_local_kv.observe.observer import Observer


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


def quiet(seconds: list[float]) -> float:
    """Mean of the fastest quarter of the rounds: those that a neighbour on the machine disturbed least."""
    return statistics.fmean(sorted(seconds)[: max(1, len(seconds) // 4)])


class Timed(Observer):
    """Adds up the CPU time that this thread spends inside the observation."""

    inside = 0.0

    def _born(self, instance: Any, frame: Any) -> None:
        start = time.thread_time()
        super()._born(instance, frame)
        self.inside += time.thread_time() - start

    def _gone(self, instance: Any) -> None:
        start = time.thread_time()
        super()._gone(instance)
        self.inside += time.thread_time() - start


def alternate(loop: Callable[[], None], rounds: int, interval: float) -> tuple[list[float], list[float], float]:
    """Seconds of each round without and with observation, and those of the latter that went into the observation."""
    off: list[float] = []
    on: list[float] = []
    inside = 0.0
    loop()
    for index in range(rounds):
        for watched in (False, True) if index % 2 else (True, False):
            # Both kinds of round begin with an install, because changing a class makes the interpreter forget what it
            # had optimised; a server installs once.
            one = Timed(interval=interval)
            undo = one.install(Cache)
            if not watched:
                undo()
            gc.collect()
            (on if watched else off).append(timed(loop))
            if watched:
                undo()
                inside += one.inside
    return off, on, inside


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two measurements")
    parser.add_argument("--limit", type=float, default=1.02, help="largest accepted ratio")
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
    off, on, inside = alternate(loop, options.rounds, options.interval)
    quiet_off, quiet_on = quiet(off), quiet(on)
    ratio = quiet_on / quiet_off
    print(
        f"generate ({options.requests} x {options.tokens} tokens, {options.layers} layers), CPU time, "
        f"{options.rounds} rounds each: quiet quarter off {quiet_off * 1e3:.2f} ms, on {quiet_on * 1e3:.2f} ms, "
        f"ratio {ratio:.4f}; "
        f"median off {statistics.median(off) * 1e3:.1f} ms, on {statistics.median(on) * 1e3:.1f} ms, "
        f"ratio {statistics.median(on) / statistics.median(off):.4f}"
    )
    print(f"inside the observation: {inside / len(on) * 1e3:.3f} ms a round, {inside / sum(on):.3%} of the CPU time")
    middle = statistics.median(on) / statistics.median(off)
    too_slow = min(ratio, middle) > options.limit or inside / sum(on) > options.limit - 1
    off, on, _ = alternate(copy_loop(2000), 5, options.interval)
    print(
        f"an empty cache made and dropped: off {min(off) / 2000 * 1e6:.2f} us, on {min(on) / 2000 * 1e6:.2f} us "
        f"(transformers {transformers.__version__}, torch {torch.__version__})"
    )
    if too_slow:
        print(f"above the limit of {options.limit}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
