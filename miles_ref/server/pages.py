"""The page under /inspect: what the server holds, for a person."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from miles_ref.server.sessions import Session

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;width:100%}th,td{text-align:right;padding:.35rem .6rem;border-bottom:1px solid #d8dee4}
th:first-child,td:first-child{text-align:left}th{font-weight:600;background:#f6f8fa}code{font-size:13px}
.quiet{color:#59636e}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}th{background:#161b22}th,td{border-color:#30363d}
.quiet{color:#9198a1}a{color:#4493f8}}
"""

_COLUMNS = ("session", "turns", "leaves", "tokens", "messages", "stored KiB", "in flight", "idle s")


def inspect_page(sessions: Iterable[Session], now: float, about: str) -> str:
    """An HTML page that lists the sessions; `now` is of the store's clock, `about` says what the server is."""
    rows = "".join(_row(session, now) for session in sessions)
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    body = (
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else "<p>No session is open.</p>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Sessions</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f'<h1>Sessions</h1><p class="quiet">{escape(about)} · <a href="/metrics">metrics</a></p>{body}</body></html>'
    )


def _row(session: Session, now: float) -> str:
    path = session.trajectory.path()
    tip = path[-1] if path else None
    name = escape(session.id)
    figures = (
        len(session.trajectory.nodes()),
        len(session.trajectory.leaves()),
        tip.record.end if tip else 0,
        tip.message_count if tip else 0,
        session.stored_bytes // 1024,
        session.in_flight,
        round(now - session.last_used),
    )
    cells = "".join(f"<td>{figure}</td>" for figure in figures)
    return f'<tr><td><a href="/sessions/{name}"><code>{name}</code></a></td>{cells}</tr>'
