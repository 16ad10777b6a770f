#!/usr/bin/env bash
# Train GPT-2 124M on FineWeb to a validation loss of 3.28 with Muon, in a sixth of the steps of
# gpt2.sh 124M. This was never run here, where there is no FineWeb: all of it is an estimate.
#
#     dev/tools/recipes/gpt2_muon.sh                # 46 minutes on one H200
#     dev/tools/recipes/gpt2_muon.sh --gpus 8       # 6 minutes on eight H100s
#     dev/tools/recipes/gpt2_muon.sh --dry-run      # print how much memory and time it takes, and stop
#
# Flags of train_gpt2.py may follow; they override those below. The log and the checkpoints go to
# log_gpt2_muon/. Run the same command again to resume.
#
# steps   3,250 of 524,288 tokens: with Muon, a model of this size is at 3.28 after so many in the
#         logs of github.com/KellerJordan/modded-nanogpt. That model is a little better than GPT-2,
#         with rotary positions for one. If 3,250 end above 3.28, try -x 4875.
# rates   half of the best in runs of 300 steps with 32,768 tokens (dev/RESULTS.md, "Muon beside
#         AdamW"): longer runs usually want smaller ones. Others were not tried.
# time    tokens divided by the speed in dev/RESULTS.md (B=64, AdamW); Muon's update adds 1% on one
#         GPU. On eight, a rank's 65,536 tokens take 107 ms, and 4 ms more for the update and for
#         what sums over two ranks take beyond the backward pass. Evaluation comes on top.
set -euo pipefail
exec "$(dirname "$0")/gpt2.sh" 124M -o log_gpt2_muon --optimizer muon --muon-lr 0.02 -l 4e-3 \
    -k wsd -u 250 -x 3250 -n 1000 "$@"
