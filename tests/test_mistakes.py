"""A table of what newcomers write by mistake, and what comes back: what was got, what is expected, what to write.

They come from Equinox, from Flax and Optax, from PyTorch and Julia.
"""

import inspect
import operator
import pickle
import re
import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import treeparams as tp
from treeparams import matrices, nested, saving, sharding

from .mistakes import NEAREST, Row, Tied, check, loss, value
from .zoo import Norm, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion", "without_type_checks")


class Misspelt(eqx.Module):
    embed: jax.Array
    head: jax.Array = tp.field(tied_to="embd")


class Promised(eqx.Module):
    alpha: float = tp.field(trainable=True)


def select(name: str, where: object, words: str, error: type[Exception] = ValueError) -> Row:
    """A mistake in what is to be trained."""
    return name, lambda t: tp.layout(t.model, where), error, words


ASK = r"To test each leaf, write tp.leaves\(lambda path, leaf: \.\.\.\)"
ITSELF = "expected a mask or a `where`.* got {} itself: write its path, {}"
WHERES: list[Row] = [
    select("a typo", "layer.0", NEAREST),
    select("brackets", "layers[0].weight", "selects nothing; nearest: 'layers.0.weight'"),
    select("the name of the variable", "model.layers.0", "selects nothing; nearest: 'layers.0'"),
    select("keystr", "['layers'][0]", "in the style of jax.tree_util.keystr; write entries with dots"),
    select("a regex of a part", re.compile("weight"), "'weight' selects nothing; nearest: 'layers"),
    select("a class that is not there", eqx.nn.Conv2d, "'Conv2d' selects nothing; the model has nodes of Linear, MLP"),
    select("an empty list", [], "an empty sequence selects nothing; leave the argument out"),
    select("a position", 0, r"tp.leaves\(predicate\), a callable.*got int: 0", TypeError),
    select("a bool", True, r"trainable=True is not a mask.*freeze='\*\*'"),
    select("labels", {"layers": "train"}, "expected a mask or a `where`.*got dict", TypeError),
    select("two args", lambda path, leaf: True, rf"^lambda at test_mistakes.py:\d+ must return nodes.*'leaf'. {ASK}"),
    select("a leaf for the model", lambda leaf: leaf.ndim == 2, f"has no attribute 'ndim'. {ASK}"),
    select("a filter of Equinox", eqx.is_inexact_array, f"'is_inexact_array' must return nodes.*; got bool. {ASK}"),
    select("an attribute that is not there", lambda m: m.layer, r"as for eqx.tree_at.*AttributeError: .*'layer'\.?$"),
    select("a value of nodes", lambda m: m.layers[0].weight.sum(), f"given shapes in place of arrays.*'sum'. {ASK}"),
    select("a path from a function", lambda m: "layers.0", f"must return nodes of the model.*; got str. {ASK}"),
    select("no nodes", lambda m: [layer.bias for layer in m.layers][5:], "lambda at .* selects nothing; the model's"),
    select("no leaves", tp.leaves(lambda path, leaf: leaf.ndim == 7), r"tp.leaves\(lambda at .*selects nothing"),
    select("leaves of one", tp.leaves(lambda leaf: True), "called as predicate.path, leaf..*1 positional", TypeError),
    select("leaves with values", tp.leaves(lambda path, leaf: leaf.sum() > 0), "a jax.ShapeDtypeStruct; at", TypeError),
    ("leaves by name", lambda t: tp.leaves("w"), TypeError, "expects a function of path and leaf, got str"),
    ("a node", lambda t: tp.layout(t.model, freeze=t.model.layers[0]), TypeError, ITSELF.format("Linear", "'lay")),
    ("an array", lambda t: tp.layout(t.dict, freeze=t.dict["w"]), TypeError, ITSELF.format(".*", "'w'")),
    ("the model", lambda t: tp.layout(t.model, t.model), TypeError, ITSELF.format("MLP", r"'\*\*'")),
    ("another's node", lambda t: tp.layout(t.model, freeze=t.other.layers[0]), TypeError, "has none like it; wri"),
    ("a mask to freeze=", lambda t: tp.layout(t.dict, freeze={"w": True}), TypeError, "pass it as trainable="),
    ("a mask of arrays", lambda t: tp.layout(t.dict, {"w": jnp.array(True)}), TypeError, "a mask must hold Python boo"),
    ("a part of a mask", lambda t: tp.layout(t.dict, {"w": True}), ValueError, "of the model.*'b' is only in"),
    ("half of a tie", lambda t: tp.layout(t.tied, freeze="head"), ValueError, "one array. Either make .*freeze="),
    ("a dtype for where", lambda t: tp.ravel(t.model, "float32"), ValueError, r"by keyword, tp.ravel\(model, dtype="),
]
DECLARED: list[Row] = [
    ("a class", lambda t: tp.layout(eqx.nn.MLP), TypeError, "expected a model.*got the class MLP; make an"),
    ("a layout for a model", lambda t: tp.ravel(t.layout), TypeError, "expected a model.*got Layout"),
    ("trainabel=", lambda t: tp.field(trainabel=False), TypeError, "no argument 'trainabel'; nearest: 'trainable'"),
    ("requires_grad=", lambda t: tp.field(requires_grad=False), TypeError, "'requires_grad'; write trainable=Fal"),
    ("trainable='no'", lambda t: tp.field(trainable="no"), TypeError, "got 'no'; trainable=False freezes"),
    ("a static parameter", lambda t: tp.field(static=True, trainable=True), ValueError, "drop `static=True` or"),
    ("a tie to a number", lambda t: tp.field(tied_to=3), TypeError, "such as 'embed.weight'.*got 3"),
    ("a transform alone", lambda t: tp.field(transform=jnp.transpose), ValueError, 'tied_to="embed", transform='),
    ("a tie misspelt", lambda t: tp.layout(Misspelt(*[jnp.ones(2)] * 2)), ValueError, "'embd'.*nearest: 'embed'"),
    ("a ref", lambda t: t.tx.init({"w": jax.new_ref(jnp.ones(2))}), ValueError, r"got a ref.*'w'.*ref\[...\] or jax"),
    ("a number promised", lambda t: tp.layout(Promised(0.1)), TypeError, r"converter=jnp.asarray\) for a number"),
    ("declare(model)", lambda t: tp.declare(t.model), TypeError, r"a class, got MLP; for one model write tp.layout"),
    ("frozen=True", lambda t: tp.declare(Tied, freeze=True), TypeError, 'must be a glob.*such as "bias".*got bool'),
    ("a list of ties", lambda t: tp.declare(Tied, ties=["head"]), TypeError, "ties must be a dictionary {alias: path}"),
    ("a lambda", lambda t: tp.layout(t.dict, ties={"w": ("b", lambda b: b)}), ValueError, "lambda at .*at module l"),
    ("a tie of nodes", lambda t: tp.tie(t.model, "layers.0", "layers.1"), ValueError, "a node; name an array in it"),
    ("tie by function", lambda t: tp.tie(t.model, len, len), TypeError, r'needs both paths, tp.tie\(model, "head"'),
    ("a tie to itself", lambda t: tp.tie(t.dict, "b", "b"), ValueError, "'b' is tied to itself; name two paths"),
    ("other shapes", lambda t: tp.tie(t.dict, "b", "w"), ValueError, r"'b' is float32\[3\] and cannot be tied to 'w'"),
    ("no ties", lambda t: tp.tie(t.model), ValueError, r"no class in this model declares a tie; declare it"),
    ("layout[node]", lambda t: t.layout["layers.0"], KeyError, r"is a node; layout.indices\('layers.0'\)"),
    ("layout[0]", lambda t: t.layout[0], TypeError, "expected a path, got 0; layout.slots"),
    ("layout.x = y", lambda t: setattr(t.layout, "size", 3), AttributeError, "layout.freeze and layout.thaw return"),
    ("layout.diff(model)", lambda t: t.layout.diff(t.model), TypeError, r"another Layout, tp.layout\(model\), got MLP"),
    ("another's layout", lambda t: tp.layout(t.other, t.layout), ValueError, "does not fit the layout; .*tp.layout"),
]


ENDS = r"\['embed', 'head'\]"
TURNED = {"a": np.ones((2, 3), np.float32), "c": np.ones((3, 2), np.float32)}
TURNS = tp.layout(TURNED, ties={"c": ("a", jnp.transpose)})
SIMPLE = {"kernel": ramp(2, 2), "bias": ramp(2), "norm": Norm(ramp(1), ramp(1))}
TWICE = {"norm.scale": 1.0, "norm": {"scale": 1.0}}
NO_LEAF = "where the model has no leaf; nearest: 'kernel'"
VALUES = "control flow must not depend on values"
UNREACHED = "trained parameters: 'layers.0.weight', 'layers.1.weight', 'layers.1.bias'; freeze"


def walk_turned(other: Any, **options: Any) -> object:
    return tp.biwalk(TURNED, other, trainable=TURNS, **options)


def of_a_bias(model: Any) -> jax.Array:
    return jnp.sum(model.layers[0].bias)


FUNCTIONS: list[Row] = [
    ("no leaf", lambda t: tp.biwalk(SIMPLE, {"kernel.x": 1.0}), ValueError, f"""entry at '"kernel.x"', {NO_LEAF}"""),
    ("below", lambda t: tp.project(SIMPLE, {"kernel": {"x": 1.0}}), ValueError, f"entry at 'kernel.x', {NO_LEAF}"),
    ("twice", lambda t: tp.maptrainable(jnp.add, SIMPLE, TWICE), ValueError, """entry at '"norm.scale"', where the"""),
    ("a vector", lambda t: tp.biwalk(SIMPLE, np.ones(3)), ValueError, r"float64\[3\]; a vector becomes a model by res"),
    ("grad(options)", lambda t: tp.grad("layers.1"), TypeError, r"got str; name the options: tp\.grad\("),
    ("Ema(decay, model)", lambda t: tp.Ema(0.99, t.model), TypeError, r"comes first: tp.Ema\(model, decay\)"),
    ("decay='0.9'", lambda t: tp.Ema(t.model, "0.9"), TypeError, r"decay must be a number in \[0, 1\], got str"),
    ("buffers=True", lambda t: tp.ema(t.dict, t.dict, decay=0.9, buffers=True), ValueError, '"copy", "keep".*True'),
    ("buffers: a typo", lambda t: tp.ema(t.dict, t.dict, decay=0.9, buffers={"m": "keep"}), ValueError, "nearest: 'b'"),
    ("grad(loss, model)", lambda t: tp.grad(loss, t.model)(t.model, t.x), TypeError, "got MLP itself: write its path"),
    ("grad(loss, model, x)", lambda t: tp.grad(loss, t.model, t.x), TypeError, r"write tp.grad\(loss\)\(model, x\)"),
    ("grad(loss, 0)", lambda t: tp.grad(loss, 0), TypeError, "the first argument of the loss; drop the number, got 0"),
    ("a vector of losses", lambda t: tp.grad(lambda m, x: m(x))(t.model, t.x[0]), TypeError, "float32.1.; write jnp.m"),
    ("aux that is not said", lambda t: tp.grad(lambda m, x: (value(m, x), x))(t.model, t.x[0]), TypeError, "has_aux=T"),
    ("aux that is not there", lambda t: tp.grad(value, has_aux=True)(t.model, t.x[0]), TypeError, "got float32.*drop"),
    ("no return", lambda t: tp.grad(lambda m: None)(t.model), TypeError, "to return a real scalar, got NoneType"),
    ("unreached", lambda t: tp.grad(loss, unreached="zero"), ValueError, "must be 'zeros', 'none' or 'error', got 'ze"),
    ("static_argnums=", lambda t: tp.jit(loss, static_argnums=1), ValueError, "leave it out, all that is no array is"),
    ("donate=True", lambda t: tp.jit(loss, donate=True), ValueError, "'all', 'all-except-first'.*got True"),
    ("jit(value)", lambda t: tp.jit(t.x), TypeError, r"write tp.jit\(f\)\(model, x\)"),
    ("map(m, f)", lambda t: tp.maptrainable(t.model, len), TypeError, r"first: tp.maptrainable\(f, model.*; got MLP"),
    ("mapreduce(model, f)", lambda t: tp.mapreduce(t.model, max, len, init=0), TypeError, r"mapreduce\(f, op, model,"),
    ("map: where", lambda t: tp.maptrainable(len, t.model, "layers.0"), ValueError, "a tree with arrays at paths.*got"),
    ("walk: a tie", lambda t: tp.biwalk(t.tied, t.tied), ValueError, rf"at {ENDS}.*tied=\"sum\".*gradients.*\"first\""),
    ("tied: a word", lambda t: tp.biwalk(t.tied, t.tied, tied="mean"), ValueError, 'tied must be "sum"'),
    ("tied: None", lambda t: tp.maptrainable(max, *[t.tied] * 3, tied=("sum", None)), ValueError, '"sum", "first"'),
    ("an alias", lambda t: walk_turned({"c": np.ones((3, 2), "f")}), ValueError, r"'c'.*tied=\"sum\""),
    ("an alias 1st", lambda t: walk_turned({"c": t.x}, tied="first"), ValueError, "at 'c', which is computed from 'a'"),
    ("project(grads, model)", lambda t: tp.project(t.params, t.model), ValueError, "the model comes first, then the"),
    ("replace: a list", lambda t: tp.replace(t.dict, ["w", 0.0]), TypeError, "values must be a dictionary {where:"),
    ("replace: a typo", lambda t: tp.replace(t.model, {"layers.0.bais": 0.0}), ValueError, "nearest: 'layers.0.bias'"),
    ("replace: a shape", lambda t: tp.replace(t.dict, {"b": t.x}), ValueError, r"expected float32\[3\] at 'b', got fl"),
    ("replace: a node", lambda t: tp.replace(t.model, {"layers.0": t.model.layers[0]}), TypeError, "got Linear, a pyt"),
    ("replace: int", lambda t: tp.replace(t.dict, {"b": np.arange(3)}), ValueError, r"write value.astype\('float32'\)"),
    ("set: no leaf", lambda t: tp.replace(t.model, {"activation": t.x}), ValueError, "'activation' selects no param"),
    ("set: again", lambda t: tp.replace(t.dict, {"**": 0.0, "b": 1.0}), ValueError, r"'b' comes too late: '\*\*' be"),
    ("set: alias", lambda t: tp.replace(TURNED, {"c": t.x}, layout=TURNS), ValueError, "'c', .*transpose of 'a'; wr"),
    ("replace: init", lambda t: tp.replace(t.dict, {"w": jax.nn.initializers.ones}), TypeError, r"init\(key, w.shape"),
    ("replace: half a tie", lambda t: tp.replace(t.tied, {"head": 0.0}), ValueError, "one array. Either .* write 'emb"),
    ("moved", lambda t: tp.moved(lambda m: m["b"][0])(t.dict), TypeError, r"float32\[\]; if it is another item"),
    ("moved(m)", lambda t: tp.moved(t.dict), TypeError, r"a training step, got dict; write tp.moved\(step\)\(model"),
    ("reached: a value", lambda t: tp.reached(lambda m: m["b"][0] if m["b"][0] > 0 else 0)(t.dict), TypeError, VALUES),
    ("reached: a mask", lambda t: tp.reached(lambda m: m["b"][m["b"] > 1])(t.dict), IndexError, f"so its {VALUES}"),
    ("unreached='error'", lambda t: tp.grad(of_a_bias, unreached="error")(t.model), ValueError, UNREACHED),
    ("reached: aux", lambda t: tp.reached(lambda m: m["b"][0], has_aux=True)(t.dict), TypeError, r"a pair, \(value, "),
    ("summary(layout)", lambda t: tp.summary(t.layout), TypeError, r"write tp.summary\(model, layout\)"),
]
FORMS: list[Row] = [
    ("combine of eqx.partition", lambda t: tp.combine(*eqx.partition(t.model, eqx.is_array)), TypeError, "eqx.combine"),
    ("combine(rest, params)", lambda t: tp.combine(t.rest, t.params), TypeError, r"come first: tp.combine\(params, re"),
    ("combine(params, model)", lambda t: tp.combine(t.params, t.model), TypeError, r"got MLP; params, rest = tp.parti"),
    ("combine(vector, rest)", lambda t: tp.combine(t.vector, t.rest), ValueError, "becomes a model by restructure"),
    ("a short vector", lambda t: t.back(jnp.ones(3)), ValueError, r"a vector of shape \(17,\).*got shape \(3,\)"),
    ("a stack of vectors", lambda t: t.back(t.vector[None]), ValueError, "map over a stack of vectors with jax.vmap"),
    ("a vector of ints", lambda t: t.back(jnp.ones(17, int)), TypeError, r"convert it with vector.astype\(float32\)"),
    ("restructure(model)", lambda t: t.back(t.model), TypeError, r"a vector of shape \(17,\) and floating dtype, got"),
    ("ravel(vector)", lambda t: t.back.ravel(t.vector), ValueError, r"paths of the model, got float32\[17\]"),
    ("pad_to=0", lambda t: tp.ravel(t.model, pad_to=0), ValueError, "a whole number of elements, at least 1, got 0"),
    ("view: a typo", lambda t: t.back.view(t.vector)["layers.0.wieght"], KeyError, "nearest: 'layers.0.weight'"),
    ("view: a shape", lambda t: t.back.view(t.vector).at["layers.0"].set(t.x[0]), ValueError, "expected a number|shap"),
    ("stack: groups", lambda t: tp.stack(t.model, groups=["layers.0"]), TypeError, "groups must be a dict"),
    ("stacks of a vector", lambda t: tp.stack(t.model)[1](t.vector), TypeError, "the stacks of tp.stack, a dictiona"),
]


CALLS: list[Row] = [
    ("grad(model, loss)", lambda t: tp.grad(t.model, loss), TypeError, r"the loss comes first: tp.grad\(loss, trainab"),
    ("layout(frozen=)", lambda t: tp.layout(t.model, frozen="*"), TypeError, "no argument 'frozen'; write freeze=..."),
    ("layout(where=)", lambda t: tp.layout(t.model, where="*"), TypeError, "no argument 'where'; write trainable=..."),
    ("tie(ties=)", lambda t: tp.tie(t.dict, ties={"b": "w"}), TypeError, r"'ties'; write to=...; it is tp.tie\(model,"),
    ("field(tied=)", lambda t: tp.field(tied="embed"), TypeError, "no argument 'tied'; write tied_to=..."),
    ("grad(argnums=)", lambda t: tp.grad(loss, argnums=0), TypeError, "no argument 'argnums'; write trainable=..."),
    ("thaw=", lambda t: tp.layout(t.model, thaw="layers.0"), ValueError, "'layers.0' selects nothing that is frozen"),
    (".thaw", lambda t: t.layout.thaw("**"), ValueError, r"'\*\*' selects nothing that is frozen, so there is nothing"),
    ("a position", lambda t: tp.layout(t.model, ("layers", 0)), TypeError, "int: 0; a path is one text, such as 'la"),
    ("ema(a, b, 0.9)", lambda t: tp.ema(t.dict, t.dict, 0.9), TypeError, r"too many.*it is tp.ema\(average, mod"),
    ("accumulate(loss)", lambda t: tp.accumulate(loss, steps=8), TypeError, "no argument 'steps'; write pieces=..."),
    ("replace(a, b, c)", lambda t: tp.replace(t.dict, "w", t.x), TypeError, r"it is tp.replace\(model, values, lay"),
    ("combine(params)", lambda t: tp.combine(t.params), TypeError, r"'rest'; it is tp.combine\(params, rest\)"),
    ("save(path)", lambda t: saving.save("a"), TypeError, r"'model'; it is saving.save\(path, model, "),
    ("no folder", lambda t: saving.save("no/such/a", t.dict), FileNotFoundError, "no such folder; make it first: '/"),
    ("load(template=)", lambda t: saving.load("a", template=t.x), TypeError, "no argument 'template'; write like=..."),
    ("donated", lambda t: donated_twice(), RuntimeError, r"the array at '0.w' has been deleted.*tp.copy\(model\)"),
]
PACKAGES = {"tp": tp, "optim": tp.optim, "nested": nested, "matrices": matrices, "saving": saving, "sharding": sharding}
PUBLIC = [
    (f"{package}.{name}", function)
    for package, module in PACKAGES.items()
    for name, function in vars(module).items()
    if inspect.isfunction(function) and name[0] != "_"
]


def donated_twice() -> None:
    step = tp.jit(lambda model: {"w": model["w"] + 1}, donate="all")
    model = {"w": jnp.ones(3)}
    step(model), step(model)


@pytest.mark.parametrize(("name", "function"), PUBLIC, ids=[name for name, _ in PUBLIC])
def test_each_function_answers_a_keyword_that_it_does_not_have(name, function):
    takes_any = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())
    if not takes_any:
        with pytest.raises(TypeError, match=rf"{name} has no argument 'trainabel'.*; it is {name}\("):
            function(trainabel="layers.0")
    assert pickle.loads(pickle.dumps(function)) is function


def test_a_norm_of_the_value_too_is_warned_of():
    with pytest.warns(UserWarning, match=r"of \(value, grads\) write tp\.global_norm\(grads\)"):
        assert tp.global_norm((jnp.array(3.0), {"w": jnp.array([4.0])})) == 5


def test_a_declaration_of_which_states_of_nnx_know_nothing_is_warned_of():
    class Net(nnx.Module):
        pass

    with pytest.warns(UserWarning, match=r"Net: a state of nnx.split does not.* tp.layout\(state, freeze=..., ties"):
        tp.declare(Net, ties={"head.kernel": ("embed.embedding", jnp.transpose)})


def read_back(write: Callable[[str, Any], object], t: Any) -> object:
    with tempfile.TemporaryDirectory() as folder:
        write(f"{folder}/a.npz", t.dict)
        return saving.plan(f"{folder}/a.npz", t.dict)


MODULES: list[Row] = [
    ("of Equinox", lambda t: read_back(eqx.tree_serialise_leaves, t), ValueError, r"tree_deserialise_leaves\(path, "),
    ("of NumPy", lambda t: read_back(np.savez, t), ValueError, r"np.savez; use np.load\(path\) as source: sav"),
    ("save(model, path)", lambda t: saving.save(t.model, "a.safetensors"), TypeError, r"first: saving.save\(path, mod"),
    ("save(path, tx)", lambda t: saving.save("a.safetensors", t.tx), TypeError, r"a state, tx.init\(model\), got"),
    ("save: metadata", lambda t: saving.save("a.safetensors", t.dict, metadata={"a": 1}), TypeError, "{str: str}, got"),
    ("plan(model, path)", lambda t: saving.plan(t.model, "a"), TypeError, r"comes first: saving.plan\(path, model\)"),
    ("names of PyTorch", lambda t: saving.plan({"fc": t.x}, t.dict), ValueError, "'fc' is unused: no array is at 'fc'"),
    ("rename: a typo", lambda t: saving.plan(t.dict, t.dict, rename={"v": "w"}), ValueError, "'v' matches no name; ne"),
    ("state: tx", lambda t: saving.plan(t.dict, t.dict).state(t.dict, t.tx), TypeError, r"like=tx.init\(model\), got"),
    ("hessian(value)", lambda t: nested.hessian(t.x)(t.model), TypeError, r"write nested.hessian\(loss\)\(model, x\)"),
    ("hessian of many", lambda t: nested.hessian(lambda m, x: m(x))(t.model, t.x[0]), TypeError, "float32.1.; write j"),
    ("gradient of many", lambda t: nested.input_gradient(lambda m, x: m(x))(t.model, t.x[0]), TypeError, "batched=Tr"),
    ("hvp: no tangent", lambda t: nested.hvp(value)(t.model, t.x[0]), ValueError, "a vector of 17 elements, one per t"),
    ("gradient: order", lambda t: nested.input_gradient(value)(t.x[0], t.model), TypeError, "x to be floating, got cu"),
    ("gradient(f)(x)", lambda t: nested.input_gradient(value)(t.x), TypeError, r"'x'; it is nested.*\(model, x, arg"),
    ("rows of a batch", lambda t: nested.parameter_jacobian(loss)(t.model, t.x), ValueError, r"one sample \(of a func"),
    ("examples of a batch", lambda t: nested.per_example_gradients(loss)(t.model, t.x), ValueError, r"f\(model, x\[No"),
    ("lora(where, model)", lambda t: matrices.lora("w", t.dict, 1, key=t.x), TypeError, "got 'w': matrices.lora"),
    ("lora of a bias", lambda t: matrices.lora(t.dict, "b", 1, key=jax.random.key(0)), ValueError, "no parameter with"),
    ("SVD of arrays", lambda t: matrices.SVD(jnp.eye(2), t.x[0], jnp.eye(2)), TypeError, "a Givens for u, got .*SVD.r"),
    ("plan(model, rules)", lambda t: sharding.plan(t.model, {}, {}), TypeError, "expected a mesh, such as jax.make_me"),
    ("rules", lambda t: sharding.plan(t.model, MESH, [("**", "split")]), TypeError, "dictionary {where: rule}, such a"),
    ("rules: a typo", lambda t: sharding.plan(t.model, MESH, {"layer": "split"}), ValueError, NEAREST),
    ("rules: a word", lambda t: sharding.plan(t.model, MESH, {"**": "d"}), ValueError, '"split", "owned", "whole" or'),
    ("an axis", lambda t: sharding.plan(t.model, MESH, {"**": PartitionSpec("x")}), ValueError, "no axis 'x'; its ax"),
    ("step over models", lambda t: sharding.make_step(loss, t.tx, t.plan), ValueError, "pass the optimiser inside it,"),
    ("step: layout", lambda t: sharding.make_step(loss, t.adam, t.layout), TypeError, r"sharding.plan\(model, mesh"),
    ("step(tx, loss)", lambda t: sharding.make_step(t.adam, loss, t.plan), TypeError, "a loss, an optimiser and a"),
]
MESH = jax.make_mesh((1,), ("d",))


@pytest.mark.parametrize("row", [*WHERES, *DECLARED, *FUNCTIONS, *FORMS, *CALLS, *MODULES], ids=operator.itemgetter(0))
def test_a_mistake_is_answered(row):
    check(row)
