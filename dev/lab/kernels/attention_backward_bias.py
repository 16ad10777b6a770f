"""dqkv (B,T,3,NH,HS), attention's gradient, and dqkvb (3,NH,HS) += its sum over rows"""
from dev.lab import heads
from dev.lab.heads import ATTENTION_LIMITS
from dev.lab.ladder import DTYPES, Ladder, Version


def problem(draw, B, T, NH, HS, cold=0):
    inputs, truth, terms = heads.backward_problem(draw, B, T, NH, NH, HS, cold=cold)
    dqkvb = draw.fp32(3 * NH * HS)
    sum_of = lambda dqkv: dqkv.reshape(B * T, -1).sum(0)
    size = (terms["dqkv"].reshape(B * T, -1) ** 2).sum(0) ** 0.5
    return (inputs | dict(dqkvb=dqkvb), truth | dict(dqkvb=dqkvb + sum_of(truth["dqkv"])),
            terms | dict(dqkvb=abs(dqkvb) + size))


def scratch(a):
    return heads.delta_scratch(a) | dict(sums=(a.B * -(-a.T // 64), 3 * a.NH * a.HS))


def with_sums(device, a):
    heads.trainers_backward(device, a, a.sums)
    rows, width = a.B * -(-a.T // device.attention_sizes.rows), 3 * a.NH * a.HS
    device.launch("add_partials", (width, 4), None, None, None, a.dqkvb, None, a.sums, 0, 0, rows, width, True)


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,HS=64", heads.LONG_HEADS, compiled_for="HS", fp32="lse delta sums dqkvb",
    sums="dqkv dqkvb", trainer_checks=(*heads.ODD_HEADS, "B=1,T=33,NH=2,HS=64,cold=1"),
    limits=ATTENTION_LIMITS | dict(tf32=2e-3), versions=(
        Version("sums of a block's rows while shared memory has them: the trainer's", with_sums, threads=(),
                dtypes=DTYPES, scratch=scratch, trainer=True,
                held_back="it is all of attention's backward pass, whose products are not counted here"),
    ))
