// Plain read bandwidth: every core sums its share of a 2 GiB buffer.
//
//   read_bandwidth [ROUNDS]      prints the median and the best in GB/s, as JSON

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <thread>
#include <vector>

static const size_t BYTES = size_t(2) << 30;

static uint64_t sum(const uint64_t * data, size_t count) {
    uint64_t lanes[32] = {};  // independent sums, so that adding never limits
    for (size_t i = 0; i < count; i += 32)
        for (size_t lane = 0; lane < 32; lane++) lanes[lane] += data[i + lane];
    uint64_t total = 0;
    for (uint64_t lane : lanes) total += lane;
    return total;
}

int main(int argc, char ** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 9;
    const size_t threads = std::max(1u, std::thread::hardware_concurrency());
    const size_t align = size_t(2) << 20;
    auto * data = static_cast<uint64_t *>(aligned_alloc(align, BYTES));
    if (!data || rounds < 1) {
        fprintf(stderr, "read_bandwidth: no memory, or rounds < 1\n");
        return 1;
    }
    madvise(data, BYTES, MADV_HUGEPAGE);
    const size_t words = BYTES / 8, share = words / threads / 32 * 32;
    for (size_t i = 0; i < words; i++) data[i] = i;
    std::vector<double> rates;
    volatile uint64_t kept = 0;
    for (int round = 0; round < rounds; round++) {
        std::vector<std::thread> pool;
        std::vector<uint64_t> sums(threads * 8);
        const auto start = std::chrono::steady_clock::now();
        for (size_t t = 0; t < threads; t++)
            pool.emplace_back([&, t] { sums[t * 8] = sum(data + t * share, share); });
        for (auto & thread : pool) thread.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        for (uint64_t s : sums) kept = kept + s;
        rates.push_back(share * threads * 8 / took.count() / 1e9);
    }
    std::sort(rates.begin(), rates.end());
    printf("{\"threads\": %zu, \"median_gb_per_s\": %.1f, \"best_gb_per_s\": %.1f}\n", threads,
           rates[rates.size() / 2], rates.back());
    return 0;
}
