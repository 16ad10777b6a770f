"""Words that a student writes and the compiler does not know: those of CUDA that the CPU here has not,
those of host programs, and those that nobody has."""

import difflib
import functools
import re

from dev.cpu.device import HEADER, KERNELS

CUDA_HAS = "CUDA has {word}, and the CPU here has not: "
HOST = "{word} is for the program around a kernel, and the lab is that program here: "
# (what the code says, the sentence); {word} is what was found. The first row that fits counts.
NOT_HERE = [
    (re.compile(pattern), sentence)
    for pattern, sentence in (
        (
            r"\b(?:__half2?|half2|__float2half\w*|__half2float)\b",
            "{word} needs a line: #include <cuda_fp16.h>",
        ),
        (
            r"\b(?:__)?nv_bfloat162?\b|\b__\w*bfloat16\w*",
            "{word} needs a line: #include <cuda_bf16.h>",
        ),
        (r"<<<", HOST + "it launches the kernel itself, with the block of your BLOCK line"),
        (
            r"\bcuda(?:Malloc|Free|Memcpy|Memset|Host|Device|Stream|Event|Launch|Get|Set|Func|Graph)\w*",
            HOST + "write the kernel and its helpers alone",
        ),
        (r"\b(?:std::cout|int\s+main\s*\()", HOST + "write the kernel and its helpers alone"),
        (
            r"\bcooperative_groups(?:\.h)?|\bcg::\w+",
            CUDA_HAS
            + "write __syncthreads(), __syncwarp() and __shfl_xor_sync(...), or warp_sum and block_reduce",
        ),
        (
            r"\b(?:nvcuda|wmma)::\w+|\bmma\.h|\bwmma\b",
            CUDA_HAS + "multiply with loops, or with the lab's multiply(...) of tiles.cu",
        ),
        (
            r"\bcub(?:::\w+|/[\w./]+)",
            CUDA_HAS + "write warp_sum(x), warp_max(x) or block_reduce<warp_sum>(x, 0.0f)",
        ),
        (r"\bthrust(?:::\w+|/[\w./]+)", CUDA_HAS + "a kernel is written without it"),
        (
            r"\bcu(?:rand|blas|fft|sparse|solver|dnn)\w*(?:\.h)?",
            CUDA_HAS + "a kernel is written without it",
        ),
        (
            r"\bcuda(?:/std|/[a-z_]+|::(?:std::)?\w+)",
            CUDA_HAS + "write the plain functions of CUDA",
        ),
        (
            r"\b__pipeline_\w+|\bcuda_pipeline\w*\.h|\bcp_async\w*",
            CUDA_HAS
            + "write copy16(shared, global, true), copies_end() and wait_for_copies<0>(), or plain loads",
        ),
        (
            r"\b(?:tex[123]D\w*|surf[123]D\w*|cudaTextureObject_t|cudaSurfaceObject_t)\b",
            CUDA_HAS + "read the array itself",
        ),
        (
            r"\b__nv_fp8\w*|\bcuda_fp8\.h|\bcuda_fp[46]\.h",
            CUDA_HAS + "numbers here are real or float",
        ),
        (
            r"\b(?:asm|__asm__)\b",
            CUDA_HAS.replace("{word}", "PTX ({word})")
            + "write it in C++; many instructions have a "
            "function, such as __popc or __shfl_sync",
        ),
        (r"\b__(?:f|d)\w+_r[zud]\b", CUDA_HAS + "only _rn, which rounds to nearest, is here"),
        (
            r"\b__(?:u|)dp[24]a\w*|\b__v\w+[24]\b|\b__(?:is|cvta)_?\w*(?:[Gg]lobal|[Ss]hared|[Ll]ocal|[Cc]onstant)\w*|"
            r"\b__(?:prof_trigger|brkpt|cluster_\w+|setmaxnreg\w*|nv_\w+)\b|"
            r"\b(?:erfinvf?|erfcinvf?|erfcxf?|normcdfinvf?|cyl_bessel_\w+|norm4df?|rnorm4df?)\b",
            CUDA_HAS + "write it with other functions",
        ),
        (
            r"\b__(?:shfl(?:_up|_down|_xor)?|ballot|any|all)\b",
            "{word} is gone from CUDA since GPUs of 2017: write {word}_sync(0xffffffff, ...)",
        ),
    )
]
C_FUNCTIONS = """
sqrtf expf exp2f logf log2f log10f log1pf expm1f powf sinf cosf tanf tanhf sinhf coshf asinf acosf atanf
atan2f erff erfcf fabsf fmaf fmaxf fminf floorf ceilf roundf rintf truncf cbrtf hypotf isnan isinf
memcpy memset printf assert threadIdx blockIdx blockDim gridDim LOWEST FULL_WARP INFINITY FLT_MAX
float2 float4 int2 int4 uint4""".split()


def not_here(code, about=""):
    """The sentence on the first word of NOT_HERE in code, or "". about: what it must contain."""
    for pattern, sentence in NOT_HERE:
        found = pattern.search(code)
        if found and about in found[0]:
            return sentence.format(word=re.sub(r"\s*\($", "", found[0]))
    return ""


@functools.cache
def known_words():
    """What a student may call: CUDA's functions here, C's, and the helpers of kernels.cu."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(HEADER.parent.glob("*.h"))]
    names = re.findall(r"__device__ (?:[\w:<>*]+ )+(\w+)\(|#define (__\w+)[( ]", "\n".join(texts))
    helpers = re.findall(r"__device__ (?:[\w:<>*]+ )+(\w+)\(", KERNELS.read_text(encoding="utf-8"))
    atomics = [f"atomic{name}" for name in "Add Sub Exch Min Max Inc Dec CAS And Or Xor".split()]
    return sorted(
        {*(name for pair in names for name in pair if name), *helpers, *atomics, *C_FUNCTIONS}
    )


def nearest(name, own=()):
    """Such as "; did you mean __syncthreads?": a known word, or one of his own, that is near; or ""."""
    near = difflib.get_close_matches(name, sorted({*known_words(), *own} - {name}), 1, 0.75)
    return f"; did you mean {near[0]}?" if near else ""
