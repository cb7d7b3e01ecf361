# SPDX-License-Identifier: Apache-2.0
"""What the loader itself changes in other packages, declared as a patch: judged, read back, undone and shown like one.

It is on whenever the flag is on, whichever patches are asked for. Data only, like every declaration.
"""

from __future__ import annotations

from vllm_omni_patch.patch import Contract, Parameter, Patch, Target

NAME = "loader"
_HOOKS = "vllm_omni_patch.loading.own_hooks"

# Each of these passes calls through and relies on nothing in the target's code, so on an unlisted release the contract
# is enough. (The source of vLLM's table of variables differs in every release.)
PATCH = Patch(
    name=NAME,
    summary="What the loader itself needs: known variables, log lines, engine starts, numbers on /metrics.",
    why="vLLM warns about variables that it does not know, has no log before it sets one up, has no event for the "
    "start of an engine, and shows on /metrics only what is registered there.",
    scope="One table and two functions of vLLM, and the registries behind /metrics. Calls and results stay vLLM's.",
    fragility="Five names. A skipped one says what is missing; the patches work without any of them.",
    remove_when="vLLM has a call by which a plugin makes variables and metrics known.",
    effect="adds",
    targets=(
        Target(
            module="vllm.envs",
            qualname="environment_variables",
            install="vllm_omni_patch.loading.known_flags:install",
            verify="vllm_omni_patch.loading.known_flags:known",
            by_contract=True,
            consequence="vLLM calls our variables unknown, and --fail-on-environ-validation refuses them",
        ),
        Target(
            module="vllm.logger",
            qualname="configure_logging",
            install=f"{_HOOKS}:install_log",
            by_contract=True,
            optional=True,
            note="releases that set up their log at import have none",
            consequence="lines from before vLLM has a log are printed with the next one, or at exit",
        ),
        Target(
            module="vllm.plugins",
            qualname="load_general_plugins",
            install=f"{_HOOKS}:install_engine_start",
            contract=Contract(parameters=()),
            by_contract=True,
            consequence="where VLLM_PLUGINS leaves vllm_omni_patch out, and in forked processes, nothing is logged of "
            "what is applied, and strict mode does not stop the engine",
        ),
        Target(
            module="vllm.v1.metrics.prometheus",
            qualname="get_prometheus_registry",
            install=f"{_HOOKS}:install_registry",
            verify=f"{_HOOKS}:serves",
            contract=Contract(parameters=(), module_attributes=("REGISTRY",)),
            by_contract=True,
            note="one collector more on the registry that it gives out; the function stays as it is",
            consequence="our numbers are not on /metrics",
        ),
        Target(
            module="prometheus_client.multiprocess",
            qualname="MultiProcessCollector.__init__",
            install=f"{_HOOKS}:install_multiprocess",
            distribution="prometheus-client",
            contract=Contract(parameters=(Parameter("registry"),)),
            by_contract=True,
            note="with several API servers a new registry is made for each scrape",
            consequence="our numbers are not on /metrics where PROMETHEUS_MULTIPROC_DIR is set, as with several API "
            "servers",
        ),
    ),
)
