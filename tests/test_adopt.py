"""The ported programs of the pages "Adopt it ..." against the same steps written by hand."""

import functools
import pathlib
import types

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import paramax
import pytest

from .blocks import run

PAGES = pathlib.Path(__file__).parent.parent / "docs" / "pages" / "how-to"
pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.timeout(300)]  # a page is a whole program


@functools.cache
def names_of(page):
    """The names that the code of a page makes."""
    with jax.numpy_rank_promotion("allow"):
        namespace, blocks = run(PAGES / page)
    assert any(block.shown for block in blocks)
    return types.SimpleNamespace(**namespace)


page = pytest.fixture(lambda: names_of("adopt.md"))
flax_page = pytest.fixture(lambda: names_of("adopt-flax.md"))
more = pytest.fixture(lambda: names_of("adopt-more.md"))


def assert_same(ported, by_hand):
    """Equal arrays at equal paths, bit for bit."""
    ported, by_hand = (
        [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (eqx.filter(ported, eqx.is_array), eqx.filter(by_hand, eqx.is_array))
    )
    assert [path for path, _ in ported] == [path for path, _ in by_hand] != []
    for (path, one), (_, other) in zip(ported, by_hand, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other, path)


def assert_close(ported, by_hand):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7), ported, by_hand)


def assert_moved(after, before):
    assert jax.tree.leaves(after)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        assert np.all(np.not_equal(one, other))


def by_optax(rule, loss, params, *batch, steps=3, between=lambda params: params):
    """The parameters after steps of plain Optax on `loss(params, *batch)`, after each of which something is done."""

    @jax.jit
    def step(params, state, batch):
        updates, state = rule.update(jax.grad(loss)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(rule.init)(params)
    for _ in range(steps):
        params, state = step(params, state, batch)
        params = between(params)
    return params


def test_the_frozen_layer_of_equinox(page):
    mask = jax.tree.map(lambda _: False, page.mlp)
    mask = eqx.tree_at(lambda mask: (mask.layers[-1].weight, mask.layers[-1].bias), mask, (True, True))
    trained, frozen = eqx.partition(page.mlp, mask)
    loss = lambda trained, x, y: jnp.mean((y - jax.vmap(eqx.combine(trained, frozen))(x)) ** 2)
    by_hand = by_optax(optax.sgd(3e-3), loss, trained, page.xs, 5 * page.xs - 2)
    assert_same(page.tuned, eqx.combine(by_hand, frozen))
    assert not np.array_equal(page.tuned.layers[1].weight, page.mlp.layers[1].weight)


def test_the_gan_of_equinox(page):
    rule = optax.adam(2e-4, b1=0.5, b2=0.999)
    (generator, discriminator), running = page.nets, page.fresh
    begun = jax.jit(rule.init)
    g_state, d_state = (begun(eqx.filter(net, eqx.is_inexact_array)) for net in page.nets)

    @eqx.filter_jit
    def step(loss, network, other, state, running, *batch):
        grads, running = eqx.filter_grad(loss, has_aux=True)(network, other, running, *batch)
        updates, state = rule.update(grads, state)
        return eqx.apply_updates(network, updates), state, running

    for noise in page.noises:
        batch = running, noise, page.images
        discriminator, d_state, running = step(page.discriminator_loss, discriminator, generator, d_state, *batch)
        generator, g_state, running = step(page.generator_loss, generator, discriminator, g_state, running, noise)
    assert_same((page.generator, page.discriminator, page.running), (generator, discriminator, running))
    assert not np.array_equal(generator.layers[0].weight, page.nets[0].layers[0].weight)


def test_the_neural_sde_of_diffrax(page):
    rules = {"generator": optax.rmsprop(2e-5), "discriminator": optax.rmsprop(-1e-4)}

    def faster_start(updates):
        return eqx.tree_at(lambda tree: jax.tree.leaves(tree.initial), updates, replace_fn=lambda leaf: 10 * leaf)

    def clipped(node):
        if not isinstance(node, eqx.nn.Linear):
            return node
        limit = 1 / node.out_features
        return eqx.tree_at(lambda node: node.weight, node, node.weight.clip(-limit, limit))

    @eqx.filter_jit
    def step(pair, states, noise, paths):
        grads = eqx.filter_grad(page.score)(pair, noise, paths)
        made = {name: rule.update(grads[name], states[name]) for name, rule in rules.items()}
        pair = {name: eqx.apply_updates(pair[name], faster_start(updates)) for name, (updates, _) in made.items()}
        is_linear = lambda node: isinstance(node, eqx.nn.Linear)
        pair["discriminator"] = jax.tree.map(clipped, pair["discriminator"], is_leaf=is_linear)
        return pair, {name: state for name, (_, state) in made.items()}

    pair, begun = page.pair, lambda pair: {name: rule.init(pair[name]) for name, rule in rules.items()}
    states = jax.jit(begun)(eqx.filter(pair, eqx.is_inexact_array))
    for _ in range(3):
        pair, states = step(pair, states, page.noise, page.paths)
    assert_same(page.clipped, pair)
    weight = page.clipped["discriminator"].initial.weight
    assert np.abs(weight).max() == 1 / 4 < np.abs(page.pair["discriminator"].initial.weight).max()


def test_the_decay_mask_and_the_clip_of_gpt_jax(flax_page):
    page = flax_page
    names = flax.traverse_util.flatten_dict(page.params)
    decays = {path: path[-1] not in {"bias", "embedding", "scale"} for path in names}
    decays = flax.traverse_util.unflatten_dict(decays)
    assert decays == page.decays
    adamw = optax.adamw(2.5e-4, 0.9, 0.95, weight_decay=1e-2, mask=decays)
    loss = lambda params, tokens: page.token_loss(page.GPT().apply(params, tokens[:-1]), tokens[1:])
    by_hand = by_optax(optax.chain(optax.clip_by_global_norm(1.0), adamw), loss, page.params, page.tokens)
    assert_close(page.gpt.params, by_hand)
    assert not np.array_equal(by_hand["params"]["wte"]["embedding"], page.params["params"]["wte"]["embedding"])


def test_fit_to_data_of_flowjax(page):
    wrapped = eqx.tree_at(lambda flow: flow.base_dist, page.flow, replace_fn=paramax.non_trainable)
    fitted = page.fit_to_data(wrapped, page.data, optax.adamw(5e-4))
    assert isinstance(fitted.base_dist["loc"], paramax.NonTrainable)
    assert_same(page.fitted, paramax.unwrap(fitted))
    assert_moved(fitted.shift, page.flow.shift)


def test_td3_and_dqn_of_cleanrl(flax_page):
    page, adam = flax_page, optax.adam(3e-4)

    def descended(loss, params, state):
        updates, state = adam.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def step(agent, target, states, batch):
        actions = page.act(target["actor"], batch["next_obs"])
        values = [page.value(target[name], batch["next_obs"], actions) for name in ("qf1", "qf2")]
        wanted = batch["rewards"] + 0.99 * jnp.minimum(*values)
        error = lambda params: jnp.mean((page.value(params, batch["obs"], batch["actions"]) - wanted) ** 2)
        gain = lambda params: -jnp.mean(page.value(made["qf1"][0], batch["obs"], page.act(params, batch["obs"])))
        made = {name: descended(error, agent[name], states[name]) for name in ("qf1", "qf2")}
        made["actor"] = descended(gain, agent["actor"], states["actor"])
        agent, states = ({name: its[i] for name, its in made.items()} for i in (0, 1))
        return agent, optax.incremental_update(agent, target, 0.005), states

    begun = jax.jit(lambda first: {name: adam.init(params) for name, params in first.items()})
    agent, target, states = page.first, page.first, begun(page.first)
    for _ in range(3):
        agent, target, states = step(agent, target, states, page.batch)
    assert_same(page.agent, agent)
    assert_same(page.target, target)
    for after, before in ((page.target, page.first), (page.agent, page.target)):
        assert_moved(after["actor"]["params"]["kernel"], before["actor"]["params"]["kernel"])
    assert_same(page.copied, optax.incremental_update(page.agent, page.target, 1))
    assert_close(page.at_once, page.agent)


def test_the_clip_and_adam_of_purejaxrl(flax_page):
    page = flax_page
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(page.rate, eps=1e-5))

    def train(params):
        def update(carry, obs):
            params, state = carry
            grads = jax.grad(lambda params: jnp.mean((page.actor.apply(params, obs) - 1) ** 2))(params)
            updates, state = tx.update(grads, state)
            squares = [jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)]
            return (optax.apply_updates(params, updates), state), jnp.sqrt(sum(squares))

        (params, _), norms = jax.lax.scan(update, (params, tx.init(params)), page.rollouts)
        return params, norms

    policies, norms = jax.jit(jax.vmap(train))(page.seeds)
    assert_close(page.policies, policies)
    assert_close(page.norms, norms)
    assert np.all(np.asarray(norms) > 0.5)


def test_the_maml_of_jax(page):
    def error(params, x, y):
        for weight, bias in params[:-1]:
            x = jax.nn.relu(x @ weight.T + bias[None])
        return jnp.mean((x @ params[-1][0].T + params[-1][1][None] - y) ** 2)

    def inner_update(params, x, y):
        for _ in range(2):
            grads = jax.grad(error)(params, x, y)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return params

    def maml_loss(params):
        adapted = lambda x1, y1, x2, y2: error(inner_update(params, x1, y1), x2, y2)
        return jnp.mean(jax.vmap(adapted)(*page.tasks))

    start, learned = ([(layer.weight, layer.bias) for layer in net.layers] for net in (page.sine, page.learned))
    assert_close(learned, by_optax(optax.adam(1e-3), maml_loss, start, steps=1))


def test_the_tied_embedding_of_midgpt_and_kira(flax_page):
    page = flax_page

    def trained(model, language):
        params, static = eqx.partition(model, eqx.is_array)
        logits = lambda params, tokens: jax.vmap(language(eqx.combine(params, static)))(tokens)
        loss = lambda params, tokens: page.token_loss(logits(params, tokens[:-1]), tokens[1:])
        return language(eqx.combine(by_optax(page.adamw, loss, params, page.tokens), static))

    pair = eqx.nn.Shared((page.start.wte, page.start.lm_head), lambda pair: pair[1].weight, lambda pair: pair[0].weight)
    shared = trained(pair, lambda pair: page.Language(*pair()))  # as in Kira
    assert_same(page.tied, shared)
    assert_moved(shared.wte.weight, page.start.wte.weight)


def test_the_train_state_of_flax_that_stays(flax_page):
    page = flax_page
    embedding = page.params["params"]["wte"]

    def loss(params, tokens):
        frozen = {"params": params["params"] | {"wte": jax.lax.stop_gradient(params["params"]["wte"])}}
        return page.token_loss(page.GPT().apply(frozen, tokens[:-1]), tokens[1:])

    def with_embedding(params):
        assert np.any(np.not_equal(params["params"]["wte"]["embedding"], embedding["embedding"]))
        return {"params": params["params"] | {"wte": embedding}}

    by_hand = by_optax(page.rule, loss, page.params, page.tokens, between=with_embedding)
    assert_same(page.classifier.params, by_hand)
    assert_moved(by_hand["params"]["c_fc"]["kernel"], page.params["params"]["c_fc"]["kernel"])


def test_the_solutions_of_evosax(more):
    ravel_pytree, solution = jax.flatten_util.ravel_pytree, {name: more.policy[name] for name in ("w", "b")}
    (ravel, unravel), (vector, back) = more.get_ravel_fn(solution), ravel_pytree(solution)
    assert_same((ravel(solution), unravel(2 * vector)), (vector, back(2 * vector)))
    assert more.policies["steps"].dtype == jnp.int32
    assert ravel_pytree(more.policy)[0].size == 9  # the counter is searched over


def test_the_pruning_of_haiku(more):
    def by_hand(params):
        pruned = lambda w: w * more.topk_mask(w, 0.6)
        prunes = {module: not module.endswith("linear_2") for module in params}
        return {name: its | {"w": pruned(its["w"])} if prunes[name] else its for name, its in params.items()}

    params = jax.tree.map(lambda leaf: np.asarray(leaf) + 1, more.sparse)
    assert_same(*jax.jit(lambda params: (more.pruned(params, 0.6), by_hand(params)))(params))


def test_the_gradient_in_pieces_of_vision_transformer(more):
    pieces, of_piece = np.arange(12).reshape(3, 4), jax.jit(jax.value_and_grad(more.mean_loss))
    each = [of_piece(more.sparse, (more.images[piece], more.labels[piece])) for piece in pieces]
    by_hand = jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)) / 3, *each)
    assert_close(jax.jit(more.in_pieces)(more.sparse, (more.images, more.labels)), by_hand)


def test_the_complex_parameters_of_jvmc(more):
    leaves, treedef = jax.tree.flatten(jax.device_get(more.amplitudes))
    # Real parts of a parameter, then its imaginary ones.
    flat = lambda leaves: np.concatenate([part.ravel() for leaf in leaves for part in (leaf.real, leaf.imag)])
    np.testing.assert_array_equal(more.parameters, flat(leaves))
    changed = [leaf + np.exp(1j * np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape) for leaf in leaves]
    changed = [leaf.astype(np.complex64) for leaf in changed]
    assert_same(more.set_parameters(flat(changed)), jax.device_put(treedef.unflatten(changed)))
    of_each = jax.jit(jax.vmap(jax.grad(more.log_psi, holomorphic=True), (None, 0)))
    grads = of_each(more.amplitudes, more.configurations)
    want = np.concatenate([np.reshape(leaf, (4, -1)) for leaf in jax.tree.leaves(grads)], axis=1)
    assert_close(more.gradients(more.amplitudes, more.configurations)[:, 0], want)


def test_the_vae_of_nnx(more):
    module = more.VAE(flax.nnx.Rngs(0))
    trained = lambda path, value: isinstance(value, flax.nnx.Param) and "first" not in path
    optimizer = flax.nnx.Optimizer(module, optax.adam(1e-2), wrt=trained)

    @flax.nnx.jit
    def step(module, optimizer, x, noise):
        loss = lambda module: module(x, noise)
        optimizer.update(module, flax.nnx.grad(loss, argnums=flax.nnx.DiffState(0, trained))(module))

    for _ in range(3):
        step(module, optimizer, more.x, more.noise)
    by_hand = flax.nnx.split(module)[1]
    assert_close(flax.nnx.to_pure_dict(more.vae), flax.nnx.to_pure_dict(by_hand))
    assert_same(more.vae["first"], more.started["first"])
    assert_moved(more.vae["decoder"]["kernel"], more.started["decoder"]["kernel"])


def test_the_average_of_a_diffusion_trainer(more):
    ours = theirs = params = jax.tree.map(np.asarray, more.sparse)
    for step in range(9):
        grown = min(1 - (1 + max(step - 5, 0)) ** (-2 / 3), 0.995)
        decay = np.float32(0 if step < 4 else 1 if step % 2 else grown)
        params = jax.tree.map(lambda w: np.float32(0.9) * w, params)
        theirs = jax.tree.map(lambda a, p, decay=decay: decay * a + (1 - decay) * p, theirs, params)
        ours = more.averaged(ours, params, step)
        assert_close(ours, theirs)
