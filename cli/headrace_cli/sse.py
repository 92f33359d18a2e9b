"""Parses server-sent events from lines of text."""

from collections.abc import AsyncIterator


async def event_data(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """The data of each event."""
    data: list[str] = []
    async for line in lines:
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data.clear()
    if data:
        yield "\n".join(data)
