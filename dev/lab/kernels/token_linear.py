"""out (B,OC) = inp (B,C) weight' (OC,C) + bias (OC), for a few rows"""
from dev.lab.kernels.matmul_forward import LIBRARY_LIMITS, by_cublaslt
from dev.lab.ladder import LAUNCH_GAP, Ladder, Version


def problem(draw, B, C, OC):
    inp, weight, bias = draw(B, C), draw(OC, C), draw(OC, scale=C**0.5)
    return dict(inp=inp, weight=weight, bias=bias), dict(out=inp @ weight.T + bias)


def trainers(device, a):
    """That of dev/features/kv_cache.cu, without a norm, an addition or an activation."""
    blocks = min(-(-a.OC // 8), 3 * device.multiprocessors)
    device.launch("token_linear", blocks, a.out, None, a.inp, None, None, None, a.weight, a.bias,
                  1e-5, 0, a.B, a.C, a.OC, shared=4 * a.B * a.C)


LADDER = Ladder(
    problem, "B=1,C=3072,OC=768", ("B=1,C=32,OC=1", "B=2,C=352,OC=50", "B=4,C=1056,OC=67"),
    trainer_checks=("B=3,C=96,OC=5",), args="out inp weight bias B C OC", sums="out",
    limits=dict(fp32=2e-5), flops=lambda a: 2 * a.B * a.C * a.OC, versions=(
        Version("one thread per number", "token_linear1", "B*OC", threads=(64, 256)),
        Version("one warp per row of the weight", "token_linear2", "OC", threads=(128, 256)),
        Version("16 bytes per lane", "token_linear3", "OC", threads=(128, 256)),
        Version("all loads of a row under way: the samples'", trainers, threads=(), trainer=True,
                held_back=LAUNCH_GAP),
        Version("cuBLASLt", by_cublaslt, threads=(), library="cuBLASLt", limits=LIBRARY_LIMITS),
    ), torch=lambda torch, x: lambda: torch.nn.functional.linear(x.inp, x.weight, x.bias))
