# SPDX-License-Identifier: Apache-2.0
"""The pages say what the program says: generated tables, metric names in the dashboard, headers, links to files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("torch", reason="the metric names are read from modules that import torch")


def test_generated_tables_are_unchanged_by_regeneration() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate_docs.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_of_the_dashboard_and_of_the_alerts_is_documented() -> None:
    table = (ROOT / "docs" / "operations.md").read_text()
    documented = {f"vllm_omni_patch_{name}" for name in re.findall(r"^\| `(\w+)` \| (?:gauge|counter)", table, re.M)}
    dashboard = json.loads((ROOT / "docs" / "grafana" / "vllm-omni-patch.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += re.findall(r"expr: (.*)", table)
    used = set(re.findall(r"vllm_omni_patch_\w+", " ".join(expressions)))
    assert len(used) > 10
    assert used <= documented


def test_every_source_file_names_its_licence() -> None:
    files = subprocess.run(["git", "ls-files", "*.py", "*.sh"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    missing = [
        n for n in files.stdout.split() if "SPDX-License-Identifier: Apache-2.0" not in (ROOT / n).read_text()[:300]
    ]
    assert missing == []


def test_links_between_pages_lead_to_files() -> None:
    """Images too, which the site's strict build does not look at; it checks pages and anchors."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + list(
        (ROOT / "docs").glob("*.md")
    )
    broken = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if not link.startswith("http") and not (page.parent / link).exists()
    ]
    assert broken == []


def test_the_navigation_lists_every_page_once() -> None:
    """The site's strict build lets a page without an entry pass, and an entry without a page."""
    config = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"(\w+\.md)$", config[config.index("nav:") : config.index("exclude_docs:")], re.M)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_architecture_names_what_exists() -> None:
    """Its text, and the pictures that scripts/draw_ways.py draws."""
    names = re.findall(
        r"`((?:vllm_omni_patch|patches|tests|scripts|docs)/[\w./-]*)", (ROOT / "docs/architecture.md").read_text()
    )
    for picture in ("target", "put_get", "budget", "number"):
        names += re.findall(r"monospace[^>]*>([^<]+)<", (ROOT / f"docs/images/way_{picture}.svg").read_text())
    assert len(names) > 50
    assert [name for name in names if not list(ROOT.glob(name))] == []


def test_no_two_test_modules_share_a_name() -> None:
    """Both folders are collected in one session, and helpers are imported by bare name."""
    names = [path.name for path in (ROOT / "tests").glob("*/*.py")]
    assert sorted(names) == sorted(set(names))
