"""Test steps that are not finite: the run ends in one line that names where it began, and --replay
repeats the step."""
import re
import shutil
import struct
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dev.common.config import Config
from dev.features.replay import largest_gradients, repeat
from dev.tests.checks import TINY, check, words
from dev.tests.models import device_of, gradients, poisoned_model
from dev.tests.trainings import call, check_same, place_of, train, whole_ones, without
from train_gpt2 import batch_table, carve, pack_batch, whole_shape

pytestmark = pytest.mark.usefixtures("token_data")


def test_runs(device_name, folder):
    """A step that is not finite ends the run in one line that names where it began, and leaves a
    replay_*.npz."""
    def planted(name, index, value):
        """The fixture with a number planted in a parameter."""
        data, start = bytearray(TINY.read_bytes()), 1024
        for row in Config.from_file(TINY).parameter_table():
            if row.name == name:
                start += 4 * int(np.ravel_multi_index(index, whole_shape(row)))
                break
            start += row.nbytes
        data[start : start + 4] = struct.pack("<f", value)
        path = folder / f"{name}_{value}.bin"
        path.write_bytes(data)
        return path

    for wish, flags, model in (
            (r"is \S+ in \w+\[.*\].* wrote in \w+", ("-l", "1e30"), TINY),
            (r"the parameter fcb is not finite at \[1, 7\], before this step", (),
             planted("fcb", (1, 7), np.inf)),
            (r"the parameter lnfw is not finite at \[5\], before this step", (),
             planted("lnfw", (5,), np.nan)),
            (r"is \S+ in lnf\[\d+, 5\] \(token \d of sequence \d\), which kernel "
             r"residual_layernorm_forward wrote " "in forward_pass; micro-batch 0", (),
             planted("lnfw", (5,), 3e38)),
            (r"every number of the step is finite, and the gradient's norm is \d\.\d+e\+2\d, whose "
             r"square .* d", (),
             # A word that is never in the data: its logits are large.
             planted("wte", (300, 0), 1e25))):
        output = folder / Path(model).stem
        text = train(device_name, folder, output, *flags, "--dtype", "fp32", "-v", 0, model=model,
                     status=1)
        line = text.splitlines()[-1]
        ok = re.search(f"^error: the loss of step \\d+ is .*{wish}.*part_train_", line)
        check(f"not finite: {wish[:60]}", ok, line)
        told = re.search(rf"^WARNING: .*{wish.split(', before')[0]}: no step", text, re.M)
        check("not finite: a parameter is named when it is read",
              bool(told) == ("before this step" in wish), text)
        [kept] = output.glob("replay_*.npz")
        step = int(kept.stem[-8:])
        check("not finite: the step",
              step == (1 if flags else 0) and f"loss of step {step + 1} is" in line, f"{step}")
        check("not finite: the checkpoint before it is whole", whole_ones(output)[-1] == step,
              f"{step}")
        status, text, error = call("--device", place_of(device_name), "--replay", kept)
        found = re.search(wish, text)
        check("not finite: --replay finds it again", status == 0 and found and found[0] in line,
              text + error)

    output = folder / "later"
    train(device_name, folder, output, "-x", 6, "-n", 6, "-nk", 1, "--dtype", "fp32")
    kept = without(output, folder / "before")
    train(device_name, folder, output, "-x", 12, "-n", 6, "-nk", 1, "--dtype", "fp32", "-y", 1,
          "-l", 1e30, status=1)
    steps = whole_ones(output)
    check("not finite: the last good checkpoint stays", steps[0] == 6 and len(steps) == 2,
          f"{steps}")
    shutil.copy(output / "main.log", kept)  # which goes on
    check_same("the last good checkpoint", output, kept, 6)


def test_repeated_steps(device_name):
    """repeat() names the kernel or product that writes the first number that is not finite."""
    place = device_of(device_name, "fp32", 64, 2)
    model = poisoned_model(place, 2, 20)
    batches = [pack_batch(*batch) for batch in words(257, 2, 2, 2, 20)]
    for kernel, nth, argument, wish in (
            ("encoder_forward", 1, 0,
             r"in residual\[2, 3\] \(token 2 of sequence 0\), .* embedding_forward; .* 1"),
            ("attention_forward", 1, 0,
             r"in atty\[2, 3\] .* attention_forward wrote in layer_forward, layer 1; .* 0"),
            ("attention_forward", 2, 0,
             r"in atty\[2, 3\] .* attention_forward wrote in layer_forward, layer 0; .* 1"),
            ("fused_classifier", 0, 1,
             r"in losses\[37\] .* fused_classifier wrote in loss_forward"),
            ("add_loss", 0, 0, r"in verdict\[1\], which kernel add_loss wrote in loss_pass"),
            ("layernorm_backward", 2, 0,
             r"in dresidual\[2, 3\] .* wrote in layer_backward, layer 1"),
            ("attention_backward_kv", 1, 0,
             r"in dqkv\[0, 131\] .* wrote in layer_backward, layer 0"),
            ("encoder_backward_wte", 0, 0,
             r"in dwte\[2, 3\], which .* embedding_backward; micro-batch 0")):
        seen = []

        def launch(name, items, *args, kernel=kernel, nth=nth, argument=argument, seen=seen,
                   **keywords):
            type(place).launch(place, name, items, *args, **keywords)
            seen.append(name)
            if name == kernel and seen.count(name) == nth + 1:
                spoilt = args[argument]
                spoilt.reshape(-1)[min(131, spoilt.size - 3)] = np.nan

        with mock.patch.object(place, "launch", launch):
            found = repeat(model, batches)
        check(f"planted in {kernel} {nth}", found and re.search(wish, found),
              found or "nothing was found")
    products = []

    def matmul(out, *args, **keywords):
        type(place).matmul(place, out, *args, **keywords)
        products.append(out)
        if len(products) == 2:
            out[2, 3] = np.inf

    with mock.patch.object(place, "matmul", matmul):
        found = repeat(model, batches)
    ok = re.search(r"inf in branch\[2, 3\] .*, which a matrix product wrote in layer_forward, "
                   r"layer 0; .* 0", found)
    check("planted in a product", ok, found)
    check("nothing planted: nothing is found", repeat(model, batches) is None)
    for _ in range(2):
        model.train_step(*batches)
    check("nothing planted: nor after two steps", repeat(model, batches) is None)
    norms = dict((name, norm) for norm, name in largest_gradients(model))
    expected = gradients(model, *[(batch.tokens, batch.targets) for batch in (
        carve(data, batch_table(*shape)) for data, shape in batches)])
    for name, gradient in expected.items():
        row = next(row for row in model.config.parameter_table() if row.name == name)
        for l in range(max(1, row.layers)):
            wish = np.linalg.norm(np.float64(gradient[l] if row.layers else gradient)) / len(
                batches)
            yield (f"norm of d{name} {l}", norms[f"d{name}" + f" of layer {l}" * (row.layers > 0)],
                   wish)
