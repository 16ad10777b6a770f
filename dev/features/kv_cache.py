"""Samples at speed: the keys and values of earlier tokens are kept, so that a new token costs the
pass of one row instead of all.

A token sees those before it only in attention, and there only through their keys and values. These
do not change when a token is added. So a text begins with a full pass, which leaves the keys and
values of its tokens in the cache; then each token's pass writes its own, and its query attends to
all. More text behind them, as in a chat, is passed alike, and attends to the keys before it, too.
The logits are those of the full pass, but for the order of sums. kv_cache.cu has the kernels.

The pass has three forms. Up to FEW sequences, it is bound by reading the weights, and on a GPU one
kernel: token_pass, whose blocks read weights without a break while they wait for each other. Where
its shared memory is too small for that, and on a CPU, a layer is five launches: each product makes
the norm before it, or adds to the residual stream. More sequences are products of matrices, by the
device's library. On a GPU the pass is a graph: tokens and positions are in device memory, where the
next token is drawn too. token_pass draws the likeliest tokens itself, several in one launch.

The cache holds T tokens. Beyond that the model sees the last T, whose positions all change with
each token: then every token costs a full pass, as it does with --kv-cache 0. A full pass of
anything else, such as a training step, empties the cache.
"""
import itertools
from types import SimpleNamespace

import numpy as np

from dev.features.devices import address_of
from dev.features.feature import Feature, Flag, Pair, kernels_of
from dev.features.sample import choose
from train_gpt2 import Row, carve, ceil_div, layer_of, to_float

SOURCE = kernels_of(__file__)
FEW = 4  # rows of token_linear, at most
CHUNK = 256  # keys of a block of token_attention
PIECE = 256  # queries of a launch of attention behind kept keys, at most
STEPS = 8  # at most this many missing tokens are passed one by one, more by a full pass
AHEAD = 16  # tokens that a GPU draws before the host reads them, at most
MOST_ROWS = 128  # sequences whose keys are kept at once, at most
MOST_BYTES = 2**33  # of their keys and values, but for one sequence
GELU, SWIGLU = 1, 2  # activations of token_linear
THREADS = 512  # of a block of token_pass
WEIGHTS_AHEAD = 16  # 16 bytes of weights that each of them has under way
PHASES = 5  # of a layer in token_pass
PASSES = 64  # of a launch of it, at most
BLOCKS = 256  # of it, at most
PRODUCT = 48  # bytes that describe a product there
LAID_OUT = "BT", "batch", "acts", "back", "layers", "lnf", "slices"  # what lay_out sets

# The struct of kv_cache.cu
TOKEN_PASS = np.dtype([
    *((name, np.uint64) for name in (
        "wte", "wpe", "ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb", "ln2w", "ln2b",
        "fcw", "fcb", "fcprojw", "fcprojb", "lnfw", "lnfb", "head", "rope", "tokens", "positions",
        "drawn", "at", "logits", "keys", "values", "parts", "arrived", "words", "ended")),
    *((name, np.int32) for name in (
        "B", "L", "C", "H", "NH", "T", "V", "Vp", "rows", "activation")),
    ("eps", np.float32), ("scale", np.float32)], align=True)


def cache_table(c, rows, T, real):
    """Keys and values of some sequences, and the activations of one token of each: those of a
    batch (rows,1), which all layers use in turn."""
    NKV = getattr(c, "NKV", c.NH)
    HS = c.C // c.NH
    each = dict(dtype=real, layers=c.L)
    queries = max(rows, min(PIECE, T))  # of a launch of attention
    parts = queries * c.NH * ceil_div(T, CHUNK) * (HS + 2)
    layers = [row._replace(layers=0, shape=(T, HS) if row.name == "rope" else row.shape)
              for row in c.activation_table(rows, 1, real)]
    handed = 2 * rows * BLOCKS + sum(
        row.size for row in layers
        if row.name in ("residual", "qkv", "atty", "fch_gelu", "fch_swiglu"))
    own = [
        Row("keys", (rows, NKV, T, HS), **each),
        Row("values", (rows, NKV, T, HS), **each),
        Row("tokens", (rows,), np.int32),  # the newest of each sequence
        Row("positions", (rows,), np.int32),  # where it stands
        Row("coins", (AHEAD, rows)),
        Row("drawn", (AHEAD, rows), np.int32),  # the tokens that these coins draw
        Row("at", (rows,), np.int32),  # the next coin
        Row("parts", (parts,)),  # of attention's sums
        Row("arrived", (queries * NKV,), np.int32),
        Row("places", (T,), np.int32),  # 0 .. T-1
        Row("words", (handed,), np.uint64),  # what phases of token_pass hand on, with its date
        Row("ended", (1,), np.uint64),  # how many blocks of token_pass have ended
    ]
    return [*own, *layers]


def shared_of_attention(group, HS, warps=8):
    """The shared memory of token_attention in bytes: queries, weights, the sums of warps, what is
    read and what is kept of a token, and two numbers of each head."""
    return 4 * (group * (2 * HS + CHUNK + 2) + 4 * HS + warps * min(group, 4) * HS)


def shared_of_pass(rows, layers, widest, group, HS):
    """The shared memory of token_pass in bytes: the weights under way, its products, and behind
    them the rows of the widest one, or what attention needs."""
    rows = 1 if rows == 1 else 4  # as it is compiled for
    return 16 * THREADS * WEIGHTS_AHEAD + PRODUCT * (4 * layers + 1) + max(
        4 * rows * widest, shared_of_attention(group, HS, THREADS // 32))


def batches_of(coins, count):
    """Yield the numbers of `count` draws from iterators, in arrays (steps,len(coins)): one step at
    first, because the first token is shown at once, then more, up to AHEAD."""
    steps = 1
    while count:
        steps = min(steps, count)
        yield np.array([[*itertools.islice(coin, steps)] for coin in coins], np.float32).T
        count -= steps
        steps = min(2 * steps, AHEAD)


def launch_together(device, name, blocks, *args, threads, shared):
    """As Cuda.launch, but cooperative: an error, if not all blocks are on the GPU at once. They
    wait for each other, so a launch without that could hang."""
    function = device.functions[name]
    device.last_kernel = name
    function.max_dynamic_shared_size_bytes = shared
    grid = device.kernels[name].configure(blocks, args, device.W, threads)
    function.kernel(*grid, shared_mem=shared, enable_cooperative_groups=True)


class Cached:
    """A model that keeps keys and values of the texts that it goes on from."""
    ACTIVATION = GELU
    HIDDEN = "fch_gelu"  # the tensor after it
    blocks_on_cpu = 1  # of token_pass: a CPU runs one after another, so they cannot meet

    @classmethod
    def rows_of(cls, c, device, T):
        """How many sequences have their keys kept: as many as --samples asks for, within reason."""
        flags = getattr(cls, "flags", None)
        wanted = flags.samples if getattr(flags, "sample", None) is not None else 1
        if device.name == "cpu" or wanted <= FEW:  # then each has the bits that it has alone
            return max(1, min(wanted, cls.few_of(c, device, T)))
        one = sum(row.nbytes for row in cache_table(c, 1, T, device.real)[:2])
        return max(1, min(wanted, MOST_ROWS, MOST_BYTES // one))

    @classmethod
    def few_of(cls, c, device, T):
        """How many sequences token_linear multiplies at once: their rows are in shared memory."""
        return min(FEW, device.max_shared // (4 * cls.widest_of(c, device, T)))

    @classmethod
    def widest_of(cls, c, device, T):
        """How many numbers of a sequence the widest product of a pass reads."""
        [hidden] = [row for row in cache_table(c, 1, T, device.real) if row.name == cls.HIDDEN]
        return max(c.C, hidden.shape[-1])

    @classmethod
    def tables(cls, c, device, B, T):
        rows = cls.rows_of(c, device, T)
        return super().tables(c, device, B, T) | {"cache": cache_table(c, rows, T, device.real)}

    def __init__(self, config, device, B, T):
        super().__init__(config, device, B, T)
        self.rows = self.rows_of(config, device, T)
        self.few = self.few_of(config, device, T)
        self.cache = carve(self.arenas["cache"], cache_table(config, self.rows, T, device.real))
        device.put(self.cache.places, np.arange(T))
        self.layouts = {}  # {(B,T) of a pass that fills the cache: what lay_out makes for it}
        self.held = [[] for _ in range(self.rows)]  # the tokens whose keys are kept
        self.remembers = False  # whether a text goes on in the keys that another has left
        self.drawing = None  # who has tokens drawn by the device
        self.filling = None  # in a pass that fills the cache: its row, layer, start and count
        self.now = None  # views of a token's pass: the activations of some rows
        self.added = None  # what the next norm adds to the stream, in a pass of many rows
        self.eps = getattr(config, "eps", 1e-5)  # under the norms' root
        self.token_graphs = {}
        self.shared = shared_of_pass(min(self.rows, self.few), config.L,
                                     self.widest_of(config, device, T),
                                     config.NH // self.cache.keys.shape[2], config.C // config.NH)
        # Always or never: then a text alone has the bits that it has among others. Beside these
        # bytes the kernel has arrays of its own, for norms' sums: more than max_shared spares.
        self.in_one = device.name == "cuda" and self.shared + 4096 <= device.max_shared
        self.draws = device.name == "cuda"  # whether tokens are drawn on the device
        table = config.parameter_table(device.real)
        self.weights = [layer_of(self.params, table, l) for l in range(config.L)]

    # ---- What is kept

    def forget(self):
        """Empty the cache: the parameters have changed, or may have."""
        self.held = [[] for _ in range(self.rows)]
        self.drawing = None

    def set_batch(self, batch):
        # A layout is 534 views in 12 layers, which took a GPU's host a third of a short turn
        layouts, (_, BT) = self.layouts if self.filling else {}, batch
        if not self.filling:
            self.forget()
        vars(self).update(layouts.get(BT, {}))
        super().set_batch(batch)
        layouts[BT] = {name: vars(self)[name] for name in LAID_OUT}

    def set_tensors(self, tensors, kept):
        super().set_tensors(tensors, kept)
        if hasattr(self, "held"):
            self.forget()

    def kept_before(self):
        """How many tokens are kept in front of those of the present pass; 0 if it is another."""
        return self.filling.start if self.filling else 0

    def embedding_forward(self):
        """As GPT2's; behind tokens that are kept, positions go on."""
        start = self.kept_before()
        if not start:
            super().embedding_forward()
            return
        count, C, p = self.filling.count, self.config.C, self.params
        self.device.launch("token_embedding", count * C, self.acts.residual, self.batch.tokens,
                           self.cache.places[start:], p.wte, getattr(p, "wpe", None), count, C)

    def head_forward(self, rows):
        """As GPT2's; nobody reads the logits of a pass that fills the cache, so it has none."""
        return self.acts.logits[:1, :0] if self.filling else super().head_forward(rows)

    def attention_forward(self, out, lse, qkv):
        """As GPT2's. In a pass that fills the cache, keep the keys and values; behind tokens that
        are kept, attend to these, too."""
        filling, start, c = self.filling, self.kept_before(), self.config
        if not start:
            super().attention_forward(out, lse, qkv)
        if not filling:
            return
        l, count = filling.layer, filling.count
        filling.layer += 1
        keys, values = (kept[l, filling.row] for kept in (self.cache.keys, self.cache.values))
        NKV, T, HS = keys.shape
        newest = [kept.reshape(-1)[start * HS :] for kept in (keys, values)]
        self.device.launch("keep_keys", NKV * count * HS, *newest, qkv, count, T, c.NH)
        for first in range(0, count if start else 0, PIECE):
            size = min(PIECE, count - first)
            self.device.launch(
                "token_attention", (size * NKV, start + first + size), out[first:], keys, values,
                self.cache.parts, self.cache.arrived, qkv[first:], None,
                self.cache.places[start + first :], HS**-0.5, size, T, c.NH, 1,
                shared=shared_of_attention(c.NH // NKV, HS))

    def fill(self, row, tokens):
        """Keep the keys and values of these tokens, fewer than T, in a row of the cache."""
        held = self.held[row]
        same = next((i for i, (a, b) in enumerate(zip(held, tokens)) if a != b),
                    min(len(held), len(tokens)))
        self.held[row] = []  # until it is done
        if same < len(tokens) and tokens in self.held:
            other = self.held.index(tokens)  # samples of one prompt
            for kept in (self.cache.keys, self.cache.values):
                kept[:, row] = kept[:, other]
        elif len(tokens) - same > STEPS:
            self.filling = SimpleNamespace(row=row, layer=0, start=same, count=len(tokens) - same)
            try:
                super().next_logits(tokens[same:])
            finally:
                self.filling = None
        else:
            for i in range(same, len(tokens)):
                self.begin(slice(row, row + 1), [tokens[i]], [i])
                self.pass_of_layers()
        self.held[row] = list(tokens)

    # ---- Texts

    def continued(self, texts, count, coins, temperature, top_k, top_p):
        """Yield `count` times the next tokens (B) of B texts, lists of ids. coins: an iterator of
        numbers in [0, 1) for each. Settings are those of sample.choose."""
        if not self.remembers:
            self.forget()  # so that a text has the same bits whatever was sampled before
        texts = [list(tokens) for tokens in texts]
        settings = temperature, top_k, top_p
        ahead = max(0, min(count, self.T + 1 - max(map(len, texts)))) if self.draws else 0
        yield from self.drawn_ahead(texts, ahead, coins, settings)
        for _ in range(count - ahead):
            row = [choose(logits, next(coin), *settings)
                   for logits, coin in zip(self.logits_after(texts), coins)]
            for tokens, token in zip(texts, row):
                tokens.append(token)
            yield row

    def drawn_ahead(self, texts, count, coins, settings):
        """As continued, up to T tokens, which the device draws: it draws the next ones while the
        caller looks at those before. The texts get longer."""
        batches = batches_of(coins, count)
        batch = next(batches, None)
        drawing = object()  # by which we know whether the device went on with our texts
        while batch is not None:
            if self.drawing is not drawing:  # at first, or another call has used the cache
                self.fill_all(texts)
                self.drawing = drawing
                self.draw(batch, texts, settings)
            following = next(batches, None)  # while the device draws
            rows = self.device.get(self.cache.drawn)[: len(batch), : len(texts)].tolist()
            for row, (tokens, more) in enumerate(zip(texts, zip(*rows))):
                tokens += more
                self.held[row] = tokens[:-1]  # the caller may leave us at any token
            batch = following
            if batch is not None:
                self.draw(batch, texts, settings)
            yield from rows

    def logits_after(self, texts):
        """The logits (B,V) of the tokens that follow B texts, of which the model sees the last
        T."""
        if max(map(len, texts)) <= self.T:
            return self.next_logits_of(texts)
        return [self.next_logits(tokens[-self.T :]) for tokens in texts]

    def draw(self, coins, texts, settings):
        """Queue the draws of the next tokens of B texts, after those that were passed or drawn
        last. coins: (steps,B)."""
        steps, B = coins.shape
        cache = self.cache
        given = np.zeros(cache.coins.shape, np.float32)
        given[:steps, :B] = coins
        self.device.put(cache.coins, given)
        self.device.zero(cache.at)
        self.reach(max(map(len, texts)) - 1 + steps)
        if self.in_one and self.now.few and settings[0] == 0:
            self.repeat(("passes", B, steps),
                        lambda: self.run_phases(0, 2 + PHASES * self.config.L, steps))
            return
        for _ in range(steps):
            self.repeat(("draw", B, self.now.span, *settings),
                        lambda: self.pass_and_draw(*settings))

    def pass_and_draw(self, *settings):
        """A token's pass, and the draw of the next token."""
        now, cache, c = self.now, self.cache, self.config
        self.pass_of_token()
        self.device.launch("draw_tokens", now.count, now.tokens, now.positions, cache.drawn, now.at,
                           cache.coins, now.logits, *settings, c.V, c.Vp, self.rows)

    # ---- The pass of a token of each sequence

    def next_logits(self, tokens):
        """As GPT2.next_logits, from the cache."""
        return self.next_logits_of([tokens])[0]

    def next_logits_of(self, texts):
        """The logits (B,V) of the tokens that follow B texts, lists of 1 to T ids. B is at most
        `rows`."""
        self.fill_all(texts)
        self.repeat(("pass", len(texts), self.now.span), self.pass_of_token)
        for row, tokens in enumerate(texts):
            self.held[row] = list(tokens)
        return to_float(self.device.get(self.now.logits))[:, : self.config.V]

    def repeat(self, key, work):
        """Do work(), as a graph if the device has one."""
        try:
            self.device.repeat(self.token_graphs, key, work)
        except BaseException:  # Ctrl-C during a recording: --chat goes on
            self.token_graphs.clear()
            raise

    def fill_all(self, texts):
        """Get ready for a pass of the last token of each text."""
        for row, tokens in enumerate(texts):
            self.fill(row, tokens[:-1])
        self.begin(slice(0, len(texts)), [tokens[-1] for tokens in texts],
                   [len(tokens) - 1 for tokens in texts])

    def begin(self, rows, tokens, positions):
        """Go on with these rows of the cache, a slice: each gets a token at a position."""
        cache = self.cache
        self.drawing = None
        count = rows.stop - rows.start
        self.device.put(cache.tokens[rows], tokens)
        self.device.put(cache.positions[rows], positions)
        whole = {"keys", "values", "parts", "arrived", "places", "rope", "coins", "drawn", "words",
                 "ended"}
        self.now = SimpleNamespace(
            rows=rows, count=count, few=count <= self.few,
            **{name: array[:count] for name, array in vars(cache).items() if name not in whole})
        self.now.tokens, self.now.positions = cache.tokens[rows], cache.positions[rows]
        self.reach(max(positions) + 1)

    def reach(self, count):
        """Get ready for attention to so many tokens. token_attention is launched for a span of
        positions, so a graph is one for a span: doubling makes few."""
        span = self.T if self.in_one and self.now.few else CHUNK
        while span < count:
            span *= 2
        self.now.span = min(span, self.T)

    def pass_of_token(self):
        """From tokens to logits (B,Vp): forward_pass and head_forward for one token of each
        sequence."""
        now, p = self.now, self.params
        if self.in_one and now.few:
            self.run_phases(0, 2 + PHASES * self.config.L)
            return
        self.pass_of_layers()
        self.norm_and_linear(now.logits, p.lnfw, getattr(p, "lnfb", None), self.head.w)

    def pass_of_layers(self):
        """As pass_of_token, without the head: it leaves only keys and values."""
        if self.in_one and self.now.few:
            self.run_phases(0, 1 + PHASES * self.config.L)
            return
        self.begin_stream()
        self.added = None
        for l, weights in enumerate(self.weights):
            self.token_layer(l, weights)

    def run_phases(self, first, end, drawn=0):
        """Launch token_pass for some of its phases: the embedding, PHASES of each layer, the head.
        If `drawn` is not 0, all of them, in `drawn` passes: each draws the likeliest tokens, which
        the next one begins with."""
        device = self.device
        kernel = "token_pass_alone" if self.now.count == 1 else "token_pass"
        args = (self.describe_pass(self.cache.drawn if drawn else None), first, end, max(drawn, 1))
        if device.name == "cuda":
            launch_together(device, kernel, min(device.multiprocessors, BLOCKS), *args,
                            threads=THREADS, shared=self.shared)
        else:
            device.launch(kernel, self.blocks_on_cpu, *args, threads=THREADS, shared=self.shared)

    def describe_pass(self, drawn):
        """The struct TokenPass, for CuPy one number, passed by value."""
        now, c, p, rows = self.now, self.config, vars(self.params), self.now.rows
        hidden = getattr(now, self.HIDDEN)
        given = p | vars(now) | dict(
            head=self.head.w, rope=getattr(self.cache, "rope", None), drawn=drawn,
            parts=self.cache.parts, arrived=self.cache.arrived, words=self.cache.words,
            ended=self.cache.ended, keys=self.cache.keys[0, rows],
            values=self.cache.values[0, rows], B=now.count, L=c.L, C=c.C, H=hidden.shape[-1],
            NH=c.NH, T=self.T, V=c.V, Vp=now.logits.shape[-1], rows=self.rows,
            activation=self.ACTIVATION, eps=self.eps, scale=(c.C // c.NH) ** -0.5)
        made = np.zeros(1, TOKEN_PASS)
        for name, (kind, _) in TOKEN_PASS.fields.items():
            value = given.get(name)
            if kind == np.uint64:
                value = 0 if value is None else address_of(value)
            made[name] = value
        return made.view(f"V{TOKEN_PASS.itemsize}")

    def begin_stream(self):
        now, p = self.now, self.params
        self.device.launch("token_embedding", now.residual.size, now.residual, now.tokens,
                           now.positions, p.wte, getattr(p, "wpe", None), now.count, self.config.C)

    def token_layer(self, l, p):
        """As layer_forward."""
        now = self.now
        hidden = getattr(now, self.HIDDEN)
        bias = vars(p).get  # Llama has none
        self.norm_and_linear(now.qkv, p.ln1w, bias("ln1b"), p.qkvw, bias("qkvb"))
        self.token_attention(l, None)
        self.linear_and_add(now.atty, p.attprojw, bias("attprojb"))
        self.norm_and_linear(hidden, p.ln2w, bias("ln2b"), p.fcw, bias("fcb"), self.ACTIVATION)
        self.linear_and_add(hidden, p.fcprojw, bias("fcprojb"))

    def token_attention(self, l, rope):
        now, c, rows = self.now, self.config, self.now.rows
        keys, values = self.cache.keys[l, rows], self.cache.values[l, rows]
        _, NKV, T, HS = keys.shape
        self.device.launch("token_attention", (now.count * NKV, now.span), now.atty, keys, values,
                           self.cache.parts, self.cache.arrived, now.qkv, rope, now.positions,
                           (c.C // c.NH) ** -0.5, now.count, T, c.NH, 0,
                           shared=shared_of_attention(c.NH // NKV, HS))

    def norm_and_linear(self, out, normw, normb, weight, bias=None, activation=0):
        """out (B,OC) = norm(x) (B,C) @ weight.T + bias, then GELU or SwiGLU, if asked."""
        now = self.now
        if now.few:
            self.few_rows(out, None, None, now.residual, normw, normb, weight, bias, activation)
            return
        self.norm_of_rows(normw, normb)
        inner = now.fch if activation else out
        gelu = out if activation == GELU else None
        self.device.matmul(inner, now.ln1, weight.T, bias=bias, gelu=gelu)
        if activation == SWIGLU:
            self.device.launch("swiglu_forward", out.size, out, inner, *out.shape)

    def norm_of_rows(self, weight, bias):
        now = self.now
        self.device.launch("residual_layernorm_forward", now.count, now.ln1, now.ln1_mean,
                           now.ln1_rstd, now.ln1_inp, now.residual, self.added, weight, bias,
                           now.count)

    def linear_and_add(self, inp, weight, bias):
        """x (B,C) += inp @ weight.T + bias. With many rows the next norm adds it, as in a full
        pass."""
        now = self.now
        if now.few:
            self.few_rows(None, now.residual, inp, None, None, None, weight, bias, 0)
            return
        self.device.matmul(now.branch, inp, weight.T, bias=bias)
        self.added = now.branch

    def few_rows(self, out, stream, inp, x, normw, normb, weight, bias, activation):
        """token_linear: see there."""
        B, OC = (out if stream is None else stream).shape
        C = weight.shape[1]
        blocks = min(ceil_div(OC, 8), 3 * self.device.multiprocessors)  # of 8 warps
        self.device.launch("token_linear", blocks, out, stream, inp, x, normw, normb, weight, bias,
                           self.eps, activation, B, C, OC, shared=4 * B * C)


class CachedLlama:
    """What differs in Llama 3: RoPE instead of wpe, RMSNorm, SwiGLU."""
    ACTIVATION = SWIGLU
    HIDDEN = "fch_swiglu"

    def __init__(self, config, device, B, T):
        super().__init__(config, device, B, T)
        rope = self.cache.rope
        device.launch("rope_table", rope.size // 2, rope, config.theta, config.factor, T)

    def rope(self, kernel, qkv):
        """As Llama3's; behind tokens that are kept, positions go on."""
        start, table = self.kept_before(), self.acts.rope
        if start:
            self.acts.rope, qkv = self.cache.rope[start:], qkv[: self.filling.count]
        super().rope(kernel, qkv)
        self.acts.rope = table

    def token_attention(self, l, rope):
        super().token_attention(l, self.cache.rope)

    def norm_of_rows(self, weight, bias):
        now = self.now
        self.device.launch("residual_rmsnorm_forward", now.count, now.ln1, now.ln1_rstd,
                           now.ln1_inp, now.residual, self.added, weight, self.eps, now.count)


def asked(flags, ranks):
    """Whether a run writes samples. FP8's products want many rows."""
    samples = flags.sample is not None or flags.sample_every and flags.sample_tokens
    return bool(flags.kv_cache and samples and flags.dtype != "fp8" and not flags.exact)


FEATURE = Feature(
    "kv cache", asked, Cached, sources=(SOURCE,), pairs=(Pair("Llama3", CachedLlama),), flags=(
        Flag(None, "--kv-cache", "switch", 1, "0: keep no keys and values, so that each token of a "
             "sample costs a full pass", "how long, and what is shown", after="--stop",
             may_differ=True),))
