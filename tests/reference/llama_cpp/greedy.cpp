// Greedy text of llama.cpp with the two largest logits of every step, as JSON.
//
//   greedy MODEL STEPS [--plain] [--cache-f32] < prompts
//
// Standard input holds prompts, each ended by a NUL byte: `t` and a text (special
// tokens in it are parsed), or `i` and token ids separated by spaces. Steps after
// an end-of-text token go on, so that every run has STEPS tokens. --plain turns
// the repacked and AMX weight formats off; --cache-f32 keeps keys and values f32.
// One thread (a busy machine makes barriers dear), the whole prompt in one batch.

#include "llama.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

static void quiet(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

[[noreturn]] static void die(const std::string & why) {
    fprintf(stderr, "greedy: %s\n", why.c_str());
    exit(1);
}

static std::vector<llama_token> tokens_of(const llama_vocab * vocab, const std::string & prompt) {
    std::vector<llama_token> ids;
    const std::string body = prompt.substr(1);
    if (prompt[0] == 'i') {
        std::istringstream in(body);
        for (int id; in >> id;) ids.push_back(id);
    } else {
        ids.resize(body.size() + 8);
        const int n = llama_tokenize(vocab, body.data(), body.size(), ids.data(), ids.size(), true, true);
        if (n < 0) die("cannot tokenize a prompt");
        ids.resize(n);
    }
    if (ids.empty()) die("a prompt has no tokens");
    return ids;
}

static void print_ids(const char * key, const std::vector<llama_token> & ids) {
    printf("\"%s\": [", key);
    for (size_t i = 0; i < ids.size(); i++) printf("%s%d", i ? ", " : "", ids[i]);
    printf("]");
}

int main(int argc, char ** argv) {
    if (argc < 3) die("usage: greedy MODEL STEPS [--plain] [--cache-f32] < prompts");
    const int steps = atoi(argv[2]);
    bool plain = false, cache_f32 = false;
    for (int i = 3; i < argc; i++) {
        if (!strcmp(argv[i], "--plain")) plain = true;
        else if (!strcmp(argv[i], "--cache-f32")) cache_f32 = true;
        else die(std::string("unknown option ") + argv[i]);
    }
    llama_log_set(quiet, nullptr);
    llama_backend_init();

    llama_model_params mparams = llama_model_default_params();
    mparams.use_extra_bufts = !plain;
    llama_model * model = llama_model_load_from_file(argv[1], mparams);
    if (!model) die(std::string("cannot load ") + argv[1]);
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const int n_vocab = llama_vocab_n_tokens(vocab);
    const int threads = 1;

    std::string input((std::istreambuf_iterator<char>(std::cin)), std::istreambuf_iterator<char>());
    printf("[");
    const char * separator = "\n";
    for (size_t at = 0; at < input.size();) {
        const std::string prompt = input.substr(at, input.find('\0', at) - at);
        at += prompt.size() + 1;
        std::vector<llama_token> ids = tokens_of(vocab, prompt);

        llama_context_params cparams = llama_context_default_params();
        cparams.n_ctx = ids.size() + steps;
        cparams.n_batch = cparams.n_ubatch = std::max<size_t>(ids.size(), 32);
        cparams.n_threads = cparams.n_threads_batch = threads;
        if (cache_f32) cparams.type_k = cparams.type_v = GGML_TYPE_F32;
        llama_context * ctx = llama_init_from_model(model, cparams);
        if (!ctx) die("cannot make a context");

        std::vector<llama_token> prompt_ids = ids, greedy;
        std::string text, top2;
        for (int step = 0; step < steps; step++) {
            llama_batch batch = llama_batch_get_one(ids.data(), ids.size());
            if (llama_decode(ctx, batch)) die("decode failed");
            const float * logits = llama_get_logits_ith(ctx, -1);
            int a = 0, b = 1;
            if (logits[b] > logits[a]) std::swap(a, b);
            for (int i = 2; i < n_vocab; i++) {
                if (logits[i] > logits[a]) { b = a; a = i; }
                else if (logits[i] > logits[b]) b = i;
            }
            char line[128];
            snprintf(line, sizeof line, "%s[%d, %.5f, %d, %.5f]", step ? ", " : "", a, logits[a], b, logits[b]);
            top2 += line;
            greedy.push_back(a);
            ids = {a};
        }
        printf("%s{", separator);
        print_ids("prompt", prompt_ids);
        printf(",\n ");
        print_ids("greedy", greedy);
        printf(",\n \"top2\": [%s]}", top2.c_str());
        separator = ",\n";
        llama_free(ctx);
    }
    printf("\n]\n");
    llama_model_free(model);
    return 0;
}
