"""What the processes of test_processes.py run.

    python tests/sharding/_process_programs ADDRESS PROCESSES PROCESS FILE

Each writes what it found to its file.
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp
from treeparams import optim, sharding

STEPS, BATCH = 2, 12
# With a smaller epsilon, rounding where a gradient almost vanishes becomes a part of the step.
RULE = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
MUON = optax.chain(optax.clip_by_global_norm(0.5), optim.per_leaf(optax.contrib.muon(1e-2)))
FORMS = {
    "tree": ({"top.s*": "whole", "**.bias": "whole", "**": "split"}, {}, RULE),
    "vector": ({"top.shift": "whole", "**": "split"}, {"microbatches": 2}, RULE),
    "stacks": ({"top.s*": "whole", "**": "owned"}, {"loss_takes": "form"}, MUON),
}


def make(width=16, dtype=jnp.float32):
    """Three equal layers, which two devices do not divide; a tie; something that is frozen."""
    draw = np.random.default_rng(0)  # JAX would compile programs to draw by, in each process
    array = lambda *shape: jnp.asarray(draw.uniform(-0.35, 0.35, shape).astype(dtype))
    layers = [{"weight": array(width, width), "bias": array(width)} for _ in range(3)]
    one = lambda *shape: jnp.asarray(np.ones(shape, dtype))
    return {"layers": layers, "top": {"same": layers[1]["bias"], "scale": one(width), "shift": one(width)}}


def error(top, x, y):
    return jnp.mean(jnp.square(x * top["scale"] + top["shift"] + top["same"] - y))


def loss(model, x, y):
    for layer in model["layers"]:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return error(model["top"], x, y)


def loss_of_stacks(stacks, restructure, x, y):
    turn = lambda x, layer: (jnp.tanh(x @ layer["weight"] + layer["bias"]), None)
    return error(restructure.part(stacks, "top"), restructure.scan(turn, x, stacks, "layers.*")[0], y)


BATCHES = np.random.default_rng(1).normal(size=(STEPS, 2, BATCH, 16)).astype(np.float32)


def prepared(form, model, rules=None, rule=None, mesh=None):
    usual, options, own = FORMS[form]
    mesh = mesh or jax.make_mesh((jax.process_count(),), ("data",))
    plan = sharding.plan(tp.layout(model, freeze="top.shift"), mesh, rules or usual, form=form)
    return plan, *sharding.make_step(loss_of_stacks if form == "stacks" else loss, rule or own, plan, **options)


def trained(form):
    """The parameters after some steps over all processes, in one tree that each has."""
    plan, init, step = prepared(form, make())
    params, state = init(make())
    count = BATCH // jax.process_count()
    rows = slice(jax.process_index() * count, (jax.process_index() + 1) * count)
    for batch in BATCHES:
        here = [jax.make_array_from_process_local_data(plan.batch, each[rows]) for each in batch]
        params, state, _ = step(params, state, *here)
    return jax.tree.map(np.asarray, tp.trainables(plan.model(params, state, whole=True), plan.layout))


@functools.cache
def alone(is_stacked):
    """The same of one process, by Optax alone; the loss is a mean, and so it is that of its pieces, too."""
    params, rest = tp.stack(make(), "!top.shift") if is_stacked else tp.partition(make(), "!top.shift")
    rule, model = (MUON, rest) if is_stacked else (RULE, lambda params: tp.combine(params, rest))

    @jax.jit
    def step(params, state, x, y):
        gradient = jax.grad(lambda params: loss(model(params), x, y))(params)
        updates, state = rule.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = rule.init(params)
    for batch in BATCHES:
        params, state = step(params, state, *batch)
    return tp.trainables(model(params), tp.layout(make(), freeze="top.shift"))


def difference(values=1, **change):
    """What is said where the last process has another plan, step or values."""
    is_last, model = jax.process_index() == jax.process_count() - 1, make()
    options = {name: change.pop(name) for name in ("rules", "rule", "mesh") if name in change}
    if is_last:
        model = make(**change)
        model["top"]["scale"] *= values
    _, init, _ = prepared("tree", model, **{"rule": optax.sgd(1e-2)} | (options if is_last else {}))
    try:
        init(model)
    except ValueError as problem:
        return str(problem)
    return None


def trains():
    """What processes train that differs from what one does, and what they are told where they differ."""
    errors, sums = {}, {}
    for form in FORMS:
        found = trained(form)
        sums[form] = [float(np.abs(each).sum()) for each in found.values()]
        if jax.process_index() == 0:
            errors[form] = max(
                float(np.abs(found[path] - want).max()) for path, want in alone(form == "stacks").items()
            )
    devices = np.array(jax.devices())
    reordered = jax.sharding.Mesh(devices[::-1], ("data",))
    return {
        "errors": errors,
        "sums": sums,
        "none": difference(),
        "width": difference(width=8),
        "dtype": difference(dtype=jnp.bfloat16),
        "rules": difference(rules={"**.s*": "whole", "**": "split"}),
        "rate": difference(rule=optax.sgd(5e-2)),
        "order": difference(mesh=reordered),
        "values": difference(values=2),
    }


if __name__ == "__main__":
    address, processes, process, file = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, int(processes), int(process), initialization_timeout=10, heartbeat_timeout_seconds=5
    )
    pathlib.Path(file).write_text(json.dumps(trains()))
