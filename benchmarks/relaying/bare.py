"""A yardstick: the least that aiohttp needs to relay. No keys, no limits, no retries, no metrics.

python benchmarks/relaying/bare.py http://127.0.0.1:PORT
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp
from aiohttp import web


async def main() -> None:
    upstream = sys.argv[1]
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with http.post(upstream + request.path, data=body, headers=headers) as answer:
                if answer.content_type != "text/event-stream":
                    return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
                out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await out.prepare(request)
                async for part in answer.content.iter_any():
                    await out.write(part)
                return out

        app = web.Application(client_max_size=2**25)
        app.router.add_post("/v1/chat/completions", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
