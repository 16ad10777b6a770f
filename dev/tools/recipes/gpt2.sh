#!/usr/bin/env bash
# Train GPT-2 on FineWeb, in one of its four sizes:
#
#     dev/tools/recipes/gpt2.sh 124M                # with the flags of llm.c's scripts/run_gpt2_124M.sh
#     dev/tools/recipes/gpt2.sh 124M --gpus 8       # on eight GPUs of this machine
#     dev/tools/recipes/gpt2.sh 1558M --dry-run     # print how much memory and time it takes, and stop
#
# Flags of train_gpt2.py may follow the size; they override those below. The log and the
# checkpoints go to log_gpt2_SIZE/. Run the same command again to resume.
#
#     size   tokens  hours on one H200  final validation loss   OpenAI's loss, HellaSwag
#     124M    10.3B         4.6                3.27                  3.4250    0.2945
#     350M    10.3B        13.2                3.06                  3.0831    0.3752
#     774M    10.3B        28.5                2.94                  3.0006    0.4320
#     1558M   33.6B       184                  2.68                  2.8313    0.4889
#
# hours   tokens divided by the speed in dev/RESULTS.md (124M at B=64, the others at B=8). 774M was
#         not measured: it is assumed to reach the FLOP/s of 350M. Evaluation comes on top.
# loss    predicted: none of these runs has been made here. llm.c's 124M ended at 3.2722 with these
#         flags; the scaling law of Hoffmann et al. (2022, D.3) puts the others 0.215, 0.333 and
#         0.597 below.
# -l      learning rates: llm.c's for 124M and 1558M, the others from Brown et al. (2020, table 2.1)
# data    python -m dev.data.fineweb --version 10B (21 GB); for 1558M 100B, about 200 GB, of which a
#         third is read. llm.c's script for 1558M uses FineWeb-Edu, so its losses do not compare.
#         python -m dev.data.hellaswag
#
# LAUNCH is the command that runs train_gpt2.py, python by default: see gpt2_124M_slurm.sh.
set -euo pipefail
cd "$(dirname "$0")/../../.."

size=${1:-nothing} d=524288 x=19560 q=0 s=20000 n=5000 version=10B
case $size in
    124M) model=d12 b=64 l=6e-4 ;;
    350M) model=d24 b=32 l=3e-4 ;;
    774M) model=d36 b=16 l=2.5e-4 ;;
    1558M) model=d48 b=32 l=6e-4 d=1048576 x=32000 q=0.1 s=300000 n=2000 version=100B ;;
    *) echo "error: found $size in place of a size; expected 124M, 350M, 774M or 1558M" >&2; exit 1 ;;
esac
shift

data=data/fineweb$version hellaswag=data/hellaswag/hellaswag_val.bin
if ! compgen -G "$data/fineweb_train_*.bin" > /dev/null || ! [ -e "$data/fineweb_val_000000.bin" ]; then
    echo "error: $data has no token files; python -m dev.data.fineweb --version $version makes them" >&2
    exit 1
fi
if ! [ -e "$hellaswag" ]; then
    echo "error: $hellaswag is missing; python -m dev.data.hellaswag makes it" >&2
    exit 1
fi
read -ra launch <<< "${LAUNCH:-python}"
exec "${launch[@]}" train_gpt2.py -i "$data/fineweb_train_*.bin" -j "$data/fineweb_val_000000.bin" \
    --hellaswag "$hellaswag" -o "log_gpt2_$size" -e "$model" --dtype bf16 -b "$b" -t 1024 \
    -d "$d" -x "$x" -l "$l" -k cosine -u 700 -q "$q" -c 0.1 --beta2 0.95 \
    -v 250 -m "$((160 * 64 / b))" -s "$s" -g 144 -n "$n" -y 1 "$@"
