"""Two training steps and one validation pass of verl's real agent loop on a CPU, recorded as OpenTelemetry traces.

The policy is a script, not a model: it answers from prepared texts so that the run shows right and wrong answers,
failing tools, a truncated and a cancelled trajectory. Everything around it is verl's own code and real Ray actors.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from verl_demo.cluster import worker_errors
from verl_demo.questions import load_questions
from verl_demo.session import Job, Progress, run
from verl_demo.trainer import TRAINERS

POLICIES = {
    "scripted": "a script (prepared texts, no model)",
    "hf": "a small transformers model with random weights; after its tokens come the scripted texts and tool calls",
}
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FORWARDED = ("OTEL_", "MLFLOW_", "WANDB_", "TRACKIO_", "VERL_")


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=sorted(TRAINERS), default="v1", help="verl's trainer path (default: v1)")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="scripted", help="default: scripted")
    parser.add_argument("--backend", help="send the traces there too, e.g. otlp (default: only a file)")
    parser.add_argument("--out", type=Path, help="folder for the traces (default: demo-runs/<time>)")
    parser.add_argument("--groups", type=int, default=4, metavar="N", help="questions per training step (default: 4)")
    parser.add_argument("--steps", type=int, default=2, help="training steps (default: 2)")
    chosen = parser.parse_args(argv)
    most = len(load_questions("train"))
    if not 1 <= chosen.groups <= most or chosen.steps < 1:
        parser.error(f"--groups must be 1 to {most}, and --steps at least 1")
    return chosen


def tracing_environment(traces: Path, backend: str | None) -> dict[str, str]:
    """OpenTelemetry's own variables for the workers: always a file for the picture, and what the user asked for."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    endpoint = "otlp" if any(environment.get(name) for name in ENDPOINTS) else ""
    names = ["otlp_file", *environment.get("OTEL_TRACES_EXPORTER", endpoint).split(","), backend or ""]
    environment["OTEL_TRACES_EXPORTER"] = ",".join(dict.fromkeys(name.strip() for name in names if name.strip()))
    environment["OTEL_ROLLOUT_FILE"] = str(traces)
    return environment


def be_quiet() -> None:
    """Keep the warnings of other packages about a machine without an accelerator off the terminal; errors stay."""
    import logging

    warnings.filterwarnings("ignore", module=r"verl\.|transformers|torch")
    logging.getLogger().setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("VERL_LOGGING_LEVEL", "TQ_LOGGING_LEVEL"):
        os.environ.setdefault(name, "ERROR")
    os.environ.setdefault("TQDM_DISABLE", "1")


def main(argv: Sequence[str] | None = None) -> int:
    chosen = options(argv)
    be_quiet()
    out = (chosen.out or Path("demo-runs") / time.strftime("%Y%m%d-%H%M%S")).resolve()
    traces = out / "traces"
    if traces.exists() and any(traces.iterdir()):
        print(f"{traces} holds the traces of an earlier run; choose another --out or remove it", file=sys.stderr)
        return 1
    # Ray's sockets lie below, and the path of a socket may have no more than 107 characters.
    short = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 16 else "/tmp"
    work = Path(tempfile.mkdtemp(prefix="verl-demo-", dir=short))
    job = Job(
        trainer=chosen.trainer,
        policy=chosen.policy,
        groups=chosen.groups,
        steps=chosen.steps,
        work=work,
        environment=tracing_environment(traces, chosen.backend),
    )
    print(f"verl's real agent loop (trainer {chosen.trainer}) on this machine; the policy is {POLICIES[chosen.policy]}")
    os.environ.update(job.environment)  # this process is the trainer: verl is traced here too
    progress = Progress()
    try:
        run(job, progress)
        progress("all processes are gone; reading the traces")
    except KeyboardInterrupt:
        print("stopped; nothing is left running", file=sys.stderr)
        shutil.rmtree(work, ignore_errors=True)
        return 130
    except Exception as error:
        print(f"the demo failed: {type(error).__name__}: {error}", file=sys.stderr)
        print("\n".join(worker_errors(work / "ray")), file=sys.stderr)
        print(f"the logs of all processes: {work / 'ray'}", file=sys.stderr)
        return 1
    finally:
        progress.stop()
    shutil.rmtree(work, ignore_errors=True)
    return picture(traces, job)


def picture(traces: Path, job: Job) -> int:
    """Show what was recorded; exit code 1 if that is not everything."""
    from verl_demo.picture import load, show

    trajectories = load(traces)
    if not trajectories:
        print(f"no trace was found in {traces}; `otel-rollout doctor` may know why", file=sys.stderr)
        return 1
    show(trajectories, traces)
    if len(trajectories) != job.trajectories and "OTEL_TRACES_SAMPLER" not in job.environment:
        print(f"{len(trajectories)} trajectories are in the traces; {job.trajectories} were run", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
