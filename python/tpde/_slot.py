"""Scratch memory as a state machine, for weights that are rebuilt when they are used. Nothing here knows a device.

Several threads, streams and signals share this state, and an exception may come between any two bytecodes. What holds all the
same, and what the rest of the code relies on:

1. A slot is *empty*, *filling*, *ready(weight, generation)* or *failed(error)*. Each transition is one method, and one assignment:

       any ─ begin ─▶ filling ─ publish ─▶ ready ─ clear ─▶ empty
                                           ready ─ fail ─▶ failed

2. Only *ready* says what the memory holds. ``begin`` comes before the first write to the memory, ``publish`` after the last call
   that may raise. What is interrupted in between leaves *filling*, which is used by nobody: it is as good as empty.
3. A generation is that of one filling, and never comes again. A failure marks the filling that it comes from, or none.
4. A slot is changed by one thread at a time: the one that has the lock of its :class:`~tpde._prefetch.Prefetcher`, or whose it is.
5. The status of a filling is noted before the filling is published: nothing is used whose failure would be lost.
6. A failure belongs to the model whose weight it spoilt. It is raised by that model's layers or its ``check``, never by another's, and owed
   until it was raised.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Union

import torch


@dataclass(frozen=True)
class Ready:
    """The memory holds a weight, or its payload."""

    weight: int
    generation: int
    #: What the memory holds, as a tensor.
    view: torch.Tensor


@dataclass(frozen=True)
class Failed:
    """What was decoded is known to be wrong."""

    error: Exception


EMPTY, FILLING = "empty", "filling"
State = Union[str, Ready, Failed]


class Slot:
    """Memory for one weight, or for one payload, and what is known of it."""

    _generations = itertools.count(1)

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._state: State = EMPTY

    @property
    def state(self) -> State:
        """One of the four."""
        return self._state

    def holding(self, weight: int) -> Ready | None:
        """The filling, if the memory holds this weight."""
        state = self._state
        return state if isinstance(state, Ready) and state.weight == weight else None

    @property
    def is_free(self) -> bool:
        """Whether nothing is lost when the memory is filled."""
        return not isinstance(self._state, Ready)

    def begin(self) -> int:
        """Before the memory is written: it holds nothing from here on. Gives the generation of the filling."""
        self._state = FILLING
        return next(self._generations)

    def publish(self, weight: int, generation: int, view: torch.Tensor) -> Ready:
        """After all that fills the memory was queued or done."""
        ready = Ready(weight, generation, view)
        self._state = ready
        return ready

    def clear(self) -> None:
        """The memory holds nothing that is of use."""
        self._state = EMPTY

    def fail(self, generation: int, error: Exception) -> None:
        """What this filling has decoded is wrong. Nothing changes if the memory was used or filled since."""
        state = self._state
        if isinstance(state, Ready) and state.generation == generation:
            self._state = Failed(error)


class Failures:
    """What went wrong with weights of one attached model, and was not raised yet."""

    def __init__(self) -> None:
        self._errors: dict[int, Exception] = {}

    def __deepcopy__(self, _: Any) -> Failures:
        return self

    def add(self, generation: int, error: Exception) -> None:
        """To be raised by the model's next call. A filling fails once, also if an interrupted caller says it twice."""
        self._errors[generation] = error

    def throw(self) -> None:
        """Raises the first. It is never lost: a signal's exception that comes instead has it for its context, or leaves it for the
        next call, and two threads that ask at once may both be told."""
        for generation, error in list(self._errors.items()):
            try:
                raise error
            except BaseException as raised:
                if raised is error:  # and not what a signal has raised before
                    self._errors.pop(generation, None)
                raise
