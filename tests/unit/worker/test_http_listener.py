"""The gateway's HTTP socket."""

import asyncio
import socket

from headstart.config.settings import GatewaySettings
from headstart.worker.gateway_process import _listen


def test_a_streamed_token_is_not_held_back_for_the_acknowledgement_of_the_one_before():
    async def nodelay_of_an_accepted_connection():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        accepted = asyncio.get_running_loop().create_future()

        def accept(reader, writer):
            accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accept, sock=_listen(GatewaySettings(port=port))):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            answer = await accepted
            writer.close()
            return answer

    assert asyncio.run(nodelay_of_an_accepted_connection()) == 1
