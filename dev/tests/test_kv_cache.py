"""Test dev/features/kv_cache.py: its kernels against NumPy in float64, and a token's pass against a
full pass over all tokens."""
import re
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import train_gpt2
from dev.common.bf16 import to_bf16
from dev.features import kv_cache
from dev.features.base import GPT2
from dev.features.devices import address_of, device_class
from dev.features.feature import stack
from dev.features.kv_cache import (AHEAD, FEW, PHASES, SOURCE, TOKEN_PASS, Cached,
                                   CachedLlama, shared_of_attention)
from dev.features.sample import choose, coins_of, generate, together
from dev.features.start import SamplesLater
from dev.lab.formulas import gelu, layernorm, rmsnorm
from dev.llama3.train_llama3 import Llama3
from dev.tests.checks import EXACT, check, fast, normal
from dev.tests.models import on_device
from dev.tests.test_sample import small_words, write_model
from dev.tests.trainings import call
from train_gpt2 import BF16, carve, next_logits, offsets, pack_batch, read_kernels, to_float

OWN = [*read_kernels([SOURCE])]
PASSES = "token_pass", "token_pass_alone"  # on a CPU, GPT-2's are in bf16 and Llama's in fp32
FULL = ["encoder_forward", "residual_layernorm_forward", "attention_forward", "gelu_forward"]
FULL_LLAMA = ["encoder_forward", "residual_rmsnorm_forward", "attention_forward", "rope_table",
              "rope_forward", "swiglu_forward"]


class Wide(GPT2):
    """A GPT-2 whose rows fill slots of token_pass: then it multiplies several at once."""


# Heads of 24 and 8 channels, and of 32 whose keys are shared by three heads of queries
SIZES = {GPT2: dict(V=301, Vp=384, L=3, NH=4, C=96),
         Wide: dict(V=301, Vp=384, L=1, NH=12, C=768),
         Llama3: dict(V=301, L=2, NH=6, NKV=2, C=192, multiple_of=32)}
LIMIT = {"fp32": 1e-5, "bf16": 3e-2}
made = {}


def device_for(name, dtype, kind):
    """A device, made once: a GPU's compiles kv_cache.cu later, as in a run."""
    key = name, dtype, kind
    if key not in made:
        full = () if dtype == "bf16" else FULL_LLAMA if kind is Llama3 else FULL
        passes = PASSES if (kind is Llama3) == (dtype == "bf16") else ()
        more = dict(only={*OWN, *full} - {*passes}) if name == "emulated" else {}
        later = [SamplesLater] if name == "cuda" else []
        made[key] = stack(device_class(name), later)(dtype, kind.Config(**SIZES[kind]), [SOURCE],
                                                     **more)
    return made[key]


def models(device_name, dtype, kind, T, rows=1):
    """(a model that keeps keys and values of so many texts; the same model without, on a CPU by
    the loops)."""
    device = device_for(device_name, dtype, kind)
    loops = device if device_name == "cuda" else device_for("cpu", dtype, kind)
    flags = SimpleNamespace(sample="", samples=rows)
    classes = [CachedLlama, Cached] if kind is Llama3 else [Cached]
    Kept = stack(kind, classes, dict(flags=flags, rows_of=lambda *args: rows))
    c = kind.Config(**(SIZES[kind] | dict(maxT=T)))
    table = c.parameter_table()
    values = np.random.default_rng(1).normal(0, 0.2, offsets(table)[-1] // 4).astype(np.float32)
    pair = Kept(c, device, 1, T), kind(c, loops, 1, T)
    for model in pair:
        model.set_parameters(vars(carve(values.view(np.uint8), table)).items())
    for array in (pair[0].cache.keys, pair[0].cache.values):  # NaN where nothing is written
        device.put(array, np.full(array.shape, -1, f"i{array.itemsize}").view(array.dtype))
    return pair


def count_passes(model):
    """A list, to which each launch that draws several tokens adds how many."""
    launches, run_phases = [], model.run_phases

    def counted(first, end, drawn=0):
        launches.append(drawn)
        run_phases(first, end, drawn)

    model.run_phases = counted
    return launches


def tokens_of(count, seed=2):
    return np.random.default_rng(seed).integers(301, size=count).tolist()


# ---- A token's pass against a full pass


@fast
@pytest.mark.parametrize("kind", (GPT2, Llama3))
def test_logits(device_name, kind):
    """Logits after texts that grow by one token, that change in the middle, that are longer by more
    tokens than are passed one by one, that fill all T, and that go on beyond."""
    for name in ("cuda",) if device_name == "cuda" else ("emulated", "cpu"):
        model, full = models(name, "fp32", kind, 40)
        text = tokens_of(60)
        changed = [*text[:5], 300 - text[5], *text[6:9]]
        for tokens in (text[:1], text[:2], text[:3], text[:9], changed, text[:9], text[:25],
                       text[:26], text[:2], text[:39], text[:40], text[1:41], text[2:42]):
            yield (f"{name}, {len(tokens)} tokens", model.next_logits(tokens),
                   full.next_logits(tokens), 1e-5)
        before = model.next_logits(text[:4])
        for each in (model, full):  # also keys and values change
            each.set_parameters([("ln1w", np.full((model.config.L, model.config.C), 2, "f4"))])
        after = model.next_logits(text[:4])
        check("new parameters", abs(after - before).max() > 0.1 * abs(before).max())
        yield f"{name}, with new parameters", after, full.next_logits(text[:4]), 1e-5
        batch = np.int32([text[:40]])
        model.set_batch(pack_batch(batch, batch))
        check("a full pass empties the cache", model.held == [[]], model.held)


def test_bf16(device_name):
    """The same in bf16, where roundings differ."""
    for kind in (GPT2, Llama3):
        model, full = models("cuda" if device_name == "cuda" else "cpu", "bf16", kind, 40)
        for count in (1, 2, 20, 40):
            tokens = tokens_of(count)
            yield (f"{kind.__name__}, {count} tokens", model.next_logits(tokens),
                   full.next_logits(tokens), 3e-2)


@pytest.mark.parametrize("kind", (GPT2, Llama3))
def test_batches(device_name, kind):
    """Texts of several lengths side by side, as few rows and as many: logits, and the tokens that
    are drawn from them until the longest is beyond T."""
    for name in ("cuda",) if device_name == "cuda" else ("emulated", "cpu"):
        for rows in (3, FEW + 2):
            if name == "emulated" and rows > FEW and kind is GPT2:
                continue  # Llama's does
            model, full = models(name, "fp32", kind, 40, rows)
            model.in_one |= name == "emulated" and kind is Llama3  # test_logits has the launches
            texts = [tokens_of(size, size) for size in (1, 30, 12, 39, 2, 17)[:rows]]
            wish = np.array([full.next_logits(tokens) for tokens in texts])
            yield f"{name}, {rows} rows", model.next_logits_of(texts), wish, 1e-5
            count, seeds = 3 if name == "emulated" else 14, range(7, 7 + rows)
            drawn = [*model.continued(texts, count, [*map(coins_of, seeds)], 0.8, 9, 0.9)]
            alone = [[*generate(full, tokens, count, 0.8, 9, coins_of(seed), 0.9)]
                     for tokens, seed in zip(texts, seeds)]
            yield f"{name}, {rows} rows: drawn", np.array(drawn).T, np.array(alone), EXACT
            if model.in_one and rows <= FEW:  # then a launch draws the likeliest of several passes
                model.draws, launches = True, count_passes(model)
                drawn = [*model.continued(texts, 3, [*map(coins_of, seeds)], 0, 0, 1.0)]
                launches = [count for count in launches if count]  # without those of the texts
                alone = [[*generate(full, tokens, 3, 0, 0, coins_of(0))] for tokens in texts]
                yield f"{name}, {rows} rows: the likeliest", np.array(drawn).T, alone, EXACT
                check(f"{name}, {rows} rows: two launches", launches == [1, 2], launches)


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("kind, rows", ((GPT2, 1), (GPT2, 4), (Llama3, 3), (Wide, 1)))
def test_one_kernel(device_name, kind, rows, dtype):
    """token_pass against the launches of token_linear and token_attention, with one, two and three
    chunks of keys; and phase by phase, by other numbers of blocks. On a GPU often: blocks that did
    not wait for each other would read old numbers now and then."""
    on_gpu = device_name == "cuda"
    if not on_gpu and (kind is Llama3) == (dtype == "bf16"):
        pytest.skip("on a CPU, GPT-2 is tested in bf16 and Llama in fp32")
    T, positions = 600, [300, 0, 599, 255][:rows]
    model, _ = models(device_name, dtype, kind, T, rows)
    device, cache = model.device, model.cache
    if on_gpu and not model.in_one:
        pytest.skip("this GPU has too little shared memory")
    check("only a GPU has all phases in one by itself", model.in_one == on_gpu)
    stored = [real(device, 0.5 * normal(*cache.keys.shape))[0] for _ in range(2)]

    def results(work):
        device.put(cache.keys, stored[0])
        device.put(cache.values, stored[1])
        device.put(cache.parts, np.full(cache.parts.shape, np.nan))
        model.begin(slice(0, rows), tokens_of(rows), positions)
        for array in (model.now.logits, model.now.qkv, model.now.atty):  # NaN
            device.put(array, np.full(array.shape, -1, f"i{array.itemsize}").view(array.dtype))
        work()
        check("the counters are zeros again", not device.get(cache.arrived).any())
        return [device.get(x) for x in (model.now.logits, cache.keys, cache.values)]

    def by_phases():
        for phase in range(2 + PHASES * model.config.L):
            model.run_phases(phase, phase + 1)

    names = "logits", "keys", "values"
    model.in_one = False
    wish = results(model.pass_of_token)
    model.in_one = True
    found = results(model.pass_of_token)
    for name, one, launches in zip(names, found, wish):
        yield name, one, to_float(launches), LIMIT[dtype] / 10
    for blocks in (1, 3):  # on a GPU as many as it has
        model.blocks_on_cpu = blocks
        for name, one, phases in zip(names, found, results(by_phases)):
            yield f"{name} by phases, {blocks} blocks", phases, to_float(one), EXACT
    model.blocks_on_cpu, at = 1, device.get(cache.at)[:rows]
    logits, _, _ = results(lambda: model.run_phases(0, 2 + PHASES * model.config.L, 1))
    drawn = [device.get(cache.drawn)[at[b], b] for b in range(rows)]
    wish = to_float(logits)[:, : model.config.V].argmax(1)
    yield "drawn", np.array(drawn), wish, EXACT
    yield "which come next", device.get(cache.tokens)[:rows], wish, EXACT
    for _ in range(100 if on_gpu else 0):
        for name, one, again in zip(names, found, results(model.pass_of_token)):
            yield f"{name} again", again, to_float(one), EXACT


@pytest.mark.parametrize("kind", (GPT2, Wide))
def test_alone(device_name, kind):
    """token_pass_alone gives a text the bits that token_pass gives it among four."""
    model, _ = models(device_name, "bf16", kind, 40, 4)
    if device_name == "cuda" and not model.in_one:
        pytest.skip("this GPU has too little shared memory")
    model.in_one, positions, tokens = True, [9, 0, 31, 17], tokens_of(4)
    stored = [real(model.device, 0.5 * normal(*model.cache.keys.shape))[0] for _ in range(2)]

    def logits(rows):
        model.device.put(model.cache.keys, stored[0])
        model.device.put(model.cache.values, stored[1])
        model.begin(rows, tokens[rows], positions[rows])
        model.pass_of_token()
        return model.device.get(model.now.logits)

    among = logits(slice(0, 4))
    for row in range(4):
        yield f"text {row}", logits(slice(row, row + 1))[0], to_float(among[row]), EXACT


def test_struct():
    """kv_cache.py lays out TokenPass as the compiler does: 8 bytes a pointer, 4 a number, in this
    order; and has the constants of kv_cache.cu."""
    text = SOURCE.read_text()
    body = re.search(r"struct TokenPass \{(.*?)\n\};", text, re.S)[1]
    names = [(re.findall(r"\w+", name)[-1], "*" in line.split(",")[0])
             for line in body.split(";") for name in line.split(",") if name.strip()]
    offset, wish = 0, {}
    for name, is_pointer in names:
        wish[name] = offset, 8 if is_pointer else 4
        offset += wish[name][1]
    found = {name: (at, kind.itemsize) for name, (kind, at) in TOKEN_PASS.fields.items()}
    check("fields", found == wish, found.items() ^ wish.items())
    check("size", TOKEN_PASS.itemsize == -(-offset // 8) * 8, TOKEN_PASS.itemsize)
    numbers = dict(re.findall(r"^constexpr int (\w+) = (\d+);", text, re.M))
    numbers["WEIGHTS_AHEAD"] = numbers["AHEAD"]
    for name in ("CHUNK", "THREADS", "WEIGHTS_AHEAD", "PHASES", "PASSES", "PRODUCT"):
        check(name, int(numbers[name]) == getattr(kv_cache, name), numbers[name])
    check("a launch draws as many tokens as are drawn ahead", AHEAD <= kv_cache.PASSES)


def test_drawn_on_the_device(device_name):
    """Tokens that the device draws ahead, greedy ones too, are those of full passes: up to T, and
    beyond."""
    model, full = models(device_name, "fp32", GPT2, 24, 2)
    model.draws = True
    for temperature, top_k, top_p in ((0, 0, 1.0), (1.0, 20, 0.8)):
        text, count = tokens_of(9), AHEAD + 1
        wish = [[*generate(full, text, count, temperature, top_k, coins_of(seed), top_p)]
                for seed in (3, 4)]
        found = [[*tokens] for tokens in together(model, text, count, temperature, top_k,
                                                  [coins_of(3), coins_of(4)], top_p)]
        yield f"t={temperature}, k={top_k}, p={top_p}", np.array(found), np.array(wish), EXACT
    each = model.continued([text], count, [coins_of(3)], temperature, top_k, top_p)
    found = []
    for token in each:  # also if others use the cache, after the device has drawn ahead
        found += token
        if len(found) % 4 == 2:
            model.next_logits(tokens_of(3, len(found)))
    yield "in turns with other texts", np.array(found), np.array(wish[0]), EXACT
    [three] = together(model, text, 3, 0, 0, [coins_of(3)])
    tokens = [*text, *three, 7]
    yield "and then another token", model.next_logits(tokens), full.next_logits(tokens), 1e-5


def test_history(device_name):
    """A text has the same bits after others as alone, and side by side as one by one: keys that a
    full pass has left are not those that single passes leave."""
    text = tokens_of(15)
    model, _ = models("cuda" if device_name == "cuda" else "cpu", "bf16", GPT2, 40, 3)
    kept = []
    for before in ([], [*text[:12], 7]):
        for _ in together(model, before or text[:1], 2, 0, 0, [coins_of(3)])[0]:
            pass
        for _ in zip(*together(model, text, 3, 0.5, 0, [*map(coins_of, (3, 4, 5))])):
            pass
        kept.append(to_float(model.device.get(model.cache.keys))[:, :, :, : len(text)])
    yield "after another text", kept[1], kept[0], EXACT
    yield "side by side", kept[0][:, 1:], kept[0][:, :1].repeat(2, 1), EXACT


@pytest.mark.parametrize("kind", (GPT2, Llama3))
def test_going_on(device_name, kind):
    """Tokens behind those that are kept are passed once, into the next chunks of keys, and after a
    caller who has left early; the logits are those of full passes."""
    model, full = models("cuda" if device_name == "cuda" else "cpu", "fp32", kind, 700)
    model.remembers = model.draws = True
    text, passed = tokens_of(20), []

    def counted(model, tokens):
        passed.append(len(tokens))
        return next_logits(model, tokens)

    for drawn, more in ((3, 30), (1, 200), (20, 300)):
        each = model.continued([text], 40, [coins_of(3)], 0, 0, 1.0)
        text += [next(each)[0] for _ in range(drawn)] + tokens_of(more)
        each.close()
        with mock.patch("train_gpt2.next_logits", counted):
            found = model.next_logits(text)
        yield f"{len(text)} tokens", found, full.next_logits(text), 1e-5
    # With the last that was drawn, unless the device has drawn more behind it, and but for the last
    check("each once", passed == [30, 200, 299], passed)


@pytest.mark.parametrize("kind", (GPT2, Llama3))
def test_turns(device_name, kind):
    """A turn launches what a fresh prompt of its words does, but for kernels that know positions:
    products of as many rows, and one head. There is one layout of each length."""
    model, _ = models("cuda" if device_name == "cuda" else "cpu", "fp32", kind, 700)
    device, head, work = model.device, address_of(model.head.w), []
    launch, matmul = device.launch, device.matmul
    same = dict(attention_forward="token_attention", encoder_forward="token_embedding")

    def launched(name, items, *args, **more):
        other = name in same or name in same.values() or name.startswith("rope")
        work.append((same.get(name, name), 0 if other else items))
        if name == "token_linear" and address_of(args[6]) == head:
            work.append("head")
        launch(name, items, *args, **more)

    def multiplied(out, left, right, **more):
        work.append("head" if address_of(right) == head else (out.shape, left.shape))
        matmul(out, left, right, **more)

    def work_behind(kept, words):
        model.forget()
        model.fill(0, kept)
        work.clear()
        model.next_logits(kept + words)
        return Counter(work) - Counter({("rope_table", 0): 1})

    with mock.patch.multiple(device, launch=launched, matmul=multiplied), mock.patch(
            "train_gpt2.lay_out", side_effect=train_gpt2.lay_out) as layouts:
        for count in (5, 40, 200, 290):
            fresh = work_behind([], tokens_of(count))
            fresh["token_attention", 0] += (count - 1) // kv_cache.PIECE * model.config.L
            turn = work_behind(tokens_of(310, 3), tokens_of(count))
            check(f"{count} words", turn == fresh, (fresh - turn, turn - fresh))
            check(f"{count} words: one head", model.in_one or turn["head"] == 1, turn["head"])
    check("64, 256 and 320 rows", layouts.call_count == 3, layouts.mock_calls)


def test_rows():
    """As many texts side by side as are asked for; up to FEW only those whose rows, 4 bytes a
    number of the widest input, are in a block's shared memory: all of them are then multiplied by
    token_linear, alone or not."""
    c = GPT2.Config(maxT=1024, V=50257, L=48, NH=25, C=1600, Vp=50304)
    for name, shared, asked, wish in (
            ("cuda", 232448, 4, 4), ("cuda", 100352, 4, 3), ("cuda", 100352, 1, 1),
            ("cuda", 100352, 128, 2**33 // (48 * 2 * 1024 * 1600 * 2)), ("cpu", 232448, 9, 4)):
        device = SimpleNamespace(name=name, max_shared=shared, real=BF16)
        flags = SimpleNamespace(sample="", samples=asked)
        found = type("Asked", (Cached,), dict(flags=flags)).rows_of(c, device, 1024)
        check(f"{name}, {shared} bytes, {asked} texts", found == wish, found)
    flags.sample = None  # a training writes one at a time
    check("training", type("Asked", (Cached,), dict(flags=flags)).rows_of(c, device, 1024) == 1)


def test_interrupted(device_name):
    """What was recorded until an error is not used again."""
    model, _ = models("cpu", "fp32", GPT2, 40)
    model.token_graphs["a recording"] = None

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.repeat("a key", interrupted)
    check("no graphs", model.token_graphs == {}, model.token_graphs)


def test_recordings():
    """With T = 1 a pass, and passes that draw tokens, are recorded apart."""
    model, _ = models("cpu", "fp32", GPT2, 1)
    keys, model.in_one, model.run_phases = [], True, lambda *args: None
    model.repeat = lambda key, work: keys.append(key)
    model.next_logits([1])
    model.draw(np.zeros((1, 1), np.float32), [[1]], (0, 0))
    check("two keys", len(set(keys)) == 2, keys)


def test_dates():
    """Where dates begin anew, no word gets that of words that were never written, 0."""
    model, _ = models("emulated", "bf16", GPT2, 60)
    device, cache, phases = model.device, model.cache, 2 + PHASES * model.config.L
    # Later, in the last pass, the date of the last layer's qkv would be 3 * 2^32
    passes = (3 * 2**32 - 1 - (1 + PHASES * (model.config.L - 1))) / (phases + 1)
    launches, before = divmod(round(passes), kv_cache.PASSES)
    drawn = []
    for ended in (0, launches):
        device.put(cache.ended, np.array([ended], np.uint64))
        device.zero(cache.at)
        model.begin(slice(0, 1), [5], [0])
        model.run_phases(0, phases, before + 1)
        drawn.append(device.get(cache.drawn)[: before + 1, 0])
    yield "the same tokens", drawn[1], drawn[0], EXACT
    words = device.get(cache.words)
    check("no date is 0", passes % 1 == 0 and not ((words > 0) & (words < 2**32)).any())


# ---- Kernels against formulas


def launch(device, name, items, outputs, *args, **sizes):
    """Launch a kernel with NumPy arrays. outputs: those of the arguments that are returned."""
    arrays = [on_device(device, x) if isinstance(x, np.ndarray) else x for x in args]
    device.launch(name, items, *arrays, **sizes)
    return [device.get(arrays[i]) for i in outputs]


def real(device, x):
    """x as the device stores it, and what that is in float64."""
    stored = to_bf16(np.float32(x)) if device.real == BF16 else np.float32(x)
    return stored, np.float64(to_float(stored))


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_linear(device_name, dtype):
    """Each form of token_linear, at odd sizes."""
    limit = 3e-5 if dtype == "fp32" else 1e-2
    for name in ("cuda",) if device_name == "cuda" else ("emulated", "cpu"):
        device = device_for(name, dtype, GPT2)
        for B, C, OC in ((1, 32, 3), (2, 96, 50), (3, 352, 13), (4, 1056, 67)):
            stored = {}
            for key, shape in dict(inp=(B, C), normw=(C,), normb=(C,), weight=(2 * OC, C),
                                   bias=(OC,)).items():
                stored[key] = real(device, normal(*shape) + (key == "normw"))
            x = np.float32(3 * normal(B, C) + 1)
            weight, bias = stored["weight"][1][:OC], stored["bias"][1]
            gate = stored["weight"][1][OC:]
            norms = dict(layer=layernorm(np.float64(x), stored["normw"][1], stored["normb"][1]),
                         rms=rmsnorm(1e-5, np.float64(x), stored["normw"][1]))
            empty = np.full((B, OC), 0xFF, np.uint8).astype(stored["inp"][0].dtype)
            for norm, activation, biased in (("layer", 0, 1), ("layer", 1, 1), ("rms", 2, 0)):
                rows = real(device, norms[norm])[1]
                wish = rows @ weight.T + (bias if biased else 0)
                if activation == 1:
                    wish = gelu(wish)
                if activation == 2:
                    up = rows @ gate.T
                    wish = wish * up / (1 + np.exp(-up))
                [found] = launch(
                    device, "token_linear", 3, [0], empty, None, None, x, stored["normw"][0],
                    stored["normb"][0] if norm == "layer" else None, stored["weight"][0],
                    stored["bias"][0] if biased else None, 1e-5, activation, B, C, OC,
                    shared=4 * B * C)
                yield f"{name} {B},{C},{OC}: {norm}norm, {activation}", found, wish, limit
            stream = np.float32(normal(B, OC))
            [found] = launch(device, "token_linear", 3, [1], None, stream, stored["inp"][0], None,
                             None, None, stored["weight"][0], stored["bias"][0], 1e-5, 0, B, C, OC,
                             shared=4 * B * C)
            wish = stream + stored["inp"][1] @ weight.T + bias
            yield f"{name} {B},{C},{OC}: added", found, wish, 3e-6


def attended(q, keys, values):  # (HS), (n,HS), (n,HS) -> (HS)
    score = keys @ q / np.sqrt(len(q))
    weights = np.exp(score - score.max())
    return weights @ values / weights.sum()


@pytest.mark.parametrize("kind, NH, NKV, HS", ((GPT2, 4, 4, 24), (Llama3, 6, 2, 32)))
def test_attention(device_name, kind, NH, NKV, HS):
    """Positions in the first, the second and the third chunk of keys, and on their edges. The
    newest key and value go to their place, and nothing else is written."""
    B, T = 7, 600
    positions = np.int32([0, 5, 255, 256, 300, 511, 599])
    turn = np.random.default_rng(8).normal(size=T * HS // 2)
    rope = np.stack([np.cos(turn), np.sin(turn)], -1).reshape(T, HS).astype(np.float32)
    for name in ("cuda",) if device_name == "cuda" else ("emulated", "cpu"):
        for dtype in ("fp32", "bf16") if kind is GPT2 or name == "cuda" else ("fp32",):
            device = device_for(name, dtype, kind)
            qkv, truth = real(device, 2 * normal(B, NH + 2 * NKV, HS))
            keys, k = real(device, 2 * normal(B, NKV, T, HS))
            values, v = real(device, normal(B, NKV, T, HS))
            if kind is Llama3:
                angle = turn.reshape(T, -1)[positions][:, None]
                pairs = truth.reshape(B, -1, HS // 2, 2)
                x, y = pairs[..., 0], pairs[..., 1]
                turned = np.stack([x * np.cos(angle) - y * np.sin(angle),
                                   x * np.sin(angle) + y * np.cos(angle)], -1).reshape(truth.shape)
                truth = np.concatenate([turned[:, : NH + NKV], truth[:, NH + NKV :]], 1)
            for b, position in enumerate(positions):
                k[b, :, position] = real(device, truth[b, NH : NH + NKV])[1]
                v[b, :, position] = truth[b, NH + NKV :]
            wish = [[attended(truth[b, h], k[b, h * NKV // NH, : position + 1],
                              v[b, h * NKV // NH, : position + 1]) for h in range(NH)]
                    for b, position in enumerate(positions)]
            found = launch(
                device, "token_attention", (B * NKV, T), (0, 1, 2, 4),
                np.zeros((B, NH, HS), qkv.dtype), keys, values,
                np.full(B * NH * 3 * (HS + 2), np.nan, np.float32), np.zeros(B * NKV, np.int32),
                qkv, rope if kind is Llama3 else None, positions, HS**-0.5, B, T, NH, 0,
                shared=shared_of_attention(NH // NKV, HS))
            what = f"{name} {dtype} {kind.__name__}"
            yield what, found[0], np.array(wish), 2e-6 if dtype == "fp32" else 1e-2
            yield f"{what}: keys", found[1], k, 1e-6 if dtype == "fp32" else 1e-4
            yield f"{what}: values", found[2], v, 1e-12
            check(f"{what}: the counters are zeros again", not found[3].any(), found[3])


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_draws(device_name, dtype):
    """draw_tokens against choose, with the same coins; in some rows many logits are equal, and one
    is minus infinity."""
    device = device_for(device_name, dtype, GPT2)
    rng, V, B = np.random.default_rng(3), 1531, 4
    for Vp, t, k, p in ((1600, 0, 0, 1.0), (1600, 1, 0, 1.0), (1603, 0.5, 0, 1.0),
                        (1603, 1, 1, 1.0), (1600, 1, 5, 1.0), (1600, 2, 900, 0.8973),
                        (1603, 1, 0, 0.7), (1600, 0.8, 2000, 0.05), (1603, 3, 40, 0.999)):
        logits = np.stack([rng.normal(0, 2, Vp), rng.integers(-3, 3, Vp), rng.normal(0, 9, Vp),
                           rng.integers(-1, 2, Vp) * 30.0])
        logits[:, V:] = 1000  # padding
        logits[:, 7] = -np.inf
        stored, truth = real(device, logits)
        coins = rng.random((AHEAD, B), dtype=np.float32)
        tokens, positions, drawn, at = launch(
            device, "draw_tokens", B, (0, 1, 2, 3), np.zeros(B, np.int32), np.arange(B, dtype="i4"),
            np.full((AHEAD, B), -1, np.int32), np.full(B, 2, np.int32), coins, stored, t, k, p, V,
            Vp, B)
        wish = [choose(np.float32(truth[b, :V]), coins[2, b], t, k, p) for b in range(B)]
        yield f"t={t}, k={k}, p={p}", tokens, np.int32(wish), EXACT
        yield "the same, for the host", drawn[2], np.int32(wish), EXACT
        check("in their places", [*positions, *at] == [1, 2, 3, 4, 3, 3, 3, 3]
              and (drawn == -1).sum() == (AHEAD - 1) * B, (positions, at))


# ---- On the command line


def test_samples(folder):
    """--samples: side by side as with full passes, few and many."""
    with small_words(folder):
        write_model("model.bin", 50257)
        flags = ("--device", "cpu", "-e", "model.bin", "--temperature", 0.9)

        def run(*more):
            status, text, error = call(*flags, *more)
            check(f"{more}", status == 0, error)
            return text

        for more in (("--samples", 6), ("--samples", 3, "--top-k", 3),
                     ("--samples", 3, "--stop", "A", "-t", 9)):
            more = ("--sample", "AB", "--seed", 5, "-g", 12, *more)
            check(f"full passes {more}", run(*more) == run(*more, "--kv-cache", 0))
