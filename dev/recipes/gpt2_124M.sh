#!/usr/bin/env bash
# GPT-2 124M over 10 billion tokens of FineWeb, with the flags of llm.c's scripts/run_gpt2_124M.sh.
#
# data     python -m dev.data.fineweb --version 10B: 10,255,324,043 tokens to train on, 21 GB;
#          python -m dev.data.hellaswag: 10,042 questions
# steps    19,560 of 524,288 tokens: one epoch
# time     4.6 hours on one H200, at 620,665 tokens/s: dev/RESULTS.md, d12 124M bf16 B=64. Validations and HellaSwag
#          come on top of that
# ends at  a validation loss of 3.27, since llm.c's run of these flags ended at 3.2722. This program has not made the
#          run. OpenAI's checkpoint has 3.4250 on the same file, and 0.2945 of HellaSwag
#
# It runs in the top folder. log_gpt2_124M/ gets main.log, and a checkpoint every 5000 steps. Started again, it goes on
# from the last of them. Flags after the script's name come last, and override those here. --gpus 8 takes eight GPUs of
# this machine. LAUNCH is what starts train_gpt2.py, if it is not python: see gpt2_124M_slurm.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."

data=data/fineweb10B hellaswag=data/hellaswag/hellaswag_val.bin
if ! compgen -G "$data/fineweb_train_*.bin" > /dev/null || ! [ -e "$data/fineweb_val_000000.bin" ]; then
    echo "error: $data has no token files; python -m dev.data.fineweb --version 10B makes them" >&2
    exit 1
fi
if ! [ -e "$hellaswag" ]; then
    echo "error: $hellaswag is not here; python -m dev.data.hellaswag makes it" >&2
    exit 1
fi
read -ra launch <<< "${LAUNCH:-python}"
exec "${launch[@]}" train_gpt2.py -i "$data/fineweb_train_*.bin" -j "$data/fineweb_val_000000.bin" \
    --hellaswag "$hellaswag" \
    -o log_gpt2_124M -e d12 --dtype bf16 -b 64 -t 1024 -d 524288 -x 19560 \
    -l 6e-4 -k cosine -u 700 -q 0 -c 0.1 --beta2 0.95 -v 250 -m 160 -s 20000 -g 144 -n 5000 -y 1 "$@"
