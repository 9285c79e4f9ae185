"""initialize: joins processes so that all end if one ends."""

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
    """Joins this process to others with `jax.distributed.initialize`, and makes sure that all end soon if one ends.

    Call it in every process before anything else of JAX, with the same address and a different number in each:

        sharding.initialize("10.0.0.1:1234", num_processes=4, process_id=number)

    If one process fails, the others end with a non-zero status and a message on stderr:

    - A process is killed: the others end within `heartbeat` seconds, or at once if it was process 0, which runs the
      service that all are connected to. JAX aborts them, so no `except` or `finally` runs.
    - A process ends with an exception: it prints the traceback, waits at most `heartbeat` seconds for the others (which
      come too if all fail alike) and exits. The others then end as if it had been killed. `sys.exit` is an ordinary
      end, whatever its status: the process waits until the others end, at most `shutdown_timeout_seconds` (an option of
      JAX, 300 by default).
    - A process is suspended (SIGSTOP, a sleeping machine): the others end within `heartbeat` seconds. The suspended
      process ends itself when it resumes; until then you or your scheduler have to remove it.
    - A process is alive but leaves the training loop (`sys.exit`, fewer batches than the others), skips a step, or
      calls `plan.model` alone: another process that waits for it in a step or in `plan.model` ends once it has waited
      `patience` seconds longer than the slowest step took. It prints where it was waiting, and the rest end as above.
      So a step that always computes for minutes is not mistaken for one that waits. There is no such limit for `init`,
      for calls of a step that compile, and for the result of `step.lower(...).compile()`.

    SIGTERM does not end a process, because JAX handles it; ask `sharding.interrupted` whether it came. On CPU the
    processes communicate by gloo, unless `jax_cpu_collectives_implementation` is set to `mpi`.

    >>> from treeparams import sharding
    >>> sharding.initialize("localhost", num_processes=2, process_id=0)
    Traceback (most recent call last):
    ...
    ValueError: coordinator_address: expected host and port of process 0, as '10.0.0.1:1234', got 'localhost'

    Args:
        coordinator_address: the host and a free port of process 0. You may leave out this argument and the next two
            where JAX finds them (Slurm, Open MPI, TPU).
        num_processes: how many processes there are.
        process_id: the number of this process, from 0.
        heartbeat: after how many seconds of silence, a whole number, a process counts as dead. The oldest versions of
            JAX do not accept this option and wait for 100 seconds; you then get a warning. With them, the others still
            notice a killed process at the next collective.
        patience: how many seconds a process waits for others that are alive, beyond the time of the slowest step.
            `None`: forever.
        options: passed to `jax.distributed.initialize`.
    """
    _check_options(coordinator_address, num_processes, process_id, heartbeat, patience)
    beat = {"heartbeat_timeout_seconds": heartbeat}
    if not beat.keys() <= inspect.signature(jax.distributed.initialize).parameters.keys():
        beat.clear()
        warnings.warn(
            f"JAX {jax.__version__} does not accept a heartbeat: a suspended process is noticed after 100 seconds, not "
            f"after {heartbeat}, and a killed one at the next collective. Upgrade JAX to use heartbeat=.",
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
            f"{error} JAX cannot find the number and the addresses of the processes here: write "
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
    """Limits how long this process can take to end after an uncaught exception.

    At exit JAX waits until all processes are there. The others wait for this one in a collective and never come: this
    process is alive and still sends heartbeats, so nobody notices anything wrong until the wait times out.
    """
    show = sys.excepthook

    def show_and_leave(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        show(kind, value, trace)
        if jax.distributed.is_initialized():
            sys.stderr.write(f"This process ends with {kind.__name__}, in {seconds} s if the others do not end too.\n")
            sys.stderr.flush()
            # A timer that needs neither the interpreter nor its lock, which the exit of JAX may hold.
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    sys.excepthook = show_and_leave
