"""`miles-ref tree FILE|URL`: draw a session's forest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import click
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from miles_ref.assembly.story import NodeStory, finish_reasons_of, linear_metadata, tell
from miles_ref.errors import UsageError
from miles_ref.sample import Sample
from miles_ref.wire import SAMPLES_VALUE_SPEC, decode_samples_and_merge_input_sample

_TIMEOUT = 60.0  # seconds
_WIDTH = 1000  # a line a node; a terminal may break it, rich would do it in the tree's middle


@click.command()
@click.argument("source")
def tree_command(source: str) -> None:
    """Draw the forest of a session: its nodes, which leaves survive, and which sample trains what.

    SOURCE is a file or URL (http://host:port/sessions/ID) with the session's dump, or a file with a samples payload.
    From a dump the default picker and merger are shown; from a payload, what was really chosen.
    """
    try:
        stories = read_stories(_fetch(source))
    except (OSError, ValueError, UsageError) as error:
        raise click.ClickException(f"{source}: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise click.ClickException(f"{source}: no dump of a session: {type(error).__name__} {error}") from error
    console = Console(width=_WIDTH)
    for root in draw(stories):
        console.print(root)
    if not stories:
        console.print("no turn was committed")


def read_stories(raw: bytes) -> list[NodeStory]:
    """The nodes of a dump or a samples payload. Raises UsageError for what is neither, DecodeError for a broken one."""
    if raw[:1] == b"{":
        return _of_dump(json.loads(raw))
    # The fields of v1 are in every payload, and all that is drawn.
    reply = decode_samples_and_merge_input_sample(raw, Sample(), fields=SAMPLES_VALUE_SPEC)
    if "tree" not in reply.session_metadata:
        raise UsageError("a v1 payload has no tree; give the session's dump (GET /sessions/ID)")
    return tell(reply.session_metadata, reply.samples)


def _of_dump(dump: Mapping[str, Any]) -> list[NodeStory]:
    records, metadata = dump.get("records"), dump.get("metadata")
    if not isinstance(records, list) or not isinstance(metadata, dict):
        raise UsageError("this JSON is no dump of a session: it has no records and metadata")
    described = metadata if "tree" in metadata else linear_metadata(records)
    return tell(described, finish_reasons=finish_reasons_of(records))


def draw(stories: Sequence[NodeStory]) -> list[Tree]:
    """One tree to print for each root."""
    drawn: dict[int, Tree] = {}
    roots = []
    for story in stories:
        if story.parent is None:
            drawn[story.node_id] = Tree(_line(story))
            roots.append(drawn[story.node_id])
        else:
            drawn[story.node_id] = drawn[story.parent].add(_line(story))
    return roots


def _line(story: NodeStory) -> Text:
    line = Text()
    line.append(f"#{story.node_id}", "bold")
    line.append(f" {story.response_id or '(no id)'}  ")
    line.append(f"{story.prompt_tokens} + {story.completion_tokens} tokens", "cyan")
    line.append(f"  {story.ending}", "yellow" if story.ending == "length" else "dim")
    if story.trained:
        by = ", ".join(f"{count} in sample #{leaf}" for leaf, count in sorted(story.trained.items()))
        line.append(f"  trains {by}", "green")
    else:
        line.append("  trains nothing", "dim")
    if story.fate is not None:
        line.append(f"  leaf {story.fate}", "bold green" if story.survives else "red")
    return line


def _fetch(source: str) -> bytes:
    if not source.startswith(("http://", "https://")):
        return Path(source).read_bytes()
    with urlopen(Request(source), timeout=_TIMEOUT) as reply:
        body: bytes = reply.read()
        return body
