# SPDX-License-Identifier: Apache-2.0
"""Checks every patch on the vLLM that this Python has, and prints ``RESULT {json}``. Run by scripts/live_release.py.

Five engines, one after the other, on a tiny BLIP-2: the OpenAI server stock, patched, and patched in new processes;
``LLM()`` stock and patched. A patch passes when its effect is seen, not when its state is applied. A release
that has no encoder cache connectors is started without one, and ``ec_connector`` must then be absent. One
that knows no ``ec_both`` would need two servers for it; there the other two patches are tried.

``targets`` of a patch are those that were applied, ``called`` those whose wrapper saw a call, ``checked`` those whose
effect its check looks at: ``CHECKED``. ``matrix.evidence.LiveRow`` tells what that proves.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import ec_faults, engine_process, tiny_model

EC = {"ec_connector": "LMCacheECConnector", "ec_role": "ec_both"}
TOLERANCE = 1e-5
FAULT = "bit flipped in the payload"
EMBEDDINGS = "VllmConfig._resolve_mm_embedding_inputs"
# Whose effect the check of a patch looks at, by qualified name. One that is called and not named here stays "hooked".
CHECKED = {
    "loader": ("load_general_plugins", "get_prometheus_registry"),
    "ec_connector": (
        "ECConnectorFactory",
        "GPUModelRunner._execute_mm_encoder",
        "EncoderRunner.prepare_mm_inputs",
        "Worker.load_model",  # without a look at the weights nothing is stored
        "DefaultModelLoader._prepare_weights",  # without the files that were opened nothing outlives the run
        EMBEDDINGS,
    ),
    "available_memory": (
        "Worker.determine_available_memory",
        "CPUWorker.determine_available_memory",
        "process_weights_after_loading",
        "Worker.initialize_from_config",
    ),
    "model_local_kv": ("GPUModelRunner.load_model", "CPUModelRunner.load_model"),
}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="live-release-"))
    try:
        print("RESULT " + json.dumps(run(folder)), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path) -> dict[str, Any]:
    """Versions, and for each patch ``result`` (pass or fail), ``figure``, ``note`` and the ``targets`` it applied."""
    model = tiny_model.make(str(folder / "model"))
    seen = Seen(folder, model)
    vllm = Path(str(importlib.util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    preload(vllm)
    has_connectors = (vllm / "distributed" / "ec_transfer").is_dir()
    has_both = has_connectors and "ec_both" in (vllm / "config" / "ec_transfer.py").read_text()
    ec = EC if has_both else None
    faults = ec_faults.prepare(str(folder))
    with engine_process.Server(model, str(folder), name="stock") as server:
        seen.stock_damaged = server.image(3)
        seen.stock = server.image(1)
        require(seen.stock.ok, f"the stock engine does not answer here: {seen.stock.error}\n{server.log()[-20000:]}")
        seen.stock_blocks = blocks(server)
    for name in ("patched", "restarted"):
        seen.reports[name] = folder / f"reports-{name}"
        env = {**seen.settings(seen.reports[name]), **faults}
        with engine_process.Server(model, str(folder), name=name, ec=ec, flag="1", env=env) as server:
            server.image(3 if name == "patched" else 4)
            seen.answers[name] = server.image(1)
            seen.blocks[name] = blocks(server)
            if ec is not None and name == "restarted":
                ec_faults.ask(faults, FAULT, str(folder / "cache"))
                seen.answers["damaged"] = server.image(3)
                seen.damaged = sum(one["files"] for one in ec_faults.done(faults))
                seen.embeddings = server.chat({"type": "image_embeds", "image_embeds": "AAAA"})
            time.sleep(1)  # processes leave their numbers for /metrics a few times a second
            seen.pages[name] = server.get("/metrics")
            seen.left[name] = server.stop()
    with engine_process.Offline(model, str(folder), name="llm-stock") as llm:
        seen.answers["llm stock"] = llm.image(1)
    seen.reports["llm"] = folder / "reports-llm"
    # Our plugin is filtered out here, so that only the loader's own hook notices the engine start.
    env = {**seen.settings(seen.reports["llm"]), "VLLM_PLUGINS": "nobody"}
    with engine_process.Offline(model, str(folder), name="llm", ec=ec, flag="1", env=env) as llm:
        seen.answers["llm"] = llm.image(1)
        seen.left["llm"] = llm.stop()
    checks: dict[str, Callable[[Seen], Any]] = {
        "loader": check_loader,
        "ec_connector": check_ec_connector if has_connectors else check_no_ec_connector,
        "available_memory": check_available_memory,
        "model_local_kv": check_model_local_kv,
    }
    if has_connectors and not has_both:
        del checks["ec_connector"]
    return {
        "note": "" if has_both or not has_connectors else "ec_connector not tried: this release knows no ec_both",
        "device": device(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "lmcache")},
        "patches": {name: {**judge(check, seen), **seen.targets(name)} for name, check in checks.items()},
    }


def device() -> str:
    """What vLLM runs on here: ``cpu``, ``cuda``."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def preload(vllm: Path) -> None:
    """Some releases (0.16 to 0.18) refuse to start on a CPU without two libraries in LD_PRELOAD; children inherit it.

    Raises:
        RuntimeError: this is such a release, and a library is not here.
    """
    worker = vllm / "v1" / "worker" / "cpu_worker.py"
    if not re.search(r"raise RuntimeError\(\s*f\"\{name\} is not found in LD_PRELOAD", worker.read_text()):
        return
    found = [sorted(Path("/usr/lib").glob("**/libtcmalloc_minimal.so.4")), [Path(sys.prefix, "lib", "libiomp5.so")]]
    require(bool(found[0]), "libtcmalloc is not installed (Debian: libtcmalloc-minimal4), and this release needs it")
    os.environ["LD_PRELOAD"] = ":".join(str(paths[0]) for paths in found)


class Seen:
    """What the engines showed."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model
        self.stock: engine_process.Answer
        self.stock_damaged: engine_process.Answer
        self.damaged = 0
        self.embeddings = engine_process.Answer(0)
        self.stock_blocks = ""
        self.answers: dict[str, engine_process.Answer] = {}
        self.blocks: dict[str, str] = {}
        self.pages: dict[str, str] = {}
        self.left: dict[str, dict[int, str]] = {}
        self.reports: dict[str, Path] = {}

    def settings(self, reports: Path) -> dict[str, str]:
        return {"VLLM_OMNI_PATCH_REPORT_DIR": str(reports), "LMCACHE_EC_LOCAL_DISK": str(self.folder / "cache")}

    def entries(self, patch: str, run: str) -> list[dict[str, Any]]:
        """What the ledgers of ``run`` hold about ``patch``, over all processes."""
        return [entry for ledger in self.ledgers(run) for entry in ledger["entries"] if entry["patch"] == patch]

    def ledgers(self, run: str) -> list[dict[str, Any]]:
        """What each process of ``run`` left."""
        return [json.loads(path.read_text()) for path in sorted(self.reports[run].glob("ledger-*.json"))]

    def targets(self, patch: str) -> dict[str, list[str]]:
        """Over all runs: ``targets`` that some process applied and none failed, and which were called and checked.

        Those of vLLM itself: a row is about a release of vLLM.
        """
        entries = [e for run in self.reports for e in self.entries(patch, run) if e["target"].startswith("vllm.")]
        failed = {entry["target"] for entry in entries if entry["state"] == "failed"}
        applied = {entry["target"] for entry in entries if entry["state"] == "applied"} - failed
        return {
            "targets": sorted(applied),
            "called": sorted(applied & {entry["target"] for entry in entries if entry["called"]}),
            "checked": sorted(name for name in applied if name.partition(":")[2] in CHECKED[patch]),
        }

    def applied(self, patch: str, run: str) -> None:
        """Some process of ``run`` applied a target of ``patch``, and none failed.

        Raises:
            RuntimeError: it is not so.
        """
        entries = self.entries(patch, run)
        failed = [entry for entry in entries if entry["state"] == "failed"]
        require(not failed, "; ".join(f"{entry['target']}: {entry['reason']}" for entry in failed))
        require(any(entry["state"] == "applied" for entry in entries), f"no process of the {run} run applied {patch}")


def judge(check: Callable[[Seen], Any], seen: Seen) -> dict[str, Any]:
    result = "absent" if check is check_no_ec_connector else "pass"
    try:
        return {"result": result, "figure": check(seen), "note": ""}
    except Exception as error:
        return {"result": "fail", "figure": None, "note": f"{type(error).__name__}: {error}"[:600]}


def check_loader(seen: Seen) -> dict[str, int]:
    """Numbers are on vLLM's page, and each engine process knows of its start where the plugin is filtered out."""
    seen.applied("loader", "llm")
    rows = [line for line in seen.pages["patched"].splitlines() if line.startswith("vllm_omni_patch_info{")]
    require(len(rows) > 0, "/metrics shows no state of a target")
    paths = [
        one["process"]["engine_activation_path"]
        for one in seen.ledgers("llm")
        if "engine_activation_path" in one["process"]
    ]
    require(set(paths) == {"startup file"}, f"engine starts were noticed by {paths}, with the plugin filtered out")
    return {"targets_on_page": len(rows), "engine_starts": len(paths)}


def check_ec_connector(seen: Seen) -> dict[str, float]:
    """The registry entry is used, the answer is the stock one, a restart hits, nothing is left running.

    An entry that is damaged after it was promised is encoded again, and clients cannot send embeddings of their own.
    """
    seen.applied("ec_connector", "restarted")
    for name in ("patched", "restarted"):
        require(seen.stock.same(seen.answers[name], TOLERANCE), f"the {name} answer is not the stock one")
    for name, left in seen.left.items():
        require(not left, f"left running after the {name} engine was stopped: {left}")
    require(seen.answers["llm stock"].same(seen.answers["llm"], TOLERANCE), "LLM() answers differently when patched")
    hits = total(seen.pages["restarted"], "vllm_omni_patch_ec_hits_total")
    require(hits >= 1, f"the restarted server counted {hits:g} hits")
    require(seen.damaged >= 1, "the entry that was to be damaged was not promised")
    require(seen.stock_damaged.same(seen.answers["damaged"], TOLERANCE), "a damaged entry changed the answer")
    fallbacks = total(seen.pages["restarted"], "vllm_omni_patch_ec_fallbacks_total")
    require(fallbacks >= 1, f"a damaged entry was met, and {fallbacks:g} outputs were encoded again")
    if any(name.endswith(EMBEDDINGS) for name in seen.targets("ec_connector")["targets"]):
        asked = seen.embeddings
        require(400 <= asked.status < 500, f"embeddings from a client were answered with {asked.status}: {asked.error}")
    stored = total(seen.pages["patched"], "vllm_omni_patch_ec_stored_total")
    require(stored >= 1, f"the first server counted {stored:g} stores")
    return {
        "hits_after_restart": hits,
        "fallbacks": fallbacks,
        "encode_ms": round(seen.stock.seconds * 1000, 1),
        "hit_ms": round(seen.answers["restarted"].seconds * 1000, 1),
    }


def check_no_ec_connector(seen: Seen) -> None:
    """In every process that was asked for the patch, this release has nothing for it."""
    entries = [entry for run in seen.reports for entry in seen.entries("ec_connector", run)]
    wrong = sorted({f"{e['target']}: {e['state']}" for e in entries if e["state"] not in ("skipped", "pending")})
    require(not wrong, "; ".join(wrong))
    require(any(entry["verdict"] == "absent" for entry in entries), "ec_connector is absent in no process")


def check_available_memory(seen: Seen) -> dict[str, int]:
    """The report is there and holds the number of blocks, which is the stock one, and the weights were counted."""
    seen.applied("available_memory", "patched")
    require(seen.stock_blocks != "", "the stock server shows no number of KV blocks")
    require(
        seen.blocks["patched"] == seen.stock_blocks,
        f"{seen.blocks['patched']} KV blocks with the report, {seen.stock_blocks} without",
    )
    reports = [json.loads(path.read_text()) for path in seen.reports["patched"].glob("memory-*.json")]
    require(len(reports) > 0, "no memory report was written")
    reported = [one["blocks"] for one in reports]
    require(int(seen.stock_blocks) in reported, f"{reported} blocks in the reports, {seen.stock_blocks} in vLLM")
    weights = [item["state"] for one in reports for item in one["inputs"] if item["name"] == "weights"]
    require(weights == ["measured"] * len(reports), f"the reports call the weights {weights}")
    return {"kv_blocks": int(seen.stock_blocks), "reports": len(reports)}


def check_model_local_kv(seen: Seen) -> dict[str, int]:
    """The report is there after load_model; this model declares nothing."""
    seen.applied("model_local_kv", "patched")
    found = list(seen.reports["patched"].glob("model-local-kv-*.json"))
    require(len(found) > 0, "no model-local-kv report was written")
    return {"reports": len(found)}


def blocks(server: engine_process.Server) -> str:
    """The number of KV blocks as vLLM itself shows it on /metrics."""
    found = re.search(r'vllm:cache_config_info\{[^}]*num_gpu_blocks="(\d+)"', server.get("/metrics"))
    return found.group(1) if found else ""


def total(page: str, name: str) -> float:
    """Sum of the samples called ``name`` in a Prometheus page."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


def require(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
