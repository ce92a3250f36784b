"""The code of DESIGN.md section 1, run as a user would write it."""

import json
from dataclasses import dataclass

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_rollout import configure, flush, rollout_trace_attr, rollout_trace_op
from otel_rollout.trace_view import SpanView, from_spans


@dataclass
class Sample:
    index: int
    prompt: str
    target: str


@rollout_trace_op(kind="tool")
async def search(query: str) -> list[str]:
    return [f"{query}: 4"]


def exact_match(answer: str, target: str) -> float:
    return float(answer == target)


async def agent(prompt: str) -> str:
    found = await search(prompt)
    return found[0].rpartition(" ")[2]


async def rollout(sample, n, step):
    with rollout_trace_attr(sample_index=sample.index, step=step, rollout_n=n, validate=False) as trajectory:
        answer = await agent(sample.prompt)
        trajectory.reward(exact_match(answer, sample.target))
        trajectory.reward(0.2, name="format")
        return answer


async def test_an_own_loop_reads_back_as_it_ran():
    memory = InMemorySpanExporter()
    configure(project_name="gsm8k", experiment_name="qwen2.5-3b", exporters=[memory])
    for index in range(2):
        for n in range(4):
            assert await rollout(Sample(index, "2+2", "4"), n, step=3) == "4"
    assert flush(10)
    found = from_spans(SpanView.from_readable(span) for span in memory.get_finished_spans())
    assert len(found) == 8
    assert {(view.sample_index, view.rollout_n) for view in found} == {
        (index, n) for index in range(2) for n in range(4)
    }
    for view in found:
        assert (view.project_name, view.experiment_name, view.step, view.validate) == ("gsm8k", "qwen2.5-3b", 3, False)
        assert view.group_id == f"qwen2.5-3b/3/{view.sample_index}"
        assert (view.status, view.reward, view.rewards["format"]) == ("completed", 1.0, 0.2)
        (tool,) = view.tools
        assert tool.name == "execute_tool search"
        assert json.loads(tool.attributes["gen_ai.tool.call.arguments"]) == {"query": "2+2"}
        assert json.loads(tool.attributes["gen_ai.tool.call.result"]) == ["2+2: 4"]


async def test_without_configure_the_same_code_runs_and_records_nothing():
    assert await rollout(Sample(0, "2+2", "5"), 0, step=-1) == "4"


async def test_verls_spelling_of_both_functions_works(spans):
    @rollout_trace_op
    async def run(self, sampling_params, **kwargs):
        return kwargs["raw_prompt"]

    with rollout_trace_attr(step=1, sample_index=7, rollout_n=0, name="agent_loop", validate=True, trace=True):
        assert await run(None, {"temperature": 1}, raw_prompt="hi") == "hi"
    with rollout_trace_attr(7, 1, 0, "agent_loop", False, False):
        assert await run(None, {}, raw_prompt="hi") == "hi"
    inside, root = spans.get_finished_spans()
    assert root.name == "invoke_agent agent_loop"
    assert json.loads(inside.attributes["input.value"]) == {"sampling_params": {"temperature": 1}, "raw_prompt": "hi"}
