"""CUDA's words, each with a formula, and the kernels that use them. For test_words."""

import math

import numpy as np

from dev.tests.small_kernels import HEAD, INCLUDES, kernel

# ---- functions of floats: the expression of x and y; NumPy's; the largest relative error

FAST, GOOD = 1e-5, 5e-7
FLOATS = (
    ("rsqrtf(x)", lambda x, y: x**-0.5, GOOD),
    ("rcbrtf(x)", lambda x, y: x ** (-1 / 3), GOOD),
    ("exp10f(y)", lambda x, y: 10.0**y, GOOD),
    ("__expf(y)", lambda x, y: np.exp(y), FAST),
    ("__exp10f(y)", lambda x, y: 10.0**y, FAST),
    ("__logf(3.0f + x)", lambda x, y: np.log(3 + x), FAST),
    ("__log2f(3.0f + x)", lambda x, y: np.log2(3 + x), FAST),
    ("__powf(x, y)", lambda x, y: x**y, FAST),
    ("__log10f(3.0f + x)", lambda x, y: np.log10(3 + x), FAST),
    ("__sinf(y)", lambda x, y: np.sin(y), 1e-4),
    ("__cosf(y / 8)", lambda x, y: np.cos(y / 8), 1e-4),
    ("__tanf(y / 8)", lambda x, y: np.tan(y / 8), 1e-4),
    ("__fdividef(x, y)", lambda x, y: x / y, FAST),
    ("fdividef(x, y)", lambda x, y: x / y, GOOD),
    ("__frcp_rn(y)", lambda x, y: 1 / y, GOOD),
    ("__fsqrt_rn(x)", lambda x, y: x**0.5, GOOD),
    ("__frsqrt_rn(x)", lambda x, y: x**-0.5, GOOD),
    ("__fdiv_rn(x, y)", lambda x, y: x / y, GOOD),
    ("__fmaf_rn(x, x, -y)", lambda x, y: x * x - y, GOOD),
    ("__saturatef(y)", lambda x, y: np.clip(y, 0, 1), 0),
    ("[&] { float s, c; sincosf(y, &s, &c); return s + 2 * c; }()",
     lambda x, y: np.sin(y) + 2 * np.cos(y), 2e-6),
    ("[&] { float s, c; __sincosf(y, &s, &c); return s + 3 * c; }()",
     lambda x, y: np.sin(y) + 3 * np.cos(y), 1e-4),
    ("sinpif(y)", lambda x, y: np.sin(math.pi * y), 1e-5),
    ("cospif(y)", lambda x, y: np.cos(math.pi * y), 1e-5),
    ("normcdff(y)", lambda x, y: np.vectorize(lambda z: 0.5 * math.erfc(-z / 2**0.5))(y), 2e-6),
    ("rhypotf(x, y)", lambda x, y: (x * x + y * y) ** -0.5, GOOD),
    ("rnorm3df(x, y, 2.0f)", lambda x, y: (x * x + y * y + 4) ** -0.5, GOOD),
    ("fmaxf(x, NAN) + fminf(NAN, y)", lambda x, y: x + y, GOOD),
    ("max(x, NAN)", lambda x, y: x, 0),
    ("max(y, -1) - min(1, 2u)".replace("max(y, -1)", "max(y, -1.0)"),
     lambda x, y: np.maximum(y, -1) - 1, GOOD),
    ("abs(y)", lambda x, y: np.abs(y), 0),
    ("isnan(y) + isinf(INFINITY) + 2 * isfinite(x)", lambda x, y: 3 + 0 * x, 0),
    ("(float)M_PI * x * (FLT_MAX / FLT_MAX)", lambda x, y: np.pi * x, 1e-6),
    ("__int_as_float(__float_as_int(x)) + __uint_as_float(__float_as_uint(y))", lambda x, y: x + y,
     GOOD),
    ("(float)__longlong_as_double(__double_as_longlong(x))", lambda x, y: x, 0),
    ("__ldg(&in[0]) + __ldcs(&in[1]) + __ldca(&in[2]) + __ldcg(&in[3])",
     lambda x, y: 0 * x + x[:4].sum(), 1e-6),
    ("make_float4(1, x, y, 4).y + make_float2(x, y).x + make_float3(1, 2, x).z", lambda x, y: 3 * x,
     GOOD),
    ("make_int2(2, 3).y + make_uint4(1, 2, 3, 4).w + make_double2(x, 5).y + make_uchar4(1, 2, "
     "3, 4).z", lambda x, y: 15 + 0 * x, 0),
    ("(float)(sizeof(float3) + alignof(float4) + alignof(int2) + alignof(double2) + "
     "alignof(uchar4))", lambda x, y: 12 + 16 + 8 + 16 + 4 + 0 * x, 0),
    ("(float)(warpSize + blockDim.x + gridDim.z + INT_MAX % 7)",
     lambda x, y: 32 + 64 + 1 + (2**31 - 1) % 7 + 0 * x, 0),
)


# ---- functions of integers: the expression of a, b, f; in Python; the type

WORDS32 = 2**32
INTEGERS = (
    ("__popc(a)", lambda a, b, f: bin(a).count("1")),
    ("__popcll((unsigned long long)a << 32 | b)",
     lambda a, b, f: bin(a).count("1") + bin(b).count("1")),
    ("__ffs(a)", lambda a, b, f: (a & -a).bit_length()),
    ("__ffsll((long long)b << 20)", lambda a, b, f: (b & -b).bit_length() + 20 * (b > 0)),
    ("__clz(a)", lambda a, b, f: 32 - a.bit_length()),
    ("__clzll(b)", lambda a, b, f: 64 - b.bit_length()),
    ("__brev(a)", lambda a, b, f: int(f"{a:032b}"[::-1], 2)),
    ("(unsigned)__brevll(a)", lambda a, b, f: 0),
    ("__umulhi(a, b)", lambda a, b, f: a * b >> 32),
    ("__mulhi((int)a, (int)b)", lambda a, b, f: signed(a) * signed(b) >> 32),
    ("(unsigned)__umul64hi((unsigned long long)a << 32, b)", lambda a, b, f: (a << 32) * b >> 64),
    ("__umul24(a, b)", lambda a, b, f: (a % 2**24) * (b % 2**24)),
    ("__mul24((int)a, (int)b)", lambda a, b, f: signed(a, 24) * signed(b, 24)),
    ("__byte_perm(a, b, 0x7105)", lambda a, b, f: sum(
        (a | b << 32).to_bytes(8, "little")[j] << 8 * i for i, j in enumerate((5, 0, 1, 7)))),
    ("__funnelshift_l(a, b, 7)", lambda a, b, f: (b << 32 | a) << 7 >> 32),
    ("__funnelshift_r(a, b, 7)", lambda a, b, f: (b << 32 | a) >> 7),
    ("__usad(a, b, 9)", lambda a, b, f: abs(a - b) + 9),
    ("__sad((int)a, (int)b, 9)", lambda a, b, f: abs(signed(a) - signed(b)) + 9),
    ("__hadd((int)a, (int)b)", lambda a, b, f: signed(a) + signed(b) >> 1),
    ("__uhadd(a, b)", lambda a, b, f: a + b >> 1),
    ("min(a, b) + max((int)a, 3u)", lambda a, b, f: min(a, b) + max(a, 3)),
    ("umin(a, b) ^ umax(a, b)", lambda a, b, f: a ^ b),
    ("__float2int_rn(f)", lambda a, b, f: clipped(np.rint(f), -(2**31), 2**31 - 1)),
    ("__float2int_rz(f)", lambda a, b, f: clipped(np.trunc(f), -(2**31), 2**31 - 1)),
    ("__float2int_rd(f)", lambda a, b, f: clipped(np.floor(f), -(2**31), 2**31 - 1)),
    ("__float2uint_rn(f)", lambda a, b, f: clipped(np.rint(f), 0, 2**32 - 1)),
    ("(unsigned)__float2ll_rz(f * 0.5f)",
     lambda a, b, f: clipped(np.trunc(f * np.float32(0.5)), -(2**63), 2**63 - 1)),
    ("__double2int_rn(f)", lambda a, b, f: np.where(
        np.isnan(f), -(2**31), clipped(np.rint(f), -(2**31), 2**31 - 1))),
    ("__float_as_uint(__uint2float_rn(a))", lambda a, b, f: int(np.float32(a).view(np.uint32))),
    ("__float_as_uint(__int2float_rn((int)a))",
     lambda a, b, f: int(np.float32(signed(a)).view(np.uint32))),
    ("(uint32_t)(uint8_t)a + (int8_t)b", lambda a, b, f: a % 256 + signed(b, 8)),
)


def signed(x, bits=32):
    x %= 1 << bits
    return x - (1 << bits) * (x >> bits - 1)


def clipped(x, low, high):
    return 0 if np.isnan(x) else low if x <= low else high if x >= high else int(x)


# ---- what lanes tell each other: the expression of x, lane; in Python, of the lane and its warp's
# x


def moved(number, width, lane, x):
    """What a shuffle reads from the lane `number` if that is in its part, else its own."""
    return x[number] if lane // width * width <= number < (lane // width + 1) * width else x[lane]


F = "0xffffffffu"
LANES = (
    (f"__shfl_sync({F}, x, 3)", lambda i, x: x[3]),
    (f"__shfl_sync({F}, x, lane + 1)", lambda i, x: x[(i + 1) % 32]),
    (f"__shfl_sync({F}, x, 5, 8)", lambda i, x: x[i // 8 * 8 + 5]),
    (f"__shfl_sync({F}, x, 13, 8)", lambda i, x: x[i // 8 * 8 + 5]),
    (f"__shfl_down_sync({F}, x, 5)", lambda i, x: moved(i + 5, 32, i, x)),
    (f"__shfl_down_sync({F}, x, 3, 8)", lambda i, x: moved(i + 3, 8, i, x)),
    (f"__shfl_up_sync({F}, x, 5)", lambda i, x: moved(i - 5, 32, i, x)),
    (f"__shfl_up_sync({F}, x, 1, 4)", lambda i, x: moved(i - 1, 4, i, x)),
    (f"__shfl_xor_sync({F}, x, 5)", lambda i, x: x[i ^ 5]),
    (f"__shfl_xor_sync({F}, x, 2, 8)", lambda i, x: x[i ^ 2]),
    (f"__shfl_xor_sync({F}, x, 8, 8)", lambda i, x: x[i ^ 8] if i ^ 8 < i else x[i]),
    (f"(int)__shfl_down_sync({F}, (float)(x % 1000), 2)",
     lambda i, x: moved(i + 2, 32, i, x) % 1000),
    (f"(int)__shfl_down_sync({F}, (double)x, 2)", lambda i, x: moved(i + 2, 32, i, x)),
    (f"(int)(__shfl_xor_sync({F}, (long long)x << 32, 1) >> 32)", lambda i, x: x[i ^ 1]),
    (f"(int)__shfl_up_sync({F}, (unsigned)x, 31)", lambda i, x: moved(i - 31, 32, i, x)),
    (f"__shfl_xor_sync({F}, (short)(x % 100), 1)", lambda i, x: x[i ^ 1] % 100),
    (f"(int)(float)__shfl_xor_sync({F}, __float2half(x % 100), 1)", lambda i, x: x[i ^ 1] % 100),
    (f"(int)__bfloat162float(__shfl_down_sync({F}, __float2bfloat16(x % 100), 1))",
     lambda i, x: moved(i + 1, 32, i, x) % 100),
    (f"(int)__ballot_sync({F}, x % 3 == 0)",
     lambda i, x: sum(1 << j for j in range(32) if x[j] % 3 == 0)),
    (f"__any_sync({F}, x == first) + 2 * __any_sync({F}, 0)", lambda i, x: 1),
    (f"__all_sync({F}, x) + 2 * __all_sync({F}, lane)", lambda i, x: 1),
    (f"(int)__match_any_sync({F}, x % 4)",
     lambda i, x: sum(1 << j for j in range(32) if x[j] % 4 == x[i] % 4)),
    (f"[&] {{ int all; unsigned m = __match_all_sync({F}, x & 0, &all); return all + (m == "
     f"{F}); }}()", lambda i, x: 2),
    (f"(int)__reduce_add_sync({F}, x)", lambda i, x: sum(x)),
    (f"__reduce_max_sync({F}, -x)", lambda i, x: max(-y for y in x)),
    (f"(int)__reduce_min_sync({F}, (unsigned)x)", lambda i, x: min(x)),
    (f"(int)__reduce_and_sync({F}, (unsigned)x | 5)",
     lambda i, x: int(np.bitwise_and.reduce(np.array(x) | 5))),
    (f"(int)__reduce_xor_sync({F}, (unsigned)x)", lambda i, x: int(np.bitwise_xor.reduce(x))),
    ("(int)__activemask()", lambda i, x: -1),
    # halves of a warp, each with a mask of its own
    ("[&] { unsigned m = lane < 16 ? 0xffffu : 0xffff0000u; "
     "return __shfl_xor_sync(m, x, 3) + __shfl_up_sync(m, x, 1, 16); }()",
     lambda i, x: x[i ^ 3] + moved(i - 1, 16, i, x)),
    ("[&] { unsigned m = lane < 16 ? 0xffffu : 0xffff0000u; return (int)__ballot_sync(m, x % "
     "2); }()",
     lambda i, x: sum(1 << j for j in range(i // 16 * 16, i // 16 * 16 + 16) if x[j] % 2)),
    # an if: those that a ballot has found go on
    (f"[&] {{ unsigned m = __ballot_sync({F}, x % 3 == 0); int sum = 0; "
     "if (x % 3 == 0) { sum = __reduce_add_sync(m, x); "
     "__syncwarp(m); sum += __any_sync(m, lane == 40); } return sum; }()",
     lambda i, x: sum(y for y in x if y % 3 == 0) * (x[i] % 3 == 0)),
    # lanes that meet more and more often without the others
    ("[&] { int y = x; for (int n = 32; n > 1; n /= 2) { if (lane >= n) break; "
     "unsigned m = n == 32 ? ~0u : (1u << n) - 1; "
     "y += __shfl_xor_sync(m, y, n / 2); } return y; }()", lambda i, x: steps(i, x)),
    ("[&] { if (lane < 8) return (int)__activemask(); return 0; }()", lambda i, x: 255 * (i < 8)),
)
BLOCKS = (  # the votes of a block: of all x of the block
    ("__syncthreads_count(x % 3)", lambda x: sum(y % 3 != 0 for y in x)),
    ("__syncthreads_or(x == 1) + 2 * __syncthreads_or(x > 1)", lambda x: 2),
    ("__syncthreads_and(x > 0) + 2 * __syncthreads_and(x % 3)", lambda x: 1),
)


def steps(lane, x):
    y, n = [*x], 32
    while n > 1 and lane < n:
        y = [y[i] + y[i ^ n // 2] if i < n else y[i] for i in range(32)]
        n //= 2
    return y[lane]


# ---- atomics: the type, the expression of p and the thread's x, the value before; what it becomes

ATOMICS = (
    ("int", "atomicAdd(p, x)", 5, lambda b, x: b + sum(x)),
    ("int", "atomicSub(p, x)", 5, lambda b, x: b - sum(x)),
    ("int", "atomicMin(p, 50 - x)", 45, lambda b, x: min([b, *(50 - y for y in x)])),
    ("int", "atomicMax(p, x - 50)", -90, lambda b, x: max([b, *(y - 50 for y in x)])),
    ("int", "atomicAnd(p, ~(1 << x % 8))", 255, lambda b, x: 0),
    ("int", "atomicOr(p, 1 << x % 8)", 0, lambda b, x: 255),
    ("int", "atomicXor(p, x)", 77, lambda b, x: int(np.bitwise_xor.reduce([b, *x]))),
    ("int", "atomicExch(p, 4)", 9, lambda b, x: 4),
    ("int", "atomicAdd_block(p, 1)", 9, lambda b, x: b + 64),
    ("int",
     "for (int old = *(volatile int*)p, e; (e = atomicCAS(p, old, 3 * old + 1)) != old;) old = e",
     0, lambda b, x: signed(3486784401**3 * 3**4 // 2)),
    ("unsigned", "atomicAdd(p, (unsigned)x)", 7, lambda b, x: b + sum(x)),
    ("unsigned", "atomicInc(p, 9)", 3, lambda b, x: (3 + 64) % 10),
    ("unsigned", "atomicInc(p, 9)", 12, lambda b, x: 63 % 10),
    ("unsigned", "atomicDec(p, 9)", 3, lambda b, x: (3 - 64) % 10),
    ("unsigned", "atomicDec(p, 9)", 12, lambda b, x: -54 % 10),
    ("unsigned", "atomicMin(p, x + 4000000000u)", WORDS32 - 1, lambda b, x: 4000000000 + min(x)),
    ("unsigned", "atomicMax(p, x + 4000000000u)", 1, lambda b, x: 4000000000 + max(x)),
    ("unsigned", "atomicSub(p, 1u)", 7, lambda b, x: b - 64),
    ("unsigned", "atomicOr(p, 1u << t % 32)", 0, lambda b, x: -1),
    ("unsigned", "atomicCAS(p, 7u, 8u)", 7, lambda b, x: 8),
    ("unsigned", "atomicAdd_system(p, 2u)", 7, lambda b, x: 135),
    ("unsigned long long", "atomicAdd(p, 1ull << 33)", 1, lambda b, x: 1 + (64 << 33)),
    ("unsigned long long", "atomicMax(p, 1ull << x % 64)", 1,
     lambda b, x: max(1 << y % 64 for y in x)),
    ("unsigned long long", "atomicCAS(p, 1ull << 40, 2ull << 40)", 1 << 40, lambda b, x: 2 << 40),
    ("unsigned long long", "atomicExch(p, 6ull << 40)", 1, lambda b, x: 6 << 40),
    ("float", "atomicAdd(p, 0.25f * x)", 0.5, lambda b, x: b + sum(x) / 4),
    ("float", "atomicExch(p, 2.5f)", 1, lambda b, x: 2.5),
    ("double", "atomicAdd(p, 1e-9 * x)", 1, lambda b, x: b + 1e-9 * sum(x)),
    ("__half", "atomicAdd(p, __half(0.5f))", 1, lambda b, x: b + 32),
    ("__nv_bfloat16", "atomicAdd(p, __nv_bfloat16(0.5f))", 1, lambda b, x: b + 32),
)
STORED = {"int": np.int32, "unsigned": np.uint32, "unsigned long long": np.uint64,
          "float": np.float32, "double": np.float64, "__half": np.float16,
          "__nv_bfloat16": np.uint16}


# ---- all of it in one file


def stores(rows):
    """A line for each expression: its value is a row of out."""
    return "".join(f"    out[{k} * 64 + t] = {text};\n" for k, text in enumerate(rows))


NARROW = """    half[i] = __half_as_ushort(__float2half(in[i]));
    bfloat16[i] = __bfloat16_as_ushort(__float2bfloat16(in[i]));
"""
WIDEN = "    out[i] = __half2float(in[i]);\n    more[i] = __bfloat162float(low[i]);\n"
ARITHMETIC = """    __half a = in[i], b = in[i ^ 1];
    __nv_bfloat16 c = low[i], d = low[i ^ 1];
    __half2 pair = __halves2half2(a, b), sums = __hfma2(pair, pair, __float2half2_rn(1.0f));
    float2 wide = __bfloat1622float2(
        __floats2bfloat162_rn(__bfloat162float(c), __bfloat162float(d)));
    out[0 * 64 + i] = a + b;
    out[1 * 64 + i] = __hmul(a, b);
    out[2 * 64 + i] = c - d;
    out[3 * 64 + i] = c * d;
    out[4 * 64 + i] = __high2float(sums);
    out[5 * 64 + i] = wide.x + wide.y;
    pairs[i / 2] = __nv_bfloat162(__ushort_as_bfloat16(i / 2), __float2bfloat16(2.0f));
"""
TAIL = """    // the last warp has 8 lanes
    unsigned lanes = __ballot_sync(t < 32 ? 0xffffffffu : 0xffu, in[t] % 2);
    out[t] = lanes;
    out[40 + t] = __reduce_add_sync(t < 32 ? 0xffffffffu : 0xffu, 1);
"""
GLOBALS = """
extern __shared__ float above[];  // extern __shared__ int none[];
__host__ __device__ __noinline__ int times_20(int n) { return 20 * n; }
__device__ static float table[64];
"""
WITHIN = """    extern __shared__ __align__(16) unsigned char bytes[];
    float* s = reinterpret_cast<float*>(bytes);
    s[t] = in[t];
    __syncthreads();
    out[t] = s[63 - t];
"""
OUTSIDE = """    above[t] = in[t];
    float4* four = reinterpret_cast<float4*>(above);
    __syncthreads();
    table[t] = four[t / 4].z + above[63 - t];
    __threadfence_block();
    out[t] = table[t] + times_20(6);
"""
KERNELS = (  # name, parameters, body, threads if not 64
    ("floats", "float* out, const float* in",
     "    float x = in[t], y = in[64 + t];\n" + stores(text for text, *_ in FLOATS)),
    # a compiler would like to make a single fma of these two
    ("unfused", "float* out, const float* in",
     "    out[t] = __fadd_rn(__fmul_rn(in[t], in[t]), -1.0f);\n"),
    ("integers", "unsigned* out, const unsigned* in, const float* floats",
     "    unsigned a = in[t], b = in[64 + t];\n    float f = floats[t];\n"
     + stores(text for text, _ in INTEGERS)),
    ("lanes", "int* out, const int* in",
     "    int lane = t % 32, x = in[t], first = in[t / 32 * 32];\n"
     + stores(text for text, _ in LANES + BLOCKS)),
    ("tail", "int* out, const int* in", TAIL, 40),
    ("atomics", "unsigned long long* at, const int* in", "    int x = in[t];\n" + "".join(
        f"    {{ {T}* p = ({T}*)(at + {k}); {text}; }}\n"
        for k, (T, text, *_) in enumerate(ATOMICS))),
    ("steps", "unsigned* before, unsigned* p", "    before[t] = atomicInc(p, 40);\n"),
    ("narrow", "unsigned short* half, unsigned short* bfloat16, const float* in", NARROW),
    ("widen", "float* out, float* more, const __half* in, const __nv_bfloat16* low", WIDEN),
    ("arithmetic", "float* out, const __half* in, const __nv_bfloat16* low, __nv_bfloat162* pairs",
     ARITHMETIC),
    ("within", "float* out, const float* in", WITHIN),
    ("outside", "float* out, const float* in", OUTSIDE),
)
TEXT = "".join([HEAD, INCLUDES, GLOBALS, *(kernel(*row) for row in KERNELS)])
