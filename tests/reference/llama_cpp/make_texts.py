#!/usr/bin/env python3
"""What llama.cpp answers greedily: NAME.json for each real GGUF file.

    python tests/reference/llama_cpp/make_texts.py LLAMA_CPP MODELS_DIR [NAME ...]

LLAMA_CPP is the folder of scripts/build-llama-cpp, MODELS_DIR holds the files of
scripts/fetch-model. Needs the packages gguf and jinja2, and g++. The prompts of
prompts.json are rendered with the file's own chat template. Each text is made
twice, with the weight formats that llama.cpp repacks to on this machine (AMX where
there is any) and without (`plain`). The two quantise activations differently, so
where their texts part (`plain_differs_at`) shows what counts as a near-tie.
"""

import json
import os
import subprocess
import sys

import jinja2
import jinja2.sandbox

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 64
FILES = {
    "smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
}


def compile_greedy(llama_cpp):
    libraries = os.path.join(llama_cpp, "build", "bin")
    program = os.path.join(llama_cpp, "greedy")
    subprocess.run(
        ["g++", "-O2", "-std=c++17", os.path.join(HERE, "greedy.cpp"), "-o", program,
         "-I", os.path.join(llama_cpp, "src", "include"),
         "-I", os.path.join(llama_cpp, "src", "ggml", "include"),
         "-L", libraries, "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"],
        check=True)
    return program


def greedy(program, model, prompts, steps, *options):
    """Run greedy.cpp; prompts are texts or lists of token ids."""
    packed = b"".join(
        (b"t" + p.encode() if isinstance(p, str) else b"i" + " ".join(map(str, p)).encode()) + b"\0"
        for p in prompts)
    done = subprocess.run([program, model, str(steps), *options], input=packed, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def chat_template(path):
    from gguf import GGUFReader
    fields = GGUFReader(path).fields

    def text(key):
        return bytes(fields[key].parts[fields[key].data[0]]).decode()

    def token(key):
        if key not in fields:
            return ""
        ids = fields["tokenizer.ggml.tokens"]
        return bytes(ids.parts[ids.data[int(fields[key].parts[-1][0])]]).decode()

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(text("tokenizer.chat_template"))
    return lambda messages: template.render(
        messages=messages, add_generation_prompt=True,
        bos_token=token("tokenizer.ggml.bos_token_id"), eos_token=token("tokenizer.ggml.eos_token_id"))


def main(llama_cpp, models, names):
    program = compile_greedy(llama_cpp)
    with open(os.path.join(HERE, "prompts.json"), encoding="utf-8") as file:
        prompts = json.load(file)
    for name in names:
        file = FILES[name]
        path = os.path.join(models, file)
        render = chat_template(path)
        texts = [render(p["messages"]) for p in prompts]
        answers = greedy(program, path, texts, STEPS)
        plain = greedy(program, path, [a["prompt"] for a in answers], STEPS, "--plain")
        for prompt, text, answer, other in zip(prompts, texts, answers, plain):
            same = [a == b for a, b in zip(answer["greedy"], other["greedy"])]
            answer["plain_differs_at"] = same.index(False) if False in same else None
            answer["plain"] = {"greedy": other["greedy"], "top2": other["top2"]}
            at = answer["plain_differs_at"]
            gaps = "" if at is None else f" (gap {answer['top2'][at][1] - answer['top2'][at][3]:.3f} there)"
            print(f"{name} {prompt['name']}: {len(answer['prompt'])} tokens, plain differs at {at}{gaps}", flush=True)
            answer.update(name=prompt["name"], rendered=text)
        with open(os.path.join(HERE, f"{name}.json"), "w", encoding="utf-8") as out:
            out.write('{"file": %s, "steps": %d, "runs": [\n' % (json.dumps(file), STEPS))
            out.write(",\n".join(json.dumps(a, ensure_ascii=False) for a in answers))
            out.write("\n]}\n")


if __name__ == "__main__":
    if len(sys.argv) < 3 or not set(sys.argv[3:]) <= set(FILES):
        sys.exit(__doc__.split("\n\n")[1].strip())
    main(sys.argv[1], sys.argv[2], sys.argv[3:] or FILES)
