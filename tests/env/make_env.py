"""Makes the environments that the Makefile uses, under .venv/, from the versions that constraints.txt pins.

make_env.py core|verl|bench [--python 3.12] [--lowest]   make one, unless it is current; prints its interpreter
make_env.py pythons                                      print the other Python versions found here
make_env.py lock                                         resolve constraints.txt and lowest.txt anew
"""

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "env"
ENVS = ROOT / ".venv"
VERSION = ROOT / "src" / "otel_rollout" / "_version.py"
CONSTRAINTS = HERE / "constraints.txt"
LOWEST = HERE / "lowest.txt"
OVERRIDES = HERE / "overrides.txt"
CPU_OVERRIDES = HERE / "overrides-cpu.txt"
STUBS = HERE / "make_cuda_stubs.py"
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
VERL_SUPPORTED = SUPPORTED[:3]
TAKES = {"core": "5 s", "verl": "10 s, the first time a minute", "bench": "10 s, the first time a minute"}
ROLLING = re.compile(r"^ [-+~] ")  # uv's list of every package


def say(text):
    print(f"==> {text}", file=sys.stderr, flush=True)


def stop(text):
    sys.exit(f"error: {text}")


def run(*command):
    """Run a command, showing what it says except long lists; everything if it fails."""
    words = [str(part) for part in command]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    hidden = []
    for line in process.stdout:
        if ROLLING.match(line):
            hidden.append(line)
        else:
            print(f"    {line.rstrip()}", file=sys.stderr, flush=True)
    if process.wait():
        sys.stderr.writelines(hidden[-20:])
        short = " ".join(Path(word).name for word in words[:3])
        stop(f"`{short} ...` failed with exit code {process.returncode}, see above")


def version_of(python):
    """Return "3.12" for an interpreter, None for what does not run."""
    show = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    found = subprocess.run([python, "-c", show], capture_output=True, text=True, check=False)
    return found.stdout.split()[0] if found.returncode == 0 else None


def find_python(version):
    """Find an interpreter by its version, on PATH or where pyenv and uv keep theirs."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    uv_kept = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local" / "share" / "uv" / "python"))
    kept = [path for folder in (pyenv, uv_kept) for path in sorted(folder.glob(f"*{version}*/bin/python{version}"))]
    candidates = [sys.executable, *map(str, kept), shutil.which(f"python{version}"), shutil.which("python3")]
    return next((python for python in candidates if python and version_of(python) == version), None)


def python_for(name, version):
    """Choose the interpreter of an environment: the one that runs this, unless verl does not support it."""
    own = "{}.{}".format(*sys.version_info[:2])
    allowed = SUPPORTED if name == "core" else VERL_SUPPORTED
    wanted = [version] if version else [own, *reversed(allowed)]
    found = next((python for v in wanted if v in allowed and (python := find_python(v))), None)
    return found or stop(
        f"the {name} environment needs Python {version or ' or '.join(allowed)}, and none was found. "
        "Install one and run `make PYTHON=/path/to/python3 ...`."
    )


def uv():
    """Return uv in the version that is pinned, putting it into an environment of its own first."""
    pin = re.search(r"^uv==\S+", CONSTRAINTS.read_text(), re.MULTILINE)
    wanted = pin[0] if pin else "uv"
    folder, stamp = ENVS / "uv", ENVS / "uv" / ".made-for"
    if not (stamp.exists() and stamp.read_text() == f"{wanted} {folder}"):
        say(f"getting {wanted} through pip (a few seconds) ...")
        command = [sys.executable, "-m", "venv", "--clear", str(folder)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            stop(f"`{' '.join(command)}` failed (on Debian and Ubuntu: apt install python3-venv)\n{made.stdout}")
        run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted)
        stamp.write_text(f"{wanted} {folder}")
    return folder / "bin" / "uv"


def without_cuda():
    """Say whether torch can do without NVIDIA's libraries here: the stubs that stand in for them need a compiler."""
    if sys.platform != "linux":
        return False
    missing = [tool for tool in ("gcc", "objdump") if not shutil.which(tool)]
    if missing:
        say(f"{' and '.join(missing)} not found: torch comes with all its CUDA libraries (3 GB more to fetch and keep)")
    return not missing


def digest(python, lowest, cpu):
    """Hash everything an environment is made from."""
    made_from = sorted([*HERE.glob("*.txt"), *HERE.glob("*.in"), *HERE.glob("*.py"), VERSION])
    project = (
        (ROOT / "pyproject.toml").read_text().partition("[tool.uv]")[0]
    )  # how it is linted and tested changes nothing
    state = hashlib.sha256(f"{ROOT} {python} {lowest} {cpu} {project}".encode())
    for path in made_from:
        state.update(path.read_bytes())
    return state.hexdigest()


def pins_for(lowest):
    """Return the text of the constraints, if asked for with the oldest versions in place of the pinned ones."""
    pinned = CONSTRAINTS.read_text().splitlines()
    if not lowest:
        return "\n".join(pinned)
    oldest = [line for line in LOWEST.read_text().splitlines() if "==" in line]
    names = {line.split("==")[0] for line in oldest}
    return "\n".join([*(line for line in pinned if line.split("==")[0] not in names), *oldest])


def fill(name, folder, python, lowest, cpu):
    tool = uv()
    run(tool, "venv", "--quiet", "--clear", "--no-python-downloads", "--python", python, folder)
    pins = folder / "constraints.txt"
    pins.write_text(pins_for(lowest))
    options = ["--constraints", pins, "--build-constraints", CONSTRAINTS, "--overrides", OVERRIDES]
    options += ["--overrides", CPU_OVERRIDES] if cpu else []
    run(tool, "pip", "install", "--python", folder, *options, "--requirements", HERE / f"{name}.in")
    if cpu:
        run(folder / "bin" / "python", STUBS)


def make(name, version=None, *, lowest=False):
    """Make one environment, or find that the one there is current; return its interpreter."""
    python = python_for(name, version)
    cpu = name != "core" and without_cuda()
    folder = ENVS / "-".join([name, *([version] if version else []), *(["lowest"] if lowest else [])])
    stamp, wanted = folder / ".made-for", digest(python, lowest, cpu)
    if not (stamp.exists() and stamp.read_text() == wanted):
        say(f"setting up the {folder.name} environment (about {TAKES[name]}) ...")
        began = time.monotonic()
        fill(name, folder, python, lowest, cpu)
        stamp.write_text(wanted)
        say(f"{folder.name} environment ready after {time.monotonic() - began:.0f} s")
    return folder / "bin" / "python"


def lock():
    """Resolve all environments together, and the oldest versions that pyproject.toml allows."""
    tool, compiled = uv(), ["--universal", "--python-version", "3.10", "--upgrade", "--quiet", "--no-annotate"]
    compiled += ["--custom-compile-command", "make lock", "--no-emit-package", "otel-rollout", "--overrides", OVERRIDES]
    say("resolving constraints.txt (half a minute) ...")
    inputs = ["pyproject.toml", "--all-extras", HERE / "core.in", HERE / "bench.in"]
    run(tool, "pip", "compile", *compiled, "--overrides", CPU_OVERRIDES, *inputs, "--output-file", CONSTRAINTS)
    core = ["pyproject.toml", "--extra", "grpc", "--extra", "instrument", "--resolution", "lowest-direct"]
    run(tool, "pip", "compile", *compiled, *core, "--output-file", LOWEST)
    for path in (CONSTRAINTS, LOWEST):
        path.write_text(plainer(path.read_text()))


def plainer(text):
    """Leave out of the markers what [tool.uv] environments fixes anyway, and what is never installed."""
    fixed = ("python_full_version < '3.14'", "sys_platform == 'linux'")
    fixed += ("implementation_name == 'cpython'", "platform_python_implementation == 'CPython'")
    lines = [line for line in text.splitlines() if "== 'never'" not in line]
    text = "\n".join(lines) + "\n"
    for marker in fixed:
        text = text.replace(f"{marker} and ", "").replace(f" and {marker}", "").replace(f" ; {marker}", "")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TAKES, "pythons", "lock"])
    parser.add_argument("--python", choices=SUPPORTED, help="the version to use; by default the one that runs this")
    parser.add_argument("--lowest", action="store_true", help="the oldest dependencies that pyproject.toml allows")
    chosen = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036 - whoever runs make may have an older one
        stop(f"Python 3.10 or newer is needed, not {sys.version.split()[0]}: run `make PYTHON=/path/to/python3 ...`")
    if chosen.what == "pythons":
        own = "{}.{}".format(*sys.version_info[:2])
        print(*[version for version in SUPPORTED if version != own and find_python(version)])
        return
    ENVS.mkdir(exist_ok=True)
    with (ENVS / ".lock").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        if chosen.what == "lock":
            lock()
        else:
            print(make(chosen.what, chosen.python, lowest=chosen.lowest))


if __name__ == "__main__":
    main()
