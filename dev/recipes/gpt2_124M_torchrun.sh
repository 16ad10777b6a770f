#!/usr/bin/env bash
# GPT-2 124M with the flags of gpt2_124M.sh, on two nodes of eight GPUs, with PyTorch's torchrun. On each of the nodes,
# with another NODE_RANK and the same of all else:
#
#     NODE_RANK=0 MASTER_ADDR=node0 TRAIN_GPT2_TOKEN=... dev/recipes/gpt2_124M_torchrun.sh
#     NODE_RANK=1 MASTER_ADDR=node0 TRAIN_GPT2_TOKEN=... dev/recipes/gpt2_124M_torchrun.sh
#
# batch    16 ranks with B=32 and T=1024 have the 524,288 tokens of -d at once. With B=64 they would have twice as many
# ranks    torchrun starts 8 a node, and listens at MASTER_PORT (29500) of MASTER_ADDR, the node of rank 0. The ranks
#          meet one port above, or at TRAIN_GPT2_PORT, and let in who knows the token: openssl rand -hex 16 draws one
# files    log_gpt2_124M/ has to be a folder that both nodes see. Each node may have a data/ of its own
# needs    torchrun, which comes with PyTorch: pip install torch
# its end  Ctrl-C on a node has all 16 ranks write a checkpoint. Started again on both nodes, -y 1 goes on from there
set -euo pipefail
cd "$(dirname "$0")/../.."

for name in NODE_RANK MASTER_ADDR TRAIN_GPT2_TOKEN; do
    if [ -z "${!name:-}" ]; then
        echo "error: $name is not set; expected NODE_RANK, 0 or 1, and the same MASTER_ADDR and TRAIN_GPT2_TOKEN" >&2
        exit 1
    fi
done
export TRAIN_GPT2_TOKEN LAUNCH="torchrun --nnodes=2 --nproc-per-node=8 --node-rank=$NODE_RANK \
    --master-addr=$MASTER_ADDR --master-port=${MASTER_PORT:-29500}"
exec dev/recipes/gpt2_124M.sh -b 32 -m 320 -z 1 "$@"
