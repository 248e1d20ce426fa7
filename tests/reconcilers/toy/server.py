"""``python server.py HOST PORT WORDS``: answers every GET with WORDS."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST, PORT, WORDS = sys.argv[1:]


class Speaker(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"{WORDS}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


print(f"saying {WORDS} on {HOST}:{PORT}", flush=True)
ThreadingHTTPServer((HOST, int(PORT)), Speaker).serve_forever()
