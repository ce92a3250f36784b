"""Takes OTLP over HTTP, counts the bytes and throws them away. Prints its port; GET answers the counts."""

import json
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COUNTS: Counter[str] = Counter()


class Sink(BaseHTTPRequestHandler):
    """POST counts a request and its bytes under the path."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        COUNTS[self.path] += len(body)
        COUNTS["requests " + self.path] += 1
        self._answer(b"", "application/x-protobuf")

    def do_GET(self) -> None:
        self._answer(json.dumps(COUNTS).encode(), "application/json")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
