"""User code type-checks strictly against the package (py.typed)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import otel_rollout

USER_CODE = Path(__file__).parents[1] / "typing" / "user_code.py"


def test_the_package_says_that_it_is_typed():
    assert (Path(otel_rollout.__file__).parent / "py.typed").exists()


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not in this environment")
def test_user_code_type_checks_with_mypy_strict(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path), str(USER_CODE)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "MYPYPATH": str(Path(otel_rollout.__file__).parents[1])},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
