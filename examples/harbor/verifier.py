"""Judges what an agent left in its sandbox: a command that must succeed there."""

from __future__ import annotations

import asyncio
from pathlib import Path


async def verify(check: str, folder: Path) -> float:
    """1.0 if the shell command `check` succeeds in the sandbox's folder, else 0.0."""
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", check, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
    )
    return 1.0 if await process.wait() == 0 else 0.0
