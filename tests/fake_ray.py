"""Ray without a cluster: actors are objects of this process, and any call to one can be made to fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class ActorDied(RayError):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(eq=False)
class Ref:
    """An object of the cluster, made when it is asked for."""

    make: Callable[[], Any]


@dataclass
class FakeRay:
    """What the pool uses of the module `ray`."""

    cards: float = 0.0
    fails: Callable[[str, int], Exception | None] = lambda method, number: None
    """Of a method's name and how often it was called before: the error to raise instead."""
    ready: bool = True
    """Whether actors start."""
    calls: dict[str, int] = field(default_factory=dict)

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
    util = SimpleNamespace(
        client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False)), get_node_ip_address=lambda: "10.0.0.7"
    )

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "ab12")

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0, "GPU": self.cards}}, {"Alive": False, "Resources": {}}]

    def put(self, value: Any) -> Ref:
        return Ref(lambda: value)

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        return ref.make()

    def wait(self, refs: Sequence[Ref], timeout: float) -> tuple[list[Ref], list[Ref]]:
        return (list(refs), []) if self.ready else ([], list(refs))

    def kill(self, actor: Actor) -> None:
        """What a process leaves when it ends: nothing."""
        if hasattr(actor._instance, "worker"):
            actor._instance.close()

    def remote(self, made: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: Actor(self, made())))


class Actor:
    def __init__(self, ray: FakeRay, instance: Any) -> None:
        self._ray, self._instance = ray, instance

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            resolved = [each.make() if isinstance(each, Ref) else each for each in arguments]
            return self._ray_call(method, resolved)

        return SimpleNamespace(remote=call, options=lambda **_: SimpleNamespace(remote=call))

    def _ray_call(self, method: str, arguments: list[Any]) -> Any:
        number = self._ray.calls[method] = self._ray.calls.get(method, 0) + 1
        error = self._ray.fails(method, number - 1)

        def fail() -> Any:
            raise error

        if method == "train":
            return self._stream(arguments, Ref(fail) if error else None)

        def attempt() -> Any:
            try:
                return getattr(self._instance, method)(*arguments)
            except Exception as cause:
                raise RayTaskError(cause) from cause

        return Ref(fail if error else attempt)

    def _stream(self, arguments: list[Any], failure: Ref | None) -> Iterator[Ref]:
        """What a call yields; a failure comes in place of the upload."""
        for message in self._instance.train(*arguments):
            last = message[0] in ("upload", "error")
            yield failure if last and failure is not None else Ref(lambda message=message: message)
