"""The socket that a service listens on."""

import asyncio
import socket

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
