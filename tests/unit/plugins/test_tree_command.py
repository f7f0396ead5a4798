"""`miles-ref tree`: from a dump, a payload or a URL to a drawing."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from miles_ref.plugins import Pipeline
from miles_ref.plugins.tree_command import tree_command


def tree(source: Any) -> Result:
    return CliRunner().invoke(tree_command, [str(source)])


def dump_of(session: Any) -> bytes:
    metadata = session.metadata | {"accumulated_token_ids": []}
    return json.dumps({"session_id": "s", "records": [], "metadata": metadata}).encode()


def test_a_dump_is_drawn_with_what_the_default_would_train(session: Any, tmp_path: Path) -> None:
    file = tmp_path / "dump.json"
    file.write_bytes(dump_of(session))
    result = tree(file)
    assert result.exit_code == 0
    root, left, right = result.stdout.splitlines()
    assert root == "#0 r0  4 + 4 tokens  complete  trains 4 in sample #2"
    assert left.endswith("leaf dropped: given up by a retry: its sibling #2 was committed later")
    assert right.endswith("#2 r2  12 + 5 tokens  complete  trains 5 in sample #2  leaf survives")


def test_a_payload_is_drawn_with_what_was_trained(session: Any, tmp_path: Path) -> None:
    file = tmp_path / "samples.safetensors"
    file.write_bytes(session.collect(Pipeline("v2", picker="keep-all")))
    root, left, right = tree(file).stdout.splitlines()
    assert root.endswith("trains 4 in sample #1")
    assert "leaf survives" in left
    assert "leaf survives" in right


def v1_dump(finish_reason: str) -> dict[str, Any]:
    meta = {"output_token_logprobs": [[-0.5, 7], [-0.5, 8]]}
    response = {"id": "r0", "choices": [{"finish_reason": finish_reason, "meta_info": meta}]}
    return {
        "records": [{"timestamp": 1.0, "request": {"input_ids": [1, 2, 3]}, "response": response}],
        "metadata": {"accumulated_token_ids": [1, 2, 3, 7, 8]},
    }


def test_a_v1_dump_is_one_line_a_turn(tmp_path: Path) -> None:
    file = tmp_path / "dump.json"
    file.write_text(json.dumps(v1_dump("length")))
    assert tree(file).stdout == "#0 r0  3 + 2 tokens  length  trains 2 in sample #0  leaf survives\n"


def test_an_empty_session_says_so(tmp_path: Path) -> None:
    file = tmp_path / "dump.json"
    file.write_text('{"records": [], "metadata": {}}')
    assert tree(file).stdout == "no turn was committed\n"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"records": [{}], "metadata": {}}', b'{"records": [], "metadata": {"tree": 3}}'],
)
def test_what_is_no_dump_is_an_error_in_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "dump.json"
    file.write_bytes(content)
    result = tree(file)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {file}: ")
    assert result.stderr.count("\n") == 1


def test_a_v1_payload_has_no_tree(session: Any, tmp_path: Path) -> None:
    file = tmp_path / "samples.safetensors"
    file.write_bytes(Pipeline("v1").collect(session.chains[:1], {}, None, session.settings))
    assert "has no tree" in tree(file).stderr


@pytest.fixture
def url(session: Any) -> Iterator[str]:
    """A server that answers every GET with the session's dump."""
    body = dump_of(session)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/sessions/s"
        server.shutdown()
        thread.join()


def test_a_running_server_is_asked(url: str) -> None:
    assert tree(url).stdout.startswith("#0 r0  4 + 4 tokens")
