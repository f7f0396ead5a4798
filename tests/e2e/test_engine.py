"""The engine spoken to over HTTP: as a process, and where the process is not the matter, in this one."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_ref.data import tokenizer_path
from miles_ref.engine.command import engine_command
from miles_ref.engine.settings import EngineSettings
from miles_ref.engine.task import make_task
from miles_ref.process import ProcessStartError, ReadyProcess
from miles_ref.testing.loop_thread import LoopThread
from miles_ref.tokens.families import get_family
from miles_ref.tokens.mismatch import full_report
from miles_ref.tokens.rendering import Renderer
from miles_ref.tokens.tokenizer import load_tokenizer

pytestmark = pytest.mark.xdist_group("torch")  # one worker loads torch for all of them
FAMILIES = {"tiny-chatml": "qwen3", "tiny-glm": "glm47"}
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def engine(*options: str) -> ReadyProcess:
    # Importing torch takes half a minute where many tests share few cores.
    return ReadyProcess([sys.executable, "-m", "miles_ref", "engine", "--port", "0", *options], timeout=100)


@contextlib.contextmanager
def engine_here(*options: str) -> Iterator[str]:
    """The URL of an engine in this process, with the command's options: it does not have to import torch once more."""
    from miles_ref.engine.service import Engine, listening

    values = engine_command.make_context("engine", list(options)).params
    settings = EngineSettings(**{field.name: values[field.name] for field in dataclasses.fields(EngineSettings)})
    serving = listening(Engine.load(settings), "127.0.0.1", 0)
    with LoopThread() as thread:
        url = thread.run(serving.__aenter__())
        try:
            yield url
        finally:
            thread.run(serving.__aexit__(None, None, None))


def call(url: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chat(url: str, **body: Any) -> dict[str, Any]:
    status, reply = call(url, "/v1/chat/completions", {**HELLO, **body})
    assert status == 200, reply
    choice = reply["choices"][0]
    assert len(choice["meta_info"]["output_token_logprobs"]) == choice["meta_info"]["completion_tokens"]
    assert reply["usage"]["prompt_tokens"] == choice["meta_info"]["prompt_tokens"]
    assert reply["id"] == choice["meta_info"]["id"]
    return choice


def said(choice: dict[str, Any]) -> list[int]:
    return [entry[1] for entry in choice["meta_info"]["output_token_logprobs"]]


def experts(choice: dict[str, Any]) -> Any:
    return np.frombuffer(base64.b64decode(choice["meta_info"]["routed_experts"]), "<i4").reshape(-1, 4, 2)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with engine() as process:
        yield process.url


@pytest.fixture(scope="module")
def sampling_url() -> Iterator[str]:
    with engine_here("--policy", "sample", "--context-length", "4000", "--weight-version", "17") as url:
        yield url


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_an_episode_keeps_its_tokens_and_is_proven(name: str) -> None:
    """What the session server does, by hand: prompts grow by rendered suffixes, outputs are never encoded again."""
    from miles_ref.engine.model import LanguageModel
    from miles_ref.engine.proof import prove

    tokenizer = load_tokenizer(name)
    family = get_family(FAMILIES[name])
    kwargs = dict(family.fixed_template_kwargs)
    renderer = Renderer(tokenizer, family, None, None)
    messages, tools, run_tool, answer = make_task(3, steps=11)
    prompt = renderer.first(messages, tools, kwargs)
    mask: list[int] = [0] * len(prompt)
    log_probs: list[float] = [0.0] * len(prompt)
    turns, cached, last_size = 0, [], 0
    with engine_here("--tokenizer", name, "--seed", "5") as url:
        while True:
            choice = chat(
                url,
                messages=messages,
                tools=tools,
                input_ids=prompt.tolist(),
                return_routed_experts=True,
                routed_experts_start_len=max(0, last_size - 1),
            )
            turns += 1
            snapshot = np.concatenate([prompt, said(choice)])
            assert len(experts(choice)) == len(snapshot) - 1 - max(0, last_size - 1)
            mask += [1] * len(said(choice))
            log_probs += [entry[0] for entry in choice["meta_info"]["output_token_logprobs"]]
            cached.append((choice["meta_info"]["cached_tokens"], last_size))
            messages = [*messages, choice["message"]]
            assert full_report(tokenizer, family, snapshot, messages, tools, kwargs) == []
            if choice["finish_reason"] == "stop":
                break
            assert choice["finish_reason"] == "tool_calls"
            function = choice["message"]["tool_calls"][0]["function"]
            result = {
                "role": "tool",
                "tool_call_id": choice["message"]["tool_calls"][0]["id"],
                "content": run_tool(function["name"], function["arguments"]),
            }
            extension = renderer.extend(snapshot, choice["message"], [result], tools, kwargs)
            last_size = len(snapshot)
            prompt = np.concatenate([snapshot[: extension.kept], extension.tail])
            mask = mask[: extension.kept] + [0] * len(extension.tail)
            log_probs = log_probs[: extension.kept] + [0.0] * len(extension.tail)
            messages = [*messages, result]
    assert f" {answer}." in messages[-1]["content"]
    assert turns >= 10
    assert all(hit in (size - 1, 0) for hit, size in cached)
    assert all(hit > 0 for hit, _ in cached[1:])
    model, _ = LanguageModel.load(EngineSettings(tokenizer=name, seed=5))
    assert prove(snapshot, len(mask), mask, log_probs, model) < 1e-9


def test_the_same_conversation_gets_the_same_reply(url: str) -> None:
    messages, tools, *_ = make_task(1)
    rendered = chat(url, messages=messages, tools=tools, return_routed_experts=True)
    tokenizer = load_tokenizer("tiny-chatml")
    renderer = Renderer(tokenizer, get_family("default"), None, None)
    input_ids = renderer.first(messages, tools, {}).tolist()
    given = chat(url, messages=messages, tools=tools, input_ids=input_ids, return_routed_experts=True)
    assert given["message"] == rendered["message"]
    assert given["meta_info"]["prompt_tokens"] == rendered["meta_info"]["prompt_tokens"] == len(input_ids)
    assert given["meta_info"]["cached_tokens"] == len(input_ids) - 1
    for one, other in zip(*(c["meta_info"]["output_token_logprobs"] for c in (given, rendered)), strict=True):
        assert one[1] == other[1]
        assert abs(one[0] - other[0]) < 1e-9
    assert np.array_equal(experts(given), experts(rendered))
    assert len(experts(given)) == len(input_ids) + given["meta_info"]["completion_tokens"] - 1


def test_input_ids_decide_the_log_probs(url: str) -> None:
    one, other = (chat(url, input_ids=[9, 10, last])["meta_info"] for last in (11, 12))
    assert [entry[1] for entry in one["output_token_logprobs"]] == [
        entry[1] for entry in other["output_token_logprobs"]
    ]
    assert one["output_token_logprobs"][0][0] != other["output_token_logprobs"][0][0]
    assert one["prompt_tokens"] == 3


def test_max_tokens_and_stop_texts(url: str) -> None:
    whole = chat(url)
    assert whole["finish_reason"] == "stop"
    assert whole["matched_stop"] == said(whole)[-1]
    for field in ("max_tokens", "max_completion_tokens"):
        cut = chat(url, **{field: 3})
        assert (cut["finish_reason"], said(cut)) == ("length", said(whole)[:3])
        assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    stopped = chat(url, stop=["§", "arithmetic", "a"])
    assert stopped["finish_reason"] == "stop"
    assert whole["message"]["content"].startswith(stopped["message"]["content"])
    assert stopped["matched_stop"] not in stopped["message"]["content"]
    kept = chat(url, stop=[stopped["matched_stop"]], no_stop_trim=True)
    assert stopped["matched_stop"] in kept["message"]["content"]


def test_a_tool_call_that_is_cut_off_is_content(url: str) -> None:
    messages, tools, *_ = make_task(1)
    whole = chat(url, messages=messages, tools=tools)
    cut = chat(url, messages=messages, tools=tools, max_tokens=len(said(whole)) - 3)
    assert (whole["finish_reason"], cut["finish_reason"]) == ("tool_calls", "length")
    assert "<tool_call>" in cut["message"]["content"]
    assert "tool_calls" not in cut["message"]
    assert chat(url, messages=messages, tools=tools, tool_choice="none")["finish_reason"] == "stop"


def test_sampling(sampling_url: str) -> None:
    one, two, other = (chat(sampling_url, max_tokens=20, seed=seed) for seed in (1, 1, 2))
    assert said(one) == said(two) != said(other)
    assert said(chat(sampling_url, max_tokens=20)) != said(chat(sampling_url, max_tokens=20))
    greedy = {tuple(said(chat(sampling_url, max_tokens=5, temperature=0))) for _ in range(2)}
    nucleus = {tuple(said(chat(sampling_url, max_tokens=5, top_p=1e-9, seed=seed))) for seed in range(2)}
    assert greedy == nucleus
    assert len(greedy) == 1
    assert one["meta_info"]["weight_version"] == "17"
    assert isinstance(one["message"]["content"], str)


def start_endless(pool: ThreadPoolExecutor, url: str, **fields: Any) -> Any:
    """A generation that ends by an abort only, as far as a test's patience goes."""
    body = {**HELLO, "temperature": 1, "stop_token_ids": [], "min_tokens": 3000, "max_tokens": 3500, **fields}
    return pool.submit(call, url, "/v1/chat/completions", body)


def test_an_abort_ends_one_generation_or_all(sampling_url: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        first, second = (start_endless(pool, sampling_url, rid=rid) for rid in ("first", "second"))
        wait_until(lambda: running(sampling_url) == 2)
        assert call(sampling_url, "/abort_request", {"rid": "first"}) == (200, {"aborted": 1})
        status, reply = first.result(60)
        choice = reply["choices"][0]
        assert (status, choice["finish_reason"], choice["meta_info"]["finish_reason"]["type"]) == (
            200,
            "abort",
            "abort",
        )
        assert reply["id"] == "first"
        assert call(sampling_url, "/abort_request", {"rid": "fir"})[1] == {"aborted": 0}
        assert call(sampling_url, "/health") == (200, {"status": "ok", "running": 1})
        assert not second.done()
        assert call(sampling_url, "/abort_request", {"abort_all": True}) == (200, {"aborted": 1})
        assert second.result(60)[1]["choices"][0]["finish_reason"] == "abort"
    assert chat(sampling_url, max_tokens=2)["finish_reason"] == "length"


def running(url: str) -> int:
    return call(url, "/health")[1]["running"]


def wait_until(condition: Callable[[], bool]) -> None:
    """A bounded loop; each pass is a round trip to the engine."""
    assert any(condition() for _ in range(2000))


def test_a_client_that_leaves_ends_its_generation(sampling_url: str) -> None:
    body = json.dumps({**HELLO, "min_tokens": 3500}).encode()
    host = sampling_url.removeprefix("http://")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(tuple(host.split(":")), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: running(sampling_url) == 1)
    wait_until(lambda: running(sampling_url) == 0)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "body"),
        (b"[]", "body"),
        (b"\xff\xfe", "body"),
        ({}, "messages"),
        ({**HELLO, "n": 2}, "n is 2"),
        ({**HELLO, "max_tokens": "5"}, "max_tokens"),
        ({**HELLO, "temperature": "hot"}, "temperature"),
        ({**HELLO, "input_ids": [1, -1]}, "input_ids[1]"),
        ({**HELLO, "input_ids": [1, 2052]}, "input_ids[1]"),
        ({**HELLO, "input_ids": [1] * 32768}, "too long"),
        ({**HELLO, "input_ids": [1], "max_tokens": 32768}, "too long"),
        ({**HELLO, "input_ids": [1], "return_routed_experts": True, "routed_experts_start_len": 2}, "start_len"),
        ({**HELLO, "chat_template_kwargs": {"messages": []}}, "messages"),
        ({**HELLO, "tools": [{"function": 5}], "max_tokens": None, "tool_choice": 5}, "tool_choice"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_says_why(url: str, body: Any, named: str) -> None:
    status, reply = call(url, "/v1/chat/completions", body)
    assert status == 400
    assert named in reply["error"]["message"]
    assert reply["error"]["code"] == reply["code"] == 400
    assert chat(url)["finish_reason"] == "stop"


def test_other_pages(url: str) -> None:
    assert call(url, "/health")[1]["status"] == "ok"
    card = call(url, "/v1/models")[1]["data"][0]
    assert (card["id"], card["max_model_len"]) == ("miles-ref-tiny-moe", 32768)
    assert call(url, "/nothing")[0] == 404
    assert call(url, "/v1/chat/completions")[0] == 405
    assert call(url, "/abort_request", {})[0] == 400


def test_the_openai_client_understands_it(url: str) -> None:
    import openai

    messages, tools, *_ = make_task(2)
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="m", messages=messages, tools=tools, logprobs=True)
        assert whole.choices[0].message.tool_calls
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        stream = client.chat.completions.create(
            model="m", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        call_chunk = chunks[0].choices[0].delta.tool_calls[0]
        assert call_chunk.function.arguments == whole.choices[0].message.tool_calls[0].function.arguments
        assert chunks[1].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        with pytest.raises(openai.BadRequestError, match="too long"):
            client.chat.completions.create(model="m", messages=messages, max_tokens=10**6)
        assert client.models.list().data[0].id == "miles-ref-tiny-moe"


def test_many_at_once(url: str) -> None:
    tasks = [make_task(seed).messages for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        at_once = list(pool.map(lambda messages: chat(url, messages=messages), tasks * 2))
    for messages, one, two in zip(tasks, at_once, at_once[12:], strict=False):
        assert one["message"] == two["message"] == chat(url, messages=messages)["message"]
        assert np.allclose(*([e[0] for e in c["meta_info"]["output_token_logprobs"]] for c in (one, two)), atol=1e-9)


def test_a_signal_ends_it_at_once_with_what_it_has() -> None:
    process = engine("--policy", "sample")
    with ThreadPoolExecutor(1) as pool:
        endless = start_endless(pool, process.url, min_tokens=30000, max_tokens=30000)
        wait_until(lambda: running(process.url) == 1)
        assert process.stop() == 0
        status, reply = endless.result(60)
    assert (status, reply["choices"][0]["finish_reason"]) == (200, "abort")


def test_it_does_not_outlive_its_parent_when_so_wished() -> None:
    starter = (
        "import os, sys; from miles_ref.process import ReadyProcess; "
        "process = ReadyProcess([sys.executable, '-m', 'miles_ref', 'engine', '--until-eof']); "
        "print(process.pid, flush=True); sys.stdin.read(); os._exit(0)"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        descriptor = os.pidfd_open(pid)
        parent.kill()
    assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ProcessStartError, match=r"config\.json"):
        engine("--model", str(tmp_path), "--tokenizer", "tiny-glm")


@pytest.mark.parametrize("routed", [False, True])
def test_a_local_model_speaks_with_its_own_template(tmp_path: Path, routed: bool) -> None:
    import transformers

    sizes = {
        "vocab_size": 2052,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 300,
    }
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**sizes, **moe) if routed else transformers.LlamaConfig(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(str(tokenizer_path("tiny-glm"))).save_pretrained(tmp_path)
    with engine_here("--model", str(tmp_path), "--policy", "sample", "--seed", "1") as url:
        choice = chat(url, max_tokens=50, return_routed_experts=True)
        glm = load_tokenizer("tiny-glm")
        rendered = glm.render(HELLO["messages"], tools=None, add_generation_prompt=True, template_kwargs={})
        assert choice["meta_info"]["prompt_tokens"] == len(glm.encode(rendered))
        assert ("routed_experts" in choice["meta_info"]) == routed
        if routed:
            assert len(experts(choice)) == len(glm.encode(rendered)) + len(said(choice)) - 1
        assert call(url, "/v1/chat/completions", {**HELLO, "max_tokens": 300})[0] == 400
        assert call(url, "/v1/models")[1]["data"][0]["id"] == tmp_path.name
