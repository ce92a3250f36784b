"""What one run of an agent loop keeps beside its trajectory: the messages and texts that verl leaves scattered."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from otel_rollout import semconv

_PATH_MARKS: Final = ("/", ".", "~")


@dataclass(slots=True)
class Piece:
    """Token ids that a turn added, and their text once it is decoded (off the event loop)."""

    ids: list[int]
    text: str | None = None


@dataclass(slots=True)
class AgentRun:
    """One agent loop run by a worker.

    Attributes:
        worker: verl's AgentLoopWorker, for its tokenizer and configuration.
        raw_prompt: the messages it starts from.
        identity: what the worker's caller knows and `rollout_trace_attr` is not told.
        agent_data: ToolAgentLoop's state, once it is known; holds the conversation.
        said: messages that the model has seen or made.
        last_finish: finish reason of the last turn.
        pieces: what the turns added, prompts and completions in turn, since the history was last rewritten.
        provider: the inference engine, e.g. vllm, sglang, trtllm, hf.
        model: its name, low in cardinality: a hub id, or the last part of a path.
        closing: the assistant's last text where ToolAgentLoop kept no message of it.
    """

    worker: Any
    raw_prompt: list[Any]
    identity: dict[str, Any]
    agent_data: Any = None
    said: int = 0
    last_finish: str | None = None
    pieces: list[Piece] = field(default_factory=list)
    closing: str | None = None
    provider: str | None = field(init=False)
    model: str | None = field(init=False)

    def __post_init__(self) -> None:
        """Read the configuration once: it is slow to read, and each turn asks."""
        name = _read(self.worker, "rollout_config.name")
        self.provider = None if name is None else str(name)
        self.model = model_name(
            _read(self.worker, "model_config.path") or _read(self.worker, "model_config.local_path")
        )

    def token_limit(self, prompt_length: int, sampling_params: Any) -> int | None:
        """The most tokens that the engine may generate for a prompt, as verl's servers compute it."""
        for key in ("max_tokens", "max_new_tokens"):
            if sampling_params.get(key) is not None:
                return int(sampling_params[key])
        response, prompt = (
            _read(self.worker, "rollout_config.response_length"),
            _read(self.worker, "rollout_config.prompt_length"),
        )
        if not isinstance(response, int) or not isinstance(prompt, int):
            return None
        return min(response, prompt + response - prompt_length)

    def stops(self, token_id: int) -> bool:
        """Whether a token ends a generation by itself."""
        return token_id in (_read(self.worker, "tokenizer.eos_token_id"), _read(self.worker, "tokenizer.pad_token_id"))

    def decode(self, ids: Any) -> str:
        """Token ids as text, special tokens kept, as verl decodes them. Slow: never on the event loop."""
        return str(self.worker.tokenizer.decode(list(ids)))

    def texts(self, prompt_ids: list[int], response_ids: list[int]) -> dict[str, str]:
        """The text of an agent loop's output. Slow where the turns do not cover it: never on the event loop."""
        return {
            semconv.PROMPT_TEXT: self._text(prompt_ids, 0),
            semconv.RESPONSE_TEXT: self._text(response_ids, len(prompt_ids)),
        }

    def _text(self, ids: list[int], start: int) -> str:
        """Ids that stand at `start` of the whole: the texts of the turns as far as they are the same tokens."""
        texts: list[str] = []
        covered, position = 0, 0
        for piece in self.pieces:
            begin, length = position - start, len(piece.ids)
            position += length
            if begin < 0:
                continue
            if piece.text is None or begin != covered or piece.ids != ids[begin : begin + length]:
                break
            texts.append(piece.text)
            covered += length
        return "".join(texts) + (self.decode(ids[covered:]) if covered < len(ids) else "")

    def conversation(self) -> list[Any]:
        """The messages that came after the prompt."""
        messages = [] if self.agent_data is None else list(self.agent_data.messages[len(self.raw_prompt) :])
        if self.closing is not None:
            messages.append({"role": "assistant", "content": self.closing})
        return messages

    def definitions(self) -> Any:
        """The schemas of the tools that the model may call."""
        return getattr(self.agent_data, "_active_tool_schemas", None)


_run: ContextVar[AgentRun | None] = ContextVar("otel_rollout_verl_run", default=None)


def current_run() -> AgentRun | None:
    """The agent loop run that the calling code belongs to."""
    return _run.get()


def enter_run(run: AgentRun) -> Any:
    """Make `run` current; give the result to `leave_run`."""
    return _run.set(run)


def leave_run(token: Any) -> None:
    """Undo `enter_run`."""
    _run.reset(token)


def model_name(path: Any) -> str | None:
    """``Qwen/Qwen2.5-3B`` stays, ``/models/Qwen2.5-3B/`` becomes ``Qwen2.5-3B``."""
    if not isinstance(path, str) or not path:
        return None
    text = path.rstrip("/")
    return text.rsplit("/", 1)[-1] if text.startswith(_PATH_MARKS) or "://" in text or text.count("/") > 1 else text


def _read(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner
