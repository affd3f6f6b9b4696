// What surrounds the layers of a step: its packed buffer, the embedding, the likeliest tokens. And whole steps,
// recorded.
#include "pool.h"
#include "simd.h"

#include <algorithm>

// See kernels/data/layout.py.
struct Step {
    const int32_t* packed;
    int64_t *records, *input_ids, *slot_mapping, *token_index, *rows, *seed, *next_position;
    int32_t *tables, *positions, *context_lens, *top_k;
    float *temperature, *top_p, *min_p;
    int64_t segment, seqs, tokens, block_size, groups, num_rows, max_blocks, slot_stride;
};

namespace {

enum Column { NUM_COMPUTED, LAST_TOKEN, SEED, TOP_K, TEMPERATURE, TOP_P, MIN_P, COLUMNS = 8 };
constexpr int SHIFT_BITS = 32;

inline float as_float(int64_t column) { return load<float>(&column); }

void prepare(const Step& s) {
    const int32_t *rows = s.packed, *starts = rows + s.segment, *ids = s.packed + (2 + 2 * s.groups) * s.segment,
                  *updates = ids + s.tokens;
    for (int64_t i = 0; i < s.seqs; ++i) {
        const int64_t row = rows[i], first = starts[i], count = starts[i + 1] - first;
        const bool real = row < s.num_rows - 1;
        int64_t* record = s.records + row * COLUMNS;
        const int64_t computed = real ? record[NUM_COMPUTED] : 0,
                      newest = record[LAST_TOKEN] > 0 ? record[LAST_TOKEN] : 0;
        const int64_t shift = real ? record[TOP_K] >> SHIFT_BITS : 0;
        for (int64_t t = first; t < first + count; ++t) {
            s.input_ids[t] = ids[t] >= 0 ? ids[t] : newest;
            s.positions[t] = int32_t(computed + t - first + shift);
        }
        for (int64_t g = 0; g < s.groups; ++g) {
            const int32_t *start = rows + (2 + 2 * g) * s.segment, *at = start + s.segment;
            int32_t* table = s.tables + (g * s.num_rows + row) * s.max_blocks;
            for (int32_t u = start[i]; u < start[i + 1]; ++u) table[u - start[i] + at[i]] = updates[u];
            for (int64_t t = first; t < first + count; ++t) {
                const int64_t position = computed + t - first;
                s.slot_mapping[g * s.slot_stride + t] =
                    real ? int64_t(table[position / s.block_size]) * s.block_size + position % s.block_size : -1;
            }
        }
        if (real) record[NUM_COMPUTED] = computed + count;
        s.context_lens[i] = int32_t(real ? computed + count : 0);
        s.token_index[i] = first + count - 1;
        s.next_position[i] = real ? computed + count : 0;
        s.rows[i] = row;
        s.temperature[i] = as_float(record[TEMPERATURE]);
        s.top_p[i] = as_float(record[TOP_P]);
        s.min_p[i] = as_float(record[MIN_P]);
        s.top_k[i] = int32_t(record[TOP_K]);
        s.seed[i] = record[SEED];
    }
}

}  // namespace

extern "C" void quire_prepare_step(const Step* s) { prepare(*s); }

struct Embedding {
    const int64_t* ids;
    const char* table;
    char* out;
    int64_t tokens, row_bytes, first, rows;  // the table has the ids [first, first + rows); others give zeros
};

extern "C" void quire_embedding(const Embedding* e) {
    constexpr int64_t PIECE = 64;
    pool.run((e->tokens + PIECE - 1) / PIECE, [&](int64_t piece) {
        for (int64_t t = piece * PIECE; t < e->tokens && t < (piece + 1) * PIECE; ++t) {
            const int64_t row = e->ids[t] - e->first;
            char* out = e->out + t * e->row_bytes;
            if (row >= 0 && row < e->rows) std::memcpy(out, e->table + row * e->row_bytes, e->row_bytes);
            else std::memset(out, 0, e->row_bytes);
        }
    });
}

struct GreedySample {
    const void* logits;  // [rows, n]
    int64_t* out;        // [rows]
    int64_t rows, n, stride;
    int32_t is_bf16, not_finite, nothing_allowed;
};

namespace {

// The lowest index of the highest logit; a row that holds NaN or +inf, or nothing but -inf, gets a mark instead.
template <class T> int64_t greedy_sample(const GreedySample& a, const T* row) {
    Floats best = all(-INFINITY), faulty{};
    Ints at{}, index;
    for (int i = 0; i < LANES; ++i) index[i] = i;
    for (int64_t i = 0; i < a.n; i += LANES, index += LANES) {
        Floats v = i + LANES <= a.n ? load_lanes(row + i) : load_some(row + i, int(a.n - i));
        if (i + LANES > a.n) v = index < int32_t(a.n) ? v : all(-INFINITY);
        faulty = v < INFINITY ? faulty : all(1.0f);
        at = v > best ? index : at;
        best = larger(v, best);
    }
    if (sum(faulty)) return a.not_finite;
    const float highest = largest(best);
    if (highest == -INFINITY) return a.nothing_allowed;
    int64_t lowest = a.n;
    for (int i = 0; i < LANES; ++i)
        if (best[i] == highest && at[i] < lowest) lowest = at[i];
    return lowest;
}

}  // namespace

extern "C" void quire_greedy_sample(const GreedySample* a) {
    pool.run(a->rows, [&](int64_t r) {
        a->out[r] = a->is_bf16 ? greedy_sample(*a, (const bf16*)a->logits + r * a->stride)
                               : greedy_sample(*a, (const float*)a->logits + r * a->stride);
    });
}

struct TokenStore {
    int64_t *newest, stride;  // elements from a row to the next
    const int64_t *rows, *tokens;
    int64_t n;
};

extern "C" void quire_store_tokens(const TokenStore* a) {
    for (int64_t i = 0; i < a->n; ++i) a->newest[a->rows[i] * a->stride] = a->tokens[i];
}

struct Call {
    void (*function)(const void*);
    const void* arguments;
};

extern "C" void quire_replay(const Call* calls, int64_t count) {
    for (int64_t i = 0; i < count; ++i) calls[i].function(calls[i].arguments);
}
