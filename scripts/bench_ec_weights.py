#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure a check of the encoder's weights in a step that loads or stores, and a put and a get of 8 MiB.

    python scripts/bench_ec_weights.py [--layers 24 48] [--width 1024] [--mib 8] [--reps 40] [--device cuda]

The models are vision towers with 16 parameters per layer, in bfloat16, with every page written. All rows are measured
in each repetition, in varying order. The script prints medians and ratios to ``get (shm)`` of the calling
thread's CPU time (which a busy machine disturbs less), or of the wall time with a device:

    memcpy          dst.copy_(src), on the tower's device
    put, get (shm)  the encoder cache engine on shared memory; a get copies the output to the device
    check           one check of unchanged weights; with --device cuda it waits for the device, as in a step
    check, moved    the same after every parameter moved to other memory
    list parameters only listing the model's parameters; a check does this too, in a faster way
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

from vllm_omni_patch.patches.ec_connector.cache import ECCacheEngine, ECConfig, ModelIdentity
from vllm_omni_patch.patches.ec_connector.vllm.weights import WeightsSample

MIB = 1 << 20


def layer(width: int) -> nn.Module:
    """One block of a vision transformer, its three projections apart: 16 parameters."""
    linear = {name: nn.Linear(width, width) for name in ("q", "k", "v", "out")}
    mlp = {"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)}
    return nn.ModuleDict({**linear, **mlp, "norm1": nn.LayerNorm(width), "norm2": nn.LayerNorm(width)})


def tower(layers: int, width: int, device: str) -> nn.Module:
    """A tower without a language model beside it."""
    with torch.device(device):
        model = nn.ModuleDict({str(index): layer(width) for index in range(layers)}).to(torch.bfloat16)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(False).fill_(number)
    return model


def measure(layers: int, args: argparse.Namespace) -> None:
    """Print the rows for one tower."""
    model = tower(layers, args.width, args.device)
    parameters = list(model.parameters())
    output = torch.randn(args.mib * MIB // 4096, 2048, device=args.device).to(torch.bfloat16)
    target = torch.empty_like(output)
    watch = WeightsSample(lambda: model)
    mib = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / MIB
    times: dict[str, list[float]] = {}

    clock = time.thread_time if args.device == "cpu" else time.perf_counter

    def timed(name: str, call: Callable[[], object], wanted: object = None) -> None:
        began = clock()
        found = call()
        if args.device != "cpu":
            torch.accelerator.synchronize()
        times.setdefault(name, []).append(clock() - began)
        if wanted is not None and found is not wanted:
            raise SystemExit(f"{name} answered {found!r}")

    with tempfile.TemporaryDirectory(prefix="ec-bench-", dir=args.shm) as shm:
        engine = ECCacheEngine(
            ECConfig(shm_path=shm, stats_seconds=0),
            ModelIdentity("m", engine_id="weights"),
            role="worker",
            dtype=torch.bfloat16,
            device_type=args.device,
        )
        for rep in range(args.reps + 3):
            if rep == 3:
                times.clear()  # the first only warm up
            name = f"item-{rep}"
            rows: list[Callable[[], None]] = [
                lambda: timed("check", watch.changed, False),
                lambda: timed("memcpy", lambda: target.copy_(output)),
                lambda: timed("list parameters", lambda: list(model.parameters())),
            ]
            for row in rows[rep % 3 :] + rows[: rep % 3]:
                row()
            timed("put (shm)", lambda name=name: engine.put(name, output), True)  # type: ignore[misc]
            engine.flush(60)
            timed("get (shm)", lambda name=name: engine.get(name, args.device))  # type: ignore[misc]
            engine.discard(name)
            timed("check", watch.changed, False)
            if rep % 8 == 0:
                for parameter in parameters:
                    parameter.data = parameter.data.clone()
                timed("check, moved", watch.changed, False)
        engine.close()
    base = statistics.median(times["get (shm)"])
    print(f"{len(parameters)} parameters, {mib:.0f} MiB, on {args.device}; an output of {args.mib} MiB")
    for name in ("memcpy", "put (shm)", "get (shm)", "check", "check, moved", "list parameters"):
        median = statistics.median(times[name])
        print(f"  {name:15s} {1e6 * median:9.0f} us  {median / base:6.2f} x get")


def main() -> None:
    """Measure each tower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 48])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--reps", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shm", default="/dev/shm")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for layers in args.layers:
        measure(layers, args)


if __name__ == "__main__":
    main()
