import copy
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from otel_rollout import semconv, tokens
from otel_rollout.otlp_json import decode_line, encode_lines
from otel_rollout.tokens import TokenLedger
from otel_rollout.trace_view import (
    UNFINISHED,
    UNKNOWN,
    SpanView,
    TokenRebuildError,
    TraceFileError,
    from_spans,
    read_trajectories,
)

STEP_LINK = Link(SpanContext(5, 6, is_remote=False), {"rollout.link": "step"})


def message(role, text):
    return {"role": role, "parts": [{"type": "text", "content": text}]}


class Recorder:
    """Writes trajectories as CONVENTIONS.md has them, with the SDK and the project's own token ledger."""

    def __init__(self):
        self.memory = InMemorySpanExporter()
        self.provider = TracerProvider(resource=Resource({"service.name": "test"}), shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))

    def tracer(self, **identity):
        tracer = copy.copy(self.provider.get_tracer(semconv.SCOPE))
        tracer.resource = self.provider.resource.merge(
            Resource({f"rollout.{key}": value for key, value in identity.items()})
        )
        return tracer

    def trajectory(self, turns, *, root=True, extra=None, **identity):
        """`turns`: (prompt ids, completion ids, mask or None, logprobs or None) of each."""
        tracer = self.tracer(**({"trajectory_id": "t-1", "step": 3, "sample_index": 7, "rollout_n": 1} | identity))
        attributes = {semconv.SPAN_KIND: semconv.KIND_AGENT}
        span = tracer.start_span("invoke_agent tool_agent", context=Context(), links=[STEP_LINK], attributes=attributes)
        here = trace.set_span_in_context(span)
        ledger = TokenLedger()
        for number, (prompt, completion, mask, logprobs) in enumerate(turns, 1):
            generation = tracer.start_span("chat policy", here, kind=SpanKind.CLIENT)
            opened = ledger.begin(prompt)
            packed = ledger.finish(opened, completion)
            generation.set_attributes(
                {
                    semconv.SPAN_KIND: semconv.KIND_LLM,
                    semconv.TURN: number,
                    semconv.DELTA_PROMPT: tokens.compact(tokens.encode_ids(opened.delta)),
                    semconv.DELTA_COMPLETION: tokens.encode_ids(packed),
                    semconv.DELTA_PREFIX_LENGTH: opened.prefix_length,
                    semconv.DELTA_PREFIX_HASH: opened.prefix_hash,
                    semconv.OUTPUT_TOKENS: len(completion),
                    semconv.FINISH_REASONS: ["stop"],
                    semconv.POLICY_VERSION: 10 + number,
                    semconv.OUTPUT_MESSAGES: json.dumps([message("assistant", f"turn {number}")]),
                }
            )
            if opened.rebased:
                generation.set_attribute(semconv.DELTA_REBASED, True)
            if mask is not None:
                generation.set_attribute(semconv.DELTA_MASK, json.dumps(tokens.run_lengths(mask)))
            if logprobs is not None:
                generation.set_attribute(semconv.DELTA_LOGPROBS, tokens.encode(logprobs, "f32"))
            generation.end()
        if extra:
            extra(tracer, here, span)
        if root:
            span.set_attributes({semconv.STATUS: "completed", semconv.REWARD: 1, "rollout.rewards.format": 0.5})
            span.end()

    @property
    def spans(self):
        return self.memory.get_finished_spans()

    def views(self):
        return from_spans(SpanView.from_readable(span) for span in self.spans)


@pytest.fixture
def recorder():
    return Recorder()


def through_a_file(spans):
    return [SpanView.from_otlp(*parts) for line in encode_lines(spans) for parts in decode_line(line)]


def test_a_span_is_the_same_from_the_sdk_and_from_a_file(recorder):
    def extra(tracer, here, root):
        root.add_event("rollout.token_mismatch", {"rollout.token_mismatch.position": 3})
        tool = tracer.start_span(
            "execute_tool calc", here, attributes={semconv.SPAN_KIND: semconv.KIND_TOOL, "x": [1, 2]}
        )
        tool.set_attribute("nested", {"a": [None, {"b": b"\x01"}]})
        tool.set_status(Status(StatusCode.ERROR, "broke"))
        tool.end()

    recorder.trajectory([([1, 2], [3], None, None)], extra=extra)
    direct = [SpanView.from_readable(span) for span in recorder.spans]
    assert through_a_file(recorder.spans) == direct
    tool = next(span for span in direct if span.kind == semconv.KIND_TOOL)
    assert (tool.status, tool.status_message, tool.error_type) == ("ERROR", "broke", "error")
    assert tool.attributes["nested"] == {"a": [None, {"b": b"\x01"}]}
    root = next(span for span in direct if span.parent_id is None)
    assert root.links[0].span_id == f"{6:016x}"
    assert root.events[0].attributes == {"rollout.token_mismatch.position": 3}
    assert tool.parent_id == root.span_id
    assert root.scope == semconv.SCOPE
    assert root.end_ns > root.start_ns > 10**18


def test_a_trajectory_has_its_identity_outcome_and_order(recorder):
    def extra(tracer, here, _root):
        for name, failed in (("calc", False), ("search", True)):
            tool = tracer.start_span(f"execute_tool {name}", here, attributes={semconv.SPAN_KIND: semconv.KIND_TOOL})
            if failed:
                tool.set_attribute(semconv.ERROR_TYPE, "ToolNotFound")
            tool.end()
        late = tracer.start_span("evaluate judge", here, attributes={semconv.SPAN_KIND: semconv.KIND_EVALUATOR})
        late.set_attributes({semconv.EVALUATION_NAME: "judge", semconv.EVALUATION_SCORE: 0.25})
        late.end()

    recorder.trajectory(
        [([1], [2], None, None), ([1, 2, 3], [4, 5], None, None)],
        extra=extra,
        validate=True,
        group_id="g",
        project_name="p",
        experiment_name="e",
        framework="verl",
    )
    (view,) = recorder.views()
    assert (view.step, view.sample_index, view.rollout_n, view.validate) == (3, 7, 1, True)
    assert (view.group_id, view.trajectory_id, view.project_name) == ("g", "t-1", "p")
    assert (view.experiment_name, view.framework) == ("e", "verl")
    assert (view.status, view.reward, view.rewards) == ("completed", 1.0, {"judge": 0.25, "format": 0.5})
    assert [turn.number for turn in view.turns] == [1, 2]
    assert [turn.policy_version for turn in view.turns] == [11, 12]
    assert view.turns[0].finish_reason == "stop"
    assert [tool.error_type for tool in view.tools] == [None, "ToolNotFound"]
    assert view.spans == sorted(view.spans, key=lambda span: span.start_ns)
    assert len(view.children(view.root.span_id)) == 5
    summary = view.summary
    assert (summary.turns, summary.tool_calls, summary.tool_errors, summary.response_tokens) == (2, 2, 1, 3)
    assert summary.duration_s == view.root.duration_s > 0


def test_the_final_conversation_is_the_roots_and_else_the_turns(recorder):
    def extra(_tracer, _here, root):
        root.set_attribute(semconv.INPUT_MESSAGES, json.dumps([message("user", "question")]))
        root.set_attribute(semconv.OUTPUT_MESSAGES, json.dumps([message("assistant", "answer")]))

    recorder.trajectory([([1], [2], None, None)], extra=extra)
    recorder.trajectory([([1], [2], None, None)], root=False)
    finished, unfinished = recorder.views()
    assert [found["role"] for found in finished.messages] == ["user", "assistant"]
    assert unfinished.messages == [message("assistant", "turn 1")]


def test_messages_that_were_cut_are_shown_as_they_are(recorder):
    recorder.trajectory([], extra=lambda _t, _h, root: root.set_attribute(semconv.INPUT_MESSAGES, '[{"role": "us'))
    (view,) = recorder.views()
    assert view.messages == [message("unknown", '[{"role": "us')]


def test_without_its_root_a_trajectory_is_unfinished(recorder):
    recorder.trajectory([([1], [2, 3], None, None)], root=False)
    (view,) = recorder.views()
    assert (view.root, view.status, view.reward, view.step) == (None, UNFINISHED, None, 3)
    assert view.turns[0].completion_ids == [2, 3]
    assert view.summary.turns == 1
    assert view.duration_s > 0


def test_a_root_that_does_not_say_is_an_error_or_unknown(recorder):
    for status in (StatusCode.ERROR, StatusCode.UNSET):
        span = recorder.tracer(trajectory_id="x").start_span("invoke_agent a", attributes={semconv.SPAN_KIND: "AGENT"})
        span.set_status(status)
        span.end()
    assert [view.status for view in recorder.views()] == ["error", UNKNOWN]


def test_the_trainers_step_and_lone_ops_are_no_trajectories(recorder):
    recorder.tracer(step=1).start_span("rollout step", attributes={semconv.SPAN_KIND: semconv.KIND_CHAIN}).end()
    recorder.provider.get_tracer("x").start_span("lone op").end()
    assert recorder.views() == []


def test_spans_sent_twice_count_once_and_order_does_not_matter(recorder):
    recorder.trajectory([([1], [2], None, None), ([1, 2], [3], None, None)])
    recorder.trajectory([([1], [2], None, None)], trajectory_id="t-2")
    spans = [SpanView.from_readable(span) for span in recorder.spans] * 2
    random.Random(4).shuffle(spans)
    found = {view.trajectory_id: view for view in from_spans(spans)}
    assert {name: len(view.spans) for name, view in found.items()} == {"t-1": 3, "t-2": 2}
    assert found["t-1"].turns[1].prompt_ids == [1, 2]


def test_segments_belong_to_their_turn(recorder):
    def extra(tracer, here, _root):
        generation = tracer.start_span(
            "chat policy", here, attributes={semconv.SPAN_KIND: semconv.KIND_LLM, semconv.TURN: 1}
        )
        inside = trace.set_span_in_context(generation)
        for segment in (1, 2):
            attributes = {
                semconv.SPAN_KIND: semconv.KIND_LLM,
                semconv.SEGMENT: segment,
                semconv.POLICY_VERSION: segment,
            }
            tracer.start_span("chat policy", inside, attributes=attributes).end()
        generation.end()

    recorder.trajectory([], extra=extra)
    (view,) = recorder.views()
    (turn,) = view.turns
    assert [segment.attributes[semconv.POLICY_VERSION] for segment in turn.segments] == [1, 2]
    assert (turn.prompt_ids, turn.completion_ids, turn.mask, turn.token_error) == (None, None, [], None)


IDS = st.lists(st.integers(0, 200_000), max_size=30)


@st.composite
def histories(draw):
    turns, seen = [], []
    for _ in range(draw(st.integers(1, 6))):
        if draw(st.integers(0, 5)) == 0:
            seen = draw(IDS)  # a tool that rewrites history
        prompt = seen + draw(IDS)
        completion = draw(IDS)
        logprobs = draw(st.none() | st.just([-0.5] * len(completion))) if completion else None
        turns.append((prompt, completion, None, logprobs))
        seen = prompt + completion
    return turns


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_every_turns_ids_are_rebuilt_exactly(turns):
    recorder = Recorder()
    recorder.trajectory(turns)
    (view,) = from_spans(through_a_file(recorder.spans))
    assert [(turn.prompt_ids, turn.completion_ids) for turn in view.turns] == [turn[:2] for turn in turns]
    assert [turn.logprobs for turn in view.turns] == [turn[3] for turn in turns]
    for turn in view.turns:
        assert turn.mask == [0] * turn.prompt_delta_length + [1] * len(turn.completion_ids)
        assert turn.prompt_delta_length == len(turn.prompt_ids) if turn.rebased else True


def test_a_mask_that_is_stored_is_given(recorder):
    mask = [0, 1, 0, 0, 1]
    recorder.trajectory([([1, 2], [3, 4, 5], mask, None)])
    (turn,) = recorder.views()[0].turns
    assert turn.mask == mask


@pytest.mark.parametrize("runs", ["[0, 1]", "no json", "[null]", "{}"])
def test_a_damaged_mask_is_flagged(recorder, runs):
    recorder.trajectory([([1, 2], [3], None, None)])
    views = [SpanView.from_readable(span) for span in recorder.spans]
    next(view for view in views if view.kind == "LLM").attributes[semconv.DELTA_MASK] = runs
    (turn,) = from_spans(views)[0].turns
    assert isinstance(turn.token_error, TokenRebuildError)
    assert turn.prompt_ids is None


def test_a_missing_turn_gives_an_error_and_never_wrong_ids(recorder):
    recorder.trajectory(
        [
            ([1], [2], None, None),
            ([1, 2, 3], [4], None, None),
            ([1, 2, 3, 4, 5], [6], None, None),
            ([9], [8], None, None),
        ]
    )
    views = [SpanView.from_readable(span) for span in recorder.spans if span.attributes.get(semconv.TURN) != 2]
    first, third, rebased = from_spans(views)[0].turns
    assert (first.prompt_ids, first.token_error) == ([1], None)
    assert third.prompt_ids is third.completion_ids is None
    assert "goes on from 4 ids" in str(third.token_error)
    assert "is a turn's span missing?" in str(third.token_error)
    assert (rebased.prompt_ids, rebased.rebased) == ([9], True)


def test_other_ids_of_the_right_number_do_not_pass_the_hash(recorder):
    recorder.trajectory([([1, 2], [3], None, None), ([1, 2, 3, 4], [5], None, None)])
    views = [SpanView.from_readable(span) for span in recorder.spans]
    first = next(view for view in views if view.attributes.get(semconv.TURN) == 1)
    first.attributes[semconv.DELTA_COMPLETION] = tokens.encode_ids([99])
    second = from_spans(views)[0].turns[1]
    assert second.prompt_ids is None
    assert second.token_error is not None


def test_a_damaged_delta_is_flagged_and_so_is_what_builds_on_it(recorder):
    recorder.trajectory([([1, 2], [3], None, None), ([1, 2, 3, 4], [5], None, None)])
    views = [SpanView.from_readable(span) for span in recorder.spans]
    next(view for view in views if view.attributes.get(semconv.TURN) == 1).attributes[semconv.DELTA_PROMPT] = (
        "u32;base64,!"
    )
    first, second = from_spans(views)[0].turns
    assert semconv.DELTA_PROMPT in str(first.token_error)
    assert "an earlier turn could not be rebuilt" in str(second.token_error)


def test_turns_side_by_side_extend_the_same_prefix(recorder):
    tracer = recorder.tracer(trajectory_id="x")
    root = tracer.start_span("invoke_agent a", attributes={semconv.SPAN_KIND: "AGENT"})
    here = trace.set_span_in_context(root)
    prefix = [1, 2, 3]
    plan = [(1, [], [1, 2], [3]), (2, prefix, [4], [5]), (3, prefix, [6], [7]), (4, [*prefix, 4, 5], [8], [9])]
    for number, seen, delta, completion in plan:
        attributes = {
            semconv.SPAN_KIND: semconv.KIND_LLM,
            semconv.TURN: number,
            semconv.DELTA_PROMPT: tokens.encode_ids(delta),
            semconv.DELTA_COMPLETION: tokens.encode_ids(completion),
            semconv.DELTA_PREFIX_LENGTH: len(seen),
            semconv.DELTA_PREFIX_HASH: tokens.prefix_hash(seen),
        }
        tracer.start_span("chat m", here, attributes=attributes).end()
    root.end()
    assert [turn.prompt_ids for turn in recorder.views()[0].turns] == [
        [1, 2],
        [1, 2, 3, 4],
        [1, 2, 3, 6],
        [1, 2, 3, 4, 5, 8],
    ]


def write(path, spans, *, limit=900_000):
    path.write_bytes(b"".join(encode_lines(spans, limit)))


def test_traces_spread_over_lines_and_files_are_put_together(recorder, tmp_path):
    for number in range(6):
        recorder.trajectory([([number], [2], None, None), ([number, 2], [3], None, None)], trajectory_id=f"t-{number}")
    spans = list(recorder.spans)
    random.Random(3).shuffle(spans)
    write(tmp_path / "a.jsonl", spans[:9], limit=1)
    write(tmp_path / "b.jsonl", spans[9:], limit=1)
    (tmp_path / "notes.txt").write_text("not read")
    found = {view.trajectory_id: view for view in read_trajectories(tmp_path)}
    assert sorted(found) == [f"t-{number}" for number in range(6)]
    assert all(len(view.spans) == 3 for view in found.values())
    assert found["t-5"].turns[1].prompt_ids == [5, 2]


def test_memory_holds_the_traces_under_way(recorder, tmp_path):
    for number in range(3):
        recorder.trajectory([([1], [2], None, None)], trajectory_id=f"t-{number}")
    write(tmp_path / "a.jsonl", recorder.spans, limit=1)
    reading = read_trajectories(tmp_path / "a.jsonl")
    first = next(reading)
    with (tmp_path / "a.jsonl").open("ab") as stream:
        stream.write(
            b"x" * 100_000
        )  # read after the first trajectory was given: had it all been read, this would go unnoticed
    told = []
    assert first.trajectory_id == "t-0"
    assert [view.trajectory_id for view in reading] == ["t-1", "t-2"]
    assert list(read_trajectories(tmp_path, on_problem=told.append))
    assert len(told) == 1


def test_a_torn_last_line_is_told_and_the_rest_is_read(recorder, tmp_path):
    recorder.trajectory([([1], [2], None, None)])
    lines = list(encode_lines(recorder.spans, 1))
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines)[:-40])
    told = []
    (view,) = read_trajectories(tmp_path / "a.jsonl", on_problem=told.append)
    assert view.status == UNFINISHED  # the root is the last to end
    assert len(told) == 1
    assert "a.jsonl:2" in told[0]
    assert "not complete" in told[0]


def test_many_bad_lines_are_counted(recorder, tmp_path):
    recorder.trajectory([([1], [2], None, None)])
    write(tmp_path / "a.jsonl", recorder.spans)
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write("junk\n" * 10)
    told = []
    assert len(list(read_trajectories(tmp_path, on_problem=told.append))) == 1
    assert len(told) == 4
    assert "it does not start with {" in told[0]
    assert told[3].startswith("7 more lines")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("hello\n", "no OTLP JSON lines"),
        ('{"a": 1}\n', "it has no resourceSpans"),
    ],
)
def test_a_file_without_spans_is_an_error_that_says_why(tmp_path, content, said):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(TraceFileError, match=said):
        list(read_trajectories(tmp_path / "a.jsonl"))


def test_a_path_without_files_is_an_error(tmp_path):
    with pytest.raises(TraceFileError, match="does not exist"):
        list(read_trajectories(tmp_path / "nowhere"))
    with pytest.raises(TraceFileError, match=r"no \.jsonl file"):
        list(read_trajectories(tmp_path))


def test_what_the_collector_writes_is_read(tmp_path):
    span = {
        "traceId": "5B8EFFF798038103D269B633813FC60C",
        "spanId": "EEE19B7EC3C1B174",
        "parentSpanId": "",
        "name": "invoke_agent a",
        "kind": 1,
        "startTimeUnixNano": "1544712660000000000",
        "endTimeUnixNano": 1544712661500000000,
        "attributes": [
            {"key": "openinference.span.kind", "value": {"stringValue": "AGENT"}},
            {"key": "rollout.turns", "value": {"intValue": 2}},
            {"key": "rollout.tool_calls", "value": {"intValue": "4"}},
        ],
        "status": {"code": "STATUS_CODE_OK"},
    }
    line = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": [span]}], "schemaUrl": "x"}]}
    (tmp_path / "a.json").write_text(json.dumps(line))
    (view,) = read_trajectories(tmp_path)
    assert view.trace_id == "5b8efff798038103d269b633813fc60c"
    assert (view.summary.turns, view.summary.tool_calls, view.duration_s) == (2, 4, 1.5)
    assert view.root.status == "OK"
