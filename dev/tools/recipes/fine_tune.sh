#!/usr/bin/env bash
# Fine-tune GPT-2 or Llama 3.2 1B on conversations of your own, one a line: see dev/data/chats.py.
#
#     dev/tools/recipes/fine_tune.sh gpt2 chats.jsonl
#     dev/tools/recipes/fine_tune.sh llama chats.jsonl           # needs Llama's tokenizer.json in this folder
#     dev/tools/recipes/fine_tune.sh gpt2 chats.jsonl -l 5e-5    # flags of the trainer, which override those below
#     ROW=128 dev/tools/recipes/fine_tune.sh llama:log_text chats.jsonl -d 1024 -l 1e-3    # from a run of yours
#
# It makes the tokens and their masks, in rows of ROW tokens, by default 1024, and trains for one
# pass over them. The first tenth of the file is held out. At the end it prints how the model
# answered the first message before and after, and the loss of the held-out answers. -y 1 resumes a
# run that was stopped. The weights go to log_NAME_gpt2 or log_NAME_llama, and
#
#     python train_gpt2.py -e log_NAME_gpt2 --chat --answer
#     python -m dev.llama3.train_llama3 -e log_NAME_llama --chat --answer
#
# answer a message a line. The settings are usual ones, from others' fine-tunings. dev/RESULTS.md,
# "Fine-tuning", has what was run: small models of our own, by the last of the commands above, with
# losses and answers. GPT-2's and Llama's weights were not at hand.
set -euo pipefail

model=${1:-nothing} chats=${2:-nothing} row=${ROW:-1024}
kind=${model%%:*} start=
[ "$kind" = "$model" ] || start=${model#*:}
case $kind in
    gpt2) checkpoint=gpt2_124M.bin id=gpt2 end="" trainer=(train_gpt2.py)
        prepare=(prepro_tinyshakespeare.py) ;;
    llama) checkpoint=llama3.2_1B.bin id=meta-llama/Llama-3.2-1B end=_llama
        trainer=(-m dev.llama3.train_llama3) prepare=(-m dev.llama3.tokens) ;;
    *) echo "error: found $model in place of a model; expected gpt2 or llama, or one of these and" \
            "a checkpoint: llama:log_text" >&2
        exit 1 ;;
esac
if ! [ -f "$chats" ]; then
    echo "error: $chats: no such file; expected a .jsonl file of conversations after $model" >&2
    exit 1
fi
words=${start%/}
[ -d "$words" ] || words=$(dirname "$words")
if [ -n "$start" ]; then
    if ! [ -e "$start" ]; then
        echo "error: $start is missing; expected a checkpoint or a run's folder after $kind:" >&2
        exit 1
    fi
    checkpoint=$start
    if [ -e "$words/tokenizer.bin" ]; then  # the run has words of its own
        prepare=(prepro_tinyshakespeare.py --vocab "$words/tokenizer.bin") id=
    fi
elif ! [ -e "$checkpoint" ]; then
    echo "error: $checkpoint is missing; python -m dev.tools.convert $id $checkpoint downloads it" >&2
    exit 1
fi
if [ "$kind" = llama ] && [ -n "$id" ] && ! [ -e tokenizer.json ] && ! [ -e tokenizer.model ]; then
    echo "error: tokenizer.json is missing; expected Llama's here: it comes with the weights" >&2
    exit 1
fi
shift 2

name=$(basename "$chats" .jsonl)$end
log=log_$(basename "$chats" .jsonl)_$kind
if [ -e "$log" ] && [[ " $* " != *" -y "* ]]; then
    echo "error: $log holds an earlier run; expected -y 1, which goes on from it, or no such folder" >&2
    exit 1
fi
machine=()  # what answers need of the flags that are given
for ((i = 1; i < $#; i++)); do
    case ${!i} in
        --device | --dtype) next=$((i + 1)) machine+=("${!i}" "${!next}") ;;
    esac
done
answers() {  # three answers of the model $1 to the first message
    python "${trainer[@]}" -e "$1" --sample="$message" --answer --samples 3 -g 64 \
        --temperature 0.8 --seed 1 ${machine[@]+"${machine[@]}"}
}

python "${prepare[@]}" --input "$chats" --chat --row "$row" --name "$name"
message=$(python - "$chats" <<'END'
import pathlib, sys
from dev.data.chats import read_conversations
first = dict(reversed(read_conversations([pathlib.Path(sys.argv[1])])[0]))
print(first.get("user", "Hello."))
END
)
before=$(answers "$checkpoint")
python "${trainer[@]}" -e "$checkpoint" -i "data/$name/${name}_train.bin" -o "$log" -b 4 -t "$row" \
    -d 16384 -l 2e-5 -u 10 -q 0.1 --beta2 0.95 --shuffle 1 -v 50 -m -1 -s 0 "$@"
printf '\n==== before\n%s\n\n==== after\n' "$before"
answers "$log"
sed -n 's/^s:\([0-9]*\) tel:/loss of the held-out answers after step \1: /p' "$log/main.log" |
    sed -n '1p;$p'
