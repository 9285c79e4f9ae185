"""interrupted: notices SIGTERM, which schedulers send before they end a job, at the same step in all processes."""

import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils


class _Notice:
    """Records whether this process was told to end."""

    has_come = False
    is_awaited = False  # by a handler of this file
    calls = 0  # of `interrupted`, the number of a step for JAX


def interrupted() -> bool:
    """Returns whether a process received SIGTERM, with the same answer in all processes at the same step.

    Schedulers send SIGTERM (Slurm before a time limit, Kubernetes, spot machines) and end the job some time later. Call
    `interrupted` once in each step, in all processes. When it returns `True`, save and leave the loop:

        for number in range(start, steps):
            params, state, value = step(params, state, *batch(number))
            if sharding.interrupted():
                checkpointer.save(folder / str(number), (params, state))
                checkpointer.wait_until_finished()
                break

    With several processes, JAX tells the others and agrees with them on a step that none has reached yet. This takes
    some steps, and a second or two. Once the answer is `True`, it stays `True`. All processes must call `interrupted`
    equally often, because it counts its calls to number the steps. In a single process, the first call installs a
    handler of SIGTERM, and the first SIGTERM removes it again, so a second SIGTERM ends the process as usual.

    >>> from treeparams import sharding
    >>> sharding.interrupted()
    False

    Returns:
        Whether you should save and leave the loop.

    Raises:
        ValueError: in a single process, you made the first call outside the main thread. Python accepts signal handlers
            only in the main thread.
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
    """Installs a handler for the next SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "sharding.interrupted: Python handles signals only in the main thread; make the first call there"
        )

    def note(number: int, frame: Any) -> None:
        _Notice.has_come = True
        signal.signal(number, before)

    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    signal.signal(signal.SIGTERM, note)
    _Notice.is_awaited = True
