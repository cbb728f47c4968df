"""Scratch memory as a state machine, for weights that are rebuilt on use. Independent of devices.

Several threads, streams and signal handlers share this state, and an exception may come between any two bytecodes. The rest of
the code relies on these invariants:

1. A slot is *empty*, *filling*, *ready(weight, generation)* or *failed(error)*. Each transition is one method, and one assignment:

       any ─ begin ─▶ filling ─ publish ─▶ ready ─ clear ─▶ empty
                                           ready ─ fail ─▶ failed

2. Only *ready* describes the content of the memory. ``begin`` comes before the first write to the memory, ``publish`` after the
   last call that may raise. An interruption in between leaves *filling*, which is treated like *empty*.
3. Every filling has its own generation number. A failure marks the filling that caused it, or none.
4. One thread at a time changes a slot: the holder of the lock of its :class:`~tpde._prefetch.Prefetcher`, or the owning thread.
5. The status of a filling is recorded before the filling is published, so no failure is lost.
6. A failure belongs to the model of the weight. Only that model's layers, or its ``check``, raise it. It is kept until it was raised.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Union

import torch


@dataclass(frozen=True)
class Ready:
    """The memory contains a weight, or its payload."""

    weight: int
    generation: int
    #: The content of the memory, as a tensor.
    view: torch.Tensor


@dataclass(frozen=True)
class Failed:
    """The decoded content is known to be wrong."""

    error: Exception


EMPTY, FILLING = "empty", "filling"
State = Union[str, Ready, Failed]


class Slot:
    """Memory for one weight or one payload, with its state."""

    _generations = itertools.count(1)

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._state: State = EMPTY

    @property
    def state(self) -> State:
        """One of the four."""
        return self._state

    def holding(self, weight: int) -> Ready | None:
        """The filling, if the memory contains this weight."""
        state = self._state
        return state if isinstance(state, Ready) and state.weight == weight else None

    @property
    def is_free(self) -> bool:
        """Whether the memory has no useful content."""
        return not isinstance(self._state, Ready)

    def begin(self) -> int:
        """Call before the memory is written: its content becomes invalid. Returns the generation of the filling."""
        self._state = FILLING
        return next(self._generations)

    def publish(self, weight: int, generation: int, view: torch.Tensor) -> Ready:
        """Call after all writes to the memory are queued or done."""
        ready = Ready(weight, generation, view)
        self._state = ready
        return ready

    def clear(self) -> None:
        """Marks the content as useless."""
        self._state = EMPTY

    def fail(self, generation: int, error: Exception) -> None:
        """Marks the content of this filling as wrong. No effect if the memory was used or filled since."""
        state = self._state
        if isinstance(state, Ready) and state.generation == generation:
            self._state = Failed(error)


class Failures:
    """Errors of the weights of one attached model that were not raised yet."""

    def __init__(self) -> None:
        self._errors: dict[int, Exception] = {}

    def __deepcopy__(self, _: Any) -> Failures:
        return self

    def add(self, generation: int, error: Exception) -> None:
        """Adds an error, to be raised by the model's next call. One per filling, even if an interrupted caller adds it twice."""
        self._errors[generation] = error

    def throw(self) -> None:
        """Raises the first error. It is never lost: if a signal handler raises instead, the error is its context, or is kept for the
        next call. Two concurrent calls may both raise it."""
        for generation, error in list(self._errors.items()):
            try:
                raise error
            except BaseException as raised:
                if raised is error:  # not an exception of a signal handler
                    self._errors.pop(generation, None)
                raise
