"""A small explicit-state model checker.

A thread is a list of steps. Stores go to the thread's buffer and reach memory later, in any order
between variables (as on machines that keep stores to different addresses apart), except that a store
marked `release` waits for all older ones. Loads see the thread's own newest store first, else memory.
A `Fence` passes only with an empty buffer, as does a compare-and-swap. `explore` tries every
interleaving of steps and buffered stores and returns the shortest way to a state that must not be, or
None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

STATES_MAX = 500_000

Registers = dict[str, int]
Value = int | Callable[[Registers], int]


@dataclass(frozen=True)
class Store:
    """Write a variable, some time."""

    variable: str
    value: Value
    release: bool = False


@dataclass(frozen=True)
class Load:
    """Read a variable into a register."""

    variable: str
    register: str


@dataclass(frozen=True)
class Fence:
    """Wait until all stores of this thread are in memory."""


@dataclass(frozen=True)
class Swap:
    """Compare-and-swap; the register gets 1 when it took place. Memory is up to date before and after."""

    variable: str
    expected: Value
    value: Value
    register: str


@dataclass(frozen=True)
class Set:
    """Change a register; or, with a capital first letter, a fact about the whole that only the invariant sees."""

    register: str
    value: Value


@dataclass(frozen=True)
class Go:
    """Go to a step by its number when the condition holds."""

    when: Callable[[Registers], bool]
    to: int


@dataclass(frozen=True)
class Wait:
    """Stay until a variable in memory has a value."""

    variable: str
    value: int


Step = Store | Load | Fence | Swap | Set | Go | Wait
Frozen = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Thread:
    """Where a thread is, what it knows, and what it has not written yet."""

    at: int
    registers: Frozen
    buffer: tuple[tuple[str, int, bool], ...]


@dataclass(frozen=True)
class State:
    """Everything at one moment."""

    memory: Frozen
    facts: Frozen
    threads: tuple[Thread, ...]

    def is_over(self, programs: Sequence[Sequence[Step]]) -> bool:
        """Whether all threads have ended and all stores arrived."""
        return all(t.at >= len(p) and not t.buffer for t, p in zip(self.threads, programs, strict=True))


class Stuck(Exception):
    """More states than a small model has."""


def explore(
    memory: Mapping[str, int],
    programs: Sequence[Sequence[Step]],
    is_wrong: Callable[[dict[str, int], dict[str, int]], bool],
    is_wrong_end: Callable[[dict[str, int], dict[str, int]], bool] = lambda memory, facts: False,
) -> list[str] | None:
    """The shortest history that ends where `is_wrong(memory, facts)` holds, or where nothing can go on and
    `is_wrong_end` does; None when there is none."""
    first = State(_freeze(memory), (), tuple(Thread(0, (), ()) for _ in programs))
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        following = list(_following(state, programs))
        known = dict(state.memory), dict(state.facts)
        if is_wrong(*known) or (not following and is_wrong_end(*known)):
            return _history(came_from, state)
        for after, what in following:
            if after not in came_from:
                came_from[after] = (state, what)
                waiting.append(after)
        if len(came_from) > STATES_MAX:
            raise Stuck(f"more than {STATES_MAX} states")
    return None


def _history(came_from: Mapping[State, tuple[State, str] | None], state: State) -> list[str]:
    steps: list[str] = []
    while (before := came_from[state]) is not None:
        state = before[0]
        steps.append(before[1])
    return steps[::-1]


def _freeze(values: Mapping[str, int]) -> Frozen:
    return tuple(sorted(values.items()))


def _following(state: State, programs: Sequence[Sequence[Step]]) -> list[tuple[State, str]]:
    found = []
    for number, (thread, program) in enumerate(zip(state.threads, programs, strict=True)):
        found += _flushes(state, number, thread)
        if thread.at < len(program):
            found += _steps(state, number, thread, program[thread.at])
    return found


def _flushes(state: State, number: int, thread: Thread) -> list[tuple[State, str]]:
    found = []
    for place, (variable, value, release) in enumerate(thread.buffer):
        older = thread.buffer[:place]
        if any(name == variable for name, _, _ in older) or (release and older):
            continue
        memory = dict(state.memory) | {variable: value}
        rest = Thread(thread.at, thread.registers, (*older, *thread.buffer[place + 1 :]))
        found.append((_replace(state, number, rest, memory), f"{number}: {variable} = {value} arrives"))
    return found


def _steps(state: State, number: int, thread: Thread, step: Step) -> list[tuple[State, str]]:
    registers, memory, facts = dict(thread.registers), dict(state.memory), dict(state.facts)
    buffer, at = thread.buffer, thread.at + 1
    match step:
        case Store(variable, value, release):
            buffer = (*buffer, (variable, _value(value, registers), release))
        case Load(variable, register):
            own = [value for name, value, _ in buffer if name == variable]
            registers[register] = own[-1] if own else memory[variable]
        case Fence():
            if buffer:
                return []
        case Swap(variable, expected, value, register):
            if buffer:
                return []
            registers[register] = int(memory[variable] == _value(expected, registers))
            if registers[register]:
                memory[variable] = _value(value, registers)
        case Set(register, value):
            (facts if register[0].isupper() else registers)[register] = _value(value, registers)
        case Go(when, to):
            at = to if when(registers) else at
        case Wait(variable, wanted):
            if memory[variable] != wanted:
                return []
    changed = Thread(at, _freeze(registers), buffer)
    return [(_replace(state, number, changed, memory, facts), f"{number}: {step}")]


def _value(value: Value, registers: Registers) -> int:
    return value if isinstance(value, int) else value(registers)


def _replace(
    state: State, number: int, thread: Thread, memory: Mapping[str, int], facts: Mapping[str, int] | None = None
) -> State:
    threads = (*state.threads[:number], thread, *state.threads[number + 1 :])
    return State(_freeze(memory), state.facts if facts is None else _freeze(facts), threads)
