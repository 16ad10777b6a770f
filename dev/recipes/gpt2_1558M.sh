#!/usr/bin/env bash
# GPT-2 1558M over 33.6 billion tokens of FineWeb, with the flags of llm.c's scripts/run_gpt2_1558M.sh.
#
# data     python -m dev.data.fineweb --version 100B: some 200 GB, of which a third is read. llm.c's script takes
#          FineWeb-Edu, whose losses are others; python -m dev.data.hellaswag: 10,042 questions
# steps    32,000 of 1,048,576 tokens
# time     169 hours (7.0 days) on one H200, at 55,178 tokens/s: dev/RESULTS.md, d48 1558M bf16 B=32, which takes
#          100.2 GiB. Validations and HellaSwag come on top of that
# ends at  a validation loss of about 2.68, which nobody measured: a scaling law (Hoffmann et al. 2022, section D.3)
#          says that it is 0.597 below 124M's. OpenAI's checkpoint has 2.8313, and 0.4889 of HellaSwag
#
# It runs in the top folder. log_gpt2_1558M/ gets main.log, and a checkpoint every 2000 steps. Started again, it goes on
# from the last of them. Flags after the script's name come last, and override those here. --gpus 8 takes eight GPUs of
# this machine. LAUNCH is what starts train_gpt2.py, if it is not python: see gpt2_124M_slurm.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."

data=data/fineweb100B hellaswag=data/hellaswag/hellaswag_val.bin
if ! compgen -G "$data/fineweb_train_*.bin" > /dev/null || ! [ -e "$data/fineweb_val_000000.bin" ]; then
    echo "error: $data has no token files; python -m dev.data.fineweb --version 100B makes them" >&2
    exit 1
fi
if ! [ -e "$hellaswag" ]; then
    echo "error: $hellaswag is not here; python -m dev.data.hellaswag makes it" >&2
    exit 1
fi
read -ra launch <<< "${LAUNCH:-python}"
exec "${launch[@]}" train_gpt2.py -i "$data/fineweb_train_*.bin" -j "$data/fineweb_val_000000.bin" \
    --hellaswag "$hellaswag" \
    -o log_gpt2_1558M -e d48 --dtype bf16 -b 32 -t 1024 -d 1048576 -x 32000 \
    -l 6e-4 -k cosine -u 700 -q 0.1 -c 0.1 --beta2 0.95 -v 250 -m 320 -s 300000 -g 144 -n 2000 -y 1 "$@"
