"""Agent functions that the benches call: one that does nothing, and one that burns CPU as a real trial does."""

from __future__ import annotations

import time
from typing import Any


async def nothing(**kwargs: Any) -> dict[str, Any]:
    """Returns at once: what is measured is the call."""
    return {}


async def burn(seconds: float, **kwargs: Any) -> dict[str, Any]:
    """Uses `seconds` of CPU in the process where it runs; gives what it used."""
    begin = time.process_time()
    total = 0
    while time.process_time() - begin < seconds:
        total += sum(range(1000))
    return {"cpu_s": time.process_time() - begin}
