"""Imports verl once, then does each job in a fork of its own: a row starts clean and waits for no import.

Reads jobs as JSON lines from the standard input, writes results as JSON lines to the file descriptor given as argument.
"""

import importlib
import json
import os
import sys
import traceback

PRELOADED = (
    "verl.experimental.agent_loop.tool_agent_loop",
    "verl_tools",
    "psutil",
)


def main() -> None:
    """Serve until the standard input ends."""
    results = os.fdopen(int(sys.argv[1]), "w")
    import verl_loop

    for name in PRELOADED:
        importlib.import_module(name)
    verl_loop.config(verl_loop.model_dir(sys.argv[2]))
    verl_loop.load_tokenizer(sys.argv[2])
    _answer(results, {"ready": True})
    for line in sys.stdin:
        _answer(results, in_fork(json.loads(line)))


def in_fork(job: dict) -> dict:
    """Do a job in a child and return what it found, or ``{"error": text}``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(job, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"the process ended with status {status}"}


def _child(job: dict, writing: int) -> None:
    try:
        import jobs

        text = json.dumps(jobs.run(job))
    except BaseException:
        text = json.dumps({"error": traceback.format_exc()})
    with os.fdopen(writing, "w") as pipe:
        pipe.write(text)
    os._exit(0)  # trackio and mlflow leave threads behind that would hold the process


def _answer(results: object, found: dict) -> None:
    results.write(json.dumps(found) + "\n")
    results.flush()


if __name__ == "__main__":
    main()
