// What llama.cpp pays to compute n rows in one pass with logits for all of them,
// after a context of 64 tokens: the cost of verifying n drafted tokens.
//
//   rows MODEL [ROUNDS]      prints {"n": median milliseconds, ...} as JSON

#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

static void quiet(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

int main(int argc, char ** argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: rows MODEL [ROUNDS]\n");
        return 1;
    }
    const int rounds = argc > 2 ? atoi(argv[2]) : 9, context = 64, most = 32;
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        fprintf(stderr, "rows: cannot load %s\n", argv[1]);
        return 1;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_batch = params.n_ubatch = 128;
    params.n_threads = params.n_threads_batch = std::thread::hardware_concurrency();
    llama_context * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        fprintf(stderr, "rows: cannot make a context\n");
        return 1;
    }
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(context + most, 0, 1);
    auto decode = [&](int first, int count) {
        batch.n_tokens = count;
        for (int i = 0; i < count; i++) {
            batch.token[i] = (first + i) * 37 % std::min(vocab, 300);
            batch.pos[i] = first + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        if (llama_decode(ctx, batch)) {
            fprintf(stderr, "rows: decode failed\n");
            exit(1);
        }
        llama_synchronize(ctx);
    };
    const char * separator = "{";
    for (int n : {1, 2, 4, 8, 16, 32}) {
        std::vector<double> times;
        for (int round = 0; round <= rounds; round++) {
            // Recurrent states cannot be cut back, so the context is filled anew.
            llama_memory_clear(llama_get_memory(ctx), true);
            decode(0, context);
            const auto start = std::chrono::steady_clock::now();
            decode(context, n);
            const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
            if (round) times.push_back(took.count());  // the first one warms up
        }
        std::sort(times.begin(), times.end());
        printf("%s\"%d\": %.2f", separator, n, times[times.size() / 2]);
        fflush(stdout);
        separator = ", ";
    }
    printf("}\n");
    llama_batch_free(batch);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
