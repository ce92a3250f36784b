"""Lets the CUDA build of torch import and run on a machine without a GPU, without NVIDIA's 3 GB of libraries.

The only wheel of torch for x86-64 Linux names thirteen NVIDIA libraries and binds all their symbols when it is loaded.
Empty libraries with the same names, symbols and version tags, written beside torch's own, satisfy it. A library that is
installed is left alone; so is libcudart, which torch calls on a CPU too. Needs gcc and objdump.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# What the names of an unversioned library's functions start with, longest first.
PREFIXES = {
    "nvshmem": "nvshmem_host",
    "cublasLt": "cublasLt",
    "cusolver": "cusolver",
    "cusparse": "cusparse",
    "cusparseLt": "cusparseLt",
    "nvJitLink": "nvJitLink",
    "cublas": "cublas",
    "cuFile": "cufile",
    "curand": "curand",
    "cudnn": "cudnn",
    "cufft": "cufft",
    "cupti": "cupti",
    "pnccl": "nccl",
    "nvrtc": "nvrtc",
    "cuda": "cudart",
    "nccl": "nccl",
}
REAL_OR_OPTIONAL = {"cuda", "cudart"}  # the driver's library is optional


def objdump(option, library):
    return subprocess.run(["objdump", option, library], capture_output=True, text=True, check=True).stdout


def stem(name):
    """Return "cublas" for "libcublas.so.13"."""
    return re.match(r"lib([A-Za-z_]+)", name)[1]


def owner(symbol, version):
    """Return the library that an undefined symbol belongs to, None for one that is not NVIDIA's."""
    if version == "NVSHMEM":
        return "nvshmem_host"
    if re.match(r"lib(cu|nv|nccl)", version):
        return stem(version)
    if version not in ("", "Base"):
        return None
    matching = [prefix for prefix in PREFIXES if symbol.startswith(prefix)]
    return PREFIXES[max(matching, key=len)] if matching else None


def read_needs(folder):
    """Return what torch's libraries ask for: file names, functions and version tags, each by library."""
    names, functions, tags = {}, {}, {}
    for library in folder.glob("*.so"):
        for name in re.findall(r"NEEDED\s+(lib(?:cu|nv|nccl)\S+)", objdump("-p", library)):
            names[stem(name)] = name
        undefined = (line.split() for line in objdump("-T", library).splitlines() if "*UND*" in line)
        for *_, version, symbol in undefined:
            tag = "" if version == "*UND*" or re.fullmatch(r"[0-9a-f]{16}", version) else version.strip("()")
            key = owner(symbol, tag)
            if key:
                functions.setdefault(key, set()).add(symbol)
                if tag not in ("", "Base"):
                    tags[key] = tag
    return names, functions, tags


def c_function(name):
    """Write a function that reports failure: as a text where the caller prints it, as an error code elsewhere."""
    if re.search("String|Name", name):
        return f'const char *{name}(void) {{ return "not available: stub"; }}\n'
    return f"int {name}(void) {{ return 100; }}\n"


def write_stub(target, functions, tag):
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        source.write_text("".join(map(c_function, sorted(functions))) or "int unused_stub;\n")
        script.write_text(f"{tag} {{ global: *; }};\n")
        options = ["-shared", "-fPIC", "-w", "-O1", "-fno-builtin", f"-Wl,-soname,{target.name}"]
        options += [f"-Wl,--version-script={script}"] if tag else []
        target.unlink(missing_ok=True)  # a link into a package cache must not be written through
        subprocess.run(["gcc", *options, "-o", target, source], check=True)


def main(folder):
    names, functions, tags = read_needs(folder)
    installed = {path.name for path in (folder.parents[1] / "nvidia").rglob("lib*.so*")}
    wanted = {key: name for key, name in names.items() if key not in REAL_OR_OPTIONAL and name not in installed}
    for key, name in sorted(wanted.items()):
        write_stub(folder / name, functions.get(key, ()), tags.get(key, ""))
    print(f"{len(wanted)} empty CUDA libraries written for torch")


if __name__ == "__main__":
    torch = importlib.util.find_spec("torch")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(torch.origin).parent / "lib")
