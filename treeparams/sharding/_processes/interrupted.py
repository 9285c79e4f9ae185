"""SIGTERM, by which schedulers say that a job is about to end: seen by all processes at the same step."""

import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils


class _Notice:
    """Whether this process was told to end."""

    has_come = False
    is_awaited = False  # by a handler of this file
    calls = 0  # of `interrupted`, the number of a step for JAX


def interrupted() -> bool:
    """Whether a process was sent SIGTERM: the same answer in all processes at the same step.

    Schedulers send SIGTERM (Slurm before a time limit, Kubernetes, spot machines) and end the job some time after it.
    Ask once in each step, in all processes, and save where it is true:

        for number in range(start, steps):
            params, state, value = step(params, state, *batch(number))
            if sharding.interrupted():
                checkpointer.save(folder / str(number), (params, state))
                checkpointer.wait_until_finished()
                break

    Over several processes JAX tells the others and agrees with them on a step that none has reached yet, which takes
    some steps, and a second or two. From that call on the answer stays true. All processes must call it equally often:
    it counts its calls, so that it needs no number of a step. In one process a handler of SIGTERM does it, which the
    first call installs and the first SIGTERM removes: a second SIGTERM ends the process as ever.

    >>> from treeparams import sharding
    >>> sharding.interrupted()
    False

    Returns:
        Whether to save and to leave the loop.

    Raises:
        ValueError: the first call in a program of one process comes from a thread other than the main thread, where
            Python takes no handler.
    """
    notice = _Notice
    if notice.has_come:
        return True
    if jax.distributed.is_initialized():
        notice.calls += 1
        notice.has_come = multihost_utils.reached_preemption_sync_point(notice.calls)
    elif not notice.is_awaited:
        _await()
    return notice.has_come


def _await() -> None:
    """Installs a handler of the next SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "sharding.interrupted: Python handles signals in the main thread alone; make the first call there"
        )

    def note(number: int, frame: Any) -> None:
        _Notice.has_come = True
        signal.signal(number, before)

    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    signal.signal(signal.SIGTERM, note)
    _Notice.is_awaited = True
