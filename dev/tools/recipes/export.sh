#!/usr/bin/env bash
# Export a model that answers to the three programs that people load it into, and ask each the same.
#
#     dev/tools/recipes/export.sh log_chats_gpt2 "I am Bob." "Who am I?"
#     dev/tools/recipes/export.sh log_chats_llama "Who wrote Hamlet?"        # needs Llama's tokenizer.json in this folder
#
# The first argument is the folder of a run on conversations (fine_tune.sh), the others are the turns
# of one. All answer greedily, by at most 64 tokens. It writes
#
#     NAME_hf              for transformers (pip install transformers torch)
#     NAME.gguf            for llama.cpp, here as a wheel (pip install xllamacpp)
#     NAME.Modelfile       with that for Ollama, which is asked if it runs on this machine
#
# in fp32, in which --chat answers on a CPU: in bf16 answers may differ where two words are near. A
# program that is not here is left out, and one that answers otherwise ends this with an error.
set -euo pipefail

run=${1:-nothing}
if ! [ -d "$run" ] || [ $# -lt 2 ]; then
    echo "error: $run: expected a run's folder, and then what a user says" >&2
    exit 1
fi
shift
name=$(basename "$run")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "${name}_hf"
python -m dev.tools.convert "$run" "${name}_hf" --dtype fp32 --chat
python -m dev.tools.convert "$run" "$name.gguf" --dtype fp32 --chat
trainer=(train_gpt2.py)
if grep -q '"model_type": "llama"' "${name}_hf/config.json"; then
    trainer=(-m dev.llama3.train_llama3)
fi
printf '%s\n' "$@" | python "${trainer[@]}" -e "$run" --chat --answer --temperature 0 -g 64 --device cpu \
    > "$work/answers" 2> "$work/notes"
if grep -q '^(forgot' "$work/notes"; then
    echo "error: the turns have more tokens than the model sees (T): expected fewer, or shorter ones" >&2
    exit 1
fi
python - "$name" "$work/answers" "$@" <<'END'
import json, os, pathlib, shutil, subprocess, sys, urllib.request
from importlib.util import find_spec
_, name, answers, *turns = sys.argv


def transformers():
    from transformers import logging, pipeline
    logging.disable_progress_bar()
    model = pipeline("text-generation", f"{name}_hf")
    return lambda said: model(said, max_new_tokens=64, do_sample=False)[0]["generated_text"][-1]["content"]


def llama_cpp():
    from xllamacpp import CommonParams, Server
    params = CommonParams()
    params.model.path, params.n_parallel, params.warmup = f"{name}.gguf", 1, False
    params.verbosity = 0
    server = Server(params)
    return lambda said: server.handle_chat_completions(dict(
        messages=said, max_tokens=64, temperature=0))["choices"][0]["message"]["content"]


def ollama():
    subprocess.run(["ollama", "create", name, "-f", f"{name}.Modelfile"], check=True)
    def answer(said):
        asked = dict(model=name, messages=said, stream=False, options=dict(temperature=0, num_predict=64))
        host = os.environ.get("OLLAMA_HOST", "http://127.0.0.1:11434")
        with urllib.request.urlopen(f"{host}/api/chat", json.dumps(asked).encode()) as found:
            return json.load(found)["message"]["content"]
    return answer


wish = pathlib.Path(answers).read_text()
print(f"--chat answers:\n{wish}", end="")
differs = []
for program, here, install in ((transformers, find_spec("transformers"), "pip install transformers torch"),
                               (llama_cpp, find_spec("xllamacpp"), "pip install xllamacpp"),
                               (ollama, shutil.which("ollama"), "ollama.com")):
    if not here:
        print(f"{program.__name__}: is not here ({install})")
        continue
    answer, said = program(), []
    for text in turns:
        said += [dict(role="user", content=text)]
        said += [dict(role="assistant", content=answer(said))]
    found = "".join(f"{each['content']}\n" for each in said[1::2])
    print(f"{program.__name__}: {'the same' if found == wish else f'differs:{chr(10)}{found}'}")
    differs += [program.__name__] if found != wish else []
sys.exit(f"error: {', '.join(differs)}: answers differ from --chat's" if differs else 0)
END
