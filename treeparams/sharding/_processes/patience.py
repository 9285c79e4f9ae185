"""Ends a process that waits too long for another one that is alive but does not come.

JAX notices a process that died, since its heartbeats stop. A process that has left its loop still sends heartbeats, and
all processes that wait for it in a collective would wait forever. So each process has a thread that watches its calls.
If one takes too long, the thread ends the process, and the missing heartbeats end the others.

No messages are sent to other processes. From inside, a step that waits looks like one that computes. To tell them
apart, the thread compares with the time that earlier steps took, and ignores calls that compile.
"""

import atexit
import collections
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

COMPILING, COMPILED = "/jax/core/compile/", "/jax/core/compile/backend_compile_duration"


class Watched:
    """A program that all processes run together. Its calls are watched once `watch` was called."""

    def __init__(self, f: Callable[..., Any], name: str, counts_first: bool = False) -> None:
        """Wraps a `jax.jit` function.

        Args:
            f: the function.
            name: the name of one call, for the message: `"step"`.
            counts_first: whether to watch a call that compiles too, once it has compiled.
        """
        self.f = f
        self.name = name
        self.counts_first = counts_first
        self.calls = 0
        self.slowest = 0.0  # seconds
        self.rough = 0.0  # those of a call that compiled, until the next one is over

    def __call__(self, *args: Any) -> Any:
        """Calls the function without waiting for its result.

        Keeps the smallest array in the last part of the result, to ask later whether it is ready.
        """
        watch = Watch.running
        if watch is None:
            return self.f(*args)
        self.calls += 1
        call = Call(self)
        watch.calls.append(call)
        try:
            result = self.f(*args)
            call.result = last = result[-1] if result else None
            if not isinstance(last, jax.Array):
                call.result = min(jtu.tree_leaves(last), key=np.size, default=None)
        finally:
            call.is_back = True
        return result

    def took(self, seconds: float, has_compiled: bool) -> None:
        """Records the time of a call that is over.

        A call that compiled may have waited while others compiled, so its time counts only until the next call is over.
        """
        self.rough = seconds if has_compiled else 0.0
        self.slowest = self.slowest if has_compiled else max(self.slowest, seconds)


class Call:
    """One call of a program."""

    __slots__ = ("has_compiled", "is_back", "is_compiling", "number", "program", "result", "thread")

    def __init__(self, program: Watched) -> None:
        self.program = program
        self.number = program.calls
        self.thread = threading.get_ident()
        self.has_compiled = self.number == 1
        self.is_compiling = False
        self.is_back = False
        self.result: Any = None

    @property
    def is_over(self) -> bool:
        """Whether the devices have finished the call, as far as can be known."""
        if not self.is_back or self.result is None or isinstance(self.result, Tracer):
            return self.is_back
        try:
            return self.result.is_ready()
        except RuntimeError:  # its user gave it away
            return True

    @property
    def counts(self) -> bool:
        """Whether the call may end the process."""
        return not self.is_compiling and (self.program.counts_first or not self.has_compiled)


class Watch:
    """A thread that watches the calls of this process, the oldest first."""

    running: "Watch | None" = None

    def __init__(self, patience: float | int) -> None:
        self.patience = patience
        self.tick = min(0.5, patience / 10)
        self.calls: collections.deque[Call] = collections.deque()
        self.is_stopped = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True, name="treeparams patience")

    def start(self) -> None:
        Watch.running = self
        jax.monitoring.register_event_duration_secs_listener(self.hear)
        self.thread.start()
        # Running calls must be over before JAX waits for the other processes, since nobody watches them after that.
        atexit.register(self.stop)

    def hear(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Notes that JAX is compiling in this thread."""
        if event.startswith(COMPILING) and self.calls:
            call = self.calls[-1]
            if call.thread == threading.get_ident() and not call.is_back:
                call.has_compiled, call.is_compiling = True, event != COMPILED

    def look(self) -> None:
        waited, before = 0.0, time.monotonic()
        while not self.is_stopped.wait(self.tick):
            now = time.monotonic()
            # No more than this thread was awake for: all processes may have been stopped, and go on together.
            passed, before = min(now - before, 2 * self.tick), now
            while self.calls and self.calls[0].is_over:
                call = self.calls.popleft()
                call.program.took(waited, call.has_compiled)
                waited = 0.0
            if not self.calls or self.calls[0].is_compiling:
                waited = 0.0
                continue
            waited += passed
            call = self.calls[0]
            usual = max(call.program.slowest, call.program.rough)
            if call.counts and waited > self.patience + usual:
                self.end(call, waited, usual)

    def end(self, call: Call, waited: float, usual: float) -> None:
        """Ends this process, and prints the lines at which its threads are."""
        faulthandler.dump_traceback(file=2)
        sys.stderr.write(
            f"Process {jax.process_index()} of {jax.process_count()} ends: for {waited:.0f} s it has waited in "
            f"{call.program.name} {call.number} (the slowest before took {usual:.1f} s) for others that are alive. One "
            "has left its loop (sys.exit, fewer batches than the others), skipped a step, or is the only one to run "
            "something over all devices, such as plan.model. All must make the same calls in the same order. If one "
            f"may be that late, give it more time: sharding.initialize(patience={2 * self.patience:g}); None waits "
            "forever.\n"
        )
        sys.stderr.flush()
        os._exit(1)  # a thread that waits in a collective cannot receive an exception

    def stop(self) -> None:
        for call in self.calls.copy():
            call.has_compiled = False  # from here on first calls count, too: this process can do nothing else
        while not all(call.is_over for call in self.calls.copy()):
            time.sleep(self.tick / 10)
        Watch.running = None
        self.is_stopped.set()
        self.thread.join()  # Python ends threads anywhere, and within a call of JAX that would abort the process


def watch(patience: float | int | None) -> None:
    """Watches all calls from now on; with `None`, none."""
    if patience is not None and jax.process_count() > 1:
        Watch(patience).start()
