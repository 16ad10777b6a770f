#!/usr/bin/env bash
# gpt2.sh 124M on two nodes of eight GPUs, with PyTorch's torchrun (pip install torch). Run it on
# both nodes, each with its own NODE_RANK and otherwise the same environment:
#
#     NODE_RANK=0 MASTER_ADDR=node0 TRAIN_GPT2_TOKEN=... dev/tools/recipes/gpt2_124M_torchrun.sh
#     NODE_RANK=1 MASTER_ADDR=node0 TRAIN_GPT2_TOKEN=... dev/tools/recipes/gpt2_124M_torchrun.sh
#
# batch    16 ranks with B=32 and T=1024 make up the 524,288 tokens of a step (-d)
# ranks    torchrun starts 8 on each node and listens on MASTER_PORT (29500) of MASTER_ADDR, the
#          node of rank 0. The ranks meet one port above, or on TRAIN_GPT2_PORT, and admit only
#          processes that know the token: openssl rand -hex 16 makes one
# files    both nodes must see log_gpt2_124M/; each may have a data/ of its own
# restart  Ctrl-C on one node makes all 16 ranks write a checkpoint and exit. Run it again on both
#          nodes to resume from there (-y 1)
set -euo pipefail
cd "$(dirname "$0")/../../.."

for name in NODE_RANK MASTER_ADDR TRAIN_GPT2_TOKEN; do
    if [ -z "${!name:-}" ]; then
        echo "error: $name is not set; expected NODE_RANK, 0 or 1, and the same MASTER_ADDR and TRAIN_GPT2_TOKEN" >&2
        exit 1
    fi
done
export TRAIN_GPT2_TOKEN LAUNCH="torchrun --nnodes=2 --nproc-per-node=8 --node-rank=$NODE_RANK \
    --master-addr=$MASTER_ADDR --master-port=${MASTER_PORT:-29500}"
exec dev/tools/recipes/gpt2.sh 124M -b 32 -m 320 -z 1 "$@"
