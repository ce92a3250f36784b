"""Decorated generators: never consumed early, and their span ends when the stream ends, is closed or collected."""

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, Final

from otel_rollout.call import Op

_STREAM_ITEMS: Final = 1000


class _Seen(list[Any]):
    """What a stream yielded: the first items, and how many more there were."""

    more = 0

    def note(self, item: Any) -> None:
        if len(self) < _STREAM_ITEMS:
            self.append(item)
        else:
            self.more += 1

    def result(self) -> list[Any]:
        return [*self, f"… [cut: {self.more} more items]"] if self.more else list(self)


class _NoCall:
    """Stands where a call is not recorded."""

    ended: int | None = 0
    partial: Any = None

    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def succeed(self, result: Any) -> None: ...
    def fail(self, error: BaseException) -> None: ...


def generator(op: Op) -> Callable[..., Any]:
    """Wrap a generator function."""

    def traced(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        call = op.begin(args, kwargs)
        if call is None:
            return (yield from op.off(*args, **kwargs))
        seen = _Seen()
        try:
            stream = op.function(*args, **kwargs)
            resume, sent = stream.send, None
            while True:
                call.enter()
                try:
                    item = resume(sent)
                except StopIteration as stop:
                    call.succeed(seen.result())
                    return stop.value
                call.leave()
                seen.note(item)
                try:
                    resume, sent = stream.send, (yield item)
                except GeneratorExit:
                    call.enter()
                    stream.close()
                    raise
                except BaseException as error:  # thrown in by the consumer: the function's to handle
                    resume, sent = stream.throw, error
        except BaseException as error:
            if call.ended is None:
                call.partial = seen.result()
                call.fail(error)
            raise

    return traced


def async_generator(op: Op) -> Callable[..., Any]:
    """Wrap an async generator function."""

    async def traced(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        begun = op.begin(args, kwargs)
        call, function = (_NoCall(), op.off) if begun is None else (begun, op.function)
        seen = _Seen()
        try:
            stream = function(*args, **kwargs)
            resume, sent = stream.asend, None
            while True:
                call.enter()
                try:
                    item = await resume(sent)
                except StopAsyncIteration:
                    call.succeed(seen.result())
                    return
                call.leave()
                seen.note(item)
                try:
                    resume, sent = stream.asend, (yield item)
                except GeneratorExit:
                    call.enter()
                    await stream.aclose()
                    raise
                except BaseException as error:  # thrown in by the consumer: the function's to handle
                    resume, sent = stream.athrow, error
        except BaseException as error:
            if call.ended is None:
                call.partial = seen.result()
                call.fail(error)
            raise

    return traced
