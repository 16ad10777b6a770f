#!/usr/bin/env bash
# Export a model that answers to the programs that people load it into, and ask each the same.
#
#     dev/tools/recipes/export.sh log_chats_gpt2 "I am Bob." "Who am I?"
#
# The first argument is the folder of a run on conversations (fine_tune.sh; Llama 3's tokenizer.json
# must be in this folder), the others are a user's turns. It writes
#
#     NAME_hf              for transformers (pip install transformers torch)
#     NAME.gguf            for llama.cpp, here as a wheel (pip install xllamacpp)
#     NAME.Modelfile       with that for Ollama: ollama create NAME -f NAME.Modelfile
#
# Then it asks --chat, transformers and llama.cpp, all greedily and in fp32. A program that is not
# installed is skipped, and an answer unlike --chat's is an error. It never ran with Ollama.
set -euo pipefail

run=${1:-nothing}
if ! [ -d "$run" ] || [ $# -lt 2 ]; then
    echo "error: $run: expected a run's folder, and then what a user says" >&2
    exit 1
fi
shift
name=$(basename "$run")
rm -rf "${name}_hf"
python -m dev.tools.convert "$run" "${name}_hf" --dtype fp32 --chat
python -m dev.tools.convert "$run" "$name.gguf" --dtype fp32 --chat
python - "$name" "$run" "$@" <<'END'
import subprocess, sys
_, name, run, *turns = sys.argv
llama = '"model_type": "llama"' in open(f"{name}_hf/config.json").read()
trainer = ["-m", "dev.llama3.train_llama3"] if llama else ["train_gpt2.py"]
own = subprocess.run(
    [sys.executable, *trainer, *f"-e {run} --chat --answer --temperature 0 -g 64 --device cpu".split()],
    input="\n".join(turns), capture_output=True, text=True)
if own.returncode:
    sys.exit(f"error: --chat failed: {own.stderr}")
if "oldest turns forgotten" in own.stderr:
    sys.exit("error: expected turns that fit into T: --chat forgot the oldest")


def transformers():
    from transformers import logging, pipeline
    logging.disable_progress_bar()
    model = pipeline("text-generation", f"{name}_hf")
    return lambda said: model(said, max_new_tokens=64, do_sample=False)[0]["generated_text"][-1]["content"]


def llama_cpp():
    from xllamacpp import CommonParams, Server
    params = CommonParams()
    params.model.path, params.n_parallel, params.warmup, params.verbosity = f"{name}.gguf", 1, False, 0
    server = Server(params)
    return lambda said: server.handle_chat_completions(dict(
        messages=said, max_tokens=64, temperature=0))["choices"][0]["message"]["content"]


wish, differs = own.stdout, []
print(f"--chat answers:\n{wish}", end="")
for program in (transformers, llama_cpp):
    try:
        answer, said = program(), []
    except ModuleNotFoundError as e:
        print(f"{program.__name__}: is not here ({e})")
        continue
    for text in turns:
        said += [dict(role="user", content=text)]
        said += [dict(role="assistant", content=answer(said))]
    found = "".join(f"{each['content']}\n" for each in said[1::2])
    print(f"{program.__name__}: {'the same' if found == wish else f'differs:{chr(10)}{found}'}")
    differs += [program.__name__] if found != wish else []
sys.exit(f"error: {', '.join(differs)}: answers differ from --chat's" if differs else 0)
END
