#!/usr/bin/env bash
# Fine-tune GPT-2 or Llama 3.2 1B on conversations of your own, one a line: see dev/data/chats.py.
#
#     dev/recipes/fine_tune.sh gpt2 chats.jsonl
#     dev/recipes/fine_tune.sh llama chats.jsonl           # needs Llama's tokenizer.json in this folder
#     dev/recipes/fine_tune.sh gpt2 chats.jsonl -l 5e-5    # flags of the trainer, which override those below
#
# It makes the tokens and their masks, and trains for one pass over the conversations. The first
# validation is before, the last after. The weights go to log_NAME_gpt2 or log_NAME_llama, and
#
#     python train_gpt2.py -e log_NAME_gpt2 --chat --answer
#     python -m dev.llama3.train_llama3 -e log_NAME_llama --chat --answer
#
# answer a message a line. The settings are usual ones, from others' fine-tunings: neither recipe
# has been run here. dev/RESULTS.md has a small model's fine-tuning, which was.
set -euo pipefail

model=${1:-nothing} chats=${2:-nothing}
case $model in
    gpt2) checkpoint=gpt2_124M.bin id=gpt2 trainer=(train_gpt2.py) prepare=(prepro_tinyshakespeare.py) end="" ;;
    llama) checkpoint=llama3.2_1B.bin id=meta-llama/Llama-3.2-1B end=_llama
        trainer=(-m dev.llama3.train_llama3) prepare=(-m dev.llama3.tokens) ;;
    *) echo "error: found $model in place of a model; expected gpt2 or llama" >&2; exit 1 ;;
esac
if ! [ -f "$chats" ]; then
    echo "error: $chats: no such file; expected a .jsonl file of conversations after $model" >&2
    exit 1
fi
if ! [ -e "$checkpoint" ]; then
    echo "error: $checkpoint is missing; python -m dev.tools.convert $id $checkpoint downloads it" >&2
    exit 1
fi
if [ "$model" = llama ] && ! [ -e tokenizer.json ] && ! [ -e tokenizer.model ]; then
    echo "error: tokenizer.json is missing; expected Llama's here: it comes with the weights" >&2
    exit 1
fi
shift 2

name=$(basename "$chats" .jsonl)
python "${prepare[@]}" --input "$chats" --chat --row 1024 --name "$name$end"
exec python "${trainer[@]}" -e "$checkpoint" -i "data/$name$end/$name${end}_train.bin" \
    -o "log_${name}_$model" -b 4 -t 1024 -d 16384 -l 2e-5 -u 10 -q 0.1 --beta2 0.95 --shuffle 1 \
    -v 50 -m -1 -s 0 "$@"
