"""Is the machine code of two trees' kernels the same? Part of same.py."""
import concurrent.futures
import hashlib
import re
import struct

from dev.common.cache import read_cache, write_cache
from dev.features.order import SOURCES

# Of these a tree may have some. The last ones are for FP8 only, and for Hopper only.
KERNELS = ["kernels.cu", "llama3.cu", *(path.name for path in SOURCES
                                        if path.parent.name not in ("fp8", "hopper"))]
FP8 = [path.name for path in SOURCES if path.parent.name == "fp8" or path.suffix == ".cuh"]
HOPPER = [path.name for path in SOURCES if path.parent.name == "hopper"]
# The host passes -DHOPPER and -DOUTPUT since 465c5e5; before that kernels.cu knew by itself.
CODE = [("sm_80", "BF16", 768, 64, KERNELS), ("sm_80", "FP32", 768, 64, KERNELS),
        ("sm_90a", "BF16 -DHOPPER", 768, 64, KERNELS), ("sm_90a", "FP32", 768, 64, KERNELS),
        ("sm_90a", "FP8 -DBF16 -DHOPPER -DOUTPUT=<fp8_output.cuh>", 768, 64, [*KERNELS, *FP8]),
        ("sm_90a", "BF16 -DHOPPER", 1024, 128, [*KERNELS[:2], *HOPPER])]
OPTIONS = "-arch={} -std=c++17 -D{} -DCHANNELS={} -DHS={}"


def sections(elf):
    """{name: bytes} of a cubin's sections with code or constants."""
    [table], [size, count, names] = (struct.unpack_from("<Q", elf, 0x28),
                                     struct.unpack_from("<3H", elf, 0x3A))
    rows = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    name = lambda row: elf[rows[names][4] + row[0] :].split(b"\0", 1)[0].decode()
    # 8: zeros, no bytes.
    return {name(row): elf[row[4] : row[4] + row[5]] if row[1] != 8 else str(row[5]).encode()
            for row in rows if re.match(r"\.text\.|\.nv\.(constant|shared|global)", name(row))}


def code_of(job):
    """Compile a row of CODE: {section: digest}, or {NVRTC's message: ""}. Runs in a process of its
    own."""
    row, text, headers = job
    options = OPTIONS.format(*row).split()
    kept = f"same_code_{hashlib.sha256(repr((text, headers, options)).encode()).hexdigest()[:20]}"
    if found := read_cache(kept):
        return found
    import cupy  # noqa: F401  (finds and loads NVRTC)
    from cupy_backends.cuda.libs import nvrtc
    contents, names = ([x.encode() for x in some] for some in (headers.values(), headers))
    program = nvrtc.createProgram(text, "kernels.cu", contents, names)
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        return {f"NVRTC could not compile it: {nvrtc.getProgramLog(program).strip()[:300]}": ""}
    found = {name: hashlib.sha256(x).hexdigest()
             for name, x in sections(nvrtc.getCUBIN(program)).items()}
    write_cache(kept, found)
    return found


def texts(tree):
    """(the text to compile, {name: text} of headers) of each row of CODE, from the files that the
    tree has."""
    paths = {name: [*tree.rglob(name)][:1] for row in CODE for name in row[4]}
    headers = {path.name: path.read_text("utf-8") for path in tree.rglob("*.cuh")}
    return [("".join(path.read_text("utf-8") for name in row[4] for path in paths[name]), headers)
            for row in CODE]


def compare_code(old, new, jobs):
    """Yields (name, the sections that differ, how many were compared) for each row of CODE."""
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        sides = [pool.map(code_of, [(row, *text) for row, text in zip(CODE, side)])
                 for side in (old, new)]
        for row, a, b in zip(CODE, *sides):
            differ = [f"{key} ({'both' if key in a and key in b else 'OLD' if key in a else 'NEW'})"
                      for key in sorted(a.keys() | b.keys())
                      if a.get(key) != b.get(key) or key.startswith("NVRTC")]
            yield f"code, {' '.join(map(str, row[:4]))}", differ, len(a)
