"""What the processes of test_sharding_processes.py run.

    python tests/_process_programs PROGRAM ADDRESS PROCESSES PROCESS FOLDER

Each writes what it found to a file in the folder; what it says on stderr is read as well.
"""

import json
import os
import pathlib
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import treeparams as tp
from treeparams import sharding

STEPS, BATCH = 5, 12
# With a smaller epsilon, rounding where a gradient almost vanishes becomes a part of the step.
RULE = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
FORMS = {  # form: rules, what is split
    "tree": ({"top.s*": "whole", "**.bias": "whole", "**": "split"}, {"split": "state"}),
    "vector": ({"top.shift": "whole", "**": "split"}, {"split": "gradients"}),
    "stacks": ({"top.s*": "whole", "**": "owned"}, {"split": "parameters", "loss_takes": "form"}),
}


def make(width=15, dtype=jnp.float32):
    """Three equal layers, of which a bias is tied; something that is frozen.

    That is a scalar: arrays that are whole in each process are divided when Orbax saves them, by what JAX 0.6 lacks.
    The vector is padded to one length over two processes and over three, so that a checkpoint goes from these to those.
    """
    draw = np.random.default_rng(0)  # JAX would compile programs to draw by, in each process
    array = lambda *shape: jnp.asarray(draw.uniform(-0.35, 0.35, shape).astype(dtype))
    layers = [{"weight": array(width, width), "bias": array(width)} for _ in range(3)]
    one = lambda *shape: jnp.asarray(np.ones(shape, dtype))
    top = {"same": layers[1]["bias"], "scale": one(width), "shift": one()}
    return {"layers": layers, "top": top}


def error(top, x, y):
    return jnp.mean(jnp.square(x * top["scale"] + top["shift"] + top["same"] - y))


def through(x, layer):
    return jnp.tanh(x @ layer["weight"] + layer["bias"])


def loss(model, x, y):
    for layer in model["layers"]:
        x = through(x, layer)
    return error(model["top"], x, y)


def loss_of_stacks(stacks, restructure, x, y):
    x, _ = restructure.scan(lambda x, layer: (through(x, layer), None), x, stacks, "layers.*")
    return error(restructure.part(stacks, "top"), x, y)


def batches():
    """A batch for each step, the same in all processes."""
    return np.random.default_rng(1).normal(size=(2 * STEPS, 2, BATCH, 15)).astype(np.float32)


def laid(batch, plan):
    """A batch over the processes, of which each has its own rows."""
    count = BATCH // jax.process_count()
    rows = slice(jax.process_index() * count, (jax.process_index() + 1) * count)
    return [jax.make_array_from_process_local_data(plan.batch, each[rows]) for each in batch]


def prepared(form, model, rules=None, rule=RULE, mesh=None):
    usual, options = FORMS[form]
    mesh = mesh or jax.make_mesh((jax.process_count(),), ("data",))
    plan = sharding.plan(tp.layout(model, freeze="top.shift"), mesh, rules or usual, form=form)
    of = loss_of_stacks if form == "stacks" else loss
    return plan, *sharding.make_step(of, rule, plan, loss_is="mean", **options)


def alone():
    """The parameters of one process after some steps, without this module of the library."""
    params, restructure = tp.ravel(make(), "!top.shift")

    @jax.jit
    def step(params, state, x, y):
        gradient = jax.grad(lambda params: loss(restructure(params), x, y))(params)
        updates, state = RULE.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = RULE.init(params)
    for x, y in batches()[:STEPS]:
        params, state = step(params, state, x, y)
    return np.asarray(params)


def goes(params, state, plan, step, which):
    """Takes steps; returns what the last one does, and the losses."""
    losses = []
    for batch in batches()[which]:
        params, state, value = step(params, state, *laid(batch, plan))
        losses.append(float(value))
    return params, state, losses


def forms(which=tuple(FORMS)):
    """The largest difference from one process in each form, in the first process; the vector and what is about it."""
    vectors, model = {}, make()
    for form in which:
        plan, init, step = prepared(form, model)
        params, state, _ = goes(*init(model), plan, step, slice(STEPS))
        trained = tp.partition(plan.model(params, state), plan.layout)[0]
        leaves = jax.tree.leaves(multihost_utils.process_allgather(trained, tiled=True))
        vectors[form] = np.concatenate([leaf.ravel() for leaf in leaves])
        if form == "vector":
            kept = {"params": params, "state": state}, plan, step
    errors = {}
    if jax.process_index() == 0:
        reference = alone()
        errors = {form: float(np.max(np.abs(vector - reference))) for form, vector in vectors.items()}
    return errors, *kept


def difference(options=None, values=1, check_values=False, form="tree", **change):
    """What `init` says where the last process has another plan or other values."""
    last = jax.process_index() == jax.process_count() - 1
    model = make(**change) if last else make()
    if last:
        model["top"]["scale"] *= values
    # By a rule that takes little to compile.
    _, init, _ = prepared(form, model, **{"rule": optax.sgd(1e-2)} | (options or {} if last else {}))
    try:
        init(model, check_values=check_values)
    except ValueError as error:
        return str(error)


def started(first, second):
    """What `init` says where two processes start with other numbers in the state."""
    model = make()
    _, init, _ = prepared("vector", model, **(second if jax.process_index() else first))
    try:
        init(model)
    except ValueError as error:
        return str(error)


def interruption():
    """At which call all processes are told of a SIGTERM."""
    for number in range(100):
        if sharding.interrupted():
            return number
        time.sleep(0.1)
    return None


def saves(folder):
    """Trains, saves a checkpoint and goes on."""
    import orbax.checkpoint  # takes a second, and not all programs need it

    if jax.process_index() == 2:
        os.kill(os.getpid(), signal.SIGTERM)  # all else goes on
    errors, trained, plan, step = forms()
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", trained)
    _, _, losses = goes(**trained, plan=plan, step=step, which=slice(STEPS, None))
    return {
        "errors": errors,
        "losses": losses,
        "width": difference(width=6),
        "dtype": difference(dtype=jnp.bfloat16),
        "rules": difference({"rules": {"top.shift": "whole", "**": "split"}}),
        "at": interruption(),
    }


def restores(folder):
    """Goes on from what another number of processes saved."""
    import orbax.checkpoint

    errors, trained, plan, step = forms(["vector"])
    shapes = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, trained)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder / "checkpoint", shapes)
    _, _, losses = goes(**restored, plan=plan, step=step, which=slice(STEPS, None))
    devices = np.array(jax.devices())
    (usual,) = jax.make_mesh((2,), ("data",)).axis_types
    (other,) = {jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit} - {usual}
    mesh = lambda devices, kind: jax.sharding.Mesh(devices, ("data",), axis_types=(kind,))
    injected = optax.inject_hyperparams(optax.sgd)
    return {
        "errors": errors,
        "losses": losses,
        "values": difference(values=2, check_values=True, form="vector"),
        "not asked for": difference(values=2, form="vector"),
        "rate": difference({"rule": optax.sgd(5e-2)}, form="vector"),
        "order": difference({"mesh": mesh(devices[::-1], usual)}, form="vector"),
        "types": difference({"mesh": mesh(devices, other)}, form="vector"),
        "start": started({"rule": injected(0.1)}, {"rule": injected(0.5)}),
    }


def leaves(folder):
    """A loop that the last process leaves, as the name of the folder says."""
    model = {"w": jnp.ones(15)}
    plan = sharding.plan(model, jax.make_mesh((jax.process_count(),), ("data",)), {"**": "split"}, form="vector")
    of = lambda model, x, y: jnp.mean((x * model["w"][None] - y) ** 2)
    init, step = sharding.make_step(of, optax.sgd(0.1), plan, loss_is="mean")
    params, state = init(model)
    last = jax.process_index() == jax.process_count() - 1
    for number in range(8):
        if last and number == 3:
            match folder.name.strip("0123456789"):
                case "exits":
                    sys.exit(0)
                case "fewer":
                    break
                case "skips":
                    continue
                case "model":
                    plan.model(params, state, whole=True)
        params, state, value = step(params, state, *laid(batches()[0], plan))
    float(value)
    return {}


def waits(folder):
    multihost_utils.sync_global_devices("start")
    return {}


def end(program):
    """Ends by an exception, in one process or in all; or not at all."""
    if program == "saves" and jax.process_index() == 2:
        raise RuntimeError("a disk is full")
    if program == "leaves":
        sys.exit(0)
    if program == "restores":
        model = make(width=6)  # which two processes can divide
        prepared("tree", model, {"**": "whole"} if jax.process_index() else None)[1](model)
    while True:
        multihost_utils.sync_global_devices("step")
        time.sleep(0.1)  # in a group without a fault, all would keep the machine busy


if __name__ == "__main__":
    program, address, processes, process, folder = sys.argv[1:]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count()))  # not the one core of who has started it
    patience = {"patience": 2} if program == "leaves" else {}
    sharding.initialize(address, int(processes), int(process), heartbeat=5, **patience)
    programs = {"saves": saves, "restores": restores, "waits": waits, "leaves": leaves}
    found = programs[program](pathlib.Path(folder))
    part = pathlib.Path(folder, f"{program}{process}.part")
    part.write_text(json.dumps(found))
    part.rename(part.with_suffix(".json"))  # it is there as soon as it is whole
    end(program)
