"""The API process' end of a rank pipe: the next message off an asyncio stream."""

import asyncio
import pickle

from shared_runtime.ranks.messages import LENGTH, FromRank


async def read_message(reader: asyncio.StreamReader) -> FromRank | None:
    """The next message, or None once the rank has closed its end."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        message: FromRank = pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message
