// LoRA adapters of a step's tokens: kernels.reference.{adapter_slots,lora_add}. Few tokens: each reads its matrices for
// itself.
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

constexpr int64_t FEW = 8;  // rows of A that are a piece of work

template <class T> void shrink(const Lora& a, int64_t token, int64_t first) {
    const int64_t slot = a.slots[token], end = first + FEW < a.ranks ? first + FEW : a.ranks;
    const T *x = (const T*)a.x + token * a.x_stride, *down = (const T*)a.down + slot * a.down_stride;
    Floats totals[FEW] = {};  // sums that do not wait for each other
    int64_t k = 0;
    if (end == first + FEW) {
        for (; k + LANES <= a.in; k += LANES) {
            const Floats own = load_lanes(x + k);
            each<FEW>([&](auto i) { totals[i] += own * load_lanes(down + (first + i) * a.in + k); });
        }
    }
    for (; k < a.in; k += LANES) {
        const int n = int(a.in - k < LANES ? a.in - k : LANES);
        for (int64_t r = first; r < end; ++r)
            totals[r - first] += load_up_to(x + k, n) * load_up_to(down + r * a.in + k, n);
    }
    for (int64_t r = first; r < end; ++r) a.inner[token * a.ranks + r] = sum(totals[r - first]);
}

template <class T> void expand(const Lora& a, int64_t token, int64_t group, int64_t first, int64_t end) {
    const int64_t slot = a.slots[token];
    const float* inner = a.inner + token * a.ranks + group * a.rank;
    const T* up = (const T*)a.up + slot * a.up_stride;
    T* y = (T*)a.y + token * a.out;
    for (int64_t row = first; row < end; row += LANES) {
        const int n = int(end - row < LANES ? end - row : LANES);
        Floats totals[LANES] = {};
        for (int64_t r = 0; r < a.rank; r += LANES) {
            const int some = int(a.rank - r < LANES ? a.rank - r : LANES);
            const Floats own = load_up_to(inner + r, some);
            const T* at = up + row * a.rank + r;
            if (n == LANES && some == LANES) {
                each<LANES>([&](auto i) { totals[i] += own * load_lanes(at + i * a.rank); });
            } else {
                for (int i = 0; i < n; ++i) totals[i] += own * load_up_to(at + i * a.rank, some);
            }
        }
        const Floats factor = load_up_to(a.factor + slot * a.floats_stride + row, n),
                     shift = load_up_to(a.shift + slot * a.floats_stride + row, n);
        store_up_to(y + row, load_up_to(y + row, n) * factor + (shift + sums(totals)), n);
    }
}

template <class T> void add(const Lora& a) {
    const int64_t pieces = (a.ranks + FEW - 1) / FEW;
    pool.run(a.tokens * pieces, [&](int64_t i) {
        if (a.slots[i / pieces] >= 0) shrink<T>(a, i / pieces, i % pieces * FEW);
    });
    pool.run(a.tokens * a.num_blocks, [&](int64_t i) {
        const int32_t* block = a.blocks + 3 * (i % a.num_blocks);
        if (a.slots[i / a.num_blocks] >= 0) expand<T>(a, i / a.num_blocks, block[2], block[0], block[1]);
    });
}

}  // namespace

extern "C" void quire_lora_add(const Lora* a) { a->is_bf16 ? add<bf16>(*a) : add<float>(*a); }
