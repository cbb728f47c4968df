"""State machine of scratch memory, for weights that are rebuilt on use. Independent of devices.

Several threads, streams and signal handlers share this state, and a signal handler can raise an exception between any two
bytecodes. The rest of the code relies on these invariants:

1. A slot is *empty*, *filling*, *ready(weights, generation)* or *failed(error)*. Each transition is one method, and one assignment:

       any ─ begin ─▶ filling ─ publish ─▶ ready ─ fail ─▶ failed
       ready ─ drop ─▶ ready without the weight, or empty
       any ─ clear ─▶ empty

2. The content of the memory is valid only in state *ready*. ``begin`` is called before the first write to the memory,
   ``publish`` after the last call that can raise. An interruption between both leaves *filling*, which is treated like *empty*.
3. Every filling has its own generation number. A failure marks only the filling that caused it. If the slot was filled again
   since, the failure marks nothing.
4. One thread at a time changes a slot: the holder of the lock of its :class:`~tpde.nn._prefetch.Prefetcher`, or the owning thread.
5. The launch of a filling is recorded before the filling is published, so no failure is lost.
6. A failure belongs to the model of the weight. Only that model's layers, or its ``check``, raise it. It is kept until it is
   raised.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, Union

import torch


class Ready(NamedTuple):
    """State of a slot that contains weights, or payloads."""

    #: Contents of the memory as tensors, by the handles of the weights, in the order of their use. Not empty.
    views: Mapping[int, torch.Tensor]
    generation: int


class Failed(NamedTuple):
    """State of a slot whose decoded content is known to be wrong."""

    error: Exception


EMPTY, FILLING = "empty", "filling"
State = Union[str, Ready, Failed]


class Slot:
    """Memory for weights that are decoded together, or for their payloads, with its state."""

    _generations = itertools.count(1)

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._state: State = EMPTY

    @property
    def state(self) -> State:
        """One of the four states."""
        return self._state

    def holding(self, weight: int) -> Ready | None:
        """Returns the state if the memory contains this weight, otherwise None."""
        state = self._state
        return state if isinstance(state, Ready) and weight in state.views else None

    @property
    def is_free(self) -> bool:
        """Whether the memory has no useful content."""
        return not isinstance(self._state, Ready)

    def begin(self) -> int:
        """Starts a filling. Call this before the first write to the memory. Returns the generation of the filling."""
        self._state = FILLING
        return next(self._generations)

    def publish(self, generation: int, views: Mapping[int, torch.Tensor]) -> None:
        """Makes the content valid. Call this after all writes to the memory are queued or done."""
        self._state = Ready(views, generation)

    def drop(self, weight: int) -> None:
        """Marks a weight as not needed. No effect unless the memory contains it."""
        ready = self.holding(weight)
        if ready is not None:
            rest = {handle: view for handle, view in ready.views.items() if handle != weight}
            self._state = Ready(rest, ready.generation) if rest else EMPTY

    def clear(self) -> None:
        """Marks the content as not needed."""
        self._state = EMPTY

    def fail(self, generation: int, error: Exception) -> None:
        """Marks the content of this filling as wrong. No effect if the slot was cleared or filled since."""
        state = self._state
        if isinstance(state, Ready) and state.generation == generation:
            self._state = Failed(error)


class Failures:
    """Errors of one attached model's weights that were not raised yet."""

    def __init__(self) -> None:
        self._errors: dict[int, Exception] = {}

    def __deepcopy__(self, _: Any) -> Failures:
        return self

    def add(self, generation: int, error: Exception) -> None:
        """Adds an error, which the model's next call raises.

        A filling has at most one error, even if an interrupted caller adds it twice.
        """
        self._errors[generation] = error

    def throw(self) -> None:
        """Raises the first error.

        The error is not lost if a signal handler raises an exception instead: it is the context of that exception, or it is kept
        for the next call. Two concurrent calls can both raise the error.
        """
        if not self._errors:  # once per call of a layer
            return
        for generation, error in list(self._errors.items()):
            try:
                raise error
            except BaseException as raised:
                if raised is error:  # not an exception of a signal handler
                    self._errors.pop(generation, None)
                raise
