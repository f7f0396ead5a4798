"""What the engine answers and what the session server sends, against the pydantic models of the sglang wheel.

The models ignore fields that they do not know, so every value is looked for in what they kept. Run by run.sh.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from miles_ref.engine.task import make_task
from miles_ref.process import ReadyProcess

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here; run tests/sglang/run.sh", allow_module_level=True)

PYTHON = os.environ.get("MILES_REF_PYTHON", sys.executable)
EXTENSIONS = {"return_indexer_topk"}
"""Request fields of the contract that the wheel's chat request does not have."""


def protocol_models() -> types.ModuleType:
    """The protocol module, without the package's own `__init__`, which imports torch and everything else."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    package = types.ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["sglang"] = package
    return importlib.import_module("sglang.srt.entrypoints.openai.protocol")


MODELS = protocol_models()


def lost(sent: Any, kept: Any, where: str = "$") -> list[str]:
    """Paths of what was sent and is not kept as it was."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [
            path
            for key, value in sent.items()
            for path in (lost(value, kept[key], f"{where}.{key}") if key in kept else [f"{where}.{key}"])
        ]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        return [path for at, pair in enumerate(zip(sent, kept, strict=True)) for path in lost(*pair, f"{where}[{at}]")]
    return [] if sent == kept and type(sent) is type(kept) else [where]


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with ReadyProcess([PYTHON, "-m", "miles_ref", "engine"]) as process:
        yield process.url


def test_the_check_for_lost_fields_can_fail() -> None:
    assert lost({"a": 1, "b": [{"c": 2}]}, {"a": 1, "b": [{"c": 2, "d": 3}], "e": 4}) == []
    assert lost({"a": 1, "x": None, "b": [{"c": 2}]}, {"a": True, "b": [{"c": "2"}]}) == ["$.a", "$.x", "$.b[0].c"]
    known = MODELS.ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], nonsense=1)
    assert lost({"nonsense": 1}, known.model_dump()) == ["$.nonsense"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "return_meta_info": True, "return_routed_experts": True},
        {"max_tokens": 2, "input_ids": [9, 10, 11], "rid": "mine"},
        {"tool_choice": "none"},
    ],
)
def test_the_engines_replies(engine: str, fields: dict[str, Any]) -> None:
    messages, tools, *_ = make_task(1)
    body = {"model": "m", "messages": messages, "tools": tools, **fields}
    MODELS.ChatCompletionRequest.model_validate(json.loads(json.dumps(body)))
    status, raw = post(engine, "/v1/chat/completions", body)
    reply = json.loads(raw)
    assert status == 200
    assert lost(reply, MODELS.ChatCompletionResponse.model_validate(reply).model_dump()) == []


def test_the_engines_stream(engine: str) -> None:
    messages, tools, *_ = make_task(1)
    body = {"messages": messages, "tools": tools, "stream": True, "stream_options": {"include_usage": True}}
    _, raw = post(engine, "/v1/chat/completions", body)
    events = [event.removeprefix("data: ") for event in raw.decode().strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    assert len(events) == 4
    for event in map(json.loads, events[:-1]):
        assert lost(event, MODELS.ChatCompletionStreamResponse.model_validate(event).model_dump()) == []


def test_the_engines_errors_and_models(engine: str) -> None:
    status, raw = post(engine, "/v1/chat/completions", {"messages": []})
    reply = json.loads(raw)
    assert status == 400
    # Beside SGLang's flat fields there is OpenAI's nested form.
    assert lost(reply, MODELS.ErrorResponse.model_validate(reply).model_dump()) == ["$.error"]
    with urllib.request.urlopen(engine + "/v1/models", timeout=60) as answer:
        listed = json.loads(answer.read())
    assert lost(listed, MODELS.ModelList.model_validate(listed).model_dump()) == []


class Recorder:
    """A backend that passes everything on to another and keeps the bodies."""

    def __init__(self, target: str) -> None:
        bodies: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                bodies.append(body)
                status, raw = post(target, self.path, body)
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.bodies = bodies
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever)

    def __enter__(self) -> Recorder:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


REPLAY = ["--use-rollout-routing-replay", "--num-layers", "4", "--moe-router-topk", "2"]


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ([], {"input_ids", "logprobs", "return_meta_info", "no_stop_trim", "chat_template_kwargs"}),
        (REPLAY, {"return_routed_experts"}),
        ([*REPLAY, "--pause-generation-mode", "in_place"], {"return_routed_experts", "routed_experts_start_len"}),
        (["--use-rollout-indexer-replay"], {"return_indexer_topk"}),
        (["--lora-path", "adapter"], {"lora_path"}),
    ],
)
def test_the_session_servers_requests(engine: str, flags: list[str], fields: set[str]) -> None:
    messages, tools, run_tool, _ = make_task(1)
    base = ["serve", "--hf-checkpoint", "tiny-chatml", "--tito-model", "qwen3", "--use-session-server", "v1"]
    with (
        Recorder(engine) as recorder,
        ReadyProcess(
            [PYTHON, "-m", "miles_ref", *base, "--port", "0", "--backend-url", recorder.url, *flags]
        ) as server,
    ):
        _, created = post(server.url, "/sessions", {})
        path = f"/sessions/{json.loads(created)['session_id']}/v1/chat/completions"
        for _ in range(2):
            body = {"model": "m", "messages": messages, "tools": tools, "temperature": 0.5, "stream": True}
            status, raw = post(server.url, path, body)
            assert status == 200, raw
            body.pop("stream")
            status, raw = post(server.url, path, body)
            assert status == 200, raw
            said = json.loads(raw)["choices"][0]["message"]
            call = said["tool_calls"][0]
            result = run_tool(call["function"]["name"], call["function"]["arguments"])
            messages = [*messages, said, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    assert len(recorder.bodies) == 4
    for body in recorder.bodies:
        assert fields <= body.keys()
        kept = MODELS.ChatCompletionRequest.model_validate(json.loads(json.dumps(body)))
        dropped = lost(body, kept.model_dump())
        assert set(dropped) <= {f"$.{name}" for name in EXTENSIONS}
