# SPDX-License-Identifier: Apache-2.0
"""Measure the walk over a model of 100,000 modules, and ``named_modules()`` on the same model.

    python scripts/bench_collect.py [--modules 100000] [--rounds 5]

Prints the fastest round of both and their ratio. Exit status 1 if the walk takes longer than ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import time

import torch

from vllm_omni_patch.patches.model_local_kv.collect import collect


class Leaf(torch.nn.Module):
    """A module without children."""


class Layer(torch.nn.Module):
    """Nine leaves in three groups, as a decoder layer has attention, feed-forward and norms."""

    def __init__(self) -> None:
        super().__init__()
        for group in ("attention", "feed_forward", "norms"):
            setattr(self, group, torch.nn.ModuleList([Leaf() for _ in range(3)]))


class Declarer(torch.nn.Module):
    """An owner that is asked and holds nothing."""

    def model_local_kv_specs(self) -> list[object]:
        """Nothing held."""
        return []


def main() -> int:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=0.2, help="seconds")
    options = parser.parse_args()
    root = torch.nn.ModuleList([Layer() for _ in range(options.modules // 13)])
    root.append(Declarer())
    count = sum(1 for _ in root.modules())
    ours, stock = [], []
    for _ in range(options.rounds):
        start = time.perf_counter()
        found = collect([("", root)], max_num_seqs=1)
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        sum(1 for _ in root.named_modules())
        stock.append(time.perf_counter() - start)
        if found.modules != count or found.declarers != 1:
            raise RuntimeError(f"walked {found.modules} of {count} modules, {found.declarers} of 1 declarers")
    print(f"{count} modules: walk {min(ours):.3f} s, named_modules() alone {min(stock):.3f} s,", end=" ")
    print(f"ratio {min(ours) / min(stock):.2f}; limit {options.limit} s")
    return 0 if min(ours) <= options.limit else 1


if __name__ == "__main__":
    raise SystemExit(main())
