"""A small sandbox server: runs short Python programs over HTTP on the loopback, each in a process with limits.

It stands in for a real one (verl's ReTool recipe uses SandboxFusion). It limits time, memory and imports, which is
enough for a demo and no protection against a determined program.
"""

import ast
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ALLOWED_IMPORTS = frozenset({"math", "fractions", "decimal", "itertools", "statistics"})
MEMORY_BYTES = 512 * 2**20
OUTPUT_CHARACTERS = 4000
WALL_SECONDS = 20
SLOTS = threading.BoundedSemaphore(2)


def forbidden_imports(program: str) -> list[str]:
    """The modules a program imports and must not; a program that does not parse imports nothing."""
    try:
        nodes = list(ast.walk(ast.parse(program)))
    except SyntaxError:
        return []
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    return [name for name in names if name.partition(".")[0] not in ALLOWED_IMPORTS]


def limit(cpu_seconds: int) -> None:
    # Processor time, not wall time: a busy machine must not turn a quick program into a time-out.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    with contextlib.suppress(ValueError, OSError):  # macOS knows no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_program(program: str, cpu_seconds: int) -> dict[str, object]:
    """Run `program`; `status` is ok, error (it raised), timeout or forbidden."""
    forbidden = forbidden_imports(program)
    if forbidden:
        return {"status": "forbidden", "stdout": "", "stderr": f"import of {', '.join(forbidden)} is not allowed"}
    command = [sys.executable, "-I", "-S", "-c", program]
    with SLOTS, tempfile.TemporaryDirectory() as directory:
        try:
            done = subprocess.run(
                command,
                cwd=directory,
                env={},
                capture_output=True,
                text=True,
                timeout=WALL_SECONDS,
                check=False,
                preexec_fn=lambda: limit(cpu_seconds),
            )
        except subprocess.TimeoutExpired:
            return {"status": "timeout", "stdout": "", "stderr": ""}
    # A negative code is a signal: SIGXCPU or SIGKILL from the limit on processor time.
    status = "timeout" if done.returncode < 0 else "error" if done.returncode else "ok"
    return {"status": status, "stdout": done.stdout[:OUTPUT_CHARACTERS], "stderr": done.stderr[-OUTPUT_CHARACTERS:]}


class SandboxRequest(BaseHTTPRequestHandler):
    """`POST /run_code {"code": ..., "run_timeout": seconds}`, `GET /health`."""

    def do_GET(self) -> None:
        self._reply(200, {"status": "ok"})

    def do_POST(self) -> None:
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            program, seconds = str(body["code"]), max(1, int(body["run_timeout"]))
        except (KeyError, TypeError, ValueError) as error:
            self._reply(400, {"status": "error", "stderr": f"not a request for this server: {error}"})
            return
        result = run_program(program, seconds)
        self._reply(403 if result["status"] == "forbidden" else 200, result)

    def _reply(self, code: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Requests are not news."""


class SandboxServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    """Serve on a free port, print it, and stop when the parent closes standard input."""
    server = SandboxServer(("127.0.0.1", 0), SandboxRequest)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    main()
