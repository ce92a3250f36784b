import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import verl

from otel_rollout.otlp_json import decode_line
from otel_rollout.trace_view import SpanView

pytestmark = pytest.mark.slow

PACKAGE = Path(verl.__file__).parent
CHECK = """
import pytest

@pytest.fixture(autouse=True, scope="session")
def traced():
    from otel_rollout.frameworks.verl import status
    from otel_rollout.frameworks.verl.switch import turn_on
    import verl.experimental.agent_loop.tool_agent_loop
    found = status()
    assert len(found["applied"]) >= 8, found
    assert found["missing"] == []
    assert turn_on("own", "tests", "otlp_file", token2text=True, max_samples=None)
    yield
    import otel_rollout
    assert otel_rollout.flush()
    from otel_rollout import guard
    assert not guard.failures
"""


@pytest.fixture
def own_tests(tmp_path):
    """verl's tests as its wheel has them, beside a link to verl: some read its sources from the working directory."""
    shutil.copytree(PACKAGE.parent / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "verl").symlink_to(PACKAGE)
    (tmp_path / "conftest.py").write_text(CHECK)
    return tmp_path


def test_verl_s_own_cpu_tests_pass_while_we_trace(own_tests):
    loops = sorted(str(path) for path in (own_tests / "tests/experimental/agent_loop").glob("*_on_cpu.py"))
    assert len(loops) > 5
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment = clean | {"OTEL_ROLLOUT_FILE": str(own_tests / "traces"), "OTEL_ROLLOUT_RERAISE": "1"}
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-o",
        "asyncio_mode=auto",
        "--rootdir",
        str(own_tests),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *loops, "tests/tools", "tests/plugin"],
        env=environment,
        cwd=own_tests,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    summary = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout[-4000:]
    counted = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", summary)}
    assert counted.get("failed", 0) == counted.get("error", 0) == 0
    assert counted["passed"] >= 84, summary
    lines = [line for file in (own_tests / "traces").glob("*.jsonl") for line in file.read_bytes().splitlines()]
    spans = [SpanView.from_otlp(*parts) for line in lines for parts in decode_line(line)]
    # Their ops really ran through our decorators.
    names = {span.name for span in spans}
    assert {"execute_tool calculator", "execute_tool search"} <= names
    assert any(name.endswith(".extract_tool_calls") for name in names)
