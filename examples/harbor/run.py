"""Run the trials of tasks.json: inline, in child processes, or on agent workers.

    python run.py                                        # inline
    python run.py --mode subproc
    python run.py --agent-worker-url http://10.0.0.7:8700

Without --base-url a scripted model answers, so that the example runs by itself. Prints one JSON line a trial.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripted_model import ScriptedModel

from miles_ref.agents import AgentSettings, InfraAbort, call_agent_function
from miles_ref.agents.environment import harbor_env_vars
from miles_ref.agents.settings import check_agent_call
from miles_ref.errors import UsageError

FUNCTION = "harbor_agent:run"
TASKS = Path(__file__).with_name("tasks.json")


def parser() -> argparse.ArgumentParser:
    """The launcher's flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--base-url", help="an endpoint with /v1/chat/completions (default: a scripted model)")
    flags.add_argument("--mode", choices=["inline", "subproc", "worker"], help="default: worker if a URL is given")
    flags.add_argument("--agent-worker-url", action="append", default=[], help="an agent worker; may be repeated")
    flags.add_argument("--agent-worker-token-file", type=Path)
    flags.add_argument("--provider", help="sandbox provider: daytona, e2b or modal (default: directories)")
    flags.add_argument("--max-turns", type=int, default=20)
    return flags


async def main(arguments: Sequence[str] | None = None) -> int:
    """Run all trials at once; the exit status is 0 unless the infrastructure failed."""
    options = parser().parse_args(arguments)
    mode = options.mode or ("worker" if options.agent_worker_url else "inline")
    settings = AgentSettings(
        worker_urls=tuple(options.agent_worker_url), worker_token_file=options.agent_worker_token_file
    )
    # On a worker the provider's key and SDK are the worker's business; here, they must be there before the first trial.
    variables = harbor_env_vars(
        provider=options.provider, settings={"max_turns": str(options.max_turns)}, agent_worker=mode == "worker"
    )
    if mode == "inline":
        os.environ.update(variables)
        variables = {}
    tasks = json.loads(TASKS.read_text())
    async with contextlib.AsyncExitStack() as stack:
        base_url = options.base_url
        if base_url is None:
            base_url = (await stack.enter_async_context(ScriptedModel(tasks))).base_url
        check_agent_call(mode, settings, base_url)
        trials = [trial(task, mode, base_url, variables, settings) for task in tasks]
        results = await asyncio.gather(*trials)
    return 0 if all(results) else 1


async def trial(
    task: Mapping[str, Any], mode: str, base_url: str, variables: Mapping[str, str], settings: AgentSettings
) -> bool:
    """One trial; whether the infrastructure held."""
    reports: list[Any] = []
    try:
        result = await call_agent_function(
            FUNCTION,
            mode=mode,
            kwargs={
                "base_url": base_url,
                "prompt": task["prompt"],
                "request_kwargs": {"temperature": 1.0},
                "metadata": {"check": task["check"]},
            },
            on_report=reports.append,
            env=variables,
            settings=settings,
        )
    except InfraAbort as exc:
        print(json.dumps({"prompt": task["prompt"], "infra_abort": exc.reason, "reports": reports}), flush=True)
        return False
    line = {"prompt": task["prompt"], "reward": result["reward"], "turns": result["turns"], "reports": reports}
    print(json.dumps(line), flush=True)
    return True


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except UsageError as error:
        sys.exit(f"run.py: {error}")
