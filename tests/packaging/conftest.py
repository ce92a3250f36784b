import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import uv

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "tests" / "env" / "constraints.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment in which nothing but the wheel and what it asks for is installed."""

    folder: Path

    def run(self, program, *arguments, **options):
        command = [self.folder / "bin" / program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=self.folder, **options).stdout

    def python(self, code, **options):
        """Run code away from the checkout, so that only what is installed can be imported."""
        return self.run("python", "-I", "-c", code, **options)


def run_uv(*arguments):
    done = subprocess.run([uv.find_uv_bin(), *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder with the sdist, and the wheel made from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run_uv("build", "--python", sys.executable, "--build-constraints", str(CONSTRAINTS), "--out-dir", str(folder))
    return folder


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """What `pip install .` makes of an empty environment."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    run_uv("venv", "--python", sys.executable, "--seed", str(folder))
    environment = Installed(folder=folder)
    environment.run("python", "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), str(ROOT))
    return environment
