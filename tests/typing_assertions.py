"""What a type checker knows of a user's code: pyright (standard) and mypy check this file, test_types.py runs it.

Each call is written as a user writes it. Where a checker has to refuse one, an ignore says so, and the checkers are
asked to report an ignore that nothing needs; such lines are not run. No result is of a type unknown to pyright.
"""
# mypy: warn-unused-ignores
# pyright: reportUnnecessaryTypeIgnoreComment=true, reportUnknownVariableType=true

import pathlib
import re
import tempfile
from typing import TYPE_CHECKING, Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp
from treeparams import nested, optim, saving


class Codec(eqx.Module):
    mean: jax.Array = tp.field(trainable=False)  # no default: the next field has none either
    encoder: jax.Array
    decoder: jax.Array = tp.field(tied_to="encoder", transform=jnp.transpose)
    scale: jax.Array = tp.field(converter=jnp.asarray, default=1.0)
    name: str = tp.field(static=True, default="codec")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decode(self.scale * ((x - self.mean) @ self.encoder))

    @tp.jit
    def decode(self, code: jax.Array) -> jax.Array:
        return code @ self.decoder + self.mean

    @tp.jit(donate="none", inline=True)
    def encode(self, x: jax.Array, *, centred: bool = False) -> jax.Array:
        return (x if centred else x - self.mean) @ self.encoder


class Wide(Codec):
    extra: int = tp.field(static=True, default=0)


def make() -> Codec:
    return Codec(jnp.zeros(3), jnp.ones((3, 2)), decoder=jnp.ones((2, 3)), name="small")


def loss(model: Codec, x: jax.Array, *, rate: float = 1.0) -> jax.Array:
    return rate * jnp.sum((model(x) - x) ** 2)


def loss_and_output(model: Codec, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    output = model(x)
    return jnp.sum(output**2), {"output": output}


def declarations() -> None:
    model = assert_type(make(), Codec)
    assert_type(model.mean, jax.Array)
    assert_type(Wide(jnp.zeros(3), jnp.ones((3, 2)), jnp.ones((2, 3)), extra=2).extra, int)
    tp.declare(Wide, freeze="mean", ties={"decoder": ("encoder", jnp.transpose)})
    if TYPE_CHECKING:
        Codec()  # type: ignore
        Codec(jnp.zeros(3), jnp.ones(2), jnp.ones(2), jnp.ones(()), "name", 3)  # type: ignore


def layouts() -> None:
    model = tp.tie(make())
    layout = assert_type(tp.layout(model), tp.Layout)
    for where in ("encoder", ["encoder", "!scale"], re.compile("enc.*"), Codec, layout):
        tp.layout(model, where)
    tp.layout(model, lambda model: model.encoder)
    tp.layout(model, freeze="encoder", thaw=tp.leaves(lambda path, leaf: leaf.shape == (3,)))
    tp.layout({"a": jnp.ones((2, 3)), "b": jnp.ones((3, 2))}, ties={"b": ("a", jnp.transpose)})
    assert_type(layout.slots, tuple[tp.Slot, ...])
    assert_type(layout.paths, tuple[str, ...])
    assert_type(layout.dtype, np.dtype)
    assert_type(layout.ties, dict[str, tuple[str, ...]])
    assert_type(layout["encoder"], tp.Slot)
    assert_type(layout.freeze("scale").thaw("mean"), tp.Layout)
    assert_type(layout.diff(layout.freeze("scale")), tp.types.Diff)
    assert_type(tp.diff(layout, layout, atol=1, rtol=1e-3).paths, tuple[str, ...])
    assert_type(layout.slice("encoder"), slice)
    assert_type(layout.indices("encoder"), np.ndarray)
    assert_type(layout.block(np.ones((7, 7)), "encoder", "scale"), np.ndarray)
    assert_type(eqx.partition(model, layout.mask), tuple[Any, Any])
    assert_type(tp.summary(model, depth=1), tp.types.Summary)
    if TYPE_CHECKING:
        tp.layout(model, freeze=3)  # type: ignore


def saved() -> None:
    model, tx = tp.tie(make()), optim.trainable(optax.adam(1e-3))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.safetensors"
        saving.save(path, model, metadata={"run": "7"})
        assert_type(saving.load(path, model, checksum=False), Codec)
        assert_type(saving.metadata(path), dict[str, str])
        assert_type(saving.names(path)["encoder"], Any)
        plan = assert_type(saving.plan(path, model, strict=False), saving.Plan[Codec])
        assert_type(plan(path), Codec)
    plan = saving.plan(model, model, rename=lambda name: name)
    assert_type(plan.missing, tuple[str, ...])
    assert_type(plan.state(tx.init(model), tx.init(model)), tp.types.TrainableState)
    assert_type(plan.average(tp.Ema(model, 0.9), tp.Ema(model, 0.9)), tp.Ema[Codec])
    compiled.lower(model, jnp.ones(3)).compile()(model, jnp.ones(3))


def models() -> None:
    model = make()
    assert_type(tp.copy({"w": jnp.ones(2)}), dict[str, jax.Array])
    model = assert_type(tp.tie(model), Codec)
    assert_type(tp.tie(model, "decoder", to="encoder", transform=jnp.transpose), Codec)
    assert_type(tp.untie(model, "encoder"), Codec)
    grads = tp.grad(loss)(model, jnp.ones(3))
    assert_type(tp.maptrainable(lambda x, g, s: x + g + s, model, grads, model, tied=("sum", "first")), Codec)
    assert_type(tp.ema(tp.copy(model), model, tau=0.01, buffers={"mean": "keep"}), Codec)
    for path, leaf, other in tp.biwalk(model, tp.copy(model), tied="first"):
        assert_type(path, str)
        assert leaf.shape == other.shape
    assert_type(tp.mapreduce(jnp.size, max, model, init=0), int)
    assert_type(tp.trainables(model, "encoder"), dict[str, Any])
    assert_type(tp.global_norm(model), jax.Array)
    tp.project(model, grads, missing="zeros")
    ema = assert_type(tp.Ema(model, decay=0.99, debias=True), tp.Ema[Codec])
    assert_type(ema.update(model).average, Codec)
    assert_type(tp.Ema({"w": jnp.ones(2)}, optax.constant_schedule(0.9)).average, dict[str, jax.Array])
    if TYPE_CHECKING:
        tp.project(model, grads, missing="none")  # type: ignore
        tp.maptrainable(lambda x: x, model, tied="sums")  # type: ignore


def forms() -> None:
    model = make()
    params, rest = tp.partition(model)
    assert_type(tp.combine(params, rest), Codec)
    vector, restructure = tp.ravel(model, "!scale", jnp.float32, pad_to=4)
    assert_type(vector, jax.Array)
    assert_type(restructure, tp.Restructure[Codec])
    assert_type(restructure(np.ones(vector.shape, np.float32)), Codec)
    stacks, from_stacks = tp.stack(model, groups={"all": "**"})
    assert_type(stacks, dict[str, Any])
    assert_type(from_stacks(stacks), Codec)
    assert_type(from_stacks.place("scale"), tuple[str | None, str, int])
    assert_type(from_stacks.scan(lambda x, node: (x + 1.0, None), jnp.zeros(()), stacks, Codec)[0], jax.Array)
    assert_type(restructure.with_frozen(model), tp.Restructure[Codec])
    view = assert_type(restructure.view(vector), tp.View)
    assert_type(list(view), list[str])
    assert_type(view.at[tp.leaves(lambda path, leaf: leaf.ndim > 0)].multiply(2), Any)
    if TYPE_CHECKING:
        tp.combine(rest, params, model)  # type: ignore
        tp.combine(params, model)  # type: ignore
        restructure.with_frozen({"w": vector})  # type: ignore


@tp.jit
def compiled(model: Codec, x: jax.Array, *, rate: float = 1.0) -> jax.Array:
    return loss(model, x, rate=rate)


@tp.value_and_grad(has_aux=True, trainable="encoder")
def decorated(model: Codec, x: jax.Array) -> tuple[jax.Array, str]:
    return loss(model, x), "aux"


@tp.grad(unreached="none")
def gradient(model: Codec, x: jax.Array) -> jax.Array:
    return loss(model, x)


def gained(model: Codec, x: jax.Array) -> Codec:
    return tp.maptrainable(lambda leaf: leaf + x.sum(), model)


def functions() -> None:
    model, x = make(), jnp.ones(3)
    assert_type(tp.grad(loss)(model, x, rate=2.0), Any)
    assert_type(tp.value_and_grad(loss, "encoder")(model, x), tuple[jax.Array, Any])
    (_, aux), _ = tp.value_and_grad(loss_and_output, has_aux=True)(model, x)
    assert_type(aux, dict[str, jax.Array])
    assert_type(decorated(model, x)[0], tuple[jax.Array, str])
    assert_type(gradient(model, x), Any)
    assert_type(tp.reached(loss)(model, x), tp.Layout)
    assert_type(tp.moved(gained, loss=lambda model: loss(model, x))(model, x), tp.Layout)
    tp.grad(lambda model: jnp.sum(model["w"] ** 2))({"w": jnp.ones(2)})  # a lambda's parameters are anything
    assert_type(tp.accumulate(loss, pieces=2)(model, jnp.ones((4, 3)))[0], jax.Array)
    assert_type(compiled(model, x, rate=2.0), jax.Array)
    assert_type(tp.jit(tp.value_and_grad(loss), donate="none")(model, x)[0], jax.Array)
    assert_type(model.decode(jnp.ones(2)), jax.Array)
    assert_type(model.encode(x, centred=True), jax.Array)
    if TYPE_CHECKING:
        tp.grad(loss)(model, "x")  # type: ignore
        tp.value_and_grad(loss)(model)  # type: ignore
        tp.accumulate(loss, pieces=2)(model, x, rates=2.0)  # type: ignore
        compiled.lower(x)  # type: ignore
        tp.jit(loss, donate="everything")  # type: ignore
        model.encode(jnp.ones(3), True)  # type: ignore


def derivatives() -> None:
    model, x = make(), jnp.ones(3)
    assert_type(nested.hessian(loss)(model, x), jax.Array)
    assert_type(nested.hessian_operator(loss, damping=0.1)(model, x), nested.Operator)

    def energy(model: Codec, x: jax.Array) -> jax.Array:
        return jnp.sum(model(x) ** 2)

    assert_type(nested.input_laplacian(energy)(model, x), jax.Array)
    _, jacobian, _ = nested.input_laplacian(energy, full=True)(model, x)
    assert_type(jacobian, jax.Array)


def steps() -> None:
    model, x = tp.tie(make()), jnp.ones(3)
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.adam(1e-2)), "!scale")
    assert_type(tx, tp.types.ModelTransformation)
    state = assert_type(tx.init(model), tp.types.TrainableState)
    grads = tp.grad(loss, state.layout)(model, x)
    updates, state = tx.update(grads, state, model)
    assert_type(state.clip, tp.types.ClipState)
    assert_type(optim.apply_updates(model, updates), Codec)
    assert_type(optim.step(tx, grads, state, model, value=0.0), tuple[Codec, tp.types.TrainableState])
    assert_type(optim.set_trainable(tx, state, model, state.layout.freeze("encoder")), tp.types.TrainableState)
    tx = optim.trainable(optim.groups({"encoder": optax.inject_hyperparams(optax.sgd)(0.1)}, default=optax.sgd(0.1)))
    state = assert_type(optim.adjust(tx.init(model), "encoder", learning_rate=0.2), tp.types.TrainableState)
    assert_type(optim.report(tx, model, state), tp.types.Report)
    steps = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2)
    tx = optim.trainable(steps, form="vector")
    assert_type(tx.init(model), tp.types.TrainableState)
    plain = optim.to_optax(tx, tx.init(model), steps.init(eqx.filter(model, eqx.is_inexact_array)))
    assert_type(optim.from_optax(tx, plain, model), tp.types.TrainableState)
    assert_type(optim.eval_params(lambda _, params: params, tx.init(model), model), Codec)
    if TYPE_CHECKING:
        optim.apply_updates(model, updates, state.layout)  # type: ignore
        optim.step(optax.adam(1e-2), grads, state, model)  # pyright: ignore
        optim.step(tx, grads, model, state)  # type: ignore


PARTS = (declarations, layouts, saved, models, forms, functions, derivatives, steps)
NEED_NUMBERS = (saved, steps)  # the others are run within a trace, in which nothing is compiled
