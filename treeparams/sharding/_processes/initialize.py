"""initialize: processes that are started so that none outlives the others."""

import faulthandler
import inspect
import sys
import types
import warnings
from typing import Any

import jax

from .patience import watch


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat: int = 10,
    patience: float | int | None = 60,
    **options: Any,
) -> None:
    """Joins this process to others by `jax.distributed.initialize`, so that when one dies, all end soon.

    Every process calls it before anything else of JAX, with the same address and a number of its own:

        sharding.initialize("10.0.0.1:1234", num_processes=4, process_id=number)

    Where one fails, the others end with a non-zero status and a message on stderr:

    - It is killed: they end within `heartbeat` seconds, and at once if it was process 0, where the service runs that
      all are connected to. JAX aborts them: no `except` or `finally` runs.
    - It ends by an exception: it prints the traceback and waits at most `heartbeat` seconds for the others, which
      come too if all fail alike. Then it leaves, and is as one that was killed. `sys.exit` is an ordinary end, whatever
      its status: it waits until the others end, at most `shutdown_timeout_seconds` (an option; JAX says 300).
    - It stands still (SIGSTOP, a machine asleep): they end within `heartbeat` seconds. It ends itself when it goes on;
      until then it is there, and is left to whoever started it.
    - It leaves the loop of training while it lives (`sys.exit`, fewer batches than the others), skips a step or calls
      `plan.model` alone: whoever waits for it in a step or in `plan.model` longer than `patience`, and longer than the
      slowest step took, ends with a sentence that says where it stands, and all others as above. So a step that always
      computes for minutes is not taken for one that waits. `init`, calls of a step that compile, and what
      `step.lower(...).compile()` returns wait forever.

    SIGTERM ends none of them, as JAX has it; `sharding.interrupted` says that it came. On CPU the processes talk by
    gloo, unless `jax_cpu_collectives_implementation` is set to `mpi`.

    >>> from treeparams import sharding
    >>> sharding.initialize("localhost", num_processes=2, process_id=0)
    Traceback (most recent call last):
    ...
    ValueError: coordinator_address: expected host and port of process 0, as '10.0.0.1:1234', got 'localhost'

    Args:
        coordinator_address: host and a free port of process 0. This and the next two may be left out where JAX finds
            them itself (Slurm, Open MPI, TPU).
        num_processes: how many there are.
        process_id: which of them this is, from 0.
        heartbeat: whole seconds of silence after which a process is taken for dead. The oldest versions of JAX do not
            take it, and wait for 100 seconds; a warning says so. With these a process that is killed is still found at
            the next collective.
        patience: seconds for which a process waits for others that are alive, beyond the time of the slowest step;
            `None`: forever.
        options: passed to `jax.distributed.initialize`.
    """
    _check_options(coordinator_address, num_processes, process_id, heartbeat, patience)
    beat = {"heartbeat_timeout_seconds": heartbeat}
    if not beat.keys() <= inspect.signature(jax.distributed.initialize).parameters.keys():
        beat.clear()
        warnings.warn(
            f"JAX {jax.__version__} takes no heartbeat: a process that stands still is found after 100 seconds, not "
            f"after {heartbeat}, and one that is killed at the next collective. A newer JAX takes it.",
            stacklevel=2,
        )
    if jax.config.values["jax_cpu_collectives_implementation"] != "mpi":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not jax.config.values.get("jax_enable_preemption_service", True):
        jax.config.update("jax_enable_preemption_service", True)  # for `interrupted`
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id, **beat, **options)
    except ValueError as error:
        raise ValueError(
            f"{error} JAX does not find by itself how many processes there are and where: write "
            "sharding.initialize('10.0.0.1:1234', num_processes=4, process_id=0)"
        ) from error
    _leave_after_exceptions(heartbeat)
    watch(patience)


def _check_options(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    heartbeat: int,
    patience: float | int | None,
) -> None:
    for name, number, least in (
        ("heartbeat", heartbeat, 1),
        ("num_processes", num_processes, 1),
        ("process_id", process_id, 0),
    ):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
            raise ValueError(f"{name}: expected a whole number, at least {least}, got {number!r}")
    is_time = isinstance(patience, (int, float)) and not isinstance(patience, bool) and patience > 0
    if patience is not None and not is_time:
        raise ValueError(f"patience: expected seconds, more than 0, or None to wait forever, got {patience!r}")
    if process_id is not None and num_processes is not None and process_id >= num_processes:
        raise ValueError(
            f"process_id: expected 0 to {num_processes - 1} for {num_processes} processes, got {process_id}"
        )
    if coordinator_address is not None and not coordinator_address.rpartition(":")[2].isdecimal():
        raise ValueError(
            f"coordinator_address: expected host and port of process 0, as '10.0.0.1:1234', got {coordinator_address!r}"
        )


def _leave_after_exceptions(seconds: int) -> None:
    """Bounds the time from an exception that nothing catches to the end of this process.

    JAX waits at the exit until all processes are there. Those that are in a collective wait for this one, and do not
    come: it is alive and still sends heartbeats, so nothing is found to be wrong until the wait times out.
    """
    show = sys.excepthook

    def show_and_leave(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        show(kind, value, trace)
        if jax.distributed.is_initialized():
            sys.stderr.write(f"This process ends by {kind.__name__}, in {seconds} s if the others do not end too.\n")
            sys.stderr.flush()
            # A timer that needs neither the interpreter nor its lock, which the exit of JAX may hold.
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    sys.excepthook = show_and_leave
