"""Run the demo's episode on real parts: engine, session server and, if wished, an agent worker, each a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from miles_ref.data import tokenizer_path
from miles_ref.driver import DriverSettings, OpenAIEndpointTracer, generate
from miles_ref.engine.settings import DEFAULT_TOKENIZER
from miles_ref.engine.task import make_task
from miles_ref.errors import MilesRefError
from miles_ref.process import ReadyProcess
from miles_ref.sample import Sample, Status

FAMILY = "qwen3"  # of DEFAULT_TOKENIZER
FUNCTION = "miles_ref.demo.agent:solve"  # by name: only the process that calls it needs its client
START_SECONDS = 180.0  # importing torch takes long on a busy machine
AgentMode: TypeAlias = Literal["inline", "subproc", "worker"]
Progress: TypeAlias = Callable[[str], None]


class DemoError(MilesRefError):
    """The episode or its proof could not be carried out; the message says which part failed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the demo is to do. `steps` is the number of operations of the task; an episode has one turn more."""

    version: Literal["v1", "v2"] = "v1"
    agent_mode: AgentMode = "inline"
    out: Path = Path("out")
    seed: int = 0
    steps: int = 8


@dataclass(slots=True)
class Episode:
    """What an episode gave. The two files hold the bytes as they came over the wire."""

    samples: list[Sample]
    dump: dict[str, Any]
    payload_file: Path
    records_file: Path
    proof: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def turns(self) -> int:
        """Model calls: in v2 the nodes of the tree, of which a dump shows one path."""
        tree = self.dump["metadata"].get("tree")
        return len(self.dump["records"]) if tree is None else len(tree["nodes"])

    @property
    def proven(self) -> bool:
        """Whether the fresh process agreed with every log prob and refused every control."""
        return bool(self.proof.get("proven"))

    def figures(self) -> dict[str, Any]:
        """The figures that `miles-ref demo --json` prints. Counts are summed over samples, sizes are in bytes."""
        return {
            "turns": self.turns,
            "tokens": sum(len(sample.tokens) for sample in self.samples),
            "response_length": sum(sample.response_length for sample in self.samples),
            "trained_tokens": sum(sum(sample.loss_mask or ()) for sample in self.samples),
            "records_bytes": self.records_file.stat().st_size,
            "samples_bytes": self.payload_file.stat().st_size,
            "max_logprob_error": self.proof["max_logprob_error"],
            "controls_failed": self.proof["controls_failed"],
            "payload_file": str(self.payload_file),
            "records_file": str(self.records_file),
            "seconds": round(self.seconds, 2),
        }


def run_demo(plan: Plan, progress: Progress) -> Episode:
    """Run the episode and prove its samples. Raises DemoError, ProcessStartError, and what `generate` raises."""
    began = time.monotonic()
    plan.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as processes:
        settings = _start(plan, processes, progress)
        episode = asyncio.run(_play(plan, settings, progress))
    progress("proving the samples in a fresh process")
    episode.proof = _prove(episode.payload_file, plan.seed)
    episode.seconds = time.monotonic() - began
    return episode


def _start(plan: Plan, processes: contextlib.ExitStack, progress: Progress) -> DriverSettings:
    def start(*arguments: str) -> str:
        return processes.enter_context(ReadyProcess([sys.executable, "-m", *arguments], timeout=START_SECONDS)).url

    progress("starting the engine")
    engine = start("miles_ref", "engine", "--port", "0", "--seed", str(plan.seed))
    progress(f"engine: {engine}; starting the session server")
    server = start(
        *("miles_ref", "serve", "--port", "0", "--backend-url", engine),
        *("--hf-checkpoint", str(tokenizer_path(DEFAULT_TOKENIZER)), "--tito-model", FAMILY),
        *("--use-session-server", plan.version),
    )
    progress(f"session server: {server}")
    worker = None
    if plan.agent_mode == "worker":
        worker = start("miles_ref.worker", "--port", "0", "--allow-function", FUNCTION)
        progress(f"agent worker: {worker}")
    address = urlsplit(server)
    return DriverSettings.of(
        SimpleNamespace(
            session_server_ip=address.hostname,
            session_server_port=address.port,
            use_session_server=plan.version,
            custom_agent_function_path=FUNCTION,
            custom_agent_function_mode=plan.agent_mode,
            custom_agent_function_worker_url=worker,
        )
    )


async def _play(plan: Plan, settings: DriverSettings, progress: Progress) -> Episode:
    payload_file = (plan.out / f"demo-{plan.version}.safetensors").resolve()
    records_file = (plan.out / f"demo-{plan.version}-records.json").resolve()

    class KeepingTracer(OpenAIEndpointTracer):
        """Writes what the session holds and what is collected from it into the two files."""

        async def fetch_payload(
            self, *, max_seq_len: int | None, agent_metadata: Mapping[str, Any] | None = None
        ) -> bytes:
            progress("collecting the samples")
            records_file.write_bytes(await self.dump())
            payload = await super().fetch_payload(max_seq_len=max_seq_len, agent_metadata=agent_metadata)
            payload_file.write_bytes(payload)
            return payload

    task = make_task(plan.seed, plan.steps)
    demo = {"seed": plan.seed, "steps": plan.steps, "tree": plan.version == "v2"}
    sample = Sample(index=0, prompt=task.messages, label=task.answer, metadata={"demo": demo})
    samples = await generate(
        settings,
        sample,
        {"max_new_tokens": 512},
        on_report=lambda item: progress(f"turn {item['turn']}: {item['finish_reason']}"),
        tracer_type=KeepingTracer,
    )
    for finished in samples:
        if finished.status is Status.ABORTED:
            raise DemoError(f"the episode was aborted: {finished.metadata.get('infra_abort', 'nothing was collected')}")
        if not finished.metadata.get("solved"):
            raise DemoError(f"the agent did not find the answer {task.answer}; {records_file} shows what it did")
    return Episode(samples, json.loads(records_file.read_bytes()), payload_file, records_file)


def _prove(payload_file: Path, seed: int) -> dict[str, Any]:
    argv = [sys.executable, "-m", "miles_ref", "prove", str(payload_file), "--seed", str(seed)]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise DemoError(f"the proof did not finish (exit status {done.returncode}):\n{done.stderr[-2000:]}") from None
    return report
