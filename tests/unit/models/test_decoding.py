"""Token by token, the hidden states are those of whole sequences, for every architecture."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tiny
from laurel.models.forest.attention import forest_attention
from laurel.models.forest.decoding import KeptTokens, KeyValueStore

pytestmark = pytest.mark.slow_parameters(
    "gemma",
    "gemma2",
    "mistral",
    "mistral-sliding",
    "qwen2",
    "qwen2-sliding",
    "qwen3-sliding",
    "qwen3-tied",
    "olmo2",
    "cohere",
    "granite",
    "phi",
    "phi3",
)

ALL = sorted(tiny.LANGUAGE_MODELS)
CPU = torch.device("cpu")


class Drawing:
    """Random sequences, fed to a store and a model one token at a time."""

    def __init__(self, model, seed=0):
        self.model = model
        self.store = KeyValueStore(CPU)
        self.generator = torch.Generator().manual_seed(seed)
        self.prompts, self.ids, self.prompt_of, self.found = {}, {}, {}, {}

    def random(self, count):
        return torch.randint(3, tiny.VOCABULARY, (count,), generator=self.generator)

    def admit(self, wanted):
        """Prompts by id: (length, ids of its completions)."""
        lengths = {prompt: length for prompt, (length, _) in wanted.items()}
        self.prompts |= {prompt: self.random(length) for prompt, length in lengths.items()}
        plan = self.store.add_prompts(lengths)
        hidden_TD = self.forward(
            torch.cat([self.prompts[p] for p in lengths]), plan.positions_T, plan
        )
        for (prompt, (_, completions)), last in zip(wanted.items(), plan.last_B, strict=True):
            self.store.add_completions(prompt, completions)
            for completion in completions:
                self.prompt_of[completion] = prompt
                self.ids[completion] = []
                self.found[completion] = [hidden_TD[last]]

    def step(self):
        plan = self.store.next_step()
        tokens_N = self.random(len(plan.ids))
        for completion, token in zip(plan.ids, tokens_N.tolist(), strict=True):
            self.ids[completion].append(token)
        hidden_ND = self.forward(tokens_N, plan.positions_N, plan)
        for completion, hidden_D in zip(plan.ids, hidden_ND, strict=True):
            self.found[completion].append(hidden_D)

    def forward(self, ids, positions, plan):
        with torch.inference_mode():
            return self.model.base_model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, forest_plan=plan
            ).last_hidden_state[0]

    def worst(self):
        """Largest distance to the model's own forward, over every token of every completion."""
        body = self.model.base_model
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(tiny.own_attention(self.model))
        worst = 0.0
        with torch.inference_mode():
            for completion, ids in self.ids.items():
                prompt = self.prompts[self.prompt_of[completion]]
                whole = torch.cat((prompt, torch.tensor(ids, dtype=torch.int64)))
                expected = body(input_ids=whole[None]).last_hidden_state[0, len(prompt) - 1 :]
                distance = (torch.stack(self.found[completion]) - expected).abs().max()
                worst = max(worst, float(distance))
        self.model.set_attn_implementation(before)
        return worst


def all_sorts(model):
    """Prompts of many lengths, completions that come and go, some longer than a block."""
    drawing = Drawing(model)
    drawing.admit({1: (40, [10, 11, 12]), 2: (3, [20])})
    for _ in range(5):
        drawing.step()
    drawing.admit({3: (70, [30, 31]), 4: (17, [40, 41, 42, 43]), 5: (64, [50])})
    for _ in range(20):
        drawing.step()
    for gone in (11, 40, 50):
        drawing.store.remove_completion(gone)
    drawing.store.remove_prompt(5)
    drawing.admit({6: (100, [60, 61])})
    for _ in range(50):
        drawing.step()
    for gone in (10, 12, 61):
        drawing.store.remove_completion(gone)
    drawing.store.remove_prompt(1)
    drawing.store.add_completions(4, [44])
    drawing.prompt_of[44], drawing.ids[44] = 4, []
    drawing.found[44] = [drawing.found[40][0]]
    for _ in range(8):
        drawing.step()
    return drawing


@pytest.mark.parametrize("name", ALL)
def test_every_token_is_that_of_the_whole_sequence(name):
    drawing = all_sorts(tiny.tiny_policy(name, dtype=torch.float64).causal_lm)
    assert max(map(len, drawing.ids.values())) > 64
    # Gemma 2's own attention computes its softmax in float32 in any model.
    assert drawing.worst() <= (1e-5 if name.startswith("gemma2") else 1e-9)


def test_in_bfloat16_the_noise_is_that_of_the_model_itself():
    exact = all_sorts(tiny.tiny_policy("qwen3", dtype=torch.float64).causal_lm)
    policy = tiny.tiny_policy("qwen3", precision=torch.bfloat16)
    with policy.autocast():
        rough = all_sorts(policy.causal_lm)
        own = rough.worst()
    truth = torch.cat([torch.stack(h) for h in exact.found.values()])
    noisy = torch.cat([torch.stack(h) for h in rough.found.values()])
    noise = float((noisy - truth).square().mean().sqrt() / truth.square().mean().sqrt())
    assert 1e-4 <= noise <= 0.05  # bfloat16 keeps 8 bits: 0.4 % a rounding
    assert own <= 0.5


def first_layer(heads, generator, *, has_sinks):
    """What attention asks of a layer, which is its number; and sinks of its heads, if any."""
    layer = nn.Module()
    layer.layer_idx = 0
    sinks = torch.randn(heads, generator=generator, dtype=torch.float64) if has_sinks else None
    return layer, sinks


OPTIONS = st.fixed_dictionaries(
    {
        "sliding_window": st.none() | st.integers(1, 100),
        "softcap": st.none() | st.floats(0.5, 30.0),
        "scaling": st.none() | st.floats(0.1, 1.0),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 4)), min_size=1, max_size=4),
    steps=st.integers(1, 70),
    options=OPTIONS,
    has_sinks=st.booleans(),
    repeats=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**16),
)
def test_the_function_by_itself(groups, steps, options, has_sinks, repeats, seed):
    """Any combination of what models ask of it, against a softmax over the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, size = 2 * repeats, 2, 4
    layer, sinks = first_layer(heads, generator, has_sinks=has_sinks)

    def attend(plan, count):
        q, k, v = (
            torch.randn(1, n, count, size, generator=generator, dtype=torch.float64)
            for n in (heads, kv_heads, kv_heads)
        )
        out, _ = forest_attention(layer, q, k, v, None, forest_plan=plan, s_aux=sinks, **options)
        return q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), out[0]

    store = KeyValueStore(CPU)
    lengths = {index: length for index, (length, _) in enumerate(groups)}
    _, k_T, v_T, _ = attend(store.add_prompts(lengths), sum(lengths.values()))
    starts = [sum(list(lengths.values())[:i]) for i in range(len(groups))]
    rows = [(g, g * 10 + c) for g, (_, count) in enumerate(groups) for c in range(count)]
    seen = {}
    for g, completion in rows:
        store.add_completions(g, [completion])
        span = slice(starts[g], starts[g] + lengths[g])
        seen[completion] = ([*k_T[span]], [*v_T[span]])
    for _ in range(steps):
        plan = store.next_step()
        q_N, k_N, v_N, out_N = attend(plan, len(rows))
        for row, completion in enumerate(plan.ids):
            keys, values = seen[completion]
            keys.append(k_N[row])
            values.append(v_N[row])
            assert int(plan.positions_N[row]) == len(keys) - 1
    for row, completion in enumerate(plan.ids):
        keys, values = (torch.stack(list(t)) for t in seen[completion])
        expected = _by_the_book(q_N[row], keys, values, sinks, repeats, **options)
        torch.testing.assert_close(out_N[row], expected, rtol=1e-10, atol=1e-10)


def _by_the_book(q, keys, values, sinks, repeats, *, sliding_window, softcap, scaling):
    keys, values = (t.repeat_interleave(repeats, dim=1) for t in (keys, values))
    if sliding_window is not None:
        keys, values = keys[-sliding_window:], values[-sliding_window:]
    logits = torch.einsum("hd,lhd->hl", q, keys) * (scaling or q.shape[-1] ** -0.5)
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    weights = logits.exp()
    total = weights.sum(1) + (0 if sinks is None else sinks.exp())
    return torch.einsum("hl,lhd->hd", weights / total[:, None], values)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 90), st.integers(0, 40), st.integers(1, 70)),
        min_size=1,
        max_size=4,
    ),
    options=OPTIONS,
    has_sinks=st.booleans(),
    repeats=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**16),
)
def test_a_prompt_that_continues_kept_tokens(lengths, options, has_sinks, repeats, seed):
    """Two kept parts and new tokens, beside whole prompts, against a softmax over the sequence."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, size = 2 * repeats, 2, 4
    layer, sinks = first_layer(heads, generator, has_sinks=has_sinks)

    def random(count, heads):
        return torch.randn(count, heads, size, generator=generator, dtype=torch.float64)

    def part(keys, values):
        pair = (keys.transpose(0, 1), values.transpose(0, 1))
        return KeptTokens(len(keys), {0: pair} if len(keys) else {})

    # Whole prompts come first.
    lengths = sorted(lengths, key=lambda sizes: sizes[0] + sizes[1] > 0)
    keys = [random(sum(sizes), kv_heads) for sizes in lengths]
    values = [random(sum(sizes), kv_heads) for sizes in lengths]
    starts = [first + second for first, second, _ in lengths]
    kept = {
        index: (
            part(keys[index][:first], values[index][:first]),
            part(keys[index][first : first + second], values[index][first : first + second]),
        )
        for index, (first, second, _) in enumerate(lengths)
        if first + second
    }
    store = KeyValueStore(CPU)
    plan = store.add_prompts({i: len(k) for i, k in enumerate(keys)}, kept)
    queries = [random(new, heads) for _, _, new in lengths]
    new_keys = [k[start:] for k, start in zip(keys, starts, strict=True)]
    new_values = [v[start:] for v, start in zip(values, starts, strict=True)]
    rows = (torch.cat(rows).transpose(0, 1)[None] for rows in (queries, new_keys, new_values))
    out, _ = forest_attention(layer, *rows, None, forest_plan=plan, s_aux=sinks, **options)
    expected = [
        _by_the_book(q, k[: start + i + 1], v[: start + i + 1], sinks, repeats, **options)
        for k, v, start, mine in zip(keys, values, starts, queries, strict=True)
        for i, q in enumerate(mine)
    ]
    torch.testing.assert_close(out[0], torch.stack(expected), rtol=1e-10, atol=1e-10)
    assert plan.positions_T.tolist() == [
        position for k, start in zip(keys, starts, strict=True) for position in range(start, len(k))
    ]
    for index, (k, v) in enumerate(zip(keys, values, strict=True)):
        copied = store.copy_prompt(index).layers[0]
        torch.testing.assert_close(copied, (k.transpose(0, 1), v.transpose(0, 1)), rtol=0, atol=0)


def test_a_prompt_is_held_once_for_all_its_completions():
    model = tiny.tiny_policy("qwen3").causal_lm
    sizes = []
    for count in (1, 8):
        drawing = Drawing(model)
        drawing.admit({0: (500, list(range(count)))})
        before = drawing.store.num_bytes
        drawing.step()
        sizes.append((before, drawing.store.num_bytes - before))
    (prompt_1, own_1), (prompt_8, own_8) = sizes
    # Three layers, keys and values, two heads of 16 floats: 768 bytes a token; 512 and 64 tokens.
    assert prompt_1 == prompt_8 == 512 * 768
    assert (own_1, own_8) == (64 * 768, 8 * 64 * 768)
