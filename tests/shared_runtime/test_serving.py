"""The socket that a service listens on, and what it does before it answers."""

import asyncio
import socket
import subprocess
import sys

from shared_runtime.serving import bind


def test_answers_leave_at_once() -> None:
    """Nagle's algorithm waits for the other end's delayed acknowledgement: 40 ms for every small answer."""

    async def main() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(answer, sock=bind("127.0.0.1", 0)) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            found = await seen
            writer.close()
            await writer.wait_closed()
        return found

    assert asyncio.run(main()) != 0


SERVED = """
import asyncio, gc
from shared_runtime.serving import bind, serve

async def app(scope, receive, send):
    pass

async def supervise():
    print(gc.get_freeze_count())

async def drain():
    pass

asyncio.run(serve(app, bind("127.0.0.1", 0), supervise(), drain))
"""


def test_what_a_service_begins_with_is_not_looked_through_for_garbage_again() -> None:
    """A full collection held up every answer for 0.2 s."""
    done = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 10_000
