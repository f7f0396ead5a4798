"""The metadata of a session, as GET and the samples payload give it (pipeline.md, v2: `session_metadata`)."""

from __future__ import annotations

import logging
from typing import Any

from miles_ref.errors import described
from miles_ref.server.sessions import Session
from miles_ref.tokens.mismatch import Entry, incremental_report
from miles_ref.tokens.rendering import Renderer
from miles_ref.trajectory.node import Node
from miles_ref.trajectory.tree import TreeTrajectory

logger = logging.getLogger(__name__)


def tree_metadata(nodes: list[Node], leaves: list[Node]) -> dict[str, Any]:
    """`metadata.tree` of v2."""
    return {
        "nodes": [_node_metadata(node) for node in nodes],
        "leaves": [{"node_id": leaf.seq, "path_node_ids": [node.seq for node in leaf.path()]} for leaf in leaves],
    }


def _node_metadata(node: Node) -> dict[str, Any]:
    record = node.record
    return {
        "id": node.seq,
        "parent": None if node.parent is None else node.parent.seq,
        "seq": node.seq,
        "truncated": node.is_truncated,
        "committed_at": record.timestamp,
        "completion_span": [record.start, record.end],
        "num_tokens": record.end,
        "response_id": record.response_id,
    }


class MismatchReporter:
    """Computes `tito_session_mismatch` of paths, once for each node (tokens.md, Mismatch report)."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def report(self, node: Node, known: dict[int, Any]) -> list[Entry] | None:
        """The report of the node's path; None where it cannot be computed, which is logged. `known` is the memo."""
        if node.seq not in known:
            known[node.seq] = self._compute(node)
        report: list[Entry] | None = known[node.seq]
        return report

    def _compute(self, node: Node) -> list[Entry] | None:
        renderer = self._renderer
        try:
            return incremental_report(
                node.index,
                renderer.tokenizer,
                renderer.family,
                node.tokens(),
                node.stored_messages(),
                node.tools,
                renderer.template_kwargs,
            )
        except BaseException as error:
            # Templates run foreign code, and a tokenizer's panic is no Exception; the report is never worth a failed
            # call.
            logger.warning("no mismatch report for node %d: %s", node.seq, described(error))
            return None


class Snapshot:
    """What a session is at one moment. Nodes do not change, so it can be read from another thread."""

    def __init__(self, session: Session) -> None:
        trajectory = session.trajectory
        self.is_tree = isinstance(trajectory, TreeTrajectory)
        self.path = trajectory.path()
        self.nodes = trajectory.nodes()
        self.leaves = trajectory.leaves()
        self.mismatches = session.mismatches

    @property
    def token_count(self) -> int:
        """Tokens of all leaves: about what an assembly has to lay out."""
        return sum(leaf.record.end for leaf in self.leaves)

    def metadata(self, reporter: MismatchReporter, max_trim_tokens: int) -> dict[str, Any]:
        """`session_metadata` without `agent`; `accumulated_token_ids` is an int64 array where there are any."""
        metadata: dict[str, Any] = {}
        if self.path:
            report = reporter.report(self.path[-1], self.mismatches)
            if report is not None:
                metadata["tito_session_mismatch"] = report
        metadata["accumulated_token_ids"] = self.path[-1].tokens() if self.path else []
        metadata["max_trim_tokens"] = max_trim_tokens
        if self.is_tree:
            metadata["tree"] = tree_metadata(self.nodes, self.leaves)
        return metadata
