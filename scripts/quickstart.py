#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The quickstart, end to end: one vLLM command on a tiny model, with ``VLLM_OMNI_PATCH`` off and on.

Called by quickstart.sh. Exits 0 and prints ``quickstart: ok`` only if the patched server gives the same answer as the
stock one and serves the image from the cache after a restart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support import engine_process, tiny_model

EC = {"ec_connector": "LMCacheECConnector", "ec_role": "ec_both"}
IMAGE, WARM_UP = 1, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the working folder")
    keep = parser.parse_args().keep
    do_without_a_compiler()
    folder = Path(tempfile.mkdtemp(prefix="vllm-omni-patch-quickstart-"))
    try:
        run(folder)
    except BaseException:
        print(f"logs and reports are in {folder}", file=sys.stderr)
        raise
    if keep:
        print(f"logs and reports are in {folder}")
    else:
        shutil.rmtree(folder)
    print("quickstart: ok")


def run(folder: Path) -> None:
    """Boot, ask, restart, ask again; print what happened.

    Raises:
        SystemExit: the patched server answered differently, or the second one did not hit.
    """
    # A vision tower large enough to show the cost of encoding: 577 patches through 12 layers.
    model = tiny_model.make(str(folder / "model"), vision_layers=12, vision_width=256, image_size=336)
    reports, cache = folder / "reports", folder / "cache"
    settings = {"VLLM_OMNI_PATCH_REPORT_DIR": str(reports), "LMCACHE_EC_LOCAL_DISK": str(cache)}
    command = f"vllm serve MODEL --ec-transfer-config '{json.dumps(EC)}'"

    print(f"\n[1] flag off:  {command}")
    print(f"    vLLM stops: {refusal(model, folder)}")

    print("\n[2] flag off, without that option: the stock answer, and the time with encoding")
    with engine_process.Server(model, str(folder), name="stock", arguments=arguments()) as server:
        server.image(WARM_UP)
        stock = server.image(IMAGE)
    show("image request", stock)

    print(f"\n[3] VLLM_OMNI_PATCH=1 {command}")
    with patched(model, folder, settings, "first") as server:
        server.image(WARM_UP)
        first = server.image(IMAGE)
        wait_until_stored(server, 2)
    show("image request, encoded and stored", first)

    print("\n[4] the same command again, in new processes")
    with patched(model, folder, settings, "restarted") as server:
        server.image(WARM_UP + 1)
        again = server.image(IMAGE)
        hits = metric(server.get("/metrics"), "vllm_omni_patch_ec_hits_total")
        status(reports)
    show("image request, after the restart", again)

    print(f"\nencoder cache hits after the restart: {hits:g}")
    print(f"request times: stock {stock.seconds * 1000:.0f} ms, hit after restart {again.seconds * 1000:.0f} ms")
    if not (stock.same(first, 1e-5) and stock.same(again, 1e-5)):
        sys.exit(f"the answers differ: stock {stock}, first {first}, after the restart {again}")
    if hits < 1:
        sys.exit("the restarted server did not find the stored entry")


def do_without_a_compiler() -> None:
    """vLLM compiles a few operations while it serves; without a compiler, turn compilation off."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which(os.environ.get("CXX", "g++")) is None or not headers.exists():
        os.environ["TORCH_COMPILE_DISABLE"] = "1"


def arguments() -> list[str]:
    """Further vLLM arguments: on a GPU, a dtype that its attention kernels take."""
    import torch

    return ["--dtype", "bfloat16"] if torch.cuda.is_available() else []


def patched(model: str, folder: Path, settings: dict[str, str], name: str) -> engine_process.Server:
    return engine_process.Server(model, str(folder), name=name, ec=EC, flag="1", env=settings, arguments=arguments())


def wait_until_stored(server: engine_process.Server, outputs: int, seconds: float = 20) -> None:
    """Outputs are stored after the answer, and vLLM kills its workers at the end without waiting for that."""
    deadline = time.monotonic() + seconds
    while metric(server.get("/metrics"), "vllm_omni_patch_ec_stored_total") < outputs and time.monotonic() < deadline:
        time.sleep(0.2)


def refusal(model: str, folder: Path) -> str:
    """The error of stock vLLM for the same command."""
    try:
        engine_process.Server(model, str(folder), name="refused", ec=EC, arguments=arguments()).stop()
    except RuntimeError:
        log = next(folder.glob("refused-*.log")).read_text(errors="replace")
        found = re.findall(r"\w+Error: .*LMCacheECConnector.*", log)
        return found[0] if found else f"(its log is {folder}/refused-*.log)"
    sys.exit("stock vLLM already has LMCacheECConnector: this release does not need the patch")


def status(reports: Path) -> None:
    """The status table of the running engine."""
    program = Path(sys.executable).parent / "vllm-omni-patch"
    subprocess.run([str(program), "status", "--report-dir", str(reports)], check=False)


def metric(text: str, name: str) -> float:
    """Sum of the samples called ``name`` in a Prometheus page."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def show(what: str, answer: engine_process.Answer) -> None:
    if not answer.ok:
        sys.exit(f"{what} failed with HTTP {answer.status}: {answer.error[:500]}")
    logprobs = ", ".join(f"{value:.4f}" for value in answer.logprobs)
    print(f"    {what}: {answer.seconds * 1000:.0f} ms; logprobs of the answer: {logprobs}")


if __name__ == "__main__":
    main()
