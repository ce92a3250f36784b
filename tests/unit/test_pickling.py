"""Decorated functions and classes travel as Ray sends them: by cloudpickle, also what stands in ``__main__``."""

import json
import os
import pickle
import subprocess
import sys

import cloudpickle
import pytest

from otel_rollout import rollout_trace_attr, rollout_trace_op

SENDER = '''
import sys, cloudpickle
from otel_rollout import rollout_trace_attr, rollout_trace_op

FACTOR = 3

@rollout_trace_op
def scale(x):
    """Doc."""
    return x * FACTOR

@rollout_trace_op(kind="tool", name="look_up")
async def search(query):
    return [query, scale(1)]

@rollout_trace_op
def stream(n):
    yield from range(n)

@rollout_trace_op
async def astream(n):
    for i in range(n):
        yield i

class Agent:
    def __init__(self, bias):
        self.bias = bias

    @rollout_trace_op(kind="llm")
    def generate(self, prompt_ids):
        return {"token_ids": [self.bias]}

    @classmethod
    @rollout_trace_op
    def build(cls, bias):
        return cls(bias)

    @rollout_trace_op
    @staticmethod
    def add(a, b):
        return a + b

def closure(offset):
    @rollout_trace_op(kind="evaluator", name="score")
    def score(x):
        return x + offset
    return score

@rollout_trace_attr(sample_index=7, step=1, name="whole")
def rollout(x):
    return scale(x)

# Used once before it is sent, as a driver would.
scale(1)
sys.stdout.buffer.write(cloudpickle.dumps((scale, search, stream, astream, Agent, Agent(5), closure(10), rollout)))
'''

RECEIVER = """
import asyncio, inspect, json, sys, cloudpickle
scale, search, stream, astream, Agent, agent, score, rollout = cloudpickle.loads(sys.stdin.buffer.read())
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otel_rollout import configure, rollout_trace_attr

memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(SimpleSpanProcessor(memory))
configure(tracer_provider=provider)

async def main():
    with rollout_trace_attr(sample_index=1) as trajectory:
        assert scale(2) == 6 and scale.__doc__ == "Doc."
        assert await search("q") == ["q", 3]
        assert list(stream(2)) == [0, 1]
        assert [i async for i in astream(2)] == [0, 1]
        assert agent.generate([1]) == {"token_ids": [5]}
        assert Agent.build(4).bias == 4
        assert Agent.add(1, 2) == 3
        assert score(1) == 11
    assert rollout(2) == 6
    assert inspect.iscoroutinefunction(search) and inspect.isasyncgenfunction(astream)

asyncio.run(main())
print(json.dumps([(span.name, span.attributes["openinference.span.kind"]) for span in memory.get_finished_spans()]))
"""


def run(script, environ, given=b""):
    done = subprocess.run(
        [sys.executable, "-c", script], input=given, capture_output=True, timeout=60, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout


def test_what_main_defines_works_in_another_process(monkeypatch):
    environ = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    found = json.loads(run(RECEIVER, environ, run(SENDER, environ)))
    assert found == [
        ["scale", "CHAIN"],
        ["scale", "CHAIN"],
        ["execute_tool look_up", "TOOL"],
        ["stream", "CHAIN"],
        ["astream", "CHAIN"],
        ["text_completion unknown", "LLM"],
        ["Agent.build", "CHAIN"],
        ["Agent.add", "CHAIN"],
        ["evaluate score", "EVALUATOR"],
        ["invoke_agent rollout_trace", "AGENT"],
        ["scale", "CHAIN"],
        ["invoke_agent whole", "AGENT"],
    ]


def test_sending_is_possible_while_a_pipeline_runs(spans):
    @rollout_trace_op
    def double(x):
        return 2 * x

    double(1)
    again = pickle.loads(cloudpickle.dumps(double))
    assert again(4) == 8
    assert [span.name for span in spans.get_finished_spans()] == [double.__qualname__] * 2


@rollout_trace_op
def of_a_module(x):
    return x


def test_functions_of_a_module_travel_by_name(spans):
    assert pickle.loads(pickle.dumps(of_a_module)) is of_a_module


def test_a_decorator_of_trajectories_survives_twice(spans):
    @rollout_trace_attr(sample_index=3, name="agent")
    def rollout():
        return 1

    for _ in range(2):
        rollout = pickle.loads(cloudpickle.dumps(rollout))
    assert rollout() == 1
    (span,) = spans.get_finished_spans()
    assert (span.name, span.resource.attributes["rollout.sample_index"]) == ("invoke_agent agent", 3)


@pytest.mark.parametrize("name", [None, "given"])
def test_names_survive(spans, name):
    @rollout_trace_op(name=name)
    def function():
        return None

    pickle.loads(cloudpickle.dumps(function))()
    (span,) = spans.get_finished_spans()
    assert span.name == (name or function.__qualname__)
    assert span.attributes["code.function.name"] == f"{__name__}.{function.__qualname__}"
