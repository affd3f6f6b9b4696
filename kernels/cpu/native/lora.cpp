// LoRA adapters of a step's tokens: kernels.reference.{adapter_slots,lora_add}. A few tokens of an adapter at a time.
#include <algorithm>
#include <vector>

#include "pool.h"
#include "simd.h"

struct AdapterSlots {
    const int32_t* packed;   // see kernels/data/layout.py
    const int64_t* records;  // [rows, columns]
    int32_t* out;            // [tokens]
    int64_t segment, seqs, tokens, columns, column;
};

// Tokens behind the last sequence are those of the last one.
extern "C" void quire_adapter_slots(const AdapterSlots* a) {
    for (int64_t t = 0, i = 0; t < a->tokens; ++t) {
        while (i + 1 < a->seqs && t >= a->packed[a->segment + i + 1]) ++i;
        a->out[t] = int32_t(a->records[a->packed[i] * a->columns + a->column]) - 1;
    }
}

struct Lora {
    void* y;                  // [tokens, out]
    const void *x, *down, *up;  // [tokens, in]; of slots [ranks, in] and [out, rank]
    const float *factor, *shift;  // of slots [out]
    const int32_t *slots, *blocks;  // [tokens], -1: none; [num_blocks, 3]: first row, end and number of its A
    float* inner;                   // [tokens, ranks]: x · downᵀ
    int64_t tokens, in, out, ranks, rank, num_blocks, x_stride, down_stride, up_stride, floats_stride;  // of slots
    int32_t is_bf16;
};

namespace {

constexpr int64_t FEW = 8;    // rows of A that are a piece of work
constexpr int64_t MOST = 4;   // tokens of a group: an adapter's matrices are read once for them
constexpr int64_t ROWS = LANES > 8 ? 4 : 2;  // of A whose sums with a group's tokens fit in registers

struct Group {
    int64_t slot;
    int count;
    int32_t tokens[MOST];
};

// Tokens by adapter. A token's sums are the same in each group.
std::vector<Group> groups_of(const Lora& a) {
    std::vector<int32_t> tokens;
    for (int64_t t = 0; t < a.tokens; ++t)
        if (a.slots[t] >= 0) tokens.push_back(int32_t(t));
    std::stable_sort(tokens.begin(), tokens.end(), [&](int32_t i, int32_t j) { return a.slots[i] < a.slots[j]; });
    std::vector<Group> groups;
    for (int32_t token : tokens) {
        const int64_t slot = a.slots[token];
        const bool goes_on = !groups.empty() && groups.back().slot == slot && groups.back().count < MOST;
        if (!goes_on) groups.push_back({slot, 0, {}});
        Group& last = groups.back();
        last.tokens[last.count++] = token;
    }
    return groups;
}

template <int COUNT, class T> void shrink(const Lora& a, const Group& group, int64_t first) {
    const int64_t end = first + FEW < a.ranks ? first + FEW : a.ranks;
    const T* down = (const T*)a.down + group.slot * a.down_stride;
    const T* x[COUNT];
    for (int t = 0; t < COUNT; ++t) x[t] = (const T*)a.x + group.tokens[t] * a.x_stride;
    for (int64_t row = first; row < end; row += ROWS) {
        Floats totals[ROWS][COUNT] = {};  // sums that do not wait for each other
        const int rows = int(end - row < ROWS ? end - row : ROWS);
        int64_t k = 0;
        if (rows == ROWS) {
            for (; k + LANES <= a.in; k += LANES) {
                Floats own[COUNT];
                each<COUNT>([&](auto t) { own[t] = load_lanes(x[t] + k); });
                each<ROWS>([&](auto r) {
                    const Floats weights = load_lanes(down + (row + r) * a.in + k);
                    each<COUNT>([&](auto t) { totals[r][t] += own[t] * weights; });
                });
            }
        }
        for (; k < a.in; k += LANES) {
            const int n = int(a.in - k < LANES ? a.in - k : LANES);
            for (int r = 0; r < rows; ++r) {
                const Floats weights = load_up_to(down + (row + r) * a.in + k, n);
                for (int t = 0; t < COUNT; ++t) totals[r][t] += load_up_to(x[t] + k, n) * weights;
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int t = 0; t < COUNT; ++t) a.inner[group.tokens[t] * a.ranks + row + r] = sum(totals[r][t]);
    }
}

// Rows of B as the lanes of its columns.
__attribute__((always_inline)) inline void transpose(Floats (&v)[LANES]) {
    each<log2(LANES)>([&](auto step) {
        constexpr int bit = 1 << step;
        Ints low, high;
        for (int i = 0; i < LANES; ++i) {
            low[i] = i & bit ? LANES + (i ^ bit) : i;
            high[i] = i & bit ? LANES + i : i | bit;
        }
        each<LANES / 2>([&](auto pair) {
            constexpr int first = pair / bit * 2 * bit + pair % bit;
            const Floats other = v[first + bit];
            v[first + bit] = pick(v[first], other, high);
            v[first] = pick(v[first], other, low);
        });
    });
}

template <int COUNT, class T> void expand(const Lora& a, const Group& group, int64_t part, int64_t first, int64_t end) {
    const T* up = (const T*)a.up + group.slot * a.up_stride;
    const float *factors = a.factor + group.slot * a.floats_stride, *shifts = a.shift + group.slot * a.floats_stride;
    const float* inner[COUNT];
    T* y[COUNT];
    for (int t = 0; t < COUNT; ++t) {
        inner[t] = a.inner + group.tokens[t] * a.ranks + part * a.rank;
        y[t] = (T*)a.y + group.tokens[t] * a.out;
    }
    for (int64_t row = first; row < end; row += LANES) {
        const int n = int(end - row < LANES ? end - row : LANES);
        Floats totals[COUNT] = {};
        for (int64_t r = 0; r < a.rank; r += LANES) {
            const int some = int(a.rank - r < LANES ? a.rank - r : LANES);
            const T* at = up + row * a.rank + r;
            Floats weights[LANES] = {};
            if (n == LANES && some == LANES) {
                each<LANES>([&](auto i) { weights[i] = load_lanes(at + i * a.rank); });
            } else {
                for (int i = 0; i < n; ++i) weights[i] = load_up_to(at + i * a.rank, some);
            }
            transpose(weights);
            for (int i = 0; i < some; ++i)
                each<COUNT>([&](auto t) { totals[t] += weights[i] * inner[t][r + i]; });
        }
        const Floats factor = load_up_to(factors + row, n), shift = load_up_to(shifts + row, n);
        each<COUNT>([&](auto t) {
            store_up_to(y[t] + row, load_up_to(y[t] + row, n) * factor + (shift + totals[t]), n);
        });
    }
}

// work(COUNT) with a group's number of tokens as a constant.
template <class Work> void with_count(const Group& group, const Work& work) {
    each<MOST>([&](auto i) {
        if (group.count == i + 1) work(std::integral_constant<int, i + 1>{});
    });
}

template <class T> void add(const Lora& a) {
    const std::vector<Group> groups = groups_of(a);
    const int64_t pieces = (a.ranks + FEW - 1) / FEW;
    pool.run(int64_t(groups.size()) * pieces, [&](int64_t i) {
        const Group& group = groups[i / pieces];
        with_count(group, [&](auto count) { shrink<count, T>(a, group, i % pieces * FEW); });
    });
    pool.run(int64_t(groups.size()) * a.num_blocks, [&](int64_t i) {
        const Group& group = groups[i / a.num_blocks];
        const int32_t* block = a.blocks + 3 * (i % a.num_blocks);
        with_count(group, [&](auto count) { expand<count, T>(a, group, block[2], block[0], block[1]); });
    });
}

}  // namespace

extern "C" void quire_lora_add(const Lora* a) { a->is_bf16 ? add<bf16>(*a) : add<float>(*a); }
